"""The effect of a delete, by the state of its build."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.consuming.given_up import EXHAUSTED, EXPIRED, GIVEN_UP, GIVEN_UP_BY_BROKER
from bus.consuming.outcome import Done, Received, Refuse, Retry
from bus.contracts.base import Meta
from bus.contracts.book import HeldAllocation
from bus.contracts.build import BuildEvent, BuildState, DeleteRequest
from bus.contracts.cell import CellDelete
from bus.contracts.placement import ReleaseRun
from scheduler_worker.domain.builds import Author, ProjectsBuild, RecordedBuild
from scheduler_worker.domain.deletes import (
    UNKNOWN,
    PendingDelete,
    pending_delete,
    plan_deletes,
    refuse_unknown,
    tombstones,
)
from scheduler_worker.domain.delivery import HOSTS_UNKNOWN, OVERTAKES, delivery_of
from scheduler_worker.domain.placement import STRANDED

UUID = "00000000-0000-4000-8000-000000000001"
AUTHOR = Author("scheduler", 7.0)


def requested(position: int = 0, *, project: str = "p", delivery: int = 0) -> PendingDelete:
    request = DeleteRequest(instance_uuid=UUID, project_id=project)
    received = Received(request, Meta(id="m", attempt=delivery), "api", "scheduler.requests")
    return pending_delete(received, delivery_of(received, is_warming_up=False), position)


LETTER = replace(requested(), delivery=replace(requested().delivery, has_letter=False, why=GIVEN_UP_BY_BROKER))


def recorded(state: BuildState, cell: str | None = None) -> RecordedBuild:
    return RecordedBuild(instance_uuid=UUID, project_id="p", state=state, sequence=2, cell=cell, run="mine")


GRAVE = {UUID: replace(recorded(BuildState.DELETED), code=UNKNOWN)}


def kept_by(
    run: str, cell: str | None = "c1", attempt: int = 1, project: str = "p"
) -> dict[ProjectsBuild, HeldAllocation]:
    held = HeldAllocation(
        consumer=UUID,
        project_id=project,
        run=run,
        attempt=attempt,
        consumer_generation=1,
        holding={UUID: {"VCPU": 1}},
        hosts=(UUID,),
        cell=cell,
    )
    return {(UUID, project): held}


@pytest.mark.parametrize(
    ("build", "after", "message"),
    [
        (recorded(BuildState.SCHEDULED, "c1"), BuildState.DELETING, CellDelete),
        (recorded(BuildState.ACTIVE, "c1"), BuildState.DELETING, CellDelete),
        (recorded(BuildState.DELETING, "c1"), None, None),
        (recorded(BuildState.DELETED), None, None),
    ],
)
def test_a_delete_by_the_state_of_its_build(
    build: RecordedBuild, after: BuildState | None, message: type | None
) -> None:
    plan = plan_deletes([requested(0), requested(1)], {UUID: build}, AUTHOR)
    assert [isinstance(plan.outcomes[at], Done) for at in (0, 1)] == [True, True] and plan.accepted == {UUID}
    assert [update.build.state for update in plan.updates] == ([after] if after else [])
    assert [type(one.message) for one in plan.messages] == ([message] if message else [])


@pytest.mark.parametrize("state", [BuildState.ACCEPTED, BuildState.FAILED, BuildState.REFUSED])
@pytest.mark.parametrize(
    ("kept", "after", "message"),
    [
        ({}, BuildState.DELETED, BuildEvent),
        (kept_by("mine"), BuildState.DELETING, CellDelete),  # the record of its dispatch may be lost
        (kept_by("mine", attempt=2), BuildState.DELETING, CellDelete),
        (kept_by("another"), BuildState.DELETING, CellDelete),
        (kept_by(""), BuildState.DELETING, CellDelete),
    ],
)
def test_a_delete_of_a_build_without_a_cell_depends_on_what_its_instance_holds(
    state: BuildState, kept: dict[ProjectsBuild, HeldAllocation], after: BuildState, message: type
) -> None:
    build = recorded(state)
    queried = plan_deletes([requested(0), requested(1)], {UUID: build}, AUTHOR)
    assert (len(queried.unbuilt), queried.outcomes, queried.updates, queried.messages) == (2, {}, [], [])
    plan = plan_deletes(queried.unbuilt, {UUID: build}, AUTHOR, kept)
    assert sorted(plan.outcomes) == [0, 1] and plan.accepted == {UUID}
    assert [(update.build.state, update.build.cell) for update in plan.updates] == [
        (after, "c1" if message is CellDelete else None)
    ]
    released = [ReleaseRun] if (after, state) == (BuildState.DELETED, BuildState.ACCEPTED) else []
    assert [type(one.message) for one in plan.messages] == [message, *released], "a scheduler may be claiming for it"


def test_a_delete_is_refused_while_it_is_not_known_which_cell_has_the_instance() -> None:
    build = replace(recorded(BuildState.FAILED), terminal=True, code="no_valid_host")
    plan = plan_deletes([requested()], {UUID: build}, AUTHOR, kept_by("another", None))
    (message,) = plan.messages
    assert isinstance(message.message, BuildEvent)
    assert (message.message.state, message.message.sequence) == (BuildState.REFUSED, 0)
    assert [update.build for update in plan.updates] == [build], "so the next delete queries placement again"


def test_a_delete_of_what_is_being_scheduled_ends_both_while_it_is_not_known_which_cell_has_the_instance() -> None:
    plan = plan_deletes([requested()], {UUID: recorded(BuildState.ACCEPTED)}, AUTHOR, kept_by("another", None))
    events = [one.message for one in plan.messages if isinstance(one.message, BuildEvent)]
    assert [(one.state, one.code) for one in events] == [
        (BuildState.REFUSED, "claim.stranded"),
        (BuildState.FAILED, "claim.stranded"),
    ]
    assert [update.build.state for update in plan.updates] == [BuildState.FAILED]


def test_a_stranded_build_is_fenced_when_its_delete_finds_nothing_any_more() -> None:
    """A claim of its run may still be on its way, and nothing else would refuse it."""
    accepted = recorded(BuildState.ACCEPTED)
    (stranded,) = plan_deletes([requested()], {UUID: accepted}, AUTHOR, kept_by("mine", None)).updates
    plan = plan_deletes([requested()], {UUID: stranded.build}, AUTHOR, {})
    assert [update.build.state for update in plan.updates] == [BuildState.DELETED]
    assert [type(one.message) for one in plan.messages] == [BuildEvent, ReleaseRun]


@pytest.mark.parametrize("state", [BuildState.SCHEDULED, BuildState.BUILDING, BuildState.ACTIVE, BuildState.FAILED])
def test_a_delete_shows_its_cell_whether_the_cell_has_announced_the_build(state: BuildState) -> None:
    """A conductor without a record of it has lost it, and queries its compute services."""
    (sent,) = plan_deletes([requested(0)], {UUID: recorded(state, "c1")}, AUTHOR).messages
    assert isinstance(sent.message, CellDelete) and sent.message.begun is (state is not BuildState.SCHEDULED)


def test_another_projects_delete_does_nothing() -> None:
    """It is answered as one of an instance that nobody has."""
    builds = {UUID: recorded(BuildState.ACTIVE, "c1")}
    plan = plan_deletes([requested(project="q")], builds, AUTHOR)
    assert isinstance(plan.outcomes[0], Retry)
    assert (plan.accepted, plan.updates, plan.messages, plan.unknown) == (set(), [], [], [])
    late = plan_deletes([requested(project="q", delivery=OVERTAKES)], builds, AUTHOR, kept_by("mine"))
    assert (late.accepted, late.updates, late.messages, tombstones(late.unknown, builds, AUTHOR)) == (set(), [], [], [])
    outcomes, messages = refuse_unknown(late.unknown, builds, AUTHOR, kept_by("mine"))
    assert isinstance(outcomes[0], Refuse) and messages == []


@pytest.mark.parametrize("state", [BuildState.ACCEPTED, BuildState.FAILED, BuildState.DELETED])
def test_another_projects_build_does_not_hide_what_was_claimed_for_the_projects_own(state: BuildState) -> None:
    """The schedulers' database was set back to before the build of p, whose machine runs; q has requested it since."""
    builds = {UUID: replace(recorded(state), project_id="q")}
    queried = plan_deletes([requested(delivery=OVERTAKES)], builds, AUTHOR)
    assert [one.request.project_id for one in queried.unbuilt] == ["p"]
    plan = plan_deletes(queried.unbuilt, builds, AUTHOR, kept_by("lost"))
    _, messages = refuse_unknown(plan.unknown, builds, AUTHOR, kept_by("lost"))
    told = [(one.bus, one.message.project_id) for one in messages if isinstance(one.message, CellDelete)]
    assert told == [("c1", "p")]


def test_an_unknown_instance_is_looked_for_again_and_then_put_on_record_as_deleted() -> None:
    early = plan_deletes([requested()], {}, AUTHOR)
    assert isinstance(early.outcomes[0], Retry) and early.unknown == []
    queried = plan_deletes([requested(delivery=OVERTAKES)], {}, AUTHOR)
    assert len(queried.unbuilt) == 1 and queried.unknown == []
    late = plan_deletes(queried.unbuilt, {}, AUTHOR, {})
    assert late.messages == []
    (tombstone,) = tombstones(late.unknown, (), AUTHOR)
    assert (tombstone.build.state, tombstone.build.terminal) == (BuildState.DELETED, True)
    refused, messages = refuse_unknown(late.unknown, {UUID: tombstone.build}, AUTHOR, {})
    assert list(refused) == [0] and len(messages) == 1
    assert refuse_unknown(late.unknown, {}, AUTHOR, {}) == ({}, []), "its build came in this moment"


@pytest.mark.parametrize("on_record", [{}, GRAVE])
@pytest.mark.parametrize("of", ["p", "another"])
def test_the_cell_of_the_claim_of_an_unknown_instance_is_told_of_its_projects_delete(
    on_record: dict[str, RecordedBuild], of: str
) -> None:
    """The record is lost, and not the claim; its build may run. Another project names it in the same batch."""
    held, deletes = (
        kept_by("lost", project=of),
        [requested(0, delivery=OVERTAKES), requested(1, project="another", delivery=OVERTAKES)],
    )
    plan = plan_deletes(deletes, on_record, AUTHOR, held)
    assert len(plan.unknown) == 2 and plan.messages == []
    _, messages = refuse_unknown(plan.unknown, GRAVE, AUTHOR, held)
    told = [(one.bus, one.message.project_id) for one in messages if isinstance(one.message, CellDelete)]
    assert told == [("c1", of)]
    _, messages = refuse_unknown(plan.unknown, {}, AUTHOR, held)
    assert messages == [], "its build came in this moment"


@pytest.mark.parametrize("build", [None, recorded(BuildState.FAILED)])
def test_a_delete_of_what_no_known_cell_has_waits_for_hosts_and_is_refused(build: RecordedBuild | None) -> None:
    builds, held = {} if build is None else {UUID: build}, kept_by("lost", None)
    late = requested(delivery=OVERTAKES)
    early = replace(late, delivery=replace(late.delivery, awaits_hosts=True))
    waits = plan_deletes([early], builds, AUTHOR, held)
    assert (waits.outcomes, waits.messages, waits.updates) == ({0: HOSTS_UNKNOWN}, [], [])
    plan = plan_deletes([late], builds, AUTHOR, held)
    assert plan.unknown == [], "no tombstone hides it"
    (refused,) = (one.message for one in plan.messages)
    assert isinstance(refused, BuildEvent) and (refused.state, refused.code) == (BuildState.REFUSED, STRANDED)


def test_a_delete_of_a_stranded_build_whose_retries_are_exhausted_has_an_end() -> None:
    """An earlier delete of it was refused."""
    (end,) = plan_deletes([LETTER], {UUID: recorded(BuildState.FAILED)}, AUTHOR).messages
    assert isinstance(end.message, BuildEvent)
    assert (end.message.state, end.message.code, end.message.sequence) == (BuildState.REFUSED, GIVEN_UP, 0)
    assert plan_deletes([LETTER], {UUID: recorded(BuildState.DELETING, "c1")}, AUTHOR).messages == []


def test_a_delete_that_ended_its_schedulers_is_not_carried_out() -> None:
    """It was carried out by the last deliveries, too."""
    received = Received(requested().request, Meta(id="m"), "api", "scheduler.requests", exhausted=True)
    exhausted = pending_delete(received, delivery_of(received, is_warming_up=False), 0)
    plan = plan_deletes([exhausted], {UUID: recorded(BuildState.ACTIVE, "c1")}, AUTHOR)
    (end,) = plan.messages
    assert isinstance(end.message, BuildEvent) and end.message.code == EXHAUSTED
    assert (plan.outcomes, plan.accepted, plan.updates) == ({0: Done()}, set(), [])


@pytest.mark.parametrize("waits", [False, True])
def test_a_delete_whose_time_is_over_ends_as_a_move_does(*, waits: bool) -> None:
    """It was carried out, as it was no letter."""
    meta = Meta(id="m", attempt=1, reply_to="client.reply.x" if waits else None)
    received = Received(requested().request, meta, "api", "scheduler.requests", left_s=lambda: -1.0)
    plan = plan_deletes(
        [pending_delete(received, delivery_of(received), 0)], {UUID: recorded(BuildState.ACTIVE, "c1")}, AUTHOR
    )
    ends = [one.message.code for one in plan.messages if isinstance(one.message, BuildEvent)]
    assert ends == ([] if waits else [EXPIRED])
    assert (plan.outcomes, plan.accepted, plan.updates) == ({0: Done()}, set(), [])
