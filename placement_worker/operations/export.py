"""The whole book as a value that is stored as JSON lines, for backups and for moving a site's book.

`export_store` reads and writes it. The workers do not use it, because they never need the whole book at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.patterns import reason_of
from placement_worker.domain.server_groups import GroupMember
from placement_worker.domain.values import ConsumerState, Provider, StoredInventory, capacity
from placement_worker.operations.export_flaws import flaw_of_consumer, flaw_of_member, flaw_of_names, flaw_of_provider

FORMAT = "berth.placement.v3"
FAMILY = "berth.placement."
MAX_LINE_BYTES = 2**24

T = TypeVar("T")


class InvalidExport(Exception):
    """A file is not an export of a book, or its parts contradict each other."""


class BookExport(Struct, frozen=True):
    """The whole book: custom names, providers, consumers with their allocations, and members of server groups (None:
    unknown).
    """

    classes: frozenset[str]
    traits: frozenset[str]
    providers: dict[str, Provider]
    consumers: dict[str, ConsumerState]
    members: frozenset[GroupMember] | None = None


class _Head(Struct, frozen=True):
    format: str | None = None
    without_members: bool = False


class _Line(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    format: str | None = None
    # Set in the first line when the source knows no server groups. An import then leaves the server groups as they are.
    without_members: bool = False
    resource_class: str | None = None
    trait: str | None = None
    provider: Provider | None = None
    consumer: tuple[str, ConsumerState] | None = None
    member: GroupMember | None = None
    end: int | None = None  # in the last line: the number of lines before it, so that a truncated file is recognised


_head = msgspec.json.Decoder(_Head)
_line = msgspec.json.Decoder(_Line)


def checked(book: BookExport) -> BookExport:
    """Return the book with its capacities computed anew. Raises InvalidExport when the book is invalid."""
    flaws = (
        flaw_of_names((*book.classes, *book.traits)),
        *map(flaw_of_provider, book.providers.values()),
        *(flaw_of_consumer(uuid, consumer) for uuid, consumer in book.consumers.items()),
        *(flaw_of_member(member, book.consumers) for member in sorted(book.members or ())),
    )
    for flaw in filter(None, flaws):
        raise InvalidExport(flaw)
    _check_together(book)
    return replace(book, providers={uuid: _counted(provider) for uuid, provider in book.providers.items()})


def _counted(provider: Provider) -> Provider:
    inventories = {name: replace(one, capacity=_capacity(one)) for name, one in provider.inventories.items()}
    return provider if inventories == provider.inventories else replace(provider, inventories=inventories)


def _capacity(inventory: StoredInventory) -> int:
    return 0 if inventory.stranded else capacity(inventory.total, inventory.reserved, inventory.allocation_ratio)


def _check_together(book: BookExport) -> None:
    named: dict[str, str] = {}
    for provider in book.providers.values():
        if named.setdefault(provider.name, provider.uuid) != provider.uuid:
            raise InvalidExport(f"{provider.uuid} and {named[provider.name]} are both named {provider.name!r}")
        top = provider
        for _ in range(len(book.providers)):
            if top.parent is None:
                break
            if top.parent not in book.providers:
                raise InvalidExport(f"the parent of {provider.uuid} is missing")
            top = book.providers[top.parent]
        if provider.root != top.uuid:
            raise InvalidExport(f"{provider.uuid} is not under its root {provider.root}")
    for uuid, consumer in book.consumers.items():
        for name, resources in consumer.holding.items():
            if name not in book.providers or not book.providers[name].inventories.keys() >= resources.keys():
                raise InvalidExport(f"{uuid} holds what {name} does not have")


def lines(book: BookExport) -> Iterator[bytes]:
    """Return the book as lines, each of which ends in a newline."""
    rows = [_Line(format=FORMAT, without_members=book.members is None)]
    rows += [_Line(resource_class=name) for name in sorted(book.classes)]
    rows += [_Line(trait=name) for name in sorted(book.traits)]
    rows += [_Line(provider=book.providers[uuid]) for uuid in sorted(book.providers)]
    rows += [_Line(consumer=(uuid, book.consumers[uuid])) for uuid in sorted(book.consumers)]
    rows += [_Line(member=member) for member in sorted(book.members or ())]
    rows.append(_Line(end=len(rows)))
    return (msgspec.json.encode(row) + b"\n" for row in rows)


def parse(rows: Iterable[bytes]) -> BookExport:
    """Parse a book from its lines. Raises InvalidExport."""
    classes: set[str] = set()
    traits: set[str] = set()
    providers: dict[str, Provider] = {}
    consumers: dict[str, ConsumerState] = {}
    members: set[GroupMember] | None = None
    ended = False
    for number, row in enumerate(rows):
        if number == 0:
            members = None if _head_of(row).without_members else set()
        line = _decoded(_line, row, number)
        if ended or (line.member is not None and members is None):
            raise InvalidExport(f"line {number + 1} is not part of such a file")
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
                raise InvalidExport(f"{number} lines of {line.end}")
            ended = True
    if not ended:
        raise InvalidExport("the file ends too soon")
    known = None if members is None else frozenset(members)
    return BookExport(frozenset(classes), frozenset(traits), providers, consumers, known)


def _head_of(row: bytes) -> _Head:
    """Parse the first line. Raises InvalidExport unless the file has this format."""
    head = _decoded(_head, row, 0)
    if head.format == FORMAT:
        return head
    if (head.format or "").startswith(FAMILY):
        raise InvalidExport(
            f"a file of another version of berth: it is {(head.format or '')[:64]}, and this one reads {FORMAT}"
        )
    raise InvalidExport(f"line 1 does not begin a {FORMAT} file")


def _decoded(decoder: msgspec.json.Decoder[T], row: bytes, number: int) -> T:
    try:
        return decoder.decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidExport(f"line {number + 1}: {reason_of(error)}") from error
