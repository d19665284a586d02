"""Flavors: Nova's extra specs for resources and traits and berth's own beyond them, parsed. A flavor that can never be
requested is refused when the process starts.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Literal, cast

from msgspec import Struct

from bus.contracts.operations import EvacuationPolicy
from placement_worker.replica.request import UNNUMBERED, Group, Query
from scheduler_worker.config import Flavor

POLICY_SPEC = "berth:on_host_failure"  # the extra spec of a flavor

__all__ = ["FlavorInvalid", "ParsedFlavor", "parse"]

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
