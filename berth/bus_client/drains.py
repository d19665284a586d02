"""A client of drains as any program could be one: plan, begin, command, and follow a drain to its end."""

from __future__ import annotations

from bus.bus import Bus
from bus.contracts.drains import (
    DrainCommand,
    DrainPlan,
    DrainProgress,
    DrainQuery,
    DrainResult,
    DrainsPage,
    DrainsQuery,
    DrainStart,
)

PLAN_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 30.0


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


async def one(bus: Bus, drain: str) -> DrainProgress | None:
    """One drain with its instances; None: it is not on record. Raises RequestTimeout."""
    return next(iter(await drains(bus, DrainsQuery(drain=drain))), None)
