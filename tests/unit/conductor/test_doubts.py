"""Records in doubt after a set-back: what the answers of all services lead to, beyond the first step of the table."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.cell import Destroy
from bus.contracts.moves import MoveKind
from bus.contracts.stages import Stamps
from cell_conductor.domain import events as e
from cell_conductor.domain.desires import in_text
from cell_conductor.domain.doubt import is_in_doubt
from cell_conductor.domain.fences import given_up_on
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.report import is_over
from cell_conductor.domain.set_back import SetBack, is_outdated
from cell_conductor.domain.steps import StepContext
from cell_conductor.domain.table import FenceSteps, step
from tests.unit.conductor.move_scenario import Scenario, claimed
from tests.unit.conductor.records import IN_DOUBT, ON_1, ON_2, brief, fenced, in_place, moving
from tests.unit.conductor.scenario import PATIENCE, S1_SILENT, SPEC, UUID, answering, host, queried, selection, spawned
from tests.unit.conductor.scenario import on as on_services
from tests.unit.conductor.test_doubts_table import (
    FENCED_2,
    HERE,
    HOSTS,
    PART,
    PARTED,
    RESTARTS,
    SOURCE,
    S,
    building,
    doubted,
    on,
    resized,
    runs,
    searched,
    undone,
    unsure,
)

LOST = e.ServiceLost(at=225.0, service="s1", code="x")
LATE = e.TimedOut(at=230.0)
FENCED_3 = fenced(3, context=IN_DOUBT)
FAILED = e.SpawnFailed(at=225.0, attempt=2, host_uuid=host(2), service="s1", code="x")


@pytest.mark.parametrize("answered", [searched(), searched(hosts=HOSTS - {host(2)})], ids=["stale", "not looked at"])
@pytest.mark.parametrize("word", [LATE, LOST, FAILED, replace(FAILED, final=True)])
def test_a_host_is_not_ordered_to_end_what_may_be_complete(answered: e.InstanceSearched, word: e.Event) -> None:
    """A second service of the same name had answered, and its own was silent for ten seconds."""
    before = building(selections=(ON_1, ON_2, replace(selection(3), service="s3")))
    asked = step(before, answered, IN_DOUBT).instance
    left = step(asked, word, IN_DOUBT)
    assert [one.unless_built for one in left.commands if isinstance(one, Destroy)] == [True]
    for late in (spawned(2), runs(2)):
        assert step(left.instance, late, IN_DOUBT).commands == (), "nor once it says that it is"
    assert not is_over(left.instance, 2, host(2))


def test_a_certain_build_destroys_what_it_has_left() -> None:
    """The fence of a host answers for it, whatever the number of what it had."""
    certain = replace(building(selections=(ON_1, ON_2, selection(3))), doubted=False)
    left = step(certain, FAILED, IN_DOUBT)
    assert brief(left) == ("destroy 2@2",)
    assert brief(step(left.instance, spawned(2), IN_DOUBT)) == ("destroy 2@2",)
    asked = step(replace(certain, doubted=True), searched(), FENCED_2).instance
    fenced = step(asked, e.HostFenced(at=230.0, host_uuid=host(2)), FENCED_2).instance
    assert in_text(fenced.phase) == "claiming/building"
    assert given_up_on(asked, fenced, host(2)) == ("s1",)


@pytest.mark.parametrize("requested_at", [999.0, 9e5])
def test_no_client_keeps_a_second_machine_by_the_time_at_which_it_says_that_it_sent_its_request(
    requested_at: float,
) -> None:
    """It causes a search. Whether a complete machine may be of forgotten history is judged by a scheduler's."""
    said = replace(queried(), requested_at=requested_at, at=9e5, stamps=Stamps(requested=1.0), found=())
    building = step(Instance(uuid=UUID), said, IN_DOUBT).instance
    assert (building.state, building.doubted) == (State.BUILDING, False)
    asked = step(building, e.TimedOut(at=9e5 + 5.0), IN_DOUBT).instance
    left = step(asked, e.TimedOut(at=9e5 + 10.0), IN_DOUBT)
    assert in_text(left.instance.phase) == "claiming/building"
    spared = [one.unless_built for one in left.commands if isinstance(one, Destroy)]
    assert spared == [IN_DOUBT.set_back.may_lack(requested_at)]


def test_a_machine_on_a_first_host_that_was_passed_over_is_another_records() -> None:
    """The database was set back, the build came again, and its first host was closed; it was set back once more."""
    passed = step(Instance(uuid=UUID), on_services("s1", "s2"), replace(IN_DOUBT, down=S1_SILENT)).instance
    assert (in_text(passed.phase), passed.untried) == ("claiming/building", 1)
    after = step(replace(passed, doubted=True), searched(on(1)), IN_DOUBT).instance
    assert in_text(after.phase) == "claiming/active"


@pytest.mark.parametrize(
    ("answered", "is_sure"),
    [
        (searched(HERE), True),
        (searched(PART), True),
        (replace(searched(HERE), silent=frozenset({"s9"})), False),
        (replace(searched(PART), silent=frozenset({"s9"})), False),
        (searched(), False),
    ],
)
@pytest.mark.parametrize("reused_from", [0, 1])
def test_a_build_that_went_on_is_searched_for_before_its_next_request(
    answered: e.InstanceSearched, reused_from: int, *, is_sure: bool
) -> None:
    """A silent service had its client's machine, which would have stayed in quarantine."""
    now = step(building(reused_from=reused_from), answered, IN_DOUBT).instance
    if now.state is State.BUILDING:
        is_sure = is_sure and not reused_from
        now = step(now, spawned(2), IN_DOUBT).instance
    assert now.state is State.ACTIVE
    assert is_outdated(replace(now, since=9000.0), IN_DOUBT.set_back) is not is_sure


# --- moves


LATER = on(4, 5)
BEFORE = [doubted(S.FINISHING), doubted(S.REVERTING), undone(), RESTARTS, resized()]


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("project", ["q", None])
@pytest.mark.parametrize("number", [3, 5])
def test_a_later_machine_that_is_not_proved_hides_none_that_is(
    before: Instance, number: int, project: str | None
) -> None:
    after = step(before, searched(SOURCE, LATER, on(number, 6, project_id=project)), IN_DOUBT).instance
    assert in_text(after.phase) == "claiming/active"


@pytest.mark.parametrize("before", BEFORE)
def test_nothing_is_started_beside_a_later_machine_whose_project_is_not_known(before: Instance) -> None:
    assert is_in_doubt(step(before, searched(SOURCE, on(4, 5, project_id=None)), IN_DOUBT).instance)


@pytest.mark.parametrize("arrives", [spawned(2), runs(2)])
def test_a_move_that_has_arrived_has_tried_no_alternate(arrives: e.Event) -> None:
    """A resize was reverted, and its instance moved to what had been its alternate: it had the new flavor by its record
    and the old one on its host.
    """
    resizing = moving(S.FINISHING, move={"kind": MoveKind.RESIZE, "spec": replace(SPEC, flavor="before")})
    there = replace(step(resizing, arrives, IN_DOUBT).instance, doubted=True)
    assert there.state is S.RESIZED
    taking = step(there, searched(SOURCE, on(3, 5)), IN_DOUBT).instance
    assert in_text(taking.phase) == "claiming/active"
    assert taking.spec is not None and taking.spec.flavor == "before"


def test_nothing_is_started_beside_a_later_machine_whose_size_is_not_known() -> None:
    before = replace(RESTARTS, selections=(replace(PARTED, host_uuid=host(1)),))
    assert is_in_doubt(step(before, searched(SOURCE, LATER), IN_DOUBT).instance)


def test_the_source_is_started_where_a_revert_in_doubt_goes_on() -> None:
    """It may have been stopped for the hand-over since."""
    now = step(doubted(S.REVERTING), searched(SOURCE), IN_DOUBT).instance
    back = step(now, answering(now, e.Reverted(at=320.0, attempt=5, consumer_generation=9)), IN_DOUBT)
    assert in_text(back.instance.phase) == "restarting"


def test_a_resize_in_place_in_doubt_hands_nothing_over_that_was_not_stopped() -> None:
    """It failed after the search, and the next host was commanded to build from the disk of a machine that ran."""
    made = Scenario(step(in_place(S.RESIZING, doubted=True), searched(SOURCE), IN_DOUBT).instance, IN_DOUBT)
    assert (made.instance.state, made.instance.doubted) == (S.RESIZING, False)
    made.end(1, 1, done=False, code="broken", runs=True)
    made.end(1, 1, runs=True)
    assert in_text(made.instance.phase) == "claiming/preparing"
    made.apply(claimed(5))
    made.end(3, 5)
    assert (made.instance.state, made.spawns) == (S.HANDING_OVER, [])


def followed(before: Instance, event: e.Event, context: StepContext) -> tuple[Instance, dict[str, list[str]]]:
    """The step, and what the fences of its hosts end by it."""
    ends = FenceSteps()
    return ends.follow(before, step(before, event, context), event, context).instance, ends.given_up


@pytest.mark.parametrize("before", [doubted(S.PREPARING), doubted(S.FINISHING), resized(), undone()])
def test_the_only_machine_is_no_loss_where_its_host_was_not_looked_at(before: Instance) -> None:
    """The move was confirmed, so the source is gone; the destination's host was fenced since."""
    assert followed(before, searched(hosts=HOSTS - {host(2)}), FENCED_2)[1] == {}


def test_the_only_machine_is_no_loss_by_a_fence_that_comes_after_the_search() -> None:
    now = step(doubted(S.FINISHING), searched(hosts=HOSTS - {host(2)}), IN_DOUBT).instance
    assert followed(now, e.HostFenced(at=230.0, host_uuid=host(2)), FENCED_2)[1] == {}


@pytest.mark.parametrize(
    "before",
    [
        undone(),
        unsure(S.DESTROYING, S.REVERTING),
        doubted(S.REVERTING),
        building(S.BUILDING),
        doubted(S.FINISHING),
        unsure(S.FINISHING),
        building(),
        resized(),
    ],
)
@pytest.mark.parametrize("event", [e.TimedOut(at=230.0), searched()], ids=["before any answer", "held"])
def test_a_record_in_doubt_gives_up_no_machine_on_a_fenced_host(before: Instance, event: e.Event) -> None:
    """It is only held: its deadline changes."""
    after, losses = followed(before, event, FENCED_2)
    assert not is_in_doubt(after) or losses == {}


@pytest.mark.parametrize("before", [unsure(S.FINISHING), unsure(S.CLAIMING, S.PREPARING, position=0, attempt=1)])
def test_what_a_fenced_alternate_may_have_of_an_undone_unshelving_is_neither_lost_nor_over(before: Instance) -> None:
    """It is in quarantine when its host is back, and its image is kept meanwhile."""
    after, losses = followed(before, searched(hosts=HOSTS - {host(3)}), FENCED_3)
    assert after.move is not None and after.move.lost_code == "move.in_doubt"
    assert losses == {} and not is_over(after, 5, host(3)) and after.image == "kept"


def test_a_build_is_certain_at_rest_where_the_database_was_not_set_back() -> None:
    asked = replace(queried(3), attempt=2, found=())
    now = step(Instance(uuid=UUID), asked, PATIENCE).instance
    up = step(now, spawned(2, 1), PATIENCE).instance
    assert up.state is S.ACTIVE and not is_outdated(up, SetBack())


def test_the_delete_of_a_claim_in_doubt_releases_what_may_be_held() -> None:
    now = step(building(S.BUILDING), e.DeleteRequested(at=220.0, project_id="p"), IN_DOUBT).instance
    now = step(now, answering(now, e.ClaimRefused(at=221.0, attempt=5, consumer_changed=True)), IN_DOUBT).instance
    assert in_text(now.phase) == "releasing/deleted"
