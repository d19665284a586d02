"""A client of drains as any program could be one: plan, begin, command, and follow a drain to its end."""

from __future__ import annotations

from collections.abc import Callable

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.drains import (
    DrainCommand,
    DrainPlan,
    DrainProgress,
    DrainQuery,
    DrainResult,
    DrainsPage,
    DrainsQuery,
    DrainStart,
    DrainState,
)
from bus.faults import RequestTimeout

PLAN_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 30.0
LOOK_S = 0.25  # between two looks at a drain that is followed


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
    """Look at a drain until it has ended, at most this long; its state at the last look.

    Raises RequestTimeout when no scheduler answered before the time ran out.
    """
    give_up_at = clock.monotonic() + timeout_s
    seen: DrainProgress | None = None
    while True:
        try:
            (seen,) = await drains(bus, DrainsQuery(drain=drain))
        except RequestTimeout:
            if clock.monotonic() >= give_up_at:
                raise
            continue
        on_progress(seen)
        if seen.state is DrainState.ENDED or clock.monotonic() >= give_up_at:
            return seen
        await clock.sleep(LOOK_S)
