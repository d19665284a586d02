"""What a compute service publishes: its scans and inventory, and a later number under its own name."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import MAX_EPOCH, Message, Meta
from bus.contracts.cell import ComputeResult, Heartbeat, HostStates, ReportHosts, RescanHosts, ServiceSuperseded
from bus.contracts.placement import InventoryStale, InventoryUpdate, ProviderReport
from bus.transport import BusUnavailable
from compute_agent.attempts.results import Results
from compute_agent.driver import DriverHost, DriverUnavailable, Tree
from compute_agent.handlers import ComputeHandlers
from compute_agent.hosts import heartbeats as reporting
from compute_agent.hosts.heartbeats import Reporter
from compute_agent.hosts.inventory_reporter import InventoryReporter
from compute_agent.hosts.pending_reports import UNDONE_S, PendingHostReports, PendingPublisher, PendingReport
from compute_agent.hosts.service_name import ServiceName, ServiceNameInUse
from compute_agent.hosts.startup_gate import StartupGate
from compute_agent.records.attempt import AttemptPhase, HostAttempt
from compute_agent.records.records import FARTHEST, Records

# --- the reporter's messages about its own scans


HOST = "10000000-0000-4000-8000-000000000001"


class SlowWorld:
    """A driver that takes a minute to list, its clock, and a bus that keeps what is published."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.published: list[Message] = []
        self.sent = asyncio.Event()

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()

    async def load_hosts(self) -> Sequence[DriverHost]:
        self.now += 30.0
        return [DriverHost(uuid=HOST, name="h", enabled=True, disabled_reason="", attributes={})]

    async def running(self, hosts: Sequence[str] | None = None) -> dict[str, list[tuple[str, int]]]:
        self.now += 30.0
        return {}

    async def publish(self, message: Message, *, cause: str = "") -> None:
        self.published.append(message)
        self.sent.set()

    async def publish_all(self, messages: Sequence[tuple[Message, str]]) -> None:
        raise AssertionError


def everything_offered(world: Any, records: Records) -> StartupGate:
    offering = StartupGate(world, service="s", records=records, clock=world, on_ready=lambda _: None)
    offering.opened.set()
    return offering


def reporter_of(world: Any, records: Records, changes: PendingHostReports) -> Reporter:
    return Reporter(
        world, service="s", cell="c1", scanner=world, records=records, changes=changes, clock=world,
        startup_gate=everything_offered(world, records), rng=random.Random(1), heartbeat_interval_s=1.0,
        report_interval_s=60.0,
    )  # fmt: skip


def inventory_of(world: Any, records: Records, changes: PendingHostReports, **more: Any) -> InventoryReporter:
    return InventoryReporter(
        world, service="s", driver=world, records=records, changes=changes, clock=world,
        startup_gate=everything_offered(world, records), rng=random.Random(1), report_interval_s=60.0, **more,
    )  # fmt: skip


@asynccontextmanager
async def working(*works: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """These side by side, for as long as the block runs."""
    tasks = [asyncio.ensure_future(work()) for work in works]
    try:
        async with asyncio.timeout(60):
            yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def announced(world: Any, records: Records) -> None:
    """A reporter starts, publishes everything once, and ends."""
    world.sent.clear()
    async with working(reporter_of(world, records, PendingHostReports(world)).report_hosts):
        await world.sent.wait()


def reports_in(world: SlowWorld) -> list[HostStates]:
    return [message for message in world.published if isinstance(message, HostStates)]


def later_scan(*hosts: str) -> RescanHosts:
    """A conductor's request for one."""
    return RescanHosts(service="s", hosts=hosts, rescans=("60000000-0000-4000-8000-000000000001",))


async def test_a_report_is_as_old_as_the_beginning_of_the_look() -> None:
    world = SlowWorld()
    await announced(world, Records())
    (report,) = reports_in(world)
    assert (report.seen_at, world.now) == (1000.0, 1060.0)
    assert [host.running for host in report.hosts] == [None], "a host that the driver did not see proves nothing lost"


async def test_item_16_many_hosts_are_put_into_pages_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 hosts were one turn of some 50 ms, at every report."""
    monkeypatch.setattr(reporting, "HOSTS_AT_ONCE", 2)
    world, turn, read = SlowWorld(), 0, Counter[int]()
    hosts = [DriverHost(uuid=f"{at:08x}{HOST[8:]}", name="h", enabled=True, disabled_reason="") for at in range(7)]

    async def load_hosts() -> Sequence[DriverHost]:
        return hosts

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def failed_builds(host: str) -> int:
        read[turn] += 1
        return 0

    monkeypatch.setattr(world, "load_hosts", load_hosts)
    records = Records()
    monkeypatch.setattr(records, "failed_builds", failed_builds)
    counting = asyncio.create_task(count())
    await announced(world, records)
    counting.cancel()
    (report,) = reports_in(world)
    assert [host.uuid for host in report.hosts] == [host.uuid for host in hosts]
    assert sum(read.values()) == 7 and max(read.values()) <= 2


class Building(SlowWorld):
    """A machine comes to be while the driver lists."""

    def __init__(self) -> None:
        super().__init__()
        self.records = Records()
        self.results: list[ComputeResult] = []
        self.answers = Results("s", self.results.append, self, self.records)

    async def running(self, hosts: Sequence[str] | None = None) -> dict[str, list[tuple[str, int]]]:
        self.answers.send_result((HOST, HOST), HostAttempt(1, AttemptPhase.RUNNING))
        return {}


async def test_a_result_that_is_published_during_a_scan_is_not_older_than_it() -> None:
    """The look may have missed the machine: only a later one proves it lost, whatever the clock reads."""
    world = Building()
    world.records.start(world.now)
    world.answers.send_result((HOST, HOST), HostAttempt(1, AttemptPhase.RUNNING))
    for _ in range(2):
        await announced(world, world.records)
    reports = reports_in(world)
    assert [result.scan for result in world.results] == [0, 1, 2]
    assert [report.scan for report in reports] == [1, 2]
    assert {sent.epoch for sent in (*world.results, *reports)} == {world.records.epoch}


class QuickWorld(SlowWorld):
    """The same without waiting; its updates are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = asyncio.Queue[InventoryUpdate]()
        self.announced = asyncio.Queue[Message]()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)

    async def load_hosts(self) -> Sequence[DriverHost]:
        return await self.hosts()

    async def running(self, hosts: Sequence[str] | None = None) -> dict[str, list[tuple[str, int]]]:
        return {}

    async def hosts(self) -> Sequence[DriverHost]:
        return [DriverHost(uuid=HOST, name="h")]

    async def inventory(self, hosts: Sequence[str] | None = None) -> Sequence[Tree]:
        return [(ProviderReport(uuid=uuid, name="h"),) for uuid in hosts or (HOST,)]

    async def publish(self, message: Message, *, cause: str = "") -> None:
        self.announced.put_nowait(message)

    async def publish_all(self, messages: Sequence[tuple[Message, str]]) -> None:
        for message, _ in messages:
            assert isinstance(message, InventoryUpdate)
            self.updates.put_nowait(message)


OTHER_HOST = "10000000-0000-4000-8000-000000000002"


class Shrinking(QuickWorld):
    """Its hosts are those of `left`."""

    def __init__(self, *left: str) -> None:
        super().__init__()
        self.left = left

    async def sleep(self, seconds: float) -> None:
        self.sent.set()  # between two publications
        await asyncio.Event().wait()

    async def hosts(self) -> Sequence[DriverHost]:
        return [DriverHost(uuid=uuid, name=uuid) for uuid in self.left]

    async def inventory(self, hosts: Sequence[str] | None = None) -> Sequence[Any]:
        return [(ProviderReport(uuid=uuid, name=uuid),) for uuid in hosts or ()]

    def updated(self) -> list[InventoryUpdate]:
        """All that were published."""
        return [self.updates.get_nowait() for _ in range(self.updates.qsize())]


@pytest.mark.parametrize(
    ("left", "runs", "leaves"), [((HOST,), False, True), ((), False, False), ((HOST,), True, False)]
)
async def test_a_host_that_its_service_no_longer_has_leaves_the_book(
    tmp_path: Path, left: tuple[str, ...], *, runs: bool, leaves: bool
) -> None:
    """It stayed for ever. One with a machine on record stays, and no list at all proves nothing."""

    async def published(life: int, *hosts: str) -> list[tuple[str, bool]]:
        world: Any = Shrinking(*hosts)
        records = Records(tmp_path / "journal")
        records.open()
        records.start(1000.0 + life)
        if runs:
            records.put((OTHER_HOST, "i"), HostAttempt(1, AttemptPhase.RUNNING))
        async with working(inventory_of(world, records, PendingHostReports(world)).report):
            await world.sent.wait()
        records.close()
        return [(one.root_uuid, bool(one.providers)) for one in world.updated()]

    assert await published(1, HOST, OTHER_HOST) == [(HOST, True), (OTHER_HOST, True)]
    gone = [(OTHER_HOST, False)] if leaves else []
    assert await published(2, *left) == [*gone, *((host, True) for host in left)]
    if leaves:
        assert await published(3, *left) == [(HOST, True)], "once"


class Dying(Shrinking):
    """Its process dies when placement has the updates, and before it knows that."""

    async def publish_all(self, messages: Sequence[tuple[Message, str]]) -> None:
        await super().publish_all(messages)
        self.sent.set()
        await asyncio.Event().wait()


async def test_a_host_published_by_a_process_that_died_leaves_the_book(tmp_path: Path) -> None:
    """That it is in placement was written down after it was, so one that its driver had no more stayed there."""
    worlds: list[Any] = [Dying(HOST, OTHER_HOST), Shrinking(HOST)]
    for life, world in enumerate(worlds):
        records = Records(tmp_path / "journal")
        records.open()
        records.start(1000.0 + life)
        async with working(inventory_of(world, records, PendingHostReports(world)).report):
            await world.sent.wait()
        records.close()
    assert [(one.root_uuid, bool(one.providers)) for one in worlds[1].updated()] == [(OTHER_HOST, False), (HOST, True)]


async def test_a_host_that_is_gone_is_taken_from_no_other_service(tmp_path: Path) -> None:
    """Found by reading: a host that was released to this service, and that its driver had no more, took the tree of the
    service that had it before out of placement.
    """
    world: Any = Shrinking(HOST)
    records = Records(tmp_path / "journal")
    records.open()
    records.start(1000.0)
    records.record_in_placement([HOST, OTHER_HOST], is_in=True)
    inventory = inventory_of(world, records, PendingHostReports(world), take_over=lambda _: "compute:other")
    async with working(inventory.report):
        await world.sent.wait()
    records.close()
    assert {one.root_uuid: one.former_reporter for one in world.updated()} == {OTHER_HOST: None, HOST: "compute:other"}


async def test_the_inventory_of_a_host_that_changed_is_published_once_more() -> None:
    """A late message of the service's former process undid the first one; for ten reports that stayed so."""
    world: Any = QuickWorld()
    records = Records()
    changes = PendingHostReports(world)
    reporter, inventory = reporter_of(world, records, changes), inventory_of(world, records, changes)
    async with working(reporter.report_hosts, inventory.report):
        await world.updates.get()  # all, at start
        await world.announced.get()
        changes.on_host_changed([HOST])
        first = await world.updates.get()
        await world.announced.get()
        changes.on_request()
        await world.announced.get()
        assert world.updates.empty(), "not yet: who undoes it is still on the way"
        world.now += UNDONE_S
        changes.on_request()
        again = await world.updates.get()
        assert again.version > first.version
        await world.announced.get()
        world.now += UNDONE_S
        changes.on_request()
        await world.announced.get()
    assert world.updates.empty()


class Requested(SlowWorld):
    """A conductor's request for a later scan comes while the driver lists."""

    def __init__(self) -> None:
        super().__init__()
        self.scans = 0
        self.on_scan: Any = None
        self.on_later_scan: Any = None

    async def has_published(self, number: int) -> None:
        while len(self.published) < number:
            self.sent.clear()
            await self.sent.wait()

    async def running(self, hosts: Sequence[str] | None = None) -> dict[str, list[Any]]:
        self.scans += 1
        if self.scans == 1:
            self.on_scan()
        elif self.scans == 2 and self.on_later_scan is not None:
            self.on_later_scan()
        return {HOST: []}

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


async def test_a_scan_names_the_looks_that_were_requested_before_it_began() -> None:
    """A scan that was under way may have passed the host before the machine came to be."""
    world, records = Requested(), Records()
    changes = PendingHostReports(world)  # type: ignore[arg-type]
    command = later_scan(HOST)
    world.on_scan = lambda: changes.on_rescan(command)
    async with working(reporter_of(world, records, changes).report_hosts):
        await world.has_published(2)
        changes.on_request()
        await world.has_published(3)
    reports = reports_in(world)
    assert [one.rescans for one in reports] == [(), command.rescans, ()], "each rescan is named once"
    assert [one.uuid for one in reports[1].hosts] == [HOST]


class Refusing(Requested):
    """The bus takes no message at first, and a conductor's request comes meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals = 0

    async def load_hosts(self) -> Sequence[DriverHost]:
        return [DriverHost(uuid=uuid, name=uuid) for uuid in (HOST, OTHER_HOST)]

    async def running(self, hosts: Sequence[str] | None = None) -> dict[str, list[Any]]:
        return {uuid: [] for uuid in hosts or (HOST, OTHER_HOST)}

    async def publish(self, message: Message, *, cause: str = "") -> None:
        if self.refusals:
            self.refusals -= 1
            self.on_scan()
            raise BusUnavailable("away")
        await super().publish(message)


async def test_a_report_that_names_a_look_has_its_hosts_after_a_failure_too() -> None:
    """Found by reading: what was published again named it without its host, and nothing named it with it."""
    world, records = Refusing(), Records()
    changes = PendingHostReports(world)  # type: ignore[arg-type]
    command = later_scan(OTHER_HOST)
    world.on_scan = lambda: changes.on_rescan(command)
    async with working(reporter_of(world, records, changes).report_hosts):
        await world.has_published(1)
        world.refusals = 1
        changes.on_failures_changed(HOST)
        await world.has_published(2)
    reports = reports_in(world)
    assert {OTHER_HOST} == {host.uuid for one in reports if one.rescans for host in one.hosts} - {HOST}


async def test_a_look_that_is_requested_again_while_it_is_taken_is_taken_once() -> None:
    """Found by reading: each such request made a report more, which named no look, and so led to the next request."""
    world, records = Requested(), Records()
    changes = PendingHostReports(world)  # type: ignore[arg-type]
    command = later_scan(HOST)
    world.on_scan = world.on_later_scan = lambda: changes.on_rescan(command)
    async with working(reporter_of(world, records, changes).report_hosts):
        await world.has_published(2)
        for _ in range(20):
            await asyncio.sleep(0)
    reports = reports_in(world)
    assert [one.rescans for one in reports] == [(), command.rescans]


async def test_an_unavailable_driver_is_queried_again_within_a_second() -> None:
    """It was asked at intervals of up to ten seconds, so that a free node was offered long after Ironic's return."""
    slept: list[float] = []
    failures = 12
    done = asyncio.Event()

    class NotingClock(SlowWorld):
        async def sleep(self, seconds: float) -> None:
            slept.append(seconds)
            await asyncio.sleep(0)

    async def publish(_: list[str] | None) -> None:
        if len(slept) < failures:
            raise DriverUnavailable("away")
        done.set()

    clock: Any = NotingClock()
    publisher = PendingPublisher(PendingReport(), clock=clock, rng=random.Random(1), interval_s=60.0)
    async with working(partial(publisher.run, publish)):
        await done.wait()
    assert max(slept[:failures]) <= 1.0


# --- a compute service that receives a later number under its own name than any of its own (seeds 1035 and 27)


ROOT = "10000000-0000-4000-8000-000000000001"


class Rig:
    """A service's records, its reporter, its name and its handlers; nothing is published."""

    def __init__(self, path: Path | None = None) -> None:
        self.clock = SystemClock()
        self.records = Records(path)
        self.records.open()
        self.records.start(1000.0)
        nothing: Any = None
        self.changes = PendingHostReports(self.clock)
        self.reporter = Reporter(
            nothing, service="s", cell="c", scanner=nothing, records=self.records, changes=self.changes,
            startup_gate=nothing, clock=self.clock, rng=random.Random(1), heartbeat_interval_s=1.0,
            report_interval_s=60.0,
        )  # fmt: skip
        self.name = ServiceName(nothing, service="s", cell="c", records=self.records, clock=self.clock, wait_s=0.0)
        self.handlers = ComputeHandlers(
            nothing,
            service="s",
            wait_for_capacity=nothing,
            on_report_requested=self.changes.on_request,
            on_heartbeat=self.name.on_heartbeat,
            superseded=self.reporter.on_superseded,
            on_barrier=nothing,
            pending_destroys=nothing,
            reserve=nothing,
            on_rescan=self.changes.on_rescan,
            look_up=nothing,
            list_machines=nothing,
            sync=self.records.sync,
            may_predate_restore=self.records.may_predate_restore,
        )
        self.changes.announcements.take()
        self.changes.inventory.take()

    async def receive(self, *messages: Message) -> None:
        batch: Sequence[Received] = [Received(one, Meta(id="m"), "c", "compute.control.s") for one in messages]
        await self.handlers.control(batch)

    @property
    def announces_all(self) -> tuple[bool, bool]:
        """Whether all hosts are to be announced, and all inventory published."""
        return self.changes.announcements.everything, self.changes.inventory.everything


async def test_it_goes_on_above_an_epoch_of_its_name_and_publishes_everything_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "journal")
    assert rig.records.epoch == 1_000_000
    await rig.receive(ServiceSuperseded(service="s", epoch=5_000_000))
    assert rig.records.epoch == 5_000_001
    assert rig.announces_all == (True, True)
    rig.records.close()
    again = Records(tmp_path / "journal")
    again.open()
    assert again.start(1000.0) == 5_000_002, "and so does its next life"


async def test_it_goes_on_above_a_version_that_the_book_has_of_it() -> None:
    rig = Rig()
    known = rig.records.versions(1, 2000.0) + 10**9
    await rig.receive(InventoryStale(reporter="compute-s", root_uuid=ROOT, version=known))
    assert rig.records.versions(1, 1000.0) > known
    assert rig.announces_all == (True, True)


@pytest.mark.parametrize(
    "message",
    [
        ServiceSuperseded(service="s", epoch=1_000_000),
        ServiceSuperseded(service="s", epoch=999),
        ServiceSuperseded(service="another", epoch=5_000_000),
        InventoryStale(reporter="compute-s", root_uuid=ROOT, version=1),
        InventoryStale(reporter="compute-another", root_uuid=ROOT, version=2**61),
        InventoryStale(reporter="compute-s", root_uuid=ROOT, version=FARTHEST + 1),
        ServiceSuperseded(service="s", epoch=MAX_EPOCH),
    ],
)
async def test_a_late_copy_anothers_word_and_what_leaves_no_room_change_nothing(message: Message) -> None:
    rig = Rig()
    rig.records.versions(1, 2000.0)
    before = (rig.records.epoch, rig.records.version)
    await rig.receive(message)
    assert (rig.records.epoch, rig.records.version) == before
    assert rig.announces_all == (False, False)
    await rig.receive(ReportHosts())
    assert rig.announces_all == (True, False)


async def test_its_own_heartbeats_from_before_are_not_anothers() -> None:
    rig = Rig()
    await rig.receive(ServiceSuperseded(service="s", epoch=5_000_000))
    for sequence in (1, 2, 3):
        await rig.receive(Heartbeat(service="s", cell="c", epoch=1_000_000, sequence=sequence))
    await rig.receive(Heartbeat(service="s", cell="c", epoch=4_000_000, sequence=1))
    with pytest.raises(ServiceNameInUse):
        await rig.receive(Heartbeat(service="s", cell="c", epoch=4_000_000, sequence=2))
