"""A request about an instance without an outcome, and the record of its decision. Pure."""

from __future__ import annotations

from msgspec import Struct

from bus.contracts.actions import ActionRequest, ActionState
from scheduler_worker.records.action_record import RecordedAction, RequestKey
from scheduler_worker.records.build_record import FAILED_OR_REFUSED, SCHEDULED, Actor
from scheduler_worker.records.request_record import digest_of
from scheduler_worker.requests.request_delivery import RequestDelivery


class PendingAction(Struct, frozen=True, kw_only=True):
    """A request that has no outcome yet."""

    batch_index: int  # in its batch
    request: ActionRequest
    taken_at: float
    delivery: RequestDelivery = RequestDelivery()
    drain: str | None = None  # as in RecordedAction

    @property
    def key(self) -> RequestKey:
        """The key of the records that it concerns."""
        return self.request.request_id, self.request.instance_uuid

    @property
    def digest(self) -> bytes:
        """Of its whole content."""
        return digest_of(self.request)


def record_of(pending: PendingAction, state: ActionState, actor: Actor, **more: object) -> RecordedAction:
    """The record of a request that was dispatched, refused, or failed because no host fits."""
    request = pending.request
    ended = state is not ActionState.SCHEDULED
    return RecordedAction(
        request_id=request.request_id,
        instance_uuid=request.instance_uuid,
        project_id=request.project_id,
        kind=request.kind,
        digest=pending.digest,
        state=state,
        sequence=FAILED_OR_REFUSED if ended else SCHEDULED,
        terminal=ended,
        created_at=actor.at,
        drain=pending.drain,
        **more,  # type: ignore[arg-type]
    )
