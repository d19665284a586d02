"""A claim's reads of its server group: no more than decides, and nothing that has just been moved."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Sequence

import asyncpg
import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    ConsumerAllocations,
    GroupPolicy,
    LocateRequest,
    Migration,
    Release,
    ServerGroup,
    Swap,
)
from placement_worker.domain import claim_group
from placement_worker.domain.allocations import Replace
from placement_worker.domain.claim_group import ClaimGroup
from placement_worker.domain.claim_ledger import ConsumerWrite
from placement_worker.domain.claims import ClaimItem
from placement_worker.domain.server_groups import GroupMember
from placement_worker.domain.values import ABOVE_CELLS
from placement_worker.operations import export, export_store
from placement_worker.operations.export import InvalidExport, PlacementExport
from placement_worker.service import claim, write_allocations
from placement_worker.store import members
from placement_worker.store.port import ClaimsToLock
from tests.integration.placement_worker.conftest import PlacementDatabase
from tests.kit.databases import WAITING
from tests.kit.servers import fresh_database
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres


# --- a claim's reads of its server group: no more than decides, and nothing that has just been moved

PATIENCE_S = 60.0
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
    placement: PlacementDatabase, rng: random.Random, policy: GroupPolicy, most: int
) -> None:
    hosts = await placement.hosts(MANY, rng, VCPU=2)
    replies = await placement.store.apply([member(rng, host, GroupPolicy.SOFT_ANTI_AFFINITY) for host in hosts])
    assert {str(reply.outcome) for reply in replies} == {"claimed"}
    requested = member(rng, hosts[7], policy)
    async with placement.database.raw() as connection:
        (found,) = (await placement.rows.on(connection).members(ClaimGroup([requested]).members())).values() or [{}]
    assert len(found) <= most
    assert not most or ((hosts[7],) in map(tuple, found.values()))
    (reply,) = await placement.store.apply([requested])
    # Members are on many hosts: no host has them all, and none has none.
    is_hard = policy in (GroupPolicy.ANTI_AFFINITY, GroupPolicy.AFFINITY)
    expected = ClaimOutcome.POLICY_VIOLATED if is_hard else ClaimOutcome.CLAIMED
    assert isinstance(reply, ClaimResult) and reply.outcome is expected


@pytest.mark.parametrize("analyzed", [False, True])
async def test_a_claim_of_a_large_group_reads_as_many_rows_as_one_of_a_small_group(
    placement: PlacementDatabase, rng: random.Random, *, analyzed: bool
) -> None:
    """PostgreSQL cannot know how many members a group has, so its plan must not matter: blocks are counted."""
    hosts = await placement.hosts(LARGE, rng, VCPU=2)
    on_empty_hosts = [member(rng, host, GroupPolicy.ANTI_AFFINITY) for host in hosts[-BATCH:]]
    await placement.store.apply([member(rng, host, GroupPolicy.ANTI_AFFINITY) for host in hosts[:SMALL]])
    small = await blocks_read(placement, on_empty_hosts)
    await placement.store.apply([member(rng, host, GroupPolicy.ANTI_AFFINITY) for host in hosts[SMALL:-BATCH]])
    if analyzed:
        async with placement.database.raw() as connection:
            await connection.execute("ANALYZE group_members, allocations, providers")
    large = await blocks_read(placement, on_empty_hosts)
    assert max(small, large) <= MOST_BLOCKS * BATCH, (small, large)


def moved(rng: random.Random, built: Claim, host: str) -> Claim:
    """The claim by which a member moves to another host."""
    (option,) = built.options
    migration = Migration(uuid=new_uuid(rng), source=option.allocations)
    there = ClaimOption(allocations={host: {"VCPU": 1}}, host=host)
    return replace(built, attempt=2, options=(there,), consumer_generation=1, migration=migration)


async def test_moves_of_as_many_groups_read_no_more_than_those_of_one(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    """Each group's members are found among the consumers of its own claims, not of all in the batch."""
    hosts = await placement.hosts(2 * BATCH, rng, VCPU=2)
    built = [member(rng, host, GroupPolicy.ANTI_AFFINITY) for host in hosts[:BATCH]]
    of_own_groups = [replace(one, server_group=replace(one.server_group, uuid=new_uuid(rng))) for one in built]
    await placement.store.apply(of_own_groups)
    moves = [moved(rng, one, host) for one, host in zip(of_own_groups, hosts[BATCH:], strict=True)]
    assert await blocks_read(placement, moves, [one.consumer for one in moves]) <= MOST_BLOCKS * BATCH


async def test_members_that_the_transaction_names_are_read_beside_those_that_stay(
    placement: PlacementDatabase, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one member that was read was released: the group was found empty, and split."""
    monkeypatch.setattr(claim_group, "MAX_GROUP_MEMBERS_READ", 1)
    here, there = await placement.hosts(2, rng, VCPU=4)
    both = sorted((member(rng, here, GroupPolicy.AFFINITY) for _ in range(2)), key=lambda one: one.consumer)
    await placement.store.apply(both)
    first = Release(consumer=both[0].consumer)
    reply = (await placement.store.apply([first, member(rng, there, GroupPolicy.AFFINITY)]))[1]
    assert isinstance(reply, ClaimResult) and reply.outcome is ClaimOutcome.POLICY_VIOLATED


async def blocks_read(placement: PlacementDatabase, claims: Sequence[Claim], holders: Sequence[str] = ()) -> int:
    """How many blocks the claims' read of their groups touches."""
    async with placement.database.raw() as connection:
        columns = members.columns(ClaimGroup(claims).members(set(holders)))
        answer = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {members.READ}", *columns)
    (plan,) = json.loads(answer)
    blocks: int = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
    return blocks


async def test_a_member_that_put_moves_to_a_host_while_a_claim_waits_for_it_is_seen(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    """PUT takes no lock of the group: the claim has the group's, and waits for the host."""
    here, there = await placement.hosts(2, rng, VCPU=4)
    first = member(rng, here, GroupPolicy.ANTI_AFFINITY)
    await placement.store.apply([first])
    watcher = await asyncpg.connect(placement.url)
    write = ConsumerWrite(first.consumer, {there: {"VCPU": 1}}, "p", "u", None, 1)
    async with placement.database.raw() as moving:
        assert await write_allocations(placement.rows.on(moving), [Replace((write,))]) == [None]
        claiming = asyncio.create_task(placement.store.apply([member(rng, there, GroupPolicy.ANTI_AFFINITY)]))
        async with asyncio.timeout(PATIENCE_S):
            while not await watcher.fetchval(WAITING):
                assert not claiming.done()
    (reply,) = await claiming
    assert isinstance(reply, ClaimResult)
    assert (reply.outcome, reply.members) == (ClaimOutcome.POLICY_VIOLATED, {there: 1})
    await watcher.close()


# --- a placement that goes out and in again goes on to enforce what it did: server groups' rules, and projects' limits

APART = ServerGroup(uuid="e0000000-0000-4000-8000-000000000000", policy=GroupPolicy.ANTI_AFFINITY)
TOGETHER = ServerGroup(uuid="e1000000-0000-4000-8000-000000000000", policy=GroupPolicy.AFFINITY)
NOT_GRANTED = """
SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database AND d.datname = current_database()
WHERE NOT l.granted
"""
TWO = {"INSTANCES": 2, "VCPU": 6}


@pytest.fixture
async def other(postgres_server: str) -> AsyncIterator[PlacementDatabase]:
    """Another placement, empty."""
    with fresh_database(postgres_server) as url:
        made = PlacementDatabase(url)
        await made.open()
        yield made
        await made.store.close()


@pytest.fixture
async def hosts(placement: PlacementDatabase, rng: random.Random) -> list[str]:
    return await placement.hosts(3, rng, VCPU=16)


def exported_member(
    rng: random.Random, host: str, group: ServerGroup | None = APART, most: dict[str, int] | None = None
) -> Claim:
    option = ClaimOption(allocations={host: {"VCPU": 3}}, host=host)
    return Claim(consumer=new_uuid(rng), options=(option,), project_id="p", server_group=group, limits=most or {})


async def outcomes(placement: PlacementDatabase, *claims: Claim) -> list[str]:
    return [str(reply.outcome) for reply in await placement.store.apply(claims)]


async def exported(placement: PlacementDatabase) -> PlacementExport:
    await placement.store.names.refresh()
    async with placement.database.raw() as connection:
        return export.parse(list(export.lines(await export_store.read(connection, placement.store.names))))


async def imported(placement: PlacementDatabase, what: PlacementExport) -> int:
    async with placement.rows.transaction() as transaction:
        return await export_store.assign(transaction, what, placement.store.names)


async def test_an_imported_placement_holds_claims_to_groups_and_limits_as_the_first_did(
    placement: PlacementDatabase, other: PlacementDatabase, hosts: list[str], rng: random.Random
) -> None:
    near = exported_member(rng, hosts[2], TOGETHER)
    assert (
        await outcomes(placement, exported_member(rng, hosts[0]), exported_member(rng, hosts[1]), near)
        == ["claimed"] * 3
    )
    before = await exported(placement)
    assert before.members is not None
    assert len(before.members) == 3
    assert await imported(other, before) == 6
    assert await exported(other) == before
    assert await imported(other, before) == 0, "what is equal is not written"
    for one in (placement, other):
        claims = (
            exported_member(rng, hosts[0]),
            exported_member(rng, hosts[1], TOGETHER),
            exported_member(rng, hosts[2], None, TWO),
        )
        assert await outcomes(one, *claims) == ["policy_violated", "policy_violated", "over_quota"]
        assert await outcomes(one, Release(consumer=near.consumer), exported_member(rng, hosts[1], TOGETHER)) == [  # type: ignore[arg-type]
            "released",
            "claimed",
        ]


async def test_who_is_gone_is_no_member_and_who_comes_back_is_in_its_own_group(
    placement: PlacementDatabase, hosts: list[str], rng: random.Random
) -> None:
    """A row of one who holds nothing counts no more, and does not count again when an import has it hold something."""
    alone = exported_member(rng, hosts[0], None)
    assert await outcomes(placement, alone) == ["claimed"]
    before = await exported(placement)
    joined = replace(alone, server_group=APART)
    for file in (before, replace(before, members=None)):
        await placement.store.apply([Release(consumer=alone.consumer)])
        assert await outcomes(placement, joined) == ["claimed"]
        await placement.store.apply([Release(consumer=alone.consumer)])
        assert await imported(placement, file) > 0
        assert (await exported(placement)).members == frozenset()


async def test_a_file_without_groups_leaves_groups_as_they_are_and_members_follow_what_they_hold(
    placement: PlacementDatabase, hosts: list[str], rng: random.Random
) -> None:
    mover, stays = exported_member(rng, hosts[0]), exported_member(rng, hosts[1])
    assert await outcomes(placement, mover, stays) == ["claimed"] * 2
    before = await exported(placement)
    old = export.parse(list(export.lines(replace(before, members=None))))
    assert (old.members, old.consumers) == (None, before.consumers)
    assert await imported(placement, old) == 0
    assert (await exported(placement)).members == before.members
    moved = replace(old.consumers[mover.consumer], generation=2, allocations={hosts[2]: {"VCPU": 3}})
    assert await imported(placement, replace(old, consumers={**old.consumers, mover.consumer: moved})) > 0
    claims = [exported_member(rng, host) for host in hosts]
    assert await outcomes(placement, *claims) == ["claimed", "policy_violated", "policy_violated"]


@pytest.mark.parametrize("other", ["berth.placement.v2", "berth.placement.v4"])
def test_a_file_names_its_version_and_another_version_is_refused_in_words(other: str) -> None:
    empty = PlacementExport(frozenset(), frozenset(), {}, {}, frozenset())
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
    placement: PlacementDatabase, hosts: list[str], rng: random.Random
) -> None:
    """Decided by the members and the sums of placement before, they would break the rule in placement after."""
    assert await outcomes(placement, exported_member(rng, hosts[0])) == ["claimed"]
    file = await exported(placement)
    for requested in (exported_member(rng, hosts[1]), exported_member(rng, hosts[1], None, TWO)):
        async with placement.database.raw() as reading:
            transaction = placement.rows.on(reading)
            await transaction.lock_groups(ClaimGroup([requested]).keys)
            await transaction.members(ClaimGroup([requested]).members())
            if requested.limits:
                await transaction.lock_claims(ClaimsToLock(ClaimGroup([requested]).consumers, None, ["p"], alone=True))
            importing = asyncio.create_task(imported(placement, file))
            await until(lambda: reading.fetchval(NOT_GRANTED))
            assert not importing.done()
            await reading.execute("DELETE FROM consumers WHERE uuid = $1", requested.consumer)
        assert await importing == 0


# --- members of server groups are not trimmed while they join again


async def until_it_waits(placement: PlacementDatabase, is_over: Callable[[], bool]) -> None:
    watcher = await asyncpg.connect(placement.url)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not is_over() and not await watcher.fetchval(WAITING):
                pass
    finally:
        await watcher.close()


async def test_a_member_that_joins_again_while_members_are_trimmed_stays_one(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    """PostgreSQL 16.2 deleted the row that the claim had just written: the rule held no more for its host."""
    (host,) = await placement.hosts(1, rng, VCPU=8)
    option = ClaimOption(allocations={host: {"VCPU": 1}}, host=host)
    consumer = new_uuid(rng)

    def member(uuid: str, attempt: int = 1) -> Claim:
        return Claim(consumer=uuid, attempt=attempt, options=(option,), project_id="p", server_group=APART)

    await placement.store.apply([member(consumer)])
    await placement.store.apply([Release(consumer=consumer, attempt=1)])
    async with placement.database.raw() as forgetting:  # its row is purged first: only then is the member one to trim
        await forgetting.execute("DELETE FROM consumers WHERE uuid = $1", consumer)
    async with placement.database.raw() as claiming:
        (reply,) = await claim(placement.rows.on(claiming), ClaimGroup([member(consumer, 2)]), ABOVE_CELLS)
        assert reply.outcome == "claimed"
        trimming = asyncio.create_task(
            placement.store.trim(keep_changes=1000, keep_ended_attempts_s=1e6, keep_reporters_s=1e6, limit=100)
        )
        await until_it_waits(placement, trimming.done)
    await trimming
    assert (await placement.store.reads.locate([LocateRequest(project_id="p", server_group=APART.uuid)]))[
        0
    ].members == {host: 1}
    (other,) = await placement.store.apply([member(new_uuid(rng))])
    assert other.outcome == "policy_violated"


@pytest.mark.parametrize("released", [False, True], ids=["holds again", "held again, and is kept for a revert"])
async def test_a_member_that_is_on_record_again_between_the_two_looks_is_not_trimmed(
    placement: PlacementDatabase, rng: random.Random, *, released: bool
) -> None:
    """A swap names no group, so it does not wait for the member's row, which the trimming has locked by then."""
    (host,) = await placement.hosts(1, rng, VCPU=8)
    consumer = new_uuid(rng)
    option = ClaimOption(allocations={host: {"VCPU": 1}}, host=host)
    await placement.store.apply([Claim(consumer=consumer, options=(option,), project_id="p", server_group=APART)])
    await placement.store.apply([Release(consumer=consumer, attempt=1)])
    back = Swap(consumers=(ConsumerAllocations(consumer=consumer, allocations=option.allocations, project_id="p"),))
    came: Sequence[ClaimItem] = [back, Release(consumer=consumer, attempt=1)] if released else [back]
    async with placement.database.raw() as other:
        await other.execute("DELETE FROM consumers WHERE uuid = $1", consumer)
    async with placement.database.raw() as holding:  # a lock that a DELETE waits for, and SELECT FOR UPDATE does not
        await holding.execute("LOCK TABLE group_members IN SHARE MODE")
        trimming = asyncio.create_task(
            placement.store.trim(keep_changes=1000, keep_ended_attempts_s=1e6, keep_reporters_s=1e6, limit=100)
        )
        await until_it_waits(placement, trimming.done)
        assert not trimming.done()
        for item in came:
            (reply,) = await placement.store.apply([item])
            assert str(reply.outcome) in ("claimed", "released")
    await trimming
    async with placement.database.raw() as other:
        assert await other.fetchval("SELECT count(*) FROM group_members WHERE consumer = $1", consumer) == 1
