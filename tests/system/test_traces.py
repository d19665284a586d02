"""Traces, metrics and dashboards of a whole system, as an operator receives them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from msgspec import Struct

from berth.bus_client import BuildClient
from berth.config.settings import (
    BusSettings,
    CellSettings,
    ComputeSettings,
    DatabaseSettings,
    Settings,
    TraceSettings,
    UpSettings,
)
from berth.config.site import Site
from berth.up.in_one_process import LocalSystem, simulated_ironic
from berth.up.servers import SystemPlan
from berth.up.worker_processes import NO_TLS, WorkerProcesses
from berth.web.server import WebServer
from berth.web.sign_in_sessions import Access
from bus.clock import SystemClock, new_uuid
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import BuildEvent, BuildRequest
from bus.tracing.context import TraceContext
from bus.transport import Outgoing
from cell_conductor.config import ConductorConfig
from compute_sim.config import SimulatedConfig
from compute_sim.faults import Faults
from compute_sim.ironic_stand_in import Behaviour
from scheduler_worker.config import SchedulerConfig
from tests.kit.forks import run_berth
from tests.kit.otlp import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.kit.waiting import until
from tests.system.worker_processes import rig

# --- One trace a build, from the client's publish to its last event, over both buses of a real broker.


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
BY_HTTP = HOPS - {("client", "build"), ("scheduler", "scheduler.requests")} | {("scheduler", "scheduler.door")}
# The same of a live migration, that a command has asked the web server for.
MOVE_HOPS = {
    ("web", "POST /api/v1/builds/{uuid}/actions"),
    ("web", "request instance.action.v1"),
    ("scheduler", "scheduler.operators"),
    ("placement", "placement.requests"),
    ("conductor", "conductor.requests"),
    ("compute", "compute.{service}"),
    ("conductor", "conductor.results"),
    ("scheduler", "scheduler.builds"),
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
    compute: ComputeSettings,
    ratio: float = 1.0,
    nodes: int = 0,
) -> AsyncIterator[TracedSystem]:
    async with otlp_receiver() as receiver:
        settings = Settings(
            bus=BusSettings(url=amqp[0], prefix=amqp[1]),
            cells={CELL: CellSettings()},
            database=DatabaseSettings(url=postgres_url),
            traces=TraceSettings(endpoint=receiver.url, ratio=ratio, most_per_s=1000.0),
            up=UpSettings(
                nodes=nodes, computes_per_cell=min(compute.simulated.hosts, 1), schedulers=1, rest=False, web=False
            ),
            compute=compute,
            scheduler=SchedulerConfig(build_timeout_s=0.5 if compute.simulated.faults.hang_rate else 60.0),
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


async def test_each_hop_of_a_build_is_in_the_trace_that_its_client_began(
    amqp: tuple[str, str], postgres_url: str
) -> None:
    hosts = ComputeSettings(simulated=SimulatedConfig(hosts=2))
    async with traced_system(amqp, postgres_url, compute=hosts) as running:
        uuid = await running.build("m1.small")
        spans = await running.trace_of(uuid)
    assert HOPS - {(span.service, span.name) for span in spans} == set()
    assert_one_tree(spans)


async def test_an_alternate_that_the_cell_claims_itself_is_in_the_trace(
    amqp: tuple[str, str], postgres_url: str
) -> None:
    """The first host fails, so that the conductor claims and commands another: on its own bus, by its own record."""
    failing = ComputeSettings(
        simulated=SimulatedConfig(
            hosts=4, faults=Faults(fail_hosts=tuple(f"{CELL}-c1-0000{number}" for number in (1, 2, 3)))
        )
    )
    async with traced_system(amqp, postgres_url, compute=failing) as running:
        uuid = await running.build("m1.small")
        spans = await running.trace_of(uuid)
    names = [(span.service, span.name) for span in spans]
    assert names.count(("compute", "build")) > 1
    assert ("conductor", "request placement.claim.v1") in names
    assert_one_tree(spans)


async def test_what_a_deadline_makes_of_a_build_is_in_its_trace(amqp: tuple[str, str], postgres_url: str) -> None:
    """Its host never answers: what follows is the conductor's own, from its record of the instance."""
    hanging = ComputeSettings(simulated=SimulatedConfig(hosts=1, faults=Faults(hang_rate=1.0)))
    async with traced_system(amqp, postgres_url, compute=hanging) as running:
        uuid = await running.build("m1.small")
        assert running.client.watches[uuid].state == "failed"
        spans = await running.trace_of(uuid)
    commands = [span.attributes["berth.message"] for span in spans if span.name == "compute.{service}"]
    assert "Destroy" in commands
    assert_one_tree(spans)


async def test_the_calls_of_ironic_are_in_the_trace_and_its_notifications_begin_some(
    amqp: tuple[str, str], postgres_url: str
) -> None:
    async with traced_system(
        amqp, postgres_url, compute=ComputeSettings(simulated=SimulatedConfig(hosts=0)), nodes=8
    ) as running:
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
    amqp: tuple[str, str], postgres_url: str
) -> None:
    """The command is a process of its own; the web server answers before anything has happened."""
    async with traced_system(
        amqp, postgres_url, compute=ComputeSettings(simulated=SimulatedConfig(hosts=3))
    ) as running:
        moved = await running.build("m1.small")
        env = running.site.environment("web-test")
        web = WebServer(env, running.site.settings, host="127.0.0.1", port=0, access=Access(None, env.clock))
        await web.open()
        migrate = ("instance", "migrate", moved, "--live", "--wait")
        called = {**running.environment, "BERTH_URL": web.url}
        ran = await asyncio.to_thread(run_berth, *migrate, env=called, timeout_s=WAIT_S)
        assert ran.returncode == 0, ran.stderr
        trace = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
        async with httpx.AsyncClient(base_url=web.url, timeout=WAIT_S, verify=NO_TLS) as caller:
            body = {"flavor": "m1.small", "project_id": "p"}
            built = await caller.post("/api/v1/builds", json=body)
            stopped = await caller.post(
                f"/api/v1/builds/{moved}/actions", json={"kind": "stop"}, headers={"traceparent": trace.header}
            )
            assert (built.status_code, stopped.status_code) == (202, 202)
            async with asyncio.timeout(WAIT_S):
                while not (await caller.get(stopped.headers["location"])).json().get("terminal"):
                    pass
        await web.close()
        await running.spans_of("")
    spans = running.below("web", "POST /api/v1/builds/{uuid}/actions")
    assert {(span.service, span.name) for span in spans} >= MOVE_HOPS
    assert_one_tree(spans)
    spans = running.below("web", "POST /api/v1/builds")
    assert {(span.service, span.name) for span in spans} >= BY_HTTP
    assert spans[0].attributes["http.response.status_code"] == 202
    assert_one_tree(spans)
    spans = [span for span in running.receiver.spans if span.trace == trace.trace_id]
    names = {(span.service, span.name) for span in spans}
    assert {("web", "POST /api/v1/builds/{uuid}/actions"), ("compute", "compute.{service}")} <= names


async def test_the_last_event_carries_the_trace_that_a_foreign_client_began(
    amqp: tuple[str, str], postgres_url: str
) -> None:
    """No sampling of ours, and no header of ours: the client's own decides, and comes back with each event."""
    trace = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
    hosts = ComputeSettings(simulated=SimulatedConfig(hosts=2))
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
        consumer = Consumer(listener, "client.feed.{process}", note, process="listener")
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


# --- The files of `deploy/` for an operator of Prometheus and Grafana, on a real Prometheus that scrapes a running
# berth.


DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "berth.rules.yml"
PATIENCE_S = 60.0
POLL_S = 0.2
# Nothing of these is there while all is well, or without bare metal or a Nova.
QUIET = re.compile(r"berth_(bus_(stalls|invariants_broken)|ironic|nova|conductor_(quarantined|breaker_trips))")


def dashboard_queries() -> Iterator[str]:
    """Every query of the dashboard, with Grafana's own variable filled in."""
    for panel in json.loads((DEPLOY / "grafana" / "berth.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "30s")


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool")
    assert found, "scripts/test installs the package prometheus"
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE_S)


def test_the_rules_are_well_formed_and_do_what_they_promise() -> None:
    checked = promtool("check", "rules", str(RULES))
    assert checked.returncode == 0, checked.stderr
    tested = promtool("test", "rules", str(RULES.with_suffix(".test.yml")))
    assert tested.returncode == 0, tested.stdout + tested.stderr
    alerts = set(re.findall(r"- alert: (\w+)", RULES.read_text()))
    fired = set(re.findall(r"- alertname: (\w+)", RULES.with_suffix(".test.yml").read_text()))
    assert alerts == fired, "each alert has a case in which it fires"


@asynccontextmanager
async def prometheus(directory: Path, processes: WorkerProcesses) -> AsyncIterator[httpx.AsyncClient]:
    """A private Prometheus that scrapes these workers every second and evaluates berth's rules."""
    targets = [f"127.0.0.1:{worker.port}" for worker in processes.workers.values()]
    config = directory / "prometheus.yml"
    config.write_text(
        json.dumps(  # JSON is YAML
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(RULES)],
                "scrape_configs": [{"job_name": "berth", "static_configs": [{"targets": targets}]}],
            }
        )
    )
    found = shutil.which("prometheus")
    assert found, "scripts/test installs the package prometheus"
    process = await asyncio.create_subprocess_exec(
        found,
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            address = await listening(process.stderr)
        reading = asyncio.create_task(process.stderr.read())  # a full pipe would stop it
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=PATIENCE_S, verify=NO_TLS) as client:
            async with asyncio.timeout(PATIENCE_S):
                # It listens a moment before it answers queries.
                while (await client.get("/-/ready")).status_code != httpx.codes.OK:  # noqa: ASYNC110  (as below)
                    await asyncio.sleep(POLL_S)
            yield client
        reading.cancel()
    finally:
        process.terminate()
        await process.wait()


async def listening(log: asyncio.StreamReader) -> str:
    """The address that Prometheus reports to listen on, once it does."""
    output = []
    async for line in log:
        output.append(line.decode())
        if found := re.search(r'msg="Listening on" address=(\S+)', output[-1]):
            return found[1]
    raise AssertionError("".join(output))


async def ask(client: httpx.AsyncClient, query: str) -> list[dict[str, object]]:
    answer = await client.get("/api/v1/query", params={"query": query})
    assert answer.status_code == 200, (query, answer.text)
    result: list[dict[str, object]] = answer.json()["data"]["result"]
    return result


async def until_it_has(client: httpx.AsyncClient, query: str) -> list[dict[str, object]]:
    return await until(lambda: ask(client, query))


@pytest.mark.system
@pytest.mark.rabbitmq
@pytest.mark.postgres
async def test_every_query_of_the_dashboard_finds_its_metrics_on_a_running_system(tmp_path: Path) -> None:
    faults = Faults(fail_rate=0.3)
    plan = SystemPlan(
        cells=("cell1", "cell2"),
        compute=ComputeSettings(simulated=SimulatedConfig(hosts=5, faults=faults)),
        durable=False,
    )
    async with rig(plan) as whole, prometheus(tmp_path, whole.processes) as client:
        workers = len(whole.processes.workers)
        await until_it_has(client, f'count(up{{job="berth"}} == 1) == {workers}')
        report = await whole.load(100, mix={"m1.tiny": 1.0})
        assert report.active > 0
        # A counter that appears with its first value has no rate before it moves again.
        await until_it_has(client, f"max(berth_fleet_used) >= {report.active}")
        await whole.load(20, mix={"m1.tiny": 1.0})

        for query in dashboard_queries():
            if QUIET.search(query):
                await ask(client, query)  # well-formed, and nothing to find
            else:
                assert await until_it_has(client, query), query

        def value(found: list[dict[str, object]]) -> float:
            ((_, number),) = [one["value"] for one in found]  # type: ignore[misc]
            return float(number)

        assert value(await until_it_has(client, 'sum(berth:fleet_hosts:max{state="up"})')) == 10
        ended = 'sum(max_over_time(berth_scheduler_builds_total{state="active"}[10m]))'
        assert value(await until_it_has(client, f"{ended} >= {report.active}")) >= report.active
        alerts = (await client.get("/api/v1/rules", params={"type": "alert"})).json()["data"]["groups"]
        assert {rule["health"] for group in alerts for rule in group["rules"]} == {"ok"}
