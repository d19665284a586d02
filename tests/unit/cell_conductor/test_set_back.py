"""What a database that was restored proves, and what an operator keeps: nothing is begun in its place."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received
from bus.contracts.actions import ActionKind, CellAction, CellTransfer
from bus.contracts.base import Message, Meta, Refusal
from bus.contracts.build import BuildEvent
from bus.contracts.cell import CellDelete, ComputeOutcome, ComputeResult, Destroy, RescanHosts, Running, Spawn
from bus.persistence.outbox import OutboxMessage
from cell_conductor.config import ConductorConfig
from cell_conductor.rules.build_rules import _spawn
from cell_conductor.state import desired_state as desires
from cell_conductor.state import events as e
from cell_conductor.state.desired_state import phase_to_text, phases_as_sql, phases_matching
from cell_conductor.state.instance import ActionInProgress, Instance, Phase, State
from cell_conductor.state.ownership_proof import is_provably_ended, next_attempt_record
from cell_conductor.store.keyed_tables import DESTROY, PROTECT, DecidedMachine
from cell_conductor.store.memory import MemoryInstanceTable
from cell_conductor.transition import _without_protected
from tests.unit.cell_conductor.move_scenario import begun, claimed
from tests.unit.cell_conductor.scenario import PATIENCE, SPEC, UUID, host, selection
from tests.unit.cell_conductor.world import BUILD, Conductor, Quiet, hosts_of, insert, listing, opened

# --- What a database that was restored proves, and what an event or a state says where it says nothing: tables.


GONE = CellTransfer(cell="c2", spec=SPEC, image="i", last=selection(1), attempt=1)


# --- Events


def test_an_event_that_does_not_say_so_states_nothing_but_that_a_listed_machine_is_complete() -> None:
    unsaid = {
        (kind.__name__, one.name) for kind in e.EVENTS for one in msgspec.structs.fields(kind) if one.default is True
    }
    assert unsaid == {("MachineRunning", "built")}


@pytest.mark.parametrize("dead_letter_reason", [None, Refusal(code="x", reason="y")])
@pytest.mark.parametrize("is_query", [False, True])
@pytest.mark.parametrize("arrives", [False, True])
def test_a_request_begins_unless_it_is_a_query_or_given_up(
    dead_letter_reason: Refusal | None, is_query: bool, arrives: bool
) -> None:
    message = CellAction(request_id=UUID, instance_uuid=UUID, project_id="p", kind=ActionKind.STOP)
    if arrives:
        message = replace(message, transfer=GONE)
    kind = e.ActionRequested if dead_letter_reason is None and not is_query else e.ActionQueried
    assert type(e.action_event(message, 1.0, "", dead_letter_reason=dead_letter_reason, is_query=is_query)) is (
        e.InstanceTransferredIn if arrives else kind
    )


# --- States


def test_states_are_listed_in_sql_in_the_order_of_the_table() -> None:
    assert phases_as_sql(desires.PURGEABLE) == "'tombstone', 'deleted'"


@pytest.mark.parametrize(
    ("states", "named"),
    [
        (desires.DELETE_REQUESTED, "tombstone deleted claiming/deleted destroying/deleted releasing/deleted"),
        (
            desires.ENDED_BY_FAILURE_OR_DELETE,
            "tombstone deleted claiming/deleted destroying/deleted releasing/deleted failed releasing/failed",
        ),
        (desires.AT_REST, "tombstone failed deleted offloaded transferred transferred/absent"),
        (desires.PURGEABLE, "tombstone deleted"),
        (desires.PURGEABLE_FAILED, "failed transferred/absent"),
        (desires.IN_OTHER_CELL, "transferred transferred/absent"),
        (desires.EVACUATED, "destroying/reverting finishing resized"),
        (
            desires.EXPECTED_ON_CURRENT,
            "active resized destroying/deleted destroying/reverting destroying/offloaded",
        ),
        (
            desires.ABSENT_ON_CURRENT,
            "tombstone failed deleted claiming/preparing releasing/offloaded offloaded transferred transferred/absent",
        ),
        (desires.ABANDONED_WITH_SERVICE, "building preparing"),
        (phases_matching(lambda row: row.ends), "active failed deleted offloaded"),
        (phases_matching(lambda row: row.may_adopt), "active failed"),
        (phases_matching(lambda row: row.relies_on_fence), "destroying/offloaded releasing/offloaded finishing"),
    ],
)
def test_what_is_so_in_which_states(states: frozenset[Phase], named: str) -> None:
    assert {phase_to_text(phase) for phase in states} == set(named.split())


# --- What an operator keeps stays, and nothing is begun in its place, until it is proved to be gone.


class Reported(Conductor):
    """A conductor whose operator keeps a machine on host 1. Its instance, deleted by its record, proves it over."""

    async def begin(self, gone: Collection[str] = ()) -> None:
        self.gone = gone
        await self.store.open()
        over = Instance(uuid=UUID, state=State.DELETED, spec=SPEC, selections=(selection(1),), attempt=1)
        await insert(self.store, over)
        await self.keep(1, PROTECT)
        self.bus: Any = Quiet()
        self.sequence = 0
        self.own = Running(instance_uuid=UUID, attempt=1, database_id=self.store.database_id)
        self.hosts = hosts_of(
            self.engine, self.store, SystemClock(), ConductorConfig(), self.bus, up=lambda: ("s1", "s2"), gone=self.gone
        )

    async def report(self, *runs: Running, service: str = "s1", rescans: tuple[str, ...] = ()) -> None:
        """A report of host 1."""
        self.sequence += 1
        report = listing(service, 1, sequence=self.sequence, runs=runs, rescans=rescans)
        await self.hosts.hosts([Received(report, Meta(id=str(self.sequence)), "c1", "conductor.hosts.p")])

    @property
    def rescans(self) -> tuple[str, ...]:
        """Those requested last."""
        requested = [one.rescans for one in self.bus.published if isinstance(one, RescanHosts)]
        return requested[-1] if requested else ()

    async def kept(self) -> list[str]:
        """The words on record."""
        return [one.decision for one in await self.store.safety.records()]


async def kept_on_host_1(gone: Collection[str] = ()) -> Reported:
    conductor = Reported()
    await conductor.begin(gone)
    return conductor


async def test_what_one_report_lacks_is_kept_still() -> None:
    """A scan that was older than the machine, or of a host that did not answer, lost the word, and the next destroyed
    the machine."""
    conductor = await kept_on_host_1()
    await conductor.report(conductor.own)
    await conductor.report()
    first = conductor.rescans
    assert await conductor.kept() == [PROTECT] and len(first) == 1
    await conductor.report(conductor.own)
    await conductor.report(rescans=first)  # it was requested before the machine was last seen
    assert await conductor.kept() == [PROTECT]
    await conductor.report(conductor.own)
    assert not conductor.relay.sent and await conductor.kept() == [PROTECT]


async def test_a_scan_from_after_the_machine_was_last_seen_ends_the_word() -> None:
    conductor = await kept_on_host_1()
    await conductor.report(conductor.own)
    await conductor.report()
    await conductor.report(conductor.own)
    await conductor.report()
    await conductor.report(rescans=conductor.rescans)
    assert await conductor.kept() == []


@pytest.mark.parametrize(
    "changed",
    [
        {"attempt": 0},
        {"attempt": 2},
        {"database_id": None},
        {"database_id": "another"},
        {"destroying": True},
    ],
    ids=lambda one: ",".join(f"{name} {value}" for name, value in one.items()),
)
async def test_what_is_listed_otherwise_is_kept_still(changed: dict[str, Any]) -> None:
    """The word went with the attempt or the mark, and the next report that had them again destroyed the machine."""
    conductor = await kept_on_host_1()
    await conductor.report(conductor.own)
    await conductor.report(replace(conductor.own, **changed))
    await conductor.report(replace(conductor.own, **changed), rescans=conductor.rescans)
    assert await conductor.kept() == [PROTECT]
    await conductor.report(conductor.own)
    assert not conductor.relay.sent and await conductor.kept() == [PROTECT]


@pytest.mark.parametrize(("up", "gone"), [(("s1", "s2"), ()), (("s2",), ()), (("s2",), ("s1",))])
async def test_a_second_service_of_its_host_proves_nothing_while_the_first_may_be_back(
    up: tuple[str, ...], gone: tuple[str, ...]
) -> None:
    conductor = await kept_on_host_1(gone)
    conductor.up = up
    await conductor.report(conductor.own)
    await conductor.report(service="s2")
    await conductor.report(service="s2", rescans=conductor.rescans)
    assert await conductor.kept() == ([] if gone else [PROTECT])


async def test_what_a_record_explains_by_now_is_kept_no_more() -> None:
    conductor = await kept_on_host_1()
    await conductor.report(conductor.own)
    up = Instance(uuid=UUID, state=State.ACTIVE, spec=SPEC, selections=(selection(1),), attempt=1)
    async with conductor.store.transaction() as transaction:
        await transaction.lock([UUID])
        await transaction.update([up])
    await conductor.report(conductor.own)
    assert await conductor.kept() == []


async def test_a_word_that_comes_while_a_report_is_compared_is_kept() -> None:
    """By its record the machine was over, no word was known yet, and the row went with the new word."""
    conductor = await kept_on_host_1()
    await conductor.report(conductor.own)
    summaries = conductor.store.summaries

    async def too_early(*asked: Any) -> Any:
        return [replace(one, protected_hosts=()) for one in await summaries(*asked)]

    conductor.store.summaries = too_early  # type: ignore[method-assign]
    await conductor.report(conductor.own)
    conductor.store.summaries = summaries  # type: ignore[method-assign]
    await conductor.report(conductor.own)
    assert not conductor.relay.sent and await conductor.kept() == [PROTECT]


# --- No order leads to its host. Of a record that does not want it, it is as if the host had answered.


async def over(instance: Instance, *messages: Message, kept: tuple[int, ...] = (1,)) -> tuple[Instance, list[Destroy]]:
    """The record after these messages in one batch, and what hosts were commanded to destroy."""
    conductor = await opened()
    await insert(conductor.store, instance)
    for n in kept:
        await conductor.keep(n, PROTECT)
    if not messages:
        await conductor.engine.sweep()
    batch = [Received(one, Meta(id=f"m{number}"), "c1", "q") for number, one in enumerate(messages)]
    await conductor.requests.results(batch)
    after = await conductor.recorded()
    assert after is not None
    sent = [one.message for one in conductor.relay.sent if isinstance(one, OutboxMessage)]
    return after, [one for one in sent if isinstance(one, Destroy)]


def result(outcome: ComputeOutcome, attempt: int = 1, n: int = 1) -> ComputeResult:
    return ComputeResult(instance_uuid=UUID, attempt=attempt, host_uuid=host(n), service=f"s{n}", outcome=outcome)


UP = Instance(uuid=UUID, state=State.ACTIVE, spec=SPEC, selections=(selection(1),), attempt=1)
BUILDING = replace(UP, state=State.BUILDING, deadline=1.0, build_timeout_s=60.0)
DELETE_IT = CellDelete(instance_uuid=UUID, project_id=SPEC.project_id)


@pytest.mark.parametrize("attempt", [1, 2], ids=["as on record", "of an earlier attempt"])
async def test_a_delete_neither_destroys_nor_waits_for_what_is_kept_on_its_host(attempt: int) -> None:
    after, destroyed = await over(replace(UP, attempt=attempt), DELETE_IT)
    assert (after.phase, destroyed) == ((State.RELEASING, State.DELETED), [])


async def test_a_delete_that_waits_for_a_machine_goes_on_once_it_is_kept() -> None:
    leaving = replace(UP, state=State.DESTROYING, next_state=State.DELETED, deadline=1.0)
    after, destroyed = await over(leaving)
    assert (after.phase, destroyed) == ((State.RELEASING, State.DELETED), [])


@pytest.mark.parametrize("kept", [(1,), (2,), (1, 2)])
async def test_a_delete_waits_for_the_host_of_a_move_whose_machine_is_not_kept(kept: tuple[int, ...]) -> None:
    action = ActionInProgress(
        kind=ActionKind.MIGRATE, request_id=UUID, source=selection(2), source_attempt=2, spec=SPEC, started_at=1.0
    )
    resized = replace(
        UP, state=State.RESIZED, selections=(selection(2), selection(1)), selection_index=1, attempt=3, action=action
    )
    after, destroyed = await over(resized, DELETE_IT, kept=kept)
    assert {one.host_uuid for one in destroyed} == {host(n) for n in {1, 2} - set(kept)}
    expected = State.DESTROYING if len(kept) == 1 else State.RELEASING
    assert after.phase == (expected, State.DELETED)
    if len(kept) == 1:
        assert after.action is not None and (after.action.current_destroyed, after.action.source_destroyed) == (
            kept == (1,),
            kept == (2,),
        )


async def test_results_of_one_batch_destroy_nothing_that_is_kept() -> None:
    """The word was read for the record before the batch: by that the second result proved nothing over."""
    failed = replace(result(ComputeOutcome.FAILED), final=True)
    after, destroyed = await over(BUILDING, failed, result(ComputeOutcome.ACTIVE))
    assert (after.phase, destroyed) == ((State.RELEASING, State.FAILED), [])


async def test_a_build_that_wants_what_is_kept_waits_for_its_host() -> None:
    """Its order to end what is not complete yet would end it."""
    after, destroyed = await over(BUILDING)
    assert (after.state, after.queried, destroyed) == (State.BUILDING, True, [])


# --- A build or a delete of what the cell has no record of, beside a machine of it in quarantine.


DELETE_BEGUN = CellDelete(instance_uuid=UUID, project_id=SPEC.project_id, may_have_started=True)
OWN = {"instance_uuid": UUID, "attempt": 1}


def orders(conductor: Conductor) -> list[type[Message]]:
    return [type(one.message) for one in conductor.relay.sent if isinstance(one, OutboxMessage)]


async def deleted_beside(decision: str = PROTECT, table: MemoryInstanceTable | None = None) -> Conductor:
    """A delete has come of an instance that is not on record, and of which host 1 has a machine in quarantine."""
    conductor = await opened(table=table)
    await conductor.keep(1, decision)
    assert isinstance(await conductor.request(DELETE_BEGUN), Done)
    return conductor


@pytest.mark.parametrize(("decision", "reason"), [(PROTECT, ""), ("", "conflict")])
async def test_a_delete_waits_for_the_machine_in_quarantine_unless_an_operator_keeps_it(
    decision: str, reason: str
) -> None:
    """Its claim was released while the machine ran on; or a kept one held it up for ever."""
    conductor = await deleted_beside(decision)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.blocked_reason == reason
    assert recorded.phase == (State.DESTROYING if reason else State.RELEASING, State.DELETED)
    assert Destroy not in orders(conductor)


async def test_a_machine_that_an_operator_keeps_stays_when_its_instance_is_deleted() -> None:
    """The next report listed it, and its record, which was deleted by then, proved it to be over."""
    conductor = await deleted_beside()
    own, bus = Running(database_id=conductor.store.database_id, **OWN), Quiet()
    hosts = hosts_of(conductor.engine, conductor.store, SystemClock(), ConductorConfig(), bus)
    conductor.relay.sent.clear()
    await hosts.hosts([Received(listing("s1", 1, runs=(own,)), Meta(id="r"), "c1", "conductor.hosts.p")])
    assert not conductor.relay.sent
    (record,) = await conductor.store.safety.records()
    assert (record.location, record.decision) == ((host(1), UUID), PROTECT)
    await conductor.store.safety.decide([DecidedMachine(UUID)], DESTROY, "ann", 3.0)
    await hosts.hosts([Received(listing("s1", 1, runs=(own,), sequence=2), Meta(id="s"), "c1", "conductor.hosts.p")])
    assert orders(conductor) == [Destroy]


@pytest.mark.parametrize("outcome", [ComputeOutcome.ACTIVE, ComputeOutcome.FAILED])
async def test_a_machine_that_an_operator_keeps_stays_when_its_host_answers_late(outcome: ComputeOutcome) -> None:
    """It was not complete yet: the result of its build was the proof, and no report was asked."""
    conductor = await deleted_beside()
    conductor.relay.sent.clear()
    await conductor.requests.results([Received(result(outcome), Meta(id="r"), "c1", "conductor.results")])
    assert not conductor.relay.sent
    await conductor.store.safety.decide([DecidedMachine(UUID)], DESTROY, "ann", 3.0)
    await conductor.requests.results([Received(result(outcome), Meta(id="s"), "c1", "conductor.results")])
    assert orders(conductor) == [Destroy]


async def test_a_report_to_a_conductor_that_was_cut_off_destroys_nothing_that_an_operator_keeps() -> None:
    """It had not seen the machine come into quarantine, and by its deleted record it was over."""
    other = await opened()
    hosts = hosts_of(other.engine, other.store, SystemClock(), ConductorConfig(), Quiet())
    await hosts.hosts([Received(listing("s1", 1), Meta(id="r"), "c1", "conductor.hosts.p")])
    conductor = await deleted_beside(table=other.table)
    own = Running(database_id=conductor.store.database_id, **OWN)
    for sequence in (2, 3):
        report = listing("s1", 1, runs=(own,), sequence=sequence)
        await hosts.hosts([Received(report, Meta(id=str(sequence)), "c1", "conductor.hosts.p")])
        assert not other.relay.sent
        (record,) = await conductor.store.safety.records()
        assert (record.location, record.decision) == ((host(1), UUID), PROTECT)


@pytest.mark.parametrize("n", [1, 2], ids=["its first host", "its alternate"])
async def test_no_build_leads_to_a_host_that_has_a_machine_which_an_operator_keeps(n: int) -> None:
    conductor = await opened()
    await conductor.keep(n, PROTECT)
    assert isinstance(await conductor.request(replace(BUILD, attempt=2)), Done)
    if n == 2:
        ended = result(ComputeOutcome.FAILED, attempt=2)
        await conductor.requests.results([Received(ended, Meta(id="r"), "c1", "conductor.results")])
        granted = e.Claimed(at=2.0, attempt=3, option=0, consumer_generation=9)
        await conductor.engine.take([e.InstanceEvent(UUID, granted)], source="placement")
    recorded = await conductor.recorded()
    assert recorded is not None
    expected = ((State.CLAIMING, State.BUILDING), ["host-2"]) if n == 1 else ((State.RELEASING, State.FAILED), [])
    assert (recorded.phase, [one.host for one in recorded.alternates]) == expected
    assert [one.code for one in recorded.history if one.host == f"host-{n}"] == ["host.machine_protected"]
    started = [one.message for one in conductor.relay.sent if isinstance(one, OutboxMessage)]
    assert host(n) not in {one.host_uuid for one in started if isinstance(one, Spawn)}


async def test_the_build_of_a_machine_that_an_operator_keeps_is_repeated_on_its_host() -> None:
    """Its host has that attempt, and only answers."""
    conductor = await opened()
    await conductor.keep(1, PROTECT)
    assert isinstance(await conductor.request(BUILD), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and (recorded.state, recorded.attempt) == (State.BUILDING, 1)
    assert Spawn in orders(conductor)


async def test_a_build_beside_a_machine_in_quarantine_is_refused_and_proves_nothing_about_it() -> None:
    """A later attempt of it, on the same host, proved the machine to be over."""
    conductor = await opened()
    await conductor.keep(3)
    assert isinstance(await conductor.request(BUILD), Done)
    recorded = await conductor.recorded()
    assert recorded is not None
    assert (recorded.phase, recorded.code) == ((State.RELEASING, State.FAILED), "build.machine_exists")
    assert Spawn not in orders(conductor) and not recorded.selections
    restarted = next_attempt_record(recorded)
    deleted = replace(recorded, next_state=State.DELETED)
    assert not any(is_provably_ended(one, 1, host(3)) for one in (recorded, deleted, restarted))


async def test_a_report_of_a_machine_whose_delete_is_under_way_begins_no_transaction() -> None:
    """Each page of a drain paid for one, to ask whether an operator keeps the machine."""
    conductor = await opened()
    await insert(conductor.store, replace(UP, state=State.DESTROYING, next_state=State.DELETED))
    started, begin = list[None](), conductor.store.transaction

    def counted() -> Any:
        started.append(None)
        return begin()

    conductor.store.transaction = counted  # type: ignore[method-assign]
    own = Running(database_id=conductor.store.database_id, **OWN)
    hosts = hosts_of(conductor.engine, conductor.store, SystemClock(), ConductorConfig(), Quiet())
    await hosts.hosts([Received(listing("s1", 1, runs=(own,)), Meta(id="r"), "c1", "conductor.hosts.p")])
    assert not started


# --- No machine is begun in its place.


@pytest.mark.parametrize("since", ["the claim", "the hand-over"])
def test_a_move_begins_no_machine_where_another_was_kept_meanwhile(since: str) -> None:
    """The destination was judged when its claim was requested, and its new machine took the place of the kept one."""
    decision = replace(PATIENCE, protected={(host(2), UUID): 7})
    moving = begun(ActionKind.MIGRATE, 2, 3)
    moving.context = decision if since == "the claim" else PATIENCE
    moving.apply(claimed())
    if since != "the claim":
        moving.end(2, 2)
        moving.context = decision
        moving.end(1, 1)
    assert moving.instance.state is State.CLAIMING and [one.host for one in moving.instance.alternates] == ["host-3"]
    assert not moving.spawns and not moving.destroys
    assert moving.instance.action is not None
    assert [(one.host, one.code) for one in moving.instance.action.history] == [("host-2", "host.machine_protected")]


def test_a_build_that_is_commanded_where_another_machine_is_kept_goes_on_elsewhere() -> None:
    """No rule need ask: its record was judged before the word came, or by none."""
    decision = replace(PATIENCE, protected={(host(2), UUID): 7})
    adopted = replace(BUILDING, state=State.CLAIMING, next_state=State.ACTIVE, selections=(selection(2), selection(3)))
    stepped = _without_protected(_spawn(adopted, 1.0, decision), 1.0, decision)
    assert stepped.instance.phase == (State.CLAIMING, State.BUILDING)
    assert [type(one) for one in stepped.commands] == [BuildEvent]
    own = replace(PATIENCE, protected={(host(2), UUID): 1})
    assert any(isinstance(one, Spawn) for one in _without_protected(_spawn(adopted, 1.0, own), 1.0, own).commands)
