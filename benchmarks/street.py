"""Boots a second through the whole street: in one process over memory, and as processes on real servers.

    python -m benchmarks.street [--boots N] [--hosts N] [--only memory|real] [--json FILE]

Memory: every worker in this process, memory buses, an embedded PostgreSQL. Real: each worker its own process, a
private RabbitMQ (quorum queues, confirms, a virtual host per bus) and a private PostgreSQL (fsync on), both workers'
and servers' CPU on this machine, the client as well. Hosts build at once: what is measured is the street. One boot
alone on the idle system is measured as well, and the invariants are judged after each run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from msgspec import Struct

from berth.client import BuildClient
from berth.gather import gather, rest
from berth.invariants import judge
from berth.load import LoadPlan, LoadReport, run_load
from berth.servers import Plan, real_servers, running_crew
from berth.settings import Settings, UpSettings
from berth.site import Site, process_name
from berth.up import Street, site
from bus.service.telemetry import configure_logging
from compute_sim.config import ComputeConfig, HostSize

IDLE_BOOTS = 40
WARM_UP = 100
REST_TIMEOUT_S = 60.0
MIX = {"m1.tiny": 1.0, "m1.small": 1.0}
BIG = HostSize(vcpus=128, memory_mb=2**20, disk_gb=100_000)


class Result(Struct, frozen=True, kw_only=True):
    """One system's figures. cpu_s_per_1000: CPU seconds of all that took part, servers included, for 1,000 boots."""

    system: str
    boots: int
    hosts: int
    boots_per_s: float
    latency_ms: dict[str, float]
    stages_ms: dict[str, dict[str, float]]
    idle_p50_ms: float
    idle_p95_ms: float
    invariants_hold: bool
    active: int


async def measure(client: BuildClient, here: Site, system: str, boots: int, hosts: int) -> Result:
    """Warm up, boot one at a time, then all at once; judge."""
    rng = random.Random(1)
    await fire(client, here, WARM_UP, rng)
    idle = []
    for _ in range(IDLE_BOOTS):
        report = await fire(client, here, 1, rng)
        idle.append(report.latency_ms["max"])
    report = await fire(client, here, boots, rng)
    await rest(here, timeout_s=REST_TIMEOUT_S)
    verdicts = judge(await gather(here, accepted=list(client.tracks), events=client.events))
    for verdict in verdicts:
        if not verdict.holds:
            print(f"BROKEN: {verdict.sentence}: {verdict.examples}")
    return Result(
        system=system,
        boots=boots,
        hosts=hosts,
        boots_per_s=round(report.boots_per_s, 1),
        latency_ms=report.latency_ms,
        stages_ms=report.stages_ms,
        idle_p50_ms=round(statistics.median(idle), 2),
        idle_p95_ms=round(sorted(idle)[int(0.95 * len(idle))], 2),
        invariants_hold=all(verdict.holds for verdict in verdicts),
        active=report.active,
    )


async def fire(client: BuildClient, here: Site, boots: int, rng: random.Random) -> LoadReport:
    """So many builds at once."""
    plan = LoadPlan(boots=boots, mix=MIX, project_id="bench", timeout_s=300)
    report = await run_load(client, plan, clock=here.clock, rng=rng)
    if report.active != boots:
        raise SystemExit(f"{boots - report.active} of {boots} builds failed: {report.failures[:3]}")
    return report


async def with_client(here: Site, work: Callable[[BuildClient], Any]) -> Any:
    """Run with a connected client."""
    client = BuildClient(here.bus("bench"), clock=here.clock, process=process_name("bench"), keep_events=True)
    await client.open()
    try:
        return await work(client)
    finally:
        await client.close()


async def in_memory(boots: int, hosts: int) -> Result:
    """Everything in this process."""
    settings = Settings(
        up=UpSettings(schedulers=1, placements=1, computes_per_cell=1, nodes=0),
        compute=ComputeConfig(hosts=hosts // 2, sizes=(BIG,)),
    )
    async with site(settings, directory=None) as here:
        street = Street(here)
        await street.start()
        try:
            return await with_client(here, lambda client: measure(client, here, "memory", boots, hosts))
        finally:
            await street.ensemble.stop()


async def on_real_servers(boots: int, hosts: int) -> Result:
    """Every worker its own process."""
    plan = Plan(schedulers=1, placements=1, compute=ComputeConfig(hosts=hosts // 2, sizes=(BIG,)))
    with real_servers(plan.cells, durable=plan.durable) as servers:
        async with running_crew(servers, plan) as (_, here):
            return await with_client(here, lambda client: measure(client, here, "real", boots, hosts))


def main() -> int:
    """Print, and write when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boots", type=int, default=2000)
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--only", choices=("memory", "real"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    configure_logging(process="bench", role="bench", level="error", style="pretty")
    results = []
    for name, run in (("memory", in_memory), ("real", on_real_servers)):
        if options.only in {None, name}:
            started = time.monotonic()
            result = uvloop.run(run(options.boots, options.hosts))
            results.append(result)
            print(f"{in_words(result)}; {time.monotonic() - started:.0f} s in all")
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))
    return 0 if all(result.invariants_hold for result in results) else 1


def in_words(result: Result) -> str:
    """One line for a person."""
    return (
        f"{result.system}: {result.boots_per_s:.0f} boots/s ({result.active} of {result.boots} active, "
        f"{result.hosts} hosts), idle boot p50 {result.idle_p50_ms:.1f} ms, p95 {result.idle_p95_ms:.1f} ms, "
        f"invariants {'hold' if result.invariants_hold else 'BROKEN'}"
    )


if __name__ == "__main__":
    sys.exit(main())
