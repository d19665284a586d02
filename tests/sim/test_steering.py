"""Runs that are steered to what none has seen: each is the same again, from its seed or from its plan's file."""

from __future__ import annotations

import random

import msgspec
import pytest

from lab.simulation.__main__ import read_plan, written
from lab.simulation.draw import plan_of
from lab.simulation.pairs import Stay
from lab.simulation.plan import Action, Plan
from lab.simulation.run import Result, run
from lab.simulation.steering import ACTS, Steering, acts_in
from lab.simulation.widening import WIDENED, Widening

MOVES = frozenset({Widening.MOVES})
SEED = 9  # with moves, in one cell


@pytest.fixture(scope="module")
def steered() -> tuple[Steering, list[tuple[Plan, Result]]]:
    """A seed's run and one more round, and what steered them."""
    steering = Steering(SEED, MOVES)
    return steering, list(steering.runs(SEED, 1))


def test_the_first_seed_determines_what_is_steered(steered: tuple[Steering, list[tuple[Plan, Result]]]) -> None:
    _, first = steered
    second = list(Steering(SEED, MOVES).runs(SEED, 1))
    assert [plan for plan, _ in first] == [plan for plan, _ in second]
    assert [result.digest for _, result in first] == [result.digest for _, result in second]


def test_each_round_adds_acts_amid_stays_and_sees_pairs_that_are_new(
    steered: tuple[Steering, list[tuple[Plan, Result]]],
) -> None:
    steering, ((plan, result), (further, then)) = steered
    before, after = ({*one.orders, *one.fault_events} for one in (plan, further))
    added = after - before
    assert before < after
    assert 0 < len(added) <= ACTS * (1 + plan.placements)
    assert not result.breach
    assert not then.breach
    assert then.seen.pairs.keys() - result.seen.pairs.keys()
    assert steering.pairs.keys() >= then.seen.pairs.keys() | result.seen.pairs.keys()


@pytest.mark.parametrize("act", sorted(acts_in(plan_of(SEED, MOVES))))
def test_an_act_comes_at_its_time_to_the_instance_or_to_what_it_depends_on(act: str) -> None:
    plan = plan_of(SEED, MOVES)
    built = next(one for one in plan.orders if one.action is Action.BUILD)
    _, service = plan.services[0]
    stay = Stay(built.uuid, "active", service, 12.0, 14.0)
    further = acts_in(plan)[act](plan, stay, 13.0, random.Random(1))
    (added,) = {*further.orders, *further.fault_events} - {*plan.orders, *plan.fault_events}
    assert added.at == 13.0
    fields = msgspec.structs.asdict(added)
    names = {fields.get("uuid"), fields.get("instance"), fields.get("service"), fields.get("target")}
    cell = plan.services[0][0]
    assert names & {built.uuid, service, f"compute-{service}", *plan.processes_of(cell)}


def in_a_file(plan: Plan) -> Plan:
    path = written(plan)
    try:
        return read_plan(path)
    finally:
        path.unlink()


@pytest.mark.parametrize("seed", [3, 5, 8])  # with metal, with peers, with both
def test_a_plan_in_a_file_is_the_same_plan(seed: int) -> None:
    assert in_a_file(plan_of(seed, WIDENED)) == plan_of(seed, WIDENED)


def test_a_plan_in_a_file_is_the_same_run() -> None:
    plan = plan_of(8, WIDENED)
    assert run(in_a_file(plan)).digest == run(plan).digest
