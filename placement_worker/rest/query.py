"""Parses the parameters of query strings, by microversion. An invalid parameter is answered 400 with its reason."""

from __future__ import annotations

import re
import uuid

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import best_match
from msgspec import Struct

from placement_worker.rest.faults import HttpFault
from placement_worker.rest.http import QueryString
from placement_worker.rest.schemas import Schema

_CANONICAL = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_STRICT = FormatChecker()

# The example in several of Placement's own error messages.
_ANY_FORM = "in:HW_CPU_X86_VMX,CUSTOM_MAGIC"

MAX_AMOUNT_DIGITS = 18


def is_canonical(text: str) -> bool:
    """Whether this is a UUID in the canonical form: lower case, with dashes."""
    return _CANONICAL.fullmatch(text) is not None


def is_uuid(text: str) -> bool:
    """Whether Placement accepts this as a UUID: also in upper case, without dashes, in braces or as a URN."""
    plain = text.replace("urn:", "").replace("uuid:", "").strip("{}").replace("-", "").lower()
    try:
        return uuid.UUID(text).hex == plain
    except ValueError:
        return False


def canonical(text: str) -> str:
    """Return the canonical form of a UUID that `is_uuid` accepts."""
    return str(uuid.UUID(text))


class Checked:
    """The schema of a query string."""

    def __init__(self, schema: Schema) -> None:
        self._validator = Draft202012Validator(schema, format_checker=_STRICT)

    def check(self, query: QueryString) -> None:
        """Check a query string. Raises HttpFault 400 with the text of python-jsonschema."""
        wrong = best_match(self._validator.iter_errors(query.last()))
        if wrong is not None:
            raise HttpFault(400, f"Invalid query string parameters: {wrong}")


class Traits(Struct, frozen=True):
    """The conditions on traits. required: AND of any-of groups. forbidden: none of these traits."""

    required: tuple[tuple[str, ...], ...] = ()
    forbidden: tuple[str, ...] = ()


class Members(Struct, frozen=True):
    """The conditions on aggregates. required: AND of any-of groups. forbidden: none of these aggregates."""

    required: tuple[tuple[str, ...], ...] = ()
    forbidden: tuple[str, ...] = ()


def resources_of(text: str) -> dict[str, int]:
    """Parse `VCPU:2,MEMORY_MB:1024` into amounts by class."""
    form = (
        "Badly formed resources parameter. Expected resources query string parameter in form: "
        "?resources=VCPU:2,MEMORY_MB:1024. Got: "
    )
    if not text.strip():
        raise HttpFault(400, form + "empty string.")
    requested: dict[str, int] = {}
    for part in text.split(","):
        name, colon, amount = part.partition(":")
        if not colon or ":" in amount:
            raise HttpFault(400, f"{form}{part}.")
        try:
            number = int(amount)
        except ValueError:
            raise HttpFault(
                400, f"Requested resource {name} expected positive integer amount. Got: {amount}."
            ) from None
        if number < 1:
            raise HttpFault(400, f"Requested resource {name} requires amount >= 1. Got: {number}.")
        # An amount larger than any inventory does not fit, however large it is, so it is cut.
        requested[name] = min(number, 10**MAX_AMOUNT_DIGITS)
    return requested


def traits_of(values: list[str], version: int) -> Traits:
    """Parse all values of one `required` parameter. Below 1.39 only the last one counts."""
    required: dict[tuple[str, ...], None] = {}
    forbidden: dict[str, None] = {}
    for value in values if version >= 39 else values[-1:]:
        one = _one_required(value, allow_forbidden=version >= 22, allow_any=version >= 39)
        required.update(dict.fromkeys(one.required))
        forbidden.update(dict.fromkeys(one.forbidden))
    return Traits(tuple(required), tuple(forbidden))


def _one_required(value: str, *, allow_forbidden: bool, allow_any: bool) -> Traits:
    start = "Invalid query string parameters: "
    if value.startswith("in:"):
        if not allow_any:
            raise HttpFault(
                400, f"{start}The format '{_ANY_FORM}' only supported since microversion 1.39. Got: {value}"
            )
        names = [name.strip() for name in value[3:].split(",")]
        if not all(names):
            raise HttpFault(
                400,
                f"{start}Expected 'required' parameter value of the form: {_ANY_FORM}. Got an empty trait in: {value}",
            )
        if any(name.startswith("!") for name in names):
            raise HttpFault(400, f"{start}The format '{_ANY_FORM}' does not support forbidden traits. Got: {value}")
        return Traits((tuple(sorted(set(names))),))
    names = [name.strip() for name in value.split(",")]
    required = [name for name in names if not name.startswith("!")]
    forbidden = [name.lstrip("!") for name in names if name.startswith("!")]
    form = "HW_CPU_X86_VMX,!CUSTOM_MAGIC" if allow_forbidden else "HW_CPU_X86_VMX,CUSTOM_MAGIC"
    if not all(required + forbidden):
        raise HttpFault(
            400,
            f"{start}Expected 'required' parameter value of the form: {form}. Got an empty trait in: {value}",
        )
    if forbidden and not allow_forbidden:
        raise HttpFault(400, f"{start}Expected 'required' parameter value of the form: {form}. Got: {value}")
    return Traits(tuple((name,) for name in dict.fromkeys(required)), tuple(dict.fromkeys(forbidden)))


def members_of(values: list[str], version: int, suffix: str = "") -> Members:
    """Parse all values of one `member_of` parameter."""
    if version < 24 and len(values) > 1:
        raise HttpFault(400, f"Multiple member_of{suffix} parameters are not supported")
    required: list[tuple[str, ...]] = []
    forbidden: dict[str, None] = {}
    for value in values:
        unwanted, names = _one_member_of(value)
        if unwanted and version < 32:
            raise HttpFault(
                400, f"Forbidden member_of{suffix} parameters are not supported in the specified microversion"
            )
        if unwanted:
            forbidden.update(dict.fromkeys(names))
        else:
            required.append(names)
    return Members(tuple(required), tuple(forbidden))


def _one_member_of(value: str) -> tuple[bool, tuple[str, ...]]:
    """Parse one value into (whether the aggregates are forbidden, the aggregates)."""
    unwanted = value.startswith("!")
    listed = value.removeprefix("!")
    if "," in value and not listed.startswith("in:"):
        raise HttpFault(
            400,
            "Multiple values for 'member_of' must be prefixed with the 'in:' or '!in:' keyword using the valid "
            f"microversion. Got: {value}",
        )
    names = listed[3:].split(",") if listed.startswith("in:") else [listed]
    for name in names:
        if not is_uuid(name):
            raise HttpFault(
                400,
                "Invalid query string parameters: Expected 'member_of' parameter to contain valid UUID(s). "
                f"Got: {name}",
            )
    return unwanted, tuple(dict.fromkeys(canonical(name) for name in names))


def in_tree_of(value: str) -> str:
    """Parse `in_tree`: the uuid of a provider of the requested tree."""
    text = value.strip()
    if not is_uuid(text):
        raise HttpFault(
            400,
            f"Invalid query string parameters: Expected 'in_tree' parameter to be a format of uuid. Got: {value}",
        )
    return canonical(text)
