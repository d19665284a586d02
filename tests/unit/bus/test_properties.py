"""The properties of a message as pamqp writes them, and reads them again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from bus.port import CC, Outgoing
from bus.rabbitmq.confirms import properties_of
from bus.rabbitmq.patches import install

SHORT = st.text(max_size=60).filter(lambda text: "\0" not in text)
NAMES = st.text(min_size=1, max_size=30).filter(lambda name: name != CC)
VALUES = st.one_of(SHORT, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))

install()


@given(
    also=SHORT,
    headers=st.dictionaries(NAMES, VALUES, max_size=5),
    persistent=st.booleans(),
    names=st.tuples(SHORT, SHORT, SHORT, SHORT),
    expiration_s=st.none() | st.floats(0, 10**6),
)
def test_what_is_written_is_read(
    also: str,
    headers: dict[str, str | int | float],
    persistent: bool,
    names: tuple[str, str, str, str],
    expiration_s: float | None,
) -> None:
    message = Outgoing(
        exchange="",
        routing_key="q",
        body=b"",
        message_id=names[0],
        type=names[1],
        correlation_id=names[2],
        headers=headers,
        persistent=persistent,
        expiration_s=expiration_s,
    )
    header = ContentHeader()
    header.unmarshal(ContentHeader(properties=properties_of(message, names[3], also)).marshal())
    read: Basic.Properties = header.properties
    assert read.content_type == "application/json"
    assert (read.headers or {}) == ({**headers, CC: [also]} if also else headers)
    assert read.delivery_mode == (2 if persistent else 1)
    assert (
        tuple(name or "" for name in (read.message_id, read.message_type, read.correlation_id, read.reply_to)) == names
    )
    assert read.expiration == (None if expiration_s is None else str(int(expiration_s * 1000)))
