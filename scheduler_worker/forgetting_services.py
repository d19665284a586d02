"""Forgets compute services that are gone for good: the cell of each drops it from its record, and notifies all others.

The cell decides: its conductors have the heartbeats, and its record has the instances. A scheduler checks only which
hosts the book has of the service, because the cell does not know them. The book decides: a scheduler that was started
after the service died has received no announcement of its hosts. The scheduler's table adds those whose inventory comes
from another source (bare-metal nodes).

Each command that the cell has done is in the log of changes once, by its message's id. Whether the cell still had the
service does not count: when its first answer was late, it has nothing of it any more at the second.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec
import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.base import Refusal
from bus.contracts.book import ServiceHostsPage, ServiceHostsQuery
from bus.contracts.cell import ForgetServiceInCell, ServiceForgottenInCell, ServiceGone
from bus.contracts.objects import ChangedObject, ForgottenService, ObjectKind
from bus.contracts.operations import ForgetService, ServiceForgotten
from bus.faults import RequestRefused
from scheduler_worker.domain.hosts import NO_SERVICE
from scheduler_worker.domain.objects import ChangeAuthor, RecordedObjects
from scheduler_worker.domain.selector import Selector
from scheduler_worker.objects import HANDLER, Made, MakeChange, ObjectRegistry
from scheduler_worker.store.port import OperationUnit

log = structlog.get_logger(__name__)

ANSWER_S = 10.0  # of placement, and of the cell
MAX_HOSTS = 1000  # that are counted
MAX_NAMED = 5  # hosts that a refusal names
UNKNOWN = "service.unknown"
AMBIGUOUS = "service.ambiguous"
UP = "service.up"
HAS_HOSTS = "service.has_hosts"
NO_CELL = "cell.unknown"


class ServiceForgetter:
    """Of one scheduler. api: the bus to placement. cells: the buses of the cells, by name."""

    def __init__(
        self,
        registry: ObjectRegistry,
        selector: Selector,
        api: Bus,
        cells: Callable[[], Mapping[str, Bus]],
        *,
        clock: Clock,
    ) -> None:
        self._api = api
        self._registry = registry
        self._selector = selector
        self._cells = cells
        self._clock = clock

    async def forget(self, command: ForgetService, message_id: str) -> ServiceForgotten | Refusal:
        """Forget one service, unless something shows that it may not be gone. Raises Transient.

        message_id: of the command.
        """
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
        table = self._selector.table
        index = table.service_of(cell, name)
        if index != NO_SERVICE and table.services[index].down is None:
            return Refusal(code=UP, reason=f"the compute service {name} is up")
        try:
            query = ServiceHostsQuery(service=name, cell=cell, limit=MAX_HOSTS)
            page = await self._api.request(query, ServiceHostsPage, timeout_s=ANSWER_S, cause=name)
        except RequestRefused as refused:
            return Refusal(code=refused.code, reason=refused.reason)
        kept = _kept_by_hosts({*page.hosts, *self._announced(index)})
        if kept is not None:
            return kept
        order = ForgetServiceInCell(service=name, reason=command.reason, by=command.by)
        try:
            answer = await bus.request(order, ServiceForgottenInCell, timeout_s=ANSWER_S, cause=name)
        except RequestRefused as refused:
            return Refusal(code=refused.code, reason=refused.reason)
        await self._registry.write(self._entry(command, cell, message_id))
        gone = ServiceGone(cell=cell, service=name, at=answer.at)
        self._selector.table.forget_service(gone, self._clock.monotonic())
        log.warning("service.forgotten", service=name, cell=cell, by=command.by, reason=command.reason)
        return ServiceForgotten(service=name, cell=cell, removed=answer.removed)

    def _announced(self, index: int) -> list[str]:
        """The hosts in the book that this service announced last."""
        if index == NO_SERVICE:
            return []
        table = self._selector.table
        return [
            table.names[row] for row in self._selector.announced_in_book().tolist() if table.last_service[row] == index
        ]

    def _entry(self, command: ForgetService, cell: str, message_id: str) -> MakeChange:
        """The entry of the log of changes, after which nothing of the service is on record; none for a redelivery."""
        before = msgspec.to_builtins(ForgottenService(cell=cell))
        entry = ChangedObject(kind=ObjectKind.SERVICE, name=command.service, before=before)

        async def make(unit: OperationUnit, _present: RecordedObjects) -> Made | Refusal:
            entries = [entry] if await unit.first_time(HANDLER, message_id) else []
            return entries, ChangeAuthor(command.by, command.reason, self._clock.time())

        return make


def _kept_by_hosts(hosts: Collection[str]) -> Refusal | None:
    """Why a service is kept: the book has hosts of it."""
    if not hosts:
        return None
    count = f"{MAX_HOSTS} or more" if len(hosts) >= MAX_HOSTS else str(len(hosts))
    some = ", ".join(sorted(hosts)[:MAX_NAMED])
    reason = f"the book has hosts of it, which are to be forgotten first (`berth hosts forget`): {count}, as {some}"
    return Refusal(code=HAS_HOSTS, reason=reason)
