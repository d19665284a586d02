"""Which cell of Nova a host is in. Its REST API tells that to nobody: by the settings, or by its API database."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from fnmatch import fnmatchcase
from functools import partial
from typing import Protocol

import sqlalchemy
import structlog

from bus.clock import Clock
from bus.persistence.external_database import UnusableAddress, engine_of, fault_of
from bus.service.settings import SettingsError
from nova_scheduler.cloud.api_config import NovaApiConfig
from nova_scheduler.cloud.rest import NovaUnavailable

log = structlog.get_logger("nova")

AGAIN_S = 1.0  # between two reads of the database for hosts that the one before did not find
RARELY_S = 30.0  # from a read that failed, or that found all, to the next at least
MAX_MAPPINGS = 1_000_000
READ_S = 10.0  # that a read of the database is waited for
MAX_LEFT = 200  # reads that hang: as many as there are until TCP gives the first one up, after two hours

# The two that are read
CELLS = "SELECT id, uuid, disabled FROM cell_mappings"
HOSTS = "SELECT host, cell_id FROM host_mappings"

CellsFound = tuple[dict[str, str], frozenset[str]]  # {host: cell}, the disabled cells


class CellMap(Protocol):
    """The cells of hosts."""

    # those (uuids) that take no new servers, as of the last answer; what they have may move within them
    disabled: frozenset[str]

    async def of_hosts(self, hosts: Collection[str]) -> Mapping[str, str]:
        """{host: cell uuid}; hosts whose cell is not known are left out. Raises NovaUnavailable."""
        ...


def cells_of(config: NovaApiConfig, clock: Clock) -> CellMap:
    """The map that the settings name. Raises SettingsError: they name none, or a database that cannot be used."""
    if config.cells_database:
        return DatabaseCells(config.cells_database, clock)
    if not config.cells:
        reason = "nova.api.cells or nova.api.cells_database is needed: Nova's API names no cells"
        raise SettingsError("nova.cells_unset", reason)
    return ConfiguredCells(config.cells)


class ConfiguredCells:
    """By patterns of host names. cells: {cell uuid: patterns}, the first that matches counts."""

    def __init__(self, cells: Mapping[str, Collection[str]]) -> None:
        self.disabled = frozenset[str]()
        self._patterns = [(pattern, cell) for cell, patterns in cells.items() for pattern in patterns]
        self._known: dict[str, str | None] = {}

    async def of_hosts(self, hosts: Collection[str]) -> Mapping[str, str]:
        """As CellMap has it."""
        for host in [one for one in hosts if one not in self._known]:
            self._known[host] = next((cell for pattern, cell in self._patterns if fnmatchcase(host, pattern)), None)
        return {host: cell for host in hosts if (cell := self._known[host]) is not None}


class DatabaseCells:
    """By Nova's API database, which is read at the start, rarely (a cell may be disabled), and while a host is not in
    what was read last.
    """

    def __init__(self, url: str, clock: Clock) -> None:
        """Raises SettingsError."""
        try:
            self._engine = engine_of(url, partial(sqlalchemy.create_engine, poolclass=sqlalchemy.NullPool))
        except UnusableAddress as error:
            raise _unusable(str(error)) from error
        if self._engine.dialect.is_async:
            raise _unusable("its driver is asynchronous")
        self._clock = clock
        self.disabled = frozenset[str]()
        self._known: dict[str, str] | None = None  # None: nothing was read yet
        self._absent: set[str] | None = None  # the hosts that the last read did not find; None: it failed
        self._again_s = -math.inf
        self._reading: asyncio.Task[CellsFound] | None = None
        self._left: list[Future[CellsFound]] = []  # reads whose thread has not ended in time

    async def of_hosts(self, hosts: Collection[str]) -> Mapping[str, str]:
        """As CellMap has it. Raises NovaUnavailable."""
        now_s, known = self._clock.monotonic(), self._known or {}
        missing = set(hosts) - known.keys()
        # Before the first read no host is in a cell: that is no answer, so each question reads until one succeeds.
        is_new = self._absent is not None and not missing <= self._absent
        if self._known is None or is_new or now_s >= self._again_s:
            try:
                known, self.disabled = await self._next_read()
            except Exception as error:  # some drivers raise errors of their own, as of an option or a library
                self._absent, self._again_s = None, now_s + RARELY_S
                if not missing:  # what is known counts
                    log.warning("nova.cells_unavailable", reason=self._said(error))
                    return {host: known[host] for host in hosts}
                reason = f"Nova's API database: {type(error).__name__}: {self._said(error)}"
                raise NovaUnavailable(reason, code="nova.cells_unavailable") from error
            self._known, self._absent = known, missing - known.keys()
            self._again_s = now_s + (AGAIN_S if self._absent else RARELY_S)
        return {host: known[host] for host in hosts if host in known}

    async def _next_read(self) -> CellsFound:
        """What a read finds: the one under way, or a new one. It goes on when who waits for it has ended."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_in_time(), name="nova cells")
        reading = self._reading
        try:
            return await asyncio.shield(reading)
        finally:
            if reading.done():
                self._reading = None

    async def _read_in_time(self) -> CellsFound:
        """What a thread reads, by a connection of its own: none can be cancelled. One that is late is left alone, and
        is none of the loop's pool, which the process would wait for when it stops. Raises NovaUnavailable.
        """
        self._left = [one for one in self._left if not one.done()]
        if len(self._left) >= MAX_LEFT:
            raise NovaUnavailable(f"{MAX_LEFT} reads of Nova's API database hang")
        read = Future[CellsFound]()
        read.set_running_or_notify_cancel()  # the thread alone ends it
        threading.Thread(target=self._read_into, args=(read,), name="nova cells", daemon=True).start()
        try:
            async with asyncio.timeout(READ_S):
                return await asyncio.wrap_future(read)
        except TimeoutError:
            self._left.append(read)
            raise

    def _read_into(self, read: Future[CellsFound]) -> None:
        try:
            read.set_result(self._read())
        except Exception as error:  # whatever a driver raises is told by who waits for the read
            read.set_exception(error)

    def _said(self, error: Exception) -> str:
        return fault_of(error, self._engine.url, READ_S)

    def _read(self) -> CellsFound:
        """All that the database has of hosts and cells."""
        with self._engine.connect() as connection:
            cells = connection.execute(sqlalchemy.text(CELLS)).fetchmany(MAX_MAPPINGS)
            found = connection.execute(sqlalchemy.text(HOSTS)).fetchmany(MAX_MAPPINGS)
        uuids = {number: str(uuid) for number, uuid, _ in cells}
        disabled = frozenset(str(uuid) for _, uuid, is_disabled in cells if is_disabled)
        return {str(host): uuids[cell] for host, cell in found if cell in uuids}, disabled


def _unusable(reason: str) -> SettingsError:
    return SettingsError("nova.cells_database", f"nova.api.cells_database cannot be used: {reason}")
