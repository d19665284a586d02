"""Forgets compute services that are gone for good, as an operator has stated: nothing waits for their answers."""

from __future__ import annotations

from collections.abc import Callable, Collection

import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Refuse
from bus.contracts.cell import ForgetServiceInCell, ServiceForgottenInCell, ServiceGone

from .store.port import InstanceStore

log = structlog.get_logger(__name__)

MAX_NAMED = 5  # instances that a refusal names
UP = "service.up"
UNSURE = "service.unsure"
HAS_INSTANCES = "service.has_instances"


class LeaseForgetter:
    """One conductor's. up: the services that are up (None: it has not listened for long enough to know)."""

    def __init__(
        self, store: InstanceStore, bus: Bus, *, clock: Clock, cell: str, up: Callable[[], Collection[str] | None]
    ) -> None:
        self._store = store
        self._bus = bus
        self._clock = clock
        self._cell = cell
        self._up = up

    async def forget(self, command: ForgetServiceInCell) -> Outcome:
        """Drop the lease of a service, and notify the cell's conductors and the schedulers. Raises Transient.

        A conductor that ends between the two leaves the others with the service as down: the command is repeated.
        """
        up = self._up()
        if up is None:
            return Refuse(UNSURE, "this conductor has not listened for long enough to know which services are up")
        if command.service in up:
            return Refuse(UP, f"the compute service {command.service} is up")
        found = await self._store.at_service(command.service, MAX_NAMED + 1)
        if found:
            more = " and more" if len(found) > MAX_NAMED else ""
            reason = (
                f"instances are on record there, on hosts that are not fenced: {', '.join(found[:MAX_NAMED])}{more}"
            )
            return Refuse(HAS_INSTANCES, reason)
        removed = await self._store.leases.forget(command.service)
        at = self._clock.time()
        await self._bus.publish(ServiceGone(cell=self._cell, service=command.service, at=at), cause=command.service)
        log.warning(
            "service.forgotten",
            service=command.service,
            by=command.by,
            reason=command.reason,
            removed=removed,
            cause=command.service,
        )
        return Done(reply=ServiceForgottenInCell(service=command.service, removed=removed, at=at))
