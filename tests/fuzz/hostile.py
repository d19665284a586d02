"""Values that a type allows, values that no type allows, and bytes that are broken on purpose."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import inspect

MAX_DEPTH = 6

UUIDS = tuple(f"{number:08x}-0000-4000-8000-00000000000{number}" for number in range(10))
TEXTS = (
    "",
    "p",
    "a",
    "VCPU",
    "MEMORY_MB",
    "CUSTOM_GOLD",
    "HW_CPU_X86_AVX2",
    "m1.small",
    "cell1",
    "\x00",
    "\n",
    "\ud800",
    "ü" * 255,
    "\U0001f600" * 70,
    "x" * 256,
    "x" * 70_000,
    "a.b.#.*",
    "{project_id}",
    "%s%n%00",
    "../../etc/passwd",
    "' OR 1=1 --",
    "\u202e\ufeff",
    *UUIDS,
    UUIDS[0].upper(),
    UUIDS[0] + "\n",
    "1",
    "0",
    "-1",
    "1e400",
    "9" * 5_000,
    "build.request.v1",
    "NaN",
    "client.reply.x",
    "berth.reply.x",
    "amq.gen-x",
)
NUMBERS = (
    0,
    1,
    -1,
    2,
    64,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    -(2**63) - 1,
    10**400,
)
FLOATS = (0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, 2.0**53, 1.0, 86_400.0)
# JSON that no encoder of Python writes.
RAW_JSON = (
    b"NaN",
    b"-Infinity",
    b"1e400",
    b"-0",
    b"1E+2",
    b'"\\ud800"',
    b'"\\u0000"',
    b'"\xff"',
    b"\xef\xbb\xbf{}",
    b"'a'",
    b"{,}",
    b"[1,]",
    b"01",
    b"9" * 5_000,
    b"0." + b"1" * 5_000,
    b"[" * 5_000,
    b'{"a":' * 5_000,
    b"[" * 400 + b"]" * 400,
    b'{"type":"build.request.v1","type":"build.delete.v1"}',
    b'"' + b"\\" * 3_001,
    b"\x00",
    b"null",
    b"true",
    b"",
    b" ",
)


def value_of(kind: inspect.Type, rng: random.Random, depth: int = 0) -> Any:
    """Plain data that this type most likely takes: it stays near the edges of what is allowed."""
    make = _MAKERS.get(type(kind))
    return make(kind, rng, depth) if make is not None else rng.choice(TEXTS[:8])


def _integer(kind: inspect.IntType, rng: random.Random, _depth: int) -> int:
    low = kind.ge if kind.ge is not None else (kind.gt + 1 if kind.gt is not None else -3)
    high = kind.le if kind.le is not None else (kind.lt - 1 if kind.lt is not None else low + 2**40)
    return int(rng.choice((low, high, min(low + 1, high), min(high, low + rng.randrange(100)))))


def _float(kind: inspect.FloatType, rng: random.Random, _depth: int) -> float:
    low = kind.ge if kind.ge is not None else (kind.gt if kind.gt is not None else -1.0)
    high = kind.le if kind.le is not None else (kind.lt if kind.lt is not None else low + 1e6)
    return float(rng.choice((low, high, low + (high - low) * rng.random())))


def _text(kind: inspect.StrType, rng: random.Random, _depth: int) -> str:
    least, most = kind.min_length or 0, kind.max_length or 10**9
    for _ in range(8):
        text = rng.choice(TEXTS)
        if least <= len(text) <= most and (kind.pattern is None or re.search(kind.pattern, text)):
            return text
    return rng.choice(UUIDS if kind.pattern and "0-9a-f" in kind.pattern else ("GOLD", "x"))


def _listed(kind: Any, rng: random.Random, depth: int) -> list[Any]:
    least = kind.min_length or 0
    count = least if depth > MAX_DEPTH else min(kind.max_length or 4, least + rng.choice((0, 1, 1, 2, 3)))
    return [value_of(kind.item_type, rng, depth + 1) for _ in range(count)]


def _mapping(kind: inspect.DictType, rng: random.Random, depth: int) -> dict[Any, Any]:
    count = max(kind.min_length or 0, 0 if depth > MAX_DEPTH else rng.choice((0, 1, 1, 2, 3)))
    return {value_of(kind.key_type, rng, depth + 1): value_of(kind.value_type, rng, depth + 1) for _ in range(count)}


def _struct(kind: inspect.StructType, rng: random.Random, depth: int) -> Any:
    fields: dict[str, Any] = {}
    for field in kind.fields:
        if field.required or kind.array_like or (depth <= MAX_DEPTH and rng.random() < 0.5):
            fields[field.encode_name] = value_of(field.type, rng, depth + 1)
    if kind.array_like:
        return [*([kind.tag] if kind.tag is not None else []), *fields.values()]
    return {**({kind.tag_field: kind.tag} if kind.tag_field is not None else {}), **fields}


_MAKERS: dict[type, Callable[[Any, random.Random, int], Any]] = {
    inspect.IntType: _integer,
    inspect.FloatType: _float,
    inspect.StrType: _text,
    inspect.BoolType: lambda _kind, rng, _depth: rng.random() < 0.5,
    inspect.NoneType: lambda _kind, _rng, _depth: None,
    inspect.EnumType: lambda kind, rng, _depth: rng.choice([one.value for one in kind.cls]),
    inspect.LiteralType: lambda kind, rng, _depth: rng.choice(kind.values),
    inspect.ListType: _listed,
    inspect.VarTupleType: _listed,
    inspect.SetType: _listed,
    inspect.FrozenSetType: _listed,
    inspect.TupleType: lambda kind, rng, depth: [value_of(one, rng, depth + 1) for one in kind.item_types],
    inspect.DictType: _mapping,
    inspect.UnionType: lambda kind, rng, depth: value_of(rng.choice(kind.types), rng, depth),
    inspect.Metadata: lambda kind, rng, depth: value_of(kind.type, rng, depth),
    inspect.StructType: _struct,
    inspect.AnyType: lambda _kind, rng, _depth: anything(rng),
}


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Plain data of no type at all."""
    pick = rng.randrange(8 if depth < 3 else 6)
    if pick < 2:
        return rng.choice(TEXTS)
    if pick < 4:
        return rng.choice(NUMBERS)
    if pick == 4:
        return rng.choice(FLOATS)
    if pick == 5:
        return rng.choice((None, True, False))
    if pick == 6:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS): anything(rng, depth + 1) for _ in range(rng.randrange(4))}


def spoiled(tree: Any, rng: random.Random) -> Any:
    """Plain data with one of its parts replaced, taken out, doubled or renamed."""
    if isinstance(tree, dict) and tree and rng.random() < 0.8:
        name = rng.choice(list(tree))
        way = rng.randrange(6)
        if way == 0:
            return {key: value for key, value in tree.items() if key != name}
        if way == 1:
            return {**tree, rng.choice((*TEXTS, name + "x")): tree[name]}
        return {**tree, name: spoiled(tree[name], rng)}
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        at = rng.randrange(len(tree))
        way = rng.randrange(6)
        if way == 0:
            return [*tree[:at], *tree[at + 1 :]]
        if way == 1:
            return [*tree, *tree[at : at + 1] * rng.choice((1, 3, 300))]
        return [*tree[:at], spoiled(tree[at], rng), *tree[at + 1 :]]
    return anything(rng)


def as_json(tree: Any) -> bytes:
    """Plain data as JSON, also with what is no JSON in the strict sense: lone surrogates, numbers of any size."""
    try:
        return json.dumps(tree, separators=(",", ":"), ensure_ascii=True).encode()
    except ValueError:  # a number of more digits than Python writes
        return b"1" + b"0" * 400


def bytes_of(kind: inspect.Type, rng: random.Random) -> bytes:
    """JSON for this type: sound, spoiled as data, or broken as bytes."""
    tree = value_of(kind, rng)
    way = rng.random()
    while way < 0.5 and rng.random() < 0.6:
        tree = spoiled(tree, rng)
    raw = as_json(tree)
    return broken(raw, rng) if way > 0.75 else raw


def broken(raw: bytes, rng: random.Random) -> bytes:
    """Bytes that were changed, cut, doubled, or replaced, here and there."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(raw) + 1)
        to = min(len(raw), at + rng.choice((1, 1, 4, 64)))
        way = rng.randrange(7)
        if way == 0:
            raw = raw[:at] + bytes((rng.randrange(256),)) + raw[at + 1 :]
        elif way == 1:
            raw = raw[:at]
        elif way == 2:
            raw = raw[:at] + raw[to:]
        elif way == 3:
            raw = raw[:to] + raw[at:]
        elif way == 4:
            raw = raw[:at] + rng.choice(RAW_JSON) + raw[at:]
        elif way == 5:
            raw = raw[:at] + rng.randbytes(rng.choice((1, 3, 8))) + raw[at:]
        else:
            raw = raw[:at] + bytes(to - at) + raw[to:]
    return raw


def kinds(types: Sequence[Any]) -> list[inspect.Type]:
    """msgspec's information about these types."""
    return list(inspect.multi_type_info(types))


def text(rng: random.Random) -> str:
    """One text, as it may stand in a property, a variable or a query."""
    return rng.choice(TEXTS)


def same(first: Any, second: Any) -> bool:
    """Whether two messages are equal."""
    return bool(msgspec.to_builtins(first) == msgspec.to_builtins(second))
