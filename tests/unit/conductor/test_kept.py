"""What an operator keeps stays, and nothing is begun in its place, until it is proved to be gone."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.cell import RescanHosts, Running
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.instance import Instance, State
from cell_conductor.store.safety import KEEP
from tests.unit.conductor.scenario import SPEC, UUID, selection
from tests.unit.conductor.world import Conductor, Quiet, Services, hosts_of, listing


class Reported(Conductor):
    """A conductor whose operator keeps a machine on host 1. Its instance, deleted by its record, proves it over."""

    async def begin(self) -> None:
        await self.store.open()
        gone = Instance(uuid=UUID, state=State.DELETED, spec=SPEC, selections=(selection(1),), attempt=1)
        async with self.store.transaction() as transaction:
            await transaction.insert([gone])
        await self.keep(1, KEEP)
        self.bus: Any = Quiet()
        self.sequence = 0
        self.own = Running(instance_uuid=UUID, attempt=1, deployment=self.store.deployment)
        self.hosts = hosts_of(self.engine, self.store, SystemClock(), ConductorConfig(), self.bus, up=lambda: self.up)

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


async def kept_on_host_1() -> Reported:
    conductor = Reported(Services(s1=(), s2=()), ("s1", "s2"))
    await conductor.begin()
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


@pytest.mark.parametrize("up", [("s1", "s2"), ("s2",)], ids=["both are up", "the first one is down"])
async def test_a_second_service_of_its_host_proves_nothing_while_the_first_is_up(up: tuple[str, ...]) -> None:
    conductor = await kept_on_host_1()
    conductor.up = up
    await conductor.report(conductor.own)
    await conductor.report(service="s2")
    await conductor.report(service="s2", rescans=conductor.rescans)
    assert await conductor.kept() == ([KEEP] if "s1" in up else [])


async def test_what_a_record_explains_by_now_is_kept_no_more() -> None:
    conductor = await kept_on_host_1()
    await conductor.report(conductor.own)
    up = Instance(uuid=UUID, state=State.ACTIVE, spec=SPEC, selections=(selection(1),), attempt=1)
    async with conductor.store.transaction() as transaction:
        await transaction.lock([UUID])
        await transaction.update([up])
    await conductor.report(conductor.own)
    assert await conductor.kept() == []
