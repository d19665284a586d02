"""Our publish frames against pamqp, which knows the protocol."""

from __future__ import annotations

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from bus.port import CC, Outgoing
from bus.rabbitmq import frames

SHORT = st.text(max_size=60).filter(lambda text: "\0" not in text)
HEADERS = st.dictionaries(
    SHORT.filter(lambda name: name not in ("", CC)),
    st.one_of(SHORT, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)),
    max_size=5,
)
FRAME_MAX = 4096


@given(
    exchange=SHORT,
    key=SHORT,
    also=SHORT,
    body=st.binary(max_size=10_000),
    headers=HEADERS,
    persistent=st.booleans(),
    mandatory=st.booleans(),
    names=st.tuples(SHORT, SHORT, SHORT, SHORT),
    expiration_s=st.none() | st.floats(0, 10**6),
)
def test_pamqp_reads_what_we_write(  # noqa: PLR0917
    exchange: str,
    key: str,
    also: str,
    body: bytes,
    headers: dict[str, str | int | float],
    persistent: bool,
    mandatory: bool,
    names: tuple[str, str, str, str],
    expiration_s: float | None,
) -> None:
    message = Outgoing(
        exchange="unused",
        routing_key="unused",
        also="unused",
        body=body,
        message_id=names[0],
        type=names[1],
        correlation_id=names[2],
        headers=headers,
        persistent=persistent,
        mandatory=mandatory,
        expiration_s=expiration_s,
    )
    raw = frames.publish(message, exchange, key, names[3], channel=7, frame_max=FRAME_MAX, also=also)
    read = []
    while raw:
        size, channel, frame = pamqp.frame.unmarshal(raw)
        assert channel == 7
        assert size <= FRAME_MAX
        read.append(frame)
        raw = raw[size:]
    method, header, *bodies = read
    assert isinstance(method, Basic.Publish)
    assert (method.exchange, method.routing_key, method.mandatory, method.immediate) == (
        exchange,
        key,
        mandatory,
        False,
    )
    assert isinstance(header, ContentHeader)
    assert header.body_size == len(body)
    properties = header.properties
    assert properties.content_type == "application/json"
    assert (properties.headers or {}) == ({**headers, CC: [also]} if also else headers)
    assert properties.delivery_mode == (2 if persistent else 1)
    found = (properties.message_id, properties.message_type, properties.correlation_id, properties.reply_to)
    assert tuple(name or "" for name in found) == names
    assert properties.expiration == (None if expiration_s is None else str(int(expiration_s * 1000)))
    assert all(isinstance(part, ContentBody) for part in bodies)
    assert b"".join(part.value for part in bodies) == body


def test_a_name_too_long_for_amqp_is_refused_before_anything_is_sent() -> None:
    message = Outgoing(exchange="x", routing_key="k", body=b"")
    with pytest.raises(ValueError, match="255 bytes"):
        frames.publish(message, "x", "k" * 256, None, channel=1, frame_max=FRAME_MAX)
