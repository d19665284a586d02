"""oslo.messaging's envelope: what is read of a call, what is refused, and the form of replies."""

from __future__ import annotations

import bz2
import json
import zlib
from typing import Any

import pytest

from scheduler_worker.nova import envelope
from scheduler_worker.nova.envelope import (
    MAX_CALL_BYTES,
    MAX_WORD,
    CallUnreadable,
    RemoteFault,
    encode_failure,
    encode_heartbeat,
    encode_result,
    no_such_method,
    no_valid_host,
    parse_call,
    parse_reply,
    readdressed,
    unsupported_version,
)

CALL: dict[str, Any] = {
    "method": "select_destinations",
    "version": "4.5",
    "args": {"instance_uuids": ["a"], "spec_obj": {"nova_object.name": "RequestSpec"}},
    "_msg_id": "m1",
    "_reply_q": "reply_1",
    "_timeout": 60,
    "_unique_id": "u1",
    "_context_request_id": "req-1",
    "_context_project_id": "p",
}


def enveloped(message: object, version: object = "2.0") -> bytes:
    return json.dumps({"oslo.version": version, "oslo.message": json.dumps(message)}).encode()


def inner(body: bytes) -> dict[str, Any]:
    envelope = json.loads(body)
    assert envelope.keys() == {"oslo.version", "oslo.message"} and envelope["oslo.version"] == "2.0"
    found: dict[str, Any] = json.loads(envelope["oslo.message"])
    return found


def test_a_call_is_read() -> None:
    call = parse_call(enveloped(CALL), limit_s=1800)
    assert (call.method, call.version, call.namespace) == ("select_destinations", "4.5", "")
    assert call.arguments == CALL["args"]
    assert call.context == {"request_id": "req-1", "project_id": "p"} and call.request_id == "req-1"
    assert (call.reply_queue, call.message_id, call.unique_id, call.timeout_s) == ("reply_1", "m1", "u1", 60)
    assert call.is_answered and call.limit_s == 1800 and not call.fanout


def test_a_cast_is_read() -> None:
    call = parse_call(enveloped({"method": "update_aggregates", "args": {}, "_unique_id": "u"}), fanout=True)
    assert call.fanout and not call.is_answered and call.version == "1.0"


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [(60, 60), (1.9, 1), (0, 0), (-1, 0), (None, 0), ("60", 0), ([], 0), (2**31 - 1, 1800), (2**70, 1800), (True, 1)],
)
def test_a_timeout_that_is_none_is_ignored_and_one_beyond_a_calls_limit_is_cut(timeout: object, seconds: int) -> None:
    """RabbitMQ takes no expiration of 2**32 ms, and closes the channel on which replies leave."""
    call = parse_call(enveloped({**CALL, "_timeout": timeout}))
    assert (call.timeout_s, call.patience_s) == (seconds, seconds or None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        json.dumps(CALL).encode(),  # without an envelope
        enveloped(CALL, "1.0"),
        enveloped(CALL, 2),
        enveloped([CALL]),
        enveloped(None),
        json.dumps({"oslo.version": "2.0", "oslo.message": CALL}).encode(),
        json.dumps({"oslo.version": "2.0", "oslo.message": "[" * 100_000}).encode(),
        json.dumps({"oslo.version": "2.0", "oslo.message": '{"method": "\\ud800"}'}).encode(),
        *(
            enveloped({**CALL, key: value})
            for key, value in (
                ("method", ""),
                ("method", None),
                ("method", 7),
                ("method", "x" * (MAX_WORD + 1)),
                ("version", "4.x"),
                ("version", 4.5),
                ("version", "4." * 9),
                ("args", []),
                ("args", "text"),
                ("_msg_id", {}),
                ("_reply_q", "compute.host1"),
                ("_reply_q", "amq.rabbitmq.reply-to.x"),
                ("_reply_q", "reply_" + "é" * 200),
                ("_unique_id", 1),
                ("namespace", ["baseapi"]),
            )
        ),
        b" " * (MAX_CALL_BYTES + 1),
    ],
)
def test_a_hostile_body_is_refused_with_a_code(body: bytes) -> None:
    with pytest.raises(CallUnreadable) as refused:
        parse_call(body)
    assert refused.value.code == "nova.call_unreadable"
    with pytest.raises(CallUnreadable):
        parse_reply(body if len(body) > MAX_CALL_BYTES else b"[" + body)


@pytest.mark.parametrize(
    ("compression", "compress"), [("application/x-gzip", zlib.compress), ("application/x-bz2", bz2.compress)]
)
def test_a_compressed_call_is_read_within_the_bound(compression: str, compress: Any) -> None:
    body = enveloped(CALL)
    call = parse_call(compress(body), compression=compression)
    assert call.unique_id == "u1" and call.body == body
    for hostile in (compress(b" " * (MAX_CALL_BYTES + 1)), b"none of it", compress(body)[:-40], b""):
        with pytest.raises(CallUnreadable):
            parse_call(hostile, compression=compression)
    with pytest.raises(CallUnreadable):
        parse_call(body, compression="application/zstd")


def test_of_a_call_beyond_the_bound_is_read_who_is_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "MAX_CALL_BYTES", 3000)
    hostile = {"_msg_id": "theirs", "x": '"_msg_id": "theirs"', "_reply_q": ["reply_theirs"]}
    long = {**CALL, "args": {**hostile, "properties": "x" * 3000}}
    context = {f"_context_{number}": "y" * 100 for number in range(20)}
    body = enveloped(dict.fromkeys(CALL) | long | context)
    call = parse_call(body)
    assert (call.message_id, call.reply_queue, call.unique_id) == ("m1", "reply_1", "u1")
    assert call.is_too_large and call.is_answered and call.body == b"" and not call.timeout_s
    for nobody in (body.replace(b"_msg_id", b"_msg_no"), body.replace(b"reply_1", b"compute"), body[:3100]):
        with pytest.raises(CallUnreadable):
            parse_call(nobody)


def test_a_call_that_is_readdressed_keeps_all_else_as_it_came() -> None:
    odd = json.dumps(CALL)[:-1] + ', "big": 123456789012345678901234567890, "pi": 3.10, "e": "\\u00e9\\/"}'
    body = json.dumps({"oslo.version": "2.0", "oslo.message": odd}).encode()
    message = json.loads(readdressed(body, "reply_mine"))["oslo.message"]
    assert '"big":123456789012345678901234567890' in message and '"pi":3.10' in message
    assert '"e":"\\u00e9\\/"' in message
    assert json.loads(message) == {**json.loads(odd), "_reply_q": "reply_mine"}


def test_replies_have_the_form_of_oslo_messaging() -> None:
    assert inner(encode_result("m", "u", [{"a": 1}])) == {
        "result": [{"a": 1}], "failure": None, "ending": True, "_msg_id": "m", "_unique_id": "u",
    }  # fmt: skip
    assert inner(encode_heartbeat("m", "u")) == {
        "result": None, "failure": None, "ending": False, "_msg_id": "m", "_unique_id": "u",
    }  # fmt: skip
    with pytest.raises(TypeError):
        encode_result("m", "u", object())


@pytest.mark.parametrize(
    ("fault", "module", "arguments"),
    [
        (no_valid_host("none"), "nova.exception", ["No valid host was found. none"]),
        (unsupported_version("m", "4.4", "4.5"), "oslo_messaging.rpc.dispatcher", ["4.4", "m"]),
        (no_such_method("m"), "oslo_messaging.rpc.dispatcher", ["m"]),
        (RemoteFault("ValueError", "text", module="builtins"), "builtins", ["text"]),
    ],
)
def test_a_failure_says_how_its_exception_is_made(fault: RemoteFault, module: str, arguments: list[str]) -> None:
    reply = inner(encode_failure("m", "u", fault))
    failure = json.loads(reply.pop("failure"))
    assert reply == {"result": None, "ending": True, "_msg_id": "m", "_unique_id": "u"}
    assert (failure["class"], failure["module"], failure["args"]) == (fault.class_name, module, arguments)
    assert failure["message"] == fault.message and failure["tb"] == []


def test_a_reply_of_another_server_is_read() -> None:
    body = encode_result("m", "u", None)
    reply = parse_reply(body)
    assert (reply.message_id, reply.ending, reply.body) == ("m", True, body)
    assert not parse_reply(encode_heartbeat("m", "u")).ending
