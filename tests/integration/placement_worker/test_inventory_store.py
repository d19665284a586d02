"""Inventory updates on a real PostgreSQL: versions, trees, names, what is in use."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.placement import (
    ClaimOutcome,
    ClaimResult,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    ProviderReport,
)
from bus.faults import DatabaseUnavailable
from bus.persistence.database import Database
from placement_worker.domain.reports import ReportRefusal
from placement_worker.domain.trees import SetTraits
from placement_worker.domain.values import Provider
from placement_worker.store.names import NameTable
from tests.integration.placement_worker.conftest import PlacementDatabase, claim
from tests.kit.databases import WAITING
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres


# --- inventory updates on a real PostgreSQL: versions, trees, names, what is in use


async def reported(placement: PlacementDatabase, *updates: InventoryUpdate) -> list[str]:
    results = await placement.store.apply_reports(updates)
    return [result.outcome if isinstance(result, InventoryResult) else result.code for result in results]


async def class_names(placement: PlacementDatabase) -> dict[str, str]:
    page = await placement.store.snapshot(None, 1000)
    return {state.name: state.root_uuid for state in page.providers}


def tree(root: str, *children: str, version: int, reporter: str = "s", gpus: int = 2) -> InventoryUpdate:
    reports = [ProviderReport(uuid=root, name=f"r-{root}", inventories={"VCPU": Inventory(total=4)})]
    reports += [
        ProviderReport(
            uuid=child,
            name=f"c-{child}",
            parent_uuid=root,
            inventories={"VGPU": Inventory(total=gpus)},
            traits=("CUSTOM_BLUE",),
            aggregates=(root,),
        )
        for child in children
    ]
    return InventoryUpdate(reporter=reporter, version=version, root_uuid=root, providers=tuple(reports))


async def test_a_provider_moves_to_another_root(placement: PlacementDatabase, rng: random.Random) -> None:
    old, new, child = (new_uuid(rng) for _ in range(3))
    await reported(placement, tree(old, child, version=1), tree(new, version=1))
    assert await reported(placement, tree(new, child, version=2)) == ["applied"]
    assert (await class_names(placement))[f"c-{child}"] == new
    # The old root's next report no longer has it, and must not remove it from where it lives now.
    assert await reported(placement, tree(old, version=2)) == ["unchanged"]
    assert f"c-{child}" in await class_names(placement)


async def test_two_processes_create_the_same_names_at_once_and_one_is_refused(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    second = await placement.another()

    def named(name: str) -> InventoryUpdate:
        uuid = new_uuid(rng)
        reports = (ProviderReport(uuid=uuid, name=name, inventories={f"CUSTOM_{name}": Inventory(total=1)}),)
        return InventoryUpdate(reporter="s", version=1, root_uuid=uuid, providers=reports)

    names = [f"N{number}" for number in range(20)]
    mine, theirs = await asyncio.gather(
        placement.store.apply_reports([named(name) for name in names]),
        second.apply_reports([named(name) for name in reversed(names)]),
    )
    for a, b in zip(mine, reversed(theirs), strict=True):
        assert {type(a), type(b)} == {InventoryResult, ReportRefusal}
    assert sorted(await class_names(placement)) == sorted(names)


async def test_names_of_a_transaction_that_was_lost_are_not_used(
    placement: PlacementDatabase, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server goes away between a new name's row and its commit: the number this process has seen does not exist."""
    execute = asyncpg.Connection.execute
    killer = await asyncpg.connect(placement.url)

    async def lost(this: asyncpg.Connection, query: str, *args: object, **more: float) -> str:
        if query == "COMMIT":
            monkeypatch.setattr(asyncpg.Connection, "execute", execute)
            await killer.execute("SELECT pg_terminate_backend($1, 5000)", this.get_server_pid())
        return await execute(this, query, *args, **more)

    monkeypatch.setattr(asyncpg.Connection, "execute", lost)
    update = placement.host(new_uuid(rng), CUSTOM_NEW=1)
    with pytest.raises(DatabaseUnavailable):
        await placement.store.apply_reports([update])
    (result,) = await placement.store.apply_reports([update])  # as the consumer calls again
    assert isinstance(result, InventoryResult) and result.outcome == "applied"
    await killer.close()


# --- how many statements a group of writes costs, whatever its size

MOST = 6  # BEGIN and COMMIT included
HOSTS = 20


@pytest.fixture
async def sent(placement: PlacementDatabase) -> AsyncIterator[list[str]]:
    """The statements of placement's one connection."""
    database: Database = placement.database
    statements: list[str] = []

    def note(record: Any) -> None:
        statements.append(record.query)

    async with database.raw() as connection:
        connection.add_query_logger(note)
    yield statements


def with_child(update: InventoryUpdate, child: str) -> InventoryUpdate:
    (root,) = update.providers
    below = ProviderReport(
        uuid=child,
        name=f"child-{child}",
        parent_uuid=root.uuid,
        inventories=root.inventories,
        traits=("CUSTOM_BLUE",),
        aggregates=(root.uuid,),
    )
    return replace(update, providers=(root, below))


async def test_a_group_of_reports_that_change_everything_takes_six_round_trips(
    placement: PlacementDatabase, rng: random.Random, sent: list[str]
) -> None:
    """It took a statement of its own for each kind of row, 18 in all."""
    hosts = await placement.hosts(HOSTS, rng, VCPU=4)
    groups = [
        [
            with_child(placement.host(host, VCPU=5, DISK_GB=9), new_uuid(rng)) for host in hosts
        ],  # new names, new children
        [with_child(placement.host(host, VCPU=6), new_uuid(rng)) for host in hosts],  # children change, classes go
        [placement.host(host, VCPU=7) for host in hosts],  # children go
    ]
    await placement.store.apply_reports(groups[0])
    counted = []
    for group in groups[1:]:
        sent.clear()
        results = await placement.store.apply_reports(group)
        assert {getattr(one, "outcome", None) for one in results} == {"applied"}
        counted.append(list(sent))
    assert all(0 < len(statements) <= MOST for statements in counted), counted
    assert await placement.findings() == []


# --- a provider whose row had to be waited for is found as its last holder left it, and not left out of the group

PATIENCE_S = 60.0
MOVE = "UPDATE placement.providers SET generation = generation + 7"


@asynccontextmanager
async def moved_by_another(placement: PlacementDatabase) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Another transaction has moved every provider; what is yielded waits until it is waited for, and commits."""
    holder, watcher = await asyncpg.connect(placement.url), await asyncpg.connect(placement.url)
    holding = holder.transaction()
    await holding.start()
    await holder.execute(MOVE)

    async def let_go() -> None:
        await until(lambda: watcher.fetchval(WAITING))
        await holding.commit()

    yield let_go
    for connection in (holder, watcher):
        await connection.close()


async def test_a_group_of_rest_writes_finds_a_provider_that_it_had_to_wait_for(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    """It answered 404: the locking statement's UNION ALL was false for a row that had changed while it waited."""
    hosts = await placement.hosts(4, rng, VCPU=8)
    rest = placement.store
    async with moved_by_another(placement) as let_go:
        writing = asyncio.create_task(rest.write_trees([SetTraits(host, ("COMPUTE_NODE",)) for host in hosts]))
        await let_go()
        outcomes = await writing
    assert [outcome.generation for outcome in outcomes if isinstance(outcome, Provider)] == [9] * 4


async def test_a_claim_finds_a_provider_that_it_had_to_wait_for(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    hosts = await placement.hosts(4, rng, VCPU=8)
    claims = [claim(new_uuid(rng), {host: {"VCPU": 1}}) for host in hosts]
    async with moved_by_another(placement) as let_go:
        claiming = asyncio.create_task(placement.store.apply(claims))
        await let_go()
        replies = await claiming
    outcomes = [(reply.outcome, reply.generations) for reply in replies if isinstance(reply, ClaimResult)]
    assert outcomes == [(ClaimOutcome.CLAIMED, {host: 9}) for host in hosts]


async def test_a_report_finds_the_trees_that_it_had_to_wait_for(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    hosts = await placement.hosts(4, rng, VCPU=8)
    updates = [placement.host(host, VCPU=9) for host in hosts]
    async with moved_by_another(placement) as let_go:
        reporting = asyncio.create_task(placement.store.apply_reports(updates))
        await let_go()
        results = await reporting
    assert [getattr(result, "outcome", result) for result in results] == ["applied"] * 4
    assert await placement.findings() == []


# --- names of classes and traits on a real PostgreSQL: what one reader has seen another does not make forgotten


class Slow:
    """A connection whose rows arrive late."""

    def __init__(self, connection: asyncpg.Connection, arrive: asyncio.Event) -> None:
        self._connection = connection
        self._arrive = arrive
        self.requested = asyncio.Event()

    async def fetch(self, statement: str) -> Sequence[asyncpg.Record]:
        rows: Sequence[asyncpg.Record] = await self._connection.fetch(statement)
        self.requested.set()
        await self._arrive.wait()
        return rows


@pytest.fixture
async def names(placement: PlacementDatabase) -> NameTable:
    made = NameTable(placement.rows.transaction, placement.rows.clock)
    await made.open()
    return made


async def test_a_read_that_began_before_a_name_was_made_and_ends_after_does_not_forget_it(
    placement: PlacementDatabase, names: NameTable
) -> None:
    """Four cells' first reports make names at once; whose had gone again when it was written ended as dead letters."""
    arrive = asyncio.Event()
    async with placement.database.raw() as connection, asyncio.timeout(PATIENCE_S):
        slow = Slow(connection, arrive)
        late = asyncio.create_task(names._read(placement.rows.on(slow)))  # type: ignore[arg-type]
        await slow.requested.wait()
        await names.ensure(["CUSTOM_GOLD"], ["CUSTOM_BLUE"])
        arrive.set()
        await late
    assert names.class_ids["CUSTOM_GOLD"] and names.trait_ids["CUSTOM_BLUE"]


async def test_a_snapshot_that_is_older_than_a_name_does_not_forget_it(
    placement: PlacementDatabase, names: NameTable
) -> None:
    """A scheduler reads placement in one transaction while hosts report classes that no host had before."""
    async with placement.database.raw() as connection:
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        await connection.fetch("SELECT 1 FROM resource_classes LIMIT 1")
        await names.ensure(["CUSTOM_GOLD"], [])
        number = names.class_ids["CUSTOM_GOLD"]
        unknown = max(names.class_names) + 1
        assert unknown not in await names.names_of(placement.rows.on(connection), {unknown})
    assert (names.class_ids["CUSTOM_GOLD"], names.class_names[number]) == (number, "CUSTOM_GOLD")


async def test_what_another_process_made_is_learnt_by_its_number(
    placement: PlacementDatabase, names: NameTable
) -> None:
    other = NameTable(placement.rows.transaction, placement.rows.clock)
    await other.open()
    await other.ensure(["CUSTOM_GOLD"], [])
    number = other.class_ids["CUSTOM_GOLD"]
    async with placement.database.raw() as connection:
        assert (await names.names_of(placement.rows.on(connection), {number}))[number] == "CUSTOM_GOLD"
    assert names.class_ids["CUSTOM_GOLD"] == number
