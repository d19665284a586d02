"""Settings as TOML, as they would stand in a settings file: `berth config` prints it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

import msgspec

COMMENT_WIDTH = 100

_BARE = re.compile(r"[A-Za-z0-9_-]+")

Path = tuple[str, ...]
NO_COMMENTS: Mapping[Path, str] = {}


def as_toml(tree: Mapping[str, object], comments: Mapping[Path, str] = NO_COMMENTS) -> str:
    """A tree of plain values as TOML. A value of None is left out: TOML has no notation for it.

    comments: {path of a value or a table: a line of text that is printed above it as a comment}.
    """
    return "\n".join(_table(tree, (), comments)).strip() + "\n"


def _table(tree: Mapping[str, object], path: Path, comments: Mapping[Path, str]) -> list[str]:
    lines = []
    for name, value in tree.items():
        if (*path, name) in comments and not isinstance(value, Mapping):
            lines += _comment(comments[(*path, name)])
            if value is None:
                lines.append(f"# {_key(name)} is not set")
        if _is_plain(value):
            lines.append(f"{_key(name)} = {_value(value)}")
    below = [(name, value) for name, value in tree.items() if isinstance(value, Mapping)]
    if path and (lines or not below):
        lines = ["", *_comment(comments.get(path, "")), f"[{'.'.join(map(_key, path))}]", *lines]
    for name, value in below:
        lines += _table(value, (*path, name), comments)
    return lines


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


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
    """JSON's quoting is TOML's basic string; control characters of a terminal, DEL as well, are escaped besides."""
    quoted = msgspec.json.encode(text).decode()
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
