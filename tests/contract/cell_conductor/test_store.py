"""One suite for both stores of a cell's leases, fences, stale machines, unknown machines and breakers."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionKind
from bus.contracts.cell import InstanceSpec, Selection
from bus.contracts.operations import FenceState
from bus.persistence.guarded_statement import Conflict
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.fence import Fence, RunningAfterFence, StaleCount
from cell_conductor.state.instance import ActionInProgress, Instance, State
from cell_conductor.state.lease import Leader, Lease, LeaseState
from cell_conductor.state.unknown_machine import UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed import Unrecognised
from cell_conductor.store.keyed_tables import ADOPT, DESTROY, PROTECT, DecidedMachine
from cell_conductor.store.port import InstanceStore
from cell_conductor.store.unknown_machines import Safety
from tests.contract.cell_conductor.test_instances import restored
from tests.unit.cell_conductor.scenario import SPEC, selection

# --- One suite for both stores of leases: one leader at a time, and what a former one would record is refused.


UP = Lease(service="a", epoch=7, interval_s=1.0, since=5.0)
SILENT = Lease(
    service="b",
    epoch=2**62,
    interval_s=0.5,
    state=LeaseState.SILENT,
    since=6.0,
    reason="no heartbeat",
)
LEFT = Lease(service="c", epoch=1, interval_s=1.0, state=LeaseState.STOPPED, since=4.0, reason="it was stopped")
LONG_S, OVER_S = 60.0, -1.0


async def test_one_conductor_keeps_the_leases_until_it_stops_announcing_it(instances: InstanceStore) -> None:
    leases = instances.leases
    term = await leases.hold_leadership("one", LONG_S, None)
    assert term is not None and await leases.hold_leadership("two", LONG_S, None) is None
    assert await leases.hold_leadership("one", OVER_S, term) == term, "the same keeper, the same term"
    newer = await leases.hold_leadership("two", LONG_S, None)
    assert newer is not None and newer > term
    assert await leases.hold_leadership("one", LONG_S, term) is None


async def test_a_record_of_another_term_of_the_same_name_begins_a_new_one(instances: InstanceStore) -> None:
    """Schedulers have had digests of that term, or of a later one, and would ignore those that begin at 1 again."""
    leases = instances.leases
    first = await leases.hold_leadership("one", LONG_S, None)
    assert first is not None
    restarted = await leases.hold_leadership("one", LONG_S, None)
    assert restarted is not None and restarted > first, "a former process of this name had the first"
    ahead = restarted + 3_600_000
    set_back = await leases.hold_leadership("one", LONG_S, ahead)
    assert set_back is not None and set_back > ahead, "the database was set back to before that term"
    assert await leases.hold_leadership("one", OVER_S, set_back) == set_back
    late = await leases.hold_leadership("one", LONG_S, set_back)
    assert late is not None and late > set_back, "another may have been the keeper since, and be on record no more"


async def test_what_a_former_keeper_records_is_refused(instances: InstanceStore) -> None:
    leases = instances.leases
    term = await leases.hold_leadership("one", OVER_S, None)
    assert term is not None and await leases.record(term, [SILENT, UP])
    assert await leases.leases() == [UP, SILENT]
    newer = await leases.hold_leadership("two", LONG_S, None)
    assert newer is not None and await leases.leases() == [UP, SILENT], "the next keeper starts from these"
    assert not await leases.record(term, [LEFT], ["a"])
    back = replace(UP, service="b")
    assert await leases.record(newer, [back, LEFT])
    assert await leases.leases() == [UP, back, LEFT]


OWN, EARLIER, NONE = "its own term", "the term before its own", "none"


@pytest.mark.parametrize(
    ("caller", "term", "held", "becomes"),
    [
        ("one", OWN, True, "the same"),
        ("one", EARLIER, True, "the next"),
        ("one", NONE, True, "the next"),
        ("one", OWN, False, "the next"),
        ("two", NONE, True, ""),
        ("two", OWN, True, ""),
        ("two", NONE, False, "the next"),
        ("two", OWN, False, "the next"),
    ],
)
async def test_who_becomes_the_keeper_and_of_which_term(
    instances: InstanceStore, caller: str, term: str, held: bool, becomes: str
) -> None:
    """`one` is the leader on record. Both adapters are asked by the same function."""
    leases = instances.leases
    first = await leases.hold_leadership("one", LONG_S if held else OVER_S, None)
    assert first is not None
    found = await leases.hold_leadership(caller, LONG_S, {OWN: first, EARLIER: first - 1, NONE: None}[term])
    assert {None: "", first: "the same"}.get(found, "the next") == becomes
    assert found is None or found >= first
    now = await leases.hold_leadership("one", LONG_S, first)
    assert (now is None) is (caller == "two" and not held), "it is on record"


async def test_of_two_who_would_become_the_keeper_at_once_the_first_one_does(instances: InstanceStore) -> None:
    keyed = instances.leases.keyed
    before, now = await keyed.leader()
    one, two = (Leader(process, 7, now + LONG_S) for process in ("one", "two"))
    assert await keyed.write_leader(before, one) and not await keyed.write_leader(before, two)
    assert (await keyed.leader())[0] == one


async def test_what_is_gone_is_deleted_with_what_has_changed(instances: InstanceStore) -> None:
    term = await instances.leases.hold_leadership("one", LONG_S, None)
    assert term is not None
    await instances.leases.record(term, [UP, SILENT])
    assert not await instances.leases.record(term - 1, [], ["b"])
    assert await instances.leases.record(term, [LEFT], ["b", "d"])
    assert await instances.leases.leases() == [UP, LEFT]
    assert await instances.leases.record(term, [], ["a"]) and await instances.leases.leases() == [LEFT]


async def test_no_lease_counts_or_is_written_in_a_database_whose_set_back_is_not_recognised(
    instances: InstanceStore,
) -> None:
    """A search for a machine in doubt counted as complete, though its service had never been asked; and what a leader
    had recorded before was lost for good, as it took it to be on record.
    """
    leases = instances.leases
    term = await leases.hold_leadership("one", LONG_S, None)
    assert term is not None
    await leases.record(term, [UP, SILENT, LEFT])
    await restored(instances)
    assert await leases.hold_leadership("one", LONG_S, term) is None
    assert not await leases.record(term, [replace(UP, service="d")], ["b"])
    with pytest.raises(Unrecognised):
        await leases.leases()
    async with instances.transaction() as transaction:
        assert await transaction.recognise() is not None
    assert await leases.leases() == [UP, SILENT, LEFT]
    newer = await leases.hold_leadership("one", LONG_S, None)
    assert newer is not None and newer > term
    assert await leases.delete("b"), "an operator states that it is gone"
    assert await leases.leases() == [UP, LEFT]


def instance(
    number: int,
    service: str,
    state: State,
    next_state: State | None = None,
    *,
    selection_index: int = 0,
    action: ActionInProgress | None = None,
) -> Instance:
    uuid = f"00000000-0000-4000-8000-{number:012d}"
    selections = tuple(
        replace(selection(n), service=service if n - 1 == selection_index else "other") for n in (1, 2, 3)
    )
    deadline = 9.0 if state in (State.BUILDING, State.PREPARING) else None
    return Instance(
        uuid=uuid,
        state=state,
        next_state=next_state,
        spec=SPEC,
        selections=selections,
        selection_index=selection_index,
        attempt=1,
        deadline=deadline,
        action=action,
    )


async def test_what_a_service_was_commanded_to_build_is_found_by_its_current_host(instances: InstanceStore) -> None:
    kept = [
        instance(1, "a", State.BUILDING),
        instance(2, "a", State.BUILDING, selection_index=2),
        instance(3, "b", State.BUILDING),
        instance(4, "a", State.ACTIVE),
        instance(5, "a", State.DESTROYING, State.DELETED),
        instance(6, "c", State.BUILDING),
    ]
    async with instances.transaction() as transaction:
        await transaction.insert(kept)
    assert await instances.building_at(["b", "a", "nobody"]) == [
        (kept[0].uuid, "a"),
        (kept[1].uuid, "a"),
        (kept[2].uuid, "b"),
    ]
    assert await instances.building_at([]) == []


async def test_a_lease_is_deleted_though_another_is_the_keeper(instances: InstanceStore) -> None:
    term = await instances.leases.hold_leadership("one", LONG_S, None)
    assert term is not None
    await instances.leases.record(term, [UP, SILENT])
    assert await instances.leases.delete("b")
    assert not await instances.leases.delete("b")
    assert await instances.leases.leases() == [UP]


async def test_what_is_at_a_service_by_the_record_is_found_unless_its_host_is_fenced(instances: InstanceStore) -> None:
    kept = [
        instance(1, "a", State.ACTIVE),
        instance(2, "a", State.ACTIVE, selection_index=1),
        instance(3, "b", State.ACTIVE),
        instance(4, "a", State.BUILDING),
        instance(5, "a", State.DELETED),
        instance(6, "a", State.RELEASING, State.OFFLOADED),
        instance(7, "a", State.CLAIMING, State.PREPARING),
        instance(8, "b", State.RESIZED),
        instance(9, "b", State.TRANSFERRED),
    ]
    source = replace(selection(9), service="a")
    action = ActionInProgress(request_id=kept[7].uuid, kind=ActionKind.MIGRATE, source=source, spec=SPEC)
    kept[7:] = [replace(one, action=action) for one in kept[7:]]
    # A service of another cell may have the same name.
    async with instances.transaction() as transaction:
        await transaction.insert(kept)
    assert await instances.at_service("a", 10) == [kept[at].uuid for at in (0, 1, 3, 7)]
    assert await instances.at_service("a", 1) == [kept[0].uuid]
    assert await instances.at_service("none", 10) == []
    for fenced in (selection(1), source):
        await instances.fences.put(Fence(host_uuid=fenced.host_uuid, host="h", version=1))
    assert await instances.at_service("a", 10) == [kept[1].uuid]


# --- One suite for both stores of a cell's fences.


A, B, C = (f"{n}0000000-0000-4000-8000-000000000000" for n in "abc")
HOST, OTHER = (f"{n}0000000-0000-4000-8000-000000000000" for n in "12")
FENCE = Fence(host_uuid=HOST, host="h1", version=3, reason="PSU", by="ann", at=5.0)


async def give_up(instances: InstanceStore, *services: str, hosts: tuple[str, ...] = (HOST,), at: float = 7.0) -> bool:
    async with instances.transaction() as transaction:
        return await transaction.rely_on(hosts, {HOST: services} if services else {}, at)


async def given_up(instances: InstanceStore) -> dict[str, StaleCount]:
    (fence,) = await instances.fences.fences()
    return fence.stale


async def test_of_decisions_about_a_host_the_newest_counts(instances: InstanceStore) -> None:
    assert await instances.fences.put(FENCE) is FENCE
    assert await instances.fences.put(replace(FENCE, by="bob")) == FENCE
    assert await instances.fences.put(replace(FENCE, version=2, state=FenceState.UNFENCING)) == FENCE
    assert await instances.fences.fences() == [FENCE]
    newer = replace(FENCE, version=4, state=FenceState.UNFENCING, by="bob")
    assert await instances.fences.put(newer) is newer
    assert await instances.fences.fences() == [newer]


async def test_machines_are_given_up_under_a_fence_alone(instances: InstanceStore) -> None:
    assert not await give_up(instances, "s")
    assert await instances.fences.fences() == []
    await instances.fences.put(FENCE)
    assert await give_up(instances, "s", "t", "s")
    assert await give_up(instances, "t", at=8.0) and await give_up(instances)
    assert not await give_up(instances, "s", hosts=(HOST, OTHER))
    counted = {"s": StaleCount(2, 7.0), "t": StaleCount(2, 8.0)}
    assert await given_up(instances) == counted
    await instances.fences.put(replace(FENCE, version=4, at=9.0, since=9.0))
    assert await instances.fences.fences() == [replace(FENCE, version=4, at=9.0, stale=counted)], "they stay"
    with pytest.raises(Conflict):
        async with instances.optimistic(()) as transaction:
            await transaction.rely_on([HOST], {HOST: ["s"]}, 7.0)


async def test_a_scan_shows_what_was_given_up_before_it_and_no_more(instances: InstanceStore) -> None:
    await instances.fences.record_empty(HOST, {"s": StaleCount(1, 7.0)})
    await instances.fences.put(FENCE)
    await give_up(instances, "s", "t")
    shown = await given_up(instances)
    await give_up(instances, "s", at=8.0)
    await instances.fences.record_empty(HOST, shown)
    assert await given_up(instances) == {"s": StaleCount(2, 8.0)}
    await instances.fences.record_empty(HOST, await given_up(instances))
    assert await given_up(instances) == {}


async def test_a_fence_is_lifted_by_its_newest_decision_once_nothing_is_lost(instances: InstanceStore) -> None:
    await instances.fences.put(FENCE)
    assert not await instances.fences.unfence(HOST, 3, 9.0)  # no decision lifts it
    await give_up(instances, "s")
    await instances.fences.put(replace(FENCE, version=4, state=FenceState.UNFENCING))
    assert not await instances.fences.unfence(HOST, 4, 9.0)
    await instances.fences.record_empty(HOST, await given_up(instances))
    assert not await instances.fences.unfence(HOST, 3, 9.0)
    assert await instances.fences.unfence(HOST, 4, 9.0)
    assert await instances.fences.fences() == []
    assert not await instances.fences.unfence(HOST, 4, 9.0)


async def test_a_fence_stays_while_an_evacuation_from_its_host_may_run_elsewhere(instances: InstanceStore) -> None:
    """It is the proof that the machine does not run twice. Other moves need no such proof."""

    def moved(uuid: str, kind: ActionKind, source: str = HOST) -> Instance:
        spec = InstanceSpec(instance_uuid=uuid, project_id="p")
        there, here = (
            Selection(host_uuid=one, host="h", service="s", allocations={one: {"VCPU": 1}}) for one in (source, OTHER)
        )
        action = ActionInProgress(request_id=uuid, kind=kind, source=there, source_attempt=1, spec=spec)
        selections = (there, here)
        return Instance(
            uuid=uuid,
            state=State.FINISHING,
            spec=spec,
            selections=selections,
            selection_index=1,
            attempt=2,
            action=action,
        )

    evacuated = moved(A, ActionKind.EVACUATE)
    others = [moved(B, ActionKind.EVACUATE, C), moved(C, ActionKind.MIGRATE)]
    async with instances.transaction() as transaction:
        await transaction.insert([evacuated, *others])
    await instances.fences.put(replace(FENCE, version=2))
    await instances.fences.put(replace(FENCE, state=FenceState.UNFENCING))
    assert not await instances.fences.unfence(HOST, 3, 9.0)
    for record in (
        replace(evacuated, state=State.DESTROYING, next_state=State.REVERTING),
        replace(evacuated, state=State.REVERTING),
    ):
        async with instances.transaction() as transaction:
            await transaction.lock([A])
            await transaction.update([record])
        assert await instances.fences.unfence(HOST, 3, 9.0) is (record.state is State.REVERTING), record.phase


async def test_a_fence_that_is_to_be_lifted_is_no_proof_and_takes_losses(instances: InstanceStore) -> None:
    await instances.fences.put(FENCE)
    async with instances.transaction() as transaction:
        assert await transaction.rely_on([HOST], {}, 7.0, [HOST])
    await instances.fences.put(replace(FENCE, version=4, state=FenceState.UNFENCING))
    async with instances.transaction() as transaction:
        assert not await transaction.rely_on([HOST], {}, 7.0, [HOST])
    assert await give_up(instances, "s")


async def test_what_a_fenced_host_was_found_to_run_stays_with_its_fence(instances: InstanceStore) -> None:
    fences, found = instances.fences, RunningAfterFence(FENCE.version, {A: 1})
    await fences.record_running(FENCE, "s", {A: 1}, ())
    assert await fences.fences() == []
    await fences.put(FENCE)
    await fences.record_running(replace(FENCE, version=1), "s", {B: 1}, ())
    for service, passed in (("s", ()), ("t", ()), ("t", ("s", "u"))):
        await fences.record_running(FENCE, service, {A: 1}, passed)
    assert await fences.fences() == [replace(FENCE, running={"t": found})]
    term = await instances.leases.hold_leadership("p", 10.0, None)
    assert term is not None and await instances.leases.record(term, [replace(SILENT, service="t")])
    again = replace(FENCE, version=4)
    assert await fences.put(again) is again
    assert await fences.fences() == [replace(again, running={"t": found})]
    assert await instances.leases.delete("t")  # its service is gone for good, and never reports that it is off
    await fences.put(last := replace(FENCE, version=5))
    assert await fences.fences() == [last]
    await fences.record_running(last, "t", {A: 1}, ())
    await fences.put(replace(FENCE, version=6, state=FenceState.UNFENCING))
    assert await fences.unfence(HOST, 6, 9.0)
    await fences.put(replace(FENCE, version=7))
    assert await fences.fences() == [replace(FENCE, version=7)]


async def test_what_touches_a_host_is_found_in_pages(instances: InstanceStore) -> None:
    def instance(uuid: str, state: State, host: str = HOST, next_state: State | None = None) -> Instance:
        here = Selection(host_uuid=host, host="h", service="s", allocations={host: {"VCPU": 1}})
        spec = InstanceSpec(instance_uuid=uuid, project_id="p")
        return Instance(uuid=uuid, state=state, next_state=next_state, spec=spec, selections=(here,), attempt=1)

    async with instances.transaction() as transaction:
        await transaction.insert(
            [
                instance(A, State.ACTIVE),
                instance(B, State.DESTROYING, next_state=State.DELETED),
                instance(C, State.ACTIVE, OTHER),
                instance(C.replace("c", "d"), State.FAILED),
            ]
        )
    nothing = "00000000-0000-0000-0000-000000000000"
    assert await instances.fences.touching(HOST, nothing, 10) == [A, B]
    assert await instances.fences.touching(HOST, nothing, 1) == [A]
    assert await instances.fences.touching(HOST, A, 1) == [B]


async def test_after_a_fence_is_lifted_an_older_decision_fences_nothing(instances: InstanceStore) -> None:
    """Its message may be delivered again, after a conductor has died."""
    fences, unfencing = instances.fences, replace(FENCE, version=4, state=FenceState.UNFENCING)
    await fences.put(FENCE)
    assert await fences.put(unfencing) is unfencing
    assert await fences.unfence(HOST, 4, 9.0)
    assert not await fences.unfence(HOST, 4, 9.0)
    lifted = replace(unfencing, state=FenceState.UNFENCED, at=9.0)
    for late in (FENCE, replace(FENCE, version=4), unfencing):
        assert await fences.put(late) == lifted
    assert await fences.fences() == [] and not await give_up(instances, "s")
    newer = replace(FENCE, version=5)
    assert await fences.put(newer) is newer and await give_up(instances, "s")


async def test_a_lift_that_overtakes_its_fence_is_kept(instances: InstanceStore) -> None:
    fences, unfencing = instances.fences, replace(FENCE, version=4, state=FenceState.UNFENCING)
    for _ in ("first", "again"):
        assert await fences.put(unfencing) == replace(unfencing, state=FenceState.UNFENCED)
        assert (await fences.put(FENCE)).version == 4
        assert await fences.fences() == []
    later = replace(unfencing, version=5)
    assert await fences.put(later) == replace(later, state=FenceState.UNFENCED)
    await fences.put(replace(FENCE, version=6))
    on_record = replace(unfencing, version=7)
    assert await fences.put(on_record) is on_record and await fences.fences() == [on_record], "it is lifted by `lift`"


async def test_a_fence_that_was_lifted_long_ago_goes_and_no_other(instances: InstanceStore) -> None:
    fences, unfencing = instances.fences, replace(FENCE, version=4, state=FenceState.UNFENCING, at=1.0)
    hosts = (A, B, C, HOST)
    for host_uuid in hosts:
        await fences.put(replace(FENCE, host_uuid=host_uuid, at=1.0))
    for host_uuid in (A, B, C):
        await fences.put(replace(unfencing, host_uuid=host_uuid))
    assert await fences.unfence(A, 4, 7.0) and await fences.unfence(B, 4, 8.0)
    assert await fences.purge_ended(7.0, 10) == 0
    assert await fences.purge_ended(9.0, 1) == 1
    assert (await fences.put(replace(unfencing, host_uuid=B))).at == 8.0, "in order of the hosts"
    assert await fences.purge_ended(9.0, 10) == 1 and await fences.purge_ended(9.0, 10) == 0
    assert [one.host_uuid for one in await fences.fences()] == sorted([C, HOST])


# --- One suite for both stores of unknown machines and breakers.


A, B, HOST = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab1")
OURS = UnknownMachine(A, 3, HOST, UnknownMachineKind.QUARANTINED, "no record")
FOREIGN = UnknownMachine(B, 0, HOST, UnknownMachineKind.FOREIGN, "no tag of this database")


@pytest.fixture
def safety(instances: InstanceStore) -> Safety:
    return instances.safety


async def test_the_identity_is_the_schemas_own(instances: InstanceStore) -> None:
    first = instances.database_id
    await instances.open()
    assert instances.database_id == first and len(first) == 36


async def test_what_is_recorded_again_keeps_when_it_was_first_seen(safety: Safety) -> None:
    first = await safety.record("s", [OURS, FOREIGN], 1.0)
    assert {(one.machine.uuid, one.is_new, one.first_seen) for one in first} == {(A, True, 1.0), (B, True, 1.0)}
    (again,) = await safety.record("t", [OURS], 2.0)
    assert (again.is_new, again.service, again.first_seen, again.last_seen) == (False, "t", 1.0, 2.0)
    assert [(one.machine.uuid, one.is_new) for one in await safety.records()] == [(A, False), (B, False)]
    ours, foreign = await safety.records()
    assert await safety.delete([ours, replace(foreign, machine=replace(FOREIGN, host_uuid=A))]) == [(HOST, A)]
    assert [one.machine for one in await safety.records()] == [FOREIGN]


async def test_what_is_listed_or_decided_meanwhile_is_not_deleted(safety: Safety) -> None:
    """A word came between the read of a record and its delete, and went with it."""
    before = await safety.record("s", [OURS, FOREIGN], 1.0)
    await safety.decide([DecidedMachine(A)], PROTECT, "op", 2.0)
    await safety.record("s", [FOREIGN], 3.0)
    assert await safety.delete(before) == []
    assert sorted(await safety.delete(await safety.records())) == [(HOST, A), (HOST, B)]


async def test_an_operators_word_is_for_one_attempt_of_a_quarantined_machine(safety: Safety) -> None:
    await safety.record("s", [OURS, FOREIGN], 1.0)
    assert await safety.decide([DecidedMachine(B)], DESTROY, "op", 2.0) == [], (
        "a foreign machine is not for berth to destroy"
    )
    assert await safety.decide([DecidedMachine(A)], PROTECT, "op", 2.0) == [(HOST, A)]
    (kept,) = await safety.record("s", [OURS], 3.0)
    assert (kept.decision, kept.decided_by, kept.decided_at) == (PROTECT, "op", 2.0)
    (newer,) = await safety.record("s", [replace(OURS, attempt=4)], 4.0)
    assert newer.decision == PROTECT, "an attempt that is listed otherwise does not show that the machine is gone"
    (marked,) = await safety.record("s", [replace(newer.machine, kind=UnknownMachineKind.FOREIGN)], 5.0)
    assert marked.decision == PROTECT
    for attempt, decision in ((5, DESTROY), (6, ADOPT)):
        await safety.record("s", [OURS], 6.0)
        await safety.decide([DecidedMachine(A)], decision, "op", 7.0)
        (newer,) = await safety.record("s", [replace(OURS, attempt=attempt)], 8.0)
        assert newer.decision == ""


async def test_an_operators_word_is_kept_while_reports_record_the_machine_again(safety: Safety) -> None:
    await safety.record("s", [OURS], 1.0)
    for number in range(20):
        decision = DESTROY if number % 2 else PROTECT
        async with asyncio.TaskGroup() as group:
            group.create_task(safety.record("s", [OURS, replace(OURS, uuid=B)], 3.0))
            decided = group.create_task(safety.decide([DecidedMachine(A)], decision, "op", 2.0))
            group.create_task(safety.record("s", [OURS, replace(OURS, uuid=B)], 3.0))
        assert decided.result() == [(HOST, A)]
        assert {one.machine.uuid: one.decision for one in await safety.records()} == {A: decision, B: ""}


async def test_a_word_about_one_host_is_not_for_the_others(safety: Safety) -> None:
    other = replace(OURS, host_uuid=B)
    await safety.record("s", [OURS, other], 1.0)
    assert await safety.decide([DecidedMachine(A, A)], ADOPT, "op", 2.0) == [], "no machine of it is there"
    assert await safety.decide([DecidedMachine(A, HOST)], ADOPT, "op", 2.0) == [(HOST, A)]
    assert {one.machine.host_uuid: one.decision for one in await safety.records()} == {HOST: ADOPT, B: ""}


async def test_the_machines_of_some_instances_are_read_with_the_words_about_them(instances: InstanceStore) -> None:
    safety = instances.safety
    await safety.record("s", [OURS, replace(OURS, host_uuid=B), FOREIGN], 1.0)
    await safety.decide([DecidedMachine(A, B)], PROTECT, "op", 2.0)
    async with instances.transaction() as transaction:
        found = await transaction.unknown_machines({A, HOST})
        assert await transaction.unknown_machines({HOST}) == []
    assert sorted((one.location, one.decision) for one in found) == sorted([((HOST, A), ""), ((B, A), PROTECT)])
    assert found == [one for one in await safety.records() if one.machine.uuid == A]


async def test_a_brief_has_the_hosts_on_which_an_operator_keeps_a_machine(instances: InstanceStore) -> None:
    await instances.safety.record("s", [OURS, replace(OURS, host_uuid=B), replace(OURS, uuid=HOST)], 1.0)
    await instances.safety.decide([DecidedMachine(A, B)], PROTECT, "op", 2.0)
    await instances.safety.decide([DecidedMachine(A, HOST)], ADOPT, "op", 2.0)
    async with instances.transaction() as transaction:
        await transaction.insert(
            [Instance(uuid=uuid, spec=InstanceSpec(instance_uuid=uuid, project_id="p")) for uuid in (A, HOST)]
        )
    assert {one.uuid: list(one.protected_hosts) for one in await instances.summaries([], [A, HOST])} == {
        A: [B],
        HOST: [],
    }


@pytest.mark.parametrize("asked", [A, HOST])
async def test_an_optimistic_transaction_expects_that_no_machine_is_unexplained(
    instances: InstanceStore, asked: str
) -> None:
    """As its build would be a second one; a machine that comes later is found by its record."""
    made = Instance(uuid=asked, spec=InstanceSpec(instance_uuid=asked, project_id="p"))
    await instances.safety.record("s", [OURS], 1.0)

    async def build() -> None:
        async with instances.optimistic({asked}) as transaction:
            await transaction.lock([asked])
            assert await transaction.unknown_machines({asked}) == []
            await transaction.insert([made])

    if asked == A:
        with pytest.raises(Conflict):
            await build()
        await instances.safety.delete(await instances.safety.records())
    await build()
    async with instances.transaction() as transaction:
        assert set(await transaction.lock([asked])) == {asked}


async def test_a_breaker_is_reset_once(safety: Safety) -> None:
    assert await safety.breaker("s") is None and not await safety.reset("s", "op", 1.0)
    tripped = Breaker(service="s", tripped_at=1.0, lost=6, machines=("x@y",))
    await safety.trip(tripped)
    assert await safety.breaker("s") == tripped and await safety.breakers() == [tripped]
    assert await safety.reset("s", "op", 2.0) and not await safety.reset("s", "op", 3.0)
    reset = replace(tripped, reset_at=2.0, reset_by="op")
    assert await safety.breaker("s") == reset
    await safety.trip(replace(reset, machines=()), over=tripped)
    assert await safety.breaker("s") == reset, "it is not as it was read"
    await safety.trip(replace(reset, machines=()), over=reset)
    assert await safety.breaker("s") == replace(reset, machines=())


async def test_many_machines_are_decided_about_at_once_as_they_were_seen(safety: Safety) -> None:
    seen = [replace(OURS, uuid=f"{n:08d}-0000-4000-8000-000000000000") for n in range(1_218)]
    await safety.record("s", [*seen, FOREIGN], 1.0)
    newer = replace(seen[7], attempt=4)
    await safety.record("s", [newer], 2.0)
    named = [DecidedMachine(one.uuid, one.host_uuid, one.attempt) for one in (*reversed(seen), seen[3], FOREIGN)]
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(safety.record("s", [one for one in seen if one is not seen[7]], 3.0))
            decided = group.create_task(safety.decide(named, DESTROY, "op", 2.0))
    places = sorted((one.host_uuid, one.uuid) for one in seen if one is not seen[7])
    assert decided.result() == places
    assert {one.location for one in await safety.records() if one.decision == DESTROY} == set(places)


async def test_a_breaker_that_tripped_again_is_not_reset_by_who_saw_the_first(safety: Safety) -> None:
    await safety.trip(Breaker(service="s", tripped_at=1.0, lost=6))
    assert await safety.reset("s", "op", 2.0, tripped_at=1.0)
    again = Breaker(service="s", tripped_at=3.0, lost=7)
    await safety.trip(again)
    assert not await safety.reset("s", "op", 4.0, tripped_at=1.0) and await safety.breakers() == [again]
    assert await safety.reset("s", "op", 4.0, tripped_at=3.0)
