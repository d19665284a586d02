"""A compute service that is lost in a cell whose database was set back: no build fails over from what it forgot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.cell import ServicesDigest
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.engine import Engine
from cell_conductor.lease_keeper import AFTER_LOSS_S, LeaseKeeper, pages_of
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from tests.unit.conductor.scenario import UUID, on, run
from tests.unit.conductor.world import Queried, Relay


async def test_no_build_leaves_a_lost_service_while_its_result_may_come_again() -> None:
    """Seed 1795410983: a client was informed of `active`, the database forgot that in a crash, the service was silent
    meanwhile, and the build went on elsewhere although its machine ran.
    """
    table, relay, config, now = MemoryInstanceTable(SystemClock()), Relay(), ConductorConfig(), 100.0
    clock: Any = SimpleNamespace(time=lambda: now, monotonic=lambda: now)
    bus: Any = Queried()
    store = MemoryInstances(session := table.session())
    await store.open()
    keeper = LeaseKeeper(store, bus, clock=clock, config=config, cell="c1", process="p")  # type: ignore[arg-type]
    engine = Engine(store=store, bus=bus, relay=relay, clock=clock, config=config, cell="c1", down=keeper.down)  # type: ignore[arg-type]
    async with store.transaction() as transaction:
        await transaction.insert([run(on("s1", "s2")).instance])
    (silent,) = pages_of({"s1": Lease(service="s1", epoch=1, state=LeaseState.SILENT, reason="why")})
    digest = ServicesDigest(cell="c1", term=1, number=1, down=silent)
    await keeper.handle([Received(digest, Meta(id="m"), "c1", "conductor.leases")])
    session.losses += 1  # the database has died
    for wait_s, state in ((0.0, State.BUILDING), (AFTER_LOSS_S - 0.1, State.BUILDING), (0.2, State.CLAIMING)):
        now += wait_s
        await keeper._fail_over(engine)
        assert table.instances[UUID].state is state


async def test_no_build_leaves_a_lost_service_before_the_database_was_compared() -> None:
    """The keeper failed builds over from restored leases and records before a sweep had doubted them."""
    table, relay, config = MemoryInstanceTable(clock := SystemClock()), Relay(), ConductorConfig()
    bus: Any = Queried()
    store = MemoryInstances(table.session())
    await store.open()
    keeper = LeaseKeeper(store, bus, clock=clock, config=config, cell="c1", process="p")  # type: ignore[arg-type]
    engine = Engine(store=store, bus=bus, relay=relay, clock=clock, config=config, cell="c1", down=keeper.down)  # type: ignore[arg-type]
    building = run(on("s1", "s2")).instance
    async with store.transaction() as transaction:
        await transaction.insert([building])
    (silent,) = pages_of({"s1": Lease(service="s1", epoch=1, state=LeaseState.SILENT, reason="why")})
    digest = ServicesDigest(cell="c1", term=1, number=1, down=silent)
    await keeper.handle([Received(digest, Meta(id="m"), "c1", "conductor.leases")])
    table.place += 1  # an operator restores a backup

    async def recorded() -> Instance:
        async with store.transaction() as transaction:
            return (await transaction.lock([UUID]))[UUID]

    for _ in range(2):
        await keeper._fail_over(engine)
        keeper._fail_over_at = 0.0
        found = await recorded()
        assert (found.state, found.doubted) == (State.BUILDING, True)
    assert not relay.sent, "nothing is destroyed"
