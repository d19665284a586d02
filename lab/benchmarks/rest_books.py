"""The books of rest_beside.py: which providers there are, and how each system gets them without its API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

import asyncpg
import msgspec
from msgspec import Struct

from bus.contracts.placement import Inventory
from placement_worker.domain.values import Provider, is_custom, stored_inventory
from placement_worker.operations import export

BIG_HOSTS = 4  # of every flat book: so large that many writers never fill them
AGGREGATES = tuple(f"{number:08d}-0000-4000-8000-000000000000" for number in range(10))
GOLD = "HW_CPU_X86_AVX2"  # one flat host in ten has it
NOWHERE = "HW_CPU_X86_SGX"
CELL = "HW_NUMA_ROOT"
INVENTORY = ("total", "reserved", "min_unit", "max_unit", "step_size", "allocation_ratio")
FIRST_CUSTOM = 10_000  # the real one numbers a site's own classes from here

VCPU = Inventory(total=64, allocation_ratio=16.0)
MEMORY = Inventory(total=262_144, reserved=512)
DISK = Inventory(total=4000)
FUNCTIONS = Inventory(total=1000)


class Host(Struct, frozen=True, kw_only=True):
    """One provider."""

    uuid: str
    name: str
    root: str
    parent: str | None = None
    inventories: Mapping[str, Inventory]
    traits: tuple[str, ...] = ()
    aggregates: tuple[str, ...] = ()


def uuid_of(number: int) -> str:
    """A readable uuid."""
    return f"00000000-0000-4000-8000-{number:012d}"


def flat(count: int) -> list[Host]:
    """Hosts without children."""
    return [flat_host(uuid_of(number), number, big=number < BIG_HOSTS) for number in range(count)]


def flat_host(uuid: str, number: int, *, big: bool = False) -> Host:
    """One of them."""
    inventories = {"VCPU": VCPU, "MEMORY_MB": MEMORY, "DISK_GB": DISK}
    # No two hosts report the same memory and disk: what a search keeps by inventory is of little use then.
    for name in ("MEMORY_MB", "DISK_GB"):
        inventories[name] = msgspec.structs.replace(inventories[name], total=inventories[name].total + number)
    if big:
        inventories = {name: msgspec.structs.replace(one, total=100_000_000) for name, one in inventories.items()}
    return Host(
        uuid=uuid,
        name=f"host-{uuid}",
        root=uuid,
        inventories=inventories,
        traits=("COMPUTE_NODE", GOLD) if number % 10 == 0 else ("COMPUTE_NODE",),
        aggregates=(AGGREGATES[number % len(AGGREGATES)],),
    )


def nested(roots: int) -> list[Host]:
    """Trees of seven: a root with the disk, two NUMA cells, and two network devices under each."""
    hosts = []
    places = ((0, None), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2))
    for number in range(roots):
        for place, parent in places:
            if place == 0:
                inventories, traits = {"DISK_GB": DISK}, ("COMPUTE_NODE",)
            elif place < 3:
                inventories, traits = {"VCPU": VCPU, "MEMORY_MB": MEMORY}, (CELL,)
            else:
                inventories, traits = {"SRIOV_NET_VF": FUNCTIONS}, ("CUSTOM_NET",)
            hosts.append(
                Host(
                    uuid=uuid_of(10 * number + place),
                    name=f"host-{number}.{place}",
                    root=uuid_of(10 * number),
                    parent=None if parent is None else uuid_of(10 * number + parent),
                    inventories=inventories,
                    traits=traits,
                )
            )
    return hosts


def as_lines(hosts: Sequence[Host]) -> Iterable[bytes]:
    """Placement as `berth placement import` reads it."""
    providers = {
        host.uuid: Provider(
            uuid=host.uuid,
            name=host.name,
            parent=host.parent,
            root=host.root,
            generation=1,
            spec_generation=1,
            inventories={name: stored_inventory(inventory) for name, inventory in host.inventories.items()},
            used={},
            traits=host.traits,
            aggregates=host.aggregates,
        )
        for host in hosts
    }
    classes = frozenset(name for host in hosts for name in host.inventories if is_custom(name))
    traits = frozenset(name for host in hosts for name in host.traits if is_custom(name))
    return export.lines(export.PlacementExport(classes, traits, providers, {}))


async def into_real(url: str, hosts: Sequence[Host]) -> None:
    """Write placement into the database of a real Placement, whose own names are there already."""
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await _write(connection, hosts)
        await connection.execute("ANALYZE")
    finally:
        await connection.close()


async def _write(connection: asyncpg.Connection, hosts: Sequence[Host]) -> None:
    now = datetime.now(UTC).replace(tzinfo=None)
    classes = await _names(connection, "resource_classes", {name for host in hosts for name in host.inventories}, now)
    traits = await _names(connection, "traits", {name for host in hosts for name in host.traits}, now)
    ids = {host.uuid: number for number, host in enumerate(hosts, 1)}
    await _copy(
        connection,
        "resource_providers",
        "created_at updated_at id uuid name generation root_provider_id parent_provider_id",
        [
            (now, now, ids[h.uuid], h.uuid, h.name, 1, ids[h.root], None if h.parent is None else ids[h.parent])
            for h in hosts
        ],
    )
    await _copy(
        connection,
        "inventories",
        f"created_at updated_at resource_provider_id resource_class_id {' '.join(INVENTORY)}",
        [
            (now, now, ids[h.uuid], classes[name], *(getattr(i, column) for column in INVENTORY))
            for h in hosts
            for name, i in h.inventories.items()
        ],
    )
    await _copy(
        connection,
        "resource_provider_traits",
        "created_at updated_at trait_id resource_provider_id",
        [(now, now, traits[name], ids[h.uuid]) for h in hosts for name in h.traits],
    )
    wanted = sorted({name for host in hosts for name in host.aggregates})
    aggregates = {name: number for number, name in enumerate(wanted, 1)}
    await _copy(
        connection,
        "placement_aggregates",
        "created_at updated_at id uuid",
        [(now, now, number, name) for name, number in aggregates.items()],
    )
    await _copy(
        connection,
        "resource_provider_aggregates",
        "created_at updated_at resource_provider_id aggregate_id",
        [(now, now, ids[h.uuid], aggregates[name]) for h in hosts for name in h.aggregates],
    )
    for table in ("resource_providers", "placement_aggregates"):  # those whose numbers were given, not drawn
        await connection.execute(
            f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), greatest(1, (SELECT max(id) FROM {table})))"
        )


async def _names(connection: asyncpg.Connection, table: str, wanted: set[str], now: datetime) -> dict[str, int]:
    await connection.executemany(
        f"INSERT INTO {table} (created_at, updated_at, id, name) VALUES ($1, $1, $2, $3)",
        [(now, number, name) for number, name in enumerate(sorted(filter(is_custom, wanted)), FIRST_CUSTOM)],
    )
    return dict(await connection.fetch(f"SELECT name, id FROM {table}"))


async def _copy(connection: asyncpg.Connection, table: str, columns: str, rows: list[tuple[object, ...]]) -> None:
    await connection.copy_records_to_table(table, records=rows, columns=columns.split())
