"""A replica that is read from the database of an OpenStack Placement, as its clients change it. MariaDB:
PLACEMENT_DATABASE=mysql+aiomysql://... names a scratch database.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import sqlalchemy
from msgspec.structs import replace
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from bus.clock import SystemClock, new_uuid
from bus.persistence.external_database import Snapshot, snapshot_engine_of, snapshot_of
from placement_worker.operations import mirror_database
from placement_worker.operations.export import InvalidExport
from placement_worker.operations.mirror import PlacementMirror
from placement_worker.operations.mirror_database import ALLOCATIONS_PAGE, PAGE, DatabaseSource
from placement_worker.replica.replica import Replica
from tests.unit.placement_worker.mirror_world import CLASSES, Source, shown, true

MARIADB = os.environ.get("PLACEMENT_DATABASE", "")
# As Placement's schema has it, of what is read.
TABLES = {
    "resource_classes": "id INTEGER PRIMARY KEY, name VARCHAR(255) NOT NULL",
    "traits": "id INTEGER PRIMARY KEY, name VARCHAR(255) NOT NULL",
    "placement_aggregates": "id INTEGER PRIMARY KEY, uuid VARCHAR(36)",
    "resource_providers": "id INTEGER PRIMARY KEY, uuid VARCHAR(36) NOT NULL, name VARCHAR(200), generation INTEGER, "
    "root_provider_id INTEGER, parent_provider_id INTEGER",
    "inventories": "resource_provider_id INTEGER NOT NULL, resource_class_id INTEGER NOT NULL, total INTEGER NOT NULL, "
    "reserved INTEGER NOT NULL, min_unit INTEGER NOT NULL, max_unit INTEGER NOT NULL, step_size INTEGER NOT NULL, "
    "allocation_ratio FLOAT NOT NULL",
    "resource_provider_traits": "trait_id INTEGER NOT NULL, resource_provider_id INTEGER NOT NULL",
    "resource_provider_aggregates": "resource_provider_id INTEGER NOT NULL, aggregate_id INTEGER NOT NULL",
    "allocations": "id INTEGER PRIMARY KEY, resource_provider_id INTEGER NOT NULL, consumer_id VARCHAR(36) NOT NULL, "
    "resource_class_id INTEGER NOT NULL, used INTEGER NOT NULL",
}


@pytest.fixture(params=[pytest.param("postgresql", marks=pytest.mark.postgres), "mariadb"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "mariadb":
        if not MARIADB:
            pytest.skip("no MariaDB: set PLACEMENT_DATABASE")
        yield MARIADB
    else:
        found = make_url(request.getfixturevalue("empty_database")).set(drivername="postgresql+asyncpg")
        yield found.render_as_string(hide_password=False)


class Tables:
    """Writes a Placement in memory into its tables. Rows that are written again have other ids, but providers."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._ids: dict[str, int] = {}
        self._next = 0

    def _number(self) -> int:
        self._next += 1
        return self._next

    async def create(self) -> None:
        async with self.engine.begin() as connection:
            for name, columns in TABLES.items():
                await connection.execute(sqlalchemy.text(f"DROP TABLE IF EXISTS {name}"))
                await connection.execute(sqlalchemy.text(f"CREATE TABLE {name} ({columns})"))

    async def run(self, *statements: str) -> None:
        async with self.engine.begin() as connection:
            for one in statements:
                await connection.execute(sqlalchemy.text(one))

    def made_again(self, uuid: str) -> None:
        del self._ids[uuid]

    async def write(self, source: Source) -> None:
        """The whole of it, in one transaction."""
        async with self.engine.begin() as connection:
            for name in TABLES:
                await connection.execute(sqlalchemy.text(f"DELETE FROM {name}"))
            await self._write(connection, source)

    async def _write(self, connection: AsyncConnection, source: Source) -> None:
        for uuid in self._ids.keys() - source.there.keys():
            del self._ids[uuid]
        for uuid in source.there:
            self._ids.setdefault(uuid, self._number())
        ids, kinds = self._ids, {name: number for number, name in enumerate(CLASSES)}
        every = source.there.values()
        traits = {name: self._number() for name in {one for p in every for one in p.traits}}
        aggregates = {name: self._number() for name in {one for p in every for one in p.aggregates}}
        rows: dict[str, list[tuple[Any, ...]]] = {
            "resource_classes": [(number, name) for name, number in kinds.items()],
            "traits": [(number, name) for name, number in traits.items()],
            "placement_aggregates": [(number, name) for name, number in aggregates.items()],
            "resource_providers": [
                (ids[p.uuid], p.uuid, p.name, p.generation, ids[p.root], p.parent and ids[p.parent]) for p in every
            ],
            "inventories": [
                (ids[p.uuid], kinds[name], i.total, i.reserved, i.min_unit, i.max_unit, i.step_size, i.allocation_ratio)
                for p in every
                for name, i in p.inventories.items()
            ],
            "resource_provider_traits": [(traits[one], ids[p.uuid]) for p in every for one in p.traits],
            "resource_provider_aggregates": [(ids[p.uuid], aggregates[one]) for p in every for one in p.aggregates],
            "allocations": [
                (self._number(), ids[uuid], consumer, kinds[name], used)
                for consumer, parts in source.held.items()
                for uuid, resources in parts.items()
                for name, used in resources.items()
            ],
        }
        for table, found in rows.items():
            marks = ", ".join(f":{at}" for at in range(len(found[0]))) if found else ""
            for start in range(0, len(found), 500):
                values = [{str(at): one for at, one in enumerate(row)} for row in found[start : start + 500]]
                await connection.execute(sqlalchemy.text(f"INSERT INTO {table} VALUES ({marks})"), values)


@pytest.fixture
async def tables(url: str) -> AsyncIterator[Tables]:
    engine = create_async_engine(url, poolclass=sqlalchemy.NullPool)
    made = Tables(engine)
    await made.create()
    yield made
    await engine.dispose()


def mirror_of(url: str) -> PlacementMirror:
    return PlacementMirror(DatabaseSource(url), Replica(), clock=SystemClock(), interval_s=1.0)


@pytest.mark.parametrize("seed", range(3))
async def test_after_each_pass_it_is_equal(url: str, tables: Tables, seed: int) -> None:
    """A provider that was made again is another one, whatever its generation is."""
    source = Source(random.Random(seed))
    mirror = mirror_of(url)
    for _ in range(25):
        for _ in range(source.rng.randrange(1, 12)):
            before = dict(source.there)
            if source.step():
                (uuid,) = (uuid for uuid, one in source.there.items() if before.get(uuid, one) is not one)
                tables.made_again(uuid)
        await tables.write(source)
        await mirror.read()
        assert shown(mirror.replica) == true(source)


async def test_what_moves_no_generation_is_seen(url: str, tables: Tables) -> None:
    source = Source(random.Random(1))
    host, other, again = (source.make() for _ in range(3))
    source.claim("a", host, other)
    mirror = mirror_of(url)
    await tables.write(source)
    await mirror.read()
    del source.held["a"]
    source.bump([other], aggregates=(new_uuid(source.rng),), traits=("CUSTOM_B",))
    source.there[host] = at_known_generation(source, host, mirror)
    source.there[again] = at_known_generation(source, again, mirror, traits=("CUSTOM_A",))
    source.there[other] = at_known_generation(source, other, mirror, traits=())
    tables.made_again(again)
    await tables.write(source)
    await mirror.read()
    assert shown(mirror.replica) == true(source)
    assert mirror.hosts_of("a") == ()


async def test_what_has_not_moved_is_not_read_again(url: str, tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(random.Random(1))
    source.claim("a", source.make())
    await tables.write(source)
    mirror = mirror_of(url)
    await mirror.read()
    rows, asked = Snapshot.rows, list[Any]()

    async def read(here: Snapshot, statement: Any, **values: Any) -> Any:
        asked.append(statement)
        return await rows(here, statement, **values)

    monkeypatch.setattr(Snapshot, "rows", read)
    await mirror.read()
    assert mirror_database.ALLOCATIONS in asked and mirror_database.INVENTORIES not in asked


async def test_allocations_are_added_up(url: str, tables: Tables) -> None:
    """Placement's table does not rule out two of one consumer, provider and class, and its sums have both."""
    source = Source(random.Random(1))
    source.held["a"] = {source.make(): {"VCPU": 2}}
    await tables.write(source)
    again = "SELECT 7777, resource_provider_id, consumer_id, resource_class_id, 3 FROM allocations"
    await tables.run(f"INSERT INTO allocations {again}")
    source.held["a"] = {one: {"VCPU": 5} for one in source.there}
    mirror = mirror_of(url)
    await mirror.read()
    assert shown(mirror.replica) == true(source)


def at_known_generation(source: Source, uuid: str, mirror: PlacementMirror, **fields: Any) -> Any:
    """The provider at the generation that the replica has."""
    row = mirror.replica.row_of(uuid)
    assert row is not None
    return replace(source.there[uuid], generation=int(mirror.replica.generation[row]), **fields)


async def test_more_rows_than_a_page_and_than_are_taken(
    url: str, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(random.Random(1))
    hosts = [source.make() for _ in range(PAGE + 1)]
    for number in range(ALLOCATIONS_PAGE // len(hosts) + 1):
        for host in hosts:
            source.held[f"{host[:8]}-{number}"] = {host: {"VCPU": 1}}
    await tables.write(source)
    mirror = mirror_of(url)
    await mirror.read()
    assert shown(mirror.replica) == true(source)
    for bound in ("MAX_PROVIDERS", "MAX_ALLOCATIONS", "MAX_PARTS"):
        with monkeypatch.context() as less:
            less.setattr(mirror_database, bound, 3)
            with pytest.raises(InvalidExport):
                await mirror_of(url).read()


BROKEN = (
    "UPDATE resource_providers SET uuid = 'x'",
    "UPDATE resource_providers SET name = NULL",
    "UPDATE resource_providers SET generation = NULL",
    "UPDATE resource_providers SET root_provider_id = 7777",
    "UPDATE resource_providers SET parent_provider_id = 7777",
    "UPDATE allocations SET used = 0",
    "UPDATE allocations SET resource_class_id = 77",
    "UPDATE allocations SET resource_provider_id = 7777",
    "UPDATE resource_classes SET name = 'not a class' WHERE name = 'VCPU'",
    "DELETE FROM resource_classes",
    "DROP TABLE allocations",
)


@pytest.mark.parametrize("broken", BROKEN)
async def test_what_is_no_placement_changes_nothing(url: str, tables: Tables, broken: str) -> None:
    source = Source(random.Random(1))
    source.claim("a", source.make())
    await tables.write(source)
    mirror = mirror_of(url)
    await mirror.read()
    before = shown(mirror.replica)
    await tables.run(broken)
    with pytest.raises(InvalidExport):
        await mirror.read()
    assert shown(mirror.replica) == before


@pytest.mark.parametrize("broken", ["total = 0", "reserved = -1", "resource_class_id = 77"])
async def test_an_inventory_that_is_none_changes_nothing(url: str, tables: Tables, broken: str) -> None:
    source = Source(random.Random(1))
    source.make()
    await tables.write(source)
    await tables.run(f"UPDATE inventories SET {broken}")
    mirror = mirror_of(url)
    with pytest.raises(InvalidExport):
        await mirror.read()
    assert shown(mirror.replica) == {}


async def test_a_pass_is_of_one_moment(url: str, tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(random.Random(1))
    hosts = [source.make() for _ in range(3)]
    source.claim("a", hosts[0])
    await tables.write(source)
    expected = true(source)
    rows = Snapshot.rows
    changed: list[Callable[[], Awaitable[None]]] = []

    async def later() -> None:
        source.claim("a", hosts[1])
        del source.there[hosts[2]]
        await tables.write(source)

    async def read(here: Snapshot, statement: Any, **values: Any) -> Any:
        found = await rows(here, statement, **values)
        if changed:
            await changed.pop()()
        return found

    monkeypatch.setattr(Snapshot, "rows", read)
    changed.append(later)
    mirror = mirror_of(url)
    await mirror.read()
    assert not changed and shown(mirror.replica) == expected
    await mirror.read()
    assert shown(mirror.replica) == true(source) != expected


async def test_nothing_can_be_written(url: str, tables: Tables) -> None:
    with pytest.raises(sqlalchemy.exc.DBAPIError):
        async with snapshot_of(snapshot_engine_of(url), 10.0) as snapshot:
            await snapshot.rows(sqlalchemy.text("DELETE FROM allocations"))


async def test_a_database_that_does_not_answer(url: str, tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = mirror_of(url)
    with monkeypatch.context() as short:
        short.setattr(mirror_database, "STATEMENT_S", 0.5)
        async with tables.engine.connect() as connection:
            kind = "" if url != MARIADB else " WRITE"
            table = "TABLE " if url != MARIADB else "TABLES "
            await connection.execute(sqlalchemy.text(f"LOCK {table}resource_providers{kind}"))
            with pytest.raises(InvalidExport):
                await mirror.read()
    await mirror.read()
    away = make_url(url).set(host="127.0.0.1", port=9, query={}).render_as_string(hide_password=False)
    with pytest.raises(InvalidExport):
        await mirror_of(away).read()
