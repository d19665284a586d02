"""The inputs of the suites of the instance state machine, and the parts of its answer that they read."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.build import BuildEvent
from bus.contracts.cell import InstanceSpec, Selection, Spawn
from bus.contracts.placement import ClaimOutcome, Release
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.state import events as e
from cell_conductor.state.instance import Instance, Phase, State
from cell_conductor.state.lease import Lease, LeaseState
from cell_conductor.state.ownership_proof import rescan_id
from cell_conductor.state.step import Step, StepContext
from cell_conductor.transition import step

DATABASE_ID = "dddddddd-0000-4000-8000-000000000001"
PATIENCE = StepContext(cell="c1", up=("s1", "s2"), database_id=DATABASE_ID, claim_retry_s=15.0, destroy_retry_s=30.0)
UUID = "00000000-0000-4000-8000-000000000001"


def host(n: int) -> str:
    return f"10000000-0000-4000-8000-{n:012d}"


def selection(n: int) -> Selection:
    return Selection(
        host_uuid=host(n),
        host=f"host-{n}",
        service="s1",
        allocations={host(n): {"VCPU": n}},
        spec_generations={host(n): n},
    )


SPEC = InstanceSpec(instance_uuid=UUID, project_id="p", user_id="u")


def phase_of(at: State | Phase) -> Phase:
    """A state that waits for no answer stands for itself."""
    return at if isinstance(at, tuple) else (at, None)


def queried(hosts: int = 3, at: float = 100.0) -> e.BuildRequested:
    return e.BuildRequested(
        at=at,
        spec=SPEC,
        selections=tuple(selection(n) for n in range(1, hosts + 1)),
        consumer_generation=7,
        build_timeout_s=60.0,
        cause="why",
    )


def answering(instance: Instance, event: e.Event) -> e.Event:
    """A release that names no attempt is that of what the instance asks for now."""
    query = awaited_request_of(instance)
    if type(event) is not e.Released or event.attempt or not isinstance(query, Release):
        return event
    return replace(event, attempt=query.attempt or 0)


def run(*happened: e.Event, start: Instance | None = None, down: str = "") -> Step:
    """The last step of a story. down: the services that are silent."""
    leases = {name: Lease(service=name, epoch=1, state=LeaseState.SILENT, reason="why") for name in down.split()}
    stepped = Step(start or Instance(uuid=UUID))
    for event in happened:
        stepped = step(stepped.instance, answering(stepped.instance, event), replace(PATIENCE, down=leases))
    return stepped


def on(*services: str) -> e.BuildRequested:
    """A build whose hosts are these services', in order."""
    build = queried(hosts=len(services))
    chosen = zip(build.selections, services, strict=True)
    return replace(build, selections=tuple(replace(selection, service=service) for selection, service in chosen))


def spawned(attempt: int = 1, n: int | None = None, at: float = 110.0) -> e.Spawned:
    return e.Spawned(at=at, attempt=attempt, host_uuid=host(n or attempt), service="s1")


def failed(attempt: int = 1, n: int | None = None, *, final: bool = False) -> e.SpawnFailed:
    return e.SpawnFailed(
        at=110.0, attempt=attempt, host_uuid=host(n or attempt), code="spawn.no_disk", reason="full", final=final
    )


def claimed(attempt: int = 2, option: int = 0, generation: int = 9) -> e.Claimed:
    outcomes = (ClaimOutcome.NO_CAPACITY,) * option + (ClaimOutcome.CLAIMED,)
    return e.Claimed(at=111.0, attempt=attempt, option=option, consumer_generation=generation, outcomes=outcomes)


def refused(attempt: int = 2, *, changed: bool = False) -> e.ClaimRefused:
    return e.ClaimRefused(
        at=111.0, attempt=attempt, consumer_conflict=changed, outcomes=(ClaimOutcome.NO_CAPACITY, ClaimOutcome.CONFLICT)
    )


DELETE = e.DeleteRequested(at=120.0)
TIMED_OUT = e.TimedOut(at=170.0)
SILENT = (TIMED_OUT, e.TimedOut(at=180.0))  # the host did not answer either when it was asked
RELEASED = e.Released(at=130.0)


def announced(stepped: Step) -> list[BuildEvent]:
    return [command for command in stepped.commands if isinstance(command, BuildEvent)]


def spawns(stepped: Step) -> list[tuple[int, str]]:
    return [(c.attempt, c.host_uuid) for c in stepped.commands if isinstance(c, Spawn)]


def missed(instance: Instance, n: int = 1, service: str = "s1") -> e.MachineMissing:
    """By a scan that began after the record became what it is."""
    return e.MachineMissing(at=900.0, host_uuid=host(n), service=service, rescans=(rescan_id(instance),))


def listed(instance: Instance, attempt: int = 1, n: int = 1, service: str = "s1") -> e.MachineRunning:
    """By a scan that began after the record became what it is."""
    return replace(reported(service, attempt, n), at=900.0, rescans=(rescan_id(instance),))


def reported(service: str, attempt: int = 1, n: int = 1) -> e.MachineRunning:
    return e.MachineRunning(at=125.0, attempt=attempt, host_uuid=host(n), service=service)
