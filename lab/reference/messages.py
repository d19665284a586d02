"""docs/reference/messages.md, derived from the catalogue: `scripts/nightly docs` writes it, a test compares it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from bus.contracts.base import Message, Refusal, tag_of
from bus.contracts.catalogue import (
    COMMANDS,
    DEAD,
    DEAD_LETTERS,
    DELAY,
    EVENTS,
    FORBIDDEN,
    MESSAGES,
    OPERATORS,
    QUEUES,
    REPLIES,
    MessageRow,
    Where,
    taken_by,
)
from bus.wire import BATCH, MAX_BATCH_BYTES, MAX_BATCH_ITEMS, MAX_BODY_BYTES, MAX_CLIENT_BYTES, MAX_CLIENT_VALUES

EXAMPLE = """\
import asyncio, json, os, uuid
import aio_pika

async def main():
    connection = await aio_pika.connect(os.environ["AMQP_URL"])
    async with connection:
        channel = await connection.channel(on_return_raises=True)  # a key that no queue takes is an error
        events = await channel.declare_queue(exclusive=True)
        await events.bind("berth.events", "build.event.*.demo")
        order = {"instance_uuid": str(uuid.uuid4()), "flavor": "m1.small", "project_id": "demo"}
        message = aio_pika.Message(json.dumps(order).encode(), content_type="application/json", delivery_mode=2)
        await (await channel.get_exchange("berth")).publish(message, "build.request.demo")
        async with events.iterator() as stream:
            async for event in stream:
                body = json.loads(event.body)
                await event.ack()
                if body["instance_uuid"] != order["instance_uuid"]:
                    continue  # of another request of this project
                print(body["instance_uuid"], body["state"], body.get("host", ""), body.get("reason", ""))
                if body.get("terminal"):
                    return

asyncio.run(main())
"""

MOVE_EXAMPLE = """\
import asyncio, json, os, uuid
import aio_pika

async def main():
    connection = await aio_pika.connect(os.environ["AMQP_URL"])
    async with connection:
        channel = await connection.channel(on_return_raises=True)
        events = await channel.declare_queue(exclusive=True)
        await events.bind("berth.events", "instance.event.*.demo")
        move = {"request_id": str(uuid.uuid4()), "instance_uuid": os.environ["INSTANCE"], "project_id": "demo"}
        move["kind"] = "stop"
        message = aio_pika.Message(json.dumps(move).encode(), content_type="application/json", delivery_mode=2)
        await (await channel.get_exchange("berth")).publish(message, "instance.move.demo")
        async with events.iterator() as stream:
            async for event in stream:
                body = json.loads(event.body)
                await event.ack()
                if body["request_id"] != move["request_id"]:
                    continue  # of another request of this project
                print(body["state"], body.get("host") or "", body.get("code", ""), body.get("reason", ""))
                if body.get("terminal"):
                    return

asyncio.run(main())
"""

CELL_WORKERS = ("cell_conductor", "compute_sim")

HEAD = f"""\
# Messages

Derived from `bus/contracts/catalogue/` by `scripts/nightly docs`; do not edit by hand. As an AsyncAPI 3 document:
`berth asyncapi` prints it (`--public`: without the messages between berth's own parts), and
[`berth web`](../use/web.md) serves it at `/api/v1/asyncapi.json`.

Every bus (the API bus, and one bus a cell: a virtual host or broker of its own) has a topic exchange `{COMMANDS}` for
commands (publish with `mandatory`: a command that no queue takes is an error), `{EVENTS}` for events (which may have
no listener), and for its workers alone `{DEAD}` for messages that were given up and `{DELAY}.<ms>` for messages that
are to be tried again. Bodies are JSON objects, `content-type: application/json`, of at most {MAX_CLIENT_BYTES:,} bytes
(`message.too_large`) and {MAX_CLIENT_VALUES:,} values (commas, and beginnings of lists and objects) on the queue of
clients' requests, and of at most {MAX_BODY_BYTES:,} bytes on others, some of which
bound the values of one message (below); a batch has at most {MAX_BATCH_ITEMS:,} items and {MAX_BATCH_BYTES:,} bytes.

| AMQP property or header | meaning |
| --- | --- |
| `content-type` | `application/json`: one message. `application/vnd.berth.batch+json`: many, `[{{"meta", "body"}}]`, |
| | as berth's own parts publish under load. Events of the API bus come one to a message under their own keys. |
| `type` | the versioned tag, e.g. `build.request.v1`. May be left out where the routing key determines it. |
| `message-id` | unique per message; a redelivery repeats it |
| `reply-to`, `correlation-id` | where and under which id an answer is wanted; leave out to get none |
| `delivery-mode` | 2 (persistent) for commands that must not be lost |
| header `berth-cause` | the request or state change that led to this message |
| header `traceparent` | W3C trace context: of a request, under which its trace goes on; of an event, its trace |

A message has one routing key: the one below, filled with its own fields. Under another it is not taken
(`message.wrong_key`), in a batch as alone, so that a broker's permissions for a project's keys bind its requests, too
([Permissions](../operate/permissions.md)). Messages that `operator` alone publishes are not for a project's user.
Fields that only an operator may use are refused under a project's key (`{FORBIDDEN}`), in a batch as alone; a message
with one is sent to its queue itself, by the default exchange, where a project's user may not write.
A project id is one word of a key, written as it is: 1 to 64 letters of `A-Z a-z 0-9 _ -`. Others are refused.
A field that a message does not have is refused where it is stated below; elsewhere it is passed over, so that
workers of two versions understand each other. An `inventory.update` and a `host.metrics` are refused as well, by the
field's name and the nearest one that there is, unless their `may_ignore` names that field: so a newer worker works with
an older placement or scheduler.

`reply-to` names a queue that the broker has named (declare it without a name, exclusive), direct reply-to
(`amq.rabbitmq.reply-to`), or a queue whose name begins with `client.reply.`; any other is refused (`message.reply_to`).

A message that cannot be understood is answered by `refusal.v1` (`code`, `reason`) when `reply-to` is set. With or
without it, a build or delete request whose `instance_uuid` could be read is answered on the event stream of the project
in its routing key, by state `refused`; so is one under a uuid that is on record with other content
(`request.duplicate`). The `sequence` of such an event is 0: outdated for a client that follows the request on record. A
request that was accepted and then given up ends with an event as well: `broker.expired` (its publisher set an
`expiration` and no deadline), `delivery.exhausted` (each scheduler that took it ended), `delivery.given_up` (a
scheduler could not handle it; with `reply-to` it is answered by `refusal.v1` besides); a build has then `failed`, a
delete is `refused` with `sequence` 0 and the machine stays. A request that comes to a scheduler after the time in its
header `berth-deadline-ms` (counted from its arrival there), or expires at the broker with that header, is dropped
without an event, and may be requested again; a build, delete or move that is on record by then goes on. A message that
is given up is parked in the bus's queue `{DEAD_LETTERS}`, with the headers `berth-code` and `berth-reason` where a
worker gave it up (`berth dead-letters list`); its routing key there is the name of the queue that gave it up, or of the
queue whose consumer announces its end. A message that a queue of another program has dead-lettered, or that has a
header `x-death`, is dropped without an answer ([permissions](../operate/permissions.md)).

## Publish a build request, follow its events

Any AMQP 0-9-1 client in any language will do. In Python with aio-pika (`tests/system/test_messages_example.py`
runs this and the next example as written):

```python
{EXAMPLE}```

A move is requested in the same way under an id of its own, and `instance.event.v1` has its events. `INSTANCE` is the
instance's uuid:

```python
{MOVE_EXAMPLE}```
"""


def render() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_flows(), *_messages(), *_queues()]) + "\n"


def _flows() -> Iterator[str]:
    """Diagrams of who publishes what to whom: one of the API bus, one of a cell's."""
    yield "## Publishers and readers\n"
    yield "Derived from the catalogue: an arrow is a message that a queue of its reader takes. Replies are left out.\n"
    for where, title in ((Where.API, "On the API bus"), (Where.CELL, "On a cell's bus")):
        flows: dict[tuple[str, str], list[str]] = {}
        for queue in QUEUES:
            for row in taken_by(queue.name):
                if {row.where, queue.where} <= {where, Where.BOTH}:
                    for publisher in row.publishers:
                        # The messages that may go on both buses: a cell's workers are on its bus alone, all others use
                        # the API bus.
                        if row.where is Where.BOTH and (publisher in CELL_WORKERS) is (where is Where.API):
                            continue
                        flows.setdefault((publisher, queue.consumer), []).append(row.tag.rpartition(".v")[0])
        yield f"### {title}\n\n```mermaid\nflowchart LR"
        for (publisher, reader), tags in sorted(flows.items()):
            yield f'    {publisher} -- "{"<br/>".join(sorted(set(tags)))}" --> {reader}'
        yield "```\n"


def _messages() -> Iterator[str]:
    for title, public in (("For clients", True), ("Between berth's own parts", False)):
        yield f"## {title}\n"
        for row in MESSAGES:
            if row.public is public:
                yield from _message(row)
    yield "## Replies\n"
    for reply in REPLIES:
        yield f"### `{tag_of(reply)}`\n"
        yield from _fields(reply)


def _message(row: MessageRow) -> Iterator[str]:
    yield f"### `{row.tag}`\n"
    yield f"{_doc(row.message)}\n"
    bus = {Where.API: "API bus", Where.CELL: "each cell's bus", Where.BOTH: "API bus and each cell's bus"}[row.where]
    yield f"- {bus}, exchange `{row.exchange}`, routing key `{row.key}`"
    if row.batch_key:
        only = "; on a cell's bus only so" if row.where is Where.BOTH else ""
        yield f"- also in batches, under `{row.batch_key}`: for listeners of many that read `{BATCH}`{only}"
        yield "- alone, it comes there as a plain message (header `CC`), and once where a queue is bound to both keys"
    yield f"- published by {', '.join(row.publishers)}; owned by {row.owner}"
    yield f"- idempotent by {row.idempotency}"
    if rights := OPERATORS.get(row.message):
        values = {name: f" ({', '.join(sorted(only))})" if only else "" for name, only in rights.items()}
        fields = ", ".join(f"`{name}`{which}" for name, which in values.items())
        yield f"- an operator's alone (`{FORBIDDEN}` under a project's key), by the default exchange: {fields}"
    if row.message.__struct_config__.forbid_unknown_fields:
        yield "- a field that it does not have is refused by name (`message.invalid`)"
    if row.reply is not None:
        bound = f", of at most {row.max_reply_values} values" if row.max_reply_values else ""
        yield f"- answered by `{tag_of(row.reply)}`{bound}, or `{tag_of(Refusal)}`"
    yield ""
    yield from _fields(row.message)


def _fields(message: type[Message]) -> Iterator[str]:
    (schema,), components = msgspec.json.schema_components([message], ref_template="{name}")
    name = schema.get("$ref", message.__name__)
    body = components.get(name, schema)
    required = set(body.get("required", ()))
    yield "| field | type | |"
    yield "| --- | --- | --- |"
    for field, spec in body.get("properties", {}).items():
        if field != "type":
            yield f"| `{field}` | {_type(spec)} | {'required' if field in required else _default(spec)} |"
    yield ""
    for other in _referenced(body, components):
        spec = components[other]
        parts = [f"`{field}` {_type(part)}" for field, part in spec.get("properties", {}).items()]
        yield f"`{other}`: " + (", ".join(parts) or "one of " + _type(spec))
        yield ""


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


def _queues() -> Iterator[str]:
    yield "## Queues\n"
    yield "| queue | bus | kind | read by | bound to | retries after, s | bounds |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in QUEUES:
        bound = ", ".join(f"`{key}`" for _, key in row.bindings)
        size = f", {row.max_bytes} bytes" if row.max_bytes else ""
        size += f", {row.max_values} values in one" if row.max_values else ""
        bounds = f"{row.max_length} messages{size}" + (f", {row.ttl_s:g} s" if row.ttl_s else "")
        retries = ", ".join(f"{delay:g}" for delay in row.retry_s) or "none"
        yield f"| `{row.name}` | {row.where} | {row.kind} | {row.consumer} | {bound} | {retries} | {bounds} |"


def _doc(message: type[Message]) -> str:
    lines = (message.__doc__ or "").strip().splitlines()
    return "\n".join(line.strip() for line in lines)
