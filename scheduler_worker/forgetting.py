"""Forgets hosts that are gone for good: their providers leave the book, and their decisions the record.

The book is first: it alone can prove, in the transaction that deletes the tree, that no consumer holds anything there.
A scheduler that ends between the two leaves a host without providers, which takes nothing; the message is delivered
again, or the operator repeats the command.
"""

from __future__ import annotations

import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.base import Refusal
from bus.contracts.objects import ObjectKind
from bus.contracts.operations import ForgetHost, HostForgotten
from bus.contracts.placement import InventoryForget, InventoryForgotten
from bus.faults import RequestRefused
from scheduler_worker.domain.forgotten import kept_by_record, traces, with_entry
from scheduler_worker.domain.objects import SERVICE_UP, ChangeAuthor, RecordedObjects
from scheduler_worker.domain.selector import Selector
from scheduler_worker.objects import Made, ObjectRegistry
from scheduler_worker.store.port import OperationUnit, SchedulerStore

log = structlog.get_logger(__name__)

ANSWER_S = 10.0  # of placement
MAX_NAMED = 5  # instances that a refusal names
CELL_SILENT = "host.cell_silent"
HAS_INSTANCES = "host.has_instances"


class HostForgetter:
    """Of one scheduler. api: the bus to placement."""

    def __init__(
        self, store: SchedulerStore, registry: ObjectRegistry, selector: Selector, api: Bus, *, clock: Clock
    ) -> None:
        self._store = store
        self._registry = registry
        self._selector = selector
        self._api = api
        self._clock = clock

    async def forget(self, command: ForgetHost, uuid: str, host: str) -> HostForgotten | Refusal:
        """Forget one host, unless something shows that it may not be gone. Raises Transient."""
        kept = self._reported(uuid) or await self._kept_by_instances(uuid)
        if kept is not None:
            return kept
        stands = kept_by_record((await self._record()).objects, uuid, self._registry.cells_in_use())
        if stands is not None:
            return stands
        try:
            book = await self._api.request(
                InventoryForget(root_uuid=uuid), InventoryForgotten, timeout_s=ANSWER_S, cause=uuid
            )
        except RequestRefused as refused:
            return Refusal(code=refused.code, reason=refused.reason)
        names = {uuid} if self._is_shared(uuid, host) else {uuid, host}
        aggregates: list[str] = []
        is_on_record = book.removed

        async def make(_unit: OperationUnit, present: RecordedObjects) -> Made | Refusal:
            nonlocal is_on_record
            kept = kept_by_record(present.objects, uuid, self._registry.cells_in_use())
            if kept is not None:  # decided since
                return kept
            changed = traces(present.objects, uuid, names)
            aggregates[:] = [one.name for one in changed if one.kind is ObjectKind.AGGREGATE]
            is_on_record |= bool(changed)
            entered = with_entry(changed, uuid, host) if is_on_record else ()
            return entered, ChangeAuthor(command.by, command.reason, self._clock.time())

        refusal = await self._registry.write(make)
        if refusal is not None:
            return refusal
        log.warning("host.forgotten", uuid=uuid, host=host, by=command.by, reason=command.reason)
        return HostForgotten(host_uuid=uuid, host=host, removed=is_on_record, aggregates=tuple(aggregates))

    async def _record(self) -> RecordedObjects:
        found = await self._store.objects()
        assert found is not None
        return found

    def _reported(self, uuid: str) -> Refusal | None:
        """A service that is up reports the host, or may do so: not every service of the cells is known here."""
        table = self._selector.table
        service = table.live_service_of(uuid) or table.contested_by(uuid)
        if service is not None:
            return Refusal(code=SERVICE_UP, reason=f"the compute service {service} is up and reports the host")
        now_s = self._clock.monotonic()
        silent = [cell for cell in self._registry.cells_in_use() if not table.is_complete(cell, now_s)]
        if silent:
            reason = f"not every compute service of {', '.join(silent)} is known here: one may report the host"
            return Refusal(code=CELL_SILENT, reason=reason)
        return None

    def _is_shared(self, uuid: str, host: str) -> bool:
        """Whether another host has the name of this one."""
        return any(other != uuid for other in self._selector.uuids_of(host))

    async def _kept_by_instances(self, uuid: str) -> Refusal | None:
        found = await self._store.active_on([uuid], MAX_NAMED + 1)
        if not found:
            return None
        more = " and more" if len(found) > MAX_NAMED else ""
        reason = f"instances are on record there: {', '.join(found[:MAX_NAMED])}{more}"
        return Refusal(code=HAS_INSTANCES, reason=reason)
