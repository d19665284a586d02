"""One trace a build, from the client's publish to its last event, over both buses of a real broker."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from msgspec import Struct

from berth.client import BuildClient
from berth.settings import BusSettings, CellSettings, DatabaseSettings, Settings, TraceSettings, UpSettings
from berth.site import Site
from berth.trial.ironic_stand_in import Behaviour
from berth.trial.up import LocalSystem, simulated_ironic
from berth.trial.worker_processes import NO_TLS
from berth.web.access import Access
from berth.web.server import WebServer
from bus.clock import SystemClock, new_uuid
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import BuildEvent, BuildRequest
from bus.port import Outgoing
from bus.tracing.context import TraceContext
from cell_conductor.config import ConductorConfig
from compute_sim.config import ComputeConfig, Faults
from scheduler_worker.config import SchedulerConfig
from tests.kit.otlp import OtlpReceiver, ReceivedSpan, otlp_receiver

WAIT_S = 60.0
CELL = "cell1"
RNG = random.Random(14)
# Each hop of a build on a simulated host: which service, and what it does. A hop that loses the trace is missing.
HOPS = {
    ("client", "build"),
    ("scheduler", "scheduler.requests"),
    ("scheduler", "request placement.claim.v1"),
    ("placement", "placement.requests"),
    ("placement", "transaction"),
    ("scheduler", "transaction"),
    ("conductor", "conductor.requests"),
    ("conductor", "transaction"),
    ("compute", "compute.{service}"),
    ("compute", "build"),
    ("conductor", "conductor.results"),
    ("scheduler", "scheduler.builds"),
    ("client", "client.feed.{process}"),
}
# The same of a live migration, from the command that requests it.
MOVE_HOPS = {
    ("cli", "move"),
    ("cli", "request instance.move.v1"),
    ("scheduler", "scheduler.requests"),
    ("placement", "placement.requests"),
    ("conductor", "conductor.requests"),
    ("compute", "compute.{service}"),
    ("conductor", "conductor.results"),
    ("scheduler", "scheduler.builds"),
    ("cli", "client.moves.{process}"),
}


class TracedSystem(Struct):
    """A running system whose traces go to a receiver."""

    site: Site
    system: LocalSystem
    client: BuildClient
    receiver: OtlpReceiver

    async def build(self, flavor: str) -> str:
        uuid = new_uuid(RNG)
        await self.client.boot([BuildRequest(instance_uuid=uuid, flavor=flavor, project_id="p")])
        assert await self.client.wait(WAIT_S)
        return uuid

    async def spans_of(self, trace: str) -> list[ReceivedSpan]:
        """All spans of a trace, once everything has ended and was exported."""
        await self.system.in_process.stop()
        await self.site.close()
        return [span for span in self.receiver.spans if span.trace == trace]

    async def trace_of(self, uuid: str) -> list[ReceivedSpan]:
        await self.system.in_process.stop()
        await self.site.close()
        roots = [
            span for span in self.receiver.spans if not span.parent and span.attributes.get("berth.instance") == uuid
        ]
        (root,) = roots
        return [span for span in self.receiver.spans if span.trace == root.trace]

    def below(self, service: str, name: str) -> list[ReceivedSpan]:
        """The largest trace that begins with such a span, which comes first."""
        spans = self.receiver.spans
        roots = [one for one in spans if not one.parent and (one.service, one.name) == (service, name)]
        traces = [[root, *(one for one in spans if one.trace == root.trace and one is not root)] for root in roots]
        return max(traces, key=len, default=[])

    @property
    def environment(self) -> dict[str, str]:
        """The settings that a command needs to reach this system, and to have its traces received."""
        settings = self.site.settings
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        return inherited | {
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "BERTH_BUS__URL": settings.bus.url,
            "BERTH_BUS__PREFIX": settings.bus.prefix,
            "BERTH_DATABASE__URL": settings.database.url,
            "BERTH_CELLS": f'{{"{CELL}": {{}}}}',
            "BERTH_TRACES__ENDPOINT": self.receiver.url,
            "BERTH_TRACES__RATIO": "1.0",
        }


@asynccontextmanager
async def traced_system(
    amqp: tuple[str, str],
    postgres_url: str,
    *,
    compute: ComputeConfig,
    protocol: str = "http/json",
    ratio: float = 1.0,
    nodes: int = 0,
) -> AsyncIterator[TracedSystem]:
    async with otlp_receiver() as receiver:
        settings = Settings(
            bus=BusSettings(url=amqp[0], prefix=amqp[1]),
            cells={CELL: CellSettings()},
            database=DatabaseSettings(url=postgres_url),
            traces=TraceSettings(endpoint=receiver.url, ratio=ratio, most_per_s=1000.0, protocol=protocol),  # type: ignore[arg-type]
            up=UpSettings(nodes=nodes, computes_per_cell=min(compute.hosts, 1), schedulers=1, rest=False, web=False),
            compute=compute,
            scheduler=SchedulerConfig(build_timeout_s=0.5 if compute.faults.hang_rate else 60.0),
            conductor=ConductorConfig(answer_timeout_s=0.2, sweep_interval_s=0.1),
        )
        site = Site(settings, clock=SystemClock(), seed=14)
        quick = Behaviour(verify_s=0.01, deploy_s=0.05, undeploy_s=0.01, clean_s=0.05)
        async with simulated_ironic(site, quick) as ironic:
            system = LocalSystem(site)
            await system.start(ironic_url=ironic.url if ironic is not None else None)
            client = BuildClient(site.bus("client"), clock=site.clock, process="client")
            await client.open()
            try:
                yield TracedSystem(site, system, client, receiver)
            finally:
                await client.close()
                await system.in_process.stop()
                await site.close()


def assert_one_tree(spans: list[ReceivedSpan]) -> None:
    ids = {span.span for span in spans}
    assert [span for span in spans if span.parent and span.parent not in ids] == []
    assert len([span for span in spans if not span.parent]) == 1


@pytest.mark.parametrize("protocol", ["http/json", "http/protobuf"])
async def test_each_hop_of_a_build_is_in_the_trace_that_its_client_began(
    amqp: tuple[str, str], postgres_url: str, protocol: str
) -> None:
    hosts = ComputeConfig(hosts=2)
    async with traced_system(amqp, postgres_url, compute=hosts, protocol=protocol) as running:
        uuid = await running.build("m1.small")
        spans = await running.trace_of(uuid)
    assert HOPS - {(span.service, span.name) for span in spans} == set()
    assert_one_tree(spans)


async def test_an_alternate_that_the_cell_claims_itself_is_in_the_trace(
    amqp: tuple[str, str], postgres_url: str
) -> None:
    """The first host fails, so that the conductor claims and commands another: on its own bus, by its own record."""
    failing = ComputeConfig(hosts=4, faults=Faults(fail_hosts=tuple(f"{CELL}-c1-0000{number}" for number in (1, 2, 3))))
    async with traced_system(amqp, postgres_url, compute=failing) as running:
        uuid = await running.build("m1.small")
        spans = await running.trace_of(uuid)
    names = [(span.service, span.name) for span in spans]
    assert names.count(("compute", "build")) > 1
    assert ("conductor", "request placement.claim.v1") in names
    assert_one_tree(spans)


async def test_what_a_deadline_makes_of_a_build_is_in_its_trace(amqp: tuple[str, str], postgres_url: str) -> None:
    """Its host never answers: what follows is the conductor's own, from its record of the instance."""
    hanging = ComputeConfig(hosts=1, faults=Faults(hang_rate=1.0))
    async with traced_system(amqp, postgres_url, compute=hanging) as running:
        uuid = await running.build("m1.small")
        assert running.client.tracks[uuid].state == "failed"
        spans = await running.trace_of(uuid)
    commands = [span.attributes["berth.message"] for span in spans if span.name == "compute.{service}"]
    assert "Destroy" in commands
    assert_one_tree(spans)


async def test_the_calls_of_ironic_are_in_the_trace_and_its_notifications_begin_some(
    amqp: tuple[str, str], postgres_url: str
) -> None:
    async with traced_system(amqp, postgres_url, compute=ComputeConfig(hosts=0), nodes=8) as running:
        uuid = await running.build("bm.gold")
        spans = await running.trace_of(uuid)
    names = {(span.service, span.name) for span in spans}
    assert {("compute", "ironic PUT"), ("compute", "ironic PATCH")} <= names
    assert_one_tree(spans)
    announced = running.below("ironic-sync", "ironic notification")
    assert {"berth.node", "berth.event", "berth.cause"} <= announced[0].attributes.keys()
    names = {(span.service, span.name) for span in announced}
    assert {("ironic-sync", "ironic GET"), ("placement", "placement.inventory"), ("placement", "transaction")} <= names
    assert_one_tree(announced)


async def test_a_move_from_the_command_line_and_a_request_over_http_begin_a_trace(
    amqp: tuple[str, str], postgres_url: str, tmp_path: Path
) -> None:
    """The command is a process of its own; the web server answers before anything has happened."""
    async with traced_system(amqp, postgres_url, compute=ComputeConfig(hosts=3)) as running:
        moved = await running.build("m1.small")
        migrate = [sys.executable, "-m", "berth", "migrate", moved, "--live", "--wait"]
        process = await asyncio.create_subprocess_exec(*migrate, env=running.environment, cwd=tmp_path)
        assert await process.wait() == 0
        env = running.site.environment("web-test")
        web = WebServer(env, running.site.settings, host="127.0.0.1", port=0, access=Access(None, env.clock))
        await web.open()
        trace = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
        async with httpx.AsyncClient(base_url=web.url, timeout=WAIT_S, verify=NO_TLS) as caller:
            body = {"flavor": "m1.small", "project_id": "p"}
            built = await caller.post("/api/v1/builds", json=body)
            stopped = await caller.post(
                f"/api/v1/builds/{moved}/moves", json={"kind": "stop"}, headers={"traceparent": trace.header}
            )
            assert (built.status_code, stopped.status_code) == (202, 202)
            async with asyncio.timeout(WAIT_S):
                while not (await caller.get(stopped.headers["location"])).json().get("terminal"):
                    pass
        await web.close()
        await running.spans_of("")
    spans = running.below("cli", "move")
    assert {(span.service, span.name) for span in spans} >= MOVE_HOPS
    assert spans[0].attributes["berth.move"] == "live-migrate"
    assert_one_tree(spans)
    spans = running.below("web", "POST /api/v1/builds")
    assert {(span.service, span.name) for span in spans} >= HOPS - {("client", "build")}
    assert spans[0].attributes["http.response.status_code"] == 202
    assert_one_tree(spans)
    spans = [span for span in running.receiver.spans if span.trace == trace.trace_id]
    names = {(span.service, span.name) for span in spans}
    assert {("web", "POST /api/v1/builds/{uuid}/moves"), ("compute", "compute.{service}")} <= names


async def test_the_last_event_carries_the_trace_that_a_foreign_client_began(
    amqp: tuple[str, str], postgres_url: str
) -> None:
    """No sampling of ours, and no header of ours: the client's own decides, and comes back with each event."""
    trace = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
    hosts = ComputeConfig(hosts=2)
    async with traced_system(amqp, postgres_url, compute=hosts, ratio=0.0) as running:
        transport = running.site.transport("api", process="foreign")
        await transport.open()
        headers: dict[str, str] = {}
        ended = asyncio.Event()

        async def note(batch: Sequence[Received]) -> Sequence[Outcome]:
            for one in batch:
                if isinstance(one.message, BuildEvent):
                    headers[one.message.state.value] = one.meta.traceparent or ""
                    if one.message.terminal:
                        ended.set()
            return [Done()] * len(batch)

        listener = running.site.bus("listener")
        await listener.open()
        consumer = listener.consumer("client.feed.{process}", note, process="listener")
        await consumer.start()
        uuid = new_uuid(RNG)
        body = b'{"instance_uuid": "%s", "flavor": "m1.small", "project_id": "p"}' % uuid.encode()
        request = Outgoing(
            exchange="berth",
            routing_key="build.request.p",
            body=body,
            headers={"traceparent": trace.header},
            mandatory=True,
        )
        await transport.publish(request)
        async with asyncio.timeout(WAIT_S):
            await ended.wait()
        await consumer.drain(1.0)
        await listener.close()
        await transport.close()
        spans = await running.spans_of(trace.trace_id)
    assert {header[3:35] for header in headers.values()} == {trace.trace_id}
    assert {(span.service, span.name) for span in spans} >= HOPS - {
        ("client", "build"),
        ("client", "client.feed.{process}"),
    }
    assert {span.trace for span in running.receiver.spans if span.attributes.get("berth.instance") == uuid} == {
        trace.trace_id
    }
