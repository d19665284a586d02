"""Reads `compute_nodes` of a cell's database, each time in one transaction: the ids and times of all rows, and in full
those that may have changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import sqlalchemy
import structlog
from msgspec import Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from bus.contracts.base import Uuid
from bus.persistence.external_database import UnusableAddress, fault_of, snapshot_engine_of
from bus.service.settings import SettingsError
from nova_scheduler.cloud.host_facts import MAX_TEXT, TABLE, CellRead, KnownRow, NodeRow, hardware_of
from nova_scheduler.cloud.rest import NovaUnavailable

log = structlog.get_logger("nova")

UNAVAILABLE: Final = "nova.cell_unavailable"
PAGE: Final = 1_000  # ids in one page
FULL_PAGE: Final = 100  # rows in full in one page
MAX_ROWS: Final = 100_000  # compute nodes of one cell
MAX_MOVES: Final = 10_000  # under way, of the instances of one page
STATEMENT_S: Final = 10.0  # that one statement is waited for
# A time has whole seconds, and a row may be written twice in one. So a row that has changed is read again by as many
# reads, seconds later: what was written at the same time is there then, whatever the writer's clock.
AGAIN: Final = 2

_JSON: Final = ("stats", "metrics", "supported_instances", "pci_stats", "numa_topology")
_PLAIN: Final = (
    *("id", "uuid", "host", "hypervisor_hostname", "hypervisor_version", "free_disk_gb"),
    *("cpu_allocation_ratio", "ram_allocation_ratio"),
)
# The two statements. A row that was deleted has its id in `deleted`.
TIMES: Final = sqlalchemy.text(
    f"SELECT id, updated_at FROM {TABLE} WHERE deleted = 0 AND id > :after ORDER BY id LIMIT {PAGE}"
)
ROWS: Final = sqlalchemy.text(
    f"SELECT {', '.join(_PLAIN)}, {', '.join(f'substr({name}, 1, {MAX_TEXT + 1}) AS {name}' for name in _JSON)} "
    f"FROM {TABLE} WHERE id IN :ids"
).bindparams(sqlalchemy.bindparam("ids", expanding=True))


# Where an instance is, and where it moves to. An accepted move has a destination that has claimed nothing yet; in front
# of one that has ended the instance's host says it.
ACCEPTED: Final = "accepted"
ENDED: Final = ("confirmed", "completed", "done", "reverted", "error", "failed", "cancelled")
MOVES: Final = sqlalchemy.text(
    f"SELECT instance_uuid, dest_compute, dest_node, status FROM migrations WHERE deleted = 0 "
    f"AND instance_uuid IN :uuids AND status NOT IN ({', '.join(repr(one) for one in ENDED)}) ORDER BY id "
    f"LIMIT {MAX_MOVES}"
).bindparams(sqlalchemy.bindparam("uuids", expanding=True))
HOSTS: Final = sqlalchemy.text(
    "SELECT uuid, host, node FROM instances WHERE deleted = 0 AND uuid IN :uuids"
).bindparams(sqlalchemy.bindparam("uuids", expanding=True))


class _Version(Struct, frozen=True):
    updated_at: object
    again: int  # how many reads still take the row in full


class RowVersions:
    """Which rows of a table a read takes in full, by what the reads before have found. Pure."""

    def __init__(self) -> None:
        self._rows: Mapping[int, _Version] = {}

    def after(self, times: Mapping[int, object]) -> tuple[RowVersions, tuple[int, ...], frozenset[int]]:
        """What is known after a read that finds these times ({id: updated_at}), the rows that it takes in full, and
        those of them that have another time.
        """
        rows: dict[int, _Version] = {}
        due: list[int] = []
        written: list[int] = []
        for number, updated_at in times.items():
            known = self._rows.get(number)
            if known is None or known.updated_at != updated_at:
                rows[number] = _Version(updated_at, AGAIN)
                due.append(number)
                written.append(number)
            elif known.again:
                rows[number] = _Version(updated_at, known.again - 1)
                due.append(number)
            else:
                rows[number] = known
        found = RowVersions()
        found._rows = rows
        return found, tuple(due), frozenset(written)


class CellDatabase:
    """The database of one cell, read with a connection of its own each time."""

    def __init__(self, cell: str, url: str) -> None:
        """Raises SettingsError."""
        self.cell = cell
        try:
            self._engine = snapshot_engine_of(url)
        except UnusableAddress as error:
            reason = f"nova.api.cell_databases.{cell} cannot be used: {error}"
            raise SettingsError("nova.cell_database", reason) from error
        self._versions = RowVersions()

    async def read(self, instances: Sequence[str] = ()) -> CellRead:
        """All that may have changed since the read before, and where these instances are. One that fails changes
        nothing. Raises NovaUnavailable.
        """
        try:
            async with asyncio.timeout(STATEMENT_S) as limit, self._engine.connect() as connection:
                times = await self._times(connection, limit)
                versions, due, written = self._versions.after(times)
                changed: dict[int, KnownRow | None] = {}
                for start in range(0, len(due), FULL_PAGE):
                    _extend(limit)
                    found = await connection.execute(ROWS, {"ids": due[start : start + FULL_PAGE]})
                    changed |= parse_rows(found.mappings().all())
                sights = await self._sights(connection, limit, instances) if instances else {}
        except NovaUnavailable:
            raise
        except Exception as error:  # some drivers raise errors of their own, as of an option or a library
            reason = f"{type(error).__name__}: {fault_of(error, self._engine.url, STATEMENT_S)}"
            raise NovaUnavailable(f"cell {self.cell}: {reason}", code=UNAVAILABLE) from error
        self._versions = versions
        return CellRead(present=times.keys(), changed=changed, written=written, sights=sights)

    async def _sights(
        self, connection: AsyncConnection, limit: asyncio.Timeout, instances: Sequence[str]
    ) -> dict[str, set[tuple[str, str]]]:
        """Where these instances are. Where one moves, its destination alone counts: it may move on its own host."""
        # The last statements of the transaction: a user that may not read these tables has read the rows all the same.
        on: dict[str, set[tuple[str, str]]] = {}
        try:
            for start in range(0, len(instances), PAGE):
                _extend(limit)
                asked = {"uuids": instances[start : start + PAGE]}
                moves = (await connection.execute(MOVES, asked)).all()
                if len(moves) == MAX_MOVES:
                    return {}
                hosts = (await connection.execute(HOSTS, asked)).all()
                for uuid, host, node, status in moves:
                    on.setdefault(uuid, set()).update({(host, node)} if status != ACCEPTED and host and node else ())
                for uuid, host, node in hosts:
                    if uuid not in on and host and node:
                        on[uuid] = {(host, node)}
        except sqlalchemy.exc.DBAPIError as error:
            why = f"{type(error).__name__}: {fault_of(error, self._engine.url, STATEMENT_S)}"
            log.warning("nova.instances_unread", cell=self.cell, why=why)
            return {}
        return on

    async def _times(self, connection: AsyncConnection, limit: asyncio.Timeout) -> dict[int, object]:
        """{id: updated_at} of all rows. Raises NovaUnavailable."""
        times: dict[int, object] = {}
        while True:
            _extend(limit)
            page = (await connection.execute(TIMES, {"after": max(times, default=0)})).all()
            times.update((int(number), updated_at) for number, updated_at in page)
            if len(times) > MAX_ROWS:
                raise NovaUnavailable(f"cell {self.cell}: more than {MAX_ROWS} compute nodes", code=UNAVAILABLE)
            if len(page) < PAGE:
                return times


def parse_rows(rows: Sequence[Mapping[Any, Any]]) -> dict[int, KnownRow | None]:
    """{id: what the row tells}; None: not even whose it is."""
    found: dict[int, KnownRow | None] = {}
    for given in rows:
        number = int(given["id"])
        try:
            row = msgspec.convert(dict(given), NodeRow)
            found[number] = KnownRow(uuid=msgspec.convert(row.uuid, Uuid), hardware=hardware_of(row))
        except msgspec.ValidationError:
            found[number] = None
    return found


def _extend(limit: asyncio.Timeout) -> None:
    """Give the next statement the whole time."""
    limit.reschedule(asyncio.get_running_loop().time() + STATEMENT_S)
