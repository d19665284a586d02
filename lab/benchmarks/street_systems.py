"""The system that is measured, as processes on real servers, and the loads on it. See lab/benchmarks/street.py."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TypeVar

from berth.audit.facts import gather, rest
from berth.audit.invariants import check_invariants
from berth.bus_client import BuildClient
from berth.config.settings import ComputeSettings
from berth.config.site import Site, process_name
from berth.up.servers import SystemPlan, hosts_known
from compute_sim.config import HostSize, SimulatedConfig
from lab.benchmarks.bare import Bare, Pipeline
from lab.benchmarks.costs import Costs, Instruments
from lab.benchmarks.street_report import Result
from lab.feed_watch import RecordingClient
from lab.load import LoadPlan, LoadReport, percentiles, run_load

C = TypeVar("C", bound=BuildClient)

WARM_UP = 200
REST_TIMEOUT_S = 60.0
RATE_S = 10.0  # how long each rate is held
# Of the highest rate. At 5 % batches are small: what a boot costs then is what one of many cells pays.
SHARES = (0.5, 0.8, 0.05)
BACKGROUND_S = 5.0  # how long it is looked at what the processes use while nothing is booted
MIX = {"m1.tiny": 1.0, "m1.small": 1.0}
BIG = HostSize(vcpus=128, memory_mb=2**20, disk_gb=100_000)
COUNTING = {"shared_preload_libraries": "'pg_stat_statements'", "pg_stat_statements.track_utility": "on"}


class Street:
    """A running system and what is measured of it. pipeline: the bare one on the same broker, to compare with."""

    def __init__(
        self, client: RecordingClient, here: Site, plan: SystemPlan, instruments: Instruments, pipeline: Pipeline | None
    ) -> None:
        self._client = client
        self._here = here
        self._plan = plan
        self._instruments = instruments
        self._pipeline = pipeline
        self._rng = random.Random(1)

    async def measure(
        self, boots: int, idle_boots: int, plain: Bare | None, *, shares: bool, held: Sequence[float]
    ) -> Result:
        """Warm up, boot one at a time, then all at once, then at the rates; judge."""
        hosts = len(self._plan.cells) * self._plan.compute.simulated.hosts
        progress(f"waiting until {hosts:,} hosts are known")
        await hosts_known(self._client, self._plan)
        progress(f"warming up, then {idle_boots} boots one at a time")
        await self._fire(WARM_UP)
        before = await self._instruments.before()
        idle = [await self._fire(1) for _ in range(idle_boots)]
        costs_alone = await self._instruments.since(before, idle_boots)
        alone = percentiles([report.latency_ms["max"] for report in idle])
        progress(f"idle boot p50 {alone['p50']:.1f} ms; {boots:,} boots at once")
        background = await self._at_rest()
        before = await self._instruments.before()
        report = await self._fire(boots)
        costs = await self._instruments.since(before, boots)
        progress(f"{report.boots_per_s:,.0f} boots a second")
        background_after = await self._at_rest()
        wanted = {f"{rate:g}/s": rate for rate in held}
        if shares and not held:
            wanted = {f"{share:.0%}": report.boots_per_s * share for share in SHARES}
        result = Result(
            boots=boots,
            hosts=hosts,
            cells=len(self._plan.cells),
            schedulers=self._plan.schedulers,
            boots_per_s=round(report.boots_per_s, 1),
            latency_ms=report.latency_ms,
            stages_ms=report.stages_ms,
            spent_ms=report.spent_ms,
            idle_p50_ms=alone["p50"],
            idle_p95_ms=alone["p95"],
            idle_stages_ms=_medians([report.stages_ms for report in idle]),
            idle_spent_ms=_medians([report.spent_ms for report in idle]),
            active=report.active,
            costs=costs,
            costs_alone=costs_alone,
            background=background,
            background_after=background_after,
        )
        if plain is not None:
            result.compare(plain)
        for name, rate in wanted.items():
            await self._hold(result, name, rate)
        result.invariants_hold = await self._invariants_hold()
        return result

    async def _hold(self, result: Result, name: str, rate: float) -> None:
        """Latency and cost of a boot at this rate, and the bare pipeline beside."""
        progress(f"{RATE_S:.0f} s at {rate:.4g} boots a second")
        boots = max(int(rate * RATE_S), 1)
        before = await self._instruments.before()
        report = await self._fire(boots, rate=rate)
        result.costs_at_rates[name] = await self._instruments.since(before, boots)
        spent = {f"{stage}_p50": figures["p50"] for stage, figures in report.spent_ms.items()}
        result.at_rates[name] = {"rate_per_s": round(rate, 1), **report.latency_ms, **spent}
        if self._pipeline is not None:
            result.bare_at_rates[name] = await self._pipeline.at_rate(rate)

    async def _at_rest(self) -> Costs:
        """What a second without any boot costs: heartbeats, reports, timers."""
        before = await self._instruments.before()
        await self._here.clock.sleep(BACKGROUND_S)
        return await self._instruments.since(before, int(BACKGROUND_S))

    async def _fire(self, boots: int, *, rate: float = 0.0) -> LoadReport:
        return await fire(self._client, self._here, boots, self._rng, rate=rate)

    async def _invariants_hold(self) -> bool:
        """Judge what there is once all is at rest; what does not hold is printed."""
        progress("judging the invariants")
        at_rest = await rest(self._here, timeout_s=REST_TIMEOUT_S)
        facts = await gather(self._here, accepted=list(self._client.watches), events=self._client.events)
        broken = [result for result in check_invariants(facts) if not result.holds]
        for result in broken:
            print(f"BROKEN: {result.message}: {result.examples}")
        return at_rest and not broken


def _medians(figures: Sequence[dict[str, dict[str, float]]]) -> dict[str, float]:
    """The median boot of each stage, of boots that were alone."""
    names = dict.fromkeys(name for one in figures for name in one if one[name])
    return {name: round(statistics.median(one[name]["p50"] for one in figures if one.get(name)), 2) for name in names}


def progress(sentence: str) -> None:
    """Report progress on standard error; figures go to stdout and the file."""
    print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)


async def fire(client: BuildClient, here: Site, boots: int, rng: random.Random, *, rate: float = 0.0) -> LoadReport:
    """So many builds at once, or at a rate. Ends the program where one is not active."""
    plan = LoadPlan(boots=boots, mix=MIX, project_id="bench", timeout_s=300, rate_per_s=rate)
    report = await run_load(client, plan, clock=here.clock, rng=rng)
    if report.active != boots:
        raise SystemExit(f"{boots - report.active} of {boots} builds failed: {report.failures[:3]}")
    return report


@contextlib.asynccontextmanager
async def connected(here: Site, kind: type[C]) -> AsyncIterator[C]:
    """A client of this kind."""
    client = kind(here.bus("bench"), clock=here.clock, process=process_name("bench"))
    await client.open()
    try:
        yield client
    finally:
        await client.close()


def plan_of(hosts: int, cells: int, *, schedulers: int, placements: int) -> SystemPlan:
    """So many large hosts (rounded up) in so many cells."""
    return SystemPlan(
        cells=tuple(f"cell{number}" for number in range(1, cells + 1)),
        schedulers=schedulers,
        placements=placements,
        compute=ComputeSettings(simulated=SimulatedConfig(hosts=math.ceil(hosts / cells), gpu_share=0.0, sizes=(BIG,))),
    )


def counting_binaries() -> Path | None:
    """The newest PostgreSQL of Debian that can count statements."""
    found = Path("/usr/lib/postgresql").glob("[0-9]*/lib/pg_stat_statements.so")
    servers = [library.parents[1] / "bin" for library in found]
    return max(servers, key=lambda binaries: float(binaries.parent.name), default=None)
