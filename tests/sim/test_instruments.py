"""The simulation's own instruments: its steering, its report of coverage, its stages, and the planted defects' form."""

from __future__ import annotations

import importlib
import inspect
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY

from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.stages import STAGES, durations
from cell_conductor.rules import build_repeat_rules
from cell_conductor.state.events import BuildRequested, DeleteRequested
from cell_conductor.state.instance import Instance
from cell_conductor.state.step import Step, StepContext
from lab.simulation.__main__ import read_plan, written
from lab.simulation.draw import plan_of
from lab.simulation.loop import EPOCH
from lab.simulation.pairs import Stay
from lab.simulation.plan import Action, Plan
from lab.simulation.run import Result, run
from lab.simulation.steering import Steering, acts_in
from lab.simulation.watch import Listener
from lab.simulation.widening import WIDENED, Widening

# --- The simulation's own instruments: its steering, its report of coverage, and the stages of builds in it.


# --- runs that are steered to what none has seen: each is the same again, from its seed or from its plan's file


MOVES = frozenset({Widening.MOVES})
SEED = 11  # with moves, in one cell


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


def test_a_plan_in_a_file_is_the_same_run() -> None:
    plan = plan_of(8, WIDENED)
    assert run(in_a_file(plan)).digest == run(plan).digest


# --- where a build's time went, in the whole pipeline: every build reports it, also when the machines' clocks differ


def ends(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[BuildEvent]:
    """The terminal events that clients received."""
    received: dict[str, BuildEvent] = {}
    listen = Listener.event

    def event(self: Listener, announced: BuildEvent) -> None:
        listen(self, announced)
        if announced.terminal:
            received.setdefault(announced.instance_uuid, announced)

    monkeypatch.setattr(Listener, "event", event)
    assert run(plan).breach == ""
    return list(received.values())


@pytest.mark.parametrize("skew_s", [0.0, 1.0])
def test_every_build_carries_all_six_stages_and_they_add_up(skew_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ends(replace(plan_of(1).without_faults(), skew_s=skew_s), monkeypatch)
    active = [event for event in found if event.state is BuildState.ACTIVE]
    assert len(active) > 10
    for event in active:
        assert event.stage_times is not None
        requested, received = event.stage_times.requested, event.stage_times.announced + 0.001
        spent = durations(event.stage_times, since=requested, until=max(requested, received))
        assert tuple(spent) == STAGES
        assert min(spent.values()) >= 0
        assert sum(spent.values()) == pytest.approx(max(0.0, received - requested), abs=1e-5)
        if not skew_s:
            raw = [event.stage_times.requested, *(getattr(event.stage_times, stage) for stage in STAGES)]
            assert raw == sorted(raw), "on one clock no stage ends before it began"
            assert raw[0] > EPOCH, "the clock of the simulation, not of this computer"
    nowhere = [event for event in found if event.code == "no_valid_host"]
    assert nowhere
    for event in nowhere:
        assert event.stage_times is not None
        assert tuple(durations(event.stage_times, until=event.stage_times.decided + 1)) == (
            "queued",
            "decided",
            "announced",
        )


def observed() -> dict[str, float]:
    """How many builds the workers of this process have counted in each stage."""
    return {stage: REGISTRY.get_sample_value("berth_stage_seconds_count", {"stage": stage}) or 0.0 for stage in STAGES}


def test_workers_count_each_stage_of_each_build_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = observed()
    found = ends(plan_of(1).without_faults(), monkeypatch)
    counted = {stage: count - before[stage] for stage, count in observed().items()}
    in_cells = sum(event.stage_times is not None and event.stage_times.built > 0 for event in found)
    nowhere = sum(event.code == "no_valid_host" for event in found)
    assert in_cells > 10
    assert counted["dispatched"] == counted["built"] == counted["announced"] == in_cells
    assert counted["queued"] == counted["decided"] == counted["claimed"] + nowhere
    assert counted["claimed"] >= in_cells, "some are deleted while they are being built"


def was_tried(event: BuildEvent) -> bool:
    """Whether a host was asked; a service that is silent is passed over."""
    return any(attempt.outcome not in {"not_commanded", "not_claimed"} for attempt in event.history)


def test_builds_that_met_faults_carry_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed attempts, crashes and redeliveries: the stages of a build show how long it all took.

    Only what a conductor announces again, because its cell got the same build again, has none: they are kept until the
    first announcement.
    """
    again: set[str] = set()
    announce_again = build_repeat_rules._reemit

    def recorded(
        instance: Instance,
        event: BuildRequested | DeleteRequested,
        state: BuildState,
        context: StepContext,
        *,
        terminal: bool = True,
    ) -> Step:
        again.add(instance.uuid)
        return announce_again(instance, event, state, context, terminal=terminal)

    monkeypatch.setattr(build_repeat_rules, "_reemit", recorded)
    found = [event for seed in (1, 10) for event in ends(plan_of(seed), monkeypatch)]
    found = [event for event in found if event.instance_uuid not in again]
    ended = [event for event in found if event.state is BuildState.ACTIVE or (event.cell and was_tried(event))]
    ended = [event for event in ended if event.state is not BuildState.DELETED]
    assert any(event.attempt > 1 for event in ended)
    for event in ended:
        assert event.stage_times is not None, event
        assert tuple(durations(event.stage_times)) == STAGES, event


# --- A planted defect stands in for a function with all of its parameters: else it is found by its TypeError.


HERE = Path(__file__).parent
PLANTS = [f"tests.sim.{one.stem}" for one in sorted([*HERE.glob("mutants*.py"), *HERE.glob("test_mutants*.py")])]


def planted() -> Iterator[Any]:
    """Every function without parameters of these modules that returns a context."""
    for name in PLANTS:
        module = importlib.import_module(name)
        for one in vars(module).values():
            if not inspect.isfunction(one) or one.__module__ != name or inspect.signature(one).parameters:
                continue
            if re.search(r"AbstractContextManager|Iterator\[None\]", str(inspect.signature(one).return_annotation)):
                yield pytest.param(one, id=f"{name.rpartition('.')[2]}.{one.__name__}")


def takes_all(before: Callable[..., Any], after: Callable[..., Any]) -> bool:
    """Whether a call with all parameters of the one fits the other."""
    named: dict[str, None] = {}
    unnamed: list[None] = []
    for one in inspect.signature(before).parameters.values():
        if one.kind is one.KEYWORD_ONLY:
            named[one.name] = None
        elif one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            unnamed.append(None)
    try:
        inspect.signature(after).bind(*unnamed, **named)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("plant", list(planted()))
def test_a_planted_function_takes_what_the_real_one_takes(
    plant: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = patch.object
    unfit: list[str] = []

    def looked_at(target: Any, name: str, new: Any = None, *more: Any, **named: Any) -> Any:
        before = inspect.getattr_static(target, name)
        if inspect.isfunction(before) and inspect.isfunction(new) and not takes_all(before, new):
            unfit.append(name)
        return original(target, name, new, *more, **named)

    monkeypatch.setattr(patch, "object", looked_at)
    with plant():
        pass
    assert unfit == []
