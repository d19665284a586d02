"""A book that goes out and in again goes on to enforce what it did: server groups' rules, and projects' limits."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import Claim, ClaimOption, Release
from placement_worker.domain.claim_group import ClaimGroup
from placement_worker.domain.server_groups import GroupMember
from placement_worker.operations import export, export_store
from placement_worker.operations.export import BookExport, InvalidExport
from placement_worker.store import claims, members
from tests.kit.servers import fresh_database

from .conftest import Book

pytestmark = pytest.mark.postgres

APART = ServerGroup(uuid="e0000000-0000-4000-8000-000000000000", policy=GroupPolicy.ANTI_AFFINITY)
TOGETHER = ServerGroup(uuid="e1000000-0000-4000-8000-000000000000", policy=GroupPolicy.AFFINITY)
PATIENCE_S = 60.0
WAITING = """
SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database AND d.datname = current_database()
WHERE NOT l.granted
"""
TWO = {"INSTANCES": 2, "VCPU": 6}


@pytest.fixture
async def other(postgres_server: str) -> AsyncIterator[Book]:
    """Another book, empty."""
    with fresh_database(postgres_server) as url:
        made = Book(url)
        await made.open()
        yield made
        await made.store.close()


@pytest.fixture
async def hosts(book: Book, rng: random.Random) -> list[str]:
    return await book.hosts(3, rng, VCPU=16)


def member(
    rng: random.Random, host: str, group: ServerGroup | None = APART, most: dict[str, int] | None = None
) -> Claim:
    option = ClaimOption(allocations={host: {"VCPU": 3}}, host=host)
    return Claim(consumer=new_uuid(rng), options=(option,), project_id="p", server_group=group, limits=most or {})


async def outcomes(book: Book, *claims: Claim) -> list[str]:
    return [str(reply.outcome) for reply in await book.store.apply(claims)]


async def exported(book: Book) -> BookExport:
    await book.store.names.refresh()
    async with book.database.raw() as connection:
        return export.parse(list(export.lines(await export_store.read(connection, book.store.names))))


async def imported(book: Book, what: BookExport) -> int:
    async with book.rows.transaction() as transaction:
        return await export_store.assign(transaction, what, book.store.names)


async def test_an_imported_book_holds_claims_to_groups_and_limits_as_the_first_did(
    book: Book, other: Book, hosts: list[str], rng: random.Random
) -> None:
    near = member(rng, hosts[2], TOGETHER)
    assert await outcomes(book, member(rng, hosts[0]), member(rng, hosts[1]), near) == ["claimed"] * 3
    before = await exported(book)
    assert before.members is not None
    assert len(before.members) == 3
    assert await imported(other, before) == 6
    assert await exported(other) == before
    assert await imported(other, before) == 0, "what is equal is not written"
    for one in (book, other):
        claims = (member(rng, hosts[0]), member(rng, hosts[1], TOGETHER), member(rng, hosts[2], None, TWO))
        assert await outcomes(one, *claims) == ["ruled_out", "ruled_out", "over_limit"]
        assert await outcomes(one, Release(consumer=near.consumer), member(rng, hosts[1], TOGETHER)) == [  # type: ignore[arg-type]
            "released",
            "claimed",
        ]


async def test_members_alone_are_set_to_what_the_file_holds(book: Book, hosts: list[str], rng: random.Random) -> None:
    first, second = member(rng, hosts[0]), member(rng, hosts[1])
    assert await outcomes(book, first, second) == ["claimed"] * 2
    before = await exported(book)
    assert before.members is not None
    left = replace(before, members=frozenset(one for one in before.members if one.consumer == first.consumer))
    assert await imported(book, left) == 1
    assert await outcomes(book, member(rng, hosts[0]), member(rng, hosts[1])) == ["ruled_out", "claimed"]


async def test_who_is_gone_is_no_member_and_who_comes_back_is_in_its_own_group(
    book: Book, hosts: list[str], rng: random.Random
) -> None:
    """A row of one who holds nothing counts no more, and does not count again when an import has it hold something."""
    alone = member(rng, hosts[0], None)
    assert await outcomes(book, alone) == ["claimed"]
    before = await exported(book)
    joined = replace(alone, server_group=APART)
    for file in (before, replace(before, members=None)):
        await book.store.apply([Release(consumer=alone.consumer)])
        assert await outcomes(book, joined) == ["claimed"]
        await book.store.apply([Release(consumer=alone.consumer)])
        assert await imported(book, file) > 0
        assert (await exported(book)).members == frozenset()


async def test_a_file_without_groups_leaves_groups_as_they_are_and_members_follow_what_they_hold(
    book: Book, hosts: list[str], rng: random.Random
) -> None:
    mover, stays = member(rng, hosts[0]), member(rng, hosts[1])
    assert await outcomes(book, mover, stays) == ["claimed"] * 2
    before = await exported(book)
    old = export.parse(list(export.lines(replace(before, members=None))))
    assert (old.members, old.consumers) == (None, before.consumers)
    assert await imported(book, old) == 0
    assert (await exported(book)).members == before.members
    moved = replace(old.consumers[mover.consumer], generation=2, holding={hosts[2]: {"VCPU": 3}})
    assert await imported(book, replace(old, consumers={**old.consumers, mover.consumer: moved})) > 0
    claims = [member(rng, host) for host in hosts]
    assert await outcomes(book, *claims) == ["claimed", "ruled_out", "ruled_out"]


@pytest.mark.parametrize("other", ["berth.placement.v2", "berth.placement.v4"])
def test_a_file_names_its_version_and_another_version_is_refused_in_words(other: str) -> None:
    empty = BookExport(frozenset(), frozenset(), {}, {}, frozenset())
    assert next(export.lines(empty)) == b'{"format":"berth.placement.v3"}\n'
    without = next(export.lines(replace(empty, members=None)))
    assert without == b'{"format":"berth.placement.v3","without_members":true}\n'
    rows = [f'{{"format": "{other}", "secrets": 1}}\n'.encode(), *list(export.lines(empty))[1:]]
    with pytest.raises(InvalidExport, match=rf"another version of berth: it is {re.escape(other)}, and"):
        export.parse(rows)
    group = GroupMember("p", APART.uuid, new_uuid(random.Random(1)))
    lines = list(export.lines(replace(empty, members=frozenset({group}))))
    with pytest.raises(InvalidExport, match="line 2 is not part"):
        export.parse([without, *lines[1:]])


async def test_an_import_waits_for_claims_that_have_read_their_group_and_their_project(
    book: Book, hosts: list[str], rng: random.Random
) -> None:
    """Decided by the members and the sums of the book before, they would break the rule in the book after."""
    assert await outcomes(book, member(rng, hosts[0])) == ["claimed"]
    file = await exported(book)
    for requested in (member(rng, hosts[1]), member(rng, hosts[1], None, TWO)):
        async with book.database.raw() as reading:
            await members.lock(reading, ClaimGroup([requested]).keys)
            await members.read(reading, ClaimGroup([requested]).members())
            if requested.limits:
                await claims.lock(reading, ClaimGroup([requested]).consumers, None, limited=["p"], alone=True)
            importing = asyncio.create_task(imported(book, file))
            async with asyncio.timeout(PATIENCE_S):
                while not await reading.fetchval(WAITING):
                    pass
            assert not importing.done()
            await reading.execute("DELETE FROM consumers WHERE uuid = $1", requested.consumer)
        assert await importing == 0
