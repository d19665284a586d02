"""Doors that are tried in this process: what a worker does with an input before it knows what it is.

Each has `make`, which invents an input, and `take`, which hands it in and raises `Defect` (or whatever the code under
test raises) when what comes out may not. `take` is what a worker does in one callback of its event loop.
"""

from __future__ import annotations

import atexit
import random
import shutil
import struct
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiormq.abc import DeliveredMessage
from msgspec import structs
from pamqp import commands, header

import berth.config.settings
import bus.rabbitmq  # noqa: F401  (makes pamqp read with our functions)
from bus.codec import (
    BATCH,
    JSON,
    MAX_RETRIES,
    Codec,
    Malformed,
    Packed,
    Read,
    batch,
    headers_of,
    is_text,
    may_batch,
    pack,
    published_key,
    shown,
    single,
)
from bus.consuming.dead_letters import read_dead_letter
from bus.contracts.base import MAX_REASON, Meta
from bus.contracts.catalogue import FORBIDDEN, queues_taking, routing_key
from bus.contracts.queues import COMMANDS, DEAD, EVENTS, QUEUES, REPLAY
from bus.rabbitmq import channels
from bus.rabbitmq.channels import RabbitDelivery
from bus.rabbitmq.patches import install
from bus.service.settings import SettingsError, redact
from bus.topology import QueueNames
from bus.transport import Outgoing
from compute_agent.records import records
from compute_sim import fleet
from compute_sim.config import SimulatedConfig
from compute_sim.host_plan import plan_hosts
from ironic_sync.domain.effect import effect_of
from ironic_sync.domain.notification import Notification, Rejected
from ironic_sync.domain.notification import parse as parse_notification
from placement_worker.rest import bodies
from placement_worker.rest.api import EXPLAINED_AT_ONCE
from placement_worker.rest.candidates_query import parse_candidates
from placement_worker.rest.config import RestConfig
from placement_worker.rest.faults import HttpFault
from placement_worker.rest.http import QueryString
from tests.fuzz import hostile
from tests.kit.raw_amqp import FLAGS, long, short, table

NEW_ID = "00000000-0000-4000-8000-0000000000ff"


class Defect(AssertionError):
    """A result of a door that is not allowed."""


class Door(Protocol):
    """A way in."""

    def make(self, rng: random.Random) -> Any:
        """An input."""

    def take(self, given: Any) -> None:
        """Hand it in. Raises when it is not dealt with as promised."""


def must(holds: object, else_: str) -> None:
    """Raise Defect unless it holds."""
    if not holds:
        raise Defect(else_)


class Amqp:
    """A delivery: properties, headers, body, key. Read by the queue's codec, then retried or parked, as properties."""

    def __init__(self) -> None:
        install()
        self._names = QueueNames("")
        self._queues = [row.name for row in QUEUES if queues_taking(row.name)]
        self._codecs = {name: Codec([row.message for row in queues_taking(name)], queue=name) for name in self._queues}
        self._kinds = {name: hostile.kinds([row.message for row in queues_taking(name)]) for name in self._queues}
        self._meta = hostile.kinds([Meta])[0]

    def make(self, rng: random.Random) -> tuple[str, str, str, int, bytes, bytes]:
        queue = rng.choice(self._queues)
        given = {name: property_of(name, rng) for name in FLAGS if rng.random() < 0.4}
        batched = rng.random() < 0.3
        if batched or rng.random() < 0.2:
            given["content_type"] = (BATCH if batched else JSON).encode()
        body = self._batch(queue, rng) if batched else hostile.bytes_of(rng.choice(self._kinds[queue]), rng)
        flags, values = packed(given)
        if rng.random() < 0.2:
            values = hostile.broken(values, rng)
        exchange = rng.choice((REPLAY, COMMANDS, EVENTS))
        return queue, exchange, self._key(queue, body, rng), flags, values, body

    def _key(self, queue: str, body: bytes, rng: random.Random) -> str:
        if rng.random() < 0.3:
            raw = rng.choice((hostile.text(rng).encode("utf-8", "surrogatepass"), rng.randbytes(9)))
            return raw[:255].decode("utf-8", "surrogateescape")
        row = rng.choice(list(queues_taking(queue)))
        try:
            return routing_key(msgspec.json.decode(body, type=row.message))
        except (ValueError, RecursionError):
            return row.key.replace("{project_id}", "p")

    def _batch(self, queue: str, rng: random.Random) -> bytes:
        items = []
        for _ in range(rng.choice((0, 1, 2, 3, 50))):
            meta = hostile.bytes_of(self._meta, rng)
            body = hostile.bytes_of(rng.choice(self._kinds[queue]), rng)
            items.append(b'{"meta":' + meta + b',"body":' + body + b"}")
        raw = b"[" + b",".join(items) + b"]"
        return hostile.broken(raw, rng) if rng.random() < 0.2 else raw

    def take(self, given: tuple[str, str, str, int, bytes, bytes]) -> None:
        queue, exchange, key, flags, values, body = given
        properties = commands.Basic.Properties()
        properties.unmarshal(flags, values)
        delivery = RabbitDelivery(_delivered(exchange, key, properties, body), None, self._names)  # type: ignore[arg-type]
        for read in self._codecs[queue].read(delivery, NEW_ID):
            if isinstance(read, Read):
                again = msgspec.json.decode(pack(read.message, read.meta).body, type=type(read.message))
                must(hostile.same(again, read.message), "a message is not what was read of it")
                meta = structs.replace(read.meta, retries=read.meta.retries + 1)
                outgoing = single(pack(read.message, meta), "", f"{queue}.retry.0")
                self._check_gathers(queue, pack(read.message, meta))
            else:
                must(read.reason is not None and len(read.reason) <= MAX_REASON, "a reason beyond its bound")
                must(read.code.startswith("message.") or read.code == FORBIDDEN, f"a code that is none: {read.code}")
                outgoing = self._dead_letter(queue, delivery, read)
            self._check_travels(channels.properties_of(outgoing, outgoing.reply_to), outgoing)
            must(is_text(shown(read.meta.id)) and is_text(shown(read.meta.cause)), "what is logged is no text")

    def _check_gathers(self, queue: str, packed: Packed) -> None:
        """A retry that may travel with others is read among them."""
        if packed.meta.retries <= MAX_RETRIES and may_batch(packed.meta):
            together = batch([packed, packed], REPLAY, queue)
            properties = commands.Basic.Properties(content_type=together.content_type)
            arrived = RabbitDelivery(_delivered(REPLAY, queue, properties, together.body), None, self._names)  # type: ignore[arg-type]
            must(
                all(isinstance(one, Read) for one in self._codecs[queue].read(arrived, NEW_ID)),
                "what was read alone is refused among others",
            )

    def _dead_letter(self, queue: str, delivery: RabbitDelivery, bad: Malformed) -> Outgoing:
        packed = Packed(bad.body, bad.meta, delivery.type or "")
        headers = {**headers_of(bad.meta), "berth-reason": bad.reason, "berth-key": shown(published_key(delivery))}
        return Outgoing(
            exchange=DEAD,
            routing_key=queue,
            body=packed.body,
            message_id=bad.meta.id,
            type=packed.type,
            correlation_id=bad.meta.correlation_id,
            reply_to=bad.meta.reply_to,
            headers=headers,
        )

    def _check_travels(self, raw: bytes, sent: Outgoing) -> None:
        """A published message is read back unchanged."""
        properties = commands.Basic.Properties()
        properties.unmarshal(struct.unpack_from(">H", raw)[0], raw[2:])
        must(
            (properties.message_id or "") == channels.truncate_text(sent.message_id),
            "another id than the one that was sent",
        )
        must((properties.headers or {}).keys() == {*map(channels.truncate_text, sent.headers)}, "headers were lost")
        read_dead_letter(
            0, RabbitDelivery(_delivered(sent.exchange, sent.routing_key, properties, sent.body), None, self._names)
        )  # type: ignore[arg-type]


def _delivered(exchange: str, key: str, properties: commands.Basic.Properties, body: bytes) -> DeliveredMessage:
    deliver = commands.Basic.Deliver("c", 1, False, exchange, key)
    return DeliveredMessage(
        delivery=deliver,
        header=header.ContentHeader(0, len(body), properties),
        body=body,
        channel=None,  # type: ignore[arg-type]
    )


def property_of(name: str, rng: random.Random, *, bare: bool = False) -> bytes:
    """A property's bytes. bare: without the headers that a broker looks at itself."""
    if name == "headers":
        fields = {}
        for _ in range(rng.choice((0, 1, 3, 30, 2000) if rng.random() < 0.05 else (0, 1, 3))):
            fields[_header_name(rng)] = _field(rng, 0)
        return table({key: value for key, value in fields.items() if not bare or key not in {b"CC", b"BCC"}})
    if name in {"delivery_mode", "priority"}:
        return rng.randbytes(1)
    if name == "timestamp":
        return rng.choice((rng.randbytes(8), b"\xff" * 8, bytes(8)))
    if rng.random() < 0.4:
        return rng.randbytes(rng.choice((0, 1, 36, 255)))
    return hostile.text(rng).encode("utf-8", "surrogatepass")[:255]


def _header_name(rng: random.Random) -> bytes:
    known = (
        b"berth-cause",
        b"berth-sent-at-ms",
        b"berth-retries",
        b"berth-timeout-ms",
        b"berth-key",
        b"traceparent",
    )
    more = (b"x-death", b"x-delivery-count", b"CC", b"BCC", b"berth-reason", b"berth-code", b"")
    return rng.choice((*known, *more, rng.randbytes(rng.choice((1, 30, 255)))))


def _field(rng: random.Random, depth: int) -> bytes:
    kind = rng.choice(b"tbBsuIilLfdDTVSxAF")
    sizes = {b"tbB": 1, b"su": 2, b"Iif": 4, b"D": 5, b"lLdT": 8, b"V": 0}
    size = next((size for kinds, size in sizes.items() if kind in kinds), None)
    if size is not None:
        raw = rng.choice((rng.randbytes(size), b"\xff" * size, bytes(size)))
    elif kind in b"Sx":
        raw = long(hostile.text(rng).encode("utf-8", "surrogatepass")[: rng.choice((8, 100_000))])
    elif depth > 40:
        raw = long(b"")
    elif kind == ord("A"):
        raw = long(b"".join([_field(rng, depth + 1) for _ in range(rng.randrange(3))]))
    else:
        raw = table({_header_name(rng): _field(rng, depth + 1) for _ in range(rng.randrange(3))})
    return bytes((kind,)) + raw


def packed(given: dict[str, bytes]) -> tuple[int, bytes]:
    """The property flags, and the values in their order."""
    flags, values = 0, b""
    for name, bit in FLAGS.items():
        if name in given:
            flags |= 1 << bit
            plain = name in {"headers", "delivery_mode", "priority", "timestamp"}
            values += given[name] if plain else short(given[name])
    return flags, values


class Notifications:
    """A message in Ironic's exchange."""

    def __init__(self) -> None:
        recorded = sorted((Path(__file__).parents[1] / "data" / "ironic").glob("*.jsonl"))
        self._bodies = [
            msgspec.json.decode(line)["body"] for path in recorded for line in path.read_bytes().splitlines()
        ]

    def make(self, rng: random.Random) -> bytes:
        body = dict(rng.choice(self._bodies))
        if rng.random() < 0.7 and isinstance(body.get("oslo.message"), str):
            inner = msgspec.json.decode(body["oslo.message"])
            for _ in range(rng.choice((1, 1, 2, 4))):
                inner = hostile.spoiled(inner, rng)
            decoded = hostile.as_json(inner)
            body["oslo.message"] = (hostile.broken(decoded, rng) if rng.random() < 0.2 else decoded).decode("latin-1")
        else:
            body = hostile.spoiled(body, rng)
        raw = hostile.as_json(body)
        return hostile.broken(raw, rng) if rng.random() < 0.3 else raw

    def take(self, given: bytes) -> None:
        parsed = parse_notification(given)
        if isinstance(parsed, Rejected):
            must(
                parsed.code.startswith("notification.") and len(parsed.request_id) <= 64,
                "a rejection beyond its bounds",
            )
            return
        must(isinstance(parsed, Notification) and len(parsed.event) < 130, "an event beyond its bound")
        effect_of(parsed, seen_updated_at=parsed.updated_at)
        effect_of(parsed, seen_updated_at="2026-11-20T07:44:06Z")


def _folder() -> Path:
    """A directory that goes with this process."""
    folder = tempfile.mkdtemp(prefix="berth-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


class Settings:
    """A TOML file and variables. Whatever is in them: settings, or a SettingsError with a code."""

    def __init__(self) -> None:
        self._kind = hostile.kinds([berth.config.settings.Settings])[0]
        self._folder = _folder()
        self._path = self._folder / "berth.toml"

    def make(self, rng: random.Random) -> tuple[bytes, dict[str, str]]:
        tree = hostile.value_of(self._kind, rng)
        for _ in range(rng.choice((0, 0, 1, 2))):
            tree = hostile.spoiled(tree, rng)
        lines: list[str] = []
        if isinstance(tree, dict):
            lines += [f"{_key(name)} = {_toml(value)}" for name, value in tree.items()]
        raw = "\n".join(lines).encode("utf-8", "surrogatepass")
        if rng.random() < 0.3:
            raw = hostile.broken(raw, rng)
        return raw, {self._variable(tree, rng): _value(rng) for _ in range(rng.randrange(3))}

    def _variable(self, tree: Any, rng: random.Random) -> str:
        words = []
        while isinstance(tree, dict) and tree and (not words or rng.random() < 0.7):
            word = rng.choice(list(tree))
            words.append(str(word).upper() if rng.random() < 0.9 else hostile.text(rng)[:20])
            tree = tree[word]
        return "BERTH_" + "__".join(words or [hostile.text(rng)[:20]])

    def take(self, given: tuple[bytes, dict[str, str]]) -> None:
        raw, env = given
        self._path.write_bytes(raw)
        try:
            settings = berth.config.settings.read_settings(self._path, env)
        except SettingsError as error:
            must(error.code.startswith("settings."), f"a code that is none: {error.code}")
            must(error.reason, "no reason")
            return
        redact(settings)


def _key(name: object) -> str:
    return (
        '"' + str(name).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\x00", "\\u0000") + '"'
    )


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_toml(below)}" for name, below in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return '""'
    if isinstance(value, int):
        return str(value) if abs(value) < 10**300 else "9" * 5_000
    return str(value) if isinstance(value, float) else _key(value)


def _value(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return hostile.text(rng)
    raw = hostile.as_json(hostile.anything(rng)) if rng.random() < 0.5 else rng.choice(hostile.RAW_JSON)
    return raw.decode("utf-8", "surrogateescape")


class Journals:
    """A compute service's files with damage in them: it starts, or ends with a reason, and logs what it loses."""

    def __init__(self) -> None:
        self._kinds = hostile.kinds([fleet.MachineRow, fleet.DestroyedRow, records.HostAttemptRow, records.PurgeRow])
        self._folder = _folder()
        self._config = SimulatedConfig(hosts=2)
        self._hosts = [plan.uuid for plan in plan_hosts(self._config, "c1", "s")]
        self._base = self._folder

    def make(self, rng: random.Random) -> tuple[list[tuple[str, str, int, bool]], str, int, int]:
        steps = [
            (rng.choice(self._hosts), rng.choice(hostile.UUIDS), rng.randrange(1, 4), rng.random() < 0.7)
            for _ in range(rng.choice((1, 3, 8)))
        ]
        return steps, rng.choice(("machines", "records")), rng.randrange(2**30), rng.randrange(1, 256)

    def take(self, given: tuple[list[tuple[str, str, int, bool]], str, int, int]) -> None:
        steps, which, at, other = given
        for old in self._base.iterdir():
            old.unlink()
        before = self._opened()
        for host, instance, attempt, stays in steps:
            key = (host, instance)
            before.put(host, fleet.SimulatedMachine(instance, attempt, {}, database_id="d"))
            before.records.put(key, records.HostAttempt(attempt, records.AttemptPhase.RUNNING, database_id="d"))
            if not stays:
                before.remove(host, instance)
                before.records.put(
                    key,
                    records.HostAttempt(attempt, records.AttemptPhase.GONE, max_ended_attempt=attempt, database_id="d"),
                )
        self._close(before)
        path = self._base / f"c1.s.{which}"
        raw = bytearray(path.read_bytes())
        raw[at % len(raw)] ^= other
        path.write_bytes(raw)
        after = self._opened()
        kept = self._base / f"c1.s.{which}.damaged-1"
        must(kept.exists() and kept.read_bytes() == raw, "a damaged byte, and no file was kept aside")
        there = {(host, machine.instance_uuid): machine.attempt for host, machine in after.machines()}
        for host, machine in before.machines():
            running = after.records.running().get((host, machine.instance_uuid))
            if which == "machines" or running is not None:
                must(there.get((host, machine.instance_uuid), 0) >= machine.attempt, "a machine was forgotten")
        for key, entry in before.records.running().items():
            must(which == "records" or after.records.running().get(key) == entry, "a record was changed")
        self._close(after)

    def _opened(self) -> fleet.Fleet:
        own = records.Records.of_service(str(self._folder), "c1", "s", synced=False)
        own.open()
        found = fleet.Fleet.planned(self._config, "c1", "s", own, str(self._folder))
        found.open()
        return found

    def _close(self, opened: fleet.Fleet) -> None:
        opened.close()
        opened.records.close()


class RestBodies:
    """Bodies and queries of placement's API, as its handlers read them: taken, or a Fault below 500."""

    def __init__(self) -> None:
        tables = (*bodies.PUT_ALLOCATIONS, *bodies.POST_ALLOCATIONS, *bodies.RESHAPE)
        plain = [value for value in vars(bodies).values() if isinstance(value, bodies.Body)]
        self._bodies: list[bodies.Body[Any]] = [*plain, *(body for _, body in tables)]
        self._kinds = hostile.kinds([body._kind for body in self._bodies])
        self._limit = RestConfig().max_body_bytes
        self._reply_session = ThreadPoolExecutor(max_workers=1)

    def make(self, rng: random.Random) -> tuple[int, bytes]:
        if rng.random() < 0.3:
            return -1 - rng.randrange(40), self._query(rng)
        number = rng.randrange(len(self._bodies))
        return number, hostile.bytes_of(self._kinds[number], rng)

    def _query(self, rng: random.Random) -> bytes:
        names = (
            "resources",
            "required",
            "member_of",
            "in_tree",
            "group_policy",
            "limit",
            "root_required",
            "same_subtree",
        )
        values = ("VCPU:1", "VCPU:1,MEMORY_MB:2147483647", "!HW_CPU_X86_AVX2", "in:a,b", "none", "isolate", "_A,_B", "")
        words = []
        for _ in range(rng.choice((1, 2, 3, 8, 300))):
            name = rng.choice(names) + rng.choice(("", "", "1", "_A", "%00", hostile.text(rng)[:64]))
            value = rng.choice((*values, hostile.text(rng), *hostile.UUIDS))
            words.append(f"{name}={value}")
        raw = "&".join(words).encode("utf-8", "surrogatepass")
        return hostile.broken(raw, rng) if rng.random() < 0.3 else raw

    def take(self, given: tuple[int, bytes]) -> None:
        number, raw = given
        try:
            if number < 0:
                parse_candidates(QueryString(raw), -1 - number)
            elif len(raw) <= self._limit:  # a longer one is 413
                self._parse(self._bodies[number], raw)
        except HttpFault as fault:
            must(400 <= fault.status < 500, f"an answer of {fault.status}")

    def _parse(self, body: bodies.Body[Any], raw: bytes) -> None:
        """As `Api.parse`: what is wrong with a long body is found in another thread."""
        if len(raw) <= EXPLAINED_AT_ONCE:
            body.parse(raw)
        elif body.decode(raw) is None:
            self._reply_session.submit(body.explain, raw).result()


DOORS: dict[str, type[Any]] = {
    "amqp": Amqp,
    "notifications": Notifications,
    "settings": Settings,
    "journals": Journals,
    "rest": RestBodies,
}
