"""The load generator: many builds at once, or at a rate, or so many at a time; and what came of them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from berth.client import BuildClient, Track
from bus.clock import Clock, new_uuid
from bus.contracts.build import BuildEvent, BuildRequest, FunnelStep
from bus.faults import Transient
from bus.port import BusError

# Failures listed one by one in a report; all are counted.
MAX_FAILURES_SHOWN = 50
# With a rate, requests that fell due while the publisher was busy leave together, at most so many.
MAX_BURST = 500
# At its very time a request is due, whatever floating point makes of it.
A_HAIR = 1e-6
PROGRESS_EVERY_S = 0.25
# However late publishing ended, the builds' ends are waited for so long at least.
MIN_WAIT_S = 0.001


class LoadPlan(Struct, frozen=True, kw_only=True):
    """What to fire. mix: {flavor: weight}. concurrency: builds in flight at once, 0 = all at once.

    rate_per_s: open loop at a constant rate, latency counted from the intended time; 0 = as `concurrency` says.
    """

    boots: int
    mix: Mapping[str, float]
    project_id: str = "load"
    concurrency: int = 0
    rate_per_s: float = 0.0
    timeout_s: float = 300.0
    name_prefix: str = "load"


class Failure(Struct, frozen=True, kw_only=True):
    """One build that did not become active, with everything its client was told."""

    instance_uuid: str
    flavor: str
    state: str
    code: str
    reason: str
    attempts: int
    funnel: tuple[FunnelStep, ...] = ()


class LoadReport(Struct, frozen=True, kw_only=True):
    """What came of a load. Times in seconds, latencies in milliseconds; percentiles over active builds."""

    requests: int
    active: int
    failed: int
    refused: int
    unfinished: int
    seconds: float
    boots_per_s: float
    latency_ms: dict[str, float]
    stages_ms: dict[str, dict[str, float]]
    alternates_used: int
    attempts: dict[str, int]
    failures_by_code: dict[str, int]
    failures: tuple[Failure, ...]
    more_than_one_terminal: int


def draw_requests(plan: LoadPlan, rng: random.Random) -> list[BuildRequest]:
    """The requests of a plan, flavors drawn by weight from `rng`."""
    flavors = list(plan.mix)
    drawn = rng.choices(flavors, weights=[plan.mix[f] for f in flavors], k=plan.boots)
    return [
        BuildRequest(
            instance_uuid=new_uuid(rng),
            flavor=flavor,
            project_id=plan.project_id,
            user_id="load",
            name=f"{plan.name_prefix}-{number}",
        )
        for number, flavor in enumerate(drawn)
    ]


async def run_load(
    client: BuildClient,
    plan: LoadPlan,
    *,
    clock: Clock,
    rng: random.Random,
    progress: Callable[[int, int], None] = lambda done, asked: None,
) -> LoadReport:
    """Fire the plan and wait for every build's end, or the plan's timeout. Raises what publishing raises."""
    requests = draw_requests(plan, rng)
    started = clock.monotonic()
    ticker = asyncio.create_task(_tick(client, len(requests), clock, progress))
    try:
        if plan.rate_per_s > 0:
            await _open_loop(client, plan, requests, clock)
        elif plan.concurrency > 0:
            await _closed_loop(client, plan, requests)
        else:
            await client.boot(requests, patience_s=plan.timeout_s)
        left = plan.timeout_s - (clock.monotonic() - started)
        if not await client.wait(max(left, MIN_WAIT_S)):
            with contextlib.suppress(Transient, BusError):  # nobody to ask: they count as unfinished
                await client.resync()
    finally:
        ticker.cancel()
    progress(len(requests) - client.unfinished, len(requests))
    tracks = [client.tracks[request.instance_uuid] for request in requests]
    return sum_up(tracks, started=started, now=clock.monotonic())


async def _tick(client: BuildClient, asked: int, clock: Clock, progress: Callable[[int, int], None]) -> None:
    while True:
        progress(len(client.tracks) - client.unfinished, asked)
        await clock.sleep(PROGRESS_EVERY_S)


async def _open_loop(client: BuildClient, plan: LoadPlan, requests: Sequence[BuildRequest], clock: Clock) -> None:
    """Publish each request at its intended time; a late publisher does not shift the intentions after it."""
    start = clock.monotonic()
    sent = 0
    while sent < len(requests):
        now = clock.monotonic()
        due = min(len(requests), int((now - start) * plan.rate_per_s + A_HAIR) + 1)
        part = requests[sent : min(due, sent + MAX_BURST)]
        if part:
            await client.boot(part, patience_s=plan.timeout_s)
            for number, request in enumerate(part, sent):
                client.tracks[request.instance_uuid].intended_at = start + number / plan.rate_per_s
            sent += len(part)
        else:
            await clock.sleep(max(start + sent / plan.rate_per_s - now, 0.0))


async def _closed_loop(client: BuildClient, plan: LoadPlan, requests: Sequence[BuildRequest]) -> None:
    """Keep `concurrency` builds in flight."""
    sent = 0
    while sent < len(requests):
        room = plan.concurrency - client.unfinished
        if room > 0:
            part = requests[sent : sent + room]
            await client.boot(part, patience_s=plan.timeout_s)
            sent += len(part)
        elif not await client.until(lambda: client.unfinished < plan.concurrency, plan.timeout_s):
            return


def sum_up(tracks: Sequence[Track], *, started: float, now: float) -> LoadReport:
    """Sum up what a client saw of its builds."""
    ended = [t.ended_at for t in tracks if t.ended_at is not None]
    seconds = max((max(ended) if ended else now) - started, 1e-9)
    states = Counter(track.state for track in tracks)
    active = [t for t in tracks if t.state == "active"]
    failures = [_failure(t) for t in tracks if t.state in {"failed", "refused"}]
    return LoadReport(
        requests=len(tracks),
        active=states["active"],
        failed=states["failed"],
        refused=states["refused"],
        unfinished=sum(t.ended_at is None for t in tracks),
        seconds=seconds,
        boots_per_s=states["active"] / seconds,
        latency_ms=percentiles([1000 * t.latency_s for t in active if t.latency_s is not None]),
        stages_ms=_stages(active),
        alternates_used=sum(max(_attempt(t) - 1, 0) for t in tracks),
        attempts={str(n): c for n, c in sorted(Counter(_attempt(t) for t in active).items())},
        failures_by_code=dict(Counter(f.code for f in failures).most_common()),
        failures=tuple(failures[:MAX_FAILURES_SHOWN]),
        more_than_one_terminal=sum(t.terminals > 1 for t in tracks),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p95, p99, max and mean (nearest rank); empty when there is nothing."""
    if not values:
        return {}
    ordered = sorted(values)

    def rank(share: float) -> float:
        return round(ordered[math.ceil(share * len(ordered)) - 1], 3)

    return {
        "p50": rank(0.50),
        "p90": rank(0.90),
        "p95": rank(0.95),
        "p99": rank(0.99),
        "max": round(ordered[-1], 3),
        "mean": round(sum(ordered) / len(ordered), 3),
    }


def _stages(tracks: Sequence[Track]) -> dict[str, dict[str, float]]:
    """Milliseconds from the intended time until the client heard of each state."""
    names = ("accepted", "scheduled", "building", "active")
    return {
        name: percentiles([1000 * (t.stages[name] - t.intended_at) for t in tracks if name in t.stages])
        for name in names
    }


def _attempt(track: Track) -> int:
    event: BuildEvent | None = track.last
    return event.attempt if event is not None else 0


def _failure(track: Track) -> Failure:
    event = track.last
    return Failure(
        instance_uuid=track.instance_uuid,
        flavor=track.flavor,
        state=track.state,
        code=event.code if event else "",
        reason=event.reason if event else "its end was learned by asking; see `berth show`",
        attempts=event.attempt if event else 0,
        funnel=event.funnel if event else (),
    )
