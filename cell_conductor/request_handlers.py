"""The effects of the conductor's messages on its instances. Batches in, one outcome each; the engine does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec import Struct

from bus.bus import Bus
from bus.clock import Clock
from bus.consuming.outcome import DEAD_LETTERED_BY_BROKER, Done, Outcome, Received, Refuse, dead_letter_reason_of
from bus.contracts.actions import ActionKind, CellAction, CellActionQuery, CellTransferOut, MachineChanged
from bus.contracts.base import Message, Refusal
from bus.contracts.cell import CellBuild, CellBuildQuery, CellDelete, CellServiceDelete, ComputeOutcome, ComputeResult
from bus.contracts.operations import CellFence
from cell_conductor.engine import Engine
from cell_conductor.hosts.fence_cache import FenceCache
from cell_conductor.hosts.fence_controller import FenceController
from cell_conductor.hosts.lease_controller import LeaseController
from cell_conductor.state.events import (
    ActionRequested,
    BuildRequested,
    ChangeEnded,
    DeleteRequested,
    Destroyed,
    Event,
    InstanceEvent,
    Spawned,
    SpawnFailed,
    TransferEnded,
    TransferRequested,
    action_event,
)

E = TypeVar("E", bound=Event)

DONE = Done()
DEAD_LETTER_QUEUE = "conductor.dead_letters"
LOST = Refusal(code="build.lost", reason="no compute service that is up has a machine of it")


class RequestHandlers:
    """Queues conductor.requests, .dead_letters and .results: requests for instances, and results of attempts."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        bus: Bus,
        *,
        fences: FenceCache,
        fence_controller: FenceController,
        leases: LeaseController,
    ) -> None:
        """`bus`: the cell's, on which checks for other cells are passed on."""
        self._bus = bus
        self._leases = leases
        self._engine = engine
        self._clock = clock
        self._fences = fences
        self._fence_controller = fence_controller

    async def requests(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """CellBuild, CellAction, CellDelete, and queries of them; CellFence, which is handled first, because the others
        depend on it; and CellServiceDelete, which is handled last: no build waits for it.
        """
        decisions = [one.message for one in batch if isinstance(one.message, CellFence)]
        if decisions:
            await self._fence_controller.take(decisions, self._engine)
        if any(_is_evacuation(one.message) for one in batch):
            await self._fences.load()  # another conductor may have taken the fence a moment ago
        rest = [one for one in batch if not isinstance(one.message, CellFence | CellServiceDelete)]
        handled = iter(await self._take(rest, "requests") if rest else ())
        outcomes: list[Outcome] = []
        for received in batch:
            if isinstance(received.message, CellServiceDelete):
                outcomes.append(await self._delete_service(received, received.message))
            else:
                outcomes.append(DONE if isinstance(received.message, CellFence) else next(handled))
        return outcomes

    async def _delete_service(self, received: Received, command: CellServiceDelete) -> Outcome:
        if received.is_late():
            return DONE  # its operator has been answered that this cell did not answer
        return await self._leases.delete(command)

    async def dead_letters(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Queue conductor.dead_letters: a dead-lettered build or action ends with one event, and is not started."""
        # A delete is tried once more, without the messages that it came with.
        return await self._take(batch, "dead_letters")

    async def results(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """ComputeResult and MachineChanged."""
        return await self._take(batch, "results")

    async def _take(self, batch: Sequence[Received], source: str) -> list[Outcome]:
        at = self._clock.time()
        outcomes: list[Outcome] = []
        incoming: list[InstanceEvent] = []
        for received in batch:
            is_query = isinstance(received.message, CellBuildQuery | CellActionQuery)
            if is_query and not self._engine.acts:  # it comes again: what it is about may wait behind it
                outcomes.append(DONE)
                continue
            instance_event = _instance_event(received, at)
            if instance_event is None:
                outcomes.append(Refuse("message.unexpected", type(received.message).__name__))
            else:
                outcomes.append(DONE)
                incoming.append(instance_event)
        flushed = await self._engine.take(incoming, source=source) if incoming else None
        if flushed is None:
            return outcomes
        return [Done(after=flushed) if outcome is DONE else outcome for outcome in outcomes]


def _is_evacuation(message: Message) -> bool:
    return isinstance(message, CellAction) and message.kind is ActionKind.EVACUATE


def _instance_event(received: Received, at: float) -> InstanceEvent | None:
    """The event that a message brings; None: not a message of these queues."""
    message, meta = received.message, received.meta
    uuid = ""
    event: Event | None = None
    if isinstance(message, CellBuild):
        uuid = message.spec.instance_uuid
        event = build_requested(message, at, meta.cause or uuid, _dead_letter_reason(received))
    elif isinstance(message, CellBuildQuery):
        uuid = message.spec.instance_uuid
        event = build_queried(message, at, meta.cause)
    elif isinstance(message, CellDelete):
        uuid = message.instance_uuid
        event = _event(DeleteRequested, message, at, cause=meta.cause or uuid)
    elif isinstance(message, CellAction):
        uuid = message.instance_uuid
        event = action_event(
            message, at, meta.cause or message.request_id, dead_letter_reason=_dead_letter_reason(received)
        )
    elif isinstance(message, CellActionQuery):
        uuid, event = message.instance_uuid, action_queried(message, at, meta.cause)
    elif isinstance(message, CellTransferOut):
        uuid, event = message.instance_uuid, transfer_event(message, at, meta.cause, _dead_letter_reason(received))
    elif isinstance(message, MachineChanged):
        uuid, event = message.instance_uuid, _event(ChangeEnded, message, at)
    elif isinstance(message, ComputeResult):
        uuid, event = message.instance_uuid, _result(message, at)
    return None if event is None else InstanceEvent(uuid, event, meta.id, meta.cause)


def _dead_letter_reason(received: Received) -> Refusal | None:
    """Why a request is not carried out any more; None: it is carried out."""
    return dead_letter_reason_of(received) or (DEAD_LETTERED_BY_BROKER if received.queue == DEAD_LETTER_QUEUE else None)


def _common(message: Message, kind: type[Struct]) -> dict[str, Any]:
    """The fields of a message that a struct of this kind has as well."""
    return {name: getattr(message, name) for name in kind.__struct_fields__ if name in message.__struct_fields__}


def _event(kind: type[E], message: Message, at: float, **other: Any) -> E:
    """The event that a message brings: the fields of both, and those that the event alone has."""
    return kind(**{**_common(message, kind), **other, "at": at})


def build_requested(
    message: CellBuild, at: float, cause: str, dead_letter_reason: Refusal | None = None
) -> BuildRequested:
    """The event that a CellBuild brings."""
    return _event(BuildRequested, message, at, cause=cause, dead_letter_reason=dead_letter_reason)


def build_queried(message: CellBuildQuery, at: float, cause: str = "") -> BuildRequested:
    """The event that a CellBuildQuery brings: a build that is not started any more."""
    nothing: dict[str, Any] = {"selections": (), "consumer_generation": None}
    cause = cause or message.spec.instance_uuid
    return _event(BuildRequested, message, at, cause=cause, dead_letter_reason=LOST, is_query=True, **nothing)


def action_queried(message: CellActionQuery, at: float, cause: str = "") -> ActionRequested:
    """The event that a CellActionQuery brings."""
    return action_event(CellAction(**_common(message, CellAction)), at, cause or message.request_id, is_query=True)


def transfer_event(
    message: CellTransferOut, at: float, cause: str = "", dead_letter_reason: Refusal | None = None
) -> Event:
    """The event that a CellTransferOut brings."""
    if message.ended:
        return _event(TransferEnded, message, at)
    request, cause = CellAction(**_common(message, CellAction), offload=True), cause or message.request_id
    if dead_letter_reason is not None:
        return action_event(request, at, cause, dead_letter_reason=dead_letter_reason)
    return TransferRequested(at=at, request=request, cause=cause, attempt=message.attempt)


def _result(message: ComputeResult, at: float) -> Event:
    match message.outcome:
        case ComputeOutcome.ACTIVE:
            return _event(Spawned, message, at, warning=message.reason, ended_at=message.at)
        case ComputeOutcome.FAILED:
            return _event(SpawnFailed, message, at, code=message.code or "spawn.failed", ended_at=message.at)
        case ComputeOutcome.DESTROYED:
            return _event(Destroyed, message, at)
