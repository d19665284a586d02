"""The feed on a real PostgreSQL: dense, in commit order, complete, published once and in order by many publishers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import asyncpg
import msgspec
import pytest
from sqlalchemy.engine import make_url

from berth.up.embedded.postgres import Postgres
from bus.clock import new_uuid
from bus.contracts.feed import Change, ChangesPage, FeedChanges, changes_in
from bus.contracts.placement import ProviderState, Release
from bus.faults import DatabaseUnavailable
from bus.persistence.database import Database
from placement_worker import service as placement_service
from placement_worker.operations import export, export_store
from placement_worker.replica.catch_up import LocalReplica
from placement_worker.service import PlacementService
from placement_worker.store import feed
from placement_worker.store.postgres_rows import PostgresPlacementRows
from tests.integration.placement_worker.conftest import PlacementDatabase, claim
from tests.kit.servers import fresh_database
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres


# --- the feed on a real PostgreSQL: dense, in commit order, complete, published once and in order by many publishers

PATIENCE_S = 60.0


async def nothing(_published: FeedChanges) -> None:
    return


async def all_changes(store: PlacementService) -> list[Change]:
    changes: list[Change] = []
    while True:
        page = await store.changes(len(changes), 37)
        assert not page.too_old
        if not page.changes:
            return changes
        changes += page.changes


def replay(changes: Sequence[Change]) -> dict[str, tuple[int, dict[str, int]]]:
    """{provider: (generation, used)} by applying every change in order, as a replica would."""
    placement: dict[str, tuple[int, dict[str, int]]] = {}
    for change in changes:
        if change.removed:
            del placement[change.provider]
        elif change.state is not None:
            placement[change.provider] = (change.generation, dict(change.state.used))
        else:
            generation, used = placement[change.provider]
            assert change.generation > generation
            placement[change.provider] = (change.generation, {**used, **(change.used or {})})
    return {uuid: (generation, _nonzero(used)) for uuid, (generation, used) in placement.items()}


def _nonzero(used: dict[str, int]) -> dict[str, int]:
    return {name: amount for name, amount in used.items() if amount}


def as_replayed(providers: Sequence[ProviderState]) -> dict[str, tuple[int, dict[str, int]]]:
    return {state.uuid: (state.generation, dict(state.used)) for state in providers}


async def busy(placement: PlacementDatabase, store: PlacementService, hosts: Sequence[str], seed: int) -> None:
    rng = random.Random(seed)
    mine: list[str] = []
    for _ in range(30):
        fresh = [new_uuid(rng) for _ in range(4)]
        await store.apply([claim(consumer, {rng.choice(hosts): {"VCPU": 1}}) for consumer in fresh])
        mine += fresh
        await store.apply([Release(consumer=mine.pop(rng.randrange(len(mine)))) for _ in range(2)])
        await store.apply_reports([placement.host(rng.choice(hosts), VCPU=rng.randint(900, 999))])


async def test_many_writers_make_one_dense_feed_that_replays_to_placement(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    hosts = await placement.hosts(5, rng, VCPU=1000)
    second = await placement.another()
    seen: list[int] = []
    writing = True

    async def watch() -> None:
        """A number once seen is never followed by a smaller one that was not there before: no late arrivals."""
        while writing:
            page = await second.changes(seen[-1] if seen else 0, 1000)
            seen.extend(change.sequence for change in page.changes)

    watching = asyncio.create_task(watch())
    async with asyncio.TaskGroup() as group:
        for seed in range(4):
            group.create_task(busy(placement, placement.store if seed % 2 else second, hosts, seed))
    writing = False
    await watching
    changes = await all_changes(placement.store)
    numbers = [change.sequence for change in changes]
    assert numbers == list(range(1, (await placement.store.head()).sequence + 1))
    assert seen == numbers[: len(seen)]
    page = await placement.store.snapshot(None, 1000)
    assert page.sequence == numbers[-1]
    assert replay(changes) == as_replayed(page.providers)
    assert await placement.findings() == []


async def test_what_was_committed_leaves_as_the_same_bytes(placement: PlacementDatabase, rng: random.Random) -> None:
    hosts = await placement.hosts(3, rng, VCPU=10)
    await placement.store.apply([claim(new_uuid(rng), {host: {"VCPU": 1}}) for host in hosts])
    async with placement.database.raw() as connection:
        committed = [row[0] for row in await connection.fetch("SELECT body FROM changes ORDER BY last")]
    page = await placement.store.changes(0, 100)
    assert [change.sequence for change in page.changes] == list(range(1, page.head + 1))
    sent: list[bytes] = []

    async def send(announced: FeedChanges) -> None:
        sent.append(msgspec.json.encode(announced))

    await placement.store.publish(send, 100)
    for message in (*sent, msgspec.json.encode(page)):
        assert all(body in message for body in committed)
        decoded = msgspec.json.decode(message, type=FeedChanges | ChangesPage)
        assert decoded.changes == page.changes


async def test_two_publishers_publish_everything_once_and_in_order(
    placement: PlacementDatabase, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_service, "LEASE_S", 10 * PATIENCE_S)  # no worker hangs here, however slow the machine
    hosts = await placement.hosts(5, rng, VCPU=1000)
    second = await placement.another()
    published: list[int] = []

    async def send(announced: FeedChanges) -> None:
        changes = announced.changes
        await asyncio.sleep(0)  # a confirm takes a turn of the loop
        published.extend(change.sequence for change in changes)

    async def publish(store: PlacementService) -> None:
        while not published or published[-1] < target:
            await store.publish(send, 7)

    await busy(placement, second, hosts, 1)
    target = (await placement.store.head()).sequence
    await asyncio.gather(publish(placement.store), publish(second))
    assert published == list(range(1, target + 1))


async def test_a_publisher_that_dies_as_it_writes_its_position_is_repeated_not_skipped(
    placement: PlacementDatabase, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_service, "LEASE_S", 0.01)
    await placement.hosts(3, rng, VCPU=1)
    second = await placement.another()
    sent: list[int] = []

    async def send(announced: FeedChanges) -> None:
        changes = announced.changes
        sent.extend(change.sequence for change in changes)

    async def kill_who_waits() -> None:
        await until(
            lambda: killer.fetchval(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                " AND datname = current_database()"
            )
        )

    killer = await asyncpg.connect(placement.url)

    async def hold_the_position_and_send(announced: FeedChanges) -> None:
        await send(announced)
        await blocker.execute("BEGIN; SELECT FROM placement.feed_position FOR UPDATE")

    blocker = await asyncpg.connect(placement.url)
    killing = asyncio.create_task(kill_who_waits())
    with pytest.raises(DatabaseUnavailable):
        await placement.store.publish(hold_the_position_and_send, 100)
    await killing
    await blocker.close()
    async with asyncio.timeout(PATIENCE_S):
        while (published := await second.publish(send, 100)).taken:  # each look is a round trip
            pass
    assert published.count == 3
    assert sent == [1, 2, 3, 1, 2, 3]
    assert (await placement.store.publish(send, 100)).count == 0
    await killer.close()


async def test_a_lease_of_a_clock_that_was_restored_delays_no_process(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    await placement.hosts(1, rng, VCPU=1)
    async with placement.database.raw() as connection:
        await connection.execute("UPDATE feed_position SET taken_until = now() + interval '1 hour'")
    assert (await placement.store.publish(nothing, 100)).count == 1


async def test_publishing_waits_for_no_disk(placement: PlacementDatabase, rng: random.Random) -> None:
    """A deferred trigger runs in the commit itself, and sees what the commit goes by."""
    await placement.hosts(1, rng, VCPU=1)
    async with placement.database.raw() as connection:
        await connection.execute(
            "CREATE TABLE seen (way text);"
            "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$;"
            "CREATE CONSTRAINT TRIGGER see AFTER UPDATE ON feed_position DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION see()"
        )
    assert (await placement.store.publish(nothing, 100)).count == 1
    assert (await placement.store.publish(nothing, 100)).count == 0
    async with placement.database.raw() as connection:
        assert await connection.fetchval("SELECT array_agg(way) FROM seen") == ["off", "off"]


async def test_the_next_changes_are_found_by_key(placement: PlacementDatabase) -> None:
    async with placement.database.single() as connection:
        await connection.execute("INSERT INTO changes SELECT n, n, '[]' FROM generate_series(1, 50000) n")
        await connection.execute("UPDATE feed_position SET number = 40000; ANALYZE changes")
        await connection.execute(f"PREPARE take(bigint, float8, timestamptz) AS {feed.TAKE}")
        found = await connection.fetch("EXPLAIN EXECUTE take(16, 2.0, NULL)")
        await connection.execute("DEALLOCATE take")
    plan = "\n".join(row[0] for row in found)
    assert "changes_pkey" in plan, plan
    assert "Seq Scan on changes" not in plan, plan


async def test_what_is_read_ends_before_changes_that_were_trimmed_meanwhile(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    """A publisher reads without a transaction: a process that has overtaken it may have published and trimmed."""
    for _ in range(feed.ROWS_AT_ONCE + 4):
        await placement.hosts(1, rng, VCPU=1)
    async with placement.database.single() as connection:
        found = await connection.fetch(feed.READ, 0, feed.ROWS_AT_ONCE)
        await connection.execute("DELETE FROM changes WHERE last <= $1", feed.ROWS_AT_ONCE + 2)
        rows, more = await feed.read(connection, 0, 1000, found)
    assert [change.sequence for change in changes_in(rows)] == list(range(1, feed.ROWS_AT_ONCE + 1))
    assert more


async def test_a_large_batch_is_cut_into_rows_and_read_back_whole(
    placement: PlacementDatabase, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_CHANGES_PER_ROW", 7)
    hosts = await placement.hosts(50, rng, VCPU=1)
    page = await placement.store.changes(0, 10_000)
    assert [change.provider for change in page.changes] == hosts
    monkeypatch.setattr(feed, "MAX_BYTES_READ", 1)
    assert len((await placement.store.changes(0, 10_000)).changes) == 7
    monkeypatch.setattr(feed, "MAX_BYTES_READ", 10**6)
    middle = await placement.store.changes(10, 20)
    assert [change.sequence for change in middle.changes] == list(range(11, 31))


async def test_a_snapshot_comes_in_pages(
    placement: PlacementDatabase, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = sorted(await placement.hosts(5, rng, VCPU=1))
    first = await placement.store.snapshot(None, 3)
    assert [state.uuid for state in first.providers] == hosts[:3]
    assert first.more
    monkeypatch.setattr(placement_service, "MAX_PAGE_BYTES", 1)
    assert [state.uuid for state in (await placement.store.snapshot(None, 3)).providers] == hosts[:1]
    monkeypatch.undo()
    second = await placement.store.snapshot(first.providers[-1].uuid, 3)
    assert [state.uuid for state in second.providers] == hosts[3:]
    assert not second.more


# --- a placement that was restored is recognised, and its feed gets another incarnation id

# As a restore of files does it: placement's rows are what they were some changes ago, and nothing else has changed.
SET_BACK = """
UPDATE placement.feed_head SET number = $1; DELETE FROM placement.changes WHERE last > $1;
"""
END_SESSIONS = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = $1"


async def set_back(placement: PlacementDatabase, number: int) -> None:
    connection = await asyncpg.connect(placement.url)
    for statement in SET_BACK.replace("$1", str(number)).strip().split("; "):
        await connection.execute(statement)
    await connection.close()


async def test_a_database_that_was_restored_elsewhere_begins_another_history(
    placement: PlacementDatabase, rng: random.Random, postgres_server: str
) -> None:
    """As CREATE DATABASE makes it from a copy: every row, the table's own number and the cluster are the same."""
    await placement.hosts(3, rng, VCPU=4)
    first = await placement.store.head()
    await placement.store.close()
    with fresh_database(postgres_server) as url:
        target = make_url(url).database
        admin = await asyncpg.connect(make_url(postgres_server).set(drivername="postgresql").render_as_string(False))
        await admin.execute(f'DROP DATABASE "{target}"')
        # No other session may use the one that is copied; the lender of databases keeps one.
        await admin.fetch(END_SESSIONS, make_url(placement.url).database)
        await admin.execute(f'CREATE DATABASE "{target}" TEMPLATE "{make_url(placement.url).database}"')
        await admin.close()
        restored = PlacementService(PostgresPlacementRows(Database(url, "placement")))
        await restored.open()
        second = await restored.head()
        assert second.sequence == first.sequence
        assert second.incarnation != first.incarnation
        page = await restored.changes(1, 10, first.incarnation)
        assert (page.too_old, page.changes, page.incarnation) == (True, (), second.incarnation)
        assert not (await restored.changes(1, 10, second.incarnation)).too_old
        await restored.close()


async def test_a_placement_that_opens_again_goes_on_in_its_history(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    await placement.hosts(1, rng, VCPU=4)
    first = await placement.store.head()
    again = PlacementService(PostgresPlacementRows(Database(placement.url, "placement")))
    await again.open()
    assert await again.head() == first
    assert not (await again.newest()).renewed
    await again.close()


async def test_another_timeline_is_another_history_found_by_one_of_many(placement: PlacementDatabase) -> None:
    """The promotion of a stand-by, and a recovery to a point in time, begin a new timeline."""
    first = await placement.store.head()
    connection = await asyncpg.connect(placement.url)
    await connection.execute("SET search_path TO placement")
    origin = await connection.fetchval("SELECT origin FROM feed_head")
    cluster, timeline, *rest = origin.split("/")
    assert cluster and len(timeline) == 8 and int(timeline, 16) >= 1 and len(rest) == 2
    before = "/".join((cluster, f"{int(timeline, 16) - 1:08X}", *rest))
    await connection.execute("UPDATE feed_head SET origin = $1", before)
    await connection.close()
    others = [PlacementService(PostgresPlacementRows(Database(placement.url, "placement"))) for _ in range(3)]
    renewed = await asyncio.gather(*(store.newest() for store in (placement.store, *others)))
    assert sorted(one.renewed for one in renewed) == [False, False, False, True]
    assert (await placement.store.head()).incarnation != first.incarnation
    for store in others:
        await store.close()


async def test_a_head_behind_the_one_that_was_seen_is_another_history(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    await placement.hosts(5, rng, VCPU=4)
    assert not (await placement.store.newest()).renewed
    first = await placement.store.head()
    await set_back(placement, first.sequence - 2)
    assert (await placement.store.newest()).renewed
    assert not (await placement.store.newest()).renewed
    assert (await placement.store.head()).incarnation != first.incarnation


async def test_an_import_is_another_history_and_the_feed_carries_it(
    placement: PlacementDatabase, rng: random.Random
) -> None:
    await placement.hosts(2, rng, VCPU=4)
    first = await placement.store.head()
    async with placement.database.raw() as connection:
        found = await export_store.read(connection, placement.store.names)
    async with placement.rows.transaction() as transaction:
        assert await export_store.assign(transaction, found, placement.store.names) == 0
    assert await placement.store.head() == first, "nothing has changed"
    async with placement.rows.transaction() as transaction:
        providers = dict(list(found.providers.items())[:1])
        await export_store.assign(
            transaction, export.PlacementExport(found.classes, found.traits, providers, {}), placement.store.names
        )
    second = await placement.store.head()
    assert second.incarnation != first.incarnation
    published: list[FeedChanges] = []

    async def send(changes: FeedChanges) -> None:
        published.append(changes)

    await placement.store.publish(send, 100)
    assert {one.incarnation for one in published} == {second.incarnation}
    assert (await placement.store.snapshot(None, 10)).incarnation == second.incarnation


@pytest.mark.parametrize("more", [0, 2, 4], ids=["behind", "as far", "further"])
async def test_the_rest_apis_replica_notices_a_placement_that_was_restored(
    placement: PlacementDatabase, rng: random.Random, more: int
) -> None:
    """It compared numbers alone: at the same number it kept the old one, and further on it dropped reused numbers."""
    await placement.hosts(4, rng, VCPU=4)
    replica = LocalReplica(placement.store)
    assert len(await replica.fresh()) == 4
    assert not (await placement.store.newest()).renewed
    connection = await asyncpg.connect(placement.url)
    await connection.execute("DELETE FROM placement.inventories; DELETE FROM placement.providers")
    await connection.close()
    await set_back(placement, 2)
    assert (await placement.store.newest()).renewed
    if more:
        await placement.hosts(more, rng, VCPU=4)
    assert len(await replica.fresh()) == more


async def test_a_recovery_from_the_archive_begins_another_history() -> None:
    """As a recovery to a point in time, and the promotion of a stand-by: PostgreSQL begins a new timeline."""
    server = Postgres()
    incarnations = []
    try:
        for recovers in (False, False, True):
            if recovers:
                data = server._data
                (data / "recovery.signal").touch()
                with (data / "postgresql.conf").open("a") as settings:
                    settings.write("restore_command = 'false'\n")
            server.start()
            store = PlacementService(PostgresPlacementRows(Database(server.url(), "placement")))
            await store.open()
            incarnations.append((await store.head()).incarnation)
            await store.close()
            server.shut_down()
    finally:
        server.stop()
    first, restarted, recovered = incarnations
    assert restarted == first, "a restart alone is none"
    assert recovered != first
