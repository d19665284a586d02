"""What a recovery must not do: with a word that an operator has given, a host that is off, a service that never ends,
and conductors that are late.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.actions import ActionKind, ChangeMachine
from bus.contracts.base import Meta
from bus.contracts.build import BuildState
from bus.contracts.cell import Destroy, HostStates, Running, Selection
from bus.contracts.listing import ListedMachine, ListMachines, MachinesPage
from bus.contracts.operations import CellFence
from bus.contracts.recovery import KnownRecord
from cell_conductor.config import ConductorConfig
from cell_conductor.machine_search import SourceLookup
from cell_conductor.pending_lookups import PendingLookups
from cell_conductor.recovery import machine_listing, record_reconciler
from cell_conductor.reports.listings import HostListings
from cell_conductor.rules.reconcile import BlockedReason
from cell_conductor.rules.recovered import restatement
from cell_conductor.rules.recovery_facts import KnownInstance, Reconciled
from cell_conductor.state.database_marks import Stated
from cell_conductor.state.fence import fence_of
from cell_conductor.state.instance import Instance, Phase, State
from cell_conductor.state.unknown_machine import UnknownMachine, UnknownMachineKind
from cell_conductor.store import tables
from cell_conductor.store.keyed import Recovering, Unrecognised
from cell_conductor.store.keyed_tables import ADOPT, DESTROY, PROTECT, DecidedMachine
from cell_conductor.store.port import DatabaseIdentity
from cell_conductor.store.postgres import PostgresTransaction
from lab.simulation.watch import failed_steps
from tests.unit.cell_conductor.move_scenario import ACTION
from tests.unit.cell_conductor.records import moving, record
from tests.unit.cell_conductor.scenario import UUID, host, selection
from tests.unit.cell_conductor.test_recovery import ACTIVE, FLOOR, Cell, World, cell_of, known, listed
from tests.unit.cell_conductor.world import listing, opened

DELETING = record(
    State.DESTROYING, next_state=State.DELETED, queried=False, code="", reason="", attempt=2, highest_attempt=2
)


async def decided(cell: Cell, decision: str, *places: tuple[int, int]) -> None:
    """These machines, each a host and an attempt, are in quarantine, and an operator has decided about them."""
    for number, attempt in places:
        machine = UnknownMachine(UUID, attempt, host(number), UnknownMachineKind.QUARANTINED, "older")
        await cell.store.safety.record(f"s{number}", [machine], 1.0)
    await cell.store.safety.decide([DecidedMachine(UUID)], decision, "ann", 2.0)


async def reported(cell: Cell, number: int, attempt: int) -> None:
    """A host reports this machine of the instance."""
    runs = (Running(instance_uuid=UUID, attempt=attempt, database_id=cell.store.database_id),)
    report: HostStates = listing(f"s{number}", number, runs=runs)
    await cell.hosts.hosts([Received(report, Meta(id=f"h{number}"), "c1", "conductor.hosts")])


async def test_of_several_machines_that_an_operator_keeps_none_is_destroyed() -> None:
    cell = await cell_of(World(listed(1, 1), listed(2, 2), listed(3, 1), told=known(2)), DELETING)
    await decided(cell, PROTECT, (1, 1), (3, 1))
    await cell.recover()
    assert [one.host_uuid for one in cell.sent(Destroy)] == [host(2)]


@pytest.mark.parametrize("decision", [PROTECT, ADOPT])
async def test_an_operators_word_on_a_blocked_instance_outlives_a_report(decision: str) -> None:
    """No report explains its machines: a reconciliation judges them, by that word."""
    world = World(listed(2, 2), listed(3, 1, busy=True), told=known(2))
    cell = await cell_of(world, ACTIVE)
    found = await cell.recover()
    assert found is not None and found.blocked_reason == BlockedReason.BUSY
    await decided(cell, decision, (3, 1))
    await reported(cell, 3, 1)
    assert [one.decision for one in await cell.store.safety.records()] == [decision]


@pytest.mark.parametrize("unfencing", [False, True])
async def test_what_was_active_on_a_host_that_is_fenced_is_not_lost(*, unfencing: bool) -> None:
    """By a fence alone no instance ends: it is evacuated, or its host comes back with it."""
    world = World(told=known(2))
    world.services = {"s1", "s3"}
    fence = CellFence(host_uuid=host(2), host="host-2", version=1)
    world.fences = (replace(fence, version=2, unfence=True) if unfencing else fence,)
    cell = await cell_of(world, ACTIVE)
    await cell.store.fences.put(fence_of(fence, 1.0))
    found = await cell.recover()
    assert found is not None and found.state is State.ACTIVE
    assert found.blocked_reason == (BlockedReason.HOST_ABSENT if unfencing else "")


async def test_no_machine_is_started_beside_one_that_runs() -> None:
    """The move was rolled back after the backup: its source runs again, its destination is still to be destroyed."""
    world = World(listed(1, 1), listed(3, 7, runs=False), told=known(1, 8))
    cell = await cell_of(world, replace(ACTIVE, attempt=1))
    found = await cell.recover()
    assert found is not None and found.blocked_reason == BlockedReason.CONFLICT
    assert not cell.sent(ChangeMachine)


async def test_a_host_is_not_empty_because_another_service_has_one_of_its_uuid() -> None:
    """Two compute services have a host of one uuid, and the one that has the machine is down."""
    world = World(told=known(2))
    world.services = {"s1", "s3"}
    world.also = {"s3": (host(2),)}
    cell = await cell_of(world, replace(ACTIVE, selections=(replace(ELSEWHERE, service="s2"),), selection_index=0))
    found = await cell.recover()
    assert found is not None and found.blocked_reason == BlockedReason.HOST_ABSENT
    cell.gone = {"s2"}
    settled = await cell.look_again()
    assert settled is not None and (settled.state, settled.code) == (State.RELEASING, "instance.lost")


class Endless(World):
    """One of its services always has another page."""

    def _answer(self, message: Any) -> Any:
        if not isinstance(message, ListMachines) or message.service != "s1":
            return super()._answer(message)
        self.queried.append(message)
        assert len(self.queried) < 200
        return MachinesPage(more=True, next_host=f"{int(message.after_host[-12:] or 0) + 1:036}")


async def test_a_listing_that_never_ends_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_listing, "MAX_PAGES", 3)
    world = Endless(listed(2, 2), told=known(2))
    cell = await cell_of(world, ACTIVE)
    found = await cell.recover()
    assert found is not None and found.state is State.ACTIVE


async def test_a_look_at_what_is_blocked_begins_no_recovery_of_a_database_that_lacks_nothing() -> None:
    """A stand-by has taken over, and no sweep has come yet."""
    world = World(listed(3, 7), told=known(3, 7))
    world.services = {"s1", "s2"}
    cell = await cell_of(world, ACTIVE)
    await cell.recover()
    cell.states = Stated(is_whole=True)
    cell.recovery.note_blocked([UUID])
    cell.table.place += 1
    restated = len(world.restated)
    with pytest.raises(Unrecognised):
        await cell.recovery.look()
    assert not cell.table.recovers and len(world.restated) == restated
    await cell.engine.sweep()
    assert cell.store.incarnation == 3 and not cell.store.is_recovering


async def test_a_conductor_that_listens_anew_settles_nothing() -> None:
    world = World(listed(3, 7), told=known(3, 7))
    world.services = {"s1", "s2"}
    cell = await cell_of(world, ACTIVE)
    await cell.recover()
    before, world.services = await cell.recorded(), {"s1", "s2", "s3"}
    cell.states = Stated(may_act=False)
    cell.recovery.note_blocked([UUID])
    with pytest.raises(Unrecognised):
        await cell.recovery.look()
    assert await cell.recorded() == before


async def test_a_keeper_that_was_paused_does_not_recover_a_cell_that_is_open_again() -> None:
    world = World(listed(3, 7), told=known(3, 7))
    cell = await cell_of(world, ACTIVE)
    await cell.set_back()
    other = await Cell(world, cell.table).open()
    with pytest.raises(Recovering):
        await other.engine.sweep()
    await other.recover()
    world.reader = cell.recovery._known
    assert cell.store.is_recovering
    with pytest.raises(Unrecognised):
        await cell.recovery.look()
    assert not cell.table.recovers and cell.table.incarnation == 2


async def test_numbers_above_the_floor_from_a_history_that_nobody_has_stated_prove_nothing() -> None:
    world = World(listed(1, FLOOR + 500), listed(3, FLOOR + 600), told=known(3, FLOOR + 600))
    cell = await cell_of(world, ACTIVE)
    found = await cell.recover()
    assert found is not None and found.host_uuid == host(3)
    await reported(cell, 1, FLOOR + 500)
    assert [one.machine.attempt for one in await cell.store.safety.records()] == [FLOOR + 500]


async def test_an_instance_is_not_lost_while_an_operator_keeps_the_one_machine_of_it() -> None:
    """It was given that machine after the backup, and the restored word is the earlier one."""
    cell = await cell_of(World(listed(3, 1), told=known(3, 7)), ACTIVE)
    await decided(cell, PROTECT, (3, 1))
    found = await cell.recover()
    assert found is not None and found.blocked_reason == BlockedReason.CONFLICT
    await cell.store.safety.decide([DecidedMachine(UUID)], ADOPT, "ann", 2.0)
    settled = await cell.look_again()
    assert settled is not None and (settled.state, settled.host_uuid) == (State.ACTIVE, host(3))


async def test_a_person_decides_what_contradicts_itself() -> None:
    """Another cell has it by a later attempt, and a complete machine of it is here."""
    world = World(listed(2, 2), told=known(None, 9, cell="c2"))
    cell = await cell_of(world, ACTIVE)
    found = await cell.recover()
    assert found is not None and found.blocked_reason == BlockedReason.CONFLICT
    await reported(cell, 2, 2)
    (machine,) = await cell.store.safety.records()
    await cell.store.safety.decide([DecidedMachine(UUID)], DESTROY, "ann", 2.0)
    settled = await cell.look_again()
    assert settled is not None and (settled.state, settled.blocked_reason) == (State.TRANSFERRED, "")
    assert [one.host_uuid for one in cell.sent(Destroy)] == [machine.machine.host_uuid]


TOMBSTONE = record(State.TOMBSTONE, spec=None, selections=(), attempt=0, queried=False, deadline=None, code="")


async def test_a_delete_that_was_remembered_ends_no_request_of_an_instance_that_is_not_known() -> None:
    cell = await cell_of(World(told=known(2, request_id=ACTION, kind=ActionKind.STOP)), TOMBSTONE)
    found = await cell.recover()
    assert found is not None and not found.blocked_reason


async def test_an_instance_about_which_nothing_can_be_decided_keeps_no_cell_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(result: Reconciled, _: object) -> None:
        assert result.blocked_reason

    cell = await cell_of(World(listed(2, 2), told=known(2)), ACTIVE)
    monkeypatch.setattr(record_reconciler, "restatement", fails)
    found = await cell.recover()
    assert found is not None and (found.state, found.blocked_reason) == (State.ACTIVE, BlockedReason.CONFLICT)


@pytest.mark.parametrize("complete", [False, True])
async def test_what_is_deleted_above_is_destroyed_also_without_a_spec(*, complete: bool) -> None:
    """By no record: its end could not be told."""
    machine = listed(1, 1, complete=complete, spec=None, project_id=None, allocations=None)
    cell = await cell_of(World(machine, told=known(None, 1, state=BuildState.DELETED, spec=None)))
    assert await cell.recover() is None
    assert [(one.host_uuid, one.attempt) for one in cell.sent(Destroy)] == [(host(1), 1)]


async def test_what_a_failed_build_has_left_holds_up_no_instance_that_runs_elsewhere() -> None:
    """A host that builds nothing often tears down nothing, either."""
    world = World(listed(2, 2), listed(3, 3, complete=False, failed=True), told=known(2))
    cell = await cell_of(world, ACTIVE)
    found = await cell.recover()
    assert found is not None and (found.state, found.host_uuid, found.blocked_reason) == (State.ACTIVE, host(2), "")
    assert [(one.host_uuid, one.keep_if_complete) for one in cell.sent(Destroy)] == [(host(3), True)]


async def test_a_failed_build_is_not_gone_on_with() -> None:
    building = record(State.BUILDING, attempt=1, queried=False, code="", reason="")
    told = known(1, 1, state=BuildState.BUILDING)
    cell = await cell_of(World(listed(1, 1, complete=False, failed=True), told=told), building)
    found = await cell.recover()
    assert found is not None and (found.state, found.code) == (State.RELEASING, "build.lost")
    assert [one.host_uuid for one in cell.sent(Destroy)] == [host(1)]


DELETED = known(None, 1, state=BuildState.DELETED, spec=None)


@pytest.mark.parametrize(
    ("machine", "told", "state", "reason", "destroys"),
    [
        (listed(1, 1), DELETED, State.DESTROYING, "", True),  # its spec is the machine's
        (listed(1, 1, spec=None), DELETED, State.TOMBSTONE, "", True),  # its end could not be told
        (listed(1, 1, busy=True), DELETED, State.DESTROYING, BlockedReason.BUSY, False),
        (listed(1, 1, busy=True), known(1, 1), State.TOMBSTONE, "", False),
        (listed(1, 5), known(1, 5), State.TOMBSTONE, "", False),
    ],
)
async def test_a_tombstone_beside_a_machine_is_its_delete_or_stays_one_and_waits_for_nothing(
    machine: ListedMachine, told: KnownRecord, state: State, reason: str, *, destroys: bool
) -> None:
    """Each delete, action or query of a blocked one without a spec ended as a dead letter."""
    cell = await cell_of(World(machine, told=told), TOMBSTONE)
    found = await cell.recover()
    assert found is not None and (found.state, found.blocked_reason) == (state, reason)
    assert [one.host_uuid for one in cell.sent(Destroy)] == [host(1)] * destroys


# --- What a recovery has placement hold of an instance that has a machine


CHILD = "00000000-0000-4000-8000-0000000000ff"
MIGRATION = "00000000-0000-4000-8000-0000000000fe"
HERE, ELSEWHERE = selection(1), selection(2)
SAME_IN_A_CHILD = replace(HERE, allocations={CHILD: HERE.allocations[host(1)]})
MORE = replace(HERE, allocations={host(1): {name: 2 * one for name, one in HERE.allocations[host(1)].items()}})


@pytest.mark.parametrize(
    ("own", "of_migration", "wanted"),
    [
        pytest.param((HERE,), (), "nothing", id="as it is"),
        pytest.param((SAME_IN_A_CHILD,), (), "nothing", id="the same of another provider of the host"),
        pytest.param((HERE,), (ELSEWHERE,), None, id="only its migration is over"),
        pytest.param((ELSEWHERE,), (HERE,), HERE.allocations, id="its migration has what it is to have"),
        # Seed 7 of moves and cell-restored: the root of the host had no inventory of it any more.
        pytest.param((ELSEWHERE,), (SAME_IN_A_CHILD,), SAME_IN_A_CHILD.allocations, id="where the host has it now"),
        pytest.param((MORE,), (), HERE.allocations, id="other amounts"),
        pytest.param((), (), HERE.allocations, id="nothing there"),
    ],
)
def test_an_instance_is_to_hold_what_its_machine_has(
    own: tuple[Selection, ...], of_migration: tuple[Selection, ...], wanted: Any
) -> None:
    result = Reconciled(record(State.ACTIVE, attempt=1, selections=(HERE,), selection_index=0))
    known = KnownInstance(
        selections=(*own, *of_migration), own_count=len(own), migrations=(MIGRATION,) if of_migration else ()
    )
    told = restatement(result, known)
    if told is None:
        assert wanted == "nothing"
    else:
        assert told.allocations == (None if wanted == "nothing" else wanted)


@pytest.mark.parametrize(
    ("phase", "under_way", "released"),
    [
        ((State.DESTROYING, State.DELETED), None, [MIGRATION]),  # seed 198: nobody released it
        ((State.DESTROYING, State.DELETED), ACTION, [MIGRATION]),
        ((State.DESTROYING, State.DELETED), MIGRATION, []),  # its delete releases it, too
        ((State.RELEASING, State.DELETED), None, [MIGRATION]),
        ((State.RELEASING, State.FAILED), None, [MIGRATION]),
        ((State.RESIZED, None), MIGRATION, []),
        ((State.TRANSFERRED, None), None, []),
    ],
)
def test_a_migration_of_no_request_under_way_is_released(
    phase: Phase, under_way: str | None, released: list[str]
) -> None:
    made = moving(*phase)
    action = None if under_way is None or made.action is None else replace(made.action, request_id=under_way)
    known = KnownInstance(selections=(HERE, ELSEWHERE), own_count=1, migrations=(MIGRATION,))
    told = restatement(Reconciled(replace(made, action=action)), known)
    assert (told is None) is (not released) and (told is None or [*told.migrations] == released)


# --- A record of an instance that cannot be read, or searched for


LONE = "00000000-0000-4000-8000-0000000000aa"


class Connection:
    """Rows whose deadlines have passed, and the statements that change some."""

    def __init__(self, *rows: tuple[str, str, str]) -> None:
        self.rows = rows
        self.changed: list[list[str]] = []

    async def fetch(self, *_: object) -> list[tuple[str, str, str]]:
        """All of them."""
        return list(self.rows)

    async def execute(self, _statement: str, uuids: list[str], _deadline: float) -> None:
        """Keep which."""
        self.changed.append(uuids)


def row(instance: Instance, text: str | None = None) -> tuple[str, str, str]:
    """With this for its record."""
    return instance.uuid, instance.state, tables.encode(instance) if text is None else text


async def due(*rows: tuple[str, str, str]) -> tuple[list[Instance], Connection]:
    """What is due of these rows."""
    connection: Any = Connection(*rows)
    nothing: Any = None
    transaction = PostgresTransaction(connection, nothing, DatabaseIdentity())
    return await transaction.lock_due(300.0, 10), connection


async def test_it_does_not_stop_the_deadlines_of_others_and_is_put_off() -> None:
    """All deadlines of the cell stopped, and its conductors ended at each start."""
    good, poisoned, before = record(State.BUILDING, uuid=LONE), record(State.BUILDING), failed_steps()
    for text in ('{"uuid": "x", "state": "of another version"}', "[]", '{"state": "building"}'):
        with capture_logs() as logged:
            found, connection = await due(row(poisoned, text), row(good))
        assert found == [good] and connection.changed == [[UUID]]
        assert [(one["event"], one["instance"], one["state"]) for one in logged] == [
            ("instance.unreadable", UUID, State.BUILDING)
        ]
    assert failed_steps() == before + 3
    found, connection = await due(row(good))
    assert found == [good] and not connection.changed, "nothing is written where all can be read"


async def test_a_machine_that_cannot_be_given_to_its_instance_ends_no_search() -> None:
    conductor = await opened()

    async def crashes(*_: Any) -> Any:
        raise ValueError

    conductor.engine._apply = crashes  # type: ignore[method-assign]
    pending = PendingLookups()
    pending.add_adoption(UUID)
    lookup = SourceLookup(
        conductor.engine, conductor.store, conductor.bus, clock=SystemClock(), config=ConductorConfig(),
        listings=HostListings(), pending=pending,
    )  # fmt: skip
    with capture_logs() as logged:
        await lookup.look_up()
    assert [(one["event"], one["instance"], one["code"]) for one in logged if one["log_level"] == "error"] == [
        ("instance.lookup_failed", UUID, "ValueError")
    ]
