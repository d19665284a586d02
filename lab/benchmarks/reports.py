"""How many hosts a second the book takes reports of: new, unchanged and changed ones, in groups, against PostgreSQL.

    python -m lab.benchmarks.reports [--url postgresql://...] [--hosts 10000] [--group 128] [--durable]

Without a URL it starts a private PostgreSQL. It prints seconds, and the round trips of a group: the statements that
wait for the server, with those that begin and end the transaction. It judges nothing.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import asyncpg
import uvloop

from berth.trial.embedded.postgres import Postgres
from bus.clock import new_uuid
from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from bus.persistence.database import Database
from placement_worker.book import ResourceBook
from placement_worker.store.postgres_rows import PostgresBookRows

STATEMENTS = ("execute", "executemany", "fetch", "fetchrow", "fetchval")


class RoundTrips:
    """Counts the statements of all connections."""

    def __init__(self) -> None:
        self.count = 0
        for name in STATEMENTS:
            self._count(name, getattr(asyncpg.Connection, name))

    def _count(self, name: str, original: Any) -> None:
        async def counted(connection: Any, *arguments: Any, **named: Any) -> Any:
            self.count += 1
            return await original(connection, *arguments, **named)

        patch.object(asyncpg.Connection, name, counted).start()


def report_of(uuid: str, number: int, version: int, vcpus: int) -> InventoryUpdate:
    """One flat host."""
    inventories = {
        "VCPU": Inventory(total=vcpus, allocation_ratio=4.0),
        "MEMORY_MB": Inventory(total=262_144, reserved=512),
        "DISK_GB": Inventory(total=4_000),
    }
    host = ProviderReport(uuid=uuid, name=f"host-{number}", inventories=inventories, traits=("HW_CPU_X86_AVX2",))
    return InventoryUpdate(source="bench", version=version, root_uuid=uuid, providers=(host,))


async def measure(url: str, hosts: int, group: int) -> None:
    """Every host is reported as new, then as before, then with other amounts, and each time printed."""
    trips = RoundTrips()
    book = ResourceBook(PostgresBookRows(Database(url, "placement")))
    await book.open()
    gc.freeze()
    rng = random.Random(1)
    uuids = [new_uuid(rng) for _ in range(hosts)]
    for version, (vcpus, words) in enumerate(((32, "new"), (32, "unchanged"), (64, "changed")), 1):
        updates = [report_of(uuid, number, version, vcpus) for number, uuid in enumerate(uuids)]
        groups = [updates[at : at + group] for at in range(0, hosts, group)]
        trips.count = 0
        seconds = await _report_all(book, groups)
        a_group = trips.count / len(groups)
        print(f"{hosts} {words:9} hosts: {seconds:6.2f} s, {a_group:4.1f} round trips a group of {group}")
    await book.close()


async def _report_all(book: ResourceBook, groups: Sequence[Sequence[InventoryUpdate]]) -> float:
    started = time.perf_counter()
    for updates in groups:
        results = await book.report(updates)
        assert len(results) == len(updates)
    return time.perf_counter() - started


def main() -> None:
    """Parse, start a server when none is given, measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url")
    parser.add_argument("--hosts", type=int, default=10_000)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--durable", action="store_true")
    arguments = parser.parse_args()
    if arguments.url:
        uvloop.run(measure(arguments.url, arguments.hosts, arguments.group))
        return
    with Postgres(durable=arguments.durable) as server:
        uvloop.run(measure(server.url("postgres"), arguments.hosts, arguments.group))


if __name__ == "__main__":
    main()
