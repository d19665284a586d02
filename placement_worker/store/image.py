"""The whole book as a value: read at one moment, written as one transaction, kept as JSON lines.

For backups and for moving a site's book; not for the running system, which never needs all of it at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import asyncpg
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from placement_worker.domain.names import is_custom
from placement_worker.domain.reports import changes_of
from placement_worker.domain.values import ConsumerState, Provider, Stock, capacity
from placement_worker.store import feed, image_members, limits
from placement_worker.store.image_flaws import flaw_of_consumer, flaw_of_member, flaw_of_names, flaw_of_provider
from placement_worker.store.image_members import HOLD_CLAIMS, Member
from placement_worker.store.inventory import ONE_WRITER_OF_TREES, write_providers
from placement_worker.store.names import NameTable
from placement_worker.store.rows import READ_PROVIDERS_BY_ID, read_providers

# v2 says who is in which server group. Of v1 they are not known, and stay as they are where it is imported.
FORMAT, BEFORE_GROUPS = "berth.placement.v2", "berth.placement.v1"
FAMILY = "berth.placement."
MAX_LINE_BYTES = 2**24
CHUNK = 2000  # rows in one statement

REPEATABLE = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
ALL_IDS = "SELECT id FROM providers ORDER BY id FOR NO KEY UPDATE"
ALL_IDS_READ = "SELECT id FROM providers ORDER BY id"
READ_CONSUMERS = """
SELECT uuid, generation, attempt, project_id, user_id, consumer_type FROM consumers WHERE released_at IS NULL
"""
READ_ALLOCATIONS = """
SELECT a.consumer, p.uuid, c.name, a.amount FROM allocations a JOIN providers p ON p.id = a.provider_id
JOIN resource_classes c ON c.id = a.class_id ORDER BY a.consumer, p.uuid, c.name
"""
DELETE_CONSUMERS = "DELETE FROM consumers WHERE uuid = ANY($1::uuid[])"
DELETE_ALLOCATIONS = "DELETE FROM allocations WHERE consumer = ANY($1::uuid[])"
INSERT_CONSUMERS = """
INSERT INTO consumers (uuid, generation, attempt, project_id, user_id, consumer_type)
SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::int[], $4::text[], $5::text[], $6::text[])
"""
INSERT_ALLOCATIONS = """
INSERT INTO allocations (consumer, provider_id, class_id, amount)
SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::int[], $4::bigint[])
"""
# Shapes up to this one have been given.
GIVEN = "SELECT setval('shapes', GREATEST($1::bigint, (SELECT last_value FROM shapes)))"
COUNT_USED = """
UPDATE inventories i SET used = coalesce(s.amount, 0)
FROM inventories j LEFT JOIN (
    SELECT provider_id, class_id, sum(amount)::bigint AS amount FROM allocations GROUP BY provider_id, class_id
) s ON s.provider_id = j.provider_id AND s.class_id = j.class_id
WHERE i.provider_id = j.provider_id AND i.class_id = j.class_id AND i.used <> coalesce(s.amount, 0)
RETURNING i.provider_id
"""


T = TypeVar("T")


class ImageError(Exception):
    """A file that is no book, or a book that does not fit together."""


class Image(Struct, frozen=True):
    """Everything: custom names, providers, who holds what, and who is in which server group (None: it is not said)."""

    classes: frozenset[str]
    traits: frozenset[str]
    providers: dict[str, Provider]
    consumers: dict[str, ConsumerState]
    members: frozenset[Member] | None = None


class _Head(Struct, frozen=True):
    format: str | None = None


class _Line(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    format: str | None = None
    resource_class: str | None = None
    trait: str | None = None
    provider: Provider | None = None
    consumer: tuple[str, ConsumerState] | None = None
    member: Member | None = None
    end: int | None = None  # the last line: how many came before it, so that half a file is not taken for a book


_head = msgspec.json.Decoder(_Head)
_line = msgspec.json.Decoder(_Line)


async def read(connection: asyncpg.Connection, names: NameTable) -> Image:
    """The book at one moment. The caller's transaction has done nothing yet."""
    await connection.execute(REPEATABLE)
    return await _read(connection, names, ALL_IDS_READ)


async def _read(connection: asyncpg.Connection, names: NameTable, ids: str) -> Image:
    numbers = [row[0] for row in await connection.fetch(ids)]
    providers: dict[str, Provider] = {}
    for start in range(0, len(numbers), CHUNK):
        providers.update((await read_providers(connection, READ_PROVIDERS_BY_ID, numbers[start : start + CHUNK]))[1])
    held: dict[str, dict[str, dict[str, int]]] = {}
    for consumer, provider, name, amount in await connection.fetch(READ_ALLOCATIONS):
        held.setdefault(consumer, {}).setdefault(provider, {})[name] = amount
    consumers = {
        row[0]: ConsumerState(row[1], row[2], row[3], row[4], row[5], held[row[0]])
        for row in await connection.fetch(READ_CONSUMERS)
        if row[0] in held
    }
    classes = frozenset(filter(is_custom, names.class_ids))
    traits = frozenset(filter(is_custom, names.trait_ids))
    return Image(classes, traits, providers, consumers, await image_members.read(connection))


async def assign(connection: asyncpg.Connection, image: Image, names: NameTable) -> int:
    """Make the book be this, inside the caller's transaction; returns how many providers and consumers changed.

    `names` knows every class and trait in it. Shapes only rise, whatever the image says of them. Raises ImageError.
    """
    image = checked(image)
    shape = await connection.fetchval(ONE_WRITER_OF_TREES)
    await connection.execute(HOLD_CLAIMS)
    before = await _read(connection, names, ALL_IDS)
    changed = sorted(u for u in before.consumers.keys() | image.consumers.keys() if _differs(u, before, image))
    after = {uuid: _next(before.providers.get(uuid), provider, shape) for uuid, provider in image.providers.items()}
    await connection.execute(GIVEN, max((provider.shape for provider in after.values()), default=shape))
    ids = dict(await connection.fetch("SELECT uuid, id FROM providers"))
    stocked = {uuid: p for uuid, p in before.providers.items() if uuid in after}
    # What goes, goes last: until the allocations have moved somebody may hold it.
    await _write_providers(connection, ids, stocked, _with_old_stocks(stocked, after), names)
    await _write_consumers(connection, image, changed, ids, names)
    used = {row[0] for row in await connection.fetch(COUNT_USED)}
    await write_providers(connection, ids, _with_old_stocks(stocked, after), after, names)
    gone = {uuid: p for uuid, p in before.providers.items() if uuid not in after}
    await write_providers(connection, ids, gone, {}, names)
    await connection.execute(limits.COUNT_ANEW)
    regrouped = await _write_members(connection, image, before, changed)
    moved = {ids[uuid] for uuid, p in after.items() if before.providers.get(uuid) is not p} | used
    _, states = await read_providers(connection, READ_PROVIDERS_BY_ID, sorted(moved))
    if await feed.append(connection, changes_of(gone, states)):
        await connection.execute(feed.NEW_HISTORY)
    rewritten = {uuid for uuid, p in after.items() if before.providers.get(uuid) is not p}
    return len(regrouped.union(changed)) + len(gone) + len(rewritten)


def checked(image: Image) -> Image:
    """The image, its capacities counted anew: they follow from the rest. Raises ImageError for what is no book."""
    flaws = (
        flaw_of_names((*image.classes, *image.traits)),
        *map(flaw_of_provider, image.providers.values()),
        *(flaw_of_consumer(uuid, consumer) for uuid, consumer in image.consumers.items()),
        *(flaw_of_member(member, image.consumers) for member in sorted(image.members or ())),
    )
    for flaw in filter(None, flaws):
        raise ImageError(flaw)
    _check_together(image)
    return replace(image, providers={uuid: _counted(provider) for uuid, provider in image.providers.items()})


def _counted(provider: Provider) -> Provider:
    stocks = {name: replace(stock, capacity=_capacity(stock)) for name, stock in provider.stocks.items()}
    return provider if stocks == provider.stocks else replace(provider, stocks=stocks)


def _capacity(stock: Stock) -> int:
    return 0 if stock.set_aside else capacity(stock.total, stock.reserved, stock.allocation_ratio)


def _check_together(image: Image) -> None:
    named: dict[str, str] = {}
    for provider in image.providers.values():
        if named.setdefault(provider.name, provider.uuid) != provider.uuid:
            raise ImageError(f"{provider.uuid} and {named[provider.name]} are both named {provider.name!r}")
        top = provider
        for _ in range(len(image.providers)):
            if top.parent is None:
                break
            if top.parent not in image.providers:
                raise ImageError(f"the parent of {provider.uuid} is missing")
            top = image.providers[top.parent]
        if provider.root != top.uuid:
            raise ImageError(f"{provider.uuid} is not under its root {provider.root}")
    for uuid, consumer in image.consumers.items():
        for name, resources in consumer.holding.items():
            if name not in image.providers or not image.providers[name].stocks.keys() >= resources.keys():
                raise ImageError(f"{uuid} holds what {name} does not have")


def _differs(uuid: str, before: Image, image: Image) -> bool:
    return before.consumers.get(uuid) != image.consumers.get(uuid)


def _next(old: Provider | None, new: Provider, shape: int) -> Provider:
    """The provider as it is to be; the very same object when nothing of it changes.

    shape: one that this book has not given yet; nor has it given a higher one, such as the image may have.
    """
    if old is None:
        return replace(new, used={}, shape=max(shape, new.shape))
    # Of a trait that is there already the book knows best whose it is.
    lasting = {*old.lasting}.intersection(new.traits).union({*new.lasting}.difference(old.traits))
    new = replace(new, lasting=tuple(sorted(lasting)))
    same = replace(new, shape=old.shape, used=old.used)
    if same == old:
        return old
    if replace(same, generation=old.generation) == old:
        return same
    return replace(same, shape=max(shape, new.shape))


def _with_old_stocks(before: Mapping[str, Provider], after: Mapping[str, Provider]) -> dict[str, Provider]:
    """`after`, with what it no longer stocks still there."""
    return {
        uuid: provider
        if uuid not in before or before[uuid].stocks.keys() <= provider.stocks.keys()
        else replace(provider, stocks={**before[uuid].stocks, **provider.stocks})
        for uuid, provider in after.items()
    }


async def _write_providers(
    connection: asyncpg.Connection,
    ids: dict[str, int],
    before: Mapping[str, Provider],
    after: Mapping[str, Provider],
    names: NameTable,
) -> None:
    """New providers first, each after its parent and root: one that moves may move below one of them."""
    new = [provider for uuid, provider in after.items() if uuid not in before]
    while new:  # ends: `checked` has seen that every parent is there
        ready = [p for p in new if p.parent is None or p.parent in ids][:CHUNK]
        await write_providers(connection, ids, {}, {p.uuid: p for p in ready}, names)
        new = [p for p in new if p.uuid not in ids]
    await write_providers(connection, ids, before, {u: p for u, p in after.items() if u in before}, names)


async def _write_consumers(
    connection: asyncpg.Connection, image: Image, changed: list[str], ids: Mapping[str, int], names: NameTable
) -> None:
    await connection.execute(DELETE_ALLOCATIONS, changed)
    await connection.execute(DELETE_CONSUMERS, changed)
    new = [(uuid, image.consumers[uuid]) for uuid in changed if uuid in image.consumers]
    await connection.execute(
        INSERT_CONSUMERS,
        [uuid for uuid, _ in new],
        [c.generation for _, c in new],
        [c.attempt for _, c in new],
        [c.project_id for _, c in new],
        [c.user_id for _, c in new],
        [c.consumer_type for _, c in new],
    )
    rows = [
        (uuid, ids[provider], names.class_ids[name], amount)
        for uuid, consumer in new
        for provider, resources in consumer.holding.items()
        for name, amount in resources.items()
    ]
    if rows:
        await connection.execute(INSERT_ALLOCATIONS, *map(list, zip(*rows, strict=True)))


async def _write_members(connection: asyncpg.Connection, image: Image, before: Image, changed: list[str]) -> set[str]:
    """The consumers whose server groups are others than before."""
    if image.members is None:
        await image_members.follow(connection, changed, before.consumers)
        return set()
    regrouped = image_members.joined(before.members or (), image.members)
    await image_members.write(connection, image.members, regrouped.union(changed))
    return regrouped


# --- JSON lines


def lines(image: Image) -> Iterator[bytes]:
    """The book as lines, each ending in a newline."""
    rows = [_Line(format=BEFORE_GROUPS if image.members is None else FORMAT)]
    rows += [_Line(resource_class=name) for name in sorted(image.classes)]
    rows += [_Line(trait=name) for name in sorted(image.traits)]
    rows += [_Line(provider=image.providers[uuid]) for uuid in sorted(image.providers)]
    rows += [_Line(consumer=(uuid, image.consumers[uuid])) for uuid in sorted(image.consumers)]
    rows += [_Line(member=member) for member in sorted(image.members or ())]
    rows.append(_Line(end=len(rows)))
    return (msgspec.json.encode(row) + b"\n" for row in rows)


def parse(rows: Iterable[bytes]) -> Image:
    """A book from its lines. Raises ImageError."""
    classes: set[str] = set()
    traits: set[str] = set()
    providers: dict[str, Provider] = {}
    consumers: dict[str, ConsumerState] = {}
    members: set[Member] | None = None
    ended = False
    for number, row in enumerate(rows):
        if number == 0:
            members = set() if _format(row) == FORMAT else None
        line = _decoded(_line, row, number)
        if ended or (line.member is not None and members is None):
            raise ImageError(f"line {number + 1} is not part of such a file")
        if line.resource_class is not None:
            classes.add(line.resource_class)
        elif line.trait is not None:
            traits.add(line.trait)
        elif line.provider is not None:
            providers[line.provider.uuid] = line.provider
        elif line.consumer is not None:
            consumers[line.consumer[0]] = line.consumer[1]
        elif line.member is not None and members is not None:
            members.add(line.member)
        elif line.end is not None:
            if line.end != number:
                raise ImageError(f"{number} lines of {line.end}")
            ended = True
    if not ended:
        raise ImageError("the file ends too soon")
    known = None if members is None else frozenset(members)
    return Image(frozenset(classes), frozenset(traits), providers, consumers, known)


def _format(row: bytes) -> str:
    """What the first line says the file is. Raises ImageError for what this berth cannot read whole."""
    said = _decoded(_head, row, 0).format or ""
    if said in (FORMAT, BEFORE_GROUPS):
        return said
    if said.startswith(FAMILY):
        raise ImageError(f"a file of a newer berth: it is {said[:64]}, and this one reads up to {FORMAT}")
    raise ImageError(f"line 1 does not begin a {FORMAT} file")


def _decoded(decoder: msgspec.json.Decoder[T], row: bytes, number: int) -> T:
    try:
        return decoder.decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ImageError(f"line {number + 1}: {error}") from error
