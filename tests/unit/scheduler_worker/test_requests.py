"""What builds, deletes and moves have in common as requests, by tables: their deliveries, events and timelines."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.codec import Malformed
from bus.consuming.outcome import EXPIRED, Received
from bus.contracts.actions import ActionEvent, ActionKind, ActionState, Condition
from bus.contracts.base import MAX_REASON, Meta, Refusal
from bus.contracts.build import AttemptRecord, BuildEvent, BuildRequest, BuildState, TimelineEntry
from bus.contracts.stages import StageTimes
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.build.pending_build import unknown_flavor
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.records.request_record import digest_of, timeline_of
from scheduler_worker.requests.request_delivery import (
    DEAD_LETTERS,
    LAST,
    MAX_RETRIES,
    OVERTAKES,
    RequestDelivery,
    classify_delivery,
)
from scheduler_worker.requests.request_refusal import refused_action, refused_build, refused_unreadable
from tests.unit.scheduler_worker.hosts import Hosts

VM, MOVE = (f"{n}0000000-0000-4000-8000-000000000001" for n in "ad")
REQUEST = BuildRequest(instance_uuid=VM, project_id="p", flavor="f")
WHY = Refusal(code="some.code", reason="why")
AT = 1000.0


# --- deliveries


def received(queue: str = "scheduler.requests", **more: Any) -> Received:
    outer = {name: more.pop(name) for name in ("at_delivery_limit", "dead_letter_code", "remaining_s") if name in more}
    return Received(REQUEST, Meta(id="m", **more), "api", queue, **outer)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ({}, {}),
        ({"retries": MAX_RETRIES - 1}, {"retries": MAX_RETRIES - 1}),
        ({"retries": MAX_RETRIES}, {"retries": MAX_RETRIES, "last": True}),
        ({"retries": MAX_RETRIES + 1}, {"retries": MAX_RETRIES + 1, "last": True}),
        ({"reply_to": "q"}, {"has_requester": True}),
        ({"sent_at": AT - 1}, {"is_old": True}),
        ({"sent_at": AT}, {}),
        ({"queue": DEAD_LETTERS}, {"has_dead_letter": False, "last": True, "why": "delivery.dead_lettered"}),
        ({"queue": DEAD_LETTERS, "dead_letter_code": EXPIRED}, {"has_dead_letter": False, "last": True, "late": True}),
        (
            {"queue": DEAD_LETTERS, "dead_letter_code": "x.y"},
            {"has_dead_letter": False, "last": True, "why": "delivery.dead_lettered"},
        ),
        ({"at_delivery_limit": True}, {"last": True, "why": "delivery.limit_reached"}),
        ({"remaining_s": lambda: -0.1}, {"late": True}),
        ({"remaining_s": lambda: 0.0}, {}),
    ],
)
def test_how_a_request_came(of: dict[str, Any], expected: dict[str, Any]) -> None:
    for is_warming_up in (False, True):
        found = classify_delivery(received(**of), is_warming_up=is_warming_up, recorded_since=AT)
        shown = {
            "retries": found.retries, "has_dead_letter": found.has_dead_letter, "last": found.last,
            "why": found.refusal and found.refusal.code, "has_requester": found.has_requester, "is_old": found.is_old,
            "late": found.is_late(),
        }  # fmt: skip
        plain = {
            "retries": 0, "has_dead_letter": True, "last": False, "why": None, "has_requester": False, "is_old": False,
            "late": False,
        }  # fmt: skip
        assert shown == plain | expected
        assert found.awaits_hosts is (is_warming_up and not found.last)


def test_a_delivery_of_which_nothing_is_known_is_the_first() -> None:
    plain = replace(classify_delivery(received()), is_late=RequestDelivery().is_late)
    assert plain == RequestDelivery() and RequestDelivery(retries=MAX_RETRIES, last=True) == LAST
    assert (
        not classify_delivery(received(sent_at=0.5)).is_old
        and classify_delivery(received(sent_at=0.5), recorded_since=AT).is_old
    )


@pytest.mark.parametrize(
    ("delivery", "may_be_early"),
    [
        (RequestDelivery(), True),
        (RequestDelivery(retries=OVERTAKES - 1), True),
        (RequestDelivery(retries=OVERTAKES), False),
        (RequestDelivery(last=True), False),
        (LAST, False),
    ],
)
def test_what_a_request_refers_to_may_come_after_it(delivery: RequestDelivery, may_be_early: bool) -> None:
    assert delivery.may_be_out_of_order is may_be_early


def test_one_content_has_one_digest() -> None:
    assert digest_of(REQUEST) == digest_of(replace(REQUEST)) != digest_of(replace(REQUEST, flavor="g"))


def test_whoever_repeats_a_request_it_is_the_same() -> None:
    """By its content alone a repetition is told from a clash; and one of before there was an asker has none."""
    assert digest_of(replace(REQUEST, by="alice")) == digest_of(replace(REQUEST, by="bob")) == digest_of(REQUEST)
    assert b'"by"' not in msgspec.json.encode(REQUEST)


@pytest.mark.parametrize(("names", "missing"), [([], None), (["all"], None), (["own"], "own"), (["all", "no"], "no")])
def test_the_flavors_that_a_project_may_not_request(names: list[str], missing: str | None) -> None:
    flavors = {"all": Flavor(vcpus=1, memory_mb=1), "own": Flavor(vcpus=1, memory_mb=1, projects=("p",))}
    config = Hosts([], config=SchedulerConfig(default_flavors=(), flavors=flavors)).selector.config
    refusal = unknown_flavor(names, "q", config)
    if missing is None:
        assert refusal is None
    else:
        assert refusal == Refusal(code="flavor.unknown", reason=f"there is no flavor {missing} (there are: all)")
    long = unknown_flavor(["x" * (MAX_REASON + 1)], "q", config)
    assert long is not None and len(long.reason) == MAX_REASON


# --- events


STAMPS = StageTimes(requested=1.0)
BUILT = BuildEvent(
    instance_uuid=VM, project_id="p", state=BuildState.ACTIVE, sequence=3, cell="c1", host="h1", stage_times=STAMPS
)
MOVED = ActionEvent(request_id=MOVE, instance_uuid=VM, project_id="p", kind=ActionKind.RESIZE, state=ActionState.DONE)


def tried(host: str, outcome: str, at: float = 0.0, **more: Any) -> AttemptRecord:
    return AttemptRecord(attempt=1, host=host, outcome=outcome, at=at, **more)


def line(what: str, detail: str = "", **more: Any) -> TimelineEntry:
    return TimelineEntry(**{"at": AT, "actor": "conductor", "what": what, "detail": detail, **more})


@pytest.mark.parametrize(
    ("event", "known", "lines"),
    [
        (BUILT, 0, [line("active", "h1", actor="conductor c1", stage_times=STAMPS)]),
        (replace(BUILT, stage_times=None, cell=None, host=None, at=7.0), 0, [line("active", at=7.0)]),
        (replace(MOVED, attempt=2), 0, [line("resize done")]),
        (replace(MOVED, host="h2", attempt=2), 0, [line("resize done", "h2 (attempt 2)")]),
        (replace(MOVED, host="h2", code="a.b"), 0, [line("resize done", "h2; a.b")]),
        (replace(MOVED, code="a.b", reason="why"), 0, [line("resize done", "a.b: why")]),
        (replace(MOVED, reason="why"), 0, [line("resize done", "why")]),
        (
            replace(MOVED, cell="c2", history=(tried("h1", "failed", 5.0, code="x"), tried("h2", "active"))), 0,
            [
                line("resize failed", "h1 (attempt 1); x", at=5.0, actor="conductor c2"),
                line("resize done", actor="conductor c2"),
            ],
        ),
        (
            replace(BUILT, cell=None, history=(tried("h1", "failed"), tried("h2", "given-up"))), 1,
            [line("given-up", "h2 (attempt 1)"), line("active", "h1", stage_times=STAMPS)],
        ),
    ],
)  # fmt: skip
def test_an_event_as_lines_of_the_timeline(event: Any, known: int, lines: list[TimelineEntry]) -> None:
    assert list(timeline_of(event, known, AT)) == lines


def test_the_events_of_what_changes_no_record() -> None:
    event = BuildEvent(
        instance_uuid=VM, project_id="p", state=BuildState.REFUSED, sequence=0, terminal=True, code="some.code",
        reason="why", at=AT,
    )  # fmt: skip
    assert refused_build(VM, "p", WHY, AT) == OutboxMessage("api", event, VM)
    assert refused_build(VM, "p", WHY, AT, 4).message == replace(event, sequence=4)
    action = ActionEvent(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=ActionKind.STOP, state=ActionState.REFUSED, sequence=0,
        terminal=True, condition=Condition.UNKNOWN, code="some.code", reason="why", at=AT,
    )  # fmt: skip
    assert refused_action(MOVE, VM, "p", ActionKind.STOP, refusal=WHY, at=AT) == OutboxMessage("api", action, MOVE)


NAMED = {"instance_uuid": VM, "request_id": MOVE}


@pytest.mark.parametrize(
    ("key", "body", "kind"),
    [
        ("build.request.demo", {"instance_uuid": VM}, BuildEvent),
        ("instance.action.demo", NAMED, None),
        ("instance.action.demo", NAMED | {"kind": "stop"}, ActionKind.STOP),
        ("instance.action.demo", NAMED | {"kind": "no such"}, None),
        ("instance.action.demo", {"instance_uuid": VM}, ()),
        ("instance.action.demo", {"request_id": MOVE}, ()),
        ("build.request.demo", {"instance_uuid": "x"}, ()),
        ("build.request.de.mo", {"instance_uuid": VM}, ()),
        ("", NAMED, ()),
    ],
)
def test_a_request_that_cannot_be_read_ends_where_its_ids_can(key: str, body: dict[str, str], kind: Any) -> None:
    reason = "r" * (MAX_REASON + 1)
    malformed = Malformed(msgspec.json.encode(body), "message.invalid", reason, Meta(id="m"), key=key)
    refusal = Refusal(code="message.invalid", reason=reason[:MAX_REASON])
    if kind == ():
        assert refused_unreadable(malformed) == ()
    elif kind is BuildEvent:
        assert refused_unreadable(malformed) == (refused_build(VM, "demo", refusal, 0.0).message,)
    else:
        assert refused_unreadable(malformed) == (
            refused_action(MOVE, VM, "demo", kind, refusal=refusal, at=0.0).message,
        )
