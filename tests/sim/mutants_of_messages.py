"""Deliberate defects about messages: confirmed too soon, given up too soon, trusted too long, or not repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from bus.consuming.consumer import Consumer
from bus.consuming.in_flight import InFlightDelivery, InFlightMessage
from bus.consuming.outcome import Received
from bus.consuming.outcome_handling import OutcomeHandler, OutcomeMessage
from bus.contracts.build import BuildState
from bus.contracts.placement import ClaimOutcome, ClaimResult
from bus.faults import Transient
from bus.persistence.outbox import OutboxMessage
from bus.persistence.relay import Relay
from bus.publishing import Waiter
from bus.transport import BusUnavailable
from cell_conductor import engine
from cell_conductor.engine import Engine
from cell_conductor.reports.listings import NewestReports
from compute_agent.attempts.destroys import Destroys
from placement_worker.domain import claims
from scheduler_worker.build import admission, claim_answer, dispatcher, recovered_claim
from scheduler_worker.build import placer as placing
from scheduler_worker.fleet.host_listener import HostsListener
from scheduler_worker.records import build_record as builds
from scheduler_worker.records.build_record import RecordedBuild, releases_of


def retry_not_confirmed() -> AbstractContextManager[Any]:
    """A message that is to be tried again is acknowledged before the broker has its copy."""
    retry = OutcomeHandler._retry

    def unsure(self: OutcomeHandler, item: InFlightMessage, received: Received) -> OutcomeMessage:
        copy = retry(self, item, received)
        return copy._replace(post=lambda _: copy.post(Waiter()))

    return patch.object(OutcomeHandler, "_retry", unsure)


def parcel_acked_at_its_first() -> AbstractContextManager[Any]:
    """A broker message that holds many is acknowledged when the first of them is done."""

    acknowledged: set[int] = set()

    def settle(self: InFlightDelivery) -> None:
        if id(self) not in acknowledged:
            acknowledged.add(id(self))
            self.delivery.ack()
        self.open -= 1

    return patch.object(InFlightDelivery, "acknowledge", settle)


def full_queue_forgets() -> AbstractContextManager[Any]:
    """Messages that a full queue has refused are dropped like those that it has taken."""

    ended = Relay._end

    def end(self: Relay, ticket: Any) -> None:
        if not isinstance(ticket.error, BusUnavailable):
            ticket.error = None
        ended(self, ticket)

    return patch.object(Relay, "_end", end)


def progress_lingers_for_ever() -> AbstractContextManager[Any]:
    """A message that may wait for the next one waits for it, however long that takes."""

    async def end_lingering(self: Any) -> None:
        await asyncio.get_running_loop().create_future()

    return patch.object(Relay, "_end_lingering", end_lingering)


@contextmanager
def releases(change: Callable[[RecordedBuild, list[OutboxMessage]], list[OutboxMessage]]) -> Iterator[None]:
    """What placement is told of a record is changed."""

    def changed(build: RecordedBuild, *readers: str) -> list[OutboxMessage]:
        return change(build, releases_of(build, *readers))

    with (
        patch.object(builds, "releases_of", changed),
        patch.object(admission, "releases_of", changed),
        patch.object(dispatcher, "releases_of", changed),
    ):
        yield


def failed_build_keeps_its_claim() -> AbstractContextManager[Any]:
    """A request that has failed releases nothing, though a claim of it may stand, or may still land."""

    return releases(lambda build, sent: [] if build.state is BuildState.FAILED else sent)


def release_leaves_no_fence() -> AbstractContextManager[Any]:
    """A release that comes before the claim which it is to undo leaves nothing that would turn that away."""
    released = claims._release

    def release(ledger: Any, message: Any) -> Any:
        known = Consumer(ledger, message.consumer)
        if known is None or not known.allocations:
            return claims.ReleaseResult(outcome="absent")
        return released(ledger, message)

    return patch.object(claims, "_release", release)


def draining_acknowledges() -> AbstractContextManager[Any]:
    """A worker that stops acknowledges what it has not looked at yet."""
    drain = Consumer.drain

    async def forgetful(self: Consumer, grace_s: float) -> None:
        while self._deliveries:
            self._deliveries.popleft().delivery.ack()
        await drain(self, grace_s)

    return patch.object(Consumer, "drain", forgetful)


def destroys_given_up() -> AbstractContextManager[Any]:
    """A compute service does not try again by itself to destroy, or to look at, what it could not at once."""
    return patch.object(Destroys, "resume_owed", lambda self: None)


def whatever_is_held_is_what_was_claimed() -> AbstractContextManager[Any]:
    """A claim that an earlier delivery made is taken for the first option that is offered now."""

    def taken(state: Any, answer: Any, selector: Any, *, now: float) -> Any:
        if isinstance(answer, ClaimResult) and answer.outcome is ClaimOutcome.CLAIMED and answer.option is None:
            answer = replace(answer, option=0)
        return claim_answer.apply_answer(state, answer, selector, now=now)

    return patch.object(placing, "apply_answer", taken)


def alternate_that_left() -> AbstractContextManager[Any]:
    """Alternates are named as they were chosen: it is not checked whether they left while the claim was under way."""
    return patch.object(recovered_claim, "_is_still_in", lambda cell, alternate, selector: True)


def overtaken_report_accepted() -> AbstractContextManager[Any]:
    """A conductor accepts every report of a host, also one that a newer one has overtaken."""
    return patch.object(NewestReports, "is_newer", lambda self, report: True)


def hosts_not_queried_after_a_loss() -> AbstractContextManager[Any]:
    """A scheduler whose connection was lost does not request what the hosts published meanwhile."""
    return patch.object(HostsListener, "on_reconnected", lambda self: None)


def overtaken_write_given_up() -> AbstractContextManager[Any]:
    """A conductor that finds another's write where it meant to write takes its own for done."""
    apply = Engine._apply

    async def once(self: Engine, arrivals: Any) -> Any:
        with patch.object(engine, "MAX_STALE", 1):
            try:
                return await apply(self, arrivals)
            except Transient as error:
                if error.code == "instance.contended":
                    return []
                raise

    return patch.object(Engine, "_apply", once)


MUTANTS_OF_MESSAGES = (progress_lingers_for_ever,)
# Looked for in fewer than sixty seeds so far, or repaired by something else before any check could notice.
UNPROVEN_OF_MESSAGES = (
    full_queue_forgets,
    retry_not_confirmed,
    parcel_acked_at_its_first,
    release_leaves_no_fence,
    failed_build_keeps_its_claim,  # a claim that may stand is left to its cell; one that lands later: test_twins
    draining_acknowledges,
    destroys_given_up,
    whatever_is_held_is_what_was_claimed,
    alternate_that_left,
    overtaken_report_accepted,
    hosts_not_queried_after_a_loss,
    overtaken_write_given_up,
)
