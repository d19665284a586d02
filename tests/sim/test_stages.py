"""Where a build's time went, in the whole pipeline: every build reports it, also when the machines' clocks differ."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY

from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.stages import STAGES, durations
from cell_conductor.domain import repeat_rules
from cell_conductor.domain.events import BuildRequested, DeleteRequested
from cell_conductor.domain.instance import Instance
from cell_conductor.domain.steps import Step, StepContext
from lab.simulation.draw import plan_of
from lab.simulation.loop import EPOCH
from lab.simulation.plan import Plan
from lab.simulation.run import run
from lab.simulation.watch import Listener


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
        assert event.stamps is not None
        requested, received = event.stamps.requested, event.stamps.announced + 0.001
        spent = durations(event.stamps, since=requested, until=max(requested, received))
        assert tuple(spent) == STAGES
        assert min(spent.values()) >= 0
        assert sum(spent.values()) == pytest.approx(max(0.0, received - requested), abs=1e-5)
        if not skew_s:
            raw = [event.stamps.requested, *(getattr(event.stamps, stage) for stage in STAGES)]
            assert raw == sorted(raw), "on one clock no stage ends before it began"
            assert raw[0] > EPOCH, "the clock of the simulation, not of this machine"
    nowhere = [event for event in found if event.code == "no_valid_host"]
    assert nowhere
    for event in nowhere:
        assert event.stamps is not None
        assert tuple(durations(event.stamps, until=event.stamps.decided + 1)) == ("queued", "decided", "announced")


def observed() -> dict[str, float]:
    """How many builds the workers of this process have counted in each stage."""
    return {stage: REGISTRY.get_sample_value("berth_stage_seconds_count", {"stage": stage}) or 0.0 for stage in STAGES}


def test_workers_count_each_stage_of_each_build_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = observed()
    found = ends(plan_of(1).without_faults(), monkeypatch)
    counted = {stage: count - before[stage] for stage, count in observed().items()}
    in_cells = sum(event.stamps is not None and event.stamps.built > 0 for event in found)
    nowhere = sum(event.code == "no_valid_host" for event in found)
    assert in_cells > 10
    assert counted["dispatched"] == counted["built"] == counted["announced"] == in_cells
    assert counted["queued"] == counted["decided"] == counted["claimed"] + nowhere
    assert counted["claimed"] >= in_cells, "some are deleted while they are being built"


def was_tried(event: BuildEvent) -> bool:
    """Whether a host was asked; a service that is silent is passed over."""
    return any(attempt.outcome not in {"not_tried", "not_claimed"} for attempt in event.history)


def test_builds_that_met_faults_carry_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed attempts, crashes and redeliveries: the stages of a build show how long it all took.

    Only what a conductor announces again, because its cell got the same build again, has none: they are kept until the
    first announcement.
    """
    again: set[str] = set()
    announce_again = repeat_rules._announce_again

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

    monkeypatch.setattr(repeat_rules, "_announce_again", recorded)
    found = [event for seed in (1, 10) for event in ends(plan_of(seed), monkeypatch)]
    found = [event for event in found if event.instance_uuid not in again]
    ended = [event for event in found if event.state is BuildState.ACTIVE or (event.cell and was_tried(event))]
    ended = [event for event in ended if event.state is not BuildState.DELETED]
    assert any(event.attempt > 1 for event in ended)
    for event in ended:
        assert event.stamps is not None, event
        assert tuple(durations(event.stamps)) == STAGES, event
