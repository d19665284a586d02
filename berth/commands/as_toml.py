"""Settings as TOML, as they would stand in a settings file: `berth config` prints it."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def as_toml(tree: Mapping[str, object]) -> str:
    """A tree of plain values as TOML. What is None is left out: TOML has no word for it."""
    return "\n".join(_table(tree, ())).strip() + "\n"


def _table(tree: Mapping[str, object], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_key(name)} = {_value(value)}" for name, value in tree.items() if _is_plain(value)]
    below = [(name, value) for name, value in tree.items() if isinstance(value, Mapping)]
    if path and (lines or not below):
        lines = ["", f"[{'.'.join(map(_key, path))}]", *lines]
    for name, value in below:
        lines += _table(value, (*path, name))
    return lines


def _is_plain(value: object) -> bool:
    return value is not None and not isinstance(value, Mapping)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(name)} = {_value(below)}" for name, below in value.items() if below is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value if item is not None)}]"
    return _text(str(value))


def _text(text: str) -> str:
    """JSON's quoting is TOML's basic string; what speaks to a terminal, DEL as well, is escaped beside."""
    quoted = msgspec.json.encode(text).decode()
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
