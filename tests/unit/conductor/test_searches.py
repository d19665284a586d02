"""The search for machines that a database which was set back may have forgotten holds up nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.cell import FindMachines
from bus.contracts.placement import ReleaseResult
from cell_conductor import engine
from cell_conductor.domain.instance import Instance
from cell_conductor.side_tasks import search_forever
from tests.unit.conductor.move_scenario import OTHER
from tests.unit.conductor.scenario import UUID
from tests.unit.conductor.test_search import Conductor, Services
from tests.unit.conductor.test_transfers_set_back import held


async def conductor_of(services: Services, *instances: Instance) -> Conductor:
    conductor = Conductor(services, ("s1",))
    await conductor.store.open()
    async with conductor.store.transaction() as transaction:
        await transaction.insert([replace(one, deadline=1.0) for one in instances])
    return conductor


class Silent(Services):
    """A service that is up takes no queries; placement answers at once."""

    def __init__(self) -> None:
        super().__init__(s1=())
        self.under_way = 0
        self.most = 0
        self.released: list[str] = []
        self.has_begun, self.answers, self.all_released = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def request_all(self, messages: Sequence[Any], *_: Any, **__: Any) -> list[Any]:
        if not all(isinstance(one, FindMachines) for one in messages):
            self.released += [one.consumer for one in messages]
            if len(self.released) == 3:
                self.all_released.set()
            return [ReleaseResult(outcome="released") for _ in messages]
        self.under_way += 1
        self.has_begun.set()
        self.most = max(self.most, self.under_way)
        await self.answers.wait()
        self.under_way -= 1
        return await super().request_all(messages)


async def test_a_service_that_does_not_answer_holds_up_no_other_instance() -> None:
    """Each sweep with such a move waited for it, 10 of each 15 s."""
    first, second = (replace(held().instance, uuid=f"{UUID[:-1]}{n}") for n in (7, 8))
    conductor = await conductor_of(services := Silent(), first, replace(first, uuid=OTHER, doubted=False))
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        searching = group.create_task(search_forever(conductor.engine, SystemClock()))
        await conductor.engine.sweep()
        assert services.released == [OTHER]
        await services.has_begun.wait()
        async with conductor.store.transaction() as transaction:
            await transaction.insert([replace(second, deadline=1.0)])
        await conductor.engine.sweep()
        for _ in range(100):
            await asyncio.sleep(0)
        assert (services.most, services.released) == (1, [OTHER])
        services.answers.set()
        await services.all_released.wait()
        searching.cancel()
    assert services.most == 1


async def test_what_has_changed_during_the_search_is_not_requested_any_more() -> None:
    conductor = await conductor_of(services := Silent(), held().instance)
    await conductor.engine.sweep()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(conductor.engine.search())
        await services.has_begun.wait()
        async with conductor.store.transaction() as transaction:
            (now,) = (await transaction.lock([UUID])).values()
            await transaction.update([replace(now, newest=now.newest + 5)])
        services.answers.set()
    assert services.released == []


async def test_a_bounded_number_of_instances_waits_for_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_UNSEARCHED", 2)
    three = [replace(held().instance, uuid=f"{UUID[:-1]}{n}") for n in range(3)]
    conductor = await conductor_of(services := Silent(), *three)
    await conductor.engine.sweep()
    services.answers.set()
    await conductor.engine.search()
    assert [len(one.instance_uuids) for one in services.queried] == [2] and len(services.released) == 2
