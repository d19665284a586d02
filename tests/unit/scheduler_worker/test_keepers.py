"""Small parts of loops and handlers: waiting for a change, remembered refusals, a named host, a fence's command."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received, Refuse
from bus.contracts.base import Meta
from bus.contracts.cell import HostReport, HostStates
from bus.contracts.objects import FenceRecord, ObjectKind, StoredObject
from bus.contracts.operations import AdminState, SetAdminState
from nova_scheduler.rpc.intake import TopicIntake
from scheduler_worker import metrics as metrics_module
from scheduler_worker import operator_handler as changes
from scheduler_worker.fleet.host_listener import HostsListener, Warmup
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.objects.object_registry import changed_within
from scheduler_worker.objects.operator_changes import _orders
from scheduler_worker.operator_handler import REFUSED_BEFORE, OperatorHandler, RefusedCommands
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent
from tests.kit.virtual_time import on_virtual_time
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts


@pytest.mark.parametrize(
    ("seconds", "changes_after_s", "changed", "took_s"),
    [
        (-1.0, None, False, 0.0), (0.0, None, False, 0.0), (2.0, None, False, 2.0), (2.0, 1.0, True, 1.0),
        (None, 5.0, True, 5.0), (2.0, 0.0, True, 0.0),
    ],
)  # fmt: skip
def test_a_change_is_waited_for_and_cleared(
    seconds: float | None, changes_after_s: float | None, changed: bool, took_s: float
) -> None:
    @on_virtual_time
    async def test() -> None:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        if changes_after_s is not None:
            loop.call_later(changes_after_s, event.set)
            await asyncio.sleep(0)
        begun_s = loop.time()
        assert await changed_within(event, seconds) is changed
        assert loop.time() - begun_s == pytest.approx(took_s, abs=1e-3)
        assert not event.is_set()

    test()


async def test_of_so_many_refusals_the_newest_reasons_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_REASONS", 2)
    store = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    store.publish_through(Sent())  # type: ignore[arg-type]
    await store.open()
    refused = RefusedCommands(store)
    for number in range(4):
        await refused.add(f"m{number}", Refuse(f"code.{number}", "no"))
    found = [await refused.find(f"m{number}") for number in range(5)]
    assert [one and one.code for one in found] == [REFUSED_BEFORE, REFUSED_BEFORE, "code.2", "code.3", None]
    await store.close()


LEFT, UNSEEN = 1, 2  # h1 was of c1 and has left its service; h2 was never reported


@pytest.mark.parametrize(
    ("cell", "host", "fences", "found"),
    [
        ("c1", "h0", {}, [0]),
        ("c2", "h0", {}, []),
        ("c1", "h1", {}, [LEFT]),
        ("c2", "h1", {}, []),
        ("c1", "h1", {LEFT: "c2"}, [LEFT]),  # its last cell is newer than its fence
        ("c2", "h1", {LEFT: "c2"}, []),
        ("c2", "h2", {UNSEEN: "c2"}, [UNSEEN]),
        ("c1", "h2", {UNSEEN: "c2"}, []),
        ("c1", "h2", {}, [UNSEEN]),  # its uuid is enough
        (None, "h2", {}, [UNSEEN]),
    ],
)
def test_the_host_that_a_command_means(cell: str | None, host: str, fences: dict[int, str], found: list[int]) -> None:
    hosts = Hosts([PLENTY] * 3)
    hosts.table = hosts.selector.table = HostTable()
    for sequence, names in ((1, ("h0", "h1")), (2, ("h0",))):
        reports = tuple(HostReport(uuid=hosts.uuids[int(name[1])], name=name) for name in names)
        reported = HostStates(
            service="s", cell="c1", epoch=1, sequence=sequence, hosts=reports, complete=True
        )  # fmt: skip
        hosts.table.apply(reported, 0.0)
    registry: Any = SimpleNamespace(
        fences={hosts.uuids[at]: FenceRecord(host=f"h{at}", version=1, cell=its) for at, its in fences.items()},
        decision_of=lambda _: None,
    )
    never: Any = None
    handler = OperatorHandler(
        registry,
        hosts.selector,
        never,
        never,
        never,
        refused=never,
        find_cells=never,
        warmup=Warmup(hosts.selector, clock=SystemClock()),
    )
    named = hosts.uuids[UNSEEN] if host == "h2" else host
    command = SetAdminState(host=named, state=AdminState.FENCED, by="ann", reason="gone", cell=cell)
    assert sorted(handler._find(command)) == sorted(hosts.uuids[at] for at in found)


async def test_a_listener_applies_what_its_own_cell_reports_and_counts_its_hosts() -> None:
    table, bus, never = HostTable(), SimpleNamespace(name="c1"), SimpleNamespace()
    listener = HostsListener(
        bus, table, never, never, clock=SystemClock(), rng=random.Random(1), again_s=1.0  # type: ignore[arg-type]
    )  # fmt: skip
    for cell, first in (("c1", 1), ("c2", 5)):
        hosts = tuple(
            HostReport(uuid=f"{at:08}-0000-4000-8000-000000000000", name=f"h{at}") for at in (first, first + 1)
        )
        message = HostStates(service="s", cell=cell, epoch=1, sequence=1, hosts=hosts, complete=True)
        assert await listener([Received(message=message, meta=Meta(id="m"), bus="c1", queue="q")]) == [Done()]
        assert len(table) == metrics_module.KNOWN_HOSTS._value.get() == 2


@pytest.mark.parametrize(("cell", "sent"), [("c1", ["c1"]), (None, [])])
def test_the_order_about_a_fence_goes_to_its_cell(cell: str | None, sent: list[str]) -> None:
    uuid = "00000001-0000-4000-8000-000000000000"
    record = FenceRecord(host="h1", version=2, cell=cell)
    stored = StoredObject(kind=ObjectKind.FENCE, name=uuid, body=msgspec.to_builtins(record), version=2)
    objects = {(ObjectKind.FENCE, uuid): stored}
    assert [one.bus for one in _orders(objects, [uuid, "another"])] == sent


async def test_a_call_that_is_taken_over_counts_until_that_has_ended() -> None:
    never: Any = None
    changed: list[int] = []
    entrance = TopicIntake(
        never, "fronts", clock=SystemClock(), refused=lambda _: None, changed=lambda: changed.append(len(entrance))
    )
    go_on = asyncio.Event()

    async def take_over(*_: object) -> None:
        await go_on.wait()

    entrance._forward = take_over  # type: ignore[method-assign,assignment]
    for _ in range(2):
        entrance.add(never, never)
    running = asyncio.create_task(entrance.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(entrance) == 2, "one is under way and one waits"
    go_on.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(entrance) == 0 and changed == [1, 0]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
