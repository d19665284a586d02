"""Properties and sizes of messages: ours, foreign ones, the largest, routing keys."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from decimal import Decimal

import pytest
from aiormq.abc import DeliveredMessage
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from pamqp import frame, header
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from bus import codec as wire
from bus.contracts.base import Message, encode
from bus.contracts.catalogue import REPLIES, queues_taking, routing_key
from bus.contracts.cell import (
    MAX_LOOKUP,
    MAX_LOOKUP_AT_ONCE,
    MAX_RESERVED_AT_ONCE,
    AttemptOnHost,
    MachineLookupResult,
    ReservedMachine,
    ReservedOnHost,
    ReserveMachines,
)
from bus.contracts.placement import (
    MAX_CLAIMS_TOGETHER,
    MAX_GANG_PROVIDERS,
    MAX_LOCATED_HOSTS,
    MAX_MEMBERS,
    Claim,
    ClaimAll,
    ClaimOption,
    GroupPolicy,
    Inventory,
    InventoryUpdate,
    ProviderReport,
    ServerGroup,
)
from bus.publishing import BusLimits
from bus.rabbitmq import channels
from bus.rabbitmq.channels import RabbitDelivery
from bus.rabbitmq.patches import MAX_DEPTH, MAX_VALUES, install
from bus.topology import QueueNames, matches
from bus.transport import UNREAD, Outgoing
from tests.kit.raw_amqp import FLAGS, long, publish_frames, short, table
from tests.unit.bus.test_wire import arrived

# --- the properties of a message as pamqp reads them, which knows the protocol

SHORT = st.text(max_size=60).filter(lambda text: "\0" not in text)
NAMES = st.text(min_size=1, max_size=30)
FRAME_MAX = 4096
VALUES = st.one_of(SHORT, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))

install()


@given(
    exchange=SHORT,
    key=SHORT,
    body=st.binary(max_size=10_000),
    headers=st.dictionaries(NAMES, VALUES, max_size=5),
    flags=st.tuples(st.booleans(), st.booleans()),
    names=st.tuples(SHORT, SHORT, SHORT, SHORT),
    expiration_s=st.none() | st.floats(0, 10**6),
)
def test_what_is_written_is_read(  # noqa: PLR0917
    exchange: str,
    key: str,
    body: bytes,
    headers: dict[str, str | int | float],
    flags: tuple[bool, bool],
    names: tuple[str, str, str, str],
    expiration_s: float | None,
) -> None:
    persistent, mandatory = flags
    message = Outgoing(
        exchange="unused",
        routing_key="unused",
        body=body,
        message_id=names[0],
        type=names[1],
        correlation_id=names[2],
        headers=headers,
        persistent=persistent,
        mandatory=mandatory,
        expiration_s=expiration_s,
    )
    raw = channels.frames_of(message, exchange, key, names[3], channel=7, frame_max=FRAME_MAX)
    found = []
    while raw:
        size, channel, one = frame.unmarshal(raw)
        assert channel == 7 and size <= FRAME_MAX
        found.append(one)
        raw = raw[size:]
    method, head, *bodies = found
    assert isinstance(method, Basic.Publish) and isinstance(head, ContentHeader)
    assert (method.exchange, method.routing_key) == (exchange, key)
    assert (method.mandatory, method.immediate) == (mandatory, False)
    assert b"".join(part.value for part in bodies) == body and head.body_size == len(body)
    read: Basic.Properties = head.properties
    assert read.content_type == "application/json"
    assert (read.headers or {}) == headers
    assert read.delivery_mode == (2 if persistent else 1)
    assert (
        tuple(name or "" for name in (read.message_id, read.message_type, read.correlation_id, read.reply_to)) == names
    )
    assert read.expiration == (None if expiration_s is None else str(int(expiration_s * 1000)))


@pytest.mark.parametrize(
    ("expiration", "seconds"),
    [("", None), ("0", 0.0), ("4294967295", 4_294_967.295), ("4294967296", None), ("9" * 255, None), ("-1", None)],
)
def test_an_expiration_is_one_that_the_broker_takes(expiration: str, seconds: float | None) -> None:
    """Another would be sent on as a header, which holds no such number."""
    properties = Basic.Properties(expiration=expiration)
    message = DeliveredMessage(
        delivery=Basic.Deliver("c", 1, False, "", "q"),
        header=ContentHeader(0, 0, properties),
        body=b"",
        channel=None,  # type: ignore[arg-type]
    )
    assert RabbitDelivery(message, None, QueueNames("")).expiration_s == seconds  # type: ignore[arg-type]


# --- properties and headers are read whatever they hold, and in time that grows with their length

install()


def decoded_properties(**given: bytes) -> Basic.Properties:
    """As a client reads them that the broker has delivered them to."""
    raw = publish_frames(1, "x", b"k", given, b"")
    size, _, _ = frame.unmarshal(raw)
    _, _, read = frame.unmarshal(raw[size:])
    assert isinstance(read, header.ContentHeader)
    return read.properties


def headers_of(*values: bytes) -> list[object]:
    found = decoded_properties(headers=table({b"%d" % number: value for number, value in enumerate(values)})).headers
    assert found is not None
    return list(found.values())


def test_each_type_of_value_is_read() -> None:
    assert headers_of(
        b"t\1",
        b"b\xff",
        b"B\xff",
        b"s\xff\xff",
        b"u\xff\xff",
        b"I" + b"\xff" * 4,
        b"i" + b"\xff" * 4,
        b"l" + b"\xff" * 8,
    ) == [True, -1, 255, -1, 65535, -1, 2**32 - 1, -1]
    assert headers_of(b"d" + struct.pack(">d", 0.5), b"f" + struct.pack(">f", 0.5), b"D\2\0\0\0\5") == [
        0.5,
        0.5,
        Decimal("0.05"),
    ]
    assert headers_of(b"V", b"\0", b"S" + long("ü".encode()), b"S" + long(b"\xff"), b"x" + long(b"\xff")) == [
        None,
        None,
        "ü",
        b"\xff",
        b"\xff",
    ]
    assert headers_of(b"A" + long(b"t\1V"), b"F" + table({b"a": b"B\1"})) == [[True, None], {"a": 1}]


@pytest.mark.parametrize("name", ["message_id", "correlation_id", "reply_to", "type", "content_type"])
def test_bytes_of_a_property_are_written_back_as_they_came(name: str) -> None:
    raw = bytes(range(256))[1:]
    attribute = "message_type" if name == "type" else name
    read = getattr(decoded_properties(**{name: raw}), attribute)
    fields: dict[str, str] = {name: read}
    message = Outgoing(exchange="", routing_key="q", body=b"", **fields)  # type: ignore[arg-type]
    assert short(raw) in channels.properties_of(message, message.reply_to)


def test_a_property_that_is_too_long_is_cut_and_known_by_what_is_left() -> None:
    text = "ü" * 200
    assert channels.truncate_text(text).encode("utf-8", "surrogateescape") == text.encode()[:255]
    assert channels.truncate_text("short") == "short"
    message = Outgoing(exchange="", routing_key="q", body=b"", message_id=text)
    assert short(text.encode()[:255]) in channels.properties_of(message, None)
    with pytest.raises(ValueError, match="longer"):
        channels.frames_of(message, "", "ü" * 200, None, channel=1, frame_max=4096)


def test_a_time_beyond_the_calendar_is_none_and_what_follows_is_read() -> None:
    read = decoded_properties(timestamp=b"\xff" * 8, message_id=b"1", type=b"t", app_id=b"\xff")
    assert (read.timestamp, read.message_id, read.message_type) == (None, "1", "t")


def test_depth_and_number_of_values_are_bounded() -> None:
    value = b"V"
    for _ in range(3 * MAX_DEPTH):
        value = b"A" + long(value)
    (found,) = headers_of(value)
    depth = 0
    while isinstance(found, list):
        (found,) = found
        depth += 1
    assert depth == MAX_DEPTH
    (found, left_out) = headers_of(b"A" + long(b"V" * 100_000))
    assert isinstance(found, list) and len(found) < MAX_VALUES
    assert left_out is True


def test_headers_that_are_left_out_are_missed() -> None:
    """The broker's record of a death was hidden behind 5,000 values of its publisher."""
    hidden = {b"a": b"A" + long(b"V" * 5_000), b"x-death": b"A" + long(b"")}
    found = decoded_properties(headers=table(hidden)).headers
    assert found is not None
    assert "x-death" not in found and found[UNREAD] is True
    whole = decoded_properties(headers=table({b"a": b"A" + long(b"V" * 4_000), b"x-death": b"A" + long(b"")})).headers
    assert whole is not None
    assert UNREAD not in whole and whole["x-death"] == []
    broken = decoded_properties(headers=table({b"a": b"?", b"x-death": b"A" + long(b"")})).headers
    assert broken == {UNREAD: True}


def test_of_two_headers_of_one_name_the_first_counts() -> None:
    """RabbitMQ 3.10 adds a death to the first; the second one is its publisher's."""
    twice = long(short(b"x-death") + b"A" + long(b"t\1") + short(b"x-death") + b"A" + long(b""))
    assert decoded_properties(headers=twice).headers == {"x-death": [True]}


def test_no_bytes_make_it_raise() -> None:
    rng = random.Random(1)
    for _ in range(3_000):
        data = rng.randbytes(rng.randrange(1, 80))
        properties = Basic.Properties()
        Basic.Properties.unmarshal(properties, rng.getrandbits(16), data)  # type: ignore[arg-type]
        nested = table({b"n": rng.choice([b"A", b"F"]) + long(data), b"v": data[:1] + data})
        properties.unmarshal(1 << FLAGS["headers"], nested)


# --- the largest messages of berth's own workers: what decoding them costs is bounded by their values
# Each message is decoded by one call in C, during which nothing else runs on the loop.

AMOUNTS = {"VCPU": 1, "MEMORY_MB": 1, "DISK_GB": 1}


def uuid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012x}"


def gang(options: int, providers: int) -> ClaimAll:
    option = ClaimOption(
        allocations={uuid(n): AMOUNTS for n in range(providers)},
        spec_generations={uuid(n): 1 for n in range(providers)},
    )
    return ClaimAll(
        claims=tuple(Claim(consumer=uuid(n), options=(option,) * options, project_id="p") for n in range(MAX_MEMBERS))
    )


def foreign(claims: int, providers: int, members: int) -> ClaimAll:
    option = ClaimOption(
        allocations={uuid(n): AMOUNTS for n in range(providers)},
        spec_generations={uuid(n): 1 for n in range(providers)},
        host=uuid(0),
    )
    group = ServerGroup(uuid=uuid(0), policy=GroupPolicy.ANTI_AFFINITY)
    one = Claim(consumer=uuid(0), options=(option,), project_id="p", owner="r", external=True, server_group=group)
    first = replace(one, group_members=tuple(uuid(n) for n in range(members)))
    return ClaimAll(claims=(first, *(one,) * (claims - 1)))


def report(providers: int, traits: int) -> InventoryUpdate:
    names = tuple(f"CUSTOM_{n}" for n in range(traits))
    inventories = {name: Inventory(total=10) for name in AMOUNTS}
    tree = tuple(
        ProviderReport(
            uuid=uuid(n), name=uuid(n), parent_uuid=uuid(0) if n else None, inventories=inventories, traits=names
        )
        for n in range(providers)
    )
    return InventoryUpdate(reporter="s", version=1, root_uuid=uuid(0), providers=tree)


def reserve(machines: int, providers: int) -> ReserveMachines:
    taken = {uuid(n): AMOUNTS for n in range(providers)}
    one = ReservedMachine(instance_uuid=uuid(0), attempt=1, allocations=taken)
    hosts = tuple(ReservedOnHost(host_uuid=uuid(n), machines=(one,) * 100) for n in range(machines // 100))
    return ReserveMachines(service="s", epoch=1, sequence=1, hosts=hosts)


def found(machines: int, hosts: int) -> MachineLookupResult:
    one = AttemptOnHost(instance_uuid=uuid(0), host_uuid=uuid(0), service="s", attempt=1)
    return MachineLookupResult(machines=(one,) * machines, hosts=tuple(uuid(n) for n in range(hosts)))


def read(queue: str, message: Message) -> wire.Read | wire.Malformed:
    """As a process of ours reads it from this queue; "": from its reply queue."""
    kinds = [row.message for row in queues_taking(queue)] if queue else REPLIES
    key = routing_key(message) if queue else ""
    delivery = arrived(encode(message), type=wire.tag(type(message)), routing_key=key)
    (got,) = wire.Codec(kinds, queue=queue).read(delivery, "new")
    return got


REQUESTS, INVENTORY, CONTROL = "placement.requests", "placement.inventory", "compute.control.{service}"


@pytest.mark.parametrize(
    ("queue", "make"),
    [
        (REQUESTS, lambda: gang(16, 64)),
        (INVENTORY, lambda: report(1024, 100)),
        (CONTROL, lambda: reserve(100_000, 1)),
        (CONTROL, lambda: reserve(5_000, 3)),
        ("", lambda: found(machines=100_000, hosts=0)),
    ],
    ids=["a gang", "a report", "reservations", "reservations of a page of the first release", "machines"],
)  # fmt: skip
def test_item_16_a_message_of_very_many_values_is_not_read(queue: str, make: Callable[[], Message]) -> None:
    """Each is legal by the bounds of its fields, and took 130, 30, 380, 27 and 48 ms."""
    got = read(queue, make())
    assert isinstance(got, wire.Malformed) and got.code == wire.TOO_LARGE, got


@pytest.mark.parametrize(
    ("queue", "make"),
    [
        (REQUESTS, lambda: gang(1, 64)),
        (REQUESTS, lambda: gang(4, MAX_GANG_PROVIDERS // MAX_MEMBERS // 4)),
        (REQUESTS, lambda: gang(16, 5)),
        (REQUESTS, lambda: foreign(MAX_CLAIMS_TOGETHER, 1, MAX_LOCATED_HOSTS)),
        (INVENTORY, lambda: report(64, 300)),
        (INVENTORY, lambda: report(512, 40)),
        (CONTROL, lambda: reserve(5_000, 1)),
        (CONTROL, lambda: reserve(MAX_RESERVED_AT_ONCE, 8)),
        ("", lambda: found(machines=2 * MAX_LOOKUP_AT_ONCE, hosts=MAX_LOOKUP)),
    ],
    ids=[
        "a gang, one option", "a gang of nested hosts", "a gang, most options", "a request of Nova for 1,000",
        "many traits", "many providers",
        "reservations of the first release for a whole page of a report", "reservations", "machines of a look-up",
    ],
)  # fmt: skip
def test_what_berths_workers_send_is_read(queue: str, make: Callable[[], Message]) -> None:
    got = read(queue, make())
    assert isinstance(got, wire.Read), got.reason


def test_a_link_gathers_no_more_than_a_batch_may_have() -> None:
    """With the longest metadata of each message that a worker sends: of a client's it has the cause and, in a reply,
    the correlation id.
    """
    limits = BusLimits()
    assert limits.batch_bytes + limits.batch_items * 2 * 6 * wire.MAX_ID <= wire.MAX_BATCH_BYTES


# --- topic patterns against a second way of reading them: as regular expressions over words

WORD = st.sampled_from(["a", "b", "build", "event"])
KEYS = st.lists(WORD, max_size=5)
PATTERNS = st.lists(st.one_of(WORD, st.sampled_from(["*", "#"])), max_size=5)


def by_expression(pattern: list[str], key: list[str]) -> bool:
    """Every word of the key is followed by a dot; `*` is one of those, `#` any number."""
    words = {"*": r"[^.]+\.", "#": r"(?:[^.]+\.)*"}
    expression = "".join(words.get(word, re.escape(word) + r"\.") for word in pattern)
    return re.fullmatch(expression, "".join(f"{word}." for word in key)) is not None


@given(PATTERNS, KEYS)
@example(["#"], [])
@example(["a", "#"], ["a"])
@example(["#", "*"], [])
@example(["*", "#", "b"], ["a", "b"])
def test_a_pattern_takes_just_the_keys_that_its_expression_takes(pattern: list[str], key: list[str]) -> None:
    assert matches(pattern, key) == by_expression(pattern, key)
