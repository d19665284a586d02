"""Messages to bytes and back."""

from __future__ import annotations

import json
import sys
from string import ascii_letters, digits
from types import FrameType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from bus import codec as wire
from bus.contracts.actions import MachineChanged
from bus.contracts.base import MAX_ATTEMPT, MAX_EPOCH, MAX_INCARNATION, MAX_SENT_SEQUENCE, SENT_SLOTS, Meta
from bus.contracts.build import BuildEvent, BuildQuery, BuildRequest, BuildState, DeleteRequest
from bus.contracts.catalogue import BY_TYPE, project_of
from bus.contracts.cell import AttemptOnHost, Heartbeat, HostStates, Running, ServiceSuperseded
from bus.contracts.drains import DrainStart
from bus.contracts.host_metrics import HostMetrics, HostReading
from bus.contracts.operations import AdminState, SetAdminState
from bus.contracts.placement import InventoryUpdate
from bus.contracts.queues import REPLAY, RETURN
from bus.json_values import NUL_REASON, has_more_values
from bus.transport import Outgoing

UUID = "00000000-0000-0000-0000-000000000001"
KEY = "build.delete.p"
CODEC = wire.Codec([BuildRequest, DeleteRequest], queue="scheduler.requests")
METAS = st.builds(
    Meta,
    id=st.text(min_size=1, max_size=40),
    cause=st.text(max_size=40),
    sent_at=st.integers(0, 2**40).map(lambda number: number / 1000),
    reply_to=st.none() | st.from_regex(r"berth\.reply\.cli-[a-z0-9-]{0,40}\.[0-9a-f]{12}", fullmatch=True),
    correlation_id=st.none() | st.text(min_size=1, max_size=40),
    timeout_s=st.none() | st.integers(0, 2**40).map(lambda number: number / 1000),
    waited_s=st.integers(0, 2**40).map(lambda number: number / 1000),
    traceparent=st.none() | st.text(min_size=1, max_size=40),
    retries=st.integers(0, 1000),
    database_incarnation=st.integers(0, MAX_INCARNATION),
    sent_sequences=st.lists(st.integers(0, MAX_SENT_SEQUENCE), max_size=SENT_SLOTS).map(tuple),
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
    (got,) = read(Arrived(wire.single(wire.pack(delete(), meta), "berth", KEY)))
    assert got == wire.Read(delete(), meta)


@given(st.integers(1_600_000_000_000_000, 4_000_000_000_000_000))
def test_a_message_is_never_taken_before_it_was_sent(microseconds: int) -> None:
    """Rounded up, a request had been asked 5 microseconds after it was taken: a stage before its own beginning."""
    sent_at = microseconds / 1e6
    (got,) = read(Arrived(wire.single(wire.pack(delete(), Meta(id="m", sent_at=sent_at)), "berth", KEY)))
    assert sent_at - 0.001 <= got.meta.sent_at <= sent_at + 1e-6
    (again,) = read(Arrived(wire.single(wire.pack(delete(), got.meta), "berth", KEY)))
    assert again.meta.sent_at == got.meta.sent_at


@given(st.lists(METAS, min_size=1, max_size=5))
def test_a_batch_keeps_its_order_and_metadata(metas: list[Meta]) -> None:
    packed = [wire.pack(delete(number), meta) for number, meta in enumerate(metas)]
    got = read(Arrived(wire.batch(packed, "berth", KEY)))
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
        ({"type": "build.delete.v1"}, {}, DeleteRequest),
        ({}, {"type": "build.delete.v1", "exchange": REPLAY, "routing_key": "scheduler.requests"}, DeleteRequest),
        ({}, {"routing_key": "build.delete.p"}, DeleteRequest),
        ({}, {"exchange": REPLAY, "routing_key": "scheduler.requests", "headers": {"berth-key": KEY}}, DeleteRequest),
        ({"flavor": "f"}, {"routing_key": "build.request.p"}, BuildRequest),
    ],
)
def test_the_type_comes_from_the_property_the_body_or_the_key(body: dict[str, str], changed: Any, kind: type) -> None:
    raw = json.dumps({"instance_uuid": UUID, "project_id": "p", **body}).encode()
    (got,) = read(arrived(raw, **changed))
    assert isinstance(got, wire.Read) and isinstance(got.message, kind)


def test_a_queue_of_one_type_needs_no_type() -> None:
    codec = wire.Codec([BuildQuery])
    (got,) = codec.read(arrived(b'{"limit":3}', routing_key="build.query"), "new")
    assert isinstance(got, wire.Read) and got.message == BuildQuery(limit=3)
    assert got.meta.id == "new"


@pytest.mark.parametrize("name", [wire.TIMEOUT, wire.WAITED, wire.SENT_AT, wire.RETRIES, wire.INCARNATION])
@pytest.mark.parametrize("value", ["soon", True, [1], 1e300, float("nan"), float("inf")])
def test_a_header_of_the_wrong_type_is_named(name: str, value: object) -> None:
    (got,) = read(arrived(msgspec.json.encode(delete()), headers={name: value}))
    assert isinstance(got, wire.Malformed)
    assert got.code == wire.INVALID
    assert name in got.reason


@pytest.mark.parametrize("value", [7, "-1", "1 x", " 1", "1  2", "1" * 16, "1 " * SENT_SLOTS + "1", "1\n", "\u0661"])
def test_marks_that_are_no_numbers_are_refused(value: object) -> None:
    (got,) = read(arrived(msgspec.json.encode(delete()), headers={wire.SENT_SEQUENCES: value}))
    assert isinstance(got, wire.Malformed) and got.code == wire.INVALID and wire.SENT_SEQUENCES in got.reason
    assert got.meta.sent_sequences == ()


@pytest.mark.parametrize("number", [-1, MAX_INCARNATION + 1, 2**31])
def test_an_incarnation_beyond_its_bound_is_refused_and_not_taken_for_the_highest(number: int) -> None:
    (got,) = read(arrived(msgspec.json.encode(delete()), headers={wire.INCARNATION: number}))
    assert isinstance(got, wire.Malformed) and got.code == wire.INVALID and wire.INCARNATION in got.reason
    assert got.meta.database_incarnation == 0, "its letter is replayed with what stands here"


def test_reasons_name_the_path_and_never_the_content() -> None:
    body = b'{"type":"build.delete.v1","instance_uuid":"secret-token","project_id":"p"}'
    (got,) = read(arrived(body))
    assert isinstance(got, wire.Malformed)
    assert "$.instance_uuid" in got.reason
    assert "secret-token" not in got.reason


@pytest.mark.parametrize(
    ("codec", "bound"),
    [
        (CODEC, wire.MAX_CLIENT_BYTES),
        (wire.Codec([BuildRequest], queue="scheduler.dead_letters"), wire.MAX_CLIENT_BYTES),
        (wire.Codec([BuildEvent], queue="client.builds.{process}"), wire.MAX_BODY_BYTES),
    ],
    ids=["requests of clients", "those that were given up", "events"],
)
def test_item_16_a_body_past_the_bound_is_not_read(codec: wire.Codec, bound: int) -> None:
    assert wire.most_bytes(codec._queue) == bound, "nor kept in memory"
    for content_type, most in ((None, bound), (wire.BATCH, wire.MAX_BATCH_BYTES)):
        (got,) = codec.read(arrived(b" " * (most + 1), content_type=content_type), "new")
        assert isinstance(got, wire.Malformed) and got.code == wire.TOO_LARGE and str(most) in got.reason
        (got,) = codec.read(arrived(b" " * most, content_type=content_type), "new")
        assert isinstance(got, wire.Malformed) and got.code == wire.MALFORMED


def request(**fields: Any) -> bytes:
    body = {"type": "build.request.v1", "instance_uuid": UUID, "project_id": "p", "flavor": "f", **fields}
    return json.dumps(body, separators=(",", ":")).encode()


def test_item_16_a_request_of_very_many_values_is_not_read() -> None:
    """A megabyte of empty lists, where a request may carry any JSON, held the loop for 126 ms."""
    for many in ([[]] * 40_000, [0] * 70_000, [{}] * 40_000):
        body = request(config_drive={"network_data": {"a": many}})
        for content_type in (None, wire.BATCH):
            (got,) = read(arrived(body, routing_key="build.request.p", content_type=content_type))
            assert isinstance(got, wire.Malformed) and got.code == wire.TOO_LARGE, got.reason
            assert str(wire.MAX_CLIENT_VALUES) in got.reason and len(body) <= wire.MAX_CLIENT_BYTES


@pytest.mark.parametrize("is_operators", [False, True])
def test_the_largest_request_is_read(is_operators: bool) -> None:
    of_operator: dict[str, Any] = {"volumes": [{"volume_id": UUID, "properties": {"a": "b" * 16_000}}] * 16}
    body = request(
        name="n" * 255,
        ignore_hosts=["h" * 255] * 256,
        different_host=[UUID] * 64,
        same_host=[UUID] * 64,
        image_properties={f"{number:03}" + "k" * 252: "v" * 255 for number in range(64)},
        config_drive={
            "user_data": "u" * 65_535,
            "public_keys": ["k" * 16_384] * 16,
            "network_data": {"a": "b" * 65_000},
        },
        networks=[{"port": UUID}] * 16,
        **(of_operator if is_operators else {}),
    )
    key = "operator.request.p" if is_operators else "build.request.p"
    (got,) = read(arrived(body, routing_key=key))
    assert isinstance(got, wire.Read), got.reason
    assert not has_more_values(body, wire.MAX_CLIENT_VALUES // BY_TYPE[BuildRequest].max_batch)


def test_what_is_in_a_string_is_no_value() -> None:
    """Four requests with tables as user data were refused as one message, and none of them was answered."""
    key, several = "build.request.p", {"networks": [{"port": UUID}] * 16}
    bodies = [
        request(config_drive={"user_data": table}, **several)
        for table in (",[{" * 21_845, '{"a\\\\":["b",\\"1]},\n' * 3_000, "\\" * 60_000 + '"')
    ]
    for body in bodies:
        (got,) = read(arrived(body, routing_key=key))
        assert isinstance(got, wire.Read), got.reason
    packed = [wire.pack(msgspec.json.decode(body, type=BuildRequest), Meta(id="b")) for body in bodies]
    got = read(Arrived(wire.batch(packed, "berth", key)))
    assert len(got) == len(bodies) and all(isinstance(one, wire.Read) for one in got)
    for text in (b'["\\\\",' + b"0," * 70_000, b'["\\"",' + b"[]," * 70_000, b'["a",' + b'"",' * 140_000):
        assert has_more_values(text, wire.MAX_CLIENT_VALUES)


# One message of 1,000 was read in 16 ms, and one of 10,000 in 154.
MOST_CALLS = 200_000


def test_item_16_a_batch_of_bad_requests_takes_few_calls() -> None:
    items = [{"meta": {"id": "m"}, "body": json.loads(request(instance_uuid=str(number)))} for number in range(512)]
    assert len(items) == wire.MAX_BATCH_ITEMS
    delivery, calls = arrived(json.dumps(items).encode(), content_type=wire.BATCH), 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        got = read(delivery)
    finally:
        sys.setprofile(None)
    assert {type(one) for one in got} == {wire.Malformed} and len(got) == len(items)
    assert calls < MOST_CALLS


def test_a_batch_past_the_bound_is_not_read() -> None:
    (got,) = read(arrived(b"[" + b"{}," * wire.MAX_BATCH_ITEMS + b"{}]", content_type=wire.BATCH))
    assert isinstance(got, wire.Malformed) and got.code == wire.TOO_LARGE


@pytest.mark.parametrize("field", ["instance_uuid", "project_id"])
def test_a_newline_at_the_end_is_not_part_of_a_name(field: str) -> None:
    """Python's `$` would let it through: one database row, and two dictionary keys that never meet."""
    fields = {"instance_uuid": UUID, "project_id": "p"}
    (got,) = read(arrived(json.dumps({**fields, field: fields[field] + "\n", "type": "build.delete.v1"}).encode()))
    assert isinstance(got, wire.Malformed) and got.code == wire.INVALID


OTHERS_KEYS = [
    "build.delete.evil",
    "build.delete.p.p",
    "build.delete.",
    "build.delete.17",
    "build.request.p",
    "build.delete.P",
]


@pytest.mark.parametrize("key", [*OTHERS_KEYS, "build.delete.p\n", "build.delete.#"])
@pytest.mark.parametrize("named", [None, "build.delete.v1"])
def test_item_7_a_body_of_another_project_than_its_key_is_not_taken(key: str, named: str | None) -> None:
    """The broker lets a project publish under its own key; its body might name any project's machine."""
    (got,) = read(arrived(wire.pack(delete(), Meta(id="m")).body, routing_key=key, type=named))
    assert isinstance(got, wire.Malformed)
    assert (got.code, got.key) == (wire.WRONG_KEY, key)


def test_item_7_the_foreign_message_in_a_batch_is_not_taken_and_its_neighbours_are() -> None:
    other = DeleteRequest(instance_uuid=UUID, project_id="q")
    packed = [wire.pack(one, Meta(id=str(n))) for n, one in enumerate([delete(1), other, delete(2)])]
    first, forged, last = read(Arrived(wire.batch(packed, "berth", KEY)))
    assert first == wire.Read(delete(1), Meta(id="0")) and last == wire.Read(delete(2), Meta(id="2"))
    assert isinstance(forged, wire.Malformed)
    assert (forged.code, forged.key) == (wire.WRONG_KEY, KEY)


def test_item_7_a_second_key_in_a_header_does_not_count() -> None:
    """RabbitMQ routes by the header CC as well, and some versions check permissions for the first key only."""
    for headers in ({"CC": [KEY]}, {"berth-key": KEY}):
        (got,) = read(arrived(wire.pack(delete(), Meta(id="m")).body, routing_key="build.delete.evil", headers=headers))
        assert isinstance(got, wire.Malformed) and got.code == wire.WRONG_KEY


def test_item_7_what_goes_back_from_the_dead_letters_is_read_under_its_first_key() -> None:
    changed = {
        "exchange": REPLAY,
        "routing_key": "scheduler.requests",
        "headers": {"berth-key": "build.delete.evil"},
    }
    (got,) = read(arrived(wire.pack(delete(), Meta(id="m")).body, **changed))
    assert isinstance(got, wire.Malformed) and got.code == wire.WRONG_KEY


def test_a_retry_has_been_read_before_and_names_no_key() -> None:
    (got,) = read(Arrived(wire.single(wire.pack(delete(), Meta(id="m")), REPLAY, "scheduler.requests")))
    assert got == wire.Read(delete(), Meta(id="m"))


def test_events_may_come_under_the_key_of_their_batches() -> None:
    event = BuildEvent(instance_uuid=UUID, project_id="p", state=BuildState.ACTIVE, sequence=3)
    codec = wire.Codec([BuildEvent])
    packed = wire.pack(event, Meta(id="m"))
    for key in ("build.events", "build.event.active.p"):
        assert codec.read(Arrived(wire.single(packed, "berth.events", key)), "new") == [wire.Read(event, Meta(id="m"))]
    (got,) = codec.read(Arrived(wire.single(packed, "berth.events", "build.event.failed.p")), "new")
    assert isinstance(got, wire.Malformed) and got.code == wire.WRONG_KEY


@pytest.mark.parametrize(
    "reply_to",
    [
        "placement.requests",
        "berth.dead-letters",
        "berth.delayed.200",
        "=scheduler.requests",
        "compute.c1",
        "client.builds.x",
        "amq.topic",
        "amq.rabbitmq.reply-to.g1.x",
        "amq.gen-x\n",
        "amq.gen-x.y",
        "client.reply.x#",
        "berth.reply.placement-h-1.0a",
    ],
)
def test_item_7_a_reply_is_sent_to_no_queue_that_is_not_for_replies(reply_to: str) -> None:
    """The worker that answers would lose its channel: it may not write there."""
    meta = Meta(id="m", reply_to=reply_to)
    single = Arrived(wire.single(wire.pack(delete(), meta), "berth", KEY))
    batch = Arrived(wire.batch([wire.pack(delete(), meta)], "berth", KEY))
    unread = arrived(b"{", reply_to=reply_to)
    too_large = arrived(b" " * (wire.MAX_CLIENT_BYTES + 1), reply_to=reply_to)
    strange = arrived(b"{}", reply_to=reply_to, headers={wire.TIMEOUT: "soon"})
    for delivery in (single, batch, unread, too_large, strange):
        (got,) = read(delivery)
        assert isinstance(got, wire.Malformed) and (got.code, got.meta.reply_to) == (wire.REPLY_TO, None)


@pytest.mark.parametrize("reply_to", ["amq.gen-x", "=amq.gen-x_-A", "client.reply.x", "berth.reply.cli-h-1.0a"])
def test_a_client_is_answered_where_replies_go(reply_to: str) -> None:
    meta = Meta(id="m", reply_to=reply_to)
    (got,) = read(Arrived(wire.single(wire.pack(delete(), meta), "berth", KEY)))
    assert got == wire.Read(delete(), meta)


@given(st.text(max_size=70))
def test_a_project_is_one_word_of_a_key_or_none(name: str) -> None:
    words = set(name) <= set(ascii_letters + digits + "_-") and 0 < len(name) <= 64
    assert project_of(f"build.request.{name}") == (name if words else "")
    others = ("build.request.x", "build.request.", "build.event.active", "operator.request")
    assert {project_of(f"{other}.{name}") for other in others} == {""}


def test_a_project_with_dots_is_no_project() -> None:
    assert project_of("build.delete.a.b") == project_of("build.delete.b\n") == project_of("b") == ""


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hostt": "h1"}, "unknown field `hostt`; did you mean `host`?"),
        ({"server_group": {"uuid": UUID, "policy": "affinity", "max_per_hots": 2}}, "did you mean `max_per_host`?"),
        ({"zzz": 1}, "unknown field `zzz`"),
    ],
)
def test_a_field_that_a_clients_request_does_not_have_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    """It was dropped silently: a mistyped `hostt` was built anywhere."""
    body = msgspec.json.encode({"instance_uuid": UUID, "flavor": "f", "project_id": "p", **fields})
    (found,) = read(arrived(body, routing_key="build.request.p"))
    assert isinstance(found, wire.Malformed) and found.code == wire.INVALID
    assert named in found.reason, found.reason


def test_a_field_that_a_delete_does_not_have_is_refused_by_name() -> None:
    body = msgspec.json.encode({"type": "build.delete.v1", "instance_uuid": UUID, "project_id": "p", "forced": True})
    (found,) = read(arrived(body, routing_key="build.delete.p"))
    assert isinstance(found, wire.Malformed) and found.code == wire.INVALID
    assert "unknown field `forced`" in found.reason, found.reason


@pytest.mark.parametrize(
    "properties",
    [
        {"message_id": "\udcff" * 40 + "ü" * 60},
        {"correlation_id": "ü" * 100, "reply_to": "client.reply." + "x" * 240},
        {"correlation_id": "\udcff", "reply_to": "client.reply.x"},
        {"correlation_id": "\udcff" * 225},
    ],
    ids=[
        "an id that grows when it is spelled out",
        "a long reply queue",
        "an id that is no text",
        "a long id that is no text",
    ],
)
def test_a_message_that_was_read_alone_is_read_when_its_retry_travels_with_others(properties: dict[str, str]) -> None:
    """It was refused then as beyond its bounds: an accepted request became a dead letter without a terminal event."""
    request = BuildRequest(instance_uuid=UUID, flavor="m1.small", project_id="p")
    packed = wire.pack(request, Meta(id="x"))
    alone = Outgoing(exchange="berth", routing_key="build.request.p", body=packed.body, **properties)  # type: ignore[arg-type]
    (read,) = CODEC.read(Arrived(alone), "new")
    assert isinstance(read, wire.Read)
    assert len(read.meta.id.encode()) <= wire.MAX_ID
    if wire.may_batch(read.meta):
        together = wire.batch([wire.pack(request, read.meta)] * 2, REPLAY, "scheduler.requests")
        assert [type(one) for one in CODEC.read(Arrived(together), "new")] == [wire.Read, wire.Read]


def test_what_comes_back_after_a_delay_has_been_read_before() -> None:
    """Whatever its headers hold: the broker has written some of them."""
    message = wire.single(wire.pack(delete(), Meta(id="m")), RETURN, "scheduler.requests")
    deaths = [{"queue": "berth.delayed.200", "reason": "expired", "exchange": "berth.delay.200"}]
    headers = {"x-death": deaths, "berth-key": "build.delete.evil"}
    assert read(Arrived(message, headers=headers)) == [wire.Read(delete(), Meta(id="m"))]


REPORTS = wire.Codec([InventoryUpdate], queue="placement.inventory")
HOST = {"uuid": UUID, "name": "h", "inventories": {"VCPU": {"total": 8}}}


def report(host: dict[str, Any] | None = None, **fields: Any) -> bytes:
    payload = {
        "reporter": "operator",
        "version": 1,
        "root_uuid": UUID,
        "providers": [{**HOST, **(host or {})}],
        **fields,
    }
    return msgspec.json.encode(payload)


def read_report(body: bytes, content_type: str = wire.JSON) -> list[wire.Read | wire.Malformed]:
    if content_type == wire.BATCH:
        body = b'[{"meta":{"id":"m"},"body":%s},{"meta":{"id":"n"},"body":%s}]' % (body, report())
    return REPORTS.read(arrived(body, routing_key=f"inventory.update.{UUID}", content_type=content_type), "new")


@pytest.mark.parametrize("content_type", [wire.JSON, wire.BATCH])
@pytest.mark.parametrize(
    ("body", "named"),
    [
        (report(cel="c1"), "unknown field `cel`; did you mean `cell`?"),
        (report({"trait": ["CUSTOM_A"]}), "did you mean `traits`?"),
        (report({"inventories": {"VCPU": {"total": 8, "reserve": 7}}}), "did you mean `reserved`?"),
    ],
)
def test_a_field_that_a_report_of_inventory_does_not_have_is_refused_by_name(
    body: bytes, named: str, content_type: str
) -> None:
    """It was passed over: a mistyped `reserve` offered all of a host."""
    found, *others = read_report(body, content_type)
    assert isinstance(found, wire.Malformed) and found.code == wire.INVALID
    assert named in found.reason, found.reason
    assert all(isinstance(other, wire.Read) for other in others), "its neighbour is taken"


READING = {"host_uuid": UUID, "at": 5.0, "values": {"power.watts": 1.0}}


def read_metrics(reading: dict[str, Any], fields: dict[str, Any]) -> wire.Read | wire.Malformed:
    body = {"source": "rack7", "readings": [{**READING, **reading}], **fields}
    codec = wire.Codec([HostMetrics], queue="scheduler.metrics.{process}")
    (found,) = codec.read(arrived(msgspec.json.encode(body), routing_key="host.metrics.rack7"), "new")
    return found


@pytest.mark.parametrize(
    ("reading", "fields", "named"),
    [
        ({"value": {}}, {}, "unknown field `value` - at `$.readings[0]`; did you mean `values`?"),
        ({"at_s": 5.0}, {}, "unknown field `at_s`"),
        ({}, {"reading": []}, "unknown field `reading`; did you mean `readings`?"),
    ],
)
def test_item_33_a_field_that_host_metrics_do_not_have_is_refused_by_name(
    reading: dict[str, Any], fields: dict[str, Any], named: str
) -> None:
    """It was passed over without a word, although operators publish them too."""
    found = read_metrics(reading, fields)
    assert isinstance(found, wire.Malformed) and found.code == wire.INVALID
    assert named in found.reason, found.reason


def test_host_metrics_have_gained_no_field() -> None:
    """A scheduler of the version before would refuse it: docs/operate/upgrade.md names the order then."""
    assert HostMetrics.__struct_fields__ == ("source", "readings")
    assert HostReading.__struct_fields__ == ("host_uuid", "at", "values")


@pytest.mark.parametrize(
    ("text", "refused"),
    [("a\x00b", True), ("\\\x00", True), ("\x00", True), ("\\u0000", False), ("\\\\u0000", False), ("u0000", False)],
)
@pytest.mark.parametrize("batched", [False, True])
def test_a_clients_text_with_a_nul_is_refused_and_its_neighbours_are_read(
    text: str, *, refused: bool, batched: bool
) -> None:
    """A build with one was carried out, and no report of its host could be compared with the records any more."""
    request = BuildRequest(instance_uuid=UUID, project_id="p", flavor="f", image=text)
    packed = [wire.pack(message, Meta(id=f"m{number}")) for number, message in enumerate((request, delete()))]
    sent = [wire.batch(packed, REPLAY, "q")] if batched else [wire.single(one, REPLAY, "q") for one in packed]
    first, second = (found for one in sent for found in read(Arrived(one)))
    assert isinstance(second, wire.Read)
    if refused:
        assert isinstance(first, wire.Malformed) and (first.code, first.reason) == (wire.INVALID, NUL_REASON)
    else:
        assert isinstance(first, wire.Read) and first.message == request


def test_an_operators_text_with_a_nul_is_refused() -> None:
    """Its reason would come into the tables of schedulers and cells, which do not take it."""
    codec = wire.Codec([SetAdminState, DrainStart], queue="scheduler.changes")
    command = SetAdminState(host="h1", state=AdminState.FENCED, reason="a\x00b", by="ann")
    for reason, is_refused in (("a\x00b", True), ("ab", False)):
        packed = wire.pack(structs.replace(command, reason=reason), Meta(id="m1"))
        (found,) = codec.read(Arrived(wire.single(packed, REPLAY, "q")), "new")
        assert isinstance(found, wire.Malformed if is_refused else wire.Read)


@pytest.mark.parametrize("attempt", [-1, MAX_ATTEMPT + 1, 2**31])
def test_an_attempt_that_no_record_can_have_is_refused_where_it_is_parsed(attempt: int) -> None:
    running: Any = {"instance_uuid": UUID, "attempt": attempt, "database_id": UUID}
    found: Any = {**running, "host_uuid": UUID, "service": "s1"}
    for kind, value in ((Running, running), (AttemptOnHost, found)):
        msgspec.convert({**value, "attempt": MAX_ATTEMPT}, kind)
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(value, kind)


@pytest.mark.parametrize("kind", [Heartbeat, HostStates])
@pytest.mark.parametrize(("epoch", "sequence"), [(MAX_EPOCH + 1, 1), (-1, 1), (1, 2**62 + 1), (1, -1)])
def test_an_epoch_that_its_service_cannot_be_told_does_not_count(kind: Any, epoch: int, sequence: int) -> None:
    """Its own messages were older than that for ever."""
    beat: Any = {"type": kind.__struct_config__.tag, "service": "s", "cell": "c", "epoch": MAX_EPOCH, "sequence": 1}
    assert (
        msgspec.convert(beat, kind).epoch
        == msgspec.convert(
            {"type": "conductor.service_superseded.v1", "service": "s", "epoch": MAX_EPOCH}, ServiceSuperseded
        ).epoch
    )
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**beat, "epoch": epoch, "sequence": sequence}, kind)


def test_the_name_of_an_image_is_bounded_where_it_is_parsed() -> None:
    """One of 256 characters was kept; the check of a host in another cell that names it is read by nobody."""
    changed = {"instance_uuid": UUID, "host_uuid": UUID, "service": "s", "attempt": 1, "change_number": 1, "done": True}
    long = {**changed, "change": "snapshot", "image": "i" * 256}
    msgspec.convert({**long, "image": "i" * 255}, MachineChanged)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(long, MachineChanged)
