"""The demonstration: 1,000 machines through the whole system with planned faults, judged at the end.

`scripts/demo` runs it: embedded PostgreSQL, memory buses, two cells, 200 simulated hypervisors, 40 bare-metal nodes
behind a simulated Ironic, every worker real.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from msgspec import Struct
from prometheus_client import REGISTRY
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from berth.audit.facts import gather, rest
from berth.audit.invariants import InvariantResult, check_invariants
from berth.bus_client import BuildClient
from berth.config.ports import ServerFailed
from berth.config.settings import BusSettings, ComputeSettings, DatabaseSettings, Settings, UpSettings
from berth.config.site import Site, process_name
from berth.text import printable, render_funnel, render_results, render_rows
from berth.up.embedded.__main__ import EXIT_NO_SERVER
from berth.up.embedded.process import ServerMissing
from berth.up.in_one_process import LocalSystem, simulated_ironic, site
from bus.service.telemetry import configure_logging
from compute_sim.config import HostSize, SimulatedConfig
from compute_sim.faults import Faults
from compute_sim.ironic_stand_in import Behaviour, IronicStandIn
from ironic_sync.config import IronicSyncConfig
from lab.feed_watch import FeedWatch, RecordingClient
from lab.load import LoadPlan, LoadReport, run_load
from lab.load.plan import draw_requests, is_metal
from lab.load.report.summary import Failure

REQUESTS = 1000
HYPERVISORS_PER_SERVICE = 50
NODES = 40
REST_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 120.0
OUTCOMES = ("claimed", "conflict", "no_capacity", "consumer_conflict", "provider_removed")
DEAD_FOR_S = 1.0  # how long the compute service that dies stays dead
FAILING_HOST = "cell2-c1-00007"
BARE_METAL = "bm."
# More bare metal is requested than there is, so that some requests fail and are explained.
MIX = {
    "m1.tiny": 34.0, "m1.small": 34.0, "m1.medium": 18.0, "m1.large": 6.0, "gpu.small": 4.0,
    "bm.gold": 4.5, "bm.silver": 1.8,
}  # fmt: skip
PLANNED = (
    "{requests:,} builds are requested at once. {scarce} So at least {short} of them are meant to fail, "
    "and to be explained. Meanwhile some builds fail on their hosts, one host fails always, and a compute service dies."
)
NO_NODE = frozenset({"no_valid_host", "max_retries_exceeded"})
PERCENTILES = ("p50", "p90", "p95", "p99", "max")
FAILURES_SHOWN = 12  # kinds of failure
HOST = HostSize(vcpus=16, memory_mb=65_536, disk_gb=2_000)


class Demo(Struct, frozen=True, kw_only=True):
    """The content of `--json`. boots_per_s: of everything, the dead service's time and bare-metal deploys included."""

    requests: int
    active: int
    failed: int
    planned_failures: int
    boots_per_s: float
    latency_ms: dict[str, float]
    alternates_used: int
    load: LoadReport
    claims: dict[str, int]
    claim_retries: dict[str, int]
    faults: dict[str, object]
    invariants: dict[str, bool]
    verdicts: tuple[InvariantResult, ...]


def settings(seed: int) -> Settings:
    """The demonstration's settings: nothing outside this process, faults planned from the seed."""
    faults = Faults(
        delay_min_s=0.02, delay_max_s=0.25, fail_rate=0.05, leftover_rate=0.3, fail_hosts=(FAILING_HOST,)
    )  # fmt: skip
    return Settings(
        bus=BusSettings(),
        database=DatabaseSettings(),
        up=UpSettings(schedulers=2, placements=2, computes_per_cell=2, nodes=NODES),
        ironic_sync=IronicSyncConfig(resync_interval_s=2.0),
        compute=ComputeSettings(
            simulated=SimulatedConfig(
                hosts=HYPERVISORS_PER_SERVICE, sizes=(HOST,), seed=seed, faults=faults, numa_share=0.05
            ),
            report_interval_s=3.0,
        ),
    )


async def demonstrate(seed: int, console: Console) -> Demo:
    """The whole demonstration; returns the summary to be shown and written."""
    plan = LoadPlan(boots=REQUESTS, mix=MIX, project_id="demo", timeout_s=LOAD_TIMEOUT_S)
    behaviour = Behaviour(verify_s=0.02, deploy_s=0.2, undeploy_s=0.05, clean_s=0.1)
    began = time.monotonic()
    async with site(settings(seed), directory=None, seed=seed) as here, simulated_ironic(here, behaviour) as ironic:
        assert ironic is not None
        system = LocalSystem(here)
        await system.start(ironic_url=ironic.url)
        client = RecordingClient(here.bus("client"), clock=here.clock, process=process_name("demo"))
        watch = FeedWatch(here.bus("feed-watch"))
        await asyncio.gather(client.open(), watch.open())
        try:
            console.print(f"up after {time.monotonic() - began:.1f} s: {_inventory(system, ironic)}")
            shortage = short(plan, seed, ironic.pool.nodes.values())
            console.print(planned(plan, shortage), soft_wrap=True)
            report, died = await _load(client, system, plan, seed, console)
            await rest(here, timeout_s=REST_TIMEOUT_S)
            results = await _check_invariants(here, client, watch)
        finally:
            await asyncio.gather(client.close(), watch.close())
            await system.in_process.stop()
    return Demo(
        requests=report.requests,
        active=report.active,
        failed=report.failed + report.refused,
        planned_failures=failed_as_planned(report.failures, shortage),
        boots_per_s=round(report.boots_per_s, 1),
        latency_ms=report.latency_ms,
        alternates_used=report.alternates_used,
        load=report,
        claims=dict.fromkeys(OUTCOMES, 0) | _counter("berth_scheduler_claims", "outcome"),
        claim_retries=_counter("berth_scheduler_claim_retries", "outcome"),
        faults={
            "spawn_fail_rate": 0.05,
            "host_that_always_fails": FAILING_HOST,
            "compute_service_that_died": died,
            "builds_failed_on_hosts": _counter("berth_compute_builds", "outcome"),
        },
        invariants={result.name: result.holds for result in results},
        verdicts=results,
    )


def short(plan: LoadPlan, seed: int, nodes: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """{flavor: (builds, free nodes)} where more nodes are requested than there are: these builds cannot all succeed.

    nodes: of the simulated Ironic, as its API has them.
    """
    requested = Counter(request.flavor for request in draw_requests(plan, random.Random(seed)))
    free = Counter(f"{BARE_METAL}{str(node['resource_class']).rpartition('-')[2]}" for node in nodes if _is_free(node))
    return {
        flavor: (count, free[flavor])
        for flavor, count in requested.items()
        if is_metal(flavor) and count > free[flavor]
    }


def failed_as_planned(failures: Sequence[Failure], shortage: Mapping[str, tuple[int, int]]) -> int:
    """How many builds found no node because more were requested than there are.

    They may be more than the difference: a node is being cleaned for a while after a build has failed there.
    """
    return sum(one.flavor in shortage and one.code in NO_NODE for one in failures)


def planned(plan: LoadPlan, shortage: Mapping[str, tuple[int, int]]) -> str:
    """The plan of the demo, and how many builds are to fail: more nodes of a flavor are requested than there are."""
    words = [f"{count} are of {flavor}, and there are {free} such nodes." for flavor, (count, free) in shortage.items()]
    missing = sum(count - free for count, free in shortage.values())
    return PLANNED.format(requests=plan.boots, scarce=" ".join(sorted(words)), short=missing)


def _is_free(node: Mapping[str, Any]) -> bool:
    return node["provision_state"] == "available" and not node["maintenance"] and bool(node["resource_class"])


async def _load(
    client: BuildClient, system: LocalSystem, plan: LoadPlan, seed: int, console: Console
) -> tuple[LoadReport, str]:
    """Fire everything at once; halfway one compute service (its name is returned) dies, and comes back a bit later."""
    victim = system.computes[0]
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console,
    )  # fmt: skip
    with bar:
        task = bar.add_task(f"{plan.boots} builds at once", total=plan.boots)

        async def accident() -> None:
            await client.until(lambda: 0 < client.unfinished <= plan.boots // 2, plan.timeout_s)
            await system.kill_compute(victim)
            bar.update(task, description=f"compute service {victim} has died")
            await client.bus.clock.sleep(DEAD_FOR_S)
            await system.revive_compute(victim)
            bar.update(task, description=f"compute service {victim} is back")

        trouble = asyncio.create_task(accident())
        report = await run_load(
            client, plan, clock=client.bus.clock, rng=random.Random(seed),
            progress=lambda done, requested: bar.update(task, completed=done, total=requested),
        )  # fmt: skip
        await trouble
    return report, victim


async def _check_invariants(here: Site, client: RecordingClient, watch: FeedWatch) -> tuple[InvariantResult, ...]:
    accepted = list(client.watches)
    connections = [(name, bus, name.startswith(("conductor", *here.cells))) for name, bus in here.connections]
    facts = await gather(here, accepted=accepted, events=client.events, changes=watch.changes, connections=connections)
    return check_invariants(facts)


def _counter(name: str, label: str) -> dict[str, int]:
    """A counter of this process, summed by one label."""
    totals: dict[str, int] = {}
    for metric in REGISTRY.collect():
        if metric.name == name:
            for sample in metric.samples:
                if sample.name == f"{name}_total":
                    key = sample.labels.get(label, "")
                    totals[key] = totals.get(key, 0) + int(sample.value)
    return {key: count for key, count in totals.items() if count}


def _inventory(system: LocalSystem, ironic: IronicStandIn) -> str:
    hypervisors = sum(sum(1 for _ in fleet.hosts) for fleet in system.fleets.values())
    return (
        f"{len(system.site.cells)} cells, {hypervisors} hypervisors, {len(ironic.pool.nodes)} bare-metal nodes, "
        f"{len(system.in_process.members)} workers"
    )


def failures_in_words(failed: int, planned: int) -> str:
    """How many builds failed, and how many of them as planned."""
    if not planned:
        return f"{failed} failed"
    return f"{failed} failed as planned" if failed == planned else f"{failed} failed, {planned} of them as planned"


def render_load(report: LoadReport, console: Console, *, planned_failures: int = 0) -> None:
    """The load's summary. planned_failures: how many of them failed as planned."""
    console.print(
        f"[bold]{report.active}[/bold] of {report.requests} active in {report.seconds:.2f} s: "
        f"[bold]{report.boots_per_s:.0f} boots a second[/bold]"
        + (f", {failures_in_words(report.failed, planned_failures)}" if report.failed else "")
        + (f", {report.refused} refused" if report.refused else "")
        + (f", [red]{report.unfinished} not ended[/red]" if report.unfinished else ""),
        soft_wrap=True,
    )
    attempts = ", ".join(f"{number}: {count}" for number, count in report.attempts.items()) or "none"
    console.print(f"alternates used: {report.alternates_used}, active after attempt: {attempts}")
    render_rows(
        console,
        ["milliseconds until the client's event", *(f"{name:>6}" for name in PERCENTILES)],
        [
            [stage, *(f"{figures[name]:6.0f}" if name in figures else "" for name in PERCENTILES)]
            for stage, figures in report.stages_ms.items()
        ],
    )
    render_failures(report.failures, console)


def render_failures(failures: Sequence[Failure], console: Console) -> None:
    """Failures, like ones together: each reason once with its funnel, and how many share it."""
    groups: dict[tuple[str, str, str], list[Failure]] = {}
    for failure in failures:
        # A funnel's sentence is the same for all alike; where hosts were tried, each build has its own.
        reason = failure.reason if failure.funnel else ""
        groups.setdefault((failure.flavor, failure.code, reason), []).append(failure)
    for (flavor, code, _), alike in list(groups.items())[:FAILURES_SHOWN]:
        first = alike[0]
        example = "" if first.funnel or len(alike) == 1 else "for example "
        line = Text.assemble(
            (f"{len(alike)} x ", "red"),
            printable(f"{flavor} {code}: {example}{first.reason}"),
            (f" ({first.instance_uuid}{', ...' if len(alike) > 1 else ''})", "dim"),
        )
        console.print(line, soft_wrap=True)
        render_funnel(first.funnel, console, indent=6)
    if len(groups) > FAILURES_SHOWN:
        console.print(f"... and {len(groups) - FAILURES_SHOWN} other kinds of failure")


def show(demo: Demo, console: Console) -> None:
    """The summary a person likes to read."""
    console.rule("what came of it")
    console.print(
        f"{demo.active} of {demo.requests} are active, {failures_in_words(demo.failed, demo.planned_failures)}: more "
        "bare metal was requested than there is. Latency: from a request until its last event; as all were "
        "requested at once, most of it is waiting. Alternates: builds that their cell moved to another host by itself.",
        soft_wrap=True,
    )
    render_load(demo.load, console, planned_failures=demo.planned_failures)
    died = demo.faults["compute_service_that_died"]
    console.print(
        f"that includes {DEAD_FOR_S:g} s without {died}, failed attempts and bare-metal deploys", soft_wrap=True
    )
    console.print(f"claims: {_words(demo.claims)}; retried: {_words(demo.claim_retries)}")
    console.print(f"planned faults: {_words(demo.faults)}", soft_wrap=True)
    console.rule("the invariants")
    render_results(demo.verdicts, console)


def _words(counts: dict[str, int] | dict[str, object]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; 1 when an invariant is broken or a build was lost, 3 when the database did not start."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__, formatter_class=raw)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary as data, too")
    parser.add_argument("--seed", type=int, default=1, help="faults and flavors are drawn from it")
    parser.add_argument(
        "--log", default="critical", choices=("debug", "info", "warning", "error", "critical"), help="log level"
    )
    options = parser.parse_args(arguments)
    configure_logging(process="demo", role="demo", level=options.log, style="pretty")
    console = Console(highlight=False)
    try:
        demo = uvloop.run(demonstrate(options.seed, console))
    except (ServerFailed, ServerMissing) as fault:
        sys.stderr.write(f"berth: {fault}\n")
        return EXIT_NO_SERVER
    show(demo, console)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(demo), indent=2))
    ended = demo.active + demo.failed == demo.requests
    return 0 if ended and all(demo.invariants.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
