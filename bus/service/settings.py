"""Settings of any shape: a frozen msgspec struct from a TOML file and `BERTH_...` variables.

`BERTH_BUS__URL=...` sets `bus.url`: the prefix is removed, a double underscore goes one level down, case does not
matter. An unknown name is an error that offers the nearest known one; so is a value of the wrong type.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
import tomllib
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from bus.contracts.base import reason_of

T = TypeVar("T", bound=Struct)

PREFIX = "BERTH_"
CONFIG_VARIABLE = "CONFIG"  # BERTH_CONFIG names the file; it is no setting itself
MAX_FILE_BYTES = 2**20
HIDDEN = "***"

# Given as a parameter, as libpq takes it.
_PASSWORD = re.compile(r"(?<=[?&]password=)[^&]+")

_SECRET = "secret"
Secret = Annotated[str, msgspec.Meta(extra={_SECRET: True})]
"""A text that is never shown: `redact` hides it."""
Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class SettingsError(Exception):
    """The settings cannot be used. `code` is stable; `reason` names the setting and is fit for a user."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def load(kind: type[T], *, toml: Path | None, env: Mapping[str, str]) -> T:
    """The settings of a file, overridden by variables. Raises SettingsError."""
    tree = read_toml(toml) if toml is not None else {}
    for part, value, path in _parts(kind, tree):
        fields = _fields(part)
        if fields is not None and isinstance(value, dict):
            for name in [name for name in value if name not in fields]:
                raise _unknown(".".join((*path, name)), name, fields, str(toml))
    for name in sorted(env):
        if name.startswith(PREFIX) and name != PREFIX + CONFIG_VARIABLE:
            _override(kind, tree, name, env[name])
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise SettingsError("settings.invalid", reason_of(error)) from error


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a tree. Raises SettingsError."""
    try:
        with path.open("rb") as file:
            body = file.read(MAX_FILE_BYTES + 1)
        if len(body) > MAX_FILE_BYTES:
            raise SettingsError("settings.file", f"{path} is larger than {MAX_FILE_BYTES} bytes")
        return tomllib.loads(body.decode())
    except OSError as error:
        raise SettingsError("settings.file", f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # besides what tomllib raises: a number of thousands of digits
        raise SettingsError("settings.file", f"{path} is not TOML: {error}") from error


def redact(settings: Struct) -> dict[str, Any]:
    """The settings as plain data, with secrets and the passwords inside URLs hidden."""
    shown = _redacted(msgspec.to_builtins(settings), type(settings))
    assert isinstance(shown, dict)
    return shown


@cache
def describe_fields(kind: type[Struct]) -> Mapping[str, str]:
    """{field: description} of a settings struct: the string below each field, as one paragraph.

    A field without one is not in it. Read from the source, because Python keeps no docstring of an attribute.
    """
    (struct,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(struct, ast.ClassDef)
    above = kind.__mro__[1]
    found = {} if above is Struct else dict(describe_fields(above))
    for field, below in zip(struct.body, struct.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def describe(kind: type[Struct], tree: Mapping[str, Any]) -> dict[tuple[str, ...], str]:
    """{path of a setting: description} for every setting of a tree of plain values."""
    return {
        (*path, name): describe_fields(_plain(part))[name]
        for part, value, path in _parts(kind, tree)
        if _fields(part) is not None and isinstance(value, Mapping)
        for name in value
        if name in describe_fields(_plain(part))
    }


def hide_password(text: str) -> str:
    """A URL without its password; any other text as it is."""
    scheme, found, rest = text.partition("://")
    if not found:
        return text
    # A server's password may hold a / or ? that is not encoded; an @ in an HTTP path belongs to none.
    head, slash, path = rest.partition("/") if scheme in {"http", "https"} else (rest, "", "")
    login, at, place = head.rpartition("@")
    user, colon, _ = login.partition(":")
    shown = f"{user}:{HIDDEN}@{place}" if at and colon else head
    return f"{scheme}://{_PASSWORD.sub(HIDDEN, shown + slash + path)}"


def _parts(kind: Any, tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any, tuple[str, ...]]]:
    """(type, value, path) of a value and of all values in it, from the outside in; Any: the type of an unknown name."""
    yield kind, tree, path
    fields, inner = _fields(kind), _inner(kind)
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _parts(inner if fields is None else fields.get(name, Any), value, (*path, name))
    elif isinstance(tree, list):
        for position, value in enumerate(tree):
            yield from _parts(inner, value, (*path, str(position)))


def _override(kind: Any, tree: dict[str, Any], variable: str, text: str) -> None:
    words = variable[len(PREFIX) :].split("__")
    for position, word in enumerate(words):
        fields, inner = _fields(kind), _inner(kind)
        if fields is not None:
            name = word.lower()
            if name not in fields:
                raise _unknown(variable, name, fields, "the environment")
            kind = fields[name]
        elif inner is not None and _is_mapping(kind):
            name = next((key for key in tree if key.lower() == word.lower()), word.lower())
            kind = inner
        else:
            raise SettingsError("settings.unknown", f"{variable}: {'.'.join(words[:position]).lower()} has no parts")
        if position == len(words) - 1:
            tree[name] = _parse(kind, text, variable)
            return
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            raise SettingsError("settings.invalid", f"{variable}: {name} is not a table")
        tree = below


def _parse(kind: Any, text: str, variable: str) -> Any:
    value: Any = text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SettingsError("settings.invalid", f"{variable}: it is not UTF-8") from error
    if (_fields(kind) is not None or _inner(kind) is not None) and text[:1] in "[{":
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise SettingsError("settings.invalid", f"{variable}: not JSON: {reason_of(error)}") from error
    try:
        return msgspec.to_builtins(msgspec.convert(value, kind, strict=False))
    except msgspec.ValidationError as error:
        raise SettingsError("settings.invalid", f"{variable}: {reason_of(error)}") from error


def _unknown(shown: str, name: str, fields: Mapping[str, Any], where: str) -> SettingsError:
    near = difflib.get_close_matches(name, fields, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(fields))}"
    return SettingsError("settings.unknown", f"unknown setting {shown} in {where}{hint}")


def _redacted(value: Any, kind: Any) -> Any:
    if value is None:
        return None
    if _is_secret(kind):
        return HIDDEN if value else value
    fields, inner = _fields(kind), _inner(kind)
    if isinstance(value, dict):
        return {name: _redacted(below, fields.get(name, Any) if fields else inner) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(below, inner) for below in value]
    return hide_password(value) if isinstance(value, str) else value


def _is_secret(kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        metas = kind.__metadata__
        if any(isinstance(meta, msgspec.Meta) and (meta.extra or {}).get(_SECRET) for meta in metas):
            return True
        return _is_secret(kind.__origin__)
    if get_origin(kind) in (Union, types.UnionType):
        return any(_is_secret(part) for part in get_args(kind))
    return False


def _plain(kind: Any) -> Any:
    """A type without Annotated and without `| None`."""
    while True:
        if get_origin(kind) is Annotated:
            kind = kind.__origin__
            continue
        if get_origin(kind) in (Union, types.UnionType):
            parts = [part for part in get_args(kind) if part is not type(None)]
            if len(parts) == 1:
                kind = parts[0]
                continue
        return kind


def _fields(kind: Any) -> dict[str, Any] | None:
    """{name: type} of a struct, by the names that a file uses; None for anything else."""
    kind = _plain(kind)
    if not (isinstance(kind, type) and issubclass(kind, Struct)):
        return None
    return _fields_of_struct(kind)


@cache
def _fields_of_struct(kind: type[Struct]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(kind)}


def _inner(kind: Any) -> Any | None:
    """The type of the values of a dict, or of the items of a list or tuple."""
    kind = _plain(kind)
    arguments = get_args(kind)
    origin = get_origin(kind)
    if origin is None or not arguments:
        return None
    if _is_mapping(kind):
        return arguments[1]
    return arguments[0] if origin in (list, tuple, set, frozenset) else None


def _is_mapping(kind: Any) -> bool:
    origin = get_origin(_plain(kind))
    return isinstance(origin, type) and issubclass(origin, Mapping)
