"""The record of a build, a row for each condition: what an announcement changes, and which messages follow a change."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.bus import API
from bus.contracts.build import AttemptRecord, BuildEvent, BuildQuery, BuildState, FunnelStep
from bus.contracts.cell import CellBuild, CellDelete, InstanceSpec, Selection
from bus.contracts.placement import ReleaseRun
from bus.contracts.stages import Stamps
from scheduler_worker.domain.builds import (
    STRANDED,
    Author,
    RecordedBuild,
    apply_announcement,
    effects,
    is_early,
    is_known,
    is_search,
    releases_of,
)

UUID, HOST, OTHER = (f"{n}0000000-0000-4000-8000-000000000001" for n in "abc")
ACCEPTED, SCHEDULED, BUILDING, ACTIVE = (
    BuildState.ACCEPTED,
    BuildState.SCHEDULED,
    BuildState.BUILDING,
    BuildState.ACTIVE,
)
FAILED, REFUSED, DELETING, DELETED = BuildState.FAILED, BuildState.REFUSED, BuildState.DELETING, BuildState.DELETED
TRIED = (AttemptRecord(attempt=1, host="h", outcome="failed"),)
BUILD = RecordedBuild(
    instance_uuid=UUID, project_id="p", state=BUILDING, sequence=9, cell="c1", attempt=2, host="h", host_uuid=HOST,
    code="x", reason="why", history=TRIED, run="mine",
)  # fmt: skip


def event(state: BuildState, sequence: int = 10, **more: Any) -> BuildEvent:
    return BuildEvent(instance_uuid=UUID, project_id="forged", state=state, sequence=sequence, **more)


@pytest.mark.parametrize("name", ["cell", "host", "flavor", "code"])
def test_a_query_by_a_column_without_an_index_is_a_search(name: str) -> None:
    assert is_search(BuildQuery(**{name: "x"})) and is_search(BuildQuery(**{name: ""}))
    assert not is_search(BuildQuery(project_id="p", state=ACTIVE, before=1.0, gang=UUID))


def test_a_line_is_written_by_its_author_at_that_time() -> None:
    line = Author("me", 7.0).entry("what", "detail")
    assert (line.at, line.who, line.what, line.detail) == (7.0, "me", "what", "detail")


@pytest.mark.parametrize("state", BuildState)
def test_a_decision_is_awaited_by_what_is_accepted_alone(state: BuildState) -> None:
    assert replace(BUILD, state=state).awaits_decision is (state is ACCEPTED)


# --- announcements


@pytest.mark.parametrize(
    ("build", "announced", "cell", "after"),
    [
        ({}, event(BUILDING), "c1", (BUILDING, 10, False, False)),
        ({}, event(BUILDING, 9), "c1", None),
        ({}, event(BUILDING, 8), "c1", None),
        ({}, event(BUILDING), "c2", None),
        ({"cell": None}, event(BUILDING), "c1", None),
        ({"state": DELETED}, event(ACTIVE), "c1", None),
        ({"state": DELETED}, event(DELETED), "c1", None),
        ({}, event(ACTIVE, terminal=True), "c1", (ACTIVE, 10, True, True)),
        ({}, event(ACTIVE), "c1", (ACTIVE, 10, True, True)),
        ({}, event(FAILED), "c1", (FAILED, 10, True, True)),
        ({}, event(BUILDING, terminal=True), "c1", (BUILDING, 10, True, True)),
        ({"terminal": True}, event(FAILED, terminal=True), "c1", (FAILED, 10, False, True)),
        ({"terminal": True}, event(BUILDING), "c1", (BUILDING, 10, False, True)),
        ({"terminal": True}, event(DELETED, terminal=True), "c1", (DELETED, 10, True, True)),
        ({}, event(DELETED, 9), "c1", (DELETED, 10, True, True)),
        ({}, event(DELETED, 3), "c1", (DELETED, 10, True, True)),
        ({}, event(DELETED, 12), "c1", (DELETED, 12, True, True)),
        ({"state": DELETING}, event(ACTIVE), "c1", (DELETING, 10, True, True)),
        ({"state": DELETING}, event(DELETED), "c1", (DELETED, 10, True, True)),
        ({"state": DELETING}, event(BUILDING), "c1", (DELETING, 10, False, False)),
    ],
)
def test_an_announcement_by_what_is_on_record(
    build: dict[str, Any], announced: BuildEvent, cell: str, after: tuple[BuildState, int, bool, bool] | None
) -> None:
    """after: state and number on record, terminal as it is published, and on record."""
    before = replace(BUILD, **build)
    found, published = apply_announcement(before, announced, cell)
    if after is None:
        assert (found, published) == (before, None)
        return
    assert published is not None
    assert (found.state, found.sequence, published.terminal, found.terminal) == after
    assert (published.state, published.sequence) == (announced.state, found.sequence)
    assert (published.cell, published.project_id, published.host_uuid) == ("c1", "p", None)


TRIED_TWICE = (*TRIED, replace(TRIED[0], attempt=2))
OF_EVENT: dict[str, Any] = {"host": "g", "host_uuid": OTHER, "attempt": 3, "history": TRIED_TWICE}


@pytest.mark.parametrize("named", [(), *((name,) for name in OF_EVENT), tuple(OF_EVENT)])
def test_what_an_announcement_does_not_name_stays_on_record_but_for_its_reason(named: tuple[str, ...]) -> None:
    more = {name: OF_EVENT[name] for name in named}
    after, _ = apply_announcement(BUILD, event(BUILDING, **more), "c1")
    assert after == replace(BUILD, sequence=10, code="", reason="", **more)
    empty = replace(BUILD, host=None, host_uuid=None, attempt=0, history=())
    after, _ = apply_announcement(empty, event(BUILDING, code="y", reason="z", **more), "c1")
    assert after == replace(empty, sequence=10, code="y", reason="z", **more)


def test_an_announcement_that_changes_its_number_alone_is_known() -> None:
    assert is_known(BUILD, replace(BUILD, sequence=99))
    assert not is_known(BUILD, replace(BUILD, sequence=99, host="g"))


@pytest.mark.parametrize(
    ("build", "announced", "cell", "early"),
    [
        ({}, event(FAILED), "c1", True),
        ({}, event(FAILED, 9), "c1", False),
        ({"state": DELETED}, event(FAILED), "c1", False),
        ({}, event(FAILED), "c2", False),
        ({}, event(BUILDING), "c1", False),
        ({}, event(ACTIVE), "c1", False),
        ({}, event(FAILED, terminal=True), "c1", False),
        ({"terminal": True}, event(FAILED), "c1", False),
    ],
)
def test_a_failure_that_ends_nothing_is_early_where_the_end_is_not_on_record(
    build: dict[str, Any], announced: BuildEvent, cell: str, early: bool
) -> None:
    assert is_early(replace(BUILD, **build), announced, cell) is early


# --- the messages of a change

COMMAND = CellBuild(
    spec=InstanceSpec(instance_uuid=UUID, project_id="p", name="n", image="i", flavor="f"),
    selections=(Selection(host_uuid=HOST, host="h", service="s", allocations={}),),
    consumer_generation=1,
)
NO_CELL: dict[str, Any] = {"cell": None}
STAMPS, FUNNEL = Stamps(requested=1.0), (FunnelStep(step="s", remaining=1),)


@pytest.mark.parametrize(
    ("before", "state", "more", "command", "sent"),
    [
        (None, ACCEPTED, NO_CELL, None, ["event"]),
        (ACCEPTED, ACCEPTED, NO_CELL, None, []),
        (DELETING, DELETING, {}, None, []),
        (ACCEPTED, SCHEDULED, {}, COMMAND, ["command", "event"]),
        (SCHEDULED, DELETING, {}, None, ["delete"]),
        (BUILDING, DELETING, {}, None, ["delete begun"]),
        (ACTIVE, DELETING, {}, None, ["delete begun"]),
        (ACCEPTED, DELETING, {}, None, ["delete begun"]),
        (None, FAILED, NO_CELL, None, ["event", "release"]),
        (ACCEPTED, FAILED, NO_CELL, None, ["event", "release"]),
        (ACCEPTED, FAILED, NO_CELL | {"attempt": 0}, None, ["event"]),
        (ACCEPTED, FAILED, {}, None, ["event"]),
        (ACCEPTED, FAILED, NO_CELL | {"code": STRANDED}, None, ["event"]),
        (ACCEPTED, REFUSED, NO_CELL, None, ["event", "release"]),
        (ACCEPTED, DELETED, NO_CELL, None, ["event", "release"]),
        (FAILED, DELETED, NO_CELL, None, ["event"]),
        (REFUSED, DELETED, NO_CELL, None, ["event"]),
        (FAILED, DELETED, NO_CELL | {"code": STRANDED}, None, ["event", "release"]),
        (ACCEPTED, DELETED, NO_CELL | {"run": ""}, None, ["event"]),
        (DELETING, DELETED, {}, None, ["event"]),
    ],
)
def test_the_messages_of_a_change(
    before: BuildState | None, state: BuildState, more: dict[str, Any], command: CellBuild | None, sent: list[str]
) -> None:
    messages = effects(before, replace(BUILD, state=state, **more), 7.0, command)
    words = []
    for one in messages:
        message = one.message
        bus, word = API, "event"
        if isinstance(message, CellDelete):
            assert message.project_id == "p"
            bus, word = "c1", "delete begun" if message.begun else "delete"
        elif isinstance(message, ReleaseRun):
            assert (message.consumer, message.attempt, message.project_id, message.by) == (UUID, 1, "p", "mine")
            word = "release"
        elif message is command:
            bus, word = "c1", "command"
        assert one.bus == bus
        words.append(word)
    assert words == sent


@pytest.mark.parametrize(
    ("state", "more", "attempt", "code", "stamps"),
    [
        (SCHEDULED, {}, 2, "x", None),
        (SCHEDULED, {"host": None}, 0, "x", None),
        (FAILED, {"terminal": True}, 2, "x", STAMPS),
        (DELETED, {"terminal": True}, 2, "", STAMPS),
    ],
)
def test_the_event_of_a_change(
    state: BuildState, more: dict[str, Any], attempt: int, code: str, stamps: Stamps | None
) -> None:
    build = replace(BUILD, state=state, **more)
    (sent,) = effects(ACCEPTED, build, 7.0, stamps=STAMPS, funnel=FUNNEL)
    assert sent.message == BuildEvent(
        instance_uuid=UUID, project_id="p", state=state, sequence=9, terminal=build.terminal, cell="c1",
        host=build.host, attempt=attempt, code=code, reason="why" if code else "", funnel=FUNNEL, at=7.0, stamps=stamps,
    )  # fmt: skip


@pytest.mark.parametrize("state", BuildState)
def test_no_claim_is_granted_any_more_of_a_run_that_ended_without_a_cell(state: BuildState) -> None:
    build = replace(BUILD, state=state, cell=None)
    assert len(releases_of(build)) == (state in (FAILED, REFUSED, DELETED))
    assert releases_of(replace(build, run="")) == releases_of(replace(build, cell="c1")) == []
    assert len(releases_of(replace(build, code=STRANDED))) == (state is DELETED)
