"""Forgets compute services that are gone for good: the cell of each drops it from its record, and notifies all others.

The cell decides: its conductors have the heartbeats, and its record has the instances. A scheduler checks only which
hosts the book has of the service, because the cell does not know them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.base import Refusal
from bus.contracts.cell import ForgetServiceInCell, ServiceForgottenInCell, ServiceGone
from bus.contracts.objects import ChangedObject, ForgottenService, ObjectKind
from bus.contracts.operations import ForgetService, ServiceForgotten
from bus.faults import RequestRefused
from scheduler_worker.domain.hosts import NO_SERVICE
from scheduler_worker.domain.objects import ChangeAuthor, RecordedObjects
from scheduler_worker.domain.selector import Selector
from scheduler_worker.objects import Made, MakeChange, ObjectRegistry
from scheduler_worker.store.port import OperationUnit

log = structlog.get_logger(__name__)

ANSWER_S = 10.0  # of the cell
MAX_NAMED = 5  # hosts that a refusal names
UNKNOWN = "service.unknown"
AMBIGUOUS = "service.ambiguous"
UP = "service.up"
HAS_HOSTS = "service.has_hosts"
NO_CELL = "cell.unknown"


class ServiceForgetter:
    """Of one scheduler. cells: the buses of the cells, by name."""

    def __init__(
        self, registry: ObjectRegistry, selector: Selector, cells: Callable[[], Mapping[str, Bus]], *, clock: Clock
    ) -> None:
        self._registry = registry
        self._selector = selector
        self._cells = cells
        self._clock = clock

    async def forget(self, command: ForgetService) -> ServiceForgotten | Refusal:
        """Forget one service, unless something shows that it may not be gone. Raises Transient."""
        name = command.service
        found = self._selector.table.cells_of_service(name) if command.cell is None else [command.cell]
        if not found:
            return Refusal(code=UNKNOWN, reason=f"there is no compute service {name}")
        if len(found) > 1:
            return Refusal(code=AMBIGUOUS, reason=f"several cells have a compute service {name}: {', '.join(found)}")
        cell = found[0]
        bus = self._cells().get(cell)
        if bus is None:
            return Refusal(code=NO_CELL, reason=f"there is no cell {cell}")
        kept = self._reported(cell, name)
        if kept is not None:
            return kept
        order = ForgetServiceInCell(service=name, reason=command.reason, by=command.by)
        try:
            answer = await bus.request(order, ServiceForgottenInCell, timeout_s=ANSWER_S, cause=name)
        except RequestRefused as refused:
            return Refusal(code=refused.code, reason=refused.reason)
        if answer.removed:
            await self._registry.write(self._entry(command, cell))
        gone = ServiceGone(cell=cell, service=name, at=answer.at)
        self._selector.table.forget_service(gone, self._clock.monotonic())
        log.warning("service.forgotten", service=name, cell=cell, by=command.by, reason=command.reason)
        return ServiceForgotten(service=name, cell=cell, removed=answer.removed)

    def _reported(self, cell: str, name: str) -> Refusal | None:
        """Why a service is kept: it is up, or the book has hosts of it."""
        table = self._selector.table
        index = table.service_of(cell, name)
        if index == NO_SERVICE:
            return None
        if table.services[index].down is None:
            return Refusal(code=UP, reason=f"the compute service {name} is up")
        rows = self._selector.announced_in_book()
        hosts = sorted(table.names[row] for row in rows.tolist() if table.service[row] == index)
        if not hosts:
            return None
        more = f" and {len(hosts) - MAX_NAMED} more" if len(hosts) > MAX_NAMED else ""
        reason = f"the book has hosts of it, which are to be forgotten first: {', '.join(hosts[:MAX_NAMED])}{more}"
        return Refusal(code=HAS_HOSTS, reason=reason)

    def _entry(self, command: ForgetService, cell: str) -> MakeChange:
        """The entry of the log of changes, after which nothing of the service is on record."""
        before = msgspec.to_builtins(ForgottenService(cell=cell))
        entry = ChangedObject(kind=ObjectKind.SERVICE, name=command.service, before=before)

        async def make(_unit: OperationUnit, _present: RecordedObjects) -> Made | Refusal:
            return [entry], ChangeAuthor(command.by, command.reason, self._clock.time())

        return make
