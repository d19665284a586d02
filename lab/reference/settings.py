"""docs/reference/settings.md: every setting with its type, bounds, default and meaning, read from the structs."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from berth.config.settings import Settings
from bus.service.settings import describe_fields


def content() -> dict[str, object]:
    """What the page shows: each struct with its settings."""
    return {"sections": list(_sections("", Settings, seen=set()))}


def _sections(
    path: str, struct: type[Struct], seen: set[type]
) -> Iterator[tuple[str, type[Struct], list[tuple[str, ...]]]]:
    """(path, struct, its settings); a struct that appears twice is shown once."""
    seen.add(struct)
    hints = typing.get_type_hints(struct, include_extras=True)
    fields = msgspec.structs.fields(struct)
    plain = [f for f in fields if _struct(hints[f.name]) is None]
    texts = {name: text.replace("|", "\\|") for name, text in describe_fields(struct).items()} if plain else {}
    yield path, struct, [(f.encode_name, texts[f.name], _type(hints[f.name]), _default(f)) for f in plain]
    for f in fields:
        inner = _struct(hints[f.name])
        if inner is not None and inner not in seen:
            below = f"{path}.{f.encode_name}" if path else f.encode_name
            yield from _sections(below + _key(hints[f.name]), inner, seen)


def _struct(hint: Any) -> type[Struct] | None:
    """The struct that a setting is made of: itself, in a list, or by name."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint
    for part in typing.get_args(hint):
        found = _struct(part)
        if found is not None:
            return found
    return None


def _key(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return _key(typing.get_args(hint)[0])
    return ".NAME" if origin is dict else "[]" if origin in (tuple, list) else ""


def _type(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        bounds = ", ".join(part for meta in args[1:] if isinstance(meta, Meta) for part in _bounds(meta))
        return _type(args[0]) + (f" ({bounds})" if bounds else "")
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if part is type(None) else _type(part) for part in args)
    if origin in (tuple, list, frozenset):
        return f"list of {_type(args[0])}"
    if origin is dict:
        return f"table of {_type(args[1])} by {_type(args[0])}"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _bounds(meta: Meta) -> Iterator[str]:
    for word, value in ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt)):
        if value is not None:
            yield f"{word} {value:,}"
    if meta.min_length is not None:
        yield f"length >= {meta.min_length:,}"
    if meta.max_length is not None:
        yield f"length <= {meta.max_length:,}"
    if meta.pattern is not None:
        yield f"`{meta.pattern}`".replace("|", "\\|")


def _default(f: msgspec.structs.FieldInfo) -> str:
    if f.default is msgspec.NODEFAULT:
        if f.default_factory is msgspec.NODEFAULT:
            return "required"
        value = f.default_factory()
    else:
        value = f.default
    shown = msgspec.json.encode(msgspec.to_builtins(value)).decode()
    return f"`{shown}`".replace("|", "\\|")
