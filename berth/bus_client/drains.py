"""A client of drains as any program could be one: plan, begin, command, and follow a drain to its end."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.drains import (
    DrainCommand,
    DrainMoveState,
    DrainPlan,
    DrainProgress,
    DrainQuery,
    DrainResult,
    DrainsPage,
    DrainsQuery,
    DrainStart,
    DrainState,
)
from bus.faults import RequestRefused, RequestTimeout

PLAN_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 30.0
LOOK_S = 0.25  # between two looks at a drain that is followed; a look that took long is repeated later
STUCK_S = 10.0  # everything left cannot move for this long: a service may just be restarted


async def plan(bus: Bus, query: DrainQuery, *, timeout_s: float = PLAN_TIMEOUT_S) -> DrainPlan:
    """How a target could be drained now. Raises RequestTimeout, or RequestRefused (`host.unknown`, ...)."""
    return await bus.request(query, DrainPlan, timeout_s=timeout_s)


async def start(bus: Bus, command: DrainStart) -> DrainProgress:
    """Begin it. Raises RequestTimeout (it may have begun: ask for its id), or RequestRefused (`drain.stuck`, ...)."""
    return (await bus.request(command, DrainResult, timeout_s=PLAN_TIMEOUT_S, cause=command.drain)).drain


async def command(bus: Bus, requested: DrainCommand) -> DrainProgress:
    """Pause, resume or stop it. Raises RequestTimeout, or RequestRefused (`drain.unknown`, ...)."""
    return (await bus.request(requested, DrainResult, timeout_s=ASK_TIMEOUT_S, cause=requested.drain)).drain


async def drains(bus: Bus, query: DrainsQuery, *, timeout_s: float = ASK_TIMEOUT_S) -> tuple[DrainProgress, ...]:
    """One drain with its instances, or all of them. Raises RequestTimeout."""
    return (await bus.request(query, DrainsPage, timeout_s=timeout_s)).drains


async def follow(
    bus: Bus,
    drain: str,
    *,
    clock: Clock,
    timeout_s: float,
    on_progress: Callable[[DrainProgress], None] = lambda _: None,
) -> DrainProgress:
    """Look at a drain until it has ended, or nothing left of it can move, at most this long; its state at the last.

    Raises RequestTimeout when no scheduler answered before the time ran out, or RequestRefused (`drain.unknown`).
    """
    retry_until = clock.monotonic() + timeout_s
    stuck_s, stuck_at, moved, refused = 0.0, inf, 0, set[str]()
    while True:
        asked_at = clock.monotonic()
        try:
            found = await drains(bus, DrainsQuery(drain=drain))
        except RequestTimeout:
            if clock.monotonic() >= retry_until:
                raise
            continue
        if not found:  # the schedulers' database was set back
            raise RequestRefused(f"no drain {drain} is on record", code="drain.unknown")
        (seen,) = found
        on_progress(seen)
        now, refused = clock.monotonic(), refused.union(one.instance_uuid for one in seen.failed)
        moved, moved_before = seen.counts.get(DrainMoveState.MOVED, 0), moved
        if moved > moved_before or not is_stuck(seen, refused):
            stuck_s, stuck_at = 0.0, inf
        elif seen.under_way:  # one more try: its time does not count, and nothing begins anew
            stuck_at = inf
        else:
            stuck_s, stuck_at = stuck_s + max(0.0, now - stuck_at), now
        if seen.state is DrainState.ENDED or now >= retry_until or stuck_s >= STUCK_S:
            return seen
        await clock.sleep(max(LOOK_S, 5 * (now - asked_at)))


def is_stuck(seen: DrainProgress, refused: Collection[str] = ()) -> bool:
    """Whether nothing that is left can move now: everything was refused three times, or has a reason that stays.

    refused: instances that could not move before: another move of one is one more try.
    """
    left = bool(seen.failed or seen.under_way) and seen.state is DrainState.RUNNING
    return left and not (seen.not_started or seen.more or set(seen.under_way).difference(refused))
