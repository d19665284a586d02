"""The AsyncAPI document, derived from the catalogue of messages."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec import Struct

from bus.codec import CAUSE, TRACEPARENT
from bus.contracts.base import Message, Refusal, tag_of
from bus.contracts.catalogue import MESSAGES, REPLIES, MessageRow
from bus.contracts.queues import COMMANDS, EVENTS, Where
from bus.distribution import version

_SCHEMA = "#/components/schemas/{name}"
REPLY_CHANNEL = "replies"
_BUSES = {
    Where.API: "API bus",
    Where.CELL: "each cell's bus",
    Where.BOTH: "API bus and each cell's bus",
    Where.PROJECT: "each project's virtual host",
}
_BINDING = "0.3.0"

_DESCRIPTION = """\
Every bus (the API bus, and one bus a cell: a virtual host or broker of its own) has the topic exchanges `berth` for
commands and `berth.events` for events. An operation `receive` is a command that berth takes; `send` is an event that
berth publishes. Extensions: x-bus, where the message lives; x-owner, the worker that decides about it;
x-publishers, who may publish it; x-idempotency, what makes it safe to repeat."""


def document(*, public: bool = False) -> dict[str, Any]:
    """The document: all messages, or only those for programs that are not berth's."""
    rows = [row for row in MESSAGES if row.public or not public]
    replies = _replies(rows) if public else list(REPLIES)
    kinds = list(dict.fromkeys([*(row.message for row in rows), *replies]))
    schemas = _schemas(kinds)
    channels = {_name(row.message): _channel(row) for row in rows}
    channels[REPLY_CHANNEL] = {
        "address": None,
        "title": "Replies",
        "description": "The queue that a request names in `reply-to`. The exchange `berth.replies` routes by its name.",
        "messages": {_name(kind): _message_ref(kind) for kind in replies},
        "bindings": {"amqp": {"is": "queue", "queue": {"exclusive": True}, "bindingVersion": _BINDING}},
    }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "berth's bus",
            "version": version(),
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": {_name(row.message): _operation(row) for row in rows},
        "components": {"schemas": schemas, "messages": {_name(kind): _message(kind) for kind in kinds}},
    }


def _replies(rows: Iterable[MessageRow]) -> list[type[Message]]:
    return list(dict.fromkeys([Refusal, *(row.reply for row in rows if row.reply is not None)]))


def _name(kind: type[Message]) -> str:
    """The tag as a key of the document: `build.request.v1` is `build.request.v1` there, too."""
    return tag_of(kind)


def _message_ref(kind: type[Message]) -> dict[str, str]:
    return {"$ref": f"#/components/messages/{_name(kind)}"}


def _channel(row: MessageRow) -> dict[str, Any]:
    parameters = [part[1:-1] for part in row.key.split(".") if part.startswith("{")]
    channel: dict[str, Any] = {
        "address": row.key,
        "title": row.tag,
        "description": f"{_BUSES[row.where]}, exchange `{row.exchange}`, routing key `{row.key}`.",
        "messages": {_name(row.message): _message_ref(row.message)},
        "bindings": {
            "amqp": {
                "is": "routingKey",
                "exchange": {"name": row.exchange, "type": "topic", "durable": True, "autoDelete": False},
                "bindingVersion": _BINDING,
            }
        },
        "x-bus": row.where.value,
    }
    if parameters:
        channel["parameters"] = {name: _parameter(name) for name in parameters}
    return channel


def _parameter(name: str) -> dict[str, str]:
    return {"description": f"The message's own field `{name}`.", "location": f"$message.payload#/{name}"}


def _operation(row: MessageRow) -> dict[str, Any]:
    channel = {"$ref": f"#/channels/{_name(row.message)}"}
    operation: dict[str, Any] = {
        "action": "receive" if row.exchange == COMMANDS else "send",
        "channel": channel,
        "messages": [{"$ref": f"#/channels/{_name(row.message)}/messages/{_name(row.message)}"}],
        "summary": _doc(row.message).partition("\n")[0],
        "tags": [{"name": "for clients" if row.public else "between berth's own parts"}],
        "bindings": {
            "amqp": {
                "deliveryMode": 2 if row.persistent else 1,
                "mandatory": row.mandatory,
                "bindingVersion": _BINDING,
            }
        },
        "x-owner": row.owner,
        "x-publishers": list(row.publishers),
        "x-idempotency": row.idempotency,
    }
    if row.reply is not None:
        operation["reply"] = {
            "address": {
                "location": "$message.header#/reply-to",
                "description": "A queue bound to `berth.replies` by its own name. Leave it out to get no answer.",
            },
            "channel": {"$ref": f"#/channels/{REPLY_CHANNEL}"},
            "messages": [
                {"$ref": f"#/channels/{REPLY_CHANNEL}/messages/{_name(kind)}"} for kind in (row.reply, Refusal)
            ],
        }
    assert row.exchange in (COMMANDS, EVENTS), row
    return operation


def _message(kind: type[Message]) -> dict[str, Any]:
    text = _doc(kind)
    return {
        "name": tag_of(kind),
        "title": kind.__name__,
        "summary": text.partition("\n")[0],
        "description": text,
        "contentType": "application/json",
        "headers": {
            "type": "object",
            "properties": {
                CAUSE: {"type": "string", "description": "The request or state change that led to this message."},
                TRACEPARENT: {"type": "string", "description": "W3C trace context."},
            },
        },
        "payload": {"$ref": _SCHEMA.format(name=kind.__name__)},
        "bindings": {"amqp": {"messageType": tag_of(kind), "bindingVersion": _BINDING}},
    }


def _schemas(kinds: Sequence[type[Message]]) -> dict[str, Any]:
    _, components = msgspec.json.schema_components(kinds, ref_template=_SCHEMA)
    add_field_notes(components)
    plain: dict[str, Any] = _as_draft_7(components)
    return plain


def add_field_notes(components: dict[str, Any]) -> None:
    """Describe the fields of messages and of what they are made of by the meanings that stand beside them."""
    contracts = {kind.__name__: kind for kind in _structs(Struct) if kind.__module__.startswith("bus.contracts.")}
    for name in components.keys() & contracts.keys():
        schema = components[name]
        items = zip(contracts[name].__struct_fields__, schema.get("prefixItems", ()), strict=False)
        specs = schema.get("properties") or dict(items)
        for field, text in field_notes(contracts[name]).items():
            if "$ref" in specs[field]:  # beside which other words do not count
                specs[field]["allOf"] = [{"$ref": specs[field].pop("$ref")}]
            specs[field]["description"] = text


def field_notes(kind: type[Struct]) -> dict[str, str]:
    """{field: meaning} of a message or what it is made of: the comment at the end of the field's line or above it, or
    the text below it.
    """
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if owner.__module__.startswith("bus.contracts."):
            found |= _notes_of(owner.__module__).get(owner.__name__, {})
    return {field: found[field] for field in kind.__struct_fields__ if field in found}


@cache
def _notes_of(module: str) -> Mapping[str, Mapping[str, str]]:
    """{class: {field: meaning}}. A comment that begins with "a, b: " is about each of these fields."""
    source = inspect.getsource(sys.modules[module])
    lines = source.splitlines()
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            notes = found[node.name] = {}
            for field, below in zip_longest(node.body, node.body[1:]):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    text = _comment_at(lines, field.lineno, field.end_lineno or field.lineno)
                    match below:
                        case ast.Expr(value=ast.Constant(value=str(under))):
                            text = " ".join(under.split())
                    group = re.match(r"((?:[a-z_]+, )+[a-z_]+): ", text)
                    names = group[1].split(", ") if group else [field.target.id]
                    notes |= dict.fromkeys(names, text[group.end() if group else 0 :]) if text else {}
    return found


def _comment_at(lines: Sequence[str], first: int, last: int) -> str:
    above = first - 1
    while lines[above - 1].lstrip().startswith("#"):
        above -= 1
    texts = [line.strip().removeprefix("# ") for line in lines[above : first - 1]]
    return " ".join([*texts, *re.findall(r"  # (?!noqa)(.*)$", lines[last - 1])])


def _structs(kind: type[Struct]) -> Iterator[type[Struct]]:
    for one in kind.__subclasses__():
        yield one
        yield from _structs(one)


def _as_draft_7(schema: Any) -> Any:
    """AsyncAPI's schema objects are JSON Schema draft 7: a tuple's items have another word there. Of a union it names
    the property that tells its members apart, and no more.
    """
    if isinstance(schema, list | tuple):
        return [_as_draft_7(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _as_draft_7(value) for key, value in schema.items()}
    if "prefixItems" in plain:
        rest = plain.pop("items", False)
        plain["items"] = plain.pop("prefixItems")
        plain["additionalItems"] = rest
    if isinstance(plain.get("discriminator"), dict):
        plain["discriminator"] = plain["discriminator"]["propertyName"]
    return plain


def _doc(kind: type[Message]) -> str:
    return "\n".join(line.strip() for line in (kind.__doc__ or "").strip().splitlines())
