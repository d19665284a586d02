"""Bare metal: an Ironic stand-in over real HTTP, drivers and services on it, and ways to it that disturb requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

import httpx
import uvicorn
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from berth.trial.embedded.process import free_port
from berth.trial.ironic_stand_in import Behaviour, IronicStandIn, NodePool, Silent
from berth.trial.worker_processes import NO_TLS
from bus.clock import SystemClock
from bus.contracts.cell import InstanceSpec
from compute_sim.config import ComputeConfig, IronicConfig
from compute_sim.driver import Build, ChangeOrder, ChangeResult
from compute_sim.drivers.ironic.driver import BareMetal
from compute_sim.fleet import Fleet
from tests.integration.compute.harness import CELL, DEPLOYMENT, PATIENCE_S, SERVICE, Cell, Life
from tests.kit.waiting import until

INSTANCE = "20000000-0000-4000-8000-000000000000"
QUICK = Behaviour(verify_s=0.001, deploy_s=0.01, undeploy_s=0.005, clean_s=0.005)
QUICKLY = {"poll_interval_s": 0.005, "max_poll_interval_s": 0.05, "watch_interval_s": 0.01}
FAILING = replace(QUICK, deploy_fails=1.0)


class Driver(BareMetal):
    """A driver whose calls end within PATIENCE_S."""

    async def spawn(self, build: Build) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return await super().spawn(build)

    async def destroy(
        self, host_uuid: str, instance_uuid: str = INSTANCE, attempt: int = 1, deployment: str | None = DEPLOYMENT
    ) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await super().destroy(host_uuid, instance_uuid, attempt, deployment)

    async def change(self, order: ChangeOrder) -> ChangeResult:
        async with asyncio.timeout(PATIENCE_S):
            return await super().change(order)


class Metal:
    """An Ironic with some nodes, whose drivers are closed with it."""

    def __init__(self, nodes: int = 3) -> None:
        clock, rng = SystemClock(), random.Random(1)
        self.stand_in = IronicStandIn(Silent(), clock=clock, rng=rng, behaviour=QUICK, port=free_port())
        self.pool = self.stand_in.pool
        self.pool.plan(nodes)
        self.nodes = self.pool.nodes
        self.fleets: dict[str, Fleet] = {}
        self._lives: list[Life] = []
        self._opened: list[Driver] = []

    async def open(self) -> None:
        await self.stand_in.start()

    async def close(self) -> None:
        for life in self._lives:
            if not life.task.done():
                await life.stop()
        for driver in self._opened:
            await driver.close()
        await self.stand_in.stop()

    @property
    def first(self) -> str:
        """The first node's uuid."""
        return next(iter(self.nodes))

    @property
    def node(self) -> dict[str, Any]:
        """The first node."""
        return self.nodes[self.first]

    @property
    def requested(self) -> list[tuple[str, str]]:
        """The changes that were requested of Ironic: method and node."""
        return self.stand_in.requested

    def config(self, **more: Any) -> IronicConfig:
        return IronicConfig(**{"url": self.stand_in.url, **QUICKLY, **more})

    def made(self, kind: type[Driver] = Driver, **how: Any) -> Any:
        """A driver for a service to open, as `driver_of` makes it."""
        return driver_of(kind, **{"url": self.stand_in.url, **QUICKLY, **how})

    async def driver(self, **how: Any) -> Driver:
        """An open driver."""
        self._opened.append(self.made(**how))
        await self._opened[-1].open()
        return self._opened[-1]

    @contextlib.asynccontextmanager
    async def watching(self, driver: Driver) -> AsyncIterator[None]:
        """While the driver looks for changes."""
        task = asyncio.create_task(driver.watch())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def deployed(self, wanted: Build, **config: Any) -> Driver:
        """A driver that has built this."""
        driver = await self.driver(**config)
        await driver.spawn(wanted)
        return driver

    async def serve(self, cell: Cell, service: str = SERVICE, driver: BareMetal | None = None, **more: Any) -> Life:
        """A service of these nodes; the next one of a name has its records."""
        config = ComputeConfig(driver="ironic", hosts=0, ironic=self.config(), **more)
        fleet = self.fleets.setdefault(service, Fleet.planned(config, CELL, service))
        self._lives.append(await cell.compute(config, fleet, service=service, driver=driver))
        return self._lives[-1]

    async def in_state(self, state: str, node: str = "") -> None:
        """Wait until the node is in this provision state."""
        await until(lambda: self.nodes[node or self.first]["provision_state"] == state)


def driver_of(
    kind: type[Driver] = Driver,
    *,
    cell: str = CELL,
    service: str = SERVICE,
    clock: SystemClock | None = None,
    way: httpx.AsyncBaseTransport | None = None,
    **config: Any,
) -> Driver:
    """A driver with these settings. way: to Ironic."""
    return kind(IronicConfig(**config), cell=cell, service=service, clock=clock or SystemClock(), transport=way)


def build(node: str, instance: str = INSTANCE, attempt: int = 1, project: str = "acme", **spec: Any) -> Build:
    made = InstanceSpec(instance_uuid=instance, project_id=project, **spec)
    return Build(node, made, attempt, {node: {"CUSTOM_GOLD": 1}}, DEPLOYMENT)


def mark(instance: str = INSTANCE, **changed: object) -> dict[str, object]:
    made = {"deployment": DEPLOYMENT, "cell": CELL, "service": SERVICE, "instance": instance, "attempt": 1}
    return {"berth": {**made, **changed}}


async def fault(doing: Awaitable[object]) -> tuple[type[Exception], str]:
    """The fault that it ends with, and its code, or its text where it has none."""
    try:
        await doing
    except Exception as raised:
        return type(raised), getattr(raised, "code", str(raised))
    raise AssertionError("it ended without a fault")


# --- ways to Ironic

Plan = Callable[[httpx.Request], httpx.Response | None]


class Way(httpx.AsyncBaseTransport):
    """A way to Ironic.

    plan: called with each request; an answer of its own is taken instead of Ironic's. after: called with each request
    that Ironic has answered. unanswered: how many requests found no server; most: how many were under way at once.
    """

    def __init__(self, plan: Plan = lambda _: None, after: Callable[[httpx.Request], None] = lambda _: None) -> None:
        self._inner = httpx.AsyncHTTPTransport(verify=NO_TLS)
        self._plan, self._after = plan, after
        self.unanswered = self.under_way = self.most = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if (planned := self._plan(request)) is not None:
                return planned
            answer = await self._inner.handle_async_request(request)
            await answer.aread()
            self._after(request)
            return answer
        except httpx.TransportError:
            self.unanswered += 1
            raise
        finally:
            self.under_way -= 1

    async def aclose(self) -> None:
        await self._inner.aclose()


def refusing(method: str, times: int, status: int, **headers: str) -> Way:
    """One on which so many requests of a method are answered with this status. An empty method: all."""
    left = [times]

    def plan(request: httpx.Request) -> httpx.Response | None:
        if method not in ("", request.method) or not left[0]:
            return None
        left[0] -= 1
        return httpx.Response(status, headers=headers)

    return Way(plan)


class Skipping(SystemClock):
    """Each sleep takes so much longer than it should, by its own reckoning, and no time by anyone else's."""

    def __init__(self, factor: float = 0.0) -> None:
        self._factor = factor
        self._skipped = 0.0
        self.slept: list[float] = []

    def skip(self, seconds: float) -> None:
        self._skipped += seconds

    def monotonic(self) -> float:
        return super().monotonic() + self._skipped

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._skipped += seconds * self._factor
        await asyncio.sleep(0)


# --- servers


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, **how: Any) -> AsyncIterator[str]:
    """The address that it is served at, without a scheme."""
    socket_ = socket.create_server(("127.0.0.1", 0))
    # A client that stood still finds its connection open.
    config = uvicorn.Config(app, log_config=None, lifespan="off", loop="none", timeout_keep_alive=75, **how)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[socket_]))
    try:
        await until(lambda: server.started)
        yield f"127.0.0.1:{socket_.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def guarded(
    passes: Callable[[dict[bytes, bytes]], bool], certificate: Any = None, behaviour: Behaviour = QUICK
) -> AsyncIterator[tuple[NodePool, str]]:
    """An Ironic that answers requests whose headers pass, over TLS where it has a certificate; and its address."""
    ironic = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=behaviour)
    ironic.pool.plan(2)
    inner: ASGIApp = ironic.app()

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        answer = inner if passes(dict(scope["headers"])) else Response(status_code=401)
        await answer(scope, receive, send)

    tls = {} if certificate is None else {"ssl_certfile": certificate.file, "ssl_keyfile": certificate.key}
    async with listening(guard, **tls) as address:
        yield ironic.pool, f"{'https' if tls else 'http'}://{address}"
        await ironic.pool.stop()
