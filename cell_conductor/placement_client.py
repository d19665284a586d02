"""Requests to placement that instances wait for: which are due, and the events of their answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import structlog
from msgspec import Struct

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.base import ORDER_OUTDATED, Message
from bus.contracts.placement import Claim, ClaimOutcome, ClaimResult, Release, ReleaseResult, Revert, RevertResult
from bus.faults import Fault, RequestRefused
from bus.transport import BusError
from cell_conductor import metrics
from cell_conductor.awaited_request import AwaitedRequest, awaited_request_of
from cell_conductor.recorded_changes import RecordedChanges
from cell_conductor.state.events import Claimed, ClaimRefused, Event, InstanceEvent, Released, Reverted, RevertRefused
from cell_conductor.state.instance import Instance

log = structlog.get_logger(__name__)


REPLIES: tuple[tuple[type[Message], type[Message]], ...] = (
    (Claim, ClaimResult),
    (Release, ReleaseResult),
    (Revert, RevertResult),
)


class PendingRequest(Struct, frozen=True):
    """A request about one instance, to placement or to compute services."""

    instance: Instance
    message: AwaitedRequest
    resent: bool = False  # it may have been sent before


def due_requests(
    before: Mapping[str, Instance], recorded: RecordedChanges, *, again: Collection[str]
) -> list[PendingRequest]:
    """The requests that are due: new ones, and those of `again` once more."""
    # An instance that was waiting before is another task's: two requests at the same time would be answered twice.
    found: list[PendingRequest] = []
    for uuid, message in recorded.requests.items():
        instance, known = recorded.instances[uuid], before.get(uuid)
        is_new = known is None or awaited_request_of(known) != message
        if is_new or uuid in again:
            found.append(PendingRequest(instance, message, resent=not is_new))
    return found


class PlacementRequests:
    """One conductor's requests. At most one is under way for an instance, as two at once would be answered twice."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        timeout_s: float,
        incarnation: Callable[[], int],
        on_superseded: Callable[[int], None],
    ) -> None:
        """`incarnation()`: of the cell's database, by which this conductor decides now; `on_superseded(incarnation)`:
        placement has this one or a later one, as it has refused the one below.
        """
        self._bus = bus
        self._clock = clock
        self._timeout_s = timeout_s
        self._incarnation = incarnation
        self._on_superseded = on_superseded
        self._under_way: set[str] = set()  # instances

    async def send(self, requests: Sequence[PendingRequest]) -> list[InstanceEvent]:
        """One round of requests, except for instances that wait for an answer already; returns the
        answers as events.
        """
        mine = [request for request in requests if request.instance.uuid not in self._under_way]
        if not mine:
            return []
        self._under_way.update(request.instance.uuid for request in mine)
        try:
            return await self._send(mine)
        finally:
            self._under_way.difference_update(request.instance.uuid for request in mine)

    async def _send(self, requests: Sequence[PendingRequest]) -> list[InstanceEvent]:
        """Many of a kind at once."""
        incoming: list[InstanceEvent] = []
        for kind, reply in REPLIES:
            asked = [(one, message) for one in requests if isinstance(message := one.message, kind)]
            if not asked:
                continue
            messages, causes = [message for _, message in asked], [one.instance.cause for one, _ in asked]
            stated = self._incarnation()
            answers = await self._bus.request_all(messages, reply, timeout_s=self._timeout_s, causes=causes)
            for (one, _), answer in zip(asked, answers, strict=True):
                if isinstance(answer, RequestRefused) and answer.code == ORDER_OUTDATED:
                    self._on_superseded(stated + 1)
                if (event := self._event(one, answer)) is not None:
                    incoming.append(InstanceEvent(one.instance.uuid, event))
        return incoming

    def _event(self, request: PendingRequest, answer: object) -> Event | None:
        """The event of placement's answer to this request; None: no answer yet, and the request is repeated."""
        instance = request.instance
        match request.message, answer:
            case Claim() as claim, ClaimResult() | Fault() as claimed:
                return self._claim_event(request, claim, claimed)
            case Revert() as revert, RevertResult() | Fault() as reverted:
                return self._revert_event(instance, revert, reverted)
            case Release() as release, ReleaseResult() | Fault() as released if self._is_released(instance, released):
                return Released(at=self._clock.time(), consumer=release.consumer, attempt=release.attempt or 0)
        return None

    def _claim_event(self, request: PendingRequest, claim: Claim, answer: ClaimResult | Fault) -> Event | None:
        """The event of placement's answer; None: no answer yet."""
        now, instance = self._clock.time(), request.instance
        if isinstance(answer, RequestRefused) and answer.code != ORDER_OUTDATED:
            metrics.ANSWERS.labels("claim", answer.code).inc()
            return ClaimRefused(at=now, attempt=claim.attempt, reason=f"{answer.code}: {answer.reason}")
        if isinstance(answer, Fault):
            self._unanswered(instance, "claim", answer)
            return None
        metrics.ANSWERS.labels("claim", answer.outcome.value).inc()
        log.info(
            "instance.claim",
            instance=instance.uuid,
            attempt=claim.attempt,
            outcome=answer.outcome,
            outcomes=[outcome.value for outcome in answer.outcomes],
            cause=instance.cause,
        )
        if answer.outcome is ClaimOutcome.CLAIMED and answer.option is not None:
            return Claimed(
                at=now,
                attempt=claim.attempt,
                option=answer.option,
                consumer_generation=answer.consumer_generation,
                outcomes=answer.outcomes,
            )
        return _refused(claim, answer, now, request.resent)

    def _is_released(self, instance: Instance, reply: ReleaseResult | Fault) -> bool:
        if isinstance(reply, Fault):
            self._unanswered(instance, "release", reply)
            return False
        metrics.ANSWERS.labels("release", reply.outcome).inc()
        if reply.outcome == "consumer_conflict":
            # A newer attempt than any of this cell holds it: it does not release that allocation.
            log.warning("instance.release_foreign", instance=instance.uuid, cause=instance.cause)
        return True

    def _revert_event(self, instance: Instance, revert: Revert, reply: RevertResult | Fault) -> Event | None:
        """The event of placement's answer; None: the request is repeated."""
        if isinstance(reply, Fault):
            self._unanswered(instance, "revert", reply)
            return None
        metrics.ANSWERS.labels("revert", reply.outcome).inc()
        now, about = self._clock.time(), {"instance": instance.uuid, "cause": instance.cause, "reason": reply.reason}
        if reply.outcome not in {"reverted", "consumer_conflict"}:
            log.error("instance.revert_refused", outcome=reply.outcome, **about)
            return RevertRefused(at=now, attempt=revert.attempt, outcome=reply.outcome, reason=reply.reason)
        if reply.outcome == "consumer_conflict":
            log.warning("instance.revert_foreign", **about)
        return Reverted(at=now, attempt=revert.attempt, consumer_generation=reply.consumer_generation)

    def _unanswered(self, instance: Instance, kind: str, fault: Fault | BusError) -> None:
        metrics.ANSWERS.labels(kind, fault.code).inc()
        about = {"instance": instance.uuid, "request": kind, "code": fault.code, "reason": str(fault)}
        log.warning("instance.unanswered", cause=instance.cause, **about)


def _refused(claim: Claim, answer: ClaimResult, now: float, repeated: bool) -> ClaimRefused:
    """A claim that took nothing."""
    # If the same request was sent before (a crash, a lost answer), a missing consumer is its own effect: the first
    # request released it, and no host had room. It differs from a consumer that another client holds.
    ours = repeated and answer.consumer_generation is None
    return ClaimRefused(
        at=now,
        attempt=claim.attempt,
        consumer_conflict=answer.outcome is ClaimOutcome.CONSUMER_CONFLICT and not ours,
        consumer_generation=answer.consumer_generation,
        allocations=answer.allocations,
        outcomes=answer.outcomes,
        reason=answer.reason,
    )
