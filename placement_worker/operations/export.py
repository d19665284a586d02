"""Placement as a value that is stored as JSON lines, for backups and for moving a site's placement; or that is copied
from a running Placement service over its API.

A quick pass of a copy reads a provider's rows again only if its generation has changed, and a consumer only if its
generation or its allocations have changed. It misses changes without a new generation (aggregates below 1.19, a
consumer that was removed and created again), so only a whole pass, which reads everything, proves that it is equal.

`export_store` reads and writes the value. The workers do not use it, because they never need all of placement at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import httpx
import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from bus.clock import Clock, SystemClock
from bus.contracts.base import MAX_AMOUNT, Uuid, reason_of
from bus.faults import Transient
from bus.openstack.answers import request
from bus.openstack.keystone import KeystoneAuth, SignInRefused
from bus.retrying import Retrying, RetryPolicy
from bus.service.settings import hide_password
from placement_worker.domain.server_groups import GroupMember
from placement_worker.domain.values import MAX_NAME, ConsumerState, Provider, StoredInventory, capacity, is_custom
from placement_worker.rest.allocations import UNKNOWN
from placement_worker.rest.bodies import InventoryBody
from placement_worker.rest.http import NEWEST, SERVICE

MAX_NUMBER = 2**62  # the bound of generations and amounts, far below the largest number that the database can add to

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NAME = re.compile(r"[A-Z0-9_]+")


def problem_of_names(names: Iterable[str]) -> str | None:
    """Return why one of these cannot be a resource class or trait, or None."""
    return next((f"{name!r} is no class or trait" for name in names if not _is_name(name)), None)


def problem_of_provider(provider: Provider) -> str | None:
    """Return the error of a provider that can be found without the others, or None."""
    uuids = [provider.uuid, provider.root, *provider.aggregates]
    for uuid in [*uuids, provider.parent] if provider.parent is not None else uuids:
        if _UUID.fullmatch(uuid) is None:
            return f"{uuid!r} is no uuid"
    if not _is_text(provider.name):
        return f"{provider.uuid} has no name"
    if not 0 <= provider.generation <= MAX_NUMBER or not 0 <= provider.spec_generation <= MAX_NUMBER:
        return f"{provider.uuid} has a generation out of bounds"
    for name, inventory in provider.inventories.items():
        for what in _problems_of_inventory(inventory):
            return f"{name} of {provider.uuid}: {what}"
    return problem_of_names((*provider.inventories, *provider.traits, *provider.own_traits))


def problem_of_consumer(uuid: str, consumer: ConsumerState) -> str | None:
    """Return why this cannot be a consumer with allocations, or None."""
    if _UUID.fullmatch(uuid) is None:
        return f"{uuid!r} is no uuid"
    if not 0 <= consumer.generation <= MAX_NUMBER or not 0 <= consumer.attempt <= MAX_AMOUNT:
        return f"{uuid} has a generation or an attempt out of bounds"
    if not (_is_text(consumer.project_id) and _is_text(consumer.user_id)):
        return f"{uuid} has no project or no user"
    if consumer.consumer_type and not _is_name(consumer.consumer_type):
        return f"{uuid}: {consumer.consumer_type!r} is no type of consumers"
    amounts = [amount for resources in consumer.allocations.values() for amount in resources.values()]
    if not amounts or not all(1 <= amount <= MAX_NUMBER for amount in amounts):
        return f"{uuid} holds nothing, or amounts that no consumer can hold"
    return None


def problem_of_member(member: GroupMember, consumers: Container[str]) -> str | None:
    """Return why this cannot be a member of a server group, or None."""
    for uuid in (member.group, member.consumer):
        if _UUID.fullmatch(uuid) is None:
            return f"{uuid!r} is no uuid"
    if not _is_text(member.project):
        return f"the group {member.group} has no project"
    return None if member.consumer in consumers else f"{member.consumer} is in a group and holds nothing"


def _problems_of_inventory(inventory: StoredInventory) -> Iterator[str]:
    for name in ("total", "min_unit", "max_unit", "step_size"):
        if not 1 <= getattr(inventory, name) <= MAX_AMOUNT:
            yield f"{name} is out of bounds"
    if not 0 <= inventory.reserved <= MAX_AMOUNT:
        yield "reserved is out of bounds"
    if not -MAX_NUMBER <= inventory.capacity <= MAX_NUMBER:
        yield "capacity is out of bounds"


def _is_name(name: str) -> bool:
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


def _is_text(text: str) -> bool:
    return 1 <= len(text) <= MAX_NAME and "\x00" not in text


FORMAT = "berth.placement.v3"
FAMILY = "berth.placement."
MAX_LINE_BYTES = 2**24

T = TypeVar("T")


class InvalidExport(Exception):
    """A file is not an export of a exported, or its parts contradict each other."""


class PlacementExport(Struct, frozen=True):
    """Placement: custom names, providers, consumers with their allocations, and members of server groups (None:
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


def checked(exported: PlacementExport) -> PlacementExport:
    """Return placement with its capacities computed anew. Raises InvalidExport when placement is invalid."""
    problems = (
        problem_of_names((*exported.classes, *exported.traits)),
        *map(problem_of_provider, exported.providers.values()),
        *(problem_of_consumer(uuid, consumer) for uuid, consumer in exported.consumers.items()),
        *(problem_of_member(member, exported.consumers) for member in sorted(exported.members or ())),
    )
    for problem in filter(None, problems):
        raise InvalidExport(problem)
    _check_together(exported)
    return replace(exported, providers={uuid: _counted(provider) for uuid, provider in exported.providers.items()})


def _counted(provider: Provider) -> Provider:
    inventories = {
        name: replace(one, capacity=0 if one.orphaned else capacity(one.total, one.reserved, one.allocation_ratio))
        for name, one in provider.inventories.items()
    }
    return provider if inventories == provider.inventories else replace(provider, inventories=inventories)


def check_trees(providers: Mapping[str, Provider]) -> None:
    """Raises InvalidExport: two providers have one name, or one is not under its root."""
    named: dict[str, str] = {}
    for provider in providers.values():
        if named.setdefault(provider.name, provider.uuid) != provider.uuid:
            raise InvalidExport(f"{provider.uuid} and {named[provider.name]} are both named {provider.name!r}")
        top = provider
        for _ in range(len(providers)):
            if top.parent is None:
                break
            if top.parent not in providers:
                raise InvalidExport(f"the parent of {provider.uuid} is missing")
            top = providers[top.parent]
        if top.parent is not None or provider.root != top.uuid:
            raise InvalidExport(f"{provider.uuid} is not under its root {provider.root}")


def _check_together(exported: PlacementExport) -> None:
    check_trees(exported.providers)
    for uuid, consumer in exported.consumers.items():
        for name, resources in consumer.allocations.items():
            if name not in exported.providers or not exported.providers[name].inventories.keys() >= resources.keys():
                raise InvalidExport(f"{uuid} holds what {name} does not have")


def lines(exported: PlacementExport) -> Iterator[bytes]:
    """Return placement as lines, each of which ends in a newline."""
    rows = [_Line(format=FORMAT, without_members=exported.members is None)]
    rows += [_Line(resource_class=name) for name in sorted(exported.classes)]
    rows += [_Line(trait=name) for name in sorted(exported.traits)]
    rows += [_Line(provider=exported.providers[uuid]) for uuid in sorted(exported.providers)]
    rows += [_Line(consumer=(uuid, exported.consumers[uuid])) for uuid in sorted(exported.consumers)]
    rows += [_Line(member=member) for member in sorted(exported.members or ())]
    rows.append(_Line(end=len(rows)))
    return (msgspec.json.encode(row) + b"\n" for row in rows)


def parse(rows: Iterable[bytes]) -> PlacementExport:
    """Parse an export from its lines. Raises InvalidExport."""
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
    return PlacementExport(frozenset(classes), frozenset(traits), providers, consumers, known)


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


SINCE_CONSUMER_GENERATIONS = 28  # the oldest version that returns everything that a copy needs
AT_ONCE = 8
TIMEOUT_S = 60.0
ANSWER_S = 600.0  # for one answer, and its bytes: a list of half a million providers
MAX_BYTES = 2**28
ASK = RetryPolicy(first_s=0.4, longest_s=3.2, least=1.0, max_calls=5)  # for one page of the other service

Allocations = dict[str, dict[str, Any]]  # {provider: {class: amount}}


class ListedProvider(Struct, frozen=True):
    """A provider as the list of all has it."""

    uuid: Uuid
    name: str
    generation: int
    parent_provider_uuid: Uuid | None
    root_provider_uuid: Uuid

    def is_of(self, known: Provider) -> bool:
        """Whether this provider has not changed since it was read."""
        there = (known.name, known.parent, known.root, known.generation)
        return there == (self.name, self.parent_provider_uuid, self.root_provider_uuid, self.generation)


class HeldOfProvider(Struct, frozen=True):
    """What a consumer holds of one provider."""

    resources: dict[str, Annotated[int, Meta(ge=1, le=MAX_NUMBER)]]
    consumer_generation: int


class PlacementReader:
    """A running Placement service of a release that supports 1.28 (Rocky) or newer. Each read raises InvalidExport when
    the service cannot be read, or does not answer as Placement does.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        auth: httpx.Auth | None = None,
        verify: ssl.SSLContext | bool = True,
        clock: Clock | None = None,
        at_once: int = AT_ONCE,
        timeout_s: float = ANSWER_S,  # for one answer
    ) -> None:
        """Raises InvalidExport."""
        headers = {"accept": "application/json", **({"x-auth-token": token} if token else {})}
        try:
            self._client = httpx.AsyncClient(
                base_url=url.rstrip("/") + "/", headers=headers, auth=auth, verify=verify, timeout=TIMEOUT_S
            )
        except httpx.InvalidURL as error:
            raise InvalidExport(f"not a URL: {hide_password(url)!r}") from error
        self._auth = auth
        self._timeout_s = timeout_s
        self._clock = clock if clock is not None else SystemClock()
        self._free_slots = asyncio.Semaphore(at_once)
        self._version = 0

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
        if isinstance(self._auth, KeystoneAuth):
            await self._auth.aclose()

    async def names(self) -> tuple[list[str], list[str]]:
        """All resource classes, and all traits."""
        with _as_placement():
            traits = (await self._get("traits"))["traits"]
            return [row["name"] for row in (await self._get("resource_classes"))["resource_classes"]], traits

    async def rows(self) -> list[ListedProvider]:
        """All providers without their parts."""
        with _as_placement():
            listed = (await self._get("resource_providers"))["resource_providers"]
            return msgspec.convert(listed, list[ListedProvider])

    async def provider(self, row: ListedProvider) -> Provider | None:
        """A provider with its parts; None: it is gone."""
        path = f"resource_providers/{row.uuid}"
        with _as_placement():
            inventories = await self._get(f"{path}/inventories", may_be_absent=True)
            traits = await self._get(f"{path}/traits", may_be_absent=True)
            aggregates = await self._get(f"{path}/aggregates", may_be_absent=True)
            if inventories is None or traits is None or aggregates is None:
                return None
            listed = inventories["inventories"]
            found = {name: msgspec.convert(fields, InventoryBody).inventory() for name, fields in listed.items()}
            # If the parts were read at different generations, the oldest is recorded, so that the next pass reads them
            # again.
            parts = (inventories, traits, aggregates)
            generation = min(part.get("resource_provider_generation", row.generation) for part in parts)
            return Provider(
                row.uuid,
                row.name,
                row.parent_provider_uuid,
                row.root_provider_uuid,
                min(generation, row.generation),
                0,
                found,
                {},
                tuple(sorted(msgspec.convert(traits["traits"], list[str]))),
                tuple(sorted(msgspec.convert(aggregates["aggregates"], list[str]))),
            )

    async def allocations(self, provider: str) -> dict[str, HeldOfProvider]:
        """What each consumer holds of a provider."""
        with _as_placement():
            found = await self._get(f"resource_providers/{provider}/allocations", may_be_absent=True)
            return msgspec.convert(found["allocations"] if found else {}, dict[str, HeldOfProvider])

    async def consumer(self, uuid: str) -> ConsumerState | None:
        """A consumer; None: it holds nothing."""
        with _as_placement():
            found = await self._get(f"allocations/{uuid}")
            if not found["allocations"]:
                return None
            kind = found.get("consumer_type", UNKNOWN)  # answers before 1.38 have none
            holding = {provider: fields["resources"] for provider, fields in found["allocations"].items()}
            return ConsumerState(
                found["consumer_generation"],
                0,
                found["project_id"],
                found["user_id"],
                "" if kind == UNKNOWN else kind,
                holding,
            )

    async def _newest(self) -> int:
        """Return the newest version that both sides support."""
        home = await self._asked("", {}, may_be_absent=False)
        try:
            major, _, minor = home["versions"][0]["max_version"].partition(".")
            newest = int(minor) if major == "1" else 0
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise InvalidExport("that does not answer as Placement does") from error
        if newest < SINCE_CONSUMER_GENERATIONS:
            raise InvalidExport(f"it supports 1.{newest}; 1.{SINCE_CONSUMER_GENERATIONS} is needed")
        return min(newest, NEWEST)

    async def _get(self, path: str, *, may_be_absent: bool = False) -> Any:
        """Return the answer's data; with `may_be_absent`, None for rows that do not exist."""
        if not self._version:
            self._version = await self._newest()
        headers = {"openstack-api-version": f"{SERVICE} 1.{self._version}"}
        return await self._asked(path, headers, may_be_absent=may_be_absent)

    async def _asked(self, path: str, headers: Mapping[str, str], *, may_be_absent: bool) -> Any:
        url = f"{hide_password(str(self._client.base_url))}{path[:200]!r}"

        async def ask() -> Any:
            bounds: Any = {"timeout_s": self._timeout_s, "max_bytes": MAX_BYTES}
            try:
                async with self._free_slots:
                    answer = await request(self._client, "GET", path, headers=headers, **bounds)
            except (httpx.TransportError, TimeoutError) as error:
                raise Transient(f"{type(error).__name__} {error}") from error
            except (httpx.InvalidURL, httpx.HTTPError) as error:  # the answer's uuid, encoding or size is invalid
                raise InvalidExport(f"{url}: {type(error).__name__} {error}") from error
            except SignInRefused as error:
                raise InvalidExport(f"{url}: {error.code}: {error.reason}") from error
            if answer.status_code >= 500 or answer.status_code == 429:
                raise Transient(f"{answer.status_code} {answer.reason_phrase}")
            if may_be_absent and answer.status_code == 404:
                return None
            if answer.status_code != 200:
                raise InvalidExport(f"{url}: {answer.status_code} {answer.text[:200]}")
            try:
                return msgspec.json.decode(answer.content)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidExport(f"{url}: {reason_of(error)}") from error

        try:
            return await Retrying(ASK, self._clock).call(ask)
        except Transient as error:
            raise InvalidExport(f"{url}: {error.reason}") from error


@contextlib.contextmanager
def _as_placement() -> Iterator[None]:
    """Raises InvalidExport for what Placement does not answer."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise InvalidExport(
            f"that does not answer as Placement does: {type(error).__name__} {reason_of(error)}"
        ) from error


class CopyReader(PlacementReader):
    """Copies a running Placement, pass by pass."""

    def __init__(self, url: str, token: str, *, clock: Clock | None = None) -> None:
        super().__init__(url, token=token, clock=clock)
        self._providers: dict[str, Provider] = {}
        self._consumers: dict[str, ConsumerState] = {}

    async def read(self, *, whole: bool = True) -> PlacementExport:
        """Read one pass, quick or whole. Raises InvalidExport when the source cannot be read."""
        if whole:
            self._providers, self._consumers = {}, {}
        classes, traits = await self.names()
        found = await asyncio.gather(*(self._known_or_read(row) for row in await self.rows()))
        self._providers = {provider.uuid: provider for provider in found if provider is not None}
        held = await asyncio.gather(*(self.allocations(uuid) for uuid in self._providers))
        generations: dict[str, int] = {}
        holdings: dict[str, Allocations] = {}
        for provider, part in zip(self._providers, held, strict=True):
            for consumer, one in part.items():
                generations[consumer] = one.consumer_generation
                holdings.setdefault(consumer, {})[provider] = one.resources
        consumers = await asyncio.gather(*(self._consumer(c, generations[c], holdings[c]) for c in generations))
        self._consumers = dict(item for item in consumers if item is not None)
        return PlacementExport(_custom(classes), _custom(traits), self._providers, self._consumers)

    async def _known_or_read(self, row: ListedProvider) -> Provider | None:
        known = self._providers.get(row.uuid)
        return known if known is not None and row.is_of(known) else await self.provider(row)

    async def _consumer(self, uuid: str, generation: int, allocations: Allocations) -> tuple[str, ConsumerState] | None:
        known = self._consumers.get(uuid)
        if known is not None and (known.generation, known.allocations) == (generation, allocations):
            return uuid, known
        found = await self.consumer(uuid)
        return None if found is None else (uuid, found)


def _custom(names: Iterable[str]) -> frozenset[str]:
    return frozenset(filter(is_custom, names))
