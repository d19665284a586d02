"""What the cells' databases tell of hosts: hostile rows, what is read again, how long it counts, and where it goes."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.contracts.host_metrics import NUM_INSTANCES, NUM_IO_OPS
from bus.contracts.placement_queries import ConsumerRecord
from bus.faults import Fault
from bus.service.settings import SettingsError
from nova_scheduler.cloud import host_facts, in_flight
from nova_scheduler.cloud.cell_database import CellDatabase, RowVersions, parse_rows
from nova_scheduler.cloud.facts_poller import HostFactsPoller
from nova_scheduler.cloud.host_facts import (
    MAX_STATS,
    MAX_TEXT,
    CellRead,
    HostFacts,
    HostHardware,
    HostStats,
    KnownRow,
    NodeRow,
    TakenRead,
    hardware_of,
)
from nova_scheduler.cloud.in_flight import InstancesInFlight
from nova_scheduler.cloud.rest import NovaUnavailable
from nova_scheduler.filters.pci import PCI_DEVICES
from placement_worker.replica.request import Query
from scheduler_worker.filters.image import SUPPORTED
from scheduler_worker.hosts.host_metrics import HostMetricsTable
from scheduler_worker.placement_client import PlacementUnavailable
from scheduler_worker.selection.request_spec import RequestSpec
from tests.kit.virtual_time import on_virtual_time
from tests.unit.nova_scheduler.facts_kit import CELL1, CELL2, World, node, uuid_of
from tests.unit.nova_scheduler.test_in_flight import DEVICE, pools

PERCENT = [{"name": "cpu.percent", "value": 0.27, "timestamp": "t", "source": "s"}]
PARSED: tuple[tuple[str, str, object, str, object], ...] = (
    # name, column, its text, field, what is read (None: it cannot be)
    ("counts", "stats", {"num_instances": 3, "io_workload": 2}, "stats", HostStats(num_instances=3, num_io_ops=2)),
    ("counts as text", "stats", {"num_instances": "3", "io_workload": "-1"}, "stats",
     HostStats(num_instances=3, num_io_ops=-1)),
    ("a driver's own", "stats", {"boot_mode": "uefi", "num_vm_active": 1, "uptime": "x", "gpus": 2, "nested": {}},
     "stats", HostStats(plain={"boot_mode": "uefi", "gpus": "2"})),
    ("no stats", "stats", None, "stats", HostStats()),
    ("a list of stats", "stats", [], "stats", None),
    ("no JSON", "stats", "{", "stats", None),
    ("no number", "stats", {"num_instances": "many"}, "stats", None),
    ("no number, of digits", "stats", {"num_instances": "--5"}, "stats", None),
    ("half of a character", "stats", '{"x": "\\ud800"}', "stats", None),
    ("an endless number", "stats", '{"io_workload": 1e999}', "stats", None),
    ("a number of many digits", "stats", {"num_instances": "9" * 5000}, "stats", None),
    ("null", "stats", {"num_instances": None}, "stats", None),
    ("too many stats", "stats", {str(at): at for at in range(MAX_STATS + 1)}, "stats", None),
    ("too long", "stats", '"' + "x" * MAX_TEXT, "stats", None),
    ("deep", "stats", "[" * 100_000, "stats", None),
    ("percent", "metrics", PERCENT, "metrics", {"cpu.percent": 27.0}),
    ("whole numbers", "metrics", [{"name": "x", "value": 2.9}], "metrics", {"x": 2.0}),
    ("other numbers", "metrics", [{"name": "numa.membw.max", "numa_membw_values": {"0": 1}}], "metrics", {}),
    ("no metrics", "metrics", "", "metrics", {}),
    ("a metric without a name", "metrics", [{"value": 1}], "metrics", None),
    ("a metric out of bounds", "metrics", [{"name": "x", "value": 1e300}], "metrics", None),
    ("triples", "supported_instances", [["X86_64", "kvm", "hvm"]], "supported_instances", (("x86_64", "kvm", "hvm"),)),
    ("two of three", "supported_instances", [["x86_64", "kvm"]], "supported_instances", None),
    ("a part of two", "supported_instances", [["x86_64/kvm", "kvm", "hvm"]], "supported_instances", None),
    ("too many triples", "supported_instances", [["a", "b", "c"]] * 300, "supported_instances", None),
    ("a topology", "numa_topology", "{}", "numa_topology", "{}"),
    ("a long one", "numa_topology", "x" * (MAX_TEXT + 1), "numa_topology", None),
    ("no pools", "pci_stats", None, "pci_pools", ""),
)  # fmt: skip


@pytest.mark.parametrize(
    ("column", "given", "field", "expected"), [row[1:] for row in PARSED], ids=[r[0] for r in PARSED]
)
def test_columns(column: str, given: object, field: str, expected: object) -> None:
    text = given if given is None or isinstance(given, str) else json.dumps(given)
    found = hardware_of(NodeRow(id=1, host="h", free_disk_gb=0, **{column: text}))
    assert getattr(found, field) == expected
    assert found.unreadable == (() if expected is not None else (field,))


def test_a_row_that_was_not_written_yet_tells_nothing() -> None:
    assert hardware_of(NodeRow(id=1, host="h", stats="{", hypervisor_version=-1)) == HostHardware(host="h", nodename="")
    assert hardware_of(NodeRow(id=1, free_disk_gb=1, hypervisor_version=2**40)).hypervisor_version == 0


@pytest.mark.parametrize(
    "given", [{"uuid": "x"}, {"uuid": None}, {"host": 3}, {"stats": b"{}"}, {"hypervisor_version": "8"}], ids=str
)
def test_a_row_of_another_form_is_nobodys(given: Mapping[str, object]) -> None:
    assert parse_rows([{"id": 1, "uuid": uuid_of(1), **given}]) == {1: None}


def test_a_row_is_read_again_after_it_has_changed() -> None:
    """Its time has whole seconds: it may be written again at the same one."""
    versions, reads = RowVersions(), []
    for times in [*[{1: "t", 2: None}] * 4, {1: "u"}, {1: "t"}, {2: None}]:
        versions, due, written = versions.after(times)
        reads.append((due, sorted(written)))
    assert reads == [
        ((1, 2), [1, 2]), ((1, 2), []), ((1, 2), []), ((), []), ((1,), [1]), ((1,), [1]), ((2,), [2])
    ]  # fmt: skip


PLAIN = RequestSpec(query=Query(), flavor="", project_id="")


def known(number: int, **stats: int) -> KnownRow:
    hardware = HostHardware(host=f"host{number}", nodename=f"node{number}", stats=HostStats(**stats))
    return KnownRow(uuid=uuid_of(number), hardware=hardware)


def put(facts: HostFacts, read_s: float, rows: Mapping[int, KnownRow | None], *, cell: str = CELL1) -> None:
    """A read that finds these rows, all of them changed."""
    facts.put(cell, facts.begin(cell), CellRead(present=rows.keys(), changed=rows), read_s)


def test_facts_count_for_as_long_as_their_cell_is_read() -> None:
    facts = HostFacts([CELL2, CELL1], max_age_s=10)
    assert facts.outdated(0.0) == (CELL1, CELL2)
    put(facts, 1.0, {1: known(1), 2: known(2)})
    put(facts, 5.0, {1: known(3)}, cell=CELL2)
    assert facts.of(uuid_of(1), 11.0) and facts.of(uuid_of(3), 11.0) and facts.outdated(11.0) == ()
    assert facts.of(uuid_of(1), 11.1) is None and facts.of(uuid_of(3), 11.1) and facts.outdated(11.1) == (CELL1,)
    facts.put(CELL1, facts.begin(CELL1), CellRead(present=[1, 2], changed={}), 20.0)
    assert facts.of(uuid_of(1), 30.0), "a row that has not changed is as old as the read that found it so"
    put(facts, 21.0, {2: None})
    assert facts.hardware.keys() == {uuid_of(3)}, "one is gone, one cannot be read"
    put(facts, 22.0, {2: known(3, num_instances=7)})
    put(facts, 23.0, {}, cell=CELL2)
    assert facts.of(uuid_of(3), 23.0) == known(3, num_instances=7).hardware, "another cell has it now"


def test_a_row_is_written_where_its_time_or_what_it_tells_has_changed() -> None:
    facts, uuid = HostFacts([CELL1], max_age_s=10), uuid_of(1)

    def read(row: KnownRow | None, *written: int) -> TakenRead:
        changed = {} if row is None else {1: row}
        return facts.put(CELL1, facts.begin(CELL1), CellRead(present=[1], changed=changed, written=written), 0.0)

    assert facts.cell_of(uuid) is None
    reads = [read(known(1), 1), read(known(1)), read(known(1), 1), read(known(1, num_instances=1)), read(None)]
    assert [one.written for one in reads] == [{uuid}, set(), {uuid}, {uuid}, set()]
    facts.begin(CELL1)  # it fails
    last = read(None)
    assert (last.before, last.number, facts.begun(CELL1), facts.cell_of(uuid)) == (5, 7, 7, CELL1)


def test_what_has_not_changed_stays_the_same_object() -> None:
    """What is made of a row is kept by it."""
    facts = HostFacts([CELL1], max_age_s=10)
    put(facts, 0.0, {1: known(1)})
    before = facts.hardware[uuid_of(1)]
    put(facts, 1.0, {1: known(1)})
    assert facts.hardware[uuid_of(1)] is before


class MemoryRows:
    """A cell's database."""

    def __init__(self, cell: str, rows: Mapping[int, KnownRow | None]) -> None:
        self.cell = cell
        self.rows = dict(rows)
        self.fails = False
        self.reads = 0
        self.on: dict[str, tuple[str, str]] = {}  # {instance: where it is}

    async def read(self, instances: Sequence[str] = ()) -> CellRead:
        self.reads += 1
        await asyncio.sleep(0)
        if self.fails:
            raise NovaUnavailable("away")
        sights = {one: {self.on[one]} for one in instances if one in self.on}
        return CellRead(present=self.rows.keys(), changed=dict(self.rows), sights=sights)


class MemoryClaims:
    """What placement answers of instances; `fails`: with this fault."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, ...]] = {}
        self.fails: Fault | None = None

    async def allocations_of(self, instances: Collection[str]) -> dict[str, ConsumerRecord]:
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        return {
            one: ConsumerRecord(
                consumer=one, project_id="p", consumer_generation=1, allocations={}, hosts=self.held[one]
            )
            for one in instances
            if one in self.held
        }


def poller(
    world: World,
    facts: HostFacts,
    databases: Sequence[MemoryRows],
    flying: InstancesInFlight | None = None,
    claims: MemoryClaims | None = None,
) -> tuple[HostFactsPoller, HostMetricsTable]:
    metrics, ready = HostMetricsTable(world.table, max_age_s=900), asyncio.Event()
    ready.set()
    made = HostFactsPoller(
        databases,
        facts,
        flying or InstancesInFlight(facts, SystemClock()),
        world.facts,
        metrics,
        table=world.table,
        held=claims or MemoryClaims(),
        weighed=("cpu.percent",),
        interval_s=5.0,
        hosts_known=ready,
        clock=SystemClock(),
    )
    return made, metrics


def numbers(world: World, metrics: HostMetricsTable, name: str, *hosts: int) -> list[float | None]:
    found = metrics.values(name, np.array(world.table.indexes_of(map(uuid_of, hosts)), dtype=np.intp))
    return [None if math.isnan(one) else one for one in found.tolist()]


@on_virtual_time
async def test_what_is_read_is_put_where_filters_look() -> None:
    world = World(node(1), node(2), node(3), cells={"host1": CELL1, "host2": CELL1, "host3": CELL2})
    more: dict[str, Any] = {"supported_instances": (("s390x", "kvm", "hvm"),), "metrics": {"cpu.percent": 27.0}}
    stats = HostStats(num_instances=4, num_io_ops=1, failed_builds=2, plain={"gpus": "2", "host": "other"})
    full = HostHardware(host="host1", nodename="node1", stats=stats, **more)
    broken = HostHardware(host="host2", nodename="node2", stats=None, unreadable=("stats",))
    one = MemoryRows(
        CELL1, {1: KnownRow(uuid=uuid_of(1), hardware=full), 2: KnownRow(uuid=uuid_of(2), hardware=broken)}
    )
    two = MemoryRows(CELL2, {1: known(3, num_instances=9), 2: known(4)})
    two.fails = True
    facts = HostFacts([CELL1, CELL2], max_age_s=60)
    held = InstancesInFlight(facts, SystemClock())
    made, metrics = poller(world, facts, [one, two], held)
    with capture_logs() as logs:
        running = asyncio.create_task(made.run())
        await made.first.wait()
        await asyncio.sleep(6)
    assert numbers(world, metrics, NUM_INSTANCES, 1, 2, 3) == [4, None, None]
    assert numbers(world, metrics, NUM_IO_OPS, 1, 2, 3) == [1, None, None]
    assert numbers(world, metrics, "cpu.percent", 1, 2, 3) == [27, None, None]
    attributes = world.table.attributes[world.table.index_of(uuid_of(1)) or 0]
    assert attributes[SUPPORTED] == "s390x/kvm/hvm"
    assert (attributes["gpus"], attributes["host"]) == ("2", "host1")
    assert world.facts.supported() >= {"s390x/kvm/hvm"}
    assert world.table.failed_builds[:3].tolist() == [2, 0, 0]
    said = [log["event"] for log in logs]
    assert (said.count("nova.facts_unread"), said.count("nova.facts_unreadable")) == (2, 1)
    two.fails, revision = False, world.table.revision
    for at in (1, 4):
        held.claimed(f"instance{at}", uuid_of(at), PLAIN, {})
    await asyncio.sleep(6)
    assert numbers(world, metrics, NUM_INSTANCES, 1, 2, 3) == [5, None, 9]
    assert world.table.revision > revision
    revision = world.table.revision
    one.fails = True
    await asyncio.sleep(30)
    assert numbers(world, metrics, NUM_INSTANCES, 1, 3) == [5, 9], "what it told last counts"
    await asyncio.sleep(40)
    assert numbers(world, metrics, NUM_INSTANCES, 1, 3) == [None, 9], "until it is too old"
    assert facts.outdated(SystemClock().monotonic()) == (CELL1,)
    assert world.table.revision == revision, "numbers make no ranking anew"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    "url", ["", "mysql+pymysql://u@h/d", "odd://h", "postgresql+asyncpg://h:x/d", "sqlite+nothing://"], ids=str
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(SettingsError) as refused:
        CellDatabase(CELL1, url)
    assert refused.value.code == "nova.cell_database"


async def test_a_password_is_not_said() -> None:
    with pytest.raises(NovaUnavailable) as away:
        await CellDatabase(CELL1, "postgresql+asyncpg://u:word@127.0.0.1:1/d").read()
    assert away.value.code == "nova.cell_unavailable"
    assert "word" not in away.value.reason


def test_stats_are_bounded_before_they_are_kept() -> None:
    given = {f"k{at}": "v" for at in range(MAX_STATS)}
    found = hardware_of(NodeRow(id=1, free_disk_gb=0, stats=json.dumps(given))).stats
    assert found is not None and len(found.plain) == host_facts.MAX_PLAIN


def with_devices(number: int, count: int) -> KnownRow:
    hardware = HostHardware(host=f"host{number}", nodename=f"node{number}", pci_pools=pools(count))
    return KnownRow(uuid=uuid_of(number), hardware=hardware)


async def test_what_is_in_flight_is_seen_in_the_database_and_asked_of_placement(monkeypatch: Any) -> None:
    monkeypatch.setattr(in_flight, "ASKED_AFTER_S", 0.0)
    world = World(node(1), node(2), cells={"host1": CELL1, "host2": CELL1})
    facts, claims = HostFacts([CELL1], max_age_s=60), MemoryClaims()
    database = MemoryRows(CELL1, {1: with_devices(1, 3), 2: with_devices(2, 3)})
    held = InstancesInFlight(facts, SystemClock())
    made, metrics = poller(world, facts, [database], held, claims)
    await made.read(database)
    assert numbers(world, metrics, PCI_DEVICES, 1, 2) == [3, 3]
    spec = replace(PLAIN, devices=(DEVICE,))
    for instance, host in ((uuid_of(11), 1), (uuid_of(12), 1), (uuid_of(13), 2)):
        held.assume(instance, uuid_of(host), spec, {})
        held.claimed(instance, uuid_of(host), spec, {})
        claims.held[instance] = (uuid_of(host),)
    assert numbers(world, metrics, PCI_DEVICES, 1, 2) == [1, 2]
    assert numbers(world, metrics, NUM_INSTANCES, 1, 2) == [2, 1]
    # One is on the host, and its row is written after that; one has not come to its host; one was released.
    database.on = {uuid_of(11): ("host1", "node1"), uuid_of(12): ("host1", "another")}
    await made.read(database)
    del claims.held[uuid_of(13)]
    claims.fails = PlacementUnavailable("away")
    with capture_logs() as logs:
        await made.read(database)
    assert [one["count"] for one in logs if one["event"] == "nova.claims_unread"] == [3]
    assert numbers(world, metrics, PCI_DEVICES, 1, 2) == [1, 2]
    claims.fails = None
    database.rows[1] = with_devices(1, 2)
    await made.read(database)
    assert numbers(world, metrics, PCI_DEVICES, 1, 2) == [1, 3]
    assert held.watched(CELL1) == [uuid_of(12)]


async def test_a_cell_with_hosts_and_no_database_is_named_once() -> None:
    world = World(node(1), node(2), cells={"host1": CELL1, "host2": CELL2})
    database = MemoryRows(CELL1, {1: known(1)})
    made, _ = poller(world, HostFacts([CELL1], max_age_s=60), [database])
    with capture_logs() as logs:
        for _ in range(2):
            await made.read(database)
    assert [(one["cells"], one["count"]) for one in logs if one["event"] == "nova.cell_without_database"] == [
        ([CELL2], 1)
    ]
