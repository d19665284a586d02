"""Operators' changes of objects: requested on queue `scheduler.changes`, published on `scheduler.control.{process}`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from uuid import UUID

import msgspec

from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received, Refuse, Retry
from bus.contracts.base import Message, Refusal
from bus.contracts.drains import DrainCommand, DrainStart, DrainTarget
from bus.contracts.objects import HostDecision, ObjectChange, ObjectKind, ObjectsChange, ObjectsChanged, ObjectsRevision
from bus.contracts.operations import AdminState, AdminStateSet, DeleteHost, DeleteService, HostAdminState, SetAdminState
from bus.contracts.workers import WorkerHeartbeat
from bus.faults import RequestRefused, Transient
from scheduler_worker.drain.drain_controller import DrainController
from scheduler_worker.fleet.host_listener import Warmup
from scheduler_worker.fleet.removal import HostRemoval
from scheduler_worker.hosts.host_table import CELL_SILENT, CELL_UNKNOWN
from scheduler_worker.hosts.worker_table import WorkerTable
from scheduler_worker.objects.fence_rules import fence_from_decision
from scheduler_worker.objects.object_registry import TOO_LATE, ObjectRegistry
from scheduler_worker.objects.operator_changes import OperatorChanges
from scheduler_worker.requests.request_delivery import classify_delivery
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store.port import SchedulerStore

HANDLER = "scheduler.changes.refused"
REFUSED_BEFORE = "request.refused_before"
MAX_REASONS = 100  # refusals whose reasons a process remembers


class RefusedCommands:
    """The refused commands on record, by their messages' ids.

    An operator has the answer to the first copy, and may have decided otherwise before another copy arrives.
    """

    def __init__(self, store: SchedulerStore) -> None:
        self._store = store
        self._refusals: dict[str, Refuse] = {}

    async def find(self, message_id: str) -> Refuse | None:
        """The refusal of an earlier copy of this message; None: there is none. Raises Transient."""
        async with self._store.operation() as unit:
            if not await unit.is_handled(HANDLER, message_id):
                return None
        unknown = Refuse(REFUSED_BEFORE, "a copy of this command was refused before; give the command again")
        return self._refusals.get(message_id, unknown)

    async def add(self, message_id: str, refusal: Refuse) -> None:
        """Put a refusal on record, before it is answered. Raises Transient."""
        self._refusals[message_id] = refusal
        if len(self._refusals) > MAX_REASONS:
            del self._refusals[next(iter(self._refusals))]
        async with self._store.operation() as unit:
            await unit.first_time(HANDLER, message_id)


HOST_UNKNOWN = "host.unknown"
# What a host, or a service, that is reported later may do away with. A drain names the kind of its target.
AWAITED = (CELL_UNKNOWN, CELL_SILENT, *(f"{kind}.unknown" for kind in DrainTarget))
HOST_AMBIGUOUS = "host.ambiguous"
REASON_MISSING = "host.reason_missing"


class OperatorHandler:
    """Handles queue `scheduler.changes`: changes of objects, drains, services to delete, and decisions about hosts,
    which name a host by its name or uuid.
    """

    def __init__(
        self,
        registry: ObjectRegistry,
        selector: Selector,
        changes: OperatorChanges,
        drains: DrainController,
        removal: HostRemoval,
        *,
        refused: RefusedCommands,
        find_cells: Callable[[Collection[str]], Awaitable[None]],
        warmup: Warmup,
    ) -> None:
        self._registry = registry
        self._changes = changes
        self._drains = drains
        self._removal = removal
        self._refused_before = refused
        self._find_cells = find_cells
        self._selector = selector
        self._warmup = warmup

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """One after another: an operator's changes are rare, and the latest change of an object wins."""
        return [await self._handle(received) for received in batch]

    async def _handle(self, received: Received) -> Outcome:
        try:
            if (refusal := await self._refused_before.find(received.meta.id)) is not None:
                return refusal
            try:
                outcome = await self._process(received)
            except RequestRefused as refused:  # by placement, or a cell
                outcome = Refuse(refused.code, refused.reason)
            if isinstance(outcome, Refuse) and received.meta.reply_to is not None:  # else it may be replayed
                await self._refused_before.add(received.meta.id, outcome)
        except Transient as fault:
            if isinstance(received.message, SetAdminState):
                raise  # handled again in its order: one that was only published is not overtaken by the next one
            return Refuse(fault.code, fault.reason)  # at once: the requester does not wait for the database
        return outcome

    async def _process(self, received: Received) -> Outcome:
        """Raises Transient, or RequestRefused."""
        message = received.message
        if isinstance(message, SetAdminState):
            return await self._decide(message, received)
        if isinstance(message, DeleteHost):
            return await self._delete_host(message, received)
        if isinstance(message, DeleteService):
            return await self._delete_service(message, received)
        if isinstance(message, DrainStart | DrainCommand):
            return await self._drain(message, received)
        assert isinstance(message, ObjectsChange), message
        return self._answered(await self._change(message, received), received)

    async def _change(
        self, change: ObjectsChange, received: Received, decided: SetAdminState | None = None
    ) -> ObjectsChanged | Refusal:
        """Raises Transient. decided: the command about one host that is carried out by this change."""
        if fenced := fence_from_decision(change):
            await self._find_cells(fenced)
        return await self._changes.apply(change, received.meta.id, decided=decided, is_late=received.is_late)

    def _answered(self, answer: Message | Refusal, received: Received) -> Outcome:
        """The outcome of a command by its answer."""
        if not isinstance(answer, Refusal):
            return Done(reply=answer)
        if answer.code in AWAITED and classify_delivery(received, is_warming_up=self._warmup.is_on()).awaits_hosts:
            return Retry(answer.code, "not every host has been reported yet")
        return Refuse(answer.code, answer.reason)

    async def _drain(self, message: DrainStart | DrainCommand, received: Received) -> Outcome:
        if isinstance(message, DrainStart):
            answer = await self._drains.start(message, received.is_late)
        else:
            answer = await self._drains.command(message, received.meta.id, received.is_late)
        return self._answered(answer, received)

    async def _decide(self, command: SetAdminState, received: Received) -> Outcome:
        uuid = self._one_of(self._find(command), command.host, received)
        if not isinstance(uuid, str):
            return uuid
        if command.force and command.state is not AdminState.FENCED and not command.reason:
            return Refuse(REASON_MISSING, "a fence that is ended by force needs a reason")
        host = self._selector.name_of(uuid)
        body = msgspec.to_builtins(HostDecision(host=host, state=command.state, reason=command.reason))
        change = ObjectsChange(
            changes=(ObjectChange(kind=ObjectKind.HOST, name=uuid, body=body),),
            actor=command.by,
            reason=command.reason,
            force=command.force,
        )
        changed = await self._change(change, received, command)
        if isinstance(changed, Refusal):
            return self._answered(changed, received)
        await self._registry.reload()  # a repeat changes nothing, and may have been carried out by another scheduler
        decision = self._selector.table.decision_of(uuid)
        if decision is None:  # this message is a repeat, and the decision has been deleted since its first delivery
            decision = HostAdminState(host_uuid=uuid, host=host, state=AdminState.ENABLED)
        return Done(reply=AdminStateSet(host=decision))

    async def _delete_host(self, command: DeleteHost, received: Received) -> Outcome:
        found = self._find(command)
        if not found and _is_uuid(command.host):
            found = [command.host]  # it may be deleted already
        named = self._one_of(found, command.host, received)
        if not isinstance(named, str):
            return named
        if received.is_late():
            return Refuse(TOO_LATE, "the requester's time was over")
        answer = await self._removal.delete_host(command, named, self._selector.name_of(named), received.meta.id)
        return self._answered(answer, received)

    async def _delete_service(self, command: DeleteService, received: Received) -> Outcome:
        if received.is_late():
            return Refuse(TOO_LATE, "the requester's time was over")
        return self._answered(await self._removal.delete_service(command, received.meta.id), received)

    def _one_of(self, found: Sequence[str], name: str, received: Received) -> str | Outcome:
        """The uuid of the one host that was found; the outcome of a request that names none, or several."""
        if len(found) == 1:
            return found[0]
        if found:
            return Refuse(HOST_AMBIGUOUS, f"{len(found)} hosts are called {name}: name one of {', '.join(found)}")
        return self._answered(Refusal(code=HOST_UNKNOWN, reason=f"there is no host {name}"), received)

    def _find(self, command: SetAdminState | DeleteHost) -> list[str]:
        """The hosts (uuids) with this name, or the host with this uuid, in the cell that the command names."""
        found = self._selector.hosts_matching(command.host, is_warming_up=self._warmup.is_on())
        if command.cell is None:
            return found
        managed = [uuid for uuid in found if self._selector.cell_of(uuid) == command.cell]
        return managed or [uuid for uuid in found if self._may_be_in(command.cell, uuid, command.host)]

    def _may_be_in(self, cell: str, uuid: str, named: str) -> bool:
        """Whether a host that no service manages was last in this cell. Where an unreported host was is not known: its
        uuid, or a decision about it, is enough then; its name is not, because a host of another cell may have it.
        """
        fence = self._registry.fences.get(uuid)
        last = self._selector.table.last_cell_of(uuid) or (None if fence is None else fence.cell)
        return last == cell or (last is None and (uuid == named or self._registry.decision_of(uuid) is not None))


def _is_uuid(host: str) -> bool:
    try:
        return str(UUID(host)) == host
    except ValueError:
        return False


class ControlListener:
    """Handles queue `scheduler.control.{process}`: new revisions of the objects, and heartbeats of workers."""

    def __init__(self, registry: ObjectRegistry, workers: WorkerTable, bus: str, *, clock: Clock) -> None:
        self._registry = registry
        self._workers = workers
        self._bus = bus  # the name of the bus that the queue is on
        self._clock = clock

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """In any order: the objects on record count. While the database is unavailable the batch waits."""
        for received in batch:
            if isinstance(received.message, WorkerHeartbeat):
                self._workers.apply(received.message, self._bus, self._clock.monotonic())
        if any(isinstance(received.message, ObjectsRevision) for received in batch):
            await self._registry.reload()
        return [Done()] * len(batch)
