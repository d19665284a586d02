"""Passes over a Placement's database (MariaDB, PostgreSQL), each as of one moment: all providers, aggregates and
allocations, and the inventories and traits of those providers whose generation has moved.

Statements take rows by their primary keys or by an index of Placement's, so none holds up what Placement writes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
import sqlalchemy
from msgspec import Meta as Bound
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import Uuid, reason_of
from bus.persistence.external_database import Snapshot, TooManyRows, fault_of, snapshot_engine_of, snapshot_of
from placement_worker.domain.values import Provider, StoredInventory
from placement_worker.operations.export import MAX_NUMBER, InvalidExport, ListedProvider
from placement_worker.operations.mirror import MAX_PROVIDERS, Held, PlacementCopy, PlacementPass
from placement_worker.rest.bodies import InventoryBody

STATEMENT_S: Final = 10.0  # that one statement is waited for
PAGE: Final = 1_000  # providers of one statement
PARTS_PAGE: Final = 100  # providers of which one statement reads inventories, or traits
ALLOCATIONS_PAGE: Final = 5_000
MAX_PARTS: Final = 100_000  # rows that one other statement may find: as many may be a part of them
MAX_ALLOCATIONS: Final = 5_000_000

T = TypeVar("T")

NUMBERS: Final = ("total", "reserved", "min_unit", "max_unit", "step_size", "allocation_ratio")  # of an inventory
CLASSES: Final = sqlalchemy.text(f"SELECT id, name FROM resource_classes LIMIT {MAX_PARTS}")
PROVIDERS: Final = sqlalchemy.text(
    "SELECT id, uuid, name, generation, parent_provider_id, root_provider_id FROM resource_providers "
    f"WHERE id > :after ORDER BY id LIMIT {PAGE}"
)
AGGREGATES: Final = sqlalchemy.text(
    "SELECT a.resource_provider_id, g.uuid FROM resource_provider_aggregates a "
    "JOIN placement_aggregates g ON g.id = a.aggregate_id "
    f"WHERE a.resource_provider_id BETWEEN :first AND :last LIMIT {MAX_PARTS}"
)
INVENTORIES: Final = sqlalchemy.text(
    f"SELECT resource_provider_id, resource_class_id, {', '.join(NUMBERS)} FROM inventories "
    f"WHERE resource_provider_id IN :ids LIMIT {MAX_PARTS}"
).bindparams(sqlalchemy.bindparam("ids", expanding=True))
TRAITS: Final = sqlalchemy.text(
    "SELECT p.resource_provider_id, t.name FROM resource_provider_traits p JOIN traits t ON t.id = p.trait_id "
    f"WHERE p.resource_provider_id IN :ids LIMIT {MAX_PARTS}"
).bindparams(sqlalchemy.bindparam("ids", expanding=True))
ALLOCATIONS: Final = sqlalchemy.text(
    "SELECT id, resource_provider_id, consumer_id, resource_class_id, used FROM allocations "
    f"WHERE id > :after ORDER BY id LIMIT {ALLOCATIONS_PAGE}"
)

Consumer = Annotated[str, Bound(min_length=1, max_length=255)]
Amount = Annotated[int, Bound(ge=1, le=MAX_NUMBER)]
Name = Annotated[str, Bound(min_length=1, max_length=255)]


class _Row(Struct, frozen=True, array_like=True):
    """A provider as its table has it."""

    id: int
    uuid: Uuid
    name: Name
    generation: int
    parent: int | None
    root: int | None  # rows of Rocky and older may have none


_PairRows = list[tuple[int, Name]]
_AllocationRows = list[tuple[int, int, Consumer, int, Amount]]


class DatabaseSource:
    """A Placement by its database (`PlacementSource`), with a connection of its own each time."""

    def __init__(self, url: str) -> None:
        """Raises UnusableAddress."""
        self._engine = snapshot_engine_of(url)

    async def close(self) -> None:
        """No connection is kept."""

    async def read(self, known: PlacementCopy, since_s: float) -> PlacementPass:
        """As PlacementSource has it. Raises InvalidExport."""
        try:
            async with snapshot_of(self._engine, STATEMENT_S) as snapshot:
                return await _pass(snapshot, known)
        except InvalidExport:
            raise
        except msgspec.ValidationError as error:
            raise InvalidExport(f"that is no database of Placement's: {reason_of(error)}") from error
        except Exception as error:  # some drivers raise errors of their own, as of an option or a library
            reason = f"{type(error).__name__}: {fault_of(error, self._engine.url, STATEMENT_S)}"
            raise InvalidExport(f"Placement's database: {reason}") from error


async def _pass(snapshot: Snapshot, known: PlacementCopy) -> PlacementPass:
    rows: dict[int, _Row] = {}
    aggregates: dict[int, list[str]] = {}
    async for page in snapshot.pages(PROVIDERS, PAGE, MAX_PROVIDERS):
        found = msgspec.convert(page, list[_Row])
        rows |= {row.id: row for row in found}
        if found:
            named = await _parts(snapshot, AGGREGATES, first=found[0].id, last=found[-1].id)
            _add(aggregates, msgspec.convert(named, _PairRows))
    classes = dict(msgspec.convert(await _parts(snapshot, CLASSES), _PairRows))
    listed = {row.id: _listed(row, rows) for row in rows.values()}
    moved = [number for number, one in listed.items() if not _is_known(number, one, known)]
    read = {one.uuid: one async for one in _moved(snapshot, [(at, listed[at]) for at in moved], classes, aggregates)}
    read |= _with_other_aggregates(listed, read, aggregates, known)
    held = await _holdings(snapshot, listed, classes)
    changed = {uuid: part for uuid, part in held.items() if uuid in read or part != known.held.get(uuid, {})}
    ids = {one.uuid: number for number, one in listed.items()}
    return PlacementPass(ids.keys(), read, changed, {uuid: ids[uuid] for uuid in read})


async def _parts(snapshot: Snapshot, statement: sqlalchemy.TextClause, **values: Any) -> Sequence[tuple[Any, ...]]:
    """All that a statement finds. Raises TooManyRows."""
    rows = await snapshot.rows(statement, **values)
    if len(rows) >= MAX_PARTS:
        raise TooManyRows(f"{MAX_PARTS} rows and more")
    return rows


def _listed(row: _Row, rows: Mapping[int, _Row]) -> ListedProvider:
    """Raises InvalidExport: its parent or its root is missing."""
    root = row.id if row.root is None else row.root
    if root not in rows or (row.parent is not None and row.parent not in rows):
        raise InvalidExport(f"the parent or the root of {row.uuid} is missing")
    parent = None if row.parent is None else rows[row.parent].uuid
    return ListedProvider(row.uuid, row.name, row.generation, parent, rows[root].uuid)


def _is_known(number: int, row: ListedProvider, known: PlacementCopy) -> bool:
    provider = known.providers.get(row.uuid)
    return provider is not None and row.is_of(provider) and known.ids.get(row.uuid) == number


async def _moved(
    snapshot: Snapshot,
    moved: Sequence[tuple[int, ListedProvider]],
    classes: Mapping[int, str],
    aggregates: Mapping[int, Sequence[str]],
) -> AsyncIterator[Provider]:
    """These providers with their parts."""
    for start in range(0, len(moved), PARTS_PAGE):
        part = moved[start : start + PARTS_PAGE]
        ids = [number for number, _ in part]
        inventories: dict[int, dict[str, StoredInventory]] = {}
        for provider, kind, *numbers in await _parts(snapshot, INVENTORIES, ids=ids):
            body = dict(zip(NUMBERS, numbers, strict=True))
            inventories.setdefault(provider, {})[_class(kind, classes)] = msgspec.convert(
                body, InventoryBody
            ).inventory()
        traits: dict[int, list[str]] = {}
        _add(traits, msgspec.convert(await _parts(snapshot, TRAITS, ids=ids), _PairRows))
        for number, row in part:
            yield Provider(
                row.uuid,
                row.name,
                row.parent_provider_uuid,
                row.root_provider_uuid,
                row.generation,
                0,
                inventories.get(number, {}),
                {},
                tuple(sorted(traits.get(number, ()))),
                tuple(sorted(aggregates.get(number, ()))),
            )


def _with_other_aggregates(
    listed: Mapping[int, ListedProvider],
    read: Collection[str],
    aggregates: Mapping[int, Sequence[str]],
    known: PlacementCopy,
) -> dict[str, Provider]:
    """Providers of which nothing but the aggregates has changed: microversions before 1.19 move no generation."""
    found = {}
    for number, row in listed.items():
        now = tuple(sorted(aggregates.get(number, ())))
        if row.uuid not in read and now != known.providers[row.uuid].aggregates:
            found[row.uuid] = replace(known.providers[row.uuid], aggregates=now)
    return found


async def _holdings(
    snapshot: Snapshot, listed: Mapping[int, ListedProvider], classes: Mapping[int, str]
) -> dict[str, Held]:
    """What consumers hold, of every provider. Raises InvalidExport."""
    held: dict[int, Held] = {number: {} for number in listed}
    async for page in snapshot.pages(ALLOCATIONS, ALLOCATIONS_PAGE, MAX_ALLOCATIONS):
        for _, provider, consumer, kind, used in msgspec.convert(page, _AllocationRows):
            if provider not in held:
                raise InvalidExport(f"{consumer!r} holds something of a provider that is missing")
            of = held[provider].setdefault(consumer, {})
            name = _class(kind, classes)
            of[name] = of.get(name, 0) + used
    return {listed[number].uuid: part for number, part in held.items()}


def _class(number: Any, classes: Mapping[int, str]) -> str:
    """Raises InvalidExport."""
    name = classes.get(number)
    if name is None:
        raise InvalidExport("a resource class is missing")
    return name


def _add(lists: dict[int, list[T]], pairs: Iterable[tuple[int, T]]) -> None:
    for number, one in pairs:
        lists.setdefault(number, []).append(one)
