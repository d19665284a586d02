"""Parses the query string of /allocation_candidates into a search request, by microversion."""

from __future__ import annotations

import re

from msgspec import Struct

from placement_worker.replica.request import UNNUMBERED, CandidatesRequest, Group
from placement_worker.rest import schemas
from placement_worker.rest.bodies import at
from placement_worker.rest.faults import BAD_VALUE, DUPLICATE_KEY, MISSING_VALUE, HttpFault
from placement_worker.rest.http import QueryString
from placement_worker.rest.query import (
    MAX_AMOUNT_DIGITS,
    Checked,
    Members,
    Traits,
    in_tree_of,
    members_of,
    resources_of,
    traits_of,
)

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
        raise HttpFault(400, f"Invalid query string parameters: '{values[0]}' is no limit")
    # A larger number than any number of candidates means all of them.
    return int(values[0]) if len(values[0]) <= MAX_AMOUNT_DIGITS else int(10**MAX_AMOUNT_DIGITS)


def _groups(query: QueryString, version: int) -> list[Group]:
    """Return the request groups by suffix, in the order in which they appear."""
    pattern = at(_KEYS, version)
    found: dict[str, set[str]] = {}
    for key, _ in query.pairs:
        match = pattern.fullmatch(key)
        if match is not None:
            found.setdefault(match[2] or UNNUMBERED, set()).add(match[1])
    if len(found) > MAX_GROUPS:
        raise HttpFault(400, f"Invalid query string parameters: more than {MAX_GROUPS} request groups")
    return [_group(query, version, suffix, kinds) for suffix, kinds in found.items()]


def _group(query: QueryString, version: int, suffix: str, kinds: set[str]) -> Group:
    resources = resources_of(query.get("resources" + suffix) or "") if "resources" in kinds else {}
    traits = traits_of(query.all("required" + suffix), version) if "required" in kinds else Traits()
    members = members_of(query.all("member_of" + suffix), version, suffix) if "member_of" in kinds else Members()
    in_tree = in_tree_of(query.get("in_tree" + suffix) or "") if "in_tree" in kinds else None
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
    orphans = [f"required{group.suffix}" for group in groups if group.required and not group.resources]
    if orphans:
        raise HttpFault(
            400,
            "All traits parameters must be associated with resources.  "
            f"Found the following orphaned traits keys: {', '.join(orphans)}",
        )
    orphans = [
        f"member_of{group.suffix}"
        for group in groups
        if (group.member_of or group.forbidden_aggregates) and not group.resources
    ]
    if orphans:
        raise HttpFault(
            400,
            "All member_of parameters must be associated with resources. "
            f"Found the following orphaned member_of keys: {', '.join(orphans)}",
        )
    if not all(group.resources for group in groups):
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
