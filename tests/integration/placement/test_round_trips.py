"""How many statements a group of writes costs, whatever its size."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.placement import InventoryUpdate, ProviderReport
from bus.persistence.database import Database

from .conftest import Book

pytestmark = pytest.mark.postgres

MOST = 6  # BEGIN and COMMIT included
HOSTS = 20


@pytest.fixture
async def sent(book: Book) -> AsyncIterator[list[str]]:
    """The statements of the book's one connection."""
    database: Database = book.database
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
    book: Book, rng: random.Random, sent: list[str]
) -> None:
    """It took a statement of its own for each kind of row, 18 in all."""
    hosts = await book.hosts(HOSTS, rng, VCPU=4)
    groups = [
        [with_child(book.host(host, VCPU=5, DISK_GB=9), new_uuid(rng)) for host in hosts],  # new names, new children
        [with_child(book.host(host, VCPU=6), new_uuid(rng)) for host in hosts],  # children change, classes go
        [book.host(host, VCPU=7) for host in hosts],  # children go
    ]
    await book.store.report(groups[0])
    counted = []
    for group in groups[1:]:
        sent.clear()
        results = await book.store.report(group)
        assert {getattr(one, "outcome", None) for one in results} == {"applied"}
        counted.append(list(sent))
    assert all(0 < len(statements) <= MOST for statements in counted), counted
    assert await book.findings() == []
