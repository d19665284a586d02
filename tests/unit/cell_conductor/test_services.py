"""Compute services: their leases, those that are gone, and those that have each other's hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received, Refuse
from bus.contracts.base import Message, Meta
from bus.contracts.build import BuildEvent
from bus.contracts.cell import (
    CellDelete,
    CellServiceDelete,
    CellServiceDeleted,
    Heartbeat,
    HostConflict,
    HostReport,
    HostsReleased,
    HostStates,
    ServiceRemoved,
    ServiceStates,
)
from bus.contracts.placement import InventoryReleased
from bus.contracts.stages import StageTimes
from cell_conductor.config import ConductorConfig
from cell_conductor.hosts.host_owners import HostOwners
from cell_conductor.hosts.lease_controller import AFTER_DISCONNECT_S, LeaseController
from cell_conductor.hosts.lease_table import LeaseTable
from cell_conductor.hosts.service_state_publisher import MAX_PAGES, PER_PAGE, pages_of
from cell_conductor.hosts.stated_marks import _Listening
from cell_conductor.reports.listings import HostListings
from cell_conductor.state import events as e
from cell_conductor.state.instance import State
from cell_conductor.state.lease import Lease, LeaseState
from cell_conductor.store.keyed import Unrecognised
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from tests.unit.cell_conductor.scenario import SILENT, UUID, announced, claimed, failed, host, on, queried, run, spawned
from tests.unit.cell_conductor.world import (
    Queried,
    Quiet,
    Relay,
    beat,
    engine_of,
    insert,
    leases_of,
    listing,
    opened_store,
    requests_of,
)

# --- The failure detector of a cell: who is suspected, and who never is.


MISSED = 5


class LeaseScenario:
    """A conductor that receives its leader's service states each second, and services that beat each second unless left
    out.
    """

    def __init__(self, *services: str) -> None:
        self.table = LeaseTable(MISSED)
        self.services = dict.fromkeys(services, 1)  # the epoch
        self.now = 1000.0
        self.sequence = 0
        self.run(1)

    def run(self, seconds: int, *, without: str = "") -> list[str]:
        silent: list[str] = []
        for _ in range(seconds):
            self.now += 1.0
            self.sequence += 1
            self.table.advance_clock(self.now)  # the service states
            for service, epoch in self.services.items():
                if service not in without.split():
                    self.beat(service, epoch)
            silent += [lease.service for lease in self.table.assess(self.now)]
        return silent

    def beat(self, service: str, epoch: int, *, stopping: bool = False) -> bool:
        self.table.advance_clock(self.now)
        return self.table.renew(beat(service, epoch, self.sequence, interval_s=1.0, stopping=stopping), at=self.now)

    def state(self, service: str) -> LeaseState:
        return self.table.leases[service].state


def test_so_many_missing_heartbeats_in_a_row_make_a_service_silent_with_a_reason() -> None:
    scenario = LeaseScenario("a", "b")
    assert scenario.run(10) == []
    assert scenario.run(MISSED, without="a") == []
    assert scenario.run(1, without="a") == ["a"]
    lease = scenario.table.leases["a"]
    assert (lease.state, lease.code, lease.since) == (LeaseState.SILENT, "service.silent", scenario.now)
    assert "for 6.0 s" in lease.reason and "every 1 s" in lease.reason
    assert list(scenario.table.down) == list(scenario.table.abandoned) == ["a"]
    assert scenario.run(3, without="a") == [], "published once"


def test_what_comes_late_or_twice_renews_nothing() -> None:
    scenario = LeaseScenario("a", "b")
    first = scenario.sequence
    for _ in range(MISSED):
        scenario.run(1, without="a")
        assert not scenario.table.renew(beat("a", 1, first, interval_s=1.0), at=scenario.now)
        assert not scenario.table.renew(beat("a", 0, first + 99, interval_s=1.0), at=scenario.now)
    assert scenario.run(1, without="a") == ["a"]


def test_purged_services_are_not_published_and_living_ones_are_not_purged() -> None:
    scenario = LeaseScenario("a", "b")
    scenario.run(MISSED + 1, without="a")
    scenario.table.remove(["a", "b", "c"])
    assert list(scenario.table.leases) == ["b"]


# --- A leader's messages must be readable for its listeners.


def test_a_digest_that_names_services_is_read_by_every_receiver() -> None:
    """Its codes were not of the declared form, and each scheduler dropped it."""
    down = {
        name: Lease(service=name, epoch=1, state=state, since=2.0, reason="why")
        for name, state in (("a", LeaseState.SILENT), ("b", LeaseState.STOPPED))
    }
    (page,) = pages_of(down)
    states = ServiceStates(cell="c1", term=1, number=1, down=page, up=3)
    parsed = msgspec.json.decode(msgspec.json.encode(states), type=ServiceStates)
    assert parsed == states and [one.code for one in parsed.down] == ["service.silent", "service.stopped"]


def test_a_digest_has_one_page_at_least_and_pages_of_bounded_length() -> None:
    assert pages_of({}) == [()]
    many = {f"s{n:06}": Lease(service=f"s{n:06}", epoch=1, state=LeaseState.STOPPED) for n in range(PER_PAGE + 1)}
    assert [len(page) for page in pages_of(many)] == [PER_PAGE, 1]
    more = {f"s{n:06}": next(iter(many.values())) for n in range(PER_PAGE * MAX_PAGES + 1)}
    assert len(pages_of(more)) == MAX_PAGES


async def test_a_conductor_that_is_not_the_keeper_learns_from_the_digest_who_was_down_before_it_started() -> None:
    """Seed 10005: restarted beside a leader it did not know the dead service, and took alternates there."""
    controller = controller_of(await opened_store())

    async def receive(message: ServiceStates | Heartbeat) -> None:
        await controller.handle([Received(message, Meta(id="m"), "c1", "conductor.leases")])

    (page,) = pages_of(
        {
            "a": Lease(service="a", epoch=5, state=LeaseState.SILENT, since=2.0, reason="why"),
            "b": Lease(service="b", epoch=5, state=LeaseState.STOPPED, since=2.0, reason="why"),
        }
    )
    await receive(ServiceStates(cell="c2", term=1, number=1, down=page))
    assert controller.down() == {}, "another cell's"
    await receive(ServiceStates(cell="c1", term=1, number=1, down=page))
    assert {name: lease.state for name, lease in controller.down().items()} == {
        "a": LeaseState.SILENT,
        "b": LeaseState.STOPPED,
    }
    await receive(Heartbeat(service="a", cell="c1", epoch=5, sequence=9))
    assert list(controller.down()) == ["b"], "its heartbeat shows that it is up"
    await receive(ServiceStates(cell="c1", term=1, number=2, down=page))
    assert list(controller.down()) == ["b"], "what arrives here counts for more"


# --- A cell's additions to the stages of a build: when the first host began, and when the last attempt ended.


SO_FAR = StageTimes(requested=90.0, queued=91.0, decided=92.0, claimed=93.0)
BEGIN = replace(queried(), stage_times=SO_FAR)  # at 100


def ended(*happened: e.Event) -> BuildEvent:
    (event,) = announced(run(BEGIN, *happened))
    assert event.terminal
    return event


@pytest.mark.parametrize(
    ("first", "dispatched"),
    [
        ((replace(failed(), started_at=101.0, ended_at=104.0),), 101.0),
        (SILENT, 100.0),
        ((e.Destroyed(at=105.0, attempt=1, host_uuid=host(1), service="s1"),), 100.0),
    ],
)
def test_failed_attempts_are_in_the_time_of_building(first: tuple[e.Event, ...], dispatched: float) -> None:
    event = ended(*first, claimed(), replace(spawned(2), started_at=205.0, ended_at=206.0))
    assert event.stage_times == replace(SO_FAR, dispatched=dispatched, built=206.0)


# --- A compute service that an operator has stated to be gone for good: who drops it, what keeps it, what it
# releases.


DOWN = Lease(service="s3", epoch=5, state=LeaseState.SILENT, since=100.0, reason="why")
ORDER = CellServiceDelete(service="s3", reason="burnt", by="ann")


def controller_of(store: MemoryInstances | None = None) -> LeaseController:
    return leases_of(store, None, SystemClock(), ConductorConfig())[0]


async def receive(controller: LeaseController, message: Message) -> None:
    await controller.handle([Received(message, Meta(id="m"), "c1", "conductor.leases")])


def states(*down: Lease, number: int = 1) -> ServiceStates:
    (page,) = pages_of({one.service: one for one in down})
    return ServiceStates(cell="c1", term=1, number=number, page=1, pages=1, down=page)


async def test_each_conductor_drops_it_and_adopts_no_digest_from_before() -> None:
    controller = controller_of()
    await receive(controller, states(DOWN))
    await receive(controller, ServiceRemoved(cell="c2", service="s3", at=200.0))
    assert list(controller.down()) == ["s3"], "another cell's"
    await receive(controller, ServiceRemoved(cell="c1", service="s3", at=200.0))
    assert (controller.down(), set(controller.deleted())) == ({}, {"s3"})
    await receive(controller, states(DOWN, number=2))
    assert controller.down() == {}, "its keeper had not received the notice"
    await receive(controller, states(replace(DOWN, since=201.0), number=3))
    assert list(controller.down()) == ["s3"], "it was back, and is down again"
    assert set(controller.deleted()) == set()


async def test_a_forgotten_service_is_not_taken_up_again_from_a_digest_that_was_under_way() -> None:
    """The leader's clock is ahead of that of the conductor which took the order: this one waited for it for ever."""
    controller = controller_of()
    silent = replace(DOWN, since=203.0)
    await receive(controller, states(silent))
    await receive(controller, ServiceRemoved(cell="c1", service="s3", at=200.0))
    await receive(controller, states(silent, number=2))
    assert controller.down() == {} and set(controller.deleted()) == {"s3"}


async def test_a_digest_that_is_older_than_the_newest_one_is_not_adopted() -> None:
    controller = controller_of()
    await receive(controller, states(number=2))
    await receive(controller, states(DOWN, number=1))
    assert controller.down() == {}


async def test_one_that_sends_heartbeats_is_not_dropped() -> None:
    controller = controller_of(await opened_store())
    await receive(controller, Heartbeat(service="s3", cell="c1", epoch=6, sequence=1))
    await receive(controller, ServiceRemoved(cell="c1", service="s3", at=200.0))
    assert set(controller.deleted()) == set()


async def test_one_that_was_up_is_not_forgotten_when_it_is_dropped_later() -> None:
    """It was stated to be gone while it was up here: later its host was not looked at, where a machine may run."""
    table = LeaseTable(MISSED)
    table.renew(beat("s3", 6, 1), at=100.0)
    table.delete("s3")
    table.renew(beat("s3", 6, 2, stopping=True), at=300.0)
    table.remove(["s3"])
    assert table.deleted == frozenset() and not table.leases


async def kept(controller: LeaseController) -> None:
    """The leader takes its turn."""
    controller._renew_at = 0.0
    await controller._renew_leadership()


def lately() -> Lease:
    """It is down since just now."""
    return replace(DOWN, since=SystemClock().time())


async def test_a_keeper_records_again_what_the_database_has_forgotten() -> None:
    """A stand-by without the last commits was promoted within a turn: the office was held still, and its leader took
    what was lost to be on record. A later leader asked nothing of the service that was down.
    """
    store = await opened_store()
    controller = controller_of(store)
    await receive(controller, states(lately()))
    await kept(controller)
    assert [one.service for one in await store.leases.leases()] == ["s3"]
    store._table.leases.clear()
    store._table.place += 1
    for _ in ("not recognised", "recognised"):
        await kept(controller)
        async with store.transaction() as transaction:
            await transaction.begin_recovery()
    assert [one.service for one in await store.leases.leases()] == ["s3"] and controller.is_leader


async def test_a_keeper_whose_office_has_passed_on_records_no_more() -> None:
    store = await opened_store()
    controller = controller_of(store)
    await receive(controller, states(lately()))
    await kept(controller)
    assert controller.is_leader
    store._table.leader = replace(store._table.leader, term=store._table.leader.term + 1)
    await receive(controller, Heartbeat(service="s4", cell="c1", epoch=1, sequence=1))
    await controller._renew_leadership()  # before its next turn to keep the office
    assert not controller.is_leader and [one.service for one in await store.leases.leases()] == ["s3"]


@pytest.mark.parametrize("is_back", [False, True])
async def test_a_lease_that_is_recorded_while_it_is_forgotten_is_deleted_again(*, is_back: bool) -> None:
    """It stayed for good: the conductors that started later waited for the service. One that was back was on record no
    more.
    """
    store = await opened_store()
    controller = controller_of(store)
    await receive(controller, states(lately()))
    await kept(controller)
    assert await store.leases.delete("s3")
    term = store._table.leader.term
    if is_back:
        await receive(controller, Heartbeat(service="s3", cell="c1", epoch=6, sequence=1))
        await kept(controller)
        assert await store.leases.delete("s3")
    else:
        await store.leases.record(term, [lately()])  # by a statement that was under way
    await receive(controller, ServiceRemoved(cell="c1", service="s3", at=lately().since + 1.0))
    await kept(controller)
    assert [one.service for one in await store.leases.leases()] == ["s3"] * is_back


def test_only_services_that_are_down_for_long_are_old() -> None:
    table = LeaseTable(MISSED)
    times = {"a": 4.0, "b": 3.0, "c": 5.0}
    table.load(Lease(service=name, epoch=1, state=LeaseState.SILENT, since=since) for name, since in times.items())
    table.load([Lease(service="d", epoch=1, since=1.0)])
    assert table.down_before(5.0, 10) == ["b", "a"] and table.down_before(9.0, 1) == ["b"]


class Published:
    """A bus that keeps what is published."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    async def publish(self, message: Message, **_: object) -> None:
        """Keep it."""
        self.sent.append(message)


async def test_it_is_forgotten_once_it_is_down_and_has_no_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opened_store()
    term = await store.leases.hold_leadership("p", 60.0, None)
    assert term is not None and await store.leases.record(term, [DOWN])
    bus: Any = Published()
    up: tuple[str, ...] | None = None
    deleting, _ = leases_of(store, bus, SystemClock(), ConductorConfig())
    monkeypatch.setattr(deleting, "up", lambda: up)
    assert (await code_of(deleting)) == "service.state_unknown"
    up = ("s1", "s3")
    assert (await code_of(deleting)) == "service.up"
    up = ("s1",)
    there = replace(run(on("s3", "s1")).instance, state=State.ACTIVE)
    await insert(store, there)
    assert (await code_of(deleting)) == "service.has_instances"
    async with store.transaction() as transaction:
        await transaction.lock([UUID])
        await transaction.update([replace(there, state=State.DELETED)])
    assert bus.sent == [] and await store.leases.leases() == [DOWN]
    for removed in (True, False):
        outcome = await deleting.delete(ORDER)
        assert isinstance(outcome, Done) and isinstance(outcome.reply, CellServiceDeleted)
        assert outcome.reply.removed is removed
    assert await store.leases.leases() == []
    assert [type(one) for one in bus.sent] == [ServiceRemoved] * 2, "a repeat notifies those that have not received it"


async def code_of(deleting: LeaseController) -> str:
    outcome = await deleting.delete(ORDER)
    assert isinstance(outcome, Refuse)
    return outcome.code


async def test_the_builds_and_deletes_of_its_batch_come_before_it() -> None:
    taken: list[str] = []

    class Order:
        async def take(self, _events: object, **_: object) -> None:
            taken.append("rest")

        async def delete(self, _command: CellServiceDelete) -> Done:
            taken.append("service")
            return Done()

    command: Any = Order()
    handlers = requests_of(command, SystemClock(), leases=command)
    delete = CellDelete(instance_uuid=UUID, project_id="p")
    batch = [Received(one, Meta(id=str(at)), "c1", "conductor.requests") for at, one in enumerate((ORDER, delete))]
    outcomes = await handlers.requests(batch)
    assert [type(one) for one in outcomes] == [Done, Done] and taken == ["rest", "service"]


@pytest.mark.parametrize("waits", [False, True])
async def test_it_is_not_forgotten_for_an_operator_who_has_stopped_waiting(*, waits: bool) -> None:
    """The cell's database was away meanwhile, and the operator was answered that this cell does not answer."""
    forgotten: list[CellServiceDelete] = []

    class Deleting:
        async def delete(self, command: CellServiceDelete) -> Done:
            forgotten.append(command)
            return Done()

    deleting: Any = Deleting()
    clock = SystemClock()
    handlers = requests_of(deleting, clock, leases=deleting)
    remaining_s = 3600.0 if waits else -1.0
    received = Received(ORDER, Meta(id="1"), "c1", "conductor.requests", remaining_s=lambda: remaining_s)
    assert await handlers.requests([received]) == [Done()]
    assert forgotten == ([ORDER] if waits else [])


# --- A conductor answers reports of hosts that are another service's: it notifies the owner, or releases the hosts.


class Known:
    """The services that are gone, at the leader or elsewhere."""

    def __init__(self, *gone: str, is_leader: bool = True) -> None:
        self.gone = gone
        self.is_leader = is_leader

    def is_removed(self, service: str) -> bool:
        """Whether it was named."""
        return service in self.gone


REFUSED = HostStates(
    service="s2",
    cell="c1",
    epoch=1,
    sequence=1,
    hosts=(
        HostReport(uuid=host(1), name="h1", owner="s1", running=()),
        HostReport(uuid=host(2), name="h2", owner="s1", running=()),
        HostReport(uuid=host(3), name="h3", running=()),
    ),
)


async def answered(leases: Any, *listed: HostStates) -> tuple[list[object], HostStates]:
    bus, listings = Quiet(), HostListings()
    for report in listed:
        listings.record(report)
    left = await HostOwners(bus, listings, leases).answer(REFUSED)  # type: ignore[arg-type]
    return bus.published, left


async def test_what_a_refused_service_reports_of_the_host_counts_for_nothing() -> None:
    """Its report would have shown that the owner's machines are lost, as soon as the owner was silent."""
    _, left = await answered(Known(), listing("s1", 1, 2))
    assert [one.running for one in left.hosts] == [None, None, ()]


async def test_the_owner_keeps_what_it_lists_and_the_other_one_gets_what_it_has_given_up() -> None:
    published, _ = await answered(Known(), listing("s1", 1, 3))
    assert published == [
        InventoryReleased(reporter="compute-s1", roots=(host(2),)),
        HostsReleased(service="s2", owner="s1", hosts=(host(2),)),
        HostConflict(service="s1", other="s2", hosts=(host(1),)),
    ]


async def test_all_hosts_of_a_service_that_is_gone_are_released() -> None:
    published, _ = await answered(Known("s1"), listing("s1", 1, 2))
    assert published == [
        InventoryReleased(reporter="compute-s1", roots=(host(1), host(2))),
        HostsReleased(service="s2", owner="s1", hosts=(host(1), host(2))),
    ]


async def test_nothing_is_released_by_a_conductor_that_is_not_the_keeper_or_has_no_list() -> None:
    published, left = await answered(Known("s1", is_leader=False))
    assert not published and left.hosts[0].running is None
    published, _ = await answered(Known())
    assert [type(one) for one in published] == [HostConflict], "its list has not come yet"


# --- A compute service that is lost in a cell whose database was restored: no build fails over from what it lost.


async def test_no_build_leaves_a_lost_service_before_its_cell_has_recovered() -> None:
    """The leader failed builds over from restored leases and records."""
    table, relay, config = MemoryInstanceTable(SystemClock()), Relay(), ConductorConfig()
    bus: Any = Queried()
    store = MemoryInstances(table.session())
    await store.open()
    controller, marks = leases_of(store, bus, SystemClock(), config)
    engine = engine_of(
        store=store, bus=bus, relay=relay, clock=SystemClock(), config=config, cell="c1", leases=controller, marks=marks
    )
    await insert(store, run(on("s1", "s2")).instance)
    (silent,) = pages_of({"s1": Lease(service="s1", epoch=1, state=LeaseState.SILENT, reason="why")})
    states = ServiceStates(cell="c1", term=1, number=1, down=silent)
    await controller.handle([Received(states, Meta(id="m"), "c1", "conductor.leases")])
    marks._listening = _Listening(store.servers, math.inf, may_act=True)
    table.place += 1  # an operator restores a backup
    with pytest.raises(Unrecognised):  # it has not heard yet which incarnations there were
        await controller._fail_over(engine)
    async with store.transaction() as transaction:
        await transaction.begin_recovery()
    for _ in range(2):
        await controller._fail_over(engine)
        controller._fail_over_at = 0.0
    assert table.instances[UUID].state is State.BUILDING
    assert not relay.sent, "nothing is destroyed"
    async with store.transaction() as transaction:
        await transaction.expect_recovering()
        await transaction.end_recovery()
    marks._listening = _Listening(store.servers, math.inf, may_act=True)
    await controller._fail_over(engine)
    assert table.instances[UUID].state is State.CLAIMING


async def test_no_build_leaves_a_lost_service_while_its_result_may_come_again() -> None:
    """Seed 1795410983: a client was informed of `active`, the database forgot that in a crash, the service was silent
    meanwhile, and the build went on elsewhere although its machine ran.
    """
    table, relay, config, now = MemoryInstanceTable(SystemClock()), Relay(), ConductorConfig(), 100.0
    clock: Any = SimpleNamespace(time=lambda: now, monotonic=lambda: now)
    bus: Any = Queried()
    store = MemoryInstances(session := table.session())
    await store.open()
    controller, marks = leases_of(store, bus, clock, config)
    engine = engine_of(
        store=store, bus=bus, relay=relay, clock=clock, config=config, cell="c1", leases=controller, marks=marks
    )
    await insert(store, run(on("s1", "s2")).instance)
    (silent,) = pages_of({"s1": Lease(service="s1", epoch=1, state=LeaseState.SILENT, reason="why")})
    states = ServiceStates(cell="c1", term=1, number=1, down=silent)
    await controller.handle([Received(states, Meta(id="m"), "c1", "conductor.leases")])
    building_at = store.building_at

    async def read(services: Sequence[str]) -> list[tuple[str, str]]:
        nonlocal now
        now += 0.05  # it takes a while
        return await building_at(services)

    store.building_at = read  # type: ignore[method-assign]
    marks._listening = _Listening(store.servers, math.inf, may_act=True)
    session.connection_losses += 1  # the database has died
    for wait_s, state in ((0.0, State.BUILDING), (AFTER_DISCONNECT_S - 0.1, State.BUILDING), (0.2, State.CLAIMING)):
        now += wait_s
        await controller._fail_over(engine)
        assert table.instances[UUID].state is state
    assert table.instances[UUID].history[-1].at == now, "when it was read that it is there"
