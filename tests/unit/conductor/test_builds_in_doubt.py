"""Builds in doubt after a set-back: what the answers of all services lead to, beyond the first step of the table."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.cell import Destroy
from cell_conductor.domain import events as e
from cell_conductor.domain.desires import in_text
from cell_conductor.domain.fences import losses_of
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.report import is_over
from cell_conductor.domain.set_back import is_outdated
from cell_conductor.domain.table import step
from tests.unit.conductor.records import IN_DOUBT, ON_1, ON_2, brief
from tests.unit.conductor.scenario import S1_SILENT, UUID, host, selection, spawned
from tests.unit.conductor.scenario import on as on_services
from tests.unit.conductor.test_doubts_table import FENCED_2, HERE, HOSTS, PART, building, on, runs, searched

LOST = e.ServiceLost(at=225.0, service="s1", code="x")
LATE = e.TimedOut(at=230.0)
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
    assert [one.attempt for one in losses_of(asked, fenced, host(2), 230.0)] == [2]


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
