"""The cell's compute services are queried before a doubted build is begun; without their answers nothing is begun."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Outcome, Received, Retry
from bus.contracts.base import Message, Meta
from bus.contracts.cell import CellBuild, CellDelete, FindMachines, FoundMachine, MachinesFound
from bus.faults import Fault, Transient
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.instance import Instance, Phase, State
from cell_conductor.domain.leases import LISTEN_BEATS, LeaseTable
from cell_conductor.engine import Engine
from cell_conductor.handlers import RETRIES, RequestHandlers
from cell_conductor.search import MachineSearch
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from tests.unit.conductor.scenario import SPEC, UUID, host, selection
from tests.unit.conductor.test_set_back import Relay

BUILD = CellBuild(spec=SPEC, selections=(selection(1), selection(2)), consumer_generation=7, requested_at=1.0)


class Services:
    """A bus whose compute services have these machines; those of `silent` do not answer. Placement never does."""

    name = "c1"

    def __init__(self, **machines: Sequence[FoundMachine]) -> None:
        self.machines = machines
        self.silent: set[str] = set()
        self.hosts: tuple[str, ...] | None = tuple(host(n) for n in range(1, 10))  # that each has looked at
        self.page: int | None = None  # of these hosts in one answer
        self.queried: list[FindMachines] = []

    async def request_all(self, messages: Sequence[Any], *_: Any, **__: Any) -> list[MachinesFound | Fault]:
        """One answer or fault each."""
        self.queried += [one for one in messages if isinstance(one, FindMachines)]
        return [
            MachinesFound(
                service=one.service,
                machines=tuple(self.machines[one.service]),
                hosts=self._hosts(one),
                more=self.page is not None and (one.hosts_after or 0) + self.page < len(self.hosts or ()),
            )
            if isinstance(one, FindMachines) and one.service not in self.silent
            else Transient("no answer", code="request.timeout")
            for one in messages
        ]

    def _hosts(self, query: FindMachines) -> tuple[str, ...] | None:
        if not query.thorough or self.hosts is None or self.page is None:
            return self.hosts if query.thorough else None
        assert query.hosts_after is not None
        return self.hosts[query.hosts_after : query.hosts_after + self.page]


class Conductor:
    """Takes requests over a database that was set back just now."""

    def __init__(self, services: Services, up: Collection[str] | None, unexplained: Collection[str] = ()) -> None:
        self.table = MemoryInstanceTable(clock := SystemClock())
        self.relay, bus = Relay(), services
        self.store = MemoryInstances(self.table.session())
        self.search = MachineSearch(
            self.store,
            bus,  # type: ignore[arg-type]
            timeout_s=1.0,
            up=lambda: up,
            unexplained=lambda: unexplained,
        )
        self.engine = Engine(
            store=self.store,
            bus=bus,  # type: ignore[arg-type]
            relay=self.relay,  # type: ignore[arg-type]
            clock=clock,
            config=ConductorConfig(),
            cell="c1",
            search=self.search,
        )
        self.requests = RequestHandlers(self.engine, clock, search=self.search)

    async def take(self, build: CellBuild = BUILD, *, set_back: bool = True, attempt: int = 0) -> Outcome:
        await self.store.open()
        if set_back:
            self.table.place += 1
            await self.engine.sweep()
        return await self.request(build, attempt=attempt)

    async def request(self, message: Message, *, attempt: int = 0) -> Outcome:
        (outcome,) = await self.requests.requests(
            [Received(message, Meta(id="m", attempt=attempt), "c1", "conductor.requests")]
        )
        return outcome

    async def recorded(self) -> Instance | None:
        async with self.store.transaction() as transaction:
            return (await transaction.lock([UUID])).get(UUID)


def machine() -> FoundMachine:
    return FoundMachine(
        instance_uuid=UUID, host_uuid=host(3), host="host-3", service="s2", attempt=1, project_id=SPEC.project_id
    )


async def test_every_service_that_is_up_is_queried_and_the_machine_of_one_is_adopted() -> None:
    services = Services(s1=(), s2=(machine(),), s3=())
    conductor = Conductor(services, ("s3", "s1", "s2"))
    assert isinstance(await conductor.take(), Done)
    assert [(one.service, one.instance_uuids) for one in services.queried] == [(s, (UUID,)) for s in ("s1", "s2", "s3")]
    assert {one.deployment for one in services.queried} == {conductor.store.deployment}
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.phase == (State.CLAIMING, State.ACTIVE) and not conductor.relay.sent


@pytest.mark.parametrize("up", [("s1", "s2"), None], ids=["one does not answer", "who is up is not known yet"])
async def test_nothing_is_begun_while_a_service_that_is_up_has_not_answered(up: Collection[str] | None) -> None:
    services = Services(s1=(), s2=(machine(),))
    services.silent = {"s2"}
    conductor = Conductor(services, up)
    outcome = await conductor.take()
    assert isinstance(outcome, Retry) and outcome.code == "build.search_unanswered"
    assert await conductor.recorded() is None and not conductor.relay.sent
    assert isinstance(await conductor.take(attempt=RETRIES), Done), "that wait is bounded"
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.state is State.BUILDING and recorded.doubted


async def test_it_is_begun_when_all_have_answered_that_they_have_nothing() -> None:
    conductor = Conductor(Services(s1=()), ("s1",))
    assert isinstance(await conductor.take(), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.state is State.BUILDING and recorded.doubted


async def test_no_service_is_queried_about_a_build_that_is_not_doubted() -> None:
    services = Services(s1=(machine(),))
    conductor = Conductor(services, ("s1",))
    assert isinstance(await conductor.take(set_back=False), Done)
    assert not services.queried
    later = Conductor(services, ("s1",))
    await later.take(replace(BUILD, requested_at=SystemClock().time() + 3600.0))
    assert not services.queried


@pytest.mark.parametrize("by_another", [False, True], ids=["before every sweep", "after another conductor's sweep"])
@pytest.mark.parametrize(
    ("message", "phase"),
    [
        (BUILD, (State.CLAIMING, State.ACTIVE)),
        (CellDelete(instance_uuid=UUID, project_id=SPEC.project_id), (State.DESTROYING, State.DELETED)),
    ],
    ids=["a build", "a delete"],
)
async def test_a_request_between_a_set_back_and_the_next_sweep_is_begun_only_after_a_search(
    message: Message, phase: Phase, *, by_another: bool
) -> None:
    """It was begun as a new one: a second machine, or a delete without an answer (builds-forgotten, seed 7)."""
    services = Services(s2=(machine(),))
    conductor = Conductor(services, ("s2",))
    await conductor.store.open()
    conductor.table.place += 1
    if by_another:
        other = MemoryInstances(conductor.table.session())
        await other.open()
        async with other.transaction() as transaction:
            await transaction.recognise()
    with pytest.raises(Transient) as raised:
        await conductor.request(message)
    assert raised.value.code == "cell.database_set_back"
    assert await conductor.recorded() is None and not conductor.relay.sent and not services.queried
    assert isinstance(await conductor.request(message), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.phase == phase and services.queried


async def test_a_request_is_searched_for_if_the_set_back_is_recognised_while_it_is_taken() -> None:
    conductor = Conductor(Services(s2=(machine(),)), ("s2",))
    await conductor.store.open()
    search = conductor.requests._searched

    async def swept(*arguments: Any) -> Any:
        found = await search(*arguments)
        if conductor.table.place == 1:
            conductor.table.place += 1
            await conductor.engine.sweep()
        return found

    conductor.requests._searched = swept  # type: ignore[method-assign]
    with pytest.raises(Transient):
        await conductor.request(BUILD)
    assert await conductor.recorded() is None and not conductor.relay.sent
    assert isinstance(await conductor.request(BUILD), Done)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.phase == (State.CLAIMING, State.ACTIVE)


async def test_a_request_whose_instance_has_a_machine_in_quarantine_is_doubted_whenever_it_was_sent() -> None:
    """A client that requests its build again, after a restore, has sent it since."""
    services = Services(s1=(replace(machine(), service="s1"),))
    conductor = Conductor(services, ("s1",), unexplained={UUID})
    await conductor.take(replace(BUILD, requested_at=SystemClock().time() + 3600.0), set_back=False)
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.phase == (State.CLAIMING, State.ACTIVE)


async def test_a_doubted_record_fails_over_only_when_all_have_answered() -> None:
    """A record that was set back claimed an alternate, while the forgotten attempt 2 ran on a third host."""
    services = Services(s1=(), s2=(replace(machine(), attempt=2),))
    conductor = Conductor(services, ("s1", "s2"))
    await conductor.store.open()
    over = Instance(
        uuid=UUID,
        state=State.CLAIMING,
        then=State.BUILDING,
        spec=SPEC,
        selections=BUILD.selections,
        attempt=1,
        consumer_generation=7,
        doubted=True,
        deadline=1.0,
        since=SystemClock().time(),
    )
    async with conductor.store.transaction() as transaction:
        await transaction.insert([over])
    services.silent = {"s1", "s2"}
    assert await conductor.engine.sweep() == 1
    await conductor.engine.search()
    assert (await conductor.recorded() or over).phase == (State.CLAIMING, State.BUILDING)
    services.silent = set()
    async with conductor.store.transaction() as transaction:
        await transaction.lock([UUID])
        await transaction.update([over])
    assert await conductor.engine.sweep() == 1
    await conductor.engine.search()
    recorded = await conductor.recorded()
    assert recorded is not None and (recorded.phase, recorded.attempt) == ((State.CLAIMING, State.ACTIVE), 2)


def test_who_is_up_is_not_known_before_a_heartbeat_of_each_was_due() -> None:
    table = LeaseTable(missed_heartbeats=5)
    table.advance_clock(0.0)
    assert table.up is None
    table.renew("s1", 1, 1, at=0.0, interval_s=1.0)
    assert table.up is None
    table.advance_clock(LISTEN_BEATS * 1.0)
    table.renew("s2", 1, 1, at=0.0, interval_s=1.0)
    table.renew("s3", 1, 1, at=0.0, interval_s=1.0, stopping=True)
    assert set(table.up or ()) == {"s1", "s2"}


async def test_item_16_the_hosts_that_were_looked_at_are_read_in_pages() -> None:
    """Of each service on their own; a machine that every page names is one."""
    services = Services(s1=(machine(),), s2=())
    services.page = 4
    conductor = Conductor(services, ("s1", "s2"))
    await conductor.store.open()
    searched = await conductor.search.find((UUID,), thorough=True)
    assert [(one.service, one.hosts_after) for one in services.queried] == [
        (service, after) for after in (0, 4, 8) for service in ("s1", "s2")
    ]
    assert searched.hosts == set(services.hosts or ()) and not searched.missing
    assert searched.of(UUID) == (machine(),)
    await conductor.search.find((UUID,))
    assert services.queried[-1].hosts_after is None, "other queries are of no hosts"


async def test_a_service_without_all_of_its_pages_has_not_answered() -> None:
    services = Services(s1=())
    services.page = 0
    conductor = Conductor(services, ("s1",))
    await conductor.store.open()
    assert (await conductor.search.find((UUID,), thorough=True)).missing == ("s1",)
    assert len(services.queried) == 1


async def test_a_service_of_a_version_before_names_all_hosts_in_one_answer() -> None:
    services = Services(s1=())
    conductor = Conductor(services, ("s1",))
    await conductor.store.open()
    searched = await conductor.search.find((UUID,), thorough=True)
    assert searched.hosts == set(services.hosts or ()) and not searched.missing and len(services.queried) == 1
