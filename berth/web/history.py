"""The fleet of the last seven days, a point a minute: web servers keep it in PostgreSQL, beside what schedulers have on
record, so a page shows it after a restart, and while no scheduler answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import asyncpg
import msgspec
import structlog
from msgspec import Struct

from berth.client.types import FleetPoint
from berth.config.schemas import SCHEDULER
from berth.web.api import Handlers, number_of, route
from berth.web.event_stream import Live
from berth.web.pages.figures import UP, capacity_of, is_bare_metal, states_of
from berth.web.pages.fleet import FleetReader
from berth.web.rendering import RESOURCES
from berth.web.sign_in_sessions import WebRole
from bus.faults import DatabaseUnavailable, Fault
from bus.service.environment import Environment, NotConfigured
from bus.transport import BusError

log = structlog.get_logger("web")

EVERY_S = 60.0
MAX_HOURS = 7 * 24
SHOWN = 336  # points: half an hour each of seven days
READ_AGE_S = 30.0
TIMEOUT_S = 2.0

# Several servers write the same minute: the last of them stays.
_WRITE = """
INSERT INTO fleet_history (minute, point) VALUES ($1, $2)
ON CONFLICT (minute) DO UPDATE SET point = excluded.point
"""
_PURGE = "DELETE FROM fleet_history WHERE minute < $1"
_READ = "SELECT point FROM fleet_history WHERE minute >= $1 ORDER BY minute"


class FleetHistory:
    """Writes a point a minute and reads what is kept. Without a database nothing is."""

    def __init__(self, env: Environment, fleet: FleetReader, live: Live) -> None:
        self._env = env
        self._fleet = fleet
        self._live = live
        self._reading = asyncio.Lock()
        self._points: tuple[FleetPoint, ...] = ()
        self._read_at = float("-inf")

    async def keep(self) -> None:
        """Write a point a minute, until cancelled."""
        while True:
            await self._env.clock.sleep(EVERY_S)
            try:
                await self.write(await self._point())
            except NotConfigured:
                return
            except (Fault, BusError) as fault:  # the minute stays without a point
                log.info("web.history_unwritten", code=fault.code, reason=str(fault))

    async def _point(self) -> FleetPoint:
        virtual = [host for host in await self._fleet.hosts_to_count() if not is_bare_metal(host)]
        states, minute = states_of(virtual), self._live.history()[-int(EVERY_S) :]
        return FleetPoint(
            at=self._env.clock.time(),
            hosts=len(virtual),
            ready=states.get(UP, 0),
            used={one.name: (one.used, one.total) for one in capacity_of(virtual)},
            started=sum(second.active for second in minute),
            failed=sum(second.failed for second in minute),
        )

    async def write(self, point: FleetPoint) -> None:
        """Keep a point, and no longer what is older than seven days. Raises DatabaseUnavailable, NotConfigured."""
        minute = int(point.at / EVERY_S)
        async with self._connected() as connection:
            await connection.execute(_WRITE, minute, msgspec.json.encode(point).decode())
            await connection.execute(_PURGE, minute - MAX_HOURS * 60)

    async def points(self, hours: int = MAX_HOURS) -> tuple[FleetPoint, ...]:
        """At most SHOWN points of the last hours, at most READ_AGE_S old; none where nothing is kept. Each is the last
        one of its span, with all builds that started and failed in it. Raises DatabaseUnavailable; after that what was
        read before is shown for READ_AGE_S.
        """
        async with self._reading:
            now = self._env.clock.monotonic()
            if now - self._read_at > READ_AGE_S:
                self._read_at = now  # also where it fails: the next pages do not wait for the database once more
                self._points = await self._read()
        since = self._env.clock.time() - hours * 3600
        return thinned([one for one in self._points if one.at >= since], hours * 3600 / SHOWN)

    async def _read(self) -> tuple[FleetPoint, ...]:
        first = int(self._env.clock.time() / EVERY_S) - MAX_HOURS * 60
        try:
            async with self._connected() as connection:
                rows = await connection.fetch(_READ, first)
        except NotConfigured:
            return ()
        return tuple(filter(None, (_point_of(row["point"]) for row in rows)))

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        database = self._env.database(SCHEDULER, pool_size=1)
        try:
            async with asyncio.timeout(TIMEOUT_S), database.raw() as connection:
                yield connection
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise DatabaseUnavailable(f"the history of the fleet is out of reach: {error}") from error
        finally:
            await database.close()


def _point_of(text: str) -> FleetPoint | None:
    """None: the row is another release's, or nobody's."""
    try:
        return msgspec.json.decode(text, type=FleetPoint)
    except msgspec.MsgspecError:
        return None


def thinned(points: Sequence[FleetPoint], span_s: float) -> tuple[FleetPoint, ...]:
    """The last point of each span, with the builds of all of its points."""
    found: list[FleetPoint] = []
    for one in points:
        if found and int(found[-1].at / span_s) == int(one.at / span_s):
            before = found.pop()
            one = msgspec.structs.replace(  # noqa: PLW2901
                one, started=before.started + one.started, failed=before.failed + one.failed
            )
        found.append(one)
    return tuple(found)


class Chart(Struct, frozen=True):
    """A figure over time. lines: SVG paths in a box of WIDE x HIGH; last, most: its newest and its greatest value."""

    title: str
    lines: tuple[str, ...]
    last: str
    most: str


WIDE, HIGH = 600, 60


def charts(points: Sequence[FleetPoint], now: float, hours: int = MAX_HOURS) -> tuple[Chart, ...]:
    """What the first page shows of the points."""
    if not points:
        return ()
    began = now - hours * 3600

    def chart(title: str, value: Callable[[FleetPoint], float], text: Callable[[float], str], top: float) -> Chart:
        values = [value(one) for one in points]
        top = max(top, *values) or 1.0
        places = [
            (WIDE * (one.at - began) / (now - began or 1.0), HIGH - HIGH * found / top)
            for one, found in zip(points, values, strict=True)
        ]
        return Chart(title, tuple(_paths(places, WIDE / SHOWN)), text(values[-1]), text(max(values)))

    count, percent = "{:,.0f}".format, "{:.0f} %".format
    shares = [
        chart(f"{RESOURCES[name]} in use", partial(_share, name), percent, 100.0) for name in ("VCPU", "MEMORY_MB")
    ]
    most = max(one.hosts for one in points)
    return (
        chart("Hosts that take builds", lambda one: one.ready, count, most),
        *shares,
        chart("Failed builds in half an hour", lambda one: one.failed, count, 0.0),
    )


def _share(name: str, point: FleetPoint) -> float:
    used, total = point.used.get(name, (0.0, 0.0))
    return 100 * used / total if total else 0.0


def _paths(places: Sequence[tuple[float, float]], step: float) -> list[str]:
    """A path for each run of points; where points are missing, the line is cut."""
    paths: list[list[str]] = []
    last = float("-inf")
    for x, y in places:
        if x - last > 3 * step:
            paths.append([f"M{x:.1f} {y:.1f}h{step:.1f}"])
        else:
            paths[-1].append(f"L{x:.1f} {y:.1f}")
        last = x
    return ["".join(path) for path in paths]


class WebHistory(Handlers):
    """The handler."""

    def __init__(self, history: FleetHistory) -> None:
        self._history = history

    @route("GET", "/history", "hours", role=WebRole.READER)
    async def list_history(self, request: Any) -> object:
        """The fleet over time, at most 336 points of the last hours: ?hours= (168). Not for role project."""
        return await self._history.points(number_of(request, "hours", MAX_HOURS, most=MAX_HOURS))
