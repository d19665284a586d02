"""The fleet's history on PostgreSQL: what web servers write, what is read, and for how long it is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any, cast

import pytest
import pytest_asyncio

from berth.client.types import FleetPoint
from berth.web.history import EVERY_S, MAX_HOURS, SHOWN, WIDE, FleetHistory, charts
from bus.clock import SystemClock
from bus.contracts.build import HostRecord
from bus.faults import DatabaseUnavailable
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.database import Database
from bus.service.environment import Environment

pytestmark = [pytest.mark.postgres]

NOW = 1_800_000_000.0
HOUR_S = 3600.0


class At(SystemClock):
    """The time of the calendar stands still until a test moves it."""

    now = NOW

    def time(self) -> float:
        return self.now


def environment(url: str | None, clock: At) -> Environment:
    connect = partial(MemoryTransport, MemoryBroker(clock), "web")
    return Environment("web", transports=lambda _: connect(), database_url=url, cells=(), clock=clock)


class Fleet:
    async def hosts_to_count(self) -> tuple[HostRecord, ...]:
        uuid = "00000000-0000-4000-8000-00000000000{}".format
        resources: dict[str, Any] = {"VCPU": (2.0, 8.0)}
        return (
            HostRecord(uuid=uuid(1), name="h1", cell="c", reported=True, up=True, enabled=True, resources=resources),
            HostRecord(uuid=uuid(2), name="h2", cell="c", reported=True, up=False, resources=resources),
        )


class Seen:
    def history(self) -> list[Any]:
        return []


@pytest_asyncio.fixture
async def schema(postgres_url: str) -> AsyncIterator[str]:
    database = Database(postgres_url, "scheduler")
    await database.open("scheduler_worker.store.migrations")
    yield postgres_url
    await database.close()


def history(url: str | None, clock: At) -> FleetHistory:
    return FleetHistory(environment(url, clock), cast("Any", Fleet()), cast("Any", Seen()))


def point(at: float, **more: Any) -> FleetPoint:
    return FleetPoint(at=at, hosts=4, ready=3, used={"VCPU": (1.0, 4.0)}, **more)


async def test_points_are_kept_for_seven_days_and_read_by_another_server(schema: str) -> None:
    clock = At()
    writes = history(schema, clock)
    oldest, newest = NOW - MAX_HOURS * HOUR_S - EVERY_S, NOW
    for at in (oldest, NOW - 2 * HOUR_S, newest):
        await writes.write(point(at))
    assert [one.at for one in await history(schema, clock).points()] == [NOW - 2 * HOUR_S, newest]
    assert [one.at for one in await history(schema, clock).points(1)] == [newest]
    await history(schema, clock).write(point(newest + 1, failed=7))  # of the same minute, by a second server
    assert [one.failed for one in await history(schema, clock).points(1)] == [7]


async def test_many_points_are_thinned_and_no_failure_is_lost(schema: str) -> None:
    clock = At()
    writes = history(schema, clock)
    for minute in range(120):
        await writes.write(point(NOW - 60.0 * minute, started=2, failed=1))
    found = await history(schema, clock).points()
    assert 4 <= len(found) <= 6 and sum(one.failed for one in found) == 120 and sum(one.started for one in found) == 240
    assert len(await history(schema, clock).points(2)) <= SHOWN


async def test_what_is_written_is_the_fleet_without_bare_metal(schema: str) -> None:
    clock = At()
    taken = history(schema, clock)
    await taken.write(await taken._point())
    (found,) = await taken.points()
    assert (found.hosts, found.ready, found.used["VCPU"]) == (2, 1, (4.0, 16.0))


async def test_without_a_database_there_is_none_and_one_that_is_away_is_named() -> None:
    assert await history(None, At()).points() == ()
    away = history("postgresql://berth@127.0.0.1:1/berth", At())
    with pytest.raises(DatabaseUnavailable):
        await away.points()
    assert await away.points() == (), "the next page does not wait for it"


async def test_a_row_of_nobody_is_passed_over(schema: str) -> None:
    clock = At()
    await history(schema, clock).write(point(NOW))
    database = Database(schema, "scheduler")
    async with database.raw() as connection:
        for minute, text in enumerate(("", "{", "[]", '{"at": "x"}', '{"hosts": 1}'), int(NOW / EVERY_S) - 10):
            await connection.execute("INSERT INTO fleet_history (minute, point) VALUES ($1, $2)", minute, text)
    await database.close()
    assert [one.at for one in await history(schema, clock).points()] == [NOW]


def test_a_line_is_cut_where_points_are_missing() -> None:
    half_hours = [NOW - 1800.0 * n for n in (300, 299, 298, 20, 19, 1)]
    found = charts([point(at) for at in half_hours], NOW)
    assert [one.last for one in found] == ["3", "25 %", "0 %", "0"]
    (ready, *_) = found
    assert len(ready.lines) == 3 and ready.lines[0].startswith("M") and ready.lines[0].count("L") == 2
    xs = [float(place.partition(" ")[0][1:]) for place in ready.lines]
    assert xs == sorted(xs) and all(0 <= x <= WIDE for x in xs)
    assert charts([], NOW) == ()
