"""Flavors: Nova's extra specs for resources and traits and berth's own beyond them, parsed; and the pre-filters that
shape the query of a request for one. A flavor that can never be requested is refused when the process starts.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Literal, cast

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.build import BuildRequest
from bus.contracts.objects import ZONE_KEY
from bus.contracts.operations import EvacuationPolicy
from placement_worker.replica.request import UNNUMBERED, Group, Query
from scheduler_worker.config import Aggregate, Flavor, SchedulerConfig
from scheduler_worker.domain.fences import SPEC as POLICY_SPEC
from scheduler_worker.domain.view import Membership, RequestSpec, Unsatisfiable
from scheduler_worker.filters.project import KEY as TENANT_KEY
from scheduler_worker.filters.project import tenants

__all__ = ["FlavorInvalid", "ParsedFlavor", "parse", "request_spec"]

TRAIT_KEY = "trait:"
IMAGE_TRAITS = "image.traits"
HOST_UNKNOWN = "host.unknown"
NOT_FORCED = "host.not_forced"


def request_spec(
    request: BuildRequest,
    requested: ParsedFlavor,
    hosts: tuple[str, ...] | None,
    membership: Membership,
    config: SchedulerConfig,
) -> RequestSpec | Unsatisfiable:
    """The request spec of one build request, pre-filters applied. `hosts`: uuids of the host that it names, if any."""
    query = requested.query
    if request.forced and (hosts is None or request.project_id not in config.force_host_projects):
        problem = "it names no host" if hosts is None else f"project {request.project_id} may not pass the filters by"
        return Unsatisfiable(NOT_FORCED, f"it cannot be forced: {problem}", "requested_host")
    if hosts is not None:
        if not hosts:
            return Unsatisfiable(HOST_UNKNOWN, f"there is no host {request.host}", "requested_host")
        query = replace(query, only_roots=hosts)
    for prefilter in (_image_traits, _tenant_aggregate, _availability_zone, _isolated_aggregates):
        shaped = prefilter(request, query, membership, config)
        if isinstance(shaped, Unsatisfiable):
            return shaped
        query = shaped
    return RequestSpec(
        query=query,
        flavor=request.flavor,
        project_id=request.project_id,
        extra_specs=requested.extra_specs,
        preferred_traits=requested.preferred_traits,
        preferred_classes=requested.preferred_classes,
        availability_zone=request.availability_zone,
        image_properties=request.image_properties,
        forced=request.forced,
        key=(
            request.flavor,
            request.project_id,
            request.availability_zone or "",
            request.host or "",
            "forced" if request.forced else "",
            *sorted(f"{trait} {word}" for trait, word in traits_of_image(request.image_properties).items()),
        ),
    )


def traits_of_image(properties: Mapping[str, str]) -> dict[str, str]:
    """{trait: `required` or `forbidden`} as the image's properties have it."""
    return {name.removeprefix(TRAIT_KEY): value for name, value in properties.items() if name.startswith(TRAIT_KEY)}


def _image_traits(
    request: BuildRequest, query: Query, _membership: Membership, _config: SchedulerConfig
) -> Query | Unsatisfiable:
    """The traits of the image, which count as the flavor's do; of the host where the flavor has only groups."""
    traits = traits_of_image(request.image_properties)
    if not traits:
        return query
    required, forbidden = (
        [trait for trait in sorted(traits) if traits[trait] == word] for word in ("required", "forbidden")
    )
    of_root = not query.resources
    known = (query.root_required, query.root_forbidden) if of_root else (query.required, query.forbidden)
    all_required = (*known[0], *((trait,) for trait in required if (trait,) not in known[0]))
    all_forbidden = (*known[1], *(trait for trait in forbidden if trait not in known[1]))
    both = [trait for trait in all_forbidden if (trait,) in all_required]
    if both or len(required) + len(forbidden) < len(traits):
        problem = f"{', '.join(both)} is required and forbidden" if both else "a trait is `required` or `forbidden`"
        return Unsatisfiable(IMAGE_TRAITS, f"the image's traits and the flavor's: {problem}", "image_traits")
    if of_root:
        return replace(query, root_required=all_required, root_forbidden=all_forbidden)
    return replace(query, required=all_required, forbidden=all_forbidden)


def _tenant_aggregate(
    request: BuildRequest, query: Query, membership: Membership, config: SchedulerConfig
) -> Query | Unsatisfiable:
    """The project's aggregates, if it has any; a setting decides whether a project without one gets no host."""
    if not config.limit_tenants_to_placement_aggregate:
        return query
    named = [a for a in membership.with_prefix(TENANT_KEY) if request.project_id in tenants(a.metadata)]
    if named:
        return _any_of(query, named)
    if config.placement_aggregate_required_for_tenants:
        return Unsatisfiable("tenant.no_aggregate", f"no aggregate belongs to project {request.project_id}", "tenant")
    return query


def _availability_zone(
    request: BuildRequest, query: Query, membership: Membership, config: SchedulerConfig
) -> Query | Unsatisfiable:
    """The aggregates of the zone; the default zone has every host that is in no aggregate of another zone."""
    zone = request.availability_zone
    if zone is None:
        return query
    zoned = membership.with_key(ZONE_KEY)
    mine = [aggregate for aggregate in zoned if aggregate.metadata[ZONE_KEY] == zone]
    if mine:
        return _any_of(query, mine)
    if zone == config.default_availability_zone:
        zones = tuple(aggregate.uuid for aggregate in zoned)
        return replace(query, root_forbidden_aggregates=query.root_forbidden_aggregates + zones)
    known = ", ".join(sorted({config.default_availability_zone, *(a.metadata[ZONE_KEY] for a in zoned)}))
    return Unsatisfiable(
        "zone.unknown", f"there is no availability zone {zone} (there are: {known})", "availability_zone"
    )


def _isolated_aggregates(request: BuildRequest, query: Query, membership: Membership, config: SchedulerConfig) -> Query:
    """A host in an aggregate with `trait:X` = required metadata takes only flavors that require each such X."""
    if not config.enable_isolated_aggregate_filtering:
        return query
    requested = (*query.required, *query.root_required, *(names for group in query.groups for names in group.required))
    required = {names[0] for names in requested if len(names) == 1}
    kept = tuple(
        aggregate.uuid
        for aggregate in membership.with_prefix(TRAIT_KEY)
        if any(
            key.startswith(TRAIT_KEY) and value == "required" and key.removeprefix(TRAIT_KEY) not in required
            for key, value in aggregate.metadata.items()
        )
    )
    return replace(query, root_forbidden_aggregates=query.root_forbidden_aggregates + kept)


def _any_of(query: Query, aggregates: list[Aggregate]) -> Query:
    """Of the host itself: a sharing provider that gives it disk need not be in the aggregate of zone or tenant."""
    uuids = tuple(aggregate.uuid for aggregate in aggregates)
    return replace(query, root_member_of=(*query.root_member_of, uuids))


DISABLED_TRAIT = "COMPUTE_STATUS_DISABLED"

MAX_GROUPS = 64
MAX_REQUIRED = 60  # traits of one group

_SUFFIX = r"(|[1-9][0-9]{0,3}|_[A-Za-z0-9_-]{1,63})"
_GROUPED = re.compile(rf"^(resources|trait){_SUFFIX}:(.*)$")
_IN_TREE = re.compile(rf"^in_tree{_SUFFIX}$")
_ALMOST_GROUPED = re.compile(r"^(resources|trait)[0-9_][^:]*:")
_NAME = re.compile(r"^[A-Z0-9_]{1,255}$")
_UUID = re.compile(r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
_ANY_OF = "in:"


class FlavorInvalid(ValueError):
    """A configured flavor that can never be requested; found at start."""

    code = "flavor.invalid"


class ParsedFlavor(Struct, frozen=True):
    """A flavor as a query, without what depends on the request."""

    query: Query
    extra_specs: Mapping[str, str]
    preferred_traits: tuple[str, ...] = ()
    preferred_classes: tuple[str, ...] = ()


class _GroupSpec(Struct):
    """One request group while it is parsed."""

    resources: dict[str, int] = {}
    required: list[tuple[str, ...]] = []
    forbidden: list[str] = []
    in_tree: str | None = None


class _FlavorSpec(Struct):
    """A flavor while it is parsed."""

    name: str
    groups: dict[str, _GroupSpec]
    preferred_traits: list[str] = []
    preferred_classes: list[str] = []
    others: dict[str, str] = {}

    def group(self, suffix: str) -> _GroupSpec:
        return self.groups.setdefault(suffix, _GroupSpec())

    def wrong(self, key: str, problem: str) -> FlavorInvalid:
        return FlavorInvalid(f"flavor {self.name}: {key}: {problem}")


def parse(name: str, flavor: Flavor) -> ParsedFlavor:
    """The query of a flavor. Amounts given as `resources:` win over the flavor's own sizes; 0 takes a class away."""
    sizes = {"VCPU": flavor.vcpus, "MEMORY_MB": flavor.memory_mb, "DISK_GB": flavor.disk_gb}
    reading = _FlavorSpec(name, {UNNUMBERED: _GroupSpec(resources=sizes)})
    for key, value in flavor.extra_specs.items():
        _read(reading, key, value)
    for words in reading.groups.values():
        words.resources = {resource_class: amount for resource_class, amount in words.resources.items() if amount}
    own = reading.groups.pop(UNNUMBERED)
    _check(reading, own, flavor.extra_specs)
    root_required, root_forbidden = _of_root(reading, flavor.extra_specs.get("root_required", ""))
    query = Query(
        resources=own.resources,
        required=tuple(own.required),
        forbidden=tuple(own.forbidden),
        in_tree=own.in_tree,
        root_required=root_required,
        root_forbidden=(DISABLED_TRAIT, *root_forbidden),  # Nova's compute_status_filter, always on
        groups=tuple(_group(suffix, words) for suffix, words in sorted(reading.groups.items())),
        group_policy=cast(Literal["none", "isolate"] | None, flavor.extra_specs.get("group_policy")),
        same_subtree=_subtrees(reading, flavor.extra_specs.get("same_subtree", "")),
    )
    return ParsedFlavor(query, reading.others, tuple(reading.preferred_traits), tuple(reading.preferred_classes))


def _group(suffix: str, words: _GroupSpec) -> Group:
    return Group(
        suffix=suffix,
        resources=words.resources,
        required=tuple(words.required),
        forbidden=tuple(words.forbidden),
        in_tree=words.in_tree,
    )


def _read(reading: _FlavorSpec, key: str, value: str) -> None:
    """One extra spec."""
    if key in {"group_policy", "root_required", "same_subtree"}:
        return  # they name groups, so they are parsed after all groups are known
    if found := _GROUPED.match(key):
        kind, suffix, word = found.groups()
        (_read_resource if kind == "resources" else _read_trait)(reading, key, suffix, word, value)
    elif found := _IN_TREE.match(key):
        if not _UUID.match(value):
            raise reading.wrong(key, f"{value!r} is no uuid")
        reading.group(found.group(1)).in_tree = value
    elif key == POLICY_SPEC and value not in set(EvacuationPolicy):
        raise reading.wrong(key, f"{value!r}; it is {', '.join(EvacuationPolicy)}")
    elif _ALMOST_GROUPED.match(key):
        raise reading.wrong(key, "a group is named by a number or by _ and letters, digits, _ and -")
    else:
        reading.others[key] = value


def _read_resource(reading: _FlavorSpec, key: str, suffix: str, word: str, value: str) -> None:
    resource_class = _known(reading, key, word)
    if value == "preferred" and not suffix:
        reading.preferred_classes.append(resource_class)
        return
    if not value.isdecimal() or int(value) >= 2**31:
        raise reading.wrong(key, f"{value!r} is no amount")
    reading.group(suffix).resources[resource_class] = int(value)


def _read_trait(reading: _FlavorSpec, key: str, suffix: str, word: str, value: str) -> None:
    words = reading.group(suffix)
    if word.startswith(_ANY_OF):
        if value != "required":
            raise reading.wrong(key, "any of several traits can only be `required`")
        words.required.append(tuple(_known(reading, key, name) for name in word.removeprefix(_ANY_OF).split(",")))
        return
    trait = _known(reading, key, word)
    if value == "required":
        words.required.append((trait,))
    elif value == "forbidden":
        words.forbidden.append(trait)
    elif value == "preferred" and not suffix:
        reading.preferred_traits.append(trait)
    else:
        raise reading.wrong(key, f"{value!r}; it is `required`, `forbidden` or, of the whole host, `preferred`")


def _known(reading: _FlavorSpec, key: str, word: str) -> str:
    if not _NAME.match(word):
        raise reading.wrong(key, f"{word!r} is no resource class or trait")
    return word


def _check(reading: _FlavorSpec, own: _GroupSpec, specs: Mapping[str, str]) -> None:
    """Placement's rules for the groups of a request."""
    groups = reading.groups
    if not own.resources and not any(words.resources for words in groups.values()):
        raise FlavorInvalid(f"flavor {reading.name} requests nothing")
    if not own.resources and (own.required or own.forbidden or own.in_tree):
        raise FlavorInvalid(f"flavor {reading.name}: traits or in_tree without resources; see root_required")
    if len(groups) > MAX_GROUPS:
        raise FlavorInvalid(f"flavor {reading.name}: more than {MAX_GROUPS} groups")
    policy = specs.get("group_policy")
    if policy not in {None, "none", "isolate"}:
        raise reading.wrong("group_policy", f"{policy!r}; it is `none` or `isolate`")
    if policy is None and len(groups) > 1:
        raise reading.wrong("group_policy", "is needed with more than one numbered group")
    for suffix, words in [(UNNUMBERED, own), *groups.items()]:
        if len(words.required) > MAX_REQUIRED:
            raise reading.wrong(f"trait{suffix}", f"more than {MAX_REQUIRED} are required")
        for names in words.required:
            if set(names) <= set(words.forbidden):
                raise reading.wrong(f"trait{suffix}", f"{', '.join(names)} is required and forbidden")


def _of_root(reading: _FlavorSpec, value: str) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Traits that the root must have, and traits that it must not have (microversion 1.35)."""
    words = [word.strip() for word in value.split(",") if word.strip()]
    names = {word: _known(reading, "root_required", word.removeprefix("!")) for word in words}
    return (
        tuple((name,) for word, name in names.items() if not word.startswith("!")),
        tuple(name for word, name in names.items() if word.startswith("!")),
    )


def _subtrees(reading: _FlavorSpec, value: str) -> tuple[tuple[str, ...], ...]:
    """Sets of groups (microversion 1.36); a group without resources must be in one of them."""
    subtrees = [tuple(suffix.strip() for suffix in words.split(",")) for words in value.split(";") if words.strip()]
    named = {suffix for suffixes in subtrees for suffix in suffixes}
    if unknown := sorted(named - reading.groups.keys()):
        raise reading.wrong("same_subtree", f"there is no group {', '.join(unknown)}")
    idle = sorted(suffix for suffix, words in reading.groups.items() if not words.resources and suffix not in named)
    if idle:
        raise reading.wrong("same_subtree", f"must name the groups without resources: {', '.join(idle)}")
    return tuple(subtrees)


# As in Nova, `=` means "at least" for numbers, although it looks like equality; `s==` is equality of strings.
_NUMBERS: dict[str, Callable[[float, float], bool]] = {
    "=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
}
_STRINGS: dict[str, Callable[[str, str], bool]] = {
    "s==": operator.eq,
    "s!=": operator.ne,
    "s<": operator.lt,
    "s<=": operator.le,
    "s>": operator.gt,
    "s>=": operator.ge,
}


def matches(value: str | None, wanted: str) -> bool:
    """Whether a host's value meets an extra spec; a missing value fails. Without an operator the texts must be equal.
    `<in> x`: x is part of the value; `<all-in> x y`: all are; `<or> x <or> y`: it is one of them. A number operator on
    no number fails.
    """
    if value is None:
        return False
    words = wanted.split()
    if not words:
        return value == wanted
    first, rest = words[0], words[1:]
    if first in _NUMBERS:
        return bool(rest) and _compare_numbers(_NUMBERS[first], value, rest[0])
    if first in _STRINGS:
        return bool(rest) and _STRINGS[first](value, rest[0])
    if first == "<in>":
        return bool(rest) and rest[0] in value
    if first == "<all-in>":
        return bool(rest) and all(word in value for word in rest)
    if first == "<or>":
        return value in rest[0::2]
    return value == wanted


def _compare_numbers(compare: Callable[[float, float], bool], value: str, wanted: str) -> bool:
    try:
        return compare(float(value), float(wanted))
    except ValueError:
        return False


def scoped_specs(extra_specs: Mapping[str, str], scope: str) -> dict[str, str]:
    """The extra specs of a filter's scope (`scope:name`), by name."""
    found = (key.partition(":") for key in extra_specs)
    return {name: extra_specs[f"{scope}:{name}"] for prefix, colon, name in found if colon and prefix == scope}


def unscoped_specs(extra_specs: Mapping[str, str]) -> dict[str, str]:
    """The extra specs without a scope."""
    return {key: value for key, value in extra_specs.items() if ":" not in key}
