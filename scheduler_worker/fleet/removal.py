"""Deletes hosts and compute services that are gone for good. Placement decides for a host, because it alone can prove,
in the transaction that deletes the tree, that nothing holds anything there; the cell decides for a service.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec
import structlog
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.base import Refusal
from bus.contracts.cell import CellServiceDelete, CellServiceDeleted, ServiceRemoved
from bus.contracts.drains import DrainState
from bus.contracts.objects import Aggregate, ChangedObject, DeletedService, HostDecision, ObjectKind
from bus.contracts.operations import AdminState, DeleteHost, DeleteService, HostDeleted, ServiceDeleted
from bus.contracts.placement import ProviderTreeDelete, ProviderTreeDeleted
from scheduler_worker.fleet.host_listener import MAX_SERVICE_HOSTS, hosts_of_services
from scheduler_worker.hosts.service_directory import NO_SERVICE
from scheduler_worker.objects.object_registry import Made, ObjectRegistry
from scheduler_worker.records.object_records import (
    ChangeActor,
    Objects,
    RecordedObjects,
    drain_of,
    fence_of,
    host_decision,
)
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store.port import OperationUnit, SchedulerStore

FENCE_OPEN = "host.fence_open"
DRAINING = "host.draining"


def removal_blocker(present: Objects, uuid: str, cells: Collection[str]) -> Refusal | None:
    """Why the objects on record keep a host: a fence that its cell may still act on, or a drain that has not ended.
    cells: those that workers connect to; a cell that is gone acknowledges nothing.
    """
    # A fence ended by force counts until its cell has acknowledged that it is lifted; before that, the cell would put
    # it on record again.
    stored = present.get((ObjectKind.FENCE, uuid))
    fence = None if stored is None else fence_of(stored)
    if fence is not None and not fence.forced:
        reason = "it is fenced: enable it first, by force and with a reason if it can destroy its losses no more"
        return Refusal(code=FENCE_OPEN, reason=reason)
    if fence is not None and not fence.is_acknowledged and (fence.cell is None or fence.cell in cells):
        return Refusal(code=FENCE_OPEN, reason="its cell has not acknowledged yet that the fence is to be lifted")
    decided = present.get((ObjectKind.HOST, uuid))
    drain = "" if decided is None else host_decision(decided).drain or ""
    of_drain = present.get((ObjectKind.DRAIN, drain))
    if of_drain is not None and drain_of(drain, of_drain.body).state is not DrainState.ENDED:
        return Refusal(code=DRAINING, reason=f"drain {drain} has not ended: stop it first")
    return None


def traces(present: Objects, uuid: str, names: Collection[str]) -> tuple[ChangedObject, ...]:
    """The changes that remove a host from the record: its decision, its fence, and its places in aggregates.

    names: by which aggregates may name it, its uuid among them.
    """
    found = [
        ChangedObject(kind=kind, name=uuid, before=stored.body)
        for kind in (ObjectKind.HOST, ObjectKind.FENCE)
        if (stored := present.get((kind, uuid))) is not None
    ]
    for (kind, name), stored in sorted(present.items()):
        if kind is not ObjectKind.AGGREGATE:
            continue
        aggregate = msgspec.convert(stored.body, Aggregate)
        if any(host in names for host in aggregate.hosts or ()):
            left = replace(aggregate, hosts=tuple(host for host in aggregate.hosts or () if host not in names))
            after = msgspec.to_builtins(left)
            found.append(ChangedObject(kind=kind, name=name, before=stored.body, after=after))
    return tuple(found)


def with_entry(changed: tuple[ChangedObject, ...], uuid: str, host: str) -> tuple[ChangedObject, ...]:
    """The changes with one of the host itself, so that the log of changes names it. A host without a decision is
    enabled.
    """
    if any(one.kind is ObjectKind.HOST for one in changed):
        return changed
    before = msgspec.to_builtins(HostDecision(host=host, state=AdminState.ENABLED))
    return (ChangedObject(kind=ObjectKind.HOST, name=uuid, before=before), *changed)


log = structlog.get_logger(__name__)

ANSWER_S = 10.0  # of placement, and of a cell
MAX_NAMED = 5  # instances, or hosts, that a refusal names
HAS_INSTANCES = "host.has_instances"
UNKNOWN = "service.unknown"
AMBIGUOUS = "service.ambiguous"
UP = "service.up"
HAS_HOSTS = "service.has_hosts"
NO_CELL = "cell.unknown"


class HostRemoval:
    """Deletes hosts and compute services on an operator's command. One per scheduler."""

    def __init__(
        self,
        store: SchedulerStore,
        registry: ObjectRegistry,
        selector: Selector,
        api: Bus,  # the bus to placement
        cells: Callable[[], Mapping[str, Bus]],  # the buses of the cells, by name
        *,
        clock: Clock,
    ) -> None:
        self._store = store
        self._registry = registry
        self._selector = selector
        self._api = api
        self._cells = cells
        self._clock = clock

    # --- a host

    async def delete_host(self, command: DeleteHost, uuid: str, host: str, message_id: str) -> HostDeleted | Refusal:
        """Delete one host, unless something shows that it may not be gone. Raises Transient, or RequestRefused.

        message_id: of the command.
        """
        # Placement is first. A scheduler that ends between the two leaves a host without providers, which takes
        # nothing; the message is delivered again, or the operator repeats the command.
        now_s, cells = self._clock.monotonic(), self._registry.cells_in_use()  # it may have come to any of them
        kept = self._selector.table.reported(uuid, cells, now_s) or await self._kept_by_instances(uuid)
        if kept is not None:
            return kept
        present = await self._store.objects()
        assert present is not None
        stands = removal_blocker(present.objects, uuid, self._registry.cells_in_use())
        if stands is not None:
            return stands
        delete = ProviderTreeDelete(root_uuid=uuid)
        deleted = await self._api.request(delete, ProviderTreeDeleted, timeout_s=ANSWER_S, cause=uuid)
        names = {uuid} if self._is_shared(uuid, host) else {uuid, host}
        aggregates: list[str] = []
        is_on_record = deleted.removed

        async def make(_unit: OperationUnit, present: RecordedObjects) -> Made | Refusal:
            nonlocal is_on_record
            kept = removal_blocker(present.objects, uuid, self._registry.cells_in_use())
            if kept is not None:  # decided since
                return kept
            changed = traces(present.objects, uuid, names)
            aggregates[:] = [one.name for one in changed if one.kind is ObjectKind.AGGREGATE]
            is_on_record |= bool(changed)
            entered = with_entry(changed, uuid, host) if is_on_record else ()
            return entered, ChangeActor(command.by, command.reason, self._clock.time())

        written = await self._registry.write(make, message_id=message_id)
        if isinstance(written, Refusal):
            return written
        log.warning("host.deleted", uuid=uuid, host=host, by=command.by, reason=command.reason)
        return HostDeleted(host_uuid=uuid, host=host, removed=is_on_record, aggregates=tuple(aggregates))

    def _is_shared(self, uuid: str, host: str) -> bool:
        """Whether another host has the name of this one."""
        return any(other != uuid for other in self._selector.hosts_matching(host))

    async def _kept_by_instances(self, uuid: str) -> Refusal | None:
        found = await self._store.active_on([uuid], MAX_NAMED + 1)
        if not found:
            return None
        more = " and more" if len(found) > MAX_NAMED else ""
        reason = f"instances are on record there: {', '.join(found[:MAX_NAMED])}{more}"
        return Refusal(code=HAS_INSTANCES, reason=reason)

    # --- a service

    # The cell has the heartbeats and the instances; only which hosts the service has is checked here: placement knows
    # also those of a service that died before this scheduler started, the host table those whose inventory has another
    # source (bare-metal nodes). Each command done is in the log of changes once, by its message's id, whether or not
    # the cell still had the service: a repeat after a late answer finds nothing.
    async def delete_service(self, command: DeleteService, message_id: str) -> ServiceDeleted | Refusal:
        """Delete one service, unless something shows that it may not be gone. Raises Transient, or RequestRefused.

        message_id: of the command.
        """
        name = command.service
        found = self._selector.table.services.cells_of(name) if command.cell is None else [command.cell]
        if not found:
            return Refusal(code=UNKNOWN, reason=f"there is no compute service {name}")
        if len(found) > 1:
            return Refusal(code=AMBIGUOUS, reason=f"several cells have a compute service {name}: {', '.join(found)}")
        cell = found[0]
        bus = self._cells().get(cell)
        if bus is None:
            return Refusal(code=NO_CELL, reason=f"there is no cell {cell}")
        table = self._selector.table
        index = table.services.index_of(cell, name)
        if index != NO_SERVICE and table.services.states[index].down is None:
            return Refusal(code=UP, reason=f"the compute service {name} is up")
        hosts = await hosts_of_services(self._selector, self._api, cell, [name], timeout_s=ANSWER_S)
        kept = _host_removal_blocker(hosts.values())
        if kept is not None:
            return kept
        order = CellServiceDelete(service=name, reason=command.reason, by=command.by)
        answer = await bus.request(order, CellServiceDeleted, timeout_s=ANSWER_S, cause=name)
        before = msgspec.to_builtins(DeletedService(cell=cell))
        entry = ChangedObject(kind=ObjectKind.SERVICE, name=name, before=before)

        async def make(_unit: OperationUnit, _present: RecordedObjects) -> Made:
            """Nothing of the service is on record after this entry of the log of changes."""
            return (entry,), ChangeActor(command.by, command.reason, self._clock.time())

        await self._registry.write(make, message_id=message_id)
        gone = ServiceRemoved(cell=cell, service=name, at=answer.at)
        self._selector.table.delete_service(gone, self._clock.monotonic())
        log.warning("service.deleted", service=name, cell=cell, by=command.by, reason=command.reason)
        return ServiceDeleted(service=name, cell=cell, removed=answer.removed)


def _host_removal_blocker(hosts: Collection[str]) -> Refusal | None:
    """Why a service is kept: placement has hosts of it."""
    if not hosts:
        return None
    count = f"{MAX_SERVICE_HOSTS} or more" if len(hosts) >= MAX_SERVICE_HOSTS else str(len(hosts))
    some = ", ".join(sorted(hosts)[:MAX_NAMED])
    reason = f"placement has hosts of it, which are to be deleted first (`berth host delete`): {count}, as {some}"
    return Refusal(code=HAS_HOSTS, reason=reason)
