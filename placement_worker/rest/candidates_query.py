"""Parses the query string of /allocation_candidates into a search request, by microversion."""

from __future__ import annotations

import re
import uuid

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import best_match
from msgspec import Struct

from placement_worker.domain.values import MAX_CAPACITY
from placement_worker.replica.request import UNNUMBERED, CandidatesRequest, Group
from placement_worker.rest import schemas
from placement_worker.rest.faults import BAD_VALUE, DUPLICATE_KEY, MISSING_VALUE, HttpFault, invalid_query
from placement_worker.rest.http import QueryString, at
from placement_worker.rest.schemas import Schema

_CANONICAL = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_STRICT = FormatChecker()

# The example in several of Placement's own error messages.
_ANY_FORM = "in:HW_CPU_X86_VMX,CUSTOM_MAGIC"

MAX_LIMIT_DIGITS = 18


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
        wrong = best_match(self._validator.iter_errors(dict(query.pairs)))
        if wrong is not None:
            raise invalid_query(str(wrong))


class Conditions(Struct, frozen=True):
    """The conditions on traits or aggregates. required: AND of any-of groups. forbidden: none of these."""

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
        requested[name] = min(number, 2 * MAX_CAPACITY)
    return requested


def traits_of(values: list[str], version: int) -> Conditions:
    """Parse all values of one `required` parameter. Below 1.39 only the last one counts."""
    required: dict[tuple[str, ...], None] = {}
    forbidden: dict[str, None] = {}
    for value in values if version >= 39 else values[-1:]:
        one = _one_required(value, allow_forbidden=version >= 22, allow_any=version >= 39)
        required.update(dict.fromkeys(one.required))
        forbidden.update(dict.fromkeys(one.forbidden))
    return Conditions(tuple(required), tuple(forbidden))


def _one_required(value: str, *, allow_forbidden: bool, allow_any: bool) -> Conditions:
    if value.startswith("in:"):
        if not allow_any:
            raise invalid_query(f"The format '{_ANY_FORM}' only supported since microversion 1.39. Got: {value}")
        names = [name.strip() for name in value[3:].split(",")]
        if not all(names):
            raise _no_traits(_ANY_FORM, f"an empty trait in: {value}")
        if any(name.startswith("!") for name in names):
            raise invalid_query(f"The format '{_ANY_FORM}' does not support forbidden traits. Got: {value}")
        return Conditions((tuple(sorted(set(names))),))
    names = [name.strip() for name in value.split(",")]
    required = [name for name in names if not name.startswith("!")]
    forbidden = [name.lstrip("!") for name in names if name.startswith("!")]
    form = "HW_CPU_X86_VMX,!CUSTOM_MAGIC" if allow_forbidden else "HW_CPU_X86_VMX,CUSTOM_MAGIC"
    if not all(required + forbidden):
        raise _no_traits(form, f"an empty trait in: {value}")
    if forbidden and not allow_forbidden:
        raise _no_traits(form, value, ":")
    return Conditions(tuple((name,) for name in dict.fromkeys(required)), tuple(dict.fromkeys(forbidden)))


def _no_traits(form: str, got: str, colon: str = "") -> HttpFault:
    return invalid_query(f"Expected 'required' parameter value of the form: {form}. Got{colon} {got}")


def members_of(values: list[str], version: int, suffix: str = "") -> Conditions:
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
    return Conditions(tuple(required), tuple(forbidden))


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
            raise invalid_query(f"Expected 'member_of' parameter to contain valid UUID(s). Got: {name}")
    return unwanted, tuple(dict.fromkeys(canonical(name) for name in names))


def in_tree_of(value: str) -> str:
    """Parse `in_tree`: the uuid of a provider of the requested tree."""
    text = value.strip()
    if not is_uuid(text):
        raise invalid_query(f"Expected 'in_tree' parameter to be a format of uuid. Got: {value}")
    return canonical(text)


SINCE_FORBIDDEN = 22
SINCE_NESTED = 29
SINCE_WORDS = 33
SINCE_SUBTREES = 36

# Far more groups than any flavor has. A query with more is refused.
MAX_GROUPS = 100

_LIMIT = re.compile(r"[1-9][0-9]*\n?")
_SCHEMAS = tuple((since, Checked(schema)) for since, schema in schemas.CANDIDATES)
_KEYS = tuple(
    (since, re.compile(rf"(resources|required|member_of|in_tree)({suffix})?"))
    for since, suffix in ((SINCE_WORDS, schemas.WORD_SUFFIX), (0, schemas.NUMBER_SUFFIX))
)


class ParsedQuery(Struct, frozen=True):
    """A parsed query. limit: the bound of candidates; None: no bound."""

    request: CandidatesRequest
    limit: int | None

    def classes(self) -> set[str]:
        """All resource classes that are named."""
        return {name for group in self.request.groups for name in group.resources}

    def traits(self) -> set[str]:
        """All traits that are named."""
        request = self.request
        named = {*(name for names in request.root_required for name in names), *request.root_forbidden}
        for group in request.groups:
            named.update(group.forbidden, *group.required)
        return named


def parse_candidates(query: QueryString, version: int) -> ParsedQuery:
    """Raises HttpFault 400."""
    at(_SCHEMAS, version).check(query)
    limit = _limit(query.all("limit"))
    policy = query.all("group_policy")
    required, forbidden = _root_required(query.all("root_required"))
    subtrees = _same_subtree(query.all("same_subtree"))
    groups = _groups(query, version)
    if version >= SINCE_SUBTREES:
        _check_subtrees(groups, subtrees)
    else:
        _check_orphans(groups)
    if version >= SINCE_FORBIDDEN:
        _check_conflicts(groups)
    if not policy and sum(group.suffix != UNNUMBERED for group in groups) > 1:
        raise HttpFault(
            400, 'The "group_policy" parameter is required when specifying more than one "resources{N}" parameter.'
        )
    request = CandidatesRequest(
        groups=tuple(groups),
        group_policy=None if not policy else "isolate" if policy[0] == "isolate" else "none",
        root_required=tuple((name,) for name in required),
        root_forbidden=forbidden,
        same_subtree=subtrees,
        one_per_tree=version < SINCE_NESTED,
    )
    return ParsedQuery(request, limit)


def _limit(values: list[str]) -> int | None:
    """Return the limit. The first value counts; the schema has checked the last one."""
    if not values:
        return None
    if _LIMIT.fullmatch(values[0]) is None:
        raise invalid_query(f"'{values[0]}' is no limit")
    # A larger number than any number of candidates means all of them.
    return int(values[0]) if len(values[0]) <= MAX_LIMIT_DIGITS else int(10**MAX_LIMIT_DIGITS)


def _groups(query: QueryString, version: int) -> list[Group]:
    """Return the request groups by suffix, in the order in which they appear."""
    pattern = at(_KEYS, version)
    keys = (pattern.fullmatch(key) for key, _ in query.pairs)
    found = dict.fromkeys(match[2] or UNNUMBERED for match in keys if match is not None)
    if len(found) > MAX_GROUPS:
        raise invalid_query(f"more than {MAX_GROUPS} request groups")
    return [_group(query, version, suffix) for suffix in found]


def _group(query: QueryString, version: int, suffix: str) -> Group:
    resources = {} if (text := query.get("resources" + suffix)) is None else resources_of(text)
    traits = traits_of(query.all("required" + suffix), version)
    members = members_of(query.all("member_of" + suffix), version, suffix)
    in_tree = None if (text := query.get("in_tree" + suffix)) is None else in_tree_of(text)
    return Group(
        suffix=suffix,
        resources=resources,
        required=traits.required,
        forbidden=traits.forbidden,
        member_of=members.required,
        forbidden_aggregates=members.forbidden,
        in_tree=in_tree,
    )


def _root_required(values: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not values:
        return (), ()
    if len(values) > 1:
        raise HttpFault(400, "Query parameter 'root_required' may be specified only once.", DUPLICATE_KEY)
    traits = traits_of(values, SINCE_SUBTREES)
    required = tuple(name for group in traits.required for name in group)
    both = [name for name in traits.forbidden if name in required]
    if both:
        words = f"Conflicting required and forbidden traits found in root_required: {', '.join(both)}"
        raise HttpFault(400, words, BAD_VALUE)
    return required, traits.forbidden


def _same_subtree(values: list[str]) -> tuple[tuple[str, ...], ...]:
    subtrees = []
    for value in values:
        suffixes = tuple(dict.fromkeys(suffix.strip() for suffix in value.split(",")))
        if UNNUMBERED in suffixes:
            words = "Empty string (unsuffixed group) can not be specified in `same_subtree` "
            raise HttpFault(400, words, BAD_VALUE)
        subtrees.append(suffixes)
    return tuple(subtrees)


def _check_subtrees(groups: list[Group], subtrees: tuple[tuple[str, ...], ...]) -> None:
    named = dict.fromkeys(suffix for subtree in subtrees for suffix in subtree)
    without = [group.suffix for group in groups if not group.resources]
    if len(without) == len(groups):
        raise HttpFault(400, "There must be at least one resources or resources[$S] parameter.", MISSING_VALUE)
    bad = [suffix for suffix in without if suffix not in named]
    if bad:
        words = (
            "Resourceless suffixed group request should be specified in `same_subtree` query param: "
            f"bad group(s) - {bad}."
        )
        raise HttpFault(400, words, BAD_VALUE)
    known = [group.suffix for group in groups]
    bad = [suffix for suffix in named if suffix not in known]
    if bad:
        words = f"Real suffixes should be specified in `same_subtree`: {bad} not found in {known}."
        raise HttpFault(400, words, BAD_VALUE)


def _check_orphans(groups: list[Group]) -> None:
    """Check that every group has resources, which is required below 1.36."""
    without = [group for group in groups if not group.resources]
    traits = [f"required{group.suffix}" for group in without if group.required]
    members = [f"member_of{group.suffix}" for group in without if group.member_of or group.forbidden_aggregates]
    for kind, gap, orphans in (("traits", "  ", traits), ("member_of", " ", members)):
        if orphans:
            words = f"All {kind} parameters must be associated with resources.{gap}"
            raise HttpFault(400, f"{words}Found the following orphaned {kind} keys: {', '.join(orphans)}")
    if without:
        raise HttpFault(400, "All request groups must specify resources.")
    if not groups:
        raise HttpFault(400, "At least one request group (`resources` or `resources{$S}`) is required.")


def _check_conflicts(groups: list[Group]) -> None:
    conflicts = [
        f"required{group.suffix}: ({', '.join(sorted(names))})"
        for group in groups
        for names in group.required
        if all(name in group.forbidden for name in names)
    ]
    if conflicts:
        raise HttpFault(
            400,
            "Conflicting required and forbidden traits found in the following traits keys: "
            f"{', '.join(sorted(conflicts))}",
        )
