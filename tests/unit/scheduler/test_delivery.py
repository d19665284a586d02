"""How a request came, as one description."""

from __future__ import annotations

import pytest

from bus.consuming.given_up import EXHAUSTED, EXPIRED, GIVEN_UP
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.build import DeleteRequest
from scheduler_worker.domain.delivery import LETTERS, OVERTAKES, RETRIES, delivery_of

REQUESTS = "scheduler.requests"
REQUEST = DeleteRequest(instance_uuid="00000000-0000-4000-8000-000000000001", project_id="p")


def came(
    queue: str = REQUESTS,
    attempt: int = 0,
    *,
    waits: bool = False,
    left_s: float = 9.0,
    exhausted: bool = False,
    given_up: str = "",
) -> Received:
    meta = Meta(id="m", attempt=attempt, reply_to="client.reply.x" if waits else None)
    return Received(REQUEST, meta, "api", queue, exhausted=exhausted, given_up=given_up, left_s=lambda: left_s)


@pytest.mark.parametrize(
    ("received", "last", "code", "is_left"),
    [
        (came(), False, None, False),
        (came(attempt=RETRIES - 1), False, None, False),
        (came(attempt=RETRIES), True, None, False),
        (came(exhausted=True), True, EXHAUSTED, False),
        (came(left_s=-1.0), False, EXPIRED, False),  # the end of one that is not on record
        (came(left_s=-1.0, waits=True), False, EXPIRED, True),
        (came(LETTERS, given_up=EXPIRED), True, EXPIRED, False),
        (came(LETTERS, given_up=EXPIRED, waits=True), True, EXPIRED, True),
        (came(LETTERS, given_up="handler.crashed", waits=True), True, GIVEN_UP, False),
        (came(LETTERS, given_up="broker.delivery_limit"), True, EXHAUSTED, False),
        (came(LETTERS, exhausted=True, given_up=EXPIRED), True, EXHAUSTED, False),
        (came(LETTERS), True, GIVEN_UP, False),
    ],
)  # fmt: skip
def test_how_a_request_came(received: Received, last: bool, code: str | None, is_left: bool) -> None:
    delivery = delivery_of(received, is_warming_up=True)
    why = delivery.ends_with()
    assert (delivery.last, None if why is None else why.code, delivery.is_left) == (last, code, is_left)
    assert delivery.awaits_hosts is not last, "there is no retry in which they may be known"
    assert not delivery_of(received).awaits_hosts


def test_what_a_request_refers_to_is_looked_for_again_a_few_times() -> None:
    assert [delivery_of(came(attempt=number)).may_be_early for number in range(OVERTAKES + 1)] == [True, True, False]
    assert not delivery_of(came(LETTERS, given_up=EXPIRED)).may_be_early


def test_a_letter_that_goes_on_is_its_last_delivery_and_one_that_crashes_ends() -> None:
    expired = delivery_of(came(LETTERS, given_up=EXPIRED, waits=True))
    begun, crashed = expired.going_on(), expired.crashed()
    assert expired.is_late() and begun.last and begun.ends_with() is None
    assert crashed.why is not None and crashed.why.code == GIVEN_UP
    assert not crashed.is_left, "it is on record by now, and has an event"


@pytest.mark.parametrize(("sent_at", "is_old"), [(0.0, False), (99.0, True), (100.0, False)])
def test_a_request_is_old_if_its_record_may_be_purged(sent_at: float, is_old: bool) -> None:
    received = Received(REQUEST, Meta(id="m", sent_at=sent_at), "api", REQUESTS)
    assert delivery_of(received, kept_since=100.0).is_old is is_old
