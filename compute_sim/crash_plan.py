"""Planned deaths of the whole service, for demonstrations and the simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from bus.contracts.cell import Spawn
from bus.faults import Fault
from compute_sim.config import SimulatedConfig
from compute_sim.faults import plan_attempt
from compute_sim.fleet import Fleet

log = structlog.get_logger()


class ServiceDied(Fault):
    """The service ends here, in the middle of everything. A planned fault."""

    code = "sim.service_died"


class CrashPlan:
    """Planned deaths of the whole service."""

    def __init__(self, config: SimulatedConfig, fleet: Fleet, die: Callable[[], None] | None) -> None:
        self._faults = config.faults
        self._seed = config.seed
        self._fleet = fleet
        self._die = die
        self._strike = asyncio.Event()

    def accepted(self, command: Spawn) -> None:
        """A build was accepted: is it the one that kills?"""
        records, faults = self._fleet.records, self._faults
        # Only in the first life: a death is planned once, not again and again until nothing is left to plan.
        if (faults.die_after is not None and records.starts == 1 and records.accepted == faults.die_after) or (
            faults.die_rate
            and (host := self._fleet.host(command.host_uuid)) is not None
            and plan_attempt(faults, self._seed, host.plan.name, command.spec.instance_uuid, command.attempt).dies
        ):
            self._kill()

    def _kill(self) -> None:
        log.warning("compute.planned_death")
        self._strike.set()
        if self._die is not None:
            self._die()

    async def wait(self) -> None:
        """Wait for the planned time, as a side task. Raises ServiceDied then, which ends the service."""
        await self._strike.wait()
        raise ServiceDied("a planned fault of this service")
