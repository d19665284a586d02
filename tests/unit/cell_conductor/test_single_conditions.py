"""Single conditions of the cell's rules that no table of a decision holds, and the leases of compute services."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.contracts.actions import ActionKind, CellActionQuery
from bus.contracts.base import MAX_EPOCH
from bus.contracts.cell import MAX_RESERVED_AT_ONCE, Running, ServiceSuperseded
from cell_conductor.hosts import lease_table
from cell_conductor.hosts.lease_table import LeaseTable
from cell_conductor.reports.reserved_machines import pages
from cell_conductor.request_handlers import action_queried
from cell_conductor.rules import rollback_rules as way_back
from cell_conductor.state import events as e
from cell_conductor.state.events import InstanceEvent
from cell_conductor.state.fence import Fence
from cell_conductor.state.instance import Instance, State
from cell_conductor.state.lease import Lease, LeaseState
from cell_conductor.state.step import Step
from cell_conductor.transition import FenceSteps, step
from tests.unit.cell_conductor.move_scenario import (
    OTHER,
    Scenario,
    begun,
    claimed,
    to_resized,
)
from tests.unit.cell_conductor.records import record
from tests.unit.cell_conductor.scenario import (
    DELETE,
    PATIENCE,
    SPEC,
    UUID,
    host,
    queried,
    run,
    spawned,
)
from tests.unit.cell_conductor.world import beat, insert, opened

# --- Single conditions of the cell's rules that no table of a decision holds.


# --- decisions with several conditions: a row for each condition that alone makes the difference


def fenced(n: int) -> e.HostFenced:
    return e.HostFenced(at=300.0, host_uuid=host(n))


# --- moves


def in_place(*, arrived: bool = True) -> Scenario:
    """A resize on host 1."""
    made = begun(ActionKind.RESIZE, 1, spec=replace(SPEC, flavor="large"))
    made.apply(claimed())
    if arrived:
        made.end(1, 1)
    return made


def test_a_source_that_is_gone_ends_only_what_waits_for_it() -> None:
    resized = replace(to_resized().instance, deadline=400.0)
    assert way_back.end_source_lost(resized, 300.0, PATIENCE) == Step(resized)


def test_a_fence_names_the_host_whose_fence_has_changed_something() -> None:
    destroying = run(queried(hosts=1), spawned(), DELETE).instance
    for event, hosts in ((fenced(1), [host(1)]), (fenced(2), [])):
        follower = FenceSteps()
        stepped = step(destroying, event, PATIENCE)
        follower.apply(destroying, stepped, event, PATIENCE)
        assert [*follower.hosts] == hosts


# --- reports, leases, quarantine


def test_reservations_fill_a_message_to_its_bound() -> None:
    machine = Running(instance_uuid=UUID, attempt=1)
    half = [machine] * (MAX_RESERVED_AT_ONCE // 2)
    assert pages({host(1): half, host(2): half}) == [[host(1), host(2)]]
    assert pages({host(1): half, host(2): [*half, machine]}) == [[host(1)], [host(2)]]


# --- The instance state machine: builds, their alternates, and how they end.


# --- The instance state machine: what a host's own report of its machines changes.


def runs(attempt: int, n: int = 1, *, built: bool = True) -> e.MachineRunning:
    return e.MachineRunning(at=320.0, attempt=attempt, host_uuid=host(n), service="s1", built=built)


# --- a fence of a host: what waits for the host's report ends, what is active stays, and what it may have kept is stale


def fences_on(*numbers: int) -> dict[str, Fence]:
    return {host(n): Fence(host_uuid=host(n), host=f"host-{n}", version=1) for n in numbers}


# --- The leases of compute services: a row for each bound and each condition.


class Listened(LeaseTable):
    """A table whose clock has advanced so far."""

    def __init__(self, seconds: float = 100.0, *, missed: int = 3) -> None:
        super().__init__(missed)
        self.tenths = 0
        self.load_record([])
        self.advance_clock(0.0)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """By deliveries that all count whole."""
        for _ in range(round(seconds * 10)):
            self.tenths += 1
            self.advance_clock(self.tenths / 10)


@pytest.mark.parametrize(
    ("deliveries", "known"),
    [
        ([0.0, *(2.0 * n for n in range(1, 8)), 15.0], True),
        ([0.0, *(2.0 * n for n in range(1, 8)), 14.9], False),
        ([1000.0, *(1000.0 + 2.0 * n for n in range(1, 8))], False),
        ([0.0, *(99.0 * n for n in range(1, 8))], False),
        ([0.0, *(99.0 * n for n in range(1, 9))], True),
        ([0.0, *(2.0 * n for n in range(1, 8)), 13.5, 14.4], False),
        ([0.0, *(2.0 * n for n in range(1, 8)), 13.5, 14.5], True),
    ],
    ids=["15 s", "less", "the first", "7 steps of 2 s", "8 steps", "back", "back, and on"],
)
def test_who_is_up_is_known_when_the_clock_has_advanced_far_enough(deliveries: list[float], known: bool) -> None:
    table = LeaseTable(3)
    table.load_record([])
    for at in deliveries:
        table.advance_clock(at)
    assert (table.up is not None) is known


@pytest.mark.parametrize(("interval", "heard", "s"), [(40.0, True, 60.0), (40.0, False, 15.0), (4.0, True, 6.0)])
def test_the_slowest_service_that_was_heard_says_how_long_to_listen(interval: float, heard: bool, s: float) -> None:
    for short, up in ((0.1, None), (0.0, ("a",))):
        table = Listened(s - short)
        if heard:
            table.renew(beat("a", 0, 0, interval_s=interval), at=1.0)
        else:
            table.load([Lease(service="a", epoch=0, interval_s=interval)])
        assert table.up == up


def test_who_is_up_is_known_when_the_record_was_read_and_each_was_due() -> None:
    table = LeaseTable(3)
    for at in range(100):
        table.advance_clock(float(at))
    table.renew(beat("b", 1, 0), at=1.0)
    assert table.up is None, "it has no record"
    table.load_record([Lease(service="a", epoch=0), Lease(service="c", epoch=1, state=LeaseState.SILENT)])
    for at in range(99, 115):
        assert table.up is None, "it has not listened since"
        table.advance_clock(float(at))
    assert set(table.up or ()) == {"a", "b"} and set(table.down) == {"c"} and table.alive_services == {"b"}, (
        "a may be silent"
    )
    for at in range(115, 131):
        table.advance_clock(float(at))
    table.renew(beat("b", 1, 1), at=3.0)
    assert [lease.service for lease in table.assess(4.0)] == ["a"]
    assert table.up == ("b",) and set(table.down) == {"a", "c"} and table.alive_services == {"b"}
    table.renew(beat("a", 0, 0), at=5.0)
    table.renew(beat("b", 1, 2, stopping=True), at=5.0)
    assert table.alive_services == {"a"}


@pytest.mark.parametrize(
    ("stops", "seconds", "state", "abandoned"),
    [
        (False, 30.0, LeaseState.UP, False),
        (False, 30.1, LeaseState.SILENT, True),
        (True, 30.0, LeaseState.STOPPED, False),
        (True, 30.1, LeaseState.STOPPED, True),
    ],
)
def test_a_lease_ends_after_so_many_intervals(stops: bool, seconds: float, state: LeaseState, abandoned: bool) -> None:
    table = Listened()
    table.renew(beat("a", 1, 1, stopping=stops), at=1.0)
    table.advance(seconds)
    assert [lease.state for lease in table.assess(9.0)] == [state] * (state is LeaseState.SILENT)
    lease = table.leases["a"]
    assert (lease.state, lease.since) == (state, 9.0 if state is LeaseState.SILENT else 1.0)
    assert lease.code == {LeaseState.UP: "", LeaseState.SILENT: "service.silent"}.get(state, "service.stopped")
    assert (list(table.abandoned), list(table.down)) == (["a"] * abandoned, ["a"] * (state is not LeaseState.UP))
    assert table.up == (("a",) if state is LeaseState.UP else ())


@pytest.mark.parametrize(
    ("state", "listens_s", "at", "gone"),
    [
        (None, 14.0, 50.0, False),
        (None, 15.0, 50.0, True),
        (LeaseState.UP, 99.0, 500.0, False),
        (LeaseState.SILENT, 99.0, 50.0, False),
        (LeaseState.SILENT, 99.0, 62.9, False),
        (LeaseState.SILENT, 99.0, 63.0, True),
        (LeaseState.STOPPED, 99.0, 500.0, True),
        (LeaseState.STOPPED, 20.0, 500.0, False),
    ],
)
def test_a_service_is_gone_for_good(state: LeaseState | None, listens_s: float, at: float, gone: bool) -> None:
    table = Listened(0.0)
    if state is not None:
        table.load([Lease(service="a", epoch=1, state=state, since=3.0)])
    table.advance(listens_s)
    assert table.is_removed("a", at, takeover_s=60.0) is gone


DOWN = Lease(service="a", epoch=5, state=LeaseState.SILENT, since=3.0)


@pytest.mark.parametrize(
    ("recorded", "stated", "adopted"),
    [
        (DOWN, None, False),
        (replace(DOWN, since=4.0), None, True),
        (replace(DOWN, since=2.0), None, True),
        (replace(DOWN, epoch=6), None, True),
        (replace(DOWN, state=LeaseState.STOPPED), None, True),
        (replace(DOWN, state=LeaseState.UP), None, True),
        (replace(DOWN, since=4.0), replace(DOWN, since=4.0), False),
        (DOWN, replace(DOWN, since=4.0), True),
    ],
)
def test_a_lease_from_before_its_service_was_forgotten_is_not_adopted(
    recorded: Lease, stated: Lease | None, adopted: bool
) -> None:
    """stated: by the leader, which has another clock."""
    table = Listened()
    table.load([DOWN])
    if stated is not None:
        table.apply_service_states((1, 1), [stated])
    for _ in ("once", "again"):
        table.delete("a")
    assert len(table) == 0 and table.deleted == {"a"}
    table.load([recorded])
    assert table.leases == ({"a": recorded} if adopted else {})
    assert table.deleted == (set() if adopted else {"a"})


@pytest.mark.parametrize(("known", "recorded", "sent"), [(5, 4, {}), (5, 5, {}), (5, 6, {"a": 6}), (None, 6, {})])
def test_a_service_below_its_recorded_epoch_is_sent_that_one(
    known: int | None, recorded: int, sent: dict[str, int]
) -> None:
    table = Listened()
    if known is not None:
        table.renew(beat("a", known, 1), at=1.0)
    table.load([Lease(service="a", epoch=recorded)])
    assert table.superseded() == sent
    if known is not None:
        table.renew(beat("a", recorded, 2), at=1.0)
        assert table.superseded() == ({"a": 5} if recorded < known else {})


def test_the_highest_epoch_that_a_message_may_name_is_sent() -> None:
    table = Listened()
    table.renew(beat("a", MAX_EPOCH, 1), at=1.0)
    for epoch in (MAX_EPOCH - 1, 7):
        assert not table.renew(beat("a", epoch, 2), at=2.0)
    (epoch,) = table.superseded().values()
    with_it = ServiceSuperseded(service="a", epoch=epoch)
    assert msgspec.convert(msgspec.to_builtins(with_it), ServiceSuperseded).epoch == MAX_EPOCH


def test_more_services_than_the_bound_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_table, "MAX_SERVICES", 1)
    table = Listened()
    table.load([DOWN, replace(DOWN, service="b")])
    assert not table.renew(beat("c", 1, 1), at=1.0)
    assert list(table.leases) == ["a"]
    for service, epoch in (("a", 1), ("b", 1), ("a", 2)):
        table.record_superseded(service, epoch)
    assert table.superseded() == {"a": 2}
    for service in ("a", "b", "a"):
        table.delete(service)
    assert table.deleted == {"a"}
    table.load([DOWN])
    assert not table.leases


@pytest.mark.parametrize(
    ("epoch", "sequence", "stopping", "changed"),
    [
        (5, 7, False, False),
        (5, 6, False, False),
        (4, 99, False, False),
        (5, 8, False, False),
        (5, 8, True, True),
        (6, 0, False, True),
        (6, 0, True, True),
        (MAX_EPOCH, 2**62, False, True),
    ],
)
def test_a_message_of_a_service_changes_its_lease(epoch: int, sequence: int, stopping: bool, changed: bool) -> None:
    table = Listened()
    assert table.renew(beat("a", 5, 7, interval_s=4.0), at=1.0)
    before = table.leases["a"]
    assert table.renew(beat("a", epoch, sequence, interval_s=4.0, stopping=stopping), at=2.0) is changed
    state = LeaseState.STOPPED if stopping else LeaseState.UP
    after = table.leases["a"]
    assert (after.epoch, after.since, after.state) == ((epoch, 2.0, state) if changed else (5, 1.0, LeaseState.UP))
    assert changed or after is before


@pytest.mark.parametrize(
    ("ring", "seconds", "rings"),
    [("r", 30.0, {"r": ("a",)}), ("r", 30.1, {}), (None, 0.0, {}), ("", 0.0, {})],
)
def test_a_ring_loses_who_missed_three_heartbeats(
    ring: str | None, seconds: float, rings: dict[str, tuple[str, ...]]
) -> None:
    table = Listened(missed=9)
    table.renew(beat("a", 0, 0, ring=ring), at=1.0)
    table.advance(seconds)
    assert table.rings() == rings
    table.load([replace(DOWN, service="b")])
    assert table.rings() == rings
    table.load([Lease(service="c", epoch=1)])
    assert table.rings() is None


# --- a record with which a step cannot be made

LONE = "00000000-0000-4000-8000-0000000000aa"
POISONED = {
    "an event that is impossible in its state": record(State.ACTIVE),
    "its move is not on record": record(State.RESIZED),
    "it asks what cannot be asked": record(State.CLAIMING, State.BUILDING, spec=None),
}


@pytest.mark.parametrize("poisoned", POISONED.values(), ids=POISONED)
async def test_a_record_without_a_step_does_not_stop_the_deadlines_of_others(poisoned: Instance) -> None:
    """It ended the conductor, and again at each start, and with it the whole cell."""
    conductor = await opened()
    await insert(conductor.store, poisoned, record(State.BUILDING, uuid=LONE, queried=False))
    with capture_logs() as logged:
        assert await conductor.engine.sweep() == 2
        assert await conductor.engine.sweep() == 0, "it is tried again, and later"
    known = await conductor.engine.read_recorded((LONE, UUID))
    assert known[LONE].queried and known[UUID].deadline is not None and known[UUID].deadline > 99.0
    assert known[UUID] == replace(poisoned, deadline=known[UUID].deadline)
    assert [(one["event"], one["instance"]) for one in logged if one["log_level"] == "error"] == [
        ("instance.step_failed", UUID)
    ]


async def test_a_record_without_a_step_does_not_stop_a_report_and_makes_a_message_a_dead_letter() -> None:
    """Each report with it ended the conductor; the message of a fence did, and ended no step of the others."""
    conductor = await opened()
    poisoned = record(State.RESIZED)
    await insert(conductor.store, poisoned, record(State.BUILDING, uuid=LONE))
    runs = e.MachineRunning(at=300.0, attempt=2, host_uuid=host(2), service="s2")
    reported = [InstanceEvent(one, runs) for one in (UUID, LONE)]
    await conductor.engine.take(reported, source="reports")
    known = await conductor.engine.read_recorded((LONE, UUID))
    assert (known[LONE].state, known[UUID]) == (State.ACTIVE, poisoned)
    with pytest.raises(AssertionError):
        await conductor.engine.take([replace(reported[0], message_id="m")], source="results")


def test_no_heartbeat_that_was_sent_before_the_last_one_brings_a_stopped_service_back() -> None:
    """It may come after it, over another connection; the next epoch is another process's."""
    table = Listened()
    for each in (beat("a", 1, 1), beat("a", 1, 2, stopping=True), beat("a", 1, 3)):
        table.renew(each, at=1.0)
    assert table.up == ()
    table.renew(beat("a", 2, 1), at=2.0)
    assert table.up == ("a",)


@pytest.mark.parametrize(("cause", "told"), [("asked", "asked"), ("", OTHER)])
def test_what_a_query_of_a_move_tells_has_the_cause_of_its_request(cause: str, told: str) -> None:
    query = CellActionQuery(request_id=OTHER, instance_uuid=UUID, project_id="p", kind=ActionKind.STOP)
    assert action_queried(query, 1.0, cause).cause == told
