"""Messages to bytes and back."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import wire
from bus.contracts.base import Meta
from bus.contracts.build import BuildQuery, BuildRequest, DeleteRequest
from bus.port import Outgoing

UUID = "00000000-0000-0000-0000-000000000001"
CODEC = wire.Codec([BuildRequest, DeleteRequest], queue="scheduler.requests")
METAS = st.builds(
    Meta,
    id=st.text(min_size=1, max_size=40),
    cause=st.text(max_size=40),
    sent_at=st.integers(0, 2**40).map(lambda number: number / 1000),
    reply_to=st.none() | st.text(min_size=1, max_size=40),
    correlation_id=st.none() | st.text(min_size=1, max_size=40),
    deadline=st.none() | st.integers(0, 2**40).map(lambda number: number / 1000),
    traceparent=st.none() | st.text(min_size=1, max_size=40),
    attempt=st.integers(0, 1000),
)


class Arrived:
    """An Outgoing as the other side sees it."""

    def __init__(self, message: Outgoing, **changed: Any) -> None:
        for name in message.__struct_fields__:
            setattr(self, name, getattr(message, name))
        for name, value in changed.items():
            setattr(self, name, value)

    def ack(self) -> None:
        raise AssertionError

    def nack(self, *, requeue: bool) -> None:
        raise AssertionError


def delete(number: int = 1) -> DeleteRequest:
    return DeleteRequest(instance_uuid=f"00000000-0000-0000-0000-{number:012x}", project_id="p")


def arrived(body: bytes, **changed: Any) -> Any:
    return Arrived(Outgoing(exchange="berth", routing_key="build.delete.p", body=body), **changed)


def read(delivery: Any) -> list[wire.Read | wire.Malformed]:
    return CODEC.read(delivery, "new")


@given(METAS)
def test_one_message_keeps_its_metadata(meta: Meta) -> None:
    (got,) = read(Arrived(wire.single(wire.pack(delete(), meta), "x", "k")))
    assert got == wire.Read(delete(), meta)


@given(st.integers(1_600_000_000_000_000, 4_000_000_000_000_000))
def test_a_message_is_never_taken_before_it_was_sent(microseconds: int) -> None:
    """Rounded up, a request had been asked 5 microseconds after it was taken: a stage before its own beginning."""
    sent_at = microseconds / 1e6
    (got,) = read(Arrived(wire.single(wire.pack(delete(), Meta(id="m", sent_at=sent_at)), "x", "k")))
    assert sent_at - 0.001 <= got.meta.sent_at <= sent_at + 1e-6
    (again,) = read(Arrived(wire.single(wire.pack(delete(), got.meta), "x", "k")))
    assert again.meta.sent_at == got.meta.sent_at


@given(st.lists(METAS, min_size=1, max_size=5))
def test_a_batch_keeps_its_order_and_metadata(metas: list[Meta]) -> None:
    packed = [wire.pack(delete(number), meta) for number, meta in enumerate(metas)]
    got = read(Arrived(wire.batch(packed, "x", "k")))
    assert got == [wire.Read(delete(number), meta) for number, meta in enumerate(metas)]


@given(st.binary(max_size=200), st.sampled_from([wire.JSON, wire.BATCH, None, "text/plain"]))
def test_no_bytes_make_it_raise(body: bytes, content_type: str | None) -> None:
    for got in read(arrived(body, content_type=content_type)):
        assert isinstance(got, wire.Read | wire.Malformed)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=10),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["type", "meta", "body", "id", "instance_uuid", "x"]), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_no_json_makes_it_raise(value: object) -> None:
    body = json.dumps(value).encode()
    read(arrived(body))
    read(arrived(body, content_type=wire.BATCH))
    read(arrived(json.dumps([value, value]).encode(), content_type=wire.BATCH))


@pytest.mark.parametrize(
    ("body", "changed", "kind"),
    [
        ({"type": "build.delete.v1"}, {"routing_key": "build.request.p"}, DeleteRequest),
        ({}, {"type": "build.delete.v1", "routing_key": "scheduler.requests"}, DeleteRequest),
        ({}, {"routing_key": "build.delete.p"}, DeleteRequest),
        ({}, {"routing_key": "build.delete.some.deeper.key"}, DeleteRequest),
        ({}, {"routing_key": "scheduler.requests", "headers": {"berth-key": "build.delete.p"}}, DeleteRequest),
        ({"flavor": "f"}, {"routing_key": "build.request.p"}, BuildRequest),
    ],
)
def test_the_type_comes_from_the_property_the_body_or_the_key(body: dict[str, str], changed: Any, kind: type) -> None:
    raw = json.dumps({"instance_uuid": UUID, "project_id": "p", **body}).encode()
    (got,) = read(arrived(raw, **changed))
    assert isinstance(got, wire.Read) and isinstance(got.message, kind)


def test_a_queue_of_one_type_needs_no_type() -> None:
    codec = wire.Codec([BuildQuery])
    (got,) = codec.read(arrived(b'{"limit":3}', routing_key="q"), "new")
    assert isinstance(got, wire.Read) and got.message == BuildQuery(limit=3)
    assert got.meta.id == "new"


@pytest.mark.parametrize("name", [wire.DEADLINE, wire.SENT_AT, wire.ATTEMPT])
@pytest.mark.parametrize("value", ["soon", True, [1], 1e300, float("nan"), float("inf")])
def test_a_header_of_the_wrong_type_is_named(name: str, value: object) -> None:
    (got,) = read(arrived(msgspec.json.encode(delete()), headers={name: value}))
    assert isinstance(got, wire.Malformed)
    assert got.code == wire.INVALID
    assert name in got.reason


def test_reasons_name_the_path_and_never_the_content() -> None:
    body = b'{"type":"build.delete.v1","instance_uuid":"secret-token","project_id":"p"}'
    (got,) = read(arrived(body))
    assert isinstance(got, wire.Malformed)
    assert "$.instance_uuid" in got.reason
    assert "secret-token" not in got.reason


def test_a_body_past_the_bound_is_not_read() -> None:
    (got,) = read(arrived(b" " * (wire.MAX_BODY_BYTES + 1)))
    assert isinstance(got, wire.Malformed) and got.code == wire.TOO_LARGE


def test_a_batch_past_the_bound_is_not_read() -> None:
    (got,) = read(arrived(b"[" + b"{}," * wire.MAX_BATCH_ITEMS + b"{}]", content_type=wire.BATCH))
    assert isinstance(got, wire.Malformed) and got.code == wire.TOO_LARGE


@pytest.mark.parametrize("field", ["instance_uuid", "project_id"])
def test_a_newline_at_the_end_is_not_part_of_a_name(field: str) -> None:
    """Python's `$` would let it through: one database row, and two dictionary keys that never meet."""
    fields = {"instance_uuid": UUID, "project_id": "p"}
    (got,) = read(arrived(json.dumps({**fields, field: fields[field] + "\n", "type": "build.delete.v1"}).encode()))
    assert isinstance(got, wire.Malformed) and got.code == wire.INVALID
