"""One suite for both keepers of positions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext

import pytest
from msgspec.structs import replace

from bus.contracts.placement import Inventory, ProviderReport
from bus.faults import Transient
from bus.persistence.database import Database
from ironic_sync.domain.position import Position
from ironic_sync.store.memory import MemoryPositions
from ironic_sync.store.port import NotLeader, Positions
from ironic_sync.store.postgres import MIGRATIONS, PostgresPositions

PATIENCE_S = 60.0
LEADER_LIMIT_S = 40.0  # below the 60 s of any other transaction
NODE = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
OTHER = "05dcdb28-1788-4480-9281-af335fc32c9f"
REPORT = ProviderReport(
    uuid=NODE,
    name=NODE,
    inventories={"CUSTOM_GOLD": Inventory(total=1, reserved=1, min_unit=1, max_unit=1)},
    traits=("CUSTOM_A",),
)
POSITION = Position(
    uuid=NODE, version=7, report=REPORT, problem="node.x", state="active", updated_at="2026", read_at=1.5, due_at=2.5
)


@pytest.fixture(params=["memory", "postgres"])
async def positions(request: pytest.FixtureRequest) -> AsyncIterator[Positions]:
    if request.param == "memory":
        yield MemoryPositions()
        return
    database = Database(request.getfixturevalue("postgres_url"), "ironic_sync")
    await database.open(MIGRATIONS)
    yield PostgresPositions(database)
    await database.close()


async def test_what_is_saved_is_loaded(positions: Positions) -> None:
    async with positions.become_leader() as term:
        assert await term.load() == ({}, {})
        await term.save([POSITION, Position(uuid=OTHER, version=3)])
        await term.mark_published({NODE: 5})
    async with positions.become_leader() as term:
        loaded, published = await term.load()
        assert loaded == {NODE: POSITION, OTHER: Position(uuid=OTHER, version=3)}
        assert published.get(NODE) == 5
        assert published.get(OTHER, 0) == 0


async def test_saving_again_replaces_and_published_only_rises(positions: Positions) -> None:
    async with positions.become_leader() as term:
        await term.save([POSITION])
        await term.save([replace(POSITION, version=9, report=None)])
        await term.mark_published({NODE: 9})
        await term.mark_published({NODE: 7})
        loaded, published = await term.load()
        assert (loaded[NODE].version, loaded[NODE].report, published[NODE]) == (9, None, 9)


async def test_only_removed_and_published_nodes_are_forgotten(positions: Positions) -> None:
    async with positions.become_leader() as term:
        gone = replace(POSITION, report=None)
        await term.save([gone, replace(POSITION, uuid=OTHER)])
        assert await term.purge(1.0) == 0
        await term.mark_published({NODE: 7, OTHER: 7})
        assert await term.purge(0.0) == 0
        assert await term.purge(1.0) == 1
        assert list((await term.load())[0]) == [OTHER]


async def test_there_is_one_writer(positions: Positions) -> None:
    async with positions.become_leader() as term:
        await term.check()
        with pytest.raises(NotLeader):
            async with positions.become_leader():
                pass
        await term.save([POSITION])
    async with positions.become_leader() as term:
        assert NODE in (await term.load())[0]


async def test_a_writer_whose_connection_was_cut_is_fenced(postgres_url: str) -> None:
    """The lock is gone with the connection; the next writer takes over at once; the first one cannot write."""
    first, second = Database(postgres_url, "ironic_sync"), Database(postgres_url, "ironic_sync")
    await first.open(MIGRATIONS)
    await second.open(MIGRATIONS)
    try:
        with pytest.raises(Transient):
            async with PostgresPositions(first).become_leader() as old:
                await old.save([POSITION])
                async with second.raw() as connection:
                    await connection.fetch(
                        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
                        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                    )
                async with _lead_soon(PostgresPositions(second)) as new:
                    with pytest.raises(NotLeader):
                        await old.save([replace(POSITION, version=8)])
                    with pytest.raises(NotLeader):
                        await old.mark_published({NODE: 8})
                    assert (await new.load())[0][NODE].version == 7
                await old.check()
    finally:
        await first.close()
        await second.close()


class _lead_soon:  # noqa: N801  (reads as a context manager)
    """Become the writer as soon as the server has noticed that the one before is gone."""

    def __init__(self, positions: PostgresPositions) -> None:
        self._positions = positions

    async def __aenter__(self):  # type: ignore[no-untyped-def]
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self._lead = self._positions.become_leader()
                try:
                    return await self._lead.__aenter__()
                except NotLeader:
                    await asyncio.sleep(0.01)

    async def __aexit__(self, *error: object) -> None:
        await self._lead.__aexit__(*error)  # type: ignore[arg-type]


@pytest.mark.parametrize("inside", [False, True], ids=["between transactions", "in one"])
async def test_a_writer_that_is_stopped_is_replaced_in_seconds(postgres_url: str, *, inside: bool) -> None:
    """Its connections kept the lock, or the epoch's row, for the server's 60 s: another was not the writer after 45."""
    stopped, standing_by = (Database(postgres_url, "ironic_sync") for _ in range(2))
    await stopped.open(MIGRATIONS)
    await standing_by.open(MIGRATIONS)
    replaced = False
    with pytest.raises(Transient):  # the server has ended its connection
        async with PostgresPositions(stopped).become_leader() as old:  # does nothing from now on, as under SIGSTOP
            async with old._fenced() if inside else nullcontext():
                async with asyncio.timeout(LEADER_LIMIT_S):
                    while not replaced:
                        try:
                            async with PostgresPositions(standing_by).become_leader() as new:
                                await new.save([POSITION])
                                replaced = True
                        except NotLeader:
                            await asyncio.sleep(0.1)
                if inside:
                    await old.check()
            with pytest.raises(NotLeader):
                await old.save([replace(POSITION, version=99)])
            await old.check()
    assert replaced  # a timeout would have passed for a lost connection
    await stopped.close()
    await standing_by.close()
