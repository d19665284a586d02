"""An instance that awaits its confirm on a host that is fenced."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.actions import Condition
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.operations import EvacuationPolicy
from cell_conductor.state.instance import State
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.drain.drain_steps import is_restarted
from scheduler_worker.records.action_record import ActionContext
from scheduler_worker.records.build_record import RecordedBuild, SinceBuild
from tests.unit.cell_conductor.records import fenced as on_fenced
from tests.unit.cell_conductor.scenario import SPEC
from tests.unit.cell_conductor.test_single_conditions import fenced, in_place

VM = "a0000000-0000-4000-8000-000000000000"


def test_it_is_restarted_elsewhere_or_its_move_is_ended_by_its_cell() -> None:
    made = in_place()
    made.context = on_fenced(1)
    made.instance = replace(made.instance, spec=replace(SPEC, on_host_failure=EvacuationPolicy.RESTART))
    made.apply(fenced(1))
    still_resized = made.instance.state is State.RESIZED
    build = RecordedBuild(
        instance_uuid=VM,
        project_id="p",
        state=BuildState.ACTIVE,
        sequence=9,
        terminal=True,
        cell="c1",
        instance=SinceBuild(condition=Condition.RESIZED),
    )
    request = BuildRequest(
        instance_uuid=VM, project_id="p", flavor="m1.small", on_host_failure=EvacuationPolicy.RESTART
    )
    restarted = is_restarted(ActionContext(build=build, build_request=request), SchedulerConfig())
    assert restarted or not still_resized, "the cell leaves it resized, and the scheduler leaves it to the cell"
