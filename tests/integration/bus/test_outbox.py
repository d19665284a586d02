"""The outbox on a real PostgreSQL: nothing is lost whatever dies, one bus does not hold up another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar, cast

import asyncpg
import msgspec
import pytest
from sqlalchemy import MetaData

from bus.clock import SystemClock
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import CellDelete
from bus.persistence import outbox
from bus.persistence import relay as relaying
from bus.persistence.database import Database
from bus.persistence.guarded_statement import GuardedStatement
from bus.persistence.outbox import DELETE_CONFIRMED, OutboxMessage, PostgresRows, Sweep
from bus.persistence.relay import SWEEP_BATCH, Relay
from bus.persistence.revision import migrating
from bus.persistence.tables import create_tables, outbox_tables
from bus.tracing.context import CURRENT, Scope, TraceContext
from bus.tracing.tracer import Tracer
from bus.transport import BusUnavailable, Unroutable
from tests.kit.posting import PostedBus
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres

T = TypeVar("T")
UUID = "0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e"
PATIENCE_S = 60.0


class AwayBus(PostedBus):
    """A bus whose broker is away for a number of messages, and has no queue for those of some projects."""

    failures = 0
    refused: Collection[str] = ()

    def fault_of(self, message: Message) -> BaseException | None:
        if self.failures > 0:
            self.failures -= 1
            return BusUnavailable("unavailable")
        return Unroutable("no queue") if getattr(message, "project_id", "") in self.refused else None


def event(project: str = "p", sequence: int = 1) -> BuildEvent:
    return BuildEvent(instance_uuid=UUID, project_id=project, state=BuildState.ACTIVE, sequence=sequence)


@pytest.fixture
async def database(empty_database: str) -> AsyncIterator[Database]:
    database = Database(empty_database, "owner")
    await database.open()
    metadata = MetaData()
    outbox_tables(metadata)
    connect = partial(asyncpg.connect, empty_database, server_settings={"search_path": "owner"})
    async with migrating(connect) as (core, _):
        await core.run_sync(create_tables, metadata)
    async with database.raw() as connection:
        await connection.execute(files("bus.persistence").joinpath("guarded_statement.sql").read_text(encoding="utf-8"))
    yield database
    await database.close()


@asynccontextmanager
async def running(database: Database, *buses: PostedBus, sweep_age_s: float = 60.0) -> AsyncIterator[Relay]:
    named = {bus.name: bus for bus in buses}
    relay = Relay(PostgresRows(database), named, clock=SystemClock())  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relaying, "SWEEP_EVERY_S", 0.02)
        patch.setattr(relaying, "SWEEP_AGE_S", sweep_age_s)
        task = asyncio.create_task(relay.run())
        try:
            yield relay
        finally:
            task.cancel()
            await asyncio.wait([task])


async def commit(database: Database, outgoing: list[OutboxMessage]) -> list[int]:
    async with database.raw() as connection:
        return await outbox.add(connection, outgoing)


async def rows(database: Database) -> int:
    async with database.raw() as connection:
        count: int = await connection.fetchval("SELECT count(*) FROM outbox")
        return count


async def held(relay: Relay) -> int:
    await asyncio.sleep(0)
    return relay.held


async def until_equal(look: Callable[[], Awaitable[T]], wanted: T) -> None:
    async def is_so() -> bool:
        return await look() == wanted

    await until(is_so)


async def test_a_committed_row_is_published_with_its_causes_and_deleted(database: Database) -> None:
    api, cell = PostedBus("api"), PostedBus("cell1")
    outgoing = [
        OutboxMessage("api", event(), "cause-1"),
        OutboxMessage("cell1", CellDelete(instance_uuid=UUID, project_id="p"), "cause-2"),
    ]
    async with running(database, api, cell) as relay:
        relay.send(await commit(database, outgoing), outgoing)
        await relay.drain(PATIENCE_S)
        assert relay.held == 0
    assert api.confirmed == [(event(), "cause-1")]
    assert cell.confirmed == [(CellDelete(instance_uuid=UUID, project_id="p"), "cause-2")]
    assert await rows(database) == 0


async def test_deleting_waits_for_no_disk_and_leaves_the_session_as_it_was(database: Database) -> None:
    """A deferred trigger runs in the commit itself, and sees what the commit goes by."""
    async with database.raw() as connection:
        await connection.execute(
            "CREATE TABLE seen (way text);"
            "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$;"
            "CREATE CONSTRAINT TRIGGER see AFTER DELETE ON outbox DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION see()"
        )
    (row,) = await commit(database, [OutboxMessage("api", event())])
    await PostgresRows(database).delete([row])
    async with database.single() as connection:
        assert await connection.fetchval("SELECT current_setting('synchronous_commit')") == "on"
        assert await connection.fetchval("SELECT array_agg(way) FROM seen") == ["off"]
    assert await rows(database) == 0


@pytest.mark.parametrize("kept", [0, 50_000])
async def test_deleting_finds_one_row_or_two_thousand_by_key(database: Database, kept: int) -> None:
    async with database.raw() as connection:
        await connection.execute(
            "INSERT INTO outbox (id, bus, body) OVERRIDING SYSTEM VALUE "
            "SELECT n, 'api', 'x' FROM generate_series(1, $1) n",
            kept,
        )
    async with database.single() as connection:
        await connection.execute("ANALYZE outbox")
        await connection.execute(f"PREPARE confirmed(bigint[], boolean) AS {DELETE_CONFIRMED}")
        for count in (1, 2_000):
            ids = ",".join(str(n * 7) for n in range(1, count + 1))
            found = await connection.fetch(f"EXPLAIN EXECUTE confirmed('{{{ids}}}', false)")
            plan = "\n".join(row[0] for row in found)
            assert "outbox_pkey" in plan, plan
            assert "Seq Scan" not in plan, plan
        await connection.execute("DEALLOCATE confirmed")


def scanned(plan: dict[str, Any]) -> float:
    """How many rows the scans of a plan that was carried out have read of the outbox."""
    own = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0) if plan.get("Relation Name") == "outbox" else 0
    return own * plan["Actual Loops"] + sum(scanned(one) for one in plan.get("Plans", ()))


SWEEP = "EXECUTE sweep(60, 200, '{cell2}', '{1,2}', '{3,4,6}')"


@pytest.mark.parametrize("analyzed", [False, True], ids=["planned while it was empty", "planned for many"])
@pytest.mark.parametrize("waiting", [2_000, 40_000])
async def test_a_sweep_reads_what_it_takes_however_many_rows_wait(
    database: Database, waiting: int, *, analyzed: bool
) -> None:
    """It ranked all of them for its 200: 200,000 rows took more than an hour to leave."""
    async with database.single() as connection:
        await connection.execute(f"PREPARE sweep(float8, bigint, text[], bigint[], bigint[]) AS {outbox.TAKE_OLD}")
        await connection.execute(SWEEP)
        await connection.execute(
            "INSERT INTO outbox (bus, taken_at, body)"
            " SELECT 'cell' || n % 3, now() - make_interval(secs => 100 + n), 'x' FROM generate_series(1, $1) n",
            waiting,
        )
        if analyzed:
            await connection.execute("ANALYZE outbox")
        found = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {SWEEP}")
        taken = await connection.fetchval("SELECT count(*) FROM outbox WHERE taken_at > now() - '60 s'::interval")
        await connection.execute("DEALLOCATE sweep")
    (plan,) = json.loads(found)
    assert taken == 400
    assert scanned(plan["Plan"]) < 10 * taken, scanned(plan["Plan"])


async def test_nothing_to_publish_is_no_row(database: Database) -> None:
    assert await commit(database, []) == []
    async with running(database, PostedBus("api")) as relay:
        relay.send([], [])
        with pytest.raises(AssertionError):
            relay.send([], [OutboxMessage("api", event())])


async def test_a_rolled_back_transaction_publishes_nothing(database: Database) -> None:
    with pytest.raises(KeyError):
        async with database.raw() as connection:
            await outbox.add(connection, [OutboxMessage("api", event())])
            raise KeyError
    assert await rows(database) == 0


async def test_a_row_that_the_database_forgot_does_not_take_another_with_it(database: Database) -> None:
    """After a crash the sequence gives numbers again; the new row was not sent, and deleted with the old one."""
    api = PostedBus("api")
    forgotten, kept = ([OutboxMessage("api", event(project))] for project in ("p", "q"))
    held = await commit(database, forgotten)
    async with database.raw() as connection:
        await connection.execute("DELETE FROM outbox; SELECT setval('outbox_id_seq', 1, false)")
    async with database.single() as connection:
        statement = GuardedStatement()
        outbox.add_to(statement, kept)
        row = (await statement.execute(connection))["outbox_rows"]
    relay = Relay(PostgresRows(database), {"api": api}, clock=SystemClock())  # type: ignore[dict-item]
    relay.send(held, forgotten)
    relay.send(row, kept)
    task = asyncio.create_task(relay.run())
    await api.until(2)
    task.cancel()
    await asyncio.wait([task])
    assert [message.project_id for message, _ in api.confirmed] == ["p", "q"]


async def test_what_a_dead_process_left_is_swept_by_another(database: Database) -> None:
    await commit(database, [OutboxMessage("api", event(sequence=n), f"c{n}") for n in range(3)])
    api = PostedBus("api")
    async with running(database, api, sweep_age_s=0.0):
        await api.until(3)
        await until_equal(lambda: rows(database), 0)
    assert [cause for _message, cause in api.confirmed[:3]] == ["c0", "c1", "c2"]


async def test_a_message_that_another_process_publishes_stays_in_its_trace(database: Database) -> None:
    tracer = Tracer(None, ratio=1.0, most_per_s=1.0)  # type: ignore[arg-type]  (nothing is exported)
    token = CURRENT.set(Scope(tracer.start, {"c1": TraceContext("a" * 32, "b" * 16)}, None))
    await commit(database, [OutboxMessage("api", event(sequence=n), f"c{n}") for n in range(2)])
    CURRENT.reset(token)
    api = PostedBus("api")
    async with running(database, api, sweep_age_s=0.0):
        await api.until(2)
    assert api.traces[:2] == ["", f"00-{'a' * 32}-{'b' * 16}-01"]


async def test_a_young_row_is_left_to_its_own_process(database: Database) -> None:
    await commit(database, [OutboxMessage("api", event())])
    api = PostedBus("api")
    async with running(database, api, sweep_age_s=60.0) as relay:
        row = await commit(database, [OutboxMessage("api", event("mine"))])
        relay.send(row, [OutboxMessage("api", event("mine"))])
        await relay.drain(PATIENCE_S)
    assert [message.project_id for message, _ in api.confirmed] == ["mine"]
    assert await rows(database) == 1


async def test_an_unavailable_broker_is_waited_for(database: Database) -> None:
    api = AwayBus("api")
    api.failures = 2
    async with running(database, api) as relay:
        relay.send(await commit(database, [OutboxMessage("api", event())]), [OutboxMessage("api", event())])
        await relay.drain(PATIENCE_S)
    assert len(api.confirmed) == 1
    assert await rows(database) == 0


async def test_an_unreachable_cell_does_not_hold_up_the_others(database: Database) -> None:
    api, cell = PostedBus("api"), PostedBus("cell1")
    cell.confirms.clear()
    stuck = [OutboxMessage("cell1", CellDelete(instance_uuid=UUID, project_id="p"))]
    async with running(database, api, cell) as relay:
        relay.send(await commit(database, stuck), stuck)
        for n in range(20):
            relay.send(
                await commit(database, [OutboxMessage("api", event(sequence=n))]),
                [OutboxMessage("api", event(sequence=n))],
            )
        await api.until(20)
        await until_equal(lambda: rows(database), 1)
        await until_equal(lambda: held(relay), 1)  # it learns of the rows' end after all others can see it
        cell.confirms.set()
        await relay.drain(PATIENCE_S)
    assert await rows(database) == 0


async def test_rows_for_an_unreachable_cell_do_not_starve_those_that_can_leave(database: Database) -> None:
    """They are more than a sweep takes, before a dead worker's row, and untouched while the cell is unavailable."""
    api, cell = PostedBus("api"), PostedBus("cell1")
    cell.go()
    to_cell = [OutboxMessage("cell1", CellDelete(instance_uuid=UUID, project_id="p"))]
    async with database.raw() as connection:
        await outbox.add(connection, to_cell)
        await connection.execute(
            "INSERT INTO outbox (bus, body) SELECT bus, body FROM outbox, generate_series(1, $1)",
            10 * SWEEP_BATCH,
        )
        await outbox.add(connection, [OutboxMessage("api", event("left"))])
    async with running(database, api, cell, sweep_age_s=0.0):
        await api.until(1)
        taken_at = []
        for turn in range(4):  # each is another sweep
            await commit(database, [OutboxMessage("api", event(sequence=turn))])
            await api.until(2 + turn)
            async with database.raw() as connection:
                taken_at.append(await connection.fetchval("SELECT max(taken_at) FROM outbox WHERE bus = 'cell1'"))
        assert len(set(taken_at)) == 1
        cell.come_back()
        await until_equal(lambda: rows(database), 0)


async def test_the_sweep_is_fair_to_a_bus_beside_one_with_many_rows(database: Database) -> None:
    async with database.raw() as connection:
        await outbox.add(connection, [OutboxMessage("cell1", CellDelete(instance_uuid=UUID, project_id="p"))])
        await connection.execute(
            "INSERT INTO outbox (bus, body) SELECT bus, body FROM outbox, generate_series(1, $1)", 50
        )
        (last,) = await outbox.add(connection, [OutboxMessage("api", event())])
    store = PostgresRows(database)
    found = [row for row, _ in await store.claim_stale(Sweep(-1.0, 10))]
    assert len(found) == 11
    assert last in found
    await store.delete([last])
    again = [row for row, _ in await store.claim_stale(Sweep(-1.0, 10))]
    assert not set(again) & set(found)  # the longest untaken first
    assert await store.claim_stale(Sweep(-1.0, 10, ["cell1", "cell2"])) == []


@pytest.mark.parametrize("rest", ["cell1", "removed"])
async def test_a_transaction_for_two_buses_leaves_where_it_can_and_is_not_repeated(
    database: Database, rest: str
) -> None:
    """Its bus is unavailable, or it is none of ours."""
    api, cell = PostedBus("api"), PostedBus("cell1")
    cell.go()
    to_rest = OutboxMessage(rest, CellDelete(instance_uuid=UUID, project_id="p"), "kept")
    both = [OutboxMessage("api", event("both")), to_rest]
    async with running(database, api, cell, sweep_age_s=0.0) as relay:
        relay.send(await commit(database, both), both)
        await api.until(1)

        async def buses() -> list[str]:
            async with database.raw() as connection:
                return [row["bus"] for row in await connection.fetch("SELECT bus FROM outbox")]

        await until_equal(buses, [rest])
        await commit(database, [OutboxMessage("api", event("last"))])
        await api.until(2)
    assert [message.project_id for message, _ in api.confirmed] == ["both", "last"]  # type: ignore[attr-defined]
    ((_, body),) = [one for one in await PostgresRows(database).claim_stale(Sweep(-1.0, 10)) if b"kept" in one[1]]
    assert [one["bus"] for one in msgspec.json.decode(body)] == [rest]


async def test_rows_that_stayed_for_a_bus_leave_when_it_is_back_and_others_rows_do_not(database: Database) -> None:
    """However young they are: the rows of another process may be under way."""
    api, cell = PostedBus("api"), PostedBus("cell1")
    cell.go()
    outgoing = [OutboxMessage("cell1", CellDelete(instance_uuid=UUID, project_id="p"), "mine")]
    others = [OutboxMessage("cell1", CellDelete(instance_uuid=UUID, project_id="p"), "others")]
    async with running(database, api, cell, sweep_age_s=60.0) as relay:
        await commit(database, others)
        relay.send(await commit(database, outgoing), outgoing)
        assert (await held(relay), await rows(database)) == (0, 2)
        cell.come_back()
        await cell.until(1)
        await until_equal(lambda: rows(database), 1)
    assert [cause for _, cause in cell.confirmed] == ["mine"]


async def test_one_without_a_queue_stays_for_the_sweep_and_its_neighbours_go(database: Database) -> None:
    api = AwayBus("api")
    api.refused = {"nobody"}
    async with running(database, api) as relay:
        for project in ("a", "nobody", "b"):
            outgoing = [OutboxMessage("api", event(project))]
            relay.send(await commit(database, outgoing), outgoing)
        await relay.drain(PATIENCE_S)
        assert await rows(database) == 1
    api.refused = set()
    api.confirmed.clear()
    async with running(database, api, sweep_age_s=0.0):
        await api.until(1)
        await until_equal(lambda: rows(database), 0)
    assert {message.project_id for message, _ in api.confirmed} == {"nobody"}


async def test_past_its_bound_the_relay_leaves_rows_to_the_sweep(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = PostedBus("api")
    api.confirms.clear()
    monkeypatch.setattr(relaying, "MAX_ROWS", 4)
    relay = Relay(PostgresRows(database), {"api": api}, clock=SystemClock())  # type: ignore[dict-item]
    task = asyncio.create_task(relay.run())
    for n in range(3):
        relay.send(
            await commit(database, [OutboxMessage("api", event(sequence=n))]), [OutboxMessage("api", event(sequence=n))]
        )
    assert relay.held == 2, "half of it, where nothing else is held"
    api.confirms.set()
    await relay.drain(PATIENCE_S)
    assert (len(api.confirmed), await rows(database)) == (3, 0), "a drain waits for it"
    task.cancel()
    await asyncio.wait([task])


async def test_draining_ends_with_the_grace_time_and_the_row_stays(database: Database) -> None:
    api = PostedBus("api")
    api.confirms.clear()
    async with running(database, api) as relay:
        relay.send(await commit(database, [OutboxMessage("api", event())]), [OutboxMessage("api", event())])
        await relay.drain(0.05)
        assert relay.held == 1
    assert await rows(database) == 1


UNREADABLE = {
    "of another version": msgspec.json.encode([{"bus": "api", "message": {"type": "from.the.future.v9"}}]),
    "not UTF-8": b'[{"bus":"\xff"}]',
    "nested without end": b'[{"x":' + b"[" * 100_000,
}


@pytest.mark.parametrize("unreadable", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_row_that_cannot_be_read_is_kept_and_the_rest_goes(database: Database, unreadable: bytes) -> None:
    async with database.raw() as connection:
        body = unreadable
        await connection.execute("INSERT INTO outbox (bus, body) VALUES ('api', $1)", body)
        await outbox.add(connection, [OutboxMessage("api", event())])
    api = PostedBus("api")
    async with running(database, api, sweep_age_s=0.0):
        await api.until(1)
        await until_equal(lambda: rows(database), 1)
    async with database.raw() as connection:
        assert await connection.fetchval("SELECT body FROM outbox") == unreadable, "as it was"


async def test_a_message_handled_twice_is_new_once(database: Database) -> None:
    async with database.raw() as connection:
        assert await outbox.first_time(connection, "h", ["b", "a", "b"]) == {"a", "b"}
    async with database.raw() as connection:
        assert await outbox.first_time(connection, "h", ["b", "c"]) == {"c"}
        assert await outbox.first_time(connection, "other", ["b"]) == {"b"}


async def test_two_processes_with_the_same_messages_agree_on_who_was_first(database: Database) -> None:
    ids = [f"m{n:05}" for n in range(5_000)]

    together = asyncio.Barrier(2)

    async def handle(order: list[str]) -> set[str]:
        async with database.raw() as connection:
            await together.wait()
            return await outbox.first_time(connection, "h", order)

    first, second = await asyncio.gather(handle(ids), handle(ids[::-1]))  # opposite orders: a deadlock, unless sorted
    assert first | second == set(ids)
    assert not first & second


async def test_a_bus_that_is_removed_leaves_its_messages_in_the_table_and_gets_them_when_it_is_added(
    database: Database,
) -> None:
    first = PostedBus("c3")
    first.confirms.clear()  # what it publishes is under way
    async with running(database, first, sweep_age_s=0.0) as relay:
        for project in ("a", "b"):
            outgoing = [OutboxMessage("c3", event(project))]
            relay.send(await commit(database, outgoing), outgoing)
        relay.remove_bus("c3")
        await until_equal(lambda: held(relay), 0)
        outgoing = [OutboxMessage("c3", event("c"))]
        relay.send(await commit(database, outgoing), outgoing)
        assert (await held(relay), await rows(database), list(relay.missing)) == (0, 3, ["c3"])
        again = PostedBus("c3")
        relay.add_bus(again)  # type: ignore[arg-type]
        assert list(relay.missing) == ["c3"], "until what waits for it has left"
        await again.until(3)
        await until_equal(lambda: rows(database), 0)
        assert not relay.missing
    assert {cast("BuildEvent", message).project_id for message, _ in again.confirmed} == {"a", "b", "c"}
    assert first.confirmed == []
