"""Hostile input, and what each event means."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from ironic_sync.domain.effect import NO_EFFECT, Effect, effect_of
from ironic_sync.domain.notification import MAX_BODY_BYTES, Notification, Rejected, parse
from ironic_sync.source.recorded import RecordedSource
from tests.unit.ironic.world import SCENARIOS, Recording, World

UUID = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
OTHER = "05dcdb28-1788-4480-9281-af335fc32c9f"
TOKEN = "gAAAA-a-live-token"


def body(event: str, data: dict[str, Any], **inner: Any) -> bytes:
    message = {
        "message_id": "m1",
        "publisher_id": "ironic-api.host",
        "event_type": f"baremetal.{event}",
        "payload": {"ironic_object.namespace": "ironic", "ironic_object.name": "X", "ironic_object.data": data},
        "_context_request_id": "req-1",
        "_context_auth_token": TOKEN,
        **inner,
    }
    return json.dumps({"oslo.version": "2.0", "oslo.message": json.dumps(message)}).encode()


def read(event: str, **data: Any) -> Notification:
    parsed = parse(body(event, {"uuid": UUID, **data}))
    assert isinstance(parsed, Notification), parsed
    return parsed


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_recorded_message_is_understood(name: str) -> None:
    for messages in Recording(name).messages:
        for recorded, _ in messages:
            assert isinstance(parse(recorded), Notification)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (b"", "notification.malformed"),
        (b"\xff\xfe", "notification.malformed"),
        (b"{}", "notification.not_oslo"),
        (b"[]", "notification.not_oslo"),
        (b'{"a":' + b"[" * 100_000, "notification.malformed"),
        (b'{"oslo.version": "1.0", "oslo.message": "{}"}', "notification.version"),
        (b'{"oslo.version": "2.0", "oslo.message": {}}', "notification.not_oslo"),
        (b'{"oslo.version": "2.0", "oslo.message": "nope"}', "notification.malformed"),
        (b'{"oslo.version": "2.0", "oslo.message": "{}"}', "notification.invalid"),
        (b" " * (MAX_BODY_BYTES + 1), "notification.too_large"),
        (body("node.update.end", {"uuid": "../../x"}), "notification.invalid"),
        (body("node.update.end", {"uuid": UUID, "maintenance": "yes"}), "notification.invalid"),
        (body("node.update.end", {"uuid": UUID, "provision_state": 7}), "notification.invalid"),
        (body("node.update", {"uuid": UUID}), "notification.unknown_event"),
        (body("node.update.maybe", {"uuid": UUID}), "notification.unknown_event"),
        (body("x", {"uuid": UUID}, event_type="compute.instance.create.end"), "notification.unknown_event"),
    ],
)
def test_what_is_no_notification_gets_a_code(given: bytes, code: str) -> None:
    rejected = parse(given)
    assert isinstance(rejected, Rejected)
    assert rejected.code == code
    assert TOKEN not in rejected.reason


def test_a_rejected_one_keeps_its_request_id() -> None:
    rejected = parse(body("node.update.end", {"uuid": 5}))
    assert isinstance(rejected, Rejected)
    assert rejected.request_id == "req-1"


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: body(text, {})))
def test_no_bytes_raise(given: bytes) -> None:
    assert isinstance(parse(given), Notification | Rejected)


RESERVED = Effect(read=UUID, reserve_all=True)
LOOK = Effect(read=UUID)
LATER = Effect(read=UUID, announced=True)
FREE = {"provision_state": "available", "power_state": "power off", "maintenance": False, "instance_uuid": None}


@pytest.mark.parametrize(
    ("event", "data", "means"),
    [
        ("node.maintenance_set.end", {**FREE, "maintenance": True}, RESERVED),
        ("node.maintenance_set.start", {**FREE, "maintenance": True}, LATER),
        ("node.maintenance_set.error", {**FREE, "maintenance": True}, LOOK),
        ("node.maintenance_set.end", FREE, LOOK),
        ("node.update.end", {**FREE, "instance_uuid": OTHER}, RESERVED),
        ("node.update.start", {**FREE, "instance_uuid": OTHER}, LATER),
        ("node.update.error", {**FREE, "instance_uuid": OTHER}, LOOK),
        ("node.provision_set.start", {**FREE, "provision_state": "deploying"}, RESERVED),
        ("node.provision_set.error", {**FREE, "provision_state": "clean failed"}, RESERVED),
        ("node.provision_set.success", {**FREE, "provision_state": "manageable"}, RESERVED),
        ("node.provision_set.end", FREE, LOOK),
        ("node.provision_set.end", {**FREE, "provision_state": "a state of tomorrow"}, RESERVED),
        ("node.power_state_corrected.success", {**FREE, "power_state": None}, RESERVED),
        ("node.power_set.error", {**FREE, "power_state": "error"}, LOOK),
        ("node.delete.end", FREE, RESERVED),
        ("node.delete.start", FREE, LATER),
        ("node.delete.error", FREE, LOOK),
        ("node.create.end", {}, LOOK),
        ("port.update.end", {"uuid": OTHER, "node_uuid": UUID}, LOOK),
        ("allocation.delete.end", {"uuid": OTHER, "node_uuid": UUID}, LOOK),
        ("allocation.create.end", {"uuid": OTHER, "node_uuid": None}, Effect(allocation=OTHER)),
        ("allocation.create.start", {"uuid": OTHER, "node_uuid": None}, NO_EFFECT),
        ("allocation.delete.end", {"uuid": OTHER, "node_uuid": None}, NO_EFFECT),
        ("chassis.create.end", {"uuid": OTHER}, NO_EFFECT),
        ("node.update.end", {"uuid": None}, NO_EFFECT),
    ],
)
def test_effect(event: str, data: dict[str, Any], means: Effect) -> None:
    assert effect_of(read(event, **data)) == means


def test_what_is_older_than_the_last_read_only_requests_a_read() -> None:
    """17-stale-and-refused: a traits PUT announces `cleaning` after `available`."""
    stale = read("node.update.end", **{**FREE, "provision_state": "cleaning"}, updated_at="2026-11-20T07:47:10Z")
    assert effect_of(stale, seen_updated_at="2026-11-20T07:47:13.822991+00:00") == LOOK
    assert effect_of(stale, seen_updated_at="2026-11-20T07:47:10.822991+00:00") == RESERVED, "within a second: in doubt"
    assert effect_of(stale, seen_updated_at=None) == RESERVED


async def test_no_body_is_ever_logged() -> None:
    """The live token in a body reaches no log line, whatever is wrong with the message."""
    with structlog.testing.capture_logs() as lines:
        async with World(RecordedSource([])).running() as world:
            await world.settle()
            for wrong in ({"uuid": TOKEN}, {"uuid": UUID, "maintenance": TOKEN}, {"uuid": UUID}):
                for event in ("node.update.end", f"node.{TOKEN}.end", "allocation.create.end"):
                    await world.notify(body(event, wrong))
            await world.notify(TOKEN.encode())
            await world.settle()
    assert [line for line in lines if line["event"] == "ironic.rejected"]
    assert not [line for line in lines if TOKEN in json.dumps(line, default=str)]
