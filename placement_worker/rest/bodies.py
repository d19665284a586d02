"""Decodes bodies into types. A JSON schema is only used to word the errors of an invalid body."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend
from msgspec import UNSET, Struct, UnsetType
from msgspec import Meta as Bound

from bus.contracts.base import MAX_AMOUNT
from bus.json_values import has_more_values, has_nul
from placement_worker.domain.claim_ledger import ANY, ConsumerWrite, Expected
from placement_worker.domain.values import StoredInventory, stored_inventory
from placement_worker.rest import schemas
from placement_worker.rest.candidates_query import canonical, is_canonical, is_uuid
from placement_worker.rest.faults import HttpFault
from placement_worker.rest.write_batcher import MAX_ENTRIES

T = TypeVar("T")

_CLASS = re.compile(schemas.NAME)

# More than the depth of any valid body, and far below the interpreter's own limit.
MAX_DEPTH = 20
# The values of a body that are built to examine it: json.loads is one call in C, during which no other thread runs. Of
# a megabyte of empty lists it takes 56 ms, of this many values of any kind less than 15. A valid body is not examined.
MAX_EXPLAINED = 65_536
MAX_ERRORS = 1_000  # the most relevant of these is reported
# The bound of an error's text in characters. python-jsonschema repeats the faulty part twice, however long it is.
MAX_WORDS = 8_192


def _whole(pattern: str) -> str:
    """Return a schema's pattern for Python, where `$` would also match before a line end."""
    return pattern.removesuffix("$") + r"\Z"


ClassKey = Annotated[str, Bound(pattern=_whole(schemas.NAME))]
UuidKey = Annotated[str, Bound(pattern=_whole(schemas.UUID_KEY))]
# The names are compared with their pattern afterwards (`_are_classes`): those of 1 MB take 20 ms, and during the
# decoder's one call no other thread can run.
ClassName = Annotated[str, Bound(extra_json_schema={"pattern": schemas.NAME})]
Owner = Annotated[str, Bound(min_length=1, max_length=255)]
Positive = Annotated[int, Bound(ge=1)]
Whole = Annotated[int, Bound(ge=0, le=MAX_AMOUNT)]
Counting = Annotated[int, Bound(ge=1, le=MAX_AMOUNT)]
# The schema takes other forms of a UUID, too.
CanonicalUuid = Annotated[
    str,
    Bound(
        pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z",
        extra_json_schema={"pattern": None, "format": "uuid"},
    ),
]
Different = Annotated[list[CanonicalUuid], Bound(extra_json_schema={"uniqueItems": True})]
OPEN = Bound(extra_json_schema={"additionalProperties": None})  # the schema takes other keys, too
ProviderName = Annotated[str, Bound(max_length=200)]
Resources = Annotated[dict[ClassName, Positive], Bound(min_length=1)]


class _Strict(Struct, frozen=True, forbid_unknown_fields=True):
    """The base of bodies, which refuses unknown fields."""


class PostProvider(_Strict, frozen=True):
    """POST /resource_providers below 1.14."""

    name: ProviderName
    uuid: CanonicalUuid | UnsetType = UNSET


class PostProvider14(PostProvider, frozen=True):
    """POST /resource_providers from 1.14."""

    parent_provider_uuid: CanonicalUuid | UnsetType | None = UNSET


class PutProvider(_Strict, frozen=True):
    """PUT /resource_providers/{uuid} below 1.14."""

    name: ProviderName


class PutProvider14(PutProvider, frozen=True):
    """PUT /resource_providers/{uuid} from 1.14."""

    parent_provider_uuid: CanonicalUuid | UnsetType | None = UNSET


class InventoryBody(_Strict, frozen=True, kw_only=True):
    """One inventory."""

    total: Counting
    reserved: Whole = 0
    min_unit: Counting = 1
    max_unit: Counting = MAX_AMOUNT
    step_size: Counting = 1
    allocation_ratio: Annotated[float, Bound(ge=-schemas.MAX_RATIO, le=schemas.MAX_RATIO)] = 1.0
    resource_provider_generation: int | UnsetType = UNSET

    @property
    def product(self) -> float:
        """The capacity before it is rounded and bounded."""
        return (self.total - self.reserved) * self.allocation_ratio

    def inventory(self) -> StoredInventory:
        """Return the inventory in the form of placement."""
        return stored_inventory(self)


class PutInventory(InventoryBody, frozen=True, kw_only=True):
    """PUT of one inventory."""

    resource_provider_generation: int


class PostInventory(InventoryBody, frozen=True, kw_only=True):
    """POST of one inventory."""

    resource_class: ClassKey


class PutInventories(_Strict, frozen=True):
    """PUT of all inventories."""

    resource_provider_generation: int
    inventories: Annotated[dict[ClassName, InventoryBody], OPEN]


class Aggregates(_Strict, frozen=True):
    """PUT of aggregates from 1.19."""

    aggregates: Different
    resource_provider_generation: int


class ProviderTraits(_Strict, frozen=True):
    """PUT of a provider's traits."""

    traits: list[Owner]
    resource_provider_generation: int


class ClassBody(_Strict, frozen=True):
    """POST and PUT (below 1.7) of a resource class."""

    name: Annotated[str, Bound(pattern=_whole(schemas.CUSTOM_NAME), max_length=255)]


class _ProviderRef(_Strict, frozen=True):
    uuid: CanonicalUuid


class _ListedAllocation(_Strict, frozen=True):
    resource_provider: _ProviderRef
    resources: Resources


class _OfProvider(_Strict, frozen=True, kw_only=True):
    generation: int = 0
    resources: Resources


class Allocations0(_Strict, frozen=True):
    """PUT /allocations/{consumer} below 1.8."""

    allocations: Annotated[list[_ListedAllocation], Bound(min_length=1)]


class Allocations8(_Strict, frozen=True):
    """From 1.8."""

    allocations: Annotated[list[_ListedAllocation], Bound(min_length=1)]
    project_id: Owner
    user_id: Owner


class Allocations12(_Strict, frozen=True):
    """PUT from 1.12."""

    allocations: Annotated[dict[UuidKey, _OfProvider], Bound(min_length=1)]
    project_id: Owner
    user_id: Owner


class Allocations13(_Strict, frozen=True):
    """POST from 1.13, where the allocations may be empty."""

    allocations: dict[UuidKey, _OfProvider]
    project_id: Owner
    user_id: Owner


class Allocations28(Allocations13, frozen=True):
    """From 1.28."""

    consumer_generation: int | None


_Suffix = Annotated[str, Bound(pattern="^[a-zA-Z0-9_-]{0,64}$", extra_json_schema={"pattern": schemas.WORD_SUFFIX})]
Mappings = Annotated[dict[_Suffix, Annotated[list[CanonicalUuid], Bound(min_length=1)]], Bound(min_length=1), OPEN]


class Allocations34(Allocations28, frozen=True):
    """From 1.34. mappings: accepted so that a client can send an allocation candidate back unchanged; they are not
    read.
    """

    mappings: Mappings | UnsetType = UNSET


class Allocations38(Allocations34, frozen=True, kw_only=True):
    """From 1.38."""

    consumer_type: Annotated[str, Bound(pattern=_whole(schemas.NAME), min_length=1, max_length=255)]


AllocationBody = Allocations0 | Allocations8 | Allocations12 | Allocations13


Allocations = TypeVar("Allocations", bound=Allocations28)


class ReshapeBody(_Strict, Generic[Allocations], frozen=True):
    """POST /reshaper, with the allocations of its version."""

    inventories: Annotated[dict[UuidKey, PutInventories], Bound(min_length=1)]
    allocations: dict[UuidKey, Allocations]


# --- decoding

_LENIENT = FormatChecker()
_LENIENT.checks("uuid")(lambda value: not isinstance(value, str) or is_uuid(value))


def _unique_items(_: object, unique: bool, listed: Any, __: object) -> Iterator[ValidationError]:
    """Check `uniqueItems` and word the error as python-jsonschema does, which would compare objects pair by pair: 20 s
    for 51 kB.
    """
    if unique and isinstance(listed, list) and len({json.dumps(one, sort_keys=True) for one in listed}) < len(listed):
        yield ValidationError(f"{listed!r} has non-unique elements")


_Validator = extend(Draft202012Validator, {"uniqueItems": _unique_items})


class Body(Generic[T]):
    """One kind of body: its type, and the schema of the type, which words its errors. holds: checks the rules that the
    schema can express and the type cannot. amounts: the body's mappings whose keys are names of classes. entries: the
    consumers, providers, classes, traits and aggregates of the body, at most MAX_ENTRIES.
    """

    def __init__(
        self,
        kind: Any,
        *,
        holds: Callable[[T], bool] = lambda _: True,
        amounts: Callable[[T], Iterable[Mapping[str, int]]] = lambda _: (),
        entries: Callable[[T], int] = lambda _: 1,
    ) -> None:
        self._kind = kind
        self._holds = holds
        self._amounts = amounts
        self._entries = entries
        self._decode = msgspec.json.Decoder(kind).decode
        self.schema = schemas.schema_of(kind)
        self._validator = _Validator(self.schema, format_checker=_LENIENT)

    def parse(self, body: bytes) -> T:
        """Decode a body, by `decode` or else by `explain`. Raises HttpFault 400 and 413."""
        parsed = self.decode(body)
        return self.explain(body) if parsed is None else parsed

    def decode(self, body: bytes) -> T | None:
        """Return the body as its type, in a few milliseconds for each megabyte; None when `explain` must examine the
        body. Raises HttpFault 400 for a NUL, which the database does not store, and 413.
        """
        if has_nul(body):
            raise HttpFault(400, "JSON does not validate: NUL characters are not allowed")
        try:
            parsed: T = self._decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        self._check_entries(parsed)
        return parsed if self._holds(parsed) and _are_classes(self._amounts(parsed)) else None

    def explain(self, body: bytes) -> T:
        """Return a body with values that only the fast parser rejects (1.0 for 1, a UUID without dashes), in 0.3 ms for
        each kilobyte. Raises HttpFault 400 with the text of python-jsonschema, or because there are too many values.
        """
        if has_more_values(body, MAX_EXPLAINED):
            raise HttpFault(400, f"JSON does not validate, and is not examined: more than {MAX_EXPLAINED} values")
        try:
            data = json.loads(body.decode(), parse_constant=_no_constant)  # given bytes, it would accept UTF-16, too
            _check_depth(data)
        except (ValueError, RecursionError) as error:
            raise HttpFault(400, f"Malformed JSON: {error}") from error
        wrong = best_match(islice(self._validator.iter_errors(data), MAX_ERRORS))
        if wrong is not None:
            raise HttpFault(400, f"JSON does not validate: {_words(wrong, body)}")
        try:
            msgspec.json.encode(data)  # no half of a surrogate pair
            parsed: T = msgspec.convert(_canonical(data), self._kind, strict=False)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise HttpFault(400, f"JSON does not validate: {error}") from error
        self._check_entries(parsed)
        if not _are_classes(self._amounts(parsed)):  # the schema's pattern accepts a line end after a name
            raise HttpFault(400, f"JSON does not validate: a resource class does not match {schemas.NAME!r}")
        return parsed

    def _check_entries(self, parsed: T) -> None:
        """Check the bound by which what is done with a body takes a few milliseconds of the event loop at a time."""
        if self._entries(parsed) > MAX_ENTRIES:
            raise HttpFault(
                413, f"At most {MAX_ENTRIES} consumers, providers, classes, traits and aggregates are taken."
            )


def _are_classes(amounts: Iterable[Mapping[str, int]]) -> bool:
    names: set[str] = set().union(*amounts)
    return all(_CLASS.fullmatch(name) for name in names)


def _amounts(body: AllocationBody) -> Iterable[Mapping[str, int]]:
    listed = body.allocations
    return (each.resources for each in (listed.values() if isinstance(listed, dict) else listed))


def _amounts_of_all(body: Mapping[str, AllocationBody]) -> Iterable[Mapping[str, int]]:
    return (resources for each in body.values() for resources in _amounts(each))


def _entries(body: AllocationBody) -> int:
    return 1 + sum(1 + len(resources) for resources in _amounts(body))


def _entries_of_all(body: Mapping[str, AllocationBody]) -> int:
    return sum(map(_entries, body.values()))


def _entries_of_reshape(body: ReshapeBody[Allocations28]) -> int:
    return _entries_of_all(body.allocations) + sum(1 + len(each.inventories) for each in body.inventories.values())


def _words(wrong: ValidationError, body: bytes) -> str:
    """Return the error's text as python-jsonschema words it. For a long body, the repeated parts are cut and the reason
    at the end is kept.
    """
    if len(body) <= MAX_WORDS:
        return str(wrong)
    words, half = wrong.message, MAX_WORDS // 4
    short = words if len(words) <= 2 * half else f"{words[:half]} ... {words[-half:]}"
    return f"{short}\n\nFailed validating {wrong.validator!r} at {wrong.json_path[:half]}"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_depth(data: object, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(data, dict | list):
        for value in data.values() if isinstance(data, dict) else data:
            _check_depth(value, depth + 1)


def _canonical(data: Any, key: str = "") -> Any:
    """Return UUIDs in the canonical form where the schema accepts other forms. Only identifiers that berth stores are
    changed.
    """
    if isinstance(data, dict):
        # Mappings have been checked and are not read, so they are left out.
        return {name: _canonical(value, name) for name, value in data.items() if name != "mappings"}
    if isinstance(data, list):
        return data if key == "traits" else [_canonical(value, "uuid") for value in data]
    is_uuid_field = key in {"uuid", "parent_provider_uuid"} and isinstance(data, str)
    return canonical(data) if is_uuid_field and is_uuid(data) else data


POST_PROVIDER: Body[PostProvider] = Body(PostProvider)
POST_PROVIDER_14: Body[PostProvider] = Body(PostProvider14)
PUT_PROVIDER: Body[PutProvider] = Body(PutProvider)
PUT_PROVIDER_14: Body[PutProvider] = Body(PutProvider14)
PUT_INVENTORY: Body[PutInventory] = Body(PutInventory)
POST_INVENTORY: Body[PostInventory] = Body(PostInventory)
PUT_INVENTORIES: Body[PutInventories] = Body(PutInventories, entries=lambda body: len(body.inventories))
AGGREGATES: Body[list[str]] = Body(Different, holds=lambda listed: len(set(listed)) == len(listed), entries=len)
AGGREGATES_19: Body[Aggregates] = Body(
    Aggregates,
    holds=lambda body: len(set(body.aggregates)) == len(body.aggregates),
    entries=lambda body: len(body.aggregates),
)
PROVIDER_TRAITS: Body[ProviderTraits] = Body(ProviderTraits, entries=lambda body: len(body.traits))
RESOURCE_CLASS: Body[ClassBody] = Body(ClassBody)


def _of_one(kind: Any) -> Body[Any]:
    return Body(kind, amounts=_amounts, entries=_entries)


def _of_many(kind: Any) -> Body[Any]:
    of_all: Any = Annotated[dict[UuidKey, kind], Bound(min_length=1)]
    return Body(of_all, amounts=_amounts_of_all, entries=_entries_of_all)


def _of_reshape(kind: Any) -> Body[Any]:
    return Body(ReshapeBody[kind], amounts=lambda body: _amounts_of_all(body.allocations), entries=_entries_of_reshape)


PUT_ALLOCATIONS: tuple[tuple[int, Body[AllocationBody]], ...] = (
    (38, _of_one(Allocations38)),
    (34, _of_one(Allocations34)),
    (28, _of_one(Allocations28)),
    (12, _of_one(Allocations12)),
    (8, _of_one(Allocations8)),
    (0, _of_one(Allocations0)),
)
POST_ALLOCATIONS: tuple[tuple[int, Body[Mapping[str, AllocationBody]]], ...] = (
    (38, _of_many(Allocations38)),
    (34, _of_many(Allocations34)),
    (28, _of_many(Allocations28)),
    (13, _of_many(Allocations13)),
)
RESHAPE: tuple[tuple[int, Body[ReshapeBody[Allocations28]]], ...] = (
    (38, _of_reshape(Allocations38)),
    (34, _of_reshape(Allocations34)),
    (30, _of_reshape(Allocations28)),
)


def consumer_write(consumer: str, body: AllocationBody, unowned: tuple[str, str]) -> ConsumerWrite:
    """Return the write that a body requests for one consumer. unowned: the (project, user) of a body that states
    neither.
    """
    if isinstance(body, Allocations0):
        project, user = unowned
    else:
        project, user = body.project_id, body.user_id
    if isinstance(body, Allocations0 | Allocations8):
        holding = {item.resource_provider.uuid: item.resources for item in body.allocations}
    else:
        holding = {provider: item.resources for provider, item in body.allocations.items()}
        for provider in holding:
            if not is_canonical(provider):
                raise HttpFault(400, f"Allocation for resource provider '{provider}' that does not exist.")
    expects: Expected = body.consumer_generation if isinstance(body, Allocations28) else ANY
    consumer_type = body.consumer_type if isinstance(body, Allocations38) else None
    return ConsumerWrite(consumer, holding, project, user, consumer_type, expects)
