"""The record of a build under late, doubled and foreign announcements."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bus.contracts.base import Meta
from bus.contracts.build import AttemptRecord, BuildEvent, BuildState
from bus.wire import Malformed
from scheduler_worker.domain.builds import RecordedBuild, apply_announcement
from scheduler_worker.domain.requests import refused_unreadable, timeline_of

UUID = "00000000-0000-4000-8000-000000000001"
AT = RecordedBuild(
    instance_uuid=UUID, project_id="demo", state=BuildState.SCHEDULED, sequence=2, terminal=False, cell="c1"
)


def event(state: BuildState, sequence: int, *, terminal: bool = False) -> BuildEvent:
    return BuildEvent(instance_uuid=UUID, project_id="demo", state=state, sequence=sequence, terminal=terminal)


def play(
    *events: BuildEvent, cell: str = "c1", start: RecordedBuild = AT
) -> tuple[RecordedBuild, list[tuple[str, bool]]]:
    build, published = start, []
    for one in events:
        build, announced = apply_announcement(build, one, cell)
        if announced is not None:
            published.append((announced.state.value, announced.terminal))
    return build, published


def test_late_and_doubled_ones_are_ignored() -> None:
    build, published = play(
        event(BuildState.BUILDING, 10),
        event(BuildState.ACTIVE, 12, terminal=True),
        event(BuildState.BUILDING, 11),
        event(BuildState.ACTIVE, 12, terminal=True),
    )
    assert published == [("building", False), ("active", True)]
    assert (build.state, build.sequence) == (BuildState.ACTIVE, 12)


def test_an_end_that_was_overtaken_by_what_followed_it_still_ends_its_request() -> None:
    """Active, then lost: the cell calls the failure no end, because it has announced one; that one comes too late."""
    build, published = play(event(BuildState.FAILED, 13), event(BuildState.ACTIVE, 12, terminal=True))
    assert published == [("failed", True)] and build.terminal


def test_another_cell_decides_nothing() -> None:
    assert play(event(BuildState.FAILED, 99, terminal=True), cell="c2") == (AT, [])


def test_a_build_ends_once_and_its_delete_ends_once() -> None:
    build, published = play(
        event(BuildState.ACTIVE, 12, terminal=True),
        event(BuildState.FAILED, 13, terminal=True),
        event(BuildState.DELETED, 15, terminal=True),
        event(BuildState.DELETED, 16, terminal=True),
    )
    assert published == [("active", True), ("failed", False), ("deleted", True)]
    assert build.state is BuildState.DELETED


def test_a_deleted_instance_is_deleted_though_the_cell_forgot_a_number_that_it_had_announced() -> None:
    """Seed 81141: "deleting", not yet on disk when the cell's database died, had the number that "deleted" then had."""
    for number in (11, 12):
        build, published = play(
            event(BuildState.DELETING, 11),
            event(BuildState.DELETING, 12),
            event(BuildState.DELETED, number, terminal=True),
            event(BuildState.DELETED, number, terminal=True),
        )
        assert published == [("deleting", False), ("deleting", False), ("deleted", True)]
        assert (build.state, build.sequence) == (BuildState.DELETED, 13)


def test_a_delete_under_way_stays_so_on_record() -> None:
    deleting = RecordedBuild(
        instance_uuid=UUID, project_id="demo", state=BuildState.DELETING, sequence=10, terminal=False, cell="c1"
    )
    build, published = play(event(BuildState.ACTIVE, 11, terminal=True), start=deleting)
    assert build.state is BuildState.DELETING and published == [("active", True)]


states = st.sampled_from([BuildState.BUILDING, BuildState.ACTIVE, BuildState.FAILED, BuildState.DELETED])


@given(st.lists(st.builds(event, states, st.integers(0, 30), terminal=st.booleans()), max_size=30))
def test_announcements_rise_and_hold_one_terminal_each(events: list[BuildEvent]) -> None:
    build, published, sequence = AT, [], AT.sequence
    for one in events:
        build, announced = apply_announcement(build, one, "c1")
        if announced is not None:
            assert announced.sequence > sequence
            sequence = announced.sequence
            published.append(announced)
    assert sum(announced.terminal and announced.state is not BuildState.DELETED for announced in published) <= 1
    assert sum(announced.state is BuildState.DELETED for announced in published) <= 1


def test_an_unreadable_request_is_answered_when_it_names_its_subject() -> None:
    def malformed(body: bytes, key: str = "build.request.0.demo") -> Malformed:
        return Malformed(body=body, code="request.invalid", reason="no flavor", meta=Meta(id="m"), queue="q", key=key)

    (published,) = refused_unreadable(malformed(b'{"instance_uuid":"%s"}' % UUID.encode()))
    assert (published.state, published.terminal, published.sequence, published.code) == (
        BuildState.REFUSED,
        True,
        0,
        "request.invalid",
    )
    assert published.project_id == "demo"
    assert refused_unreadable(malformed(b'{"instance_uuid":"x"}')) == ()
    assert refused_unreadable(malformed(b'{"instance_uuid":"%s"}' % UUID.encode(), "build.request.de.mo")) == ()
    assert refused_unreadable(malformed(b'{"instance_uuid":"%s"}' % UUID.encode(), "")) == ()
    assert refused_unreadable(malformed(b"\xff{")) == ()
    assert refused_unreadable(malformed(b"[" * 100_000)) == ()


def test_item_7_a_forged_request_is_answered_to_the_project_of_its_key_alone() -> None:
    """A project that names another's machine must not end that machine's build for those who wait for it."""
    body = b'{"instance_uuid":"%s","project_id":"demo","flavor":5}' % UUID.encode()
    for code in ("message.invalid", "message.wrong_key"):
        forged = Malformed(body=body, code=code, reason="", meta=Meta(id="m"), queue="q", key="build.request.18.evil")
        (published,) = refused_unreadable(forged)
        assert (published.project_id, published.code) == ("evil", code)


def test_a_timeline_holds_each_attempt_once_and_then_the_end() -> None:
    """A conductor sends the whole history with each end; what is on record already is not announced again."""
    tries = (
        AttemptRecord(attempt=1, host="h1", outcome="failed", code="spawn.failed", reason="no disk", at=2.0),
        AttemptRecord(attempt=2, host="h2", outcome="not_claimed", code="full", at=2.5),
        AttemptRecord(attempt=2, host="h3", outcome="active", at=4.0),
    )
    up = BuildEvent(
        instance_uuid=UUID, project_id="demo", state=BuildState.ACTIVE, sequence=13, cell="c1", host="h3", attempt=2,
        history=tries, at=4.0,
    )  # fmt: skip
    assert [(line.at, line.what, line.detail) for line in timeline_of(up, 0, 9.0)] == [
        (2.0, "failed", "h1 (attempt 1); spawn.failed: no disk"),
        (2.5, "not_claimed", "h2 (attempt 2); full"),
        (4.0, "active", "h3 (attempt 2)"),
    ]
    down = BuildEvent(
        instance_uuid=UUID, project_id="demo", state=BuildState.FAILED, sequence=13, host="h1", attempt=1,
        code="max_retries_exceeded", history=tries[:1], at=3.0,
    )  # fmt: skip
    assert [line.detail for line in timeline_of(down, 0, 9.0)] == [
        "h1 (attempt 1); spawn.failed: no disk",
        "h1 (attempt 1); max_retries_exceeded",
    ]
    gone = BuildEvent(
        instance_uuid=UUID, project_id="demo", state=BuildState.DELETED, sequence=15, cell="c1", history=tries, at=8.0
    )
    assert [line.what for line in timeline_of(gone, 3, 9.0)] == ["deleted"]
