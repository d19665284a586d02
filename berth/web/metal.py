"""Bare metal as Ironic has it: nodes by provision state, and why one is held back. Read from Ironic, kept nowhere."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from berth.client.baremetal import NodeRecord, flavor_classes, node_record, unserved
from berth.settings import Settings
from berth.site import read_runtime
from berth.web.access import WebRole
from berth.web.api import caller_of, json_response, need, only
from berth.web.objects import ObjectApi
from berth.web.problems import Problem, problem_of
from bus.clock import Clock
from bus.contracts.objects import Flavor, ObjectKind
from bus.faults import Fault
from bus.port import BusError
from compute_sim.driver import DriverUnavailable
from compute_sim.drivers.ironic.api import IronicApi

# Ironic is read at most so often, however many pages show it.
METAL_AGE_S = 5.0


class MetalView(Struct, frozen=True, kw_only=True):
    """Nodes by uuid, how many are in each provision state, and flavors that no node can serve."""

    url: str
    states: dict[str, int]
    nodes: tuple[NodeRecord, ...]
    unserved_flavors: tuple[str, ...]


class MetalReader:
    """Reads Ironic as the compute service's settings have it, or as a running `berth up` has one."""

    def __init__(self, settings: Settings, objects: ObjectApi, clock: Clock) -> None:
        self._settings = settings
        self._objects = objects
        self._clock = clock
        self._reading = asyncio.Lock()
        self._found: MetalView | Problem = Problem(503, "ironic.unavailable", "Ironic has not been read yet")
        self._read_at = float("-inf")

    async def view(self) -> MetalView:
        """Ironic's nodes, at most METAL_AGE_S old. Raises Problem 503 or 504; that is kept as long, so that requests
        that came meanwhile do not wait for Ironic one after the other.
        """
        async with self._reading:
            if self._clock.monotonic() - self._read_at > METAL_AGE_S:
                self._found = await self._read_or_fault()
                self._read_at = self._clock.monotonic()
        if isinstance(self._found, Problem):
            kept = self._found
            raise Problem(kept.status, kept.code, kept.detail, headers=kept.headers)
        return self._found

    async def _read_or_fault(self) -> MetalView | Problem:
        try:
            return await self._read()
        except (Problem, Fault, BusError) as fault:
            problem = problem_of(fault)
            assert problem is not None, fault
            return problem

    async def _read(self) -> MetalView:
        config = self._settings.compute.ironic
        runtime = read_runtime(self._settings.state)
        if runtime is not None and runtime.ironic_url:
            config = replace(config, url=runtime.ironic_url)
        _, stored = await self._objects.stored(ObjectKind.FLAVOR)
        classes = flavor_classes({one.name: msgspec.convert(one.body, Flavor) for one in stored})
        api = IronicApi(config, clock=self._clock)
        api.open()
        try:
            raw = await api.raw_nodes()
        except DriverUnavailable as fault:
            raise Problem(503, "ironic.unavailable", f"{config.url}: {fault}") from fault
        finally:
            await api.close()
        nodes = tuple(sorted((node_record(one, classes) for one in raw), key=lambda node: node.uuid))
        states = dict(sorted(Counter(node.state for node in nodes).items()))
        return MetalView(url=config.url, states=states, nodes=nodes, unserved_flavors=unserved(classes, nodes))


class WebMetal:
    """The handler."""

    def __init__(self, metal: MetalReader) -> None:
        self._metal = metal

    def routes(self) -> list[Route]:
        """The routes below API_ROOT."""
        return [Route("/metal", self.show_metal, methods=["GET"])]

    async def show_metal(self, request: Request) -> Response:
        """Ironic's nodes by provision state, with what is wrong with each. Not for role project."""
        only(request)
        need(caller_of(request), WebRole.READER)
        return json_response(await self._metal.view())
