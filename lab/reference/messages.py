"""docs/reference/messages.md, derived from the catalogue: `scripts/nightly docs` writes it, a test compares it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from berth.asyncapi import field_notes
from bus import codec
from bus.contracts import catalogue, queues
from bus.contracts.base import Message, Refusal, tag_of
from bus.contracts.catalogue import OPERATORS, queues_taking
from bus.contracts.queues import QUEUES, QueueRow, Where

CELL_WORKERS = ("cell_conductor", "compute_agent")

PLACES = {
    Where.API: "API bus",
    Where.CELL: "each cell's bus",
    Where.BOTH: "API bus and each cell's bus",
    Where.PROJECT: "each project's virtual host",
}


def content() -> dict[str, object]:
    """What the page shows: the catalogue, the bounds of the wire, and the functions below."""
    buses = [("On the API bus", _flows(Where.API)), ("On a cell's bus", _flows(Where.CELL))]
    functions = {"parts": _parts, "rights": _rights, "bound_to": _bound_to, "bounds": _bounds}
    return {
        **vars(codec),
        **vars(queues),
        **vars(catalogue),
        **{"tag_of": tag_of, "Refusal": Refusal, "PLACES": PLACES, "buses": buses},
        **functions,
    }


def _flows(where: Where) -> list[tuple[str, str, list[str]]]:
    """Who publishes what to whom on one kind of bus."""
    flows: dict[tuple[str, str], set[str]] = {}
    for queue in QUEUES:
        for row in queues_taking(queue.name):
            if {row.where, queue.where} <= {where, Where.BOTH}:
                for publisher in row.publishers:
                    # The messages that may go on both buses: a cell's workers are on its bus alone, all others use
                    # the API bus.
                    if row.where is Where.BOTH and (publisher in CELL_WORKERS) is (where is Where.API):
                        continue
                    flows.setdefault((publisher, queue.consumer), set()).add(row.tag.rpartition(".v")[0])
    return [(publisher, reader, sorted(tags)) for (publisher, reader), tags in sorted(flows.items())]


def _rights(message: type[Message]) -> str:
    """The fields that only an operator may use."""
    rights = OPERATORS.get(message, {}).items()
    return ", ".join(f"`{name}`" + (f" ({', '.join(sorted(only))})" if only else "") for name, only in rights)


def _parts(message: type[Message]) -> tuple[list[tuple[str, str, str, str]], list[tuple[str, str]]]:
    """(its fields with type, default and meaning, what these are made of)."""
    (schema,), components = msgspec.json.schema_components([message], ref_template="{name}")
    name = schema.get("$ref", message.__name__)
    body = components.get(name, schema)
    required = set(body.get("required", ()))
    notes = {field: text.replace("|", "\\|") for field, text in field_notes(message).items()}
    fields = [
        (field, _type(spec), "required" if field in required else _default(spec), notes.get(field, ""))
        for field, spec in body.get("properties", {}).items()
        if field != "type"
    ]
    others = []
    for other in _referenced(body, components):
        parts = [f"`{field}` {_type(part)}" for field, part in components[other].get("properties", {}).items()]
        others.append((other, ", ".join(parts) or "one of " + _type(components[other])))
    return fields, others


def _referenced(body: dict[str, Any], components: dict[str, Any]) -> list[str]:
    """Structs and enumerations that a message's fields are made of, in the order they are met."""
    found: list[str] = []
    waiting = [body]
    while waiting:
        for name in _references(waiting.pop(0)):
            if name in components and name not in found and components[name].keys() & {"properties", "enum"}:
                found.append(name)
                waiting.append(components[name])
    return found


def _references(spec: Any) -> Iterator[str]:
    if isinstance(spec, dict):
        if "$ref" in spec:
            yield spec["$ref"]
        for part in spec.values():
            yield from _references(part)
    elif isinstance(spec, list):
        for part in spec:
            yield from _references(part)


def _type(spec: dict[str, Any]) -> str:
    if "$ref" in spec:
        return f"`{spec['$ref']}`"
    if "anyOf" in spec:
        return " or ".join(_type(part) for part in spec["anyOf"])
    if "enum" in spec:
        return ", ".join(f"`{value}`" for value in spec["enum"])
    kind = str(spec.get("type", "any"))
    if kind == "array":
        items = spec.get("prefixItems")
        inner = ", ".join(_type(i) for i in items) if items else _type(spec.get("items") or {}) + ", ..."
        return f"[{inner}]{'' if items else _size(spec, 'Items')}"
    if kind == "object" and isinstance(spec.get("additionalProperties"), dict):
        return "{name: " + _type(spec["additionalProperties"]) + "}" + _size(spec, "Properties")
    bounds = [
        f"{word} {_number(spec[key])}"
        for key, word in (
            ("minimum", ">="),
            ("exclusiveMinimum", ">"),
            ("maximum", "<="),
            ("minLength", "length >="),
            ("maxLength", "length <="),
        )
        if key in spec
    ]
    if "pattern" in spec:
        pattern = spec["pattern"].removesuffix(r"(?!\n)")  # Python's `$` takes a line end; others need not know
        bounds.append(f"`{pattern}`".replace("|", "\\|"))
    return kind + (f" ({', '.join(bounds)})" if bounds else "")


def _number(bound: float) -> str:
    """0 for 0.0: types with equal bounds are one object to `typing`, with the bound of the module imported first."""
    return str(int(bound) if bound == int(bound) else bound)


def _size(spec: dict[str, Any], what: str) -> str:
    """How many a list or table holds, where that is bounded."""
    bounds = [
        f"{word} {spec[key]}" for key, word in ((f"min{what}", "at least"), (f"max{what}", "at most")) if key in spec
    ]
    return f" ({', '.join(bounds)})" if bounds else ""


def _default(spec: dict[str, Any]) -> str:
    return f"default `{spec['default']!r}`".replace("|", "\\|") if "default" in spec else ""


def _bound_to(row: QueueRow) -> str:
    return ", ".join(f"`{key}`" for _, key in row.bindings)


def _bounds(row: QueueRow) -> str:
    size = f", {row.max_bytes} bytes" if row.max_bytes else ""
    size += f", {row.max_values} values in one" if row.max_values else ""
    return f"{row.max_length} messages{size}" + (f", {row.ttl_s:g} s" if row.ttl_s else "")
