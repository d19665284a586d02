"""Machines that run and are not on record: adopted, given back by an operator, or running again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.contracts.build import BuildState
from bus.contracts.cell import FoundMachine, Selection
from bus.contracts.placement import Claim, Release
from bus.contracts.stages import Stamps
from cell_conductor.config import ConductorConfig
from cell_conductor.domain import events as e
from cell_conductor.domain.adopt_rules import is_searched
from cell_conductor.domain.events import Event, InstanceEvent
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import MACHINE_EXISTS, Instance, State
from cell_conductor.domain.report import NEWER, Unexplained, UnexplainedKind, is_over
from cell_conductor.domain.set_back import SetBack, is_doubted_request
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import question_of, step
from cell_conductor.engine import Engine
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.store.safety import ADOPT, UnexplainedRecord
from tests.kit.virtual_time import on_virtual_time
from tests.unit.conductor.scenario import (
    DELETE,
    RELEASED,
    SPEC,
    TIMED_OUT,
    UUID,
    announced,
    destroys,
    failed,
    host,
    listed,
    missed,
    queried,
    refused,
    reported,
    run,
    selection,
    spawned,
    spawns,
)
from tests.unit.conductor.scenario import claimed as taken
from tests.unit.conductor.test_doubted import AFTER, SET_BACK_AT, in_doubt, requested, run_after
from tests.unit.conductor.world import Conductor, Queried, Relay, Services

# --- Builds that were redelivered to a database which has forgotten them: their machine runs, and is not built
# again.


CLAIMED = taken(attempt=2)


def machine(n: int = 3, attempt: int = 1, **other: object) -> FoundMachine:
    known = FoundMachine(
        instance_uuid=UUID, host_uuid=host(n), host=f"host-{n}", service="s2", attempt=attempt, project_id="p"
    )
    return replace(known, **other)


def found(*machines: FoundMachine) -> Step:
    """A request for the hosts 1 and 2, decided once more; its cell has these machines of it."""
    return run_after(replace(requested(SET_BACK_AT - 10.0), found=machines))


def claim_of(instance: Instance) -> Claim:
    question = question_of(instance)
    assert isinstance(question, Claim)
    return question


def test_a_machine_on_another_host_is_claimed_there_and_becomes_active() -> None:
    """It was built a second time, and the first machine stayed in quarantine."""
    adopting = found(machine())
    assert adopting.instance.phase == (State.CLAIMING, State.ACTIVE) and adopting.commands == ()
    claim = claim_of(adopting.instance)
    assert (claim.attempt, claim.release_first, claim.consumer_generation) == (2, True, 7)
    assert [option.allocations for option in claim.options] == [{host(3): {"VCPU": 1}}]
    up = run_after(CLAIMED, start=adopting.instance)
    (event,) = announced(up)
    assert (event.state, event.host, event.attempt, event.terminal) == (BuildState.ACTIVE, "host-3", 1, True)
    assert up.instance.state is State.ACTIVE and up.instance.host_uuid == host(3) and not spawns(up)
    assert up.instance.next_attempt == 3, "the book has attempt 2"


def test_a_machine_of_a_build_under_a_later_attempt_is_claimed_under_the_next() -> None:
    again = replace(requested(SET_BACK_AT + 100.0), attempt=5)
    adopting = run_after(replace(again, found=(machine(),))).instance
    assert (adopting.phase, adopting.attempt, claim_of(adopting).attempt) == ((State.CLAIMING, State.ACTIVE), 1, 6)
    own = run_after(replace(again, found=(machine(n=1, attempt=5),)))
    assert spawns(own) == [(5, host(1))], "the command is repeated"


def test_a_build_under_a_later_attempt_of_an_active_instance_is_announced_active() -> None:
    up = run_after(CLAIMED, start=found(machine()).instance).instance
    (event,) = announced(run_after(replace(requested(SET_BACK_AT + 100.0), attempt=2, found=(machine(),)), start=up))
    assert (event.state, event.host, event.terminal) == (BuildState.ACTIVE, "host-3", True)


def test_it_is_active_also_where_the_book_has_no_room() -> None:
    up = run_after(refused(attempt=2), start=found(machine()).instance)
    assert up.instance.state is State.ACTIVE and not destroys(up) and not spawns(up)
    assert up.instance.consumer_generation is None


def test_what_the_machine_takes_is_claimed_as_its_host_reports_it() -> None:
    nested = {host(3): {"VCPU": 2}, host(4): {"VGPU": 1}}
    assert claim_of(found(machine(allocations=nested)).instance).options[0].allocations == nested


def test_one_that_is_not_complete_yet_is_waited_for() -> None:
    building = run_after(CLAIMED, start=found(machine(built=False)).instance)
    assert building.instance.state is State.BUILDING and not spawns(building)
    assert building.instance.deadline is not None
    up = run_after(spawned(attempt=1, n=3), start=building.instance)
    assert up.instance.state is State.ACTIVE


def test_one_that_is_complete_before_placement_answers_is_active_then() -> None:
    adopting = found(machine(built=False)).instance
    assert run_after(spawned(attempt=1, n=3), CLAIMED, start=adopting).instance.state is State.ACTIVE
    assert run_after(reported("s2", n=3), CLAIMED, start=adopting).instance.state is State.ACTIVE


@pytest.mark.parametrize("other", [{"project_id": "theirs"}, {"project_id": None}, {"attempt": 0}])
def test_a_machine_not_proved_to_be_its_projects_is_neither_adopted_nor_doubled(
    other: dict[str, object],
) -> None:
    """A client could take another's machine over by naming its uuid, while the schedulers have forgotten it."""
    over = found(machine(**other))
    assert over.instance.phase == (State.RELEASING, State.FAILED) and over.commands == ()
    ended = run_after(RELEASED, start=over.instance)
    (event,) = announced(ended)
    assert (event.state, event.code, event.terminal) == (BuildState.FAILED, MACHINE_EXISTS, True)
    assert not is_over(ended.instance, 1, host(3)) and not is_over(ended.instance, 2, host(3))


@pytest.mark.parametrize("deleted_first", [False, True])
def test_a_machine_of_another_project_survives_the_delete_of_the_build_that_it_stood_in_the_way_of(
    deleted_first: bool,
) -> None:
    """The record was `deleted` then, which proved every machine of the uuid unwanted."""
    over = found(machine(project_id="theirs"))
    events = (DELETE, RELEASED) if deleted_first else (RELEASED, DELETE)
    ended = run_after(*events, start=over.instance)
    assert ended.instance.state is State.DELETED and not destroys(ended)
    assert not is_over(ended.instance, 1, host(3)) and not is_over(ended.instance, 2, host(1))
    later = run_after(reported("s2", n=3), start=ended.instance)
    assert not destroys(later)


def test_its_first_hosts_first_attempt_is_the_command_repeated() -> None:
    assert spawns(found(machine(n=1))) == [(1, host(1))]


def test_the_first_host_may_have_a_later_attempt() -> None:
    up = run_after(taken(attempt=4), start=found(machine(n=1, attempt=3)).instance)
    assert (up.instance.state, up.instance.attempt, spawns(up)) == (State.ACTIVE, 3, [])


def test_of_several_the_complete_one_is_adopted_and_no_other_is_destroyed() -> None:
    adopting = found(machine(n=2, attempt=2, built=False), machine(n=3, attempt=1)).instance
    up = run_after(taken(attempt=2), start=adopting).instance
    assert (up.host_uuid, up.attempt) == (host(3), 1)
    later = run_after(taken(attempt=3), start=found(machine(n=3, attempt=1), machine(n=2, attempt=2)).instance).instance
    assert (later.host_uuid, later.attempt) == (host(2), 2)
    assert not is_over(later, 1, host(3))


def test_a_delete_meanwhile_destroys_the_machine_that_was_found() -> None:
    leaving = run_after(DELETE, start=found(machine()).instance)
    assert leaving.instance.phase == (State.DESTROYING, State.DELETED) and destroys(leaving) == [(1, host(3))]
    late = run_after(CLAIMED, start=leaving.instance)
    assert late.instance.phase == (State.DESTROYING, State.DELETED) and late.commands == ()


def test_a_record_that_was_set_back_adopts_what_its_fail_over_would_build_again() -> None:
    waiting = in_doubt()
    over = run_after(failed(), start=waiting).instance
    assert over.phase == (State.CLAIMING, State.BUILDING) and over.doubted
    adopting = run_after(e.MachineFound(at=9e3, machines=(machine(attempt=2),)), start=over)
    assert adopting.instance.phase == (State.CLAIMING, State.ACTIVE)
    up = run_after(taken(attempt=3), start=adopting.instance).instance
    assert (up.state, up.host_uuid, up.attempt) == (State.ACTIVE, host(3), 2)
    for before, after in ((0, 1), (2, 2)):
        again = run_after(
            e.MachineFound(at=9e3, machines=(machine(attempt=2),)), start=replace(over, reused_from=before)
        )
        assert again.instance.reused_from == after, "what it gave out before may have been given out again"
    own = run_after(e.MachineFound(at=9e3, machines=(machine(n=1, attempt=1),)), start=over)
    assert own.instance is over, "that is what has just failed"


def test_a_machine_on_a_silent_service_is_kept_when_the_doubted_build_has_failed_over() -> None:
    """Attempt 1 of the forgotten record was over for the new one as soon as that had come to attempt 2: destroyed."""
    second = run_after(failed(), taken(), spawned(attempt=2), start=in_doubt()).instance
    assert second.state is State.ACTIVE and second.attempt == 2
    assert not is_over(second, 1, host(3))


def test_when_its_client_sent_it_counts_and_not_when_it_was_decided_again() -> None:
    again = queried(at=SET_BACK_AT + 200.0)
    late = replace(again, requested_at=SET_BACK_AT + 200.0, stamps=Stamps(requested=SET_BACK_AT - 5.0, queued=0.0))
    assert is_doubted_request(late, SetBack(SET_BACK_AT)) and not is_doubted_request(late, SetBack())
    assert not is_doubted_request(replace(late, stamps=None), SetBack(SET_BACK_AT))


def test_a_build_that_is_older_than_the_database_may_have_been_begun_in_the_one_before() -> None:
    """Its record was lost with a database that was made anew: only set-backs were asked about, moves knew both."""
    sent = replace(queried(), requested_at=SET_BACK_AT)
    assert is_doubted_request(sent, SetBack(made_at=SET_BACK_AT + 1.0))
    assert not is_doubted_request(sent, SetBack(made_at=SET_BACK_AT - 1.0))


def unclaimed() -> Instance:
    """Active on host 3, and the book had no room for it."""
    return run_after(refused(attempt=2), start=found(machine()).instance).instance


def test_a_claim_that_was_refused_is_left_to_the_audit() -> None:
    waiting = unclaimed()
    assert (waiting.state, waiting.host_uuid, waiting.consumer_generation) == (State.ACTIVE, host(3), None)
    assert (waiting.deadline, question_of(waiting)) == (None, None)


def test_a_second_build_while_its_machine_is_claimed_is_announced_when_that_has_ended() -> None:
    assert announced(run_after(requested(SET_BACK_AT - 10.0), start=found(machine()).instance)) == []


def test_an_unclaimed_instance_is_deleted_where_it_runs() -> None:
    leaving = run_after(DELETE, start=unclaimed())
    assert leaving.instance.phase == (State.DESTROYING, State.DELETED) and destroys(leaving) == [(1, host(3))]


def decided(*machines: FoundMachine) -> e.MachineFound:
    return e.MachineFound(at=9e3, machines=machines, decided_by="ann")


def test_an_active_record_takes_over_the_machine_that_an_operator_has_decided_to_be_its_own() -> None:
    """A move since the backup was forgotten: its machine stayed in quarantine, and no command gave it back."""
    left = run_after(requested(SET_BACK_AT - 500.0), spawned()).instance
    assert left.state is State.ACTIVE and left.host_uuid == host(1)
    assert run_after(e.MachineFound(at=9e3, machines=(machine(attempt=2),)), start=left).instance is left, (
        "it was not decided"
    )
    adopting = run_after(decided(machine(attempt=2)), start=left)
    assert adopting.instance.phase == (State.CLAIMING, State.ACTIVE) and adopting.commands == ()
    claim = claim_of(adopting.instance)
    assert claim.release_first and claim.consumer_generation == left.consumer_generation
    assert claim.attempt > 1000, "the forgotten history has claimed attempts of its own"
    assert [option.allocations for option in claim.options] == [{host(3): {"VCPU": 1}}]
    fresh = run_after(decided(machine(attempt=2)), start=replace(left, reused_from=0))
    assert fresh.instance.reused_from == 1, "what it gave out before may have been given out again"
    off = replace(AFTER, fences={host(1): Fence(host_uuid=host(1), host="host-1", version=1)})
    lost = step(replace(left, reused_from=0), decided(machine(attempt=2)), off).instance
    assert is_over(lost, 1, host(1)) and not is_over(lost, 2, host(2)), "its host destroys it before it is used again"
    late = run_after(taken(attempt=claim.attempt - 1), start=adopting.instance)
    assert late.instance is adopting.instance, "it answers another claim"
    up = run_after(taken(attempt=claim.attempt), start=adopting.instance)
    (event,) = announced(up)
    assert (event.state, event.host, event.attempt) == (BuildState.ACTIVE, "host-3", 2)
    assert event.sequence > left.sequence + 1000, "schedulers have had the next numbers already"
    assert (up.instance.state, up.instance.host_uuid, up.instance.attempt) == (State.ACTIVE, host(3), 2)
    assert not destroys(up) and not spawns(up) and up.instance.order == 1000
    assert not is_over(up.instance, 1, host(1)), "what may be on the other host is not destroyed"
    again = run_after(decided(machine(attempt=2)), start=up.instance)
    assert again.instance is up.instance, "its host's next report may still name it"


def test_a_machine_that_is_adopted_stays_where_the_book_has_it_or_has_no_room() -> None:
    left = run_after(requested(SET_BACK_AT - 500.0), spawned()).instance
    adopting = run_after(decided(machine(attempt=2)), start=left).instance
    attempt = claim_of(adopting).attempt
    there = e.ClaimRefused(
        at=111.0, attempt=attempt, consumer_changed=True, consumer_generation=5, holding={host(3): {"VCPU": 1}}
    )
    held = run_after(there, start=adopting).instance
    assert (held.state, held.consumer_generation) == (State.ACTIVE, 5)
    full = run_after(refused(attempt=attempt), start=adopting).instance
    assert (full.state, full.host_uuid, full.consumer_generation) == (State.ACTIVE, host(3), None)


def test_an_instance_that_was_given_up_as_lost_takes_over_its_machine() -> None:
    """Its loss was on the host that the record named: fewer than the breaker's limit were lost at once."""
    up = run_after(requested(SET_BACK_AT - 500.0), spawned()).instance
    lost = run_after(missed(up), RELEASED, start=up).instance
    assert lost.state is State.FAILED
    adopting = run_after(decided(machine(attempt=2)), start=lost).instance
    claim = claim_of(adopting)
    assert claim.consumer_generation is None, "it holds nothing"
    up = run_after(taken(attempt=claim.attempt), start=adopting)
    (event,) = announced(up)
    assert (event.state, event.code, up.instance.state) == (BuildState.ACTIVE, "", State.ACTIVE)


def lost(at: float) -> Instance:
    """Active on host 1 since then, which has it no more."""
    up = run_after(requested(at - 10.0), spawned(at=at)).instance
    return run_after(missed(up), start=replace(up, reused_from=0, newest=0)).instance


def test_one_that_was_moved_since_the_backup_is_found_before_it_is_given_up_as_lost() -> None:
    """Its old host has it no more: it was announced as failed and its claim released while it ran (seed 7, steered)."""
    waiting = lost(SET_BACK_AT - 100.0)
    assert waiting.phase == (State.RELEASING, State.FAILED) and is_searched(waiting)
    assert not is_over(waiting, 2, host(3)) and waiting.reused_from == 2
    release = question_of(waiting)
    assert isinstance(release, Release) and release.attempt == 2, "another cell may claim what follows"
    nothing = run_after(e.MachineFound(at=9e3, machines=(machine(n=1),)), start=waiting).instance
    assert nothing is waiting, "that is the one which was lost"
    adopting = run_after(e.MachineFound(at=9e3, machines=(machine(attempt=2),)), start=waiting).instance
    assert adopting.phase == (State.CLAIMING, State.ACTIVE)
    up = run_after(taken(attempt=claim_of(adopting).attempt), start=adopting)
    (event,) = announced(up)
    assert (event.state, event.host, event.attempt, event.code) == (BuildState.ACTIVE, "host-3", 2, "")
    assert event.sequence > 1000, "schedulers have had the next numbers already"
    assert (up.instance.host_uuid, up.instance.doubted, up.instance.code) == (host(3), False, "")
    theirs = run_after(e.MachineFound(at=9e3, machines=(machine(attempt=2, project_id=None),)), start=waiting).instance
    assert theirs.phase == (State.RELEASING, State.FAILED) and not is_searched(theirs), "an operator decides"


def test_what_no_service_has_is_lost_and_so_is_what_became_active_since() -> None:
    ended = run_after(RELEASED, start=lost(SET_BACK_AT - 100.0))
    (event,) = announced(ended)
    assert (event.state, event.code) == (BuildState.FAILED, "instance.lost")
    assert not is_over(ended.instance, 2, host(3)), "a service that is down may have it"
    assert not is_searched(lost(SET_BACK_AT + 100.0))


def test_no_other_record_takes_a_machine_over_by_an_operators_word() -> None:
    built = run_after(requested(SET_BACK_AT - 500.0), spawned()).instance
    deleting = run_after(DELETE, start=built).instance
    assert run_after(decided(machine(attempt=2)), start=deleting).instance is deleting
    theirs = run_after(RELEASED, start=found(machine(project_id="theirs")).instance).instance
    assert theirs.state is State.FAILED
    assert run_after(decided(machine(attempt=2)), start=theirs).instance is theirs, "it may be another project's"
    unknown = decided(machine(attempt=2, allocations=None))
    nested = replace(built, selections=(replace(built.here, allocations={host(7): {"VCPU": 1}}),))
    assert run_after(unknown, start=nested).instance is nested, "what it takes there is not known"


# --- An operator has decided that a machine in quarantine is its instance's: the conductor queries the hosts first.


KEPT = UnexplainedRecord(
    machine=Unexplained(UUID, 2, host(3), UnexplainedKind.QUARANTINED, NEWER),
    service="s2",
    first_seen=1.0,
    last_seen=1.0,
    verdict=ADOPT,
    decided_by="ann",
)
ACTIVE = Instance(
    uuid=UUID, state=State.ACTIVE, spec=SPEC, selections=(selection(1),), attempt=1, consumer_generation=7
)


def quarantined(n: int = 3, attempt: int = 2, **other: object) -> FoundMachine:
    known = FoundMachine(
        instance_uuid=UUID, host_uuid=host(n), host=f"host-{n}", service="s2", attempt=attempt, project_id="p"
    )
    return replace(known, **other)


async def adoption(
    services: Services,
    *,
    record: Instance | None = ACTIVE,
    up: Collection[str] | None = ("s1", "s2"),
    fenced: Collection[str] = (),
) -> tuple[dict[str, FoundMachine], str]:
    """(what is adopted, why nothing is)"""
    search = Conductor(services, up).search
    await search._store.open()
    known = {} if record is None else {UUID: record}
    with capture_logs() as logs:
        found = await search.find_decided({UUID: KEPT}, known, fenced)
    (line,) = [one for one in logs if one["event"].startswith("quarantine.")]
    assert line["event"] == ("quarantine.adopted" if found else "quarantine.not_adopted")
    assert (line["by"], line["host"]) == ("ann", host(3))
    return found, line["reason"]


async def test_the_only_machine_of_the_instance_is_adopted() -> None:
    services = Services(s1=(), s2=(quarantined(),))
    assert await adoption(services) == ({UUID: quarantined()}, "")
    assert all(one.thorough for one in services.queried), "another deployment's machines count, too"


@pytest.mark.parametrize(
    ("services", "why"),
    [
        (Services(s1=(), s2=()), "does not report it"),
        (Services(s1=(), s2=(quarantined(attempt=3),)), "does not report it"),
        (Services(s1=(), s2=(quarantined(foreign=True),)), "does not report it"),
        (Services(s1=(quarantined(1, 1),), s2=(quarantined(),)), "another machine of it on host-1"),
        (Services(s1=(quarantined(4, 2, foreign=True),), s2=(quarantined(),)), "another machine of it on host-4"),
        (Services(s1=(), s2=(quarantined(project_id="theirs"),)), "another project"),
    ],
)
async def test_what_the_hosts_do_not_confirm_is_left_in_quarantine(services: Services, why: str) -> None:
    found, reason = await adoption(services)
    assert not found and why in reason


@pytest.mark.parametrize("up", [("s1", "s2"), ("s2",), None], ids=["silent", "down", "not known yet"])
async def test_the_host_that_the_record_names_has_to_be_looked_at(up: Collection[str] | None) -> None:
    """Its machine may run there."""
    services = Services(s1=(), s2=(quarantined(),))
    services.silent = {"s1"}
    found, reason = await adoption(services, up=up)
    assert not found and "answered" in reason
    services.silent, services.hosts = set(), (host(3),)
    found, reason = await adoption(services)
    assert not found and "host-1" in reason


async def test_a_fenced_host_need_not_answer() -> None:
    services = Services(s2=(quarantined(),))
    found, _ = await adoption(services, up=("s2",), fenced=(host(1),))
    assert found


@pytest.mark.parametrize(
    "record",
    [None, replace(ACTIVE, state=State.DESTROYING, then=State.DELETED), replace(ACTIVE, state=State.RESIZED)],
    ids=str,
)
async def test_only_an_active_or_a_failed_record_takes_one_over(record: Instance | None) -> None:
    services = Services(s1=(), s2=(quarantined(),))
    found, reason = await adoption(services, record=record)
    assert not found and reason and not services.queried


OTHER = UUID[:-1] + ("2" if UUID[-1] == "1" else "1")


async def both(services: Services, place: Selection, fenced: Collection[str] = ()) -> dict[str, FoundMachine]:
    """The instances of two decisions that are adopted; the record of OTHER has this place."""
    search = Conductor(services, ("s1", "s2")).search
    await search._store.open()
    decisions = {UUID: KEPT, OTHER: replace(KEPT, machine=replace(KEPT.machine, uuid=OTHER))}
    record = replace(ACTIVE, uuid=OTHER, selections=(place,))
    return await search.find_decided(decisions, {UUID: ACTIVE, OTHER: record}, fenced)


async def test_a_dead_host_of_another_decision_delays_none() -> None:
    """Until its service was forgotten, nothing in the cell was adopted."""
    services = Services(s1=(), s2=(quarantined(), quarantined(instance_uuid=OTHER)), s9=())
    services.silent = {"s9"}
    assert set(await both(services, replace(selection(5), service="s9"))) == {UUID}


async def test_a_fenced_host_need_not_be_looked_at_though_its_service_answers() -> None:
    services = Services(s1=(), s2=(quarantined(), quarantined(instance_uuid=OTHER)))
    services.hosts = (host(1), host(3))
    assert set(await both(services, selection(5), fenced=(host(5),))) == {UUID, OTHER}


# --- A machine whose instance is over runs again: its host came back from a copy, or its destruction never
# happened.


GONE = e.Destroyed(at=130.0, attempt=1, host_uuid=host(1), service="s1")
SEQUENCES = {
    State.FAILED: (queried(), failed(final=True), RELEASED),
    State.DELETED: (queried(), spawned(), DELETE, GONE, RELEASED),
}


def over(state: State) -> Instance:
    instance = run(*SEQUENCES[state]).instance
    assert instance.state is state
    return instance


@pytest.mark.parametrize("state", SEQUENCES)
def test_what_is_on_record_as_over_is_destroyed_where_it_runs_again(state: State) -> None:
    instance = over(state)
    found = run(listed(instance), start=instance)
    assert destroys(found) == [(1, host(1))]
    assert found.instance.state is state


@pytest.mark.parametrize("state", SEQUENCES)
def test_a_success_that_comes_when_all_is_over_is_destroyed(state: State) -> None:
    found = run(replace(spawned(), at=1000.0), start=over(state))
    assert destroys(found) == [(1, host(1))]
    assert found.instance.state is state


def test_a_lost_machine_that_runs_again_is_destroyed() -> None:
    """Its client was answered that it is lost, and its allocation was released."""
    up = run(queried(), spawned()).instance
    lost = run(missed(up), RELEASED, start=up).instance
    assert (lost.state, lost.code) == (State.FAILED, "instance.lost")
    assert destroys(run(listed(lost), start=lost)) == [(1, host(1))]


# --- A cell's database that dies and has forgotten its last commits: what a conductor has had on disk before.


async def after_crash(building: Instance, event: Event) -> Instance:
    """The record, when this has happened and the database has died at once."""
    table, bus, relay = MemoryInstanceTable(clock := SystemClock()), Queried(), Relay()
    store = MemoryInstances(table.session())
    await store.open()
    async with store.transaction() as transaction:
        await transaction.insert([building])
    made: dict[str, Any] = {"store": store, "bus": bus, "relay": relay, "config": ConductorConfig()}
    engine = Engine(**made, clock=clock, cell="c1")
    await engine._apply([InstanceEvent(UUID, event)])
    assert relay.sent, "the client is informed"
    assert table.instances[UUID].state is State.ACTIVE
    table.crash()
    return table.instances[UUID]


@pytest.mark.parametrize(("late", "kept"), [(False, State.BUILDING), (True, State.ACTIVE)])
@on_virtual_time
async def test_the_answer_of_a_host_that_was_queried_in_vain_is_on_disk(late: bool, kept: State) -> None:
    """The message of a result comes again, and a build has time for that. One whose host was queried because it was
    late was given up before, and its machine, of which the client was informed, destroyed (seed 41019 of 2026-11-22).
    """
    building = run(queried(), *([TIMED_OUT] if late else [])).instance
    assert building.queried is late
    assert (await after_crash(building, spawned())).state is kept
