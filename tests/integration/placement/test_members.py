"""A claim's reads of its server group: no more than decides, and nothing that has just been moved."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

import asyncpg
import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    ConsumerAllocations,
    Migration,
    Release,
    Revert,
    Swap,
)
from placement_worker.book import write_allocations
from placement_worker.domain import claim_group
from placement_worker.domain.allocations import Replace
from placement_worker.domain.claim_group import ClaimGroup
from placement_worker.domain.claim_ledger import ConsumerWrite
from placement_worker.store import members

from .conftest import Book

pytestmark = pytest.mark.postgres

PATIENCE_S = 60.0
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
MANY = claim_group.MAX_GROUP_MEMBERS_READ + 20
BATCH, SMALL, LARGE = 100, 50, 900  # claims of one transaction; members of a group; hosts
MOST_BLOCKS = 30  # for each claim


def group(policy: GroupPolicy) -> ServerGroup:
    return ServerGroup(uuid="e0000000-0000-4000-8000-000000000000", policy=policy)


def member(rng: random.Random, host: str, policy: GroupPolicy) -> Claim:
    option = ClaimOption(allocations={host: {"VCPU": 1}}, host=host)
    return Claim(consumer=new_uuid(rng), options=(option,), project_id="p", server_group=group(policy))


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        (GroupPolicy.ANTI_AFFINITY, 1),
        (GroupPolicy.AFFINITY, claim_group.MAX_GROUP_MEMBERS_READ + 1),
        (GroupPolicy.SOFT_ANTI_AFFINITY, 0),
        (GroupPolicy.SOFT_AFFINITY, 0),
    ],
)
async def test_a_claim_reads_the_members_on_the_hosts_that_it_names_however_many_there_are(
    book: Book, rng: random.Random, policy: GroupPolicy, most: int
) -> None:
    hosts = await book.hosts(MANY, rng, VCPU=2)
    replies = await book.store.apply([member(rng, host, GroupPolicy.SOFT_ANTI_AFFINITY) for host in hosts])
    assert {str(reply.outcome) for reply in replies} == {"claimed"}
    requested = member(rng, hosts[7], policy)
    async with book.database.raw() as connection:
        (found,) = (await members.read(connection, ClaimGroup([requested]).members())).values() or [{}]
    assert len(found) <= most
    assert not most or ((hosts[7],) in map(tuple, found.values()))
    (reply,) = await book.store.apply([requested])
    # Members are on many hosts: no host has them all, and none has none.
    is_hard = policy in (GroupPolicy.ANTI_AFFINITY, GroupPolicy.AFFINITY)
    expected = ClaimOutcome.RULED_OUT if is_hard else ClaimOutcome.CLAIMED
    assert isinstance(reply, ClaimResult) and reply.outcome is expected


@pytest.mark.parametrize("analyzed", [False, True])
async def test_a_claim_of_a_large_group_reads_as_many_rows_as_one_of_a_small_group(
    book: Book, rng: random.Random, *, analyzed: bool
) -> None:
    """PostgreSQL cannot know how many members a group has, so its plan must not matter: blocks are counted."""
    hosts = await book.hosts(LARGE, rng, VCPU=2)
    on_empty_hosts = [member(rng, host, GroupPolicy.ANTI_AFFINITY) for host in hosts[-BATCH:]]
    await book.store.apply([member(rng, host, GroupPolicy.ANTI_AFFINITY) for host in hosts[:SMALL]])
    small = await blocks_read(book, on_empty_hosts)
    await book.store.apply([member(rng, host, GroupPolicy.ANTI_AFFINITY) for host in hosts[SMALL:-BATCH]])
    if analyzed:
        async with book.database.raw() as connection:
            await connection.execute("ANALYZE group_members, allocations, providers")
    large = await blocks_read(book, on_empty_hosts)
    assert max(small, large) <= MOST_BLOCKS * BATCH, (small, large)


def moved(rng: random.Random, built: Claim, host: str) -> Claim:
    """The claim by which a member moves to another host."""
    (option,) = built.options
    migration = Migration(uuid=new_uuid(rng), source=option.allocations)
    there = ClaimOption(allocations={host: {"VCPU": 1}}, host=host)
    return replace(built, attempt=2, options=(there,), consumer_generation=1, migration=migration)


async def test_moves_of_as_many_groups_read_no_more_than_those_of_one(book: Book, rng: random.Random) -> None:
    """Each group's members are found among the consumers of its own claims, not of all in the batch."""
    hosts = await book.hosts(2 * BATCH, rng, VCPU=2)
    built = [member(rng, host, GroupPolicy.ANTI_AFFINITY) for host in hosts[:BATCH]]
    of_own_groups = [replace(one, server_group=replace(one.server_group, uuid=new_uuid(rng))) for one in built]
    await book.store.apply(of_own_groups)
    moves = [moved(rng, one, host) for one, host in zip(of_own_groups, hosts[BATCH:], strict=True)]
    assert await blocks_read(book, moves, [one.consumer for one in moves]) <= MOST_BLOCKS * BATCH


@pytest.mark.parametrize("reverted", [False, True])
async def test_a_member_that_comes_to_a_host_without_naming_its_group_is_seen(
    book: Book, rng: random.Random, *, reverted: bool
) -> None:
    """In one transaction: a revert and a swap name no group, and a claim names the host that the member comes to."""
    here, there = await book.hosts(2, rng, VCPU=4)
    first = member(rng, here, GroupPolicy.ANTI_AFFINITY)
    await book.store.apply([first])
    goes = ConsumerAllocations(
        consumer=first.consumer, allocations={there: {"VCPU": 1}}, consumer_generation=1, project_id="p", user_id="u"
    )
    moving: Revert | Swap = Swap(consumers=(goes,))
    if reverted:
        move = moved(rng, first, there)
        await book.store.apply([move])
        assert move.migration is not None
        moving = Revert(consumer=first.consumer, attempt=3, source_attempt=1, migration=move.migration)
    reply = (await book.store.apply([moving, member(rng, here if reverted else there, GroupPolicy.ANTI_AFFINITY)]))[1]
    assert isinstance(reply, ClaimResult) and reply.outcome is ClaimOutcome.RULED_OUT


async def test_members_that_the_transaction_names_are_read_beside_those_that_stay(
    book: Book, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one member that was read was released: the group was found empty, and split."""
    monkeypatch.setattr(claim_group, "MAX_GROUP_MEMBERS_READ", 1)
    here, there = await book.hosts(2, rng, VCPU=4)
    both = sorted((member(rng, here, GroupPolicy.AFFINITY) for _ in range(2)), key=lambda one: one.consumer)
    await book.store.apply(both)
    first = Release(consumer=both[0].consumer)
    reply = (await book.store.apply([first, member(rng, there, GroupPolicy.AFFINITY)]))[1]
    assert isinstance(reply, ClaimResult) and reply.outcome is ClaimOutcome.RULED_OUT


async def blocks_read(book: Book, claims: Sequence[Claim], holders: Sequence[str] = ()) -> int:
    """How many blocks the claims' read of their groups touches."""
    async with book.database.raw() as connection:
        columns = members.columns(ClaimGroup(claims).members(set(holders)))
        answer = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {members.READ}", *columns)
    (plan,) = json.loads(answer)
    blocks: int = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
    return blocks


async def test_a_member_that_put_moves_to_a_host_while_a_claim_waits_for_it_is_seen(
    book: Book, rng: random.Random
) -> None:
    """PUT takes no lock of the group: the claim has the group's, and waits for the host."""
    here, there = await book.hosts(2, rng, VCPU=4)
    first = member(rng, here, GroupPolicy.ANTI_AFFINITY)
    await book.store.apply([first])
    watcher = await asyncpg.connect(book.url)
    write = ConsumerWrite(first.consumer, {there: {"VCPU": 1}}, "p", "u", None, 1)
    async with book.database.raw() as moving:
        assert await write_allocations(book.rows.on(moving), [Replace((write,))]) == [None]
        claiming = asyncio.create_task(book.store.apply([member(rng, there, GroupPolicy.ANTI_AFFINITY)]))
        async with asyncio.timeout(PATIENCE_S):
            while not await watcher.fetchval(WAITING):
                assert not claiming.done()
    (reply,) = await claiming
    assert isinstance(reply, ClaimResult)
    assert (reply.outcome, reply.members) == (ClaimOutcome.RULED_OUT, {there: 1})
    await watcher.close()
