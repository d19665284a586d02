"""`compute_nodes` of a cell read from a real database: rows that change, rows that are broken, and the database locked,
away and back. MariaDB: NOVA_CELL_DATABASE=mysql+aiomysql://... names a scratch database with Nova's schema.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator

import pytest
import sqlalchemy
from msgspec.structs import replace
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from structlog.testing import capture_logs

from bus.clock import SystemClock
from nova_scheduler.cloud import cell_database
from nova_scheduler.cloud.cell_database import AGAIN, PAGE, CellDatabase
from nova_scheduler.cloud.host_facts import MAX_TEXT, HostFacts
from nova_scheduler.cloud.in_flight import InstancesInFlight
from nova_scheduler.cloud.rest import NovaUnavailable
from nova_scheduler.fit.pci import free_devices
from tests.unit.nova_scheduler.facts_kit import CELL1, World, node, uuid_of
from tests.unit.nova_scheduler.test_host_facts import PLAIN, poller
from tests.unit.nova_scheduler.test_in_flight import DEVICE, pools

MARIADB = os.environ.get("NOVA_CELL_DATABASE", "")
UNSEEN = ("vcpus", "memory_mb", "local_gb", "vcpus_used", "memory_mb_used", "local_gb_used")
# As Nova's schema has it, of what is read and what may not be null.
TABLE = f"""CREATE TABLE compute_nodes (
    id SERIAL PRIMARY KEY, uuid VARCHAR(36), host VARCHAR(255), hypervisor_hostname VARCHAR(255),
    hypervisor_version INTEGER NOT NULL, free_disk_gb INTEGER, updated_at TIMESTAMP, deleted INTEGER,
    {", ".join(f"{name} INTEGER NOT NULL" for name in UNSEEN)}, hypervisor_type TEXT NOT NULL, cpu_info TEXT NOT NULL,
    stats TEXT, metrics TEXT, supported_instances TEXT, pci_stats TEXT, numa_topology TEXT,
    cpu_allocation_ratio FLOAT, ram_allocation_ratio FLOAT)"""
OTHERS = (
    "CREATE TABLE instances (uuid VARCHAR(36), host VARCHAR(255), node VARCHAR(255), deleted INTEGER)",
    """CREATE TABLE migrations (id SERIAL PRIMARY KEY, instance_uuid VARCHAR(36), dest_compute VARCHAR(255),
    dest_node VARCHAR(255), status VARCHAR(255), deleted INTEGER)""",
)
ROW = sqlalchemy.text(
    f"""INSERT INTO compute_nodes (id, uuid, host, hypervisor_hostname, hypervisor_version, free_disk_gb, updated_at,
    deleted, {", ".join(UNSEEN)}, hypervisor_type, cpu_info, stats, numa_topology) VALUES (:id, :uuid, :host, :host,
    8002000, 5, '2026-01-01 00:00:00', 0, {", ".join("1" for _ in UNSEEN)}, 'QEMU', '', :stats, :numa_topology)"""
)


@pytest.fixture(params=[pytest.param("postgresql", marks=pytest.mark.postgres), "mariadb"])
def cell_url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "mariadb":
        if not MARIADB:
            pytest.skip("no MariaDB: set NOVA_CELL_DATABASE")
        yield MARIADB
    else:
        found = make_url(request.getfixturevalue("empty_database")).set(drivername="postgresql+asyncpg")
        yield found.render_as_string(hide_password=False)


@pytest.fixture
async def cell(cell_url: str) -> AsyncIterator[AsyncEngine]:
    """What writes to the cell's database."""
    engine = create_async_engine(cell_url, poolclass=sqlalchemy.NullPool)
    async with engine.begin() as connection:
        deletions = [f"DELETE FROM {table}" for table in ("compute_nodes", "migrations", "instances")]
        for statement in deletions if cell_url == MARIADB else (TABLE, *OTHERS):
            await connection.execute(sqlalchemy.text(statement))
    yield engine
    await engine.dispose()


async def insert(cell: AsyncEngine, *numbers: int, stats: str = '{"num_instances": 1}', **more: str | None) -> None:
    async with cell.begin() as connection:
        rows = [
            {"id": at, "uuid": uuid_of(at), "host": f"h{at}", "stats": stats, "numa_topology": "", **more}
            for at in numbers
        ]
        await connection.execute(ROW, rows)


async def write(cell: AsyncEngine, changes: str, number: int) -> None:
    async with cell.begin() as connection:
        await connection.execute(sqlalchemy.text(f"UPDATE compute_nodes SET {changes} WHERE id = {number}"))


async def counted(database: CellDatabase) -> dict[int, int | None]:
    """{row: its instances} of those that a read takes in full; None: unknown."""
    read = await database.read()
    return {
        number: None if row is None or row.hardware.stats is None else row.hardware.stats.num_instances
        for number, row in read.changed.items()
    }


async def test_rows_that_change(cell_url: str, cell: AsyncEngine) -> None:
    database = CellDatabase(CELL1, cell_url)
    assert await counted(database) == {}
    await insert(cell, 1, 2)
    assert await counted(database) == {1: 1, 2: 1}
    # Written again within the second of the write before: the row has the same time.
    await write(cell, """stats = '{"num_instances": 2}'""", 1)
    assert [await counted(database) for _ in range(AGAIN)] == [{1: 2, 2: 1}] * AGAIN
    assert await counted(database) == {}
    await write(cell, """stats = '{"num_instances": 3}', updated_at = '2026-01-01 00:00:07'""", 1)
    assert await counted(database) == {1: 3}
    await write(cell, "updated_at = NULL", 2)
    assert await counted(database) == {1: 3, 2: 1}
    await write(cell, "deleted = 2", 2)
    read = await database.read()
    assert (set(read.present), set(read.changed)) == ({1}, {1})


async def test_rows_that_are_broken(cell_url: str, cell: AsyncEngine) -> None:
    await insert(cell, 1)
    await insert(cell, 2, stats='{"num_instances":')
    await insert(cell, 3, uuid="x")
    await insert(cell, 4, uuid=None)
    await insert(cell, 5, numa_topology="é" * (30_000 if cell_url == MARIADB else MAX_TEXT + 10))
    read = await CellDatabase(CELL1, cell_url).read()
    assert {number for number, row in read.changed.items() if row is None} == {3, 4}
    told = {number: row.hardware for number, row in read.changed.items() if row is not None}
    assert {number: one.unreadable for number, one in told.items()} == {
        1: (),
        2: ("stats",),
        5: () if cell_url == MARIADB else ("numa_topology",),
    }
    assert (told[1].host, told[1].hypervisor_version) == ("h1", 8002000)


async def test_ratios_of_a_row(cell_url: str, cell: AsyncEngine) -> None:
    await insert(cell, 1, 2)
    await write(cell, "cpu_allocation_ratio = 2.5, ram_allocation_ratio = 0.0", 1)
    read = await CellDatabase(CELL1, cell_url).read()
    told = [row.hardware for _, row in sorted(read.changed.items()) if row is not None]
    assert [(one.cpu_allocation_ratio, one.ram_allocation_ratio) for one in told] == [(2.5, 1.0), (4.0, 1.0)]


VMS = [uuid_of(at) for at in range(101, 110)]
MOVE = "INSERT INTO migrations (instance_uuid, dest_compute, dest_node, status, deleted) VALUES "


async def run(cell: AsyncEngine, *statements: str) -> None:
    async with cell.begin() as connection:
        for statement in statements:
            await connection.execute(sqlalchemy.text(statement))


async def test_where_instances_are(cell_url: str, cell: AsyncEngine) -> None:
    if cell_url == MARIADB:
        pytest.skip("its tables want more columns")
    hosts = ("'a', 'a1', 0", "'a', 'a1', 7", "NULL, NULL, 0", *["'a', 'a1', 0"] * 5)
    rows = ", ".join(f"('{uuid}', {host})" for uuid, host in zip(VMS, hosts, strict=False))
    moves = (
        f"('{VMS[3]}', 'b', 'b1', 'confirmed', 0)",  # it has ended
        f"('{VMS[3]}', 'b', 'b1', 'migrating', 5)",
        f"('{VMS[4]}', 'b', 'b1', 'accepted', 0)",  # nothing is claimed there yet
        f"('{VMS[5]}', 'b', 'b1', 'error', 0)",
        f"('{VMS[5]}', 'c', 'c1', 'pre-migrating', 0)",
        f"('{VMS[6]}', NULL, NULL, 'pre-migrating', 0)",  # it may move on its own host
    )
    await run(cell, f"INSERT INTO instances (uuid, host, node, deleted) VALUES {rows}", MOVE + ", ".join(moves))
    read = await CellDatabase(CELL1, cell_url).read(VMS)
    on_a = {("a", "a1")}
    assert {one: set(found) for one, found in read.sights.items() if found} == {
        VMS[0]: on_a,
        VMS[3]: on_a,
        VMS[5]: {("c", "c1")},
        VMS[7]: on_a,
    }
    assert (await CellDatabase(CELL1, cell_url).read(VMS[:1])).sights == {VMS[0]: on_a}


async def test_what_was_claimed_counts_until_its_instance_and_then_a_write_are_seen(
    cell_url: str, cell: AsyncEngine
) -> None:
    if cell_url == MARIADB:
        pytest.skip("its tables want more columns")
    facts = HostFacts([CELL1], max_age_s=60)
    held, database = InstancesInFlight(facts, SystemClock()), CellDatabase(CELL1, cell_url)
    made, _ = poller(World(node(1)), facts, [database], held)

    async def free(*statements: str) -> int | None:
        await run(cell, *statements)
        await made.read(database)
        found = held.devices_of(uuid_of(1))
        return None if found is None else free_devices(found.pools)

    await insert(cell, 1)
    row = "UPDATE compute_nodes SET pci_stats = '{}', updated_at = '2026-01-01 00:00:0{}'"
    assert await free(row.format(pools(3), 1)) == 3
    held.claimed(VMS[0], uuid_of(1), replace(PLAIN, devices=(DEVICE,)), {})
    instance = f"INSERT INTO instances (uuid, host, node, deleted) VALUES ('{VMS[0]}', 'h1', 'h1', 0)"
    steps: list[list[str]] = [[], [row.format(pools(2), 2)], [instance], [], [row.format(pools(1), 3)]]
    assert [await free(*statements) for statements in steps] == [2, 1, 1, 1, 1]


async def test_a_user_that_may_not_read_instances_reads_rows_all_the_same(cell_url: str, cell: AsyncEngine) -> None:
    if cell_url == MARIADB:
        pytest.skip("its tables stay")
    await insert(cell, 1)
    await run(cell, "DROP TABLE instances")
    database = CellDatabase(CELL1, cell_url)
    with capture_logs() as logs:
        read = await database.read(VMS[:1])
    assert (set(read.present), set(read.written), read.sights) == ({1}, {1}, {})
    assert [log["event"] for log in logs] == ["nova.instances_unread"]
    assert set((await database.read()).written) == set(), "it has succeeded"


async def test_more_rows_than_a_page(cell_url: str, cell: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    await insert(cell, *range(1, 2 * PAGE + 1))
    database = CellDatabase(CELL1, cell_url)
    read = await database.read()
    assert set(read.present) == set(read.changed) == set(range(1, 2 * PAGE + 1))
    monkeypatch.setattr(cell_database, "MAX_ROWS", PAGE)
    with pytest.raises(NovaUnavailable):
        await database.read()


async def test_a_database_that_is_locked(cell_url: str, cell: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    await insert(cell, 1)
    database = CellDatabase(CELL1, cell_url)
    monkeypatch.setattr(cell_database, "STATEMENT_S", 1.0)
    lock = "LOCK TABLES compute_nodes WRITE" if cell_url == MARIADB else "LOCK TABLE compute_nodes"
    async with cell.connect() as connection:
        await connection.execute(sqlalchemy.text(lock))
        with pytest.raises(NovaUnavailable) as locked:
            await database.read()
        assert locked.value.code == cell_database.UNAVAILABLE
    monkeypatch.setattr(cell_database, "STATEMENT_S", 10.0)
    assert await counted(database) == {1: 1}


class Proxy:
    """A way to the database that can be cut."""

    def __init__(self, url: str) -> None:
        self._to = make_url(url)
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()
        self.port = 0

    def url(self) -> str:
        made = self._to.set(host="127.0.0.1", port=self.port, query={})
        return made.render_as_string(hide_password=False)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        folder = self._to.query.get("host") or self._to.host
        if isinstance(folder, str) and folder.startswith("/"):
            there = await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.{self._to.port or 5432}")
        else:
            there = await asyncio.open_connection(self._to.host, self._to.port)
        for source, sink in ((reader, there[1]), (there[0], writer)):
            pipe = asyncio.create_task(self._pipe(source, sink))
            self._pipes.add(pipe)
            pipe.add_done_callback(self._pipes.discard)

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            try:
                while data := await source.read(65_536):
                    sink.write(data)
                    await sink.drain()
            finally:
                sink.close()


async def test_a_database_that_is_away_and_back(cell_url: str, cell: AsyncEngine) -> None:
    await insert(cell, 1)
    proxy = Proxy(cell_url)
    await proxy.start()
    database = CellDatabase(CELL1, proxy.url())
    assert await counted(database) == {1: 1}
    await proxy.stop()
    await insert(cell, 2)
    for _ in range(2):
        with pytest.raises(NovaUnavailable) as away:
            await database.read()
        assert away.value.code == cell_database.UNAVAILABLE
    await proxy.start()
    assert await counted(database) == {1: 1, 2: 1}, "a read that has failed is none of those that are repeated"
    assert await counted(database) == {1: 1, 2: 1}
    assert await counted(database) == {2: 1}
    await proxy.stop()
