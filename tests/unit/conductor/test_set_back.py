"""What a database that was set back proves, and what an operator keeps: nothing is begun in its place."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import CLOCKS_APART_S, SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Message, Meta, Refusal
from bus.contracts.build import BuildEvent
from bus.contracts.cell import CellDelete, ComputeOutcome, ComputeResult, Destroy, RescanHosts, Running, Spawn
from bus.contracts.moves import CellMove, Departure, MoveKind
from bus.contracts.stages import Stamps
from bus.persistence.outbox import OutboxMessage
from cell_conductor.config import ConductorConfig
from cell_conductor.domain import desires
from cell_conductor.domain import events as e
from cell_conductor.domain.desires import in_sql, in_text, states_where
from cell_conductor.domain.instance import Instance, Move, Phase, State
from cell_conductor.domain.report import Unexplained, UnexplainedKind
from cell_conductor.domain.rules import _spawn
from cell_conductor.domain.set_back import (
    SetBack,
    doubted_from,
    is_doubted_request,
    is_outdated,
    is_unsearched,
    marked_reused,
    numbered_on,
)
from cell_conductor.domain.table import _without_kept, step
from cell_conductor.store.safety import DESTROY, KEEP, DecidedMachine
from tests.unit.conductor.move_scenario import begun, claimed
from tests.unit.conductor.records import record
from tests.unit.conductor.scenario import DELETE, PATIENCE, SPEC, UUID, host, queried, selection, spawned
from tests.unit.conductor.world import (
    Conductor,
    Quiet,
    Relay,
    Services,
    engine_of,
    hosts_of,
    insert,
    listing,
    opened,
    opened_store,
)

# --- What a database that was set back proves, and what an event or a state says where it says nothing: tables.


AT = 1000.0
BACK, NEVER = SetBack(AT), SetBack()


@pytest.mark.parametrize(
    ("set_back", "at", "lacks"),
    [
        (NEVER, 0.0, False),
        (NEVER, 20.0, False),
        (SetBack(0.5), 20.0, True),
        (BACK, 0.0, True),
        (BACK, AT + 240.0, True),  # requested before, by a client whose clock is four minutes ahead
        (BACK, AT + CLOCKS_APART_S, True),
        (BACK, AT + CLOCKS_APART_S + 0.1, False),
        (SetBack(made_at=AT), 0.0, False),
        (SetBack(made_at=AT), 0.5, True),
        (SetBack(made_at=AT), AT, True),
        (SetBack(made_at=AT), AT + 0.1, False),
    ],
)
def test_what_a_database_may_have_no_record_of(set_back: SetBack, at: float, lacks: bool) -> None:
    assert set_back.may_lack(at) is lacks


def test_hosts_can_have_answered_since_the_record_and_the_set_back() -> None:
    ages = [BACK.doubted_for_s(since, 1500.0) for since in (900.0, 1200.0)]
    assert ages == [500.0, 300.0]


BEFORE, AFTER = (replace(queried(), requested_at=at) for at in (AT, AT + 999.0))


@pytest.mark.parametrize(
    ("event", "set_back", "doubted"),
    [
        (BEFORE, NEVER, False),
        (BEFORE, BACK, True),
        (AFTER, BACK, False),
        (replace(AFTER, attempt=2), NEVER, True),
        (replace(AFTER, is_query=True), NEVER, True),
        (replace(BEFORE, is_query=True), BACK, True),
        (replace(AFTER, stamps=Stamps(requested=AT)), BACK, True),
        (replace(BEFORE, stamps=Stamps(requested=AT + 999.0)), BACK, True),
        (replace(AFTER, stamps=Stamps(requested=AT + 999.0)), BACK, False),
    ],
)
def test_builds_that_a_lost_record_may_have_had(event: e.BuildRequested, set_back: SetBack, doubted: bool) -> None:
    assert is_doubted_request(event, set_back) is doubted
    unsearched = is_unsearched(UNKNOWN, event, set_back)
    assert unsearched is (doubted or event.is_query), "a query is searched for by the record alone"


GONE = Departure(cell="c2", spec=SPEC, image="i", last=selection(1), attempt=1)
KNOWN, UNKNOWN = Instance(uuid=UUID, spec=SPEC, selections=(selection(1),)), Instance(uuid=UUID)
TOMB, LEFT = replace(UNKNOWN, state=State.TOMBSTONE), replace(KNOWN, state=State.DEPARTED, newest=2, departure=GONE)
QUERY, BEGUN = replace(AFTER, is_query=True), replace(DELETE, begun=True)


@pytest.mark.parametrize(
    ("known", "event", "set_back", "unsearched"),
    [
        (UNKNOWN, DELETE, BACK, True),
        (UNKNOWN, DELETE, NEVER, False),
        (UNKNOWN, BEGUN, NEVER, True),
        (TOMB, BEGUN, NEVER, True),
        (TOMB, DELETE, BACK, True),
        (KNOWN, BEGUN, BACK, False),
        (LEFT, replace(BEGUN, attempt=2), BACK, False),
        (LEFT, replace(BEGUN, attempt=3), NEVER, True),
        (LEFT, replace(DELETE, attempt=3), NEVER, False),
        (replace(KNOWN, state=State.ACTIVE), replace(BEGUN, attempt=3), BACK, False),
        (UNKNOWN, QUERY, NEVER, True),
        (TOMB, QUERY, NEVER, True),
        (KNOWN, QUERY, BACK, False),
        (UNKNOWN, replace(QUERY, found=(), incarnation=1), NEVER, False),
        (UNKNOWN, replace(DELETE, found=(), incarnation=BACK.incarnation), BACK, False),
        (UNKNOWN, replace(DELETE, found=()), BACK, True),
        (UNKNOWN, replace(DELETE, found=(), incarnation=1), replace(BACK, incarnation=2), True),
        (KNOWN, DELETE, BACK, False),
        (UNKNOWN, BEFORE, BACK, True),
        (KNOWN, BEFORE, BACK, True),
        (UNKNOWN, AFTER, BACK, False),
        (UNKNOWN, replace(BEFORE, found=(), incarnation=BACK.incarnation), BACK, False),
        (UNKNOWN, replace(BEFORE, found=()), BACK, True),
        (UNKNOWN, spawned(), BACK, False),
    ],
)
def test_requests_that_the_services_were_not_queried_about(
    known: Instance, event: e.Event, set_back: SetBack, unsearched: bool
) -> None:
    assert is_unsearched(known, event, set_back) is unsearched


def test_a_machine_that_no_record_explains_has_a_build_searched_for_and_nothing_else() -> None:
    assert is_unsearched(KNOWN, AFTER, NEVER, {UUID})
    assert not is_unsearched(KNOWN, replace(AFTER, found=(), incarnation=1), NEVER, {UUID})
    assert not any(is_unsearched(KNOWN, event, NEVER, {UUID}) for event in (DELETE, QUERY, spawned()))


OLD = replace(KNOWN, state=State.ACTIVE, since=AT)
MOVES = e.move_event(CellMove(request_id=UUID, instance_uuid=UUID, project_id="p", kind=MoveKind.STOP), 1.0, "")


@pytest.mark.parametrize(
    ("record", "set_back", "outdated"),
    [
        (OLD, BACK, True),
        (OLD, NEVER, False),
        (replace(OLD, state=State.OFFLOADED), BACK, True),
        (replace(OLD, state=State.RESIZED), BACK, False),
        (replace(OLD, state=State.DEPARTED), BACK, False),
        (replace(OLD, since=AT + 999.0), BACK, False),
        (replace(OLD, since=AT + 999.0, doubted=True), BACK, True),
        (replace(OLD, state=State.FAILED), BACK, True),
        (replace(OLD, state=State.FAILED, since=AT + 999.0), BACK, False),
        (replace(OLD, state=State.FAILED, since=AT + 999.0, doubted=True), BACK, True),
        (replace(OLD, state=State.RELEASING, then=State.FAILED, doubted=True), BACK, False),
        (replace(OLD, doubted=True), SetBack(made_at=AT), True),
        (UNKNOWN, BACK, False),
    ],
)
def test_an_instance_at_rest_may_have_been_moved_since_the_backup(
    record: Instance, set_back: SetBack, outdated: bool
) -> None:
    assert is_outdated(record, set_back) is outdated
    for request in (MOVES, AFTER):
        assert is_unsearched(record, request, set_back) is outdated
        assert not is_unsearched(record, replace(request, found=(), incarnation=set_back.incarnation), set_back)
    for event in (e.MoveQueried, e.InstanceArrives):
        assert not is_unsearched(record, event(at=1.0, request=MOVES.request), set_back)


@pytest.mark.parametrize(
    ("set_back", "record", "event", "sequence"),
    [
        (BACK, 10, None, 1_000_000),
        (SetBack(made_at=AT), 10, None, 1_000_000),
        (SetBack(AT, made_at=AT - 1), 10, None, 1_000_000),
        (SetBack(AT - 1, made_at=AT), 10, None, 1_000_000),
        (BACK, 1_000_010, None, 1_010_010),  # by a clock that is behind the one before
        (BACK, 10, replace(AFTER, sequence=1_000_000), 1_000_001),
        (NEVER, 10, None, 10),
        (NEVER, 10, replace(AFTER, sequence=10), 11),
    ],
)
def test_announcements_go_on_above_every_lost_number(
    set_back: SetBack, record: int, event: e.BuildRequested | None, sequence: int
) -> None:
    assert numbered_on(Instance(uuid=UUID, sequence=record), set_back, event).sequence == sequence


def test_what_two_lost_records_announce_has_different_numbers() -> None:
    """Clients ignore a number that they have had (seed 4300411)."""
    query = replace(BEFORE, is_query=True, found=(), sequence=2)
    lost, now = (step(UNKNOWN, query, replace(PATIENCE, set_back=SetBack(AT + ago))) for ago in (0.0, 1.0))
    assert now.instance.sequence > lost.instance.sequence


@pytest.mark.parametrize(
    ("reused_from", "requested_at", "marked"), [(0, AT, 4), (0, AT + 999.0, 0), (2, AT, 2), (1, AT, 1)]
)
def test_the_first_number_that_may_be_given_out_twice_is_recorded_once(
    reused_from: int, requested_at: float, marked: int
) -> None:
    known = replace(KNOWN, attempt=1, newest=3, requested_at=requested_at, reused_from=reused_from)
    assert marked_reused(known, BACK).reused_from == marked


@pytest.mark.parametrize(
    ("doubted", "since", "reused_from", "marked"),
    [(False, AT, 0, 4), (False, AT, 2, 2), (False, AT, 1, 1), (True, AT, 0, None), (False, AT + 999.0, 0, None)],
)
def test_an_instance_that_is_as_before_the_set_back_may_have_been_numbered_on(
    doubted: bool, since: float, reused_from: int, marked: int | None
) -> None:
    known = replace(KNOWN, attempt=1, newest=3, sequence=10, doubted=doubted, since=since, reused_from=reused_from)
    after = doubted_from(known, BACK)
    if marked is None:
        assert after is known
        return
    assert (after.doubted, after.reused_from) == (True, marked)
    assert (after.newest, after.sequence) == (3, BACK.first_number)


# --- Events


def test_an_event_that_does_not_say_so_states_nothing_but_that_a_listed_machine_is_complete() -> None:
    unsaid = {
        (kind.__name__, one.name) for kind in e.EVENTS for one in msgspec.structs.fields(kind) if one.default is True
    }
    assert unsaid == {("HostRuns", "built")}


@pytest.mark.parametrize("given_up", [None, Refusal(code="x", reason="y")])
@pytest.mark.parametrize("is_query", [False, True])
@pytest.mark.parametrize("arrives", [False, True])
def test_a_request_begins_unless_it_is_a_query_or_given_up(
    given_up: Refusal | None, is_query: bool, arrives: bool
) -> None:
    message = CellMove(request_id=UUID, instance_uuid=UUID, project_id="p", kind=MoveKind.STOP)
    if arrives:
        message = replace(message, departure=GONE)
    kind = e.MoveRequested if given_up is None and not is_query else e.MoveQueried
    assert type(e.move_event(message, 1.0, "", given_up=given_up, is_query=is_query)) is (
        e.InstanceArrives if arrives else kind
    )


def test_a_request_that_does_not_say_so_is_no_query() -> None:
    assert not e.move_event(
        CellMove(request_id=UUID, instance_uuid=UUID, project_id="p", kind=MoveKind.STOP), 1.0, ""
    ).is_query


# --- States


def test_states_are_listed_in_sql_in_the_order_of_the_table() -> None:
    assert in_sql(desires.PURGED) == "'tombstone', 'deleted'"


@pytest.mark.parametrize(
    ("states", "named"),
    [
        (desires.DELETE_REQUESTED, "tombstone deleted claiming/deleted destroying/deleted releasing/deleted"),
        (
            desires.REFUSED,
            "tombstone deleted claiming/deleted destroying/deleted releasing/deleted failed releasing/failed",
        ),
        (desires.AT_REST, "tombstone failed deleted offloaded departed departed/absent"),
        (desires.PURGED, "tombstone deleted"),
        (desires.PURGED_FAILED, "failed departed/absent"),
        (desires.ELSEWHERE, "departed departed/absent"),
        (
            desires.IN_DOUBT_AFTER_SET_BACK,
            "building claiming/building claiming/preparing claiming/active destroying/active"
            " destroying/reverting"
            " releasing/active preparing handing_over finishing resized reverting restarting"
            " changing resizing destroying/offloaded releasing/offloaded",
        ),
        (desires.EVACUATED, "destroying/reverting finishing resized"),
        (desires.EVACUATED_IN_DOUBT, "claiming/preparing preparing handing_over"),
        (
            desires.EXPECTED_HERE,
            "active resized destroying/deleted destroying/reverting destroying/offloaded",
        ),
        (
            desires.NOT_HERE,
            "tombstone failed deleted claiming/preparing releasing/offloaded offloaded departed departed/absent",
        ),
        (desires.LEFT_WITH_ITS_SERVICE, "building preparing"),
        (states_where(lambda row: row.ends), "active failed deleted offloaded"),
        (states_where(lambda row: row.takes_machine), "active failed"),
        (states_where(lambda row: row.relies_on_fence), "destroying/offloaded releasing/offloaded finishing"),
    ],
)
def test_what_is_so_in_which_states(states: frozenset[Phase], named: str) -> None:
    assert {in_text(phase) for phase in states} == set(named.split())


# --- What an operator keeps stays, and nothing is begun in its place, until it is proved to be gone.


class Reported(Conductor):
    """A conductor whose operator keeps a machine on host 1. Its instance, deleted by its record, proves it over."""

    async def begin(self, gone: Collection[str] = ()) -> None:
        self.gone = gone
        await self.store.open()
        over = Instance(uuid=UUID, state=State.DELETED, spec=SPEC, selections=(selection(1),), attempt=1)
        await insert(self.store, over)
        await self.keep(1, KEEP)
        self.bus: Any = Quiet()
        self.sequence = 0
        self.own = Running(instance_uuid=UUID, attempt=1, deployment=self.store.deployment)
        self.hosts = hosts_of(
            self.engine, self.store, SystemClock(), ConductorConfig(), self.bus, up=lambda: self.up, gone=self.gone
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
        return [one.verdict for one in await self.store.safety.records()]


async def kept_on_host_1(gone: Collection[str] = ()) -> Reported:
    conductor = Reported(Services(s1=(), s2=()), ("s1", "s2"))
    await conductor.begin(gone)
    return conductor


async def test_what_one_report_lacks_is_kept_still() -> None:
    """A scan that was older than the machine, or of a host that did not answer, lost the word, and the next destroyed
    the machine."""
    conductor = await kept_on_host_1()
    await conductor.report(conductor.own)
    await conductor.report()
    first = conductor.rescans
    assert await conductor.kept() == [KEEP] and len(first) == 1
    await conductor.report(conductor.own)
    await conductor.report(rescans=first)  # it was requested before the machine was last seen
    assert await conductor.kept() == [KEEP]
    await conductor.report(conductor.own)
    assert not conductor.relay.sent and await conductor.kept() == [KEEP]


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
        {"deployment": None},
        {"deployment": "another"},
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
    assert await conductor.kept() == [KEEP]
    await conductor.report(conductor.own)
    assert not conductor.relay.sent and await conductor.kept() == [KEEP]


@pytest.mark.parametrize(("up", "gone"), [(("s1", "s2"), ()), (("s2",), ()), (("s2",), ("s1",))])
async def test_a_second_service_of_its_host_proves_nothing_while_the_first_may_be_back(
    up: tuple[str, ...], gone: tuple[str, ...]
) -> None:
    conductor = await kept_on_host_1(gone)
    conductor.up = up
    await conductor.report(conductor.own)
    await conductor.report(service="s2")
    await conductor.report(service="s2", rescans=conductor.rescans)
    assert await conductor.kept() == ([] if gone else [KEEP])


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
    briefs = conductor.store.briefs

    async def too_early(*asked: Any) -> Any:
        return [replace(one, kept=()) for one in await briefs(*asked)]

    conductor.store.briefs = too_early  # type: ignore[method-assign]
    await conductor.report(conductor.own)
    conductor.store.briefs = briefs  # type: ignore[method-assign]
    await conductor.report(conductor.own)
    assert not conductor.relay.sent and await conductor.kept() == [KEEP]


# --- No order leads to its host. Of a record that does not want it, it is as if the host had answered.


async def over(instance: Instance, *messages: Message, kept: tuple[int, ...] = (1,)) -> tuple[Instance, list[Destroy]]:
    """The record after these messages in one batch, and what hosts were commanded to destroy."""
    conductor = await opened(Services(s1=()), ("s1",))
    await insert(conductor.store, instance)
    for n in kept:
        await conductor.keep(n, KEEP)
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
    leaving = replace(UP, state=State.DESTROYING, then=State.DELETED, deadline=1.0)
    after, destroyed = await over(leaving)
    assert (after.phase, destroyed) == ((State.RELEASING, State.DELETED), [])


@pytest.mark.parametrize("kept", [(1,), (2,), (1, 2)])
async def test_a_delete_waits_for_the_host_of_a_move_whose_machine_is_not_kept(kept: tuple[int, ...]) -> None:
    move = Move(kind=MoveKind.MIGRATE, request_id=UUID, source=selection(2), source_attempt=2, spec=SPEC, began=1.0)
    resized = replace(
        UP, state=State.RESIZED, selections=(selection(2), selection(1)), position=1, attempt=3, move=move
    )
    after, destroyed = await over(resized, DELETE_IT, kept=kept)
    assert {one.host_uuid for one in destroyed} == {host(n) for n in {1, 2} - set(kept)}
    expected = State.DESTROYING if len(kept) == 1 else State.RELEASING
    assert after.phase == (expected, State.DELETED)
    if len(kept) == 1:
        assert after.move is not None and (after.move.here_gone, after.move.source_gone) == (kept == (1,), kept == (2,))


async def test_results_of_one_batch_destroy_nothing_that_is_kept() -> None:
    """The word was read for the record before the batch: by that the second result proved nothing over."""
    failed = replace(result(ComputeOutcome.FAILED), final=True)
    after, destroyed = await over(BUILDING, failed, result(ComputeOutcome.ACTIVE))
    assert (after.phase, destroyed) == ((State.RELEASING, State.FAILED), [])


async def test_a_build_that_wants_what_is_kept_waits_for_its_host() -> None:
    """Its order to end what is not complete yet would end it."""
    after, destroyed = await over(BUILDING)
    assert (after.state, after.queried, destroyed) == (State.BUILDING, True, [])


# --- No machine is begun in its place.


@pytest.mark.parametrize("since", ["the claim", "the hand-over"])
def test_a_move_begins_no_machine_where_another_was_kept_meanwhile(since: str) -> None:
    """The destination was judged when its claim was requested, and its new machine took the place of the kept one."""
    word = replace(PATIENCE, kept={(host(2), UUID): 7})
    moving = begun(MoveKind.MIGRATE, 2, 3)
    moving.context = word if since == "the claim" else PATIENCE
    moving.apply(claimed())
    if since != "the claim":
        moving.end(2, 2)
        moving.context = word
        moving.end(1, 1)
    assert moving.instance.state is State.CLAIMING and [one.host for one in moving.instance.alternates] == ["host-3"]
    assert not moving.spawns and not moving.destroys
    assert moving.instance.move is not None
    assert [(one.host, one.code) for one in moving.instance.move.history] == [("host-2", "host.machine_kept")]


def test_a_build_that_is_commanded_where_another_machine_is_kept_goes_on_elsewhere() -> None:
    """No rule need ask: its record was judged before the word came, or by none."""
    word = replace(PATIENCE, kept={(host(2), UUID): 7})
    adopted = replace(BUILDING, state=State.CLAIMING, then=State.ACTIVE, selections=(selection(2), selection(3)))
    stepped = _without_kept(_spawn(adopted, 1.0, word), 1.0, word)
    assert stepped.instance.phase == (State.CLAIMING, State.BUILDING)
    assert [type(one) for one in stepped.commands] == [BuildEvent]
    own = replace(PATIENCE, kept={(host(2), UUID): 1})
    assert any(isinstance(one, Spawn) for one in _without_kept(_spawn(adopted, 1.0, own), 1.0, own).commands)


async def test_an_operators_word_from_before_a_set_back_destroys_nothing() -> None:
    """The machine was given to its instance since (`adopt`), and the restored record has the earlier word."""
    store, clock, config, bus = await opened_store(), SystemClock(), ConductorConfig(), Quiet()
    machine = Unexplained(UUID, 3, host(3), UnexplainedKind.QUARANTINED, "newer than its record")
    store._table.made_at = 1.0
    await store.safety.record("s1", [machine], 1.0)
    await store.safety.decide([DecidedMachine(UUID)], DESTROY, "ann", 2.0)
    await insert(store, record(State.ACTIVE, queried=False, newest=0))
    store._table.place += 1
    async with store.transaction() as transaction:
        assert await transaction.recognise() is not None
    engine = engine_of(store=store, bus=cast(Bus, bus), relay=cast(Any, Relay()), clock=clock, config=config, cell="c1")
    hosts = hosts_of(engine, store, clock, config, cast(Bus, bus))
    there = Running(instance_uuid=UUID, attempt=3, deployment=store.deployment)
    await hosts.hosts([Received(listing("s1", 3, runs=(there,)), Meta(id="m"), "c1", "conductor.hosts")])
    assert not [one for one in bus.published if isinstance(one, Destroy)]
