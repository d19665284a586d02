"""A compute service that an operator has stated to be gone for good: who drops it, what keeps it, what it releases."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received, Refuse
from bus.contracts.base import Message, Meta
from bus.contracts.cell import (
    CellDelete,
    ForgetServiceInCell,
    Heartbeat,
    ServiceForgottenInCell,
    ServiceGone,
    ServicesDigest,
)
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.instance import Instance, Phase, State
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.domain.proof import is_at
from cell_conductor.forgetting import LeaseForgetter
from cell_conductor.handlers import RequestHandlers
from cell_conductor.lease_keeper import LeaseKeeper, pages_of
from cell_conductor.search import MachineSearch
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from tests.unit.conductor.scenario import UUID, host, phase_of
from tests.unit.conductor.test_search import Services
from tests.unit.conductor.test_table_services import on, run
from tests.unit.conductor.test_transfers_set_back import at_state, held

DOWN = Lease(service="s3", epoch=5, state=LeaseState.SILENT, since=100.0, reason="why")
ORDER = ForgetServiceInCell(service="s3", reason="burnt", by="ann")


def keeper_of(store: MemoryInstances | None = None) -> LeaseKeeper:
    nothing: Any = None
    return LeaseKeeper(
        store or nothing, nothing, clock=SystemClock(), config=ConductorConfig(), cell="c1", process="conductor"
    )


async def receive(keeper: LeaseKeeper, message: Message) -> None:
    await keeper.handle([Received(message, Meta(id="m"), "c1", "conductor.leases")])


def digest(*down: Lease, number: int = 1) -> ServicesDigest:
    (page,) = pages_of({one.service: one for one in down})
    return ServicesDigest(cell="c1", term=1, number=number, page=1, pages=1, down=page)


async def test_each_conductor_drops_it_and_adopts_no_digest_from_before() -> None:
    keeper = keeper_of()
    await receive(keeper, digest(DOWN))
    await receive(keeper, ServiceGone(cell="c2", service="s3", at=200.0))
    assert list(keeper.down()) == ["s3"], "another cell's"
    await receive(keeper, ServiceGone(cell="c1", service="s3", at=200.0))
    assert (keeper.down(), set(keeper.forgotten())) == ({}, {"s3"})
    await receive(keeper, digest(DOWN, number=2))
    assert keeper.down() == {}, "its keeper had not received the notice"
    await receive(keeper, digest(replace(DOWN, since=201.0), number=3))
    assert list(keeper.down()) == ["s3"], "it was back, and is down again"
    assert set(keeper.forgotten()) == set()


async def test_one_that_sends_heartbeats_is_not_dropped() -> None:
    keeper = keeper_of()
    await receive(keeper, Heartbeat(service="s3", cell="c1", epoch=6, sequence=1))
    await receive(keeper, ServiceGone(cell="c1", service="s3", at=200.0))
    assert set(keeper.forgotten()) == set()


async def test_a_move_that_waits_for_its_answer_goes_on() -> None:
    """A move in doubt was held for as long as a service was down, and for ever by one that is gone."""
    moved = {UUID: held().instance}
    keeper = keeper_of()
    await receive(keeper, digest(DOWN))
    services = Services(s1=(), s2=())
    services.silent = {"s3"}
    store = MemoryInstances(MemoryInstanceTable(SystemClock()).session())
    await store.open()
    search = MachineSearch(
        store,
        services,  # type: ignore[arg-type]
        timeout_s=1.0,
        up=lambda: ("s1", "s2"),
        forgotten=keeper.forgotten,
    )
    _, waits = await search.find_moved(moved, keeper.down())
    assert waits == {UUID}
    await receive(keeper, ServiceGone(cell="c1", service="s3", at=200.0))
    _, waits = await search.find_moved(moved, keeper.down())
    assert waits == set()


@pytest.mark.parametrize(
    ("at", "here"),
    [
        (State.ACTIVE, True),
        (State.BUILDING, True),
        ((State.DESTROYING, State.DELETED), True),
        ((State.CLAIMING, State.PREPARING), False),
        ((State.RELEASING, State.OFFLOADED), False),
        (State.OFFLOADED, False),
        (State.DELETED, False),
    ],
)
def test_an_instance_is_at_a_service_by_the_host_of_its_attempt_unless_that_is_fenced(
    at: State | Phase, *, here: bool
) -> None:
    state, then = phase_of(at)
    instance = replace(run(on("s3", "s1")).instance, state=state, then=then)
    assert is_at(instance, "s3", ()) is here
    assert not is_at(instance, "s1", ()), "an alternate"
    assert not is_at(instance, "s3", {instance.selections[0].host_uuid})
    assert not is_at(Instance(uuid=UUID), "s3", ())


def test_the_source_of_a_move_is_at_its_service() -> None:
    there = at_state(State.FINISHING)
    move = there.instance.move
    assert move is not None and move.source is None
    source = replace(there.instance.selections[0], service="s3", host_uuid=host(9))
    moving = replace(there.instance, move=replace(move, source=source))
    assert is_at(moving, "s3", ()) and not is_at(moving, "s3", {host(9)})
    assert not is_at(replace(moving, state=State.DEPARTED), "s3", ())


class Published:
    """A bus that keeps what is published."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    async def publish(self, message: Message, **_: object) -> None:
        """Keep it."""
        self.sent.append(message)


async def test_it_is_forgotten_once_it_is_down_and_has_no_instance() -> None:
    store = MemoryInstances(MemoryInstanceTable(SystemClock()).session())
    await store.open()
    term = await store.leases.keep("p", 60.0, None)
    assert term is not None and await store.leases.record(term, [DOWN])
    bus: Any = Published()
    up: tuple[str, ...] | None = None
    forgetter = LeaseForgetter(store, bus, clock=SystemClock(), cell="c1", up=lambda: up)
    assert (await code_of(forgetter)) == "service.unsure"
    up = ("s1", "s3")
    assert (await code_of(forgetter)) == "service.up"
    up = ("s1",)
    there = replace(run(on("s3", "s1")).instance, state=State.ACTIVE)
    async with store.transaction() as transaction:
        await transaction.insert([there])
    assert (await code_of(forgetter)) == "service.has_instances"
    async with store.transaction() as transaction:
        await transaction.lock([UUID])
        await transaction.update([replace(there, state=State.DELETED)])
    assert bus.sent == [] and await store.leases.leases() == [DOWN]
    for removed in (True, False):
        outcome = await forgetter.forget(ORDER)
        assert isinstance(outcome, Done) and isinstance(outcome.reply, ServiceForgottenInCell)
        assert (outcome.reply.service, outcome.reply.removed) == ("s3", removed)
    assert await store.leases.leases() == []
    assert [type(one) for one in bus.sent] == [ServiceGone] * 2, "a repeat notifies those that have not received it"


async def code_of(forgetter: LeaseForgetter) -> str:
    outcome = await forgetter.forget(ORDER)
    assert isinstance(outcome, Refuse)
    return outcome.code


async def test_the_builds_and_deletes_of_its_batch_come_before_it() -> None:
    taken: list[str] = []

    class Order:
        async def take(self, _events: object, **_: object) -> None:
            taken.append("rest")

        async def forget(self, _command: ForgetServiceInCell) -> Done:
            taken.append("service")
            return Done()

    order: Any = Order()
    handlers = RequestHandlers(order, SystemClock(), forgetter=order)
    delete = CellDelete(instance_uuid=UUID, project_id="p")
    batch = [Received(one, Meta(id=str(at)), "c1", "conductor.requests") for at, one in enumerate((ORDER, delete))]
    outcomes = await handlers.requests(batch)
    assert [type(one) for one in outcomes] == [Done, Done] and taken == ["rest", "service"]


@pytest.mark.parametrize("waits", [False, True])
async def test_it_is_not_forgotten_for_an_operator_who_has_stopped_waiting(*, waits: bool) -> None:
    """The cell's database was away meanwhile, and the operator was answered that this cell does not answer."""
    forgotten: list[ForgetServiceInCell] = []

    class Forgetter:
        async def forget(self, command: ForgetServiceInCell) -> Done:
            forgotten.append(command)
            return Done()

    forgetter: Any = Forgetter()
    clock = SystemClock()
    handlers = RequestHandlers(forgetter, clock, forgetter=forgetter)
    left_s = 3600.0 if waits else -1.0
    received = Received(ORDER, Meta(id="1"), "c1", "conductor.requests", left_s=lambda: left_s)
    assert await handlers.requests([received]) == [Done()]
    assert forgotten == ([ORDER] if waits else [])
