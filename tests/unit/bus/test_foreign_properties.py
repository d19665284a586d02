"""Properties and headers are read whatever they hold, and in time that grows with their length."""

from __future__ import annotations

import random
import struct
from decimal import Decimal

import pytest
from pamqp import frame, header
from pamqp.commands import Basic

from bus.port import UNREAD, Outgoing
from bus.rabbitmq import confirms
from bus.rabbitmq.patches import MAX_DEPTH, MAX_VALUES, install
from tests.kit.raw_amqp import FLAGS, long, publish_frames, short, table

install()


def properties_of(**given: bytes) -> Basic.Properties:
    """As a client reads them that the broker has delivered them to."""
    raw = publish_frames(1, "x", b"k", given, b"")
    size, _, _ = frame.unmarshal(raw)
    _, _, read = frame.unmarshal(raw[size:])
    assert isinstance(read, header.ContentHeader)
    return read.properties


def headers_of(*values: bytes) -> list[object]:
    found = properties_of(headers=table({b"%d" % number: value for number, value in enumerate(values)})).headers
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
    read = getattr(properties_of(**{name: raw}), attribute)
    fields: dict[str, str] = {name: read}
    message = Outgoing(exchange="", routing_key="q", body=b"", **fields)  # type: ignore[arg-type]
    assert short(raw) in confirms.properties_of(message, message.reply_to).marshal()


def test_a_property_that_is_too_long_is_cut_and_known_by_what_is_left() -> None:
    text = "ü" * 200
    assert confirms.cut(text).encode("utf-8", "surrogateescape") == text.encode()[:255]
    assert confirms.cut("short") == "short"
    message = Outgoing(exchange="", routing_key="q", body=b"", message_id=text)
    assert short(text.encode()[:255]) in confirms.properties_of(message, None).marshal()
    with pytest.raises(ValueError, match="longer"):
        Basic.Publish(exchange="", routing_key="ü" * 200).marshal()


def test_a_time_beyond_the_calendar_is_none_and_what_follows_is_read() -> None:
    read = properties_of(timestamp=b"\xff" * 8, message_id=b"1", type=b"t", app_id=b"\xff")
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
    found = properties_of(headers=table(hidden)).headers
    assert found is not None
    assert "x-death" not in found and found[UNREAD] is True
    whole = properties_of(headers=table({b"a": b"A" + long(b"V" * 4_000), b"x-death": b"A" + long(b"")})).headers
    assert whole is not None
    assert UNREAD not in whole and whole["x-death"] == []
    broken = properties_of(headers=table({b"a": b"?", b"x-death": b"A" + long(b"")})).headers
    assert broken == {UNREAD: True}


def test_of_two_headers_of_one_name_the_first_counts() -> None:
    """RabbitMQ 3.10 adds a death to the first; the second one is its publisher's."""
    twice = long(short(b"x-death") + b"A" + long(b"t\1") + short(b"x-death") + b"A" + long(b""))
    assert properties_of(headers=twice).headers == {"x-death": [True]}


def test_no_bytes_make_it_raise() -> None:
    rng = random.Random(1)
    for _ in range(3_000):
        data = rng.randbytes(rng.randrange(1, 80))
        properties = Basic.Properties()
        Basic.Properties.unmarshal(properties, rng.getrandbits(16), data)  # type: ignore[arg-type]
        nested = table({b"n": rng.choice([b"A", b"F"]) + long(data), b"v": data[:1] + data})
        properties.unmarshal(1 << FLAGS["headers"], nested)
