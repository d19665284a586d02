"""The extra-spec operators, as Nova has them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

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
    """Whether a host's value meets an extra spec. A host without the value fails.

    Without an operator the two must be the same text. `<in> x`: x is part of the value; `<all-in> x y`: all of
    them are; `<or> x <or> y`: the value is one of them. A number operator on something that is no number fails.
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
