"""What is asked of placement or of services in each state, which claims may be granted in it, and what is illegal."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.placement import Claim, ClaimOption, Migration, Release, Revert, ServerGroup
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.rules import ignore, tombstone
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import ByThen, Rule, question_of, rules_of, step
from cell_conductor.domain.way_back import SourceQuery
from tests.unit.conductor.move_scenario import MOVE, OTHER
from tests.unit.conductor.records import BY_REVERT, ON_1, ON_2, ON_3, at_source, in_place, moving, record, unshelving
from tests.unit.conductor.scenario import PATIENCE, UUID, claimed, host

S = State
GROUP = ServerGroup(uuid="g", policy="affinity")
OPTION_2, OPTION_3 = (ClaimOption(allocations=on.allocations, shapes=on.shapes) for on in (ON_2, ON_3))
CLAIM = Claim(
    consumer=UUID,
    attempt=5,
    consumer_generation=7,
    release_first=True,
    options=(OPTION_3,),
    project_id="p",
    user_id="u",
)
MIGRATION = Migration(uuid=MOVE, source=ON_1.allocations)
OF_INSTANCE = Release(consumer=UUID, attempt=5)
OF_MIGRATION = Release(consumer=MOVE, project_id="p", of_migration=True)
BOTH = (OPTION_2, OPTION_3)


@pytest.mark.parametrize(
    ("known", "question"),
    [
        (record(S.CLAIMING, S.BUILDING), CLAIM),
        (record(S.CLAIMING, S.BUILDING, server_group=GROUP, limits={"VCPU": 9}),
         replace(CLAIM, server_group=GROUP, limits={"VCPU": 9}, options=(replace(OPTION_3, host=host(3)),))),
        (record(S.CLAIMING, S.BUILDING, position=0), replace(CLAIM, options=BOTH)),
        (record(S.CLAIMING, S.DELETED), CLAIM),
        (record(S.CLAIMING, S.ACTIVE), replace(CLAIM, options=(OPTION_2,))),
        (at_source(), replace(CLAIM, release_first=False, options=BOTH, migration=MIGRATION)),
        (moving(S.CLAIMING, S.PREPARING), replace(CLAIM, migration=MIGRATION)),
        (unshelving(S.CLAIMING, S.PREPARING), CLAIM),
        (unshelving(S.CLAIMING, S.PREPARING, position=0), replace(CLAIM, release_first=False, options=BOTH)),
        (moving(S.REVERTING), Revert(consumer=UUID, migration=MIGRATION, source_attempt=4, attempt=5)),
        (record(S.RELEASING, S.FAILED), OF_INSTANCE),
        (moving(S.RELEASING, S.FAILED), OF_INSTANCE),
        (moving(S.RELEASING, S.DELETED, {"instance_released": True}), OF_MIGRATION),
        (unshelving(S.RELEASING, S.OFFLOADED), OF_INSTANCE),
        (moving(S.RELEASING, S.ACTIVE), OF_MIGRATION),
        (moving(S.RELEASING, S.DEPARTED), OF_MIGRATION),
        (moving(S.RESIZED, move=BY_REVERT), SourceQuery(host(1), "s1", 1, OTHER)),
        (in_place(S.RESIZED, move={"lost_code": "host.fenced"}), SourceQuery(host(1), "s1", 1)),
        (moving(S.RESIZED), None),
        (moving(S.REVERTING, move=BY_REVERT), Revert(consumer=UUID, migration=MIGRATION, source_attempt=4, attempt=5)),
        (moving(S.PREPARING, move={"instance_released": True}), None),
        (record(S.ACTIVE), None),
        (record(S.BUILDING), None),
        (record(S.DESTROYING, S.DELETED), None),
    ],
)  # fmt: skip
def test_the_request_that_follows_from_a_record(known: Instance, question: object) -> None:
    assert question_of(known) == question


@pytest.mark.parametrize(
    ("before", "highest"),
    [
        (record(S.CLAIMING, S.BUILDING), 5),
        (record(S.CLAIMING, S.ACTIVE), 5),
        (record(S.FAILED), 5),
        (record(S.DELETED), 5),
        (record(S.RELEASING, S.FAILED), 5),
        (moving(S.REVERTING), 5),
        (record(S.ACTIVE), 4),
        (moving(S.PREPARING), 4),
        (moving(S.FINISHING), 4),
        (record(S.BUILDING), 4),
    ],
)
def test_a_claim_beyond_the_one_that_was_requested_changes_nothing(before: Instance, highest: int) -> None:
    step(before, claimed(highest), PATIENCE)
    assert step(before, claimed(highest + 1), PATIENCE).instance is before


def test_the_rules_of_a_cell_by_what_follows() -> None:
    first, second, other = Rule(ignore), Rule(tombstone), Rule(ignore, (S.FAILED,))
    cell = ByThen({S.ACTIVE: first, S.DELETED: second}, other)
    assert [cell.of(then) for then in (S.ACTIVE, S.DELETED, S.FAILED, None)] == [first, second, other, other]
    assert ByThen({S.ACTIVE: first}).of(S.FAILED) is None
    assert (rules_of(cell), rules_of(ByThen({S.ACTIVE: first}))) == ((first, second, other), (first,))
    assert (rules_of(first), rules_of(None)) == ((first,), ())


ANSWERS = {
    Claim: lambda **of: e.Claimed(at=220.0, option=0, consumer_generation=9, **of),
    Release: lambda **of: e.Released(at=220.0, **of),
    Revert: lambda **of: e.Reverted(at=220.0, **of),
}


@pytest.mark.parametrize(
    "known",
    [
        record(S.CLAIMING, S.BUILDING),
        record(S.CLAIMING, S.DELETED),
        record(S.CLAIMING, S.ACTIVE),
        at_source(),
        moving(S.REVERTING),
        record(S.RELEASING, S.FAILED),
        moving(S.RELEASING, S.FAILED),
        moving(S.RELEASING, S.DELETED, {"instance_released": True}),
        unshelving(S.RELEASING, S.OFFLOADED),
        moving(S.RELEASING, S.ACTIVE),
    ],
)
def test_only_the_answer_to_what_is_asked_now_counts(known: Instance) -> None:
    """A conductor that was paused brings the answer to what an earlier record had asked: a release that it took for its
    own left an allocation that nobody released.
    """
    question = question_of(known)
    assert isinstance(question, Claim | Release | Revert)
    answer, attempt = ANSWERS[type(question)], question.attempt or 0
    assert step(known, answer(consumer=question.consumer, attempt=attempt), PATIENCE).instance is not known
    for consumer, other in ((question.consumer, attempt - 1), (OTHER, attempt)):
        assert step(known, answer(consumer=consumer, attempt=other), PATIENCE) == Step(known)
