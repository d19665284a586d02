"""What oslo.messaging sends and declares, and its settings in nova.conf."""

from __future__ import annotations

import asyncio
import bz2
import json
import random
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from berth.cli.site.nova import both
from berth.config.settings import Settings
from bus.clock import SystemClock
from bus.memory import MemoryBroker, MemoryTransport
from bus.openstack.login import KeystoneLogin
from bus.rabbitmq.address import BadBusUrl
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from bus.service.settings import SettingsError
from nova_scheduler.app import build
from nova_scheduler.cloud.api_config import NovaApiConfig
from nova_scheduler.config import NovaConfig, as_amqp
from nova_scheduler.wire import envelope
from nova_scheduler.wire.envelope import (
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
from nova_scheduler.wire.queues import RabbitOptions, fanout_queue, topic_queue
from scheduler_worker.config import SchedulerConfig

# --- oslo.messaging's envelope: what is read of a call, what is refused, and the form of replies.


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
    assert (call.timeout_s, call.answer_timeout_s) == (seconds, seconds or None)


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
    for hostile in (compress(b" " * (MAX_CALL_BYTES + 1)), b"none of it", compress(body)[:40], b""):
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
    assert call.unread == "nova.call_too_large" and call.is_answered and call.body == b"" and not call.timeout_s
    for nobody in (body.replace(b"_msg_id", b"_msg_no"), body.replace(b"reply_1", b"compute"), body[:3100]):
        with pytest.raises(CallUnreadable):
            parse_call(nobody)


@pytest.mark.parametrize(
    "body",
    [
        enveloped({**CALL, "args": {"hint": "\ud800"}}),  # JSON's text of it is ASCII: Nova's API takes it
        enveloped(CALL).replace(b"req-1", b"req-\xff"),
        enveloped(CALL, "1.0"),
        enveloped(CALL, 2),
        enveloped([CALL]),
    ],
)
def test_of_a_call_that_cannot_be_read_is_read_who_is_to_be_told(body: bytes) -> None:
    call = parse_call(body)
    assert (call.message_id, call.reply_queue, call.unique_id) == ("m1", "reply_1", "u1")
    assert call.unread == "nova.call_unreadable" and call.is_answered and call.body == b""
    with pytest.raises(CallUnreadable):
        parse_call(body.replace(b"_msg_id", b"_msg_no"))


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


# --- Queues and exchanges as oslo.messaging's rabbit driver declares them, for each of its options.


QUORUM = {"x-queue-type": "quorum"}
LIMITED = {**QUORUM, "x-delivery-limit": 3, "x-max-in-memory-length": 4, "x-max-in-memory-bytes": 5}
LIMITS = {
    "rabbit_quorum_delivery_limit": 3,
    "rabbit_quorum_max_memory_length": 4,
    "rabbit_quorum_max_memory_bytes": 5,
}
EXPIRES = {"x-expires": 1_800_000, "x-max-length": 1_000}


@pytest.mark.parametrize(
    ("options", "durable", "auto_delete", "arguments"),
    [
        ({}, False, False, {}),
        (LIMITS, False, False, {}),
        ({"amqp_durable_queues": True}, True, False, {}),
        ({"amqp_auto_delete": True}, False, True, {}),
        ({"rabbit_ha_queues": True}, False, False, {"x-ha-policy": "all"}),
        ({"rabbit_quorum_queue": True}, True, False, QUORUM),
        ({"rabbit_quorum_queue": True, **LIMITS}, True, False, LIMITED),
        ({"rabbit_transient_quorum_queue": True}, False, False, {}),
    ],
)
def test_the_queue_of_a_topic(
    options: dict[str, object], durable: bool, auto_delete: bool, arguments: dict[str, object]
) -> None:
    planned = topic_queue(msgspec.convert(options, RabbitOptions), "nova", "scheduler.h")
    assert (planned.name, planned.routing_key, planned.exchange) == ("scheduler.h", "scheduler.h", "nova")
    assert (planned.durable, planned.exchange_durable) == (durable, durable)
    assert (planned.auto_delete, planned.exchange_auto_delete) == (auto_delete, auto_delete)
    assert (planned.exchange_type, planned.arguments) == ("topic", arguments)


@pytest.mark.parametrize(
    ("options", "name", "durable", "arguments"),
    [
        ({}, "scheduler_fanout_u", False, EXPIRES),
        ({"amqp_durable_queues": True, "amqp_auto_delete": True}, "scheduler_fanout_u", False, EXPIRES),
        ({"rabbit_transient_queues_ttl": 0}, "scheduler_fanout_u", False, EXPIRES),
        ({"rabbit_ha_queues": True}, "scheduler_fanout_u", False, {"x-ha-policy": "all", **EXPIRES}),
        ({"rabbit_transient_quorum_queue": True, **LIMITS}, "scheduler_fanout_u", True, {**LIMITED, **EXPIRES}),
        (
            {"rabbit_transient_quorum_queue": True, "rabbit_stream_fanout": True},
            "scheduler_fanout",
            True,
            {"x-queue-type": "stream", "x-max-age": "1800s"},
        ),
        (
            {
                "rabbit_transient_quorum_queue": True,
                "rabbit_stream_fanout": True,
                "rabbit_transient_queues_ttl": 0,
            },
            "scheduler_fanout",
            True,
            {"x-queue-type": "stream"},
        ),
    ],
)
def test_the_queue_of_casts_to_all(
    options: dict[str, object], name: str, durable: bool, arguments: dict[str, object]
) -> None:
    planned = fanout_queue(msgspec.convert(options, RabbitOptions), "scheduler", "u")
    assert (planned.name, planned.exchange, planned.exchange_type) == (name, "scheduler_fanout", "fanout")
    assert (planned.durable, planned.exchange_durable, planned.auto_delete) == (durable, durable, False)
    assert planned.exchange_auto_delete and planned.arguments == arguments


@pytest.mark.parametrize(
    "options",
    [
        {"rabbit_ha_queues": True, "rabbit_quorum_queue": True},
        {"rabbit_ha_queues": True, "rabbit_transient_quorum_queue": True},
        {"rabbit_stream_fanout": True},
        {"rabbit_transient_queues_ttl": -1},
        {"rabbit_quorum": True},
    ],
)
def test_options_that_oslo_messaging_refuses_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, RabbitOptions)


# --- `transport_url` of nova.conf as the address of a bus, and settings with which the frontend does not start.


CELL = "ce110000-0000-4000-8000-000000000001"


def api(**fields: Any) -> NovaApiConfig:
    return NovaApiConfig(cells={CELL: ("*",)}, **fields)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("rabbit://u:p@h:5672/nova", "amqp://u:p@h:5672/nova"),
        ("rabbit://u:p@h1:5672,u:p@h2:5673/nova", "amqp://u:p@h1:5672,h2:5673/nova"),
        ("rabbit://u:p@h1,h2/nova", "amqp://u:p@h1,h2/nova"),
        ("rabbit://h:5672/", "amqp://h:5672/"),
        ("rabbit://u:p%40q%2C@[::1]:5672//", "amqp://u:p%40q%2C@[::1]:5672//"),
        ("amqps://u:p@h1,h2/nova", "amqps://u:p@h1,h2/nova"),
        ("", ""),
    ],
)
def test_an_address(given: str, wanted: str) -> None:
    assert as_amqp(given) == wanted


@pytest.mark.parametrize(
    ("given", "options", "wanted"),
    [
        ("rabbit://u:p@h:5671/nova", {}, "amqps://u:p@h:5671/nova"),
        ("rabbit://u:p@h1,u:p@[::1]/nova", {}, "amqps://u:p@h1:5672,[::1]:5672/nova"),
        (
            "rabbit://u:p@h:5671/nova",
            {"ssl_ca_file": "/a b/ca.pem", "ssl_cert_file": "/c&d.pem", "ssl_key_file": "/c.key"},
            "amqps://u:p@h:5671/nova?cacertfile=%2Fa+b%2Fca.pem&certfile=%2Fc%26d.pem&keyfile=%2Fc.key",
        ),
        ("rabbit://u:p@h:5671", {"ssl_ca_file": "/ca.pem"}, "amqps://u:p@h:5671/?cacertfile=%2Fca.pem"),
        ("amqps://u:p@h/nova?verify=verify_none", {"ssl_ca_file": "/ca.pem"}, "amqps://u:p@h/nova?verify=verify_none"),
        ("amqp://u:p@h/nova", {}, "amqp://u:p@h/nova"),
    ],
)
def test_an_address_with_tls(given: str, options: dict[str, Any], wanted: str) -> None:
    assert as_amqp(given, RabbitOptions(ssl=True, **options)) == wanted


def test_hosts_of_several_users_are_refused() -> None:
    with pytest.raises(BadBusUrl):
        as_amqp("rabbit://u:p@h1,v:p@h2/nova")


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"transport_url": ""}, "nova.transport_url"),
        ({"transport_url": "http://h/nova"}, "bus.url"),
        ({"transport_url": "rabbit://u:p@h1,v:p@h2/nova"}, "bus.url"),
        ({"fallback_url": "rabbit://v:q@h:5672/nova"}, "nova.fallback_url"),
        ({"fallback_url": "rabbit://v:q@h:5672,v:q@h2:5672/nova"}, "nova.fallback_url"),
        ({"fallback_url": "h/stock"}, "bus.url"),
        ({"transport_url": f"rabbit://u:p@h/{'v' * 128}"}, "bus.url"),
        ({"shadow": True}, "nova.shadow_fallback"),
        ({"enabled_filters": ("ComputeFilter", "OddFilter")}, "plugin.invalid"),
        ({"enabled_filters": ("ComputeFilter", "IoOpsFilter")}, "nova.cell_databases_unset"),
        ({"rabbit": RabbitOptions(ssl=True, ssl_ca_file="/nowhere/ca.pem")}, "bus.url"),
        ({"rabbit": RabbitOptions(ssl=True, ssl_key_file="/nowhere/key")}, "bus.url"),
        ({"rabbit": RabbitOptions(kombu_compression="gzip")}, "nova.rabbit_option"),
        ({"rabbit": RabbitOptions(rabbit_login_method="EXTERNAL")}, "nova.rabbit_option"),
        ({"rabbit": RabbitOptions(ssl_enforce_hostname_verification=False)}, "nova.rabbit_option"),
        ({"rabbit": RabbitOptions(ssl_enforce_fips_mode=True)}, "nova.rabbit_option"),
        ({"api": api(url="http://h:99999999/v2.1")}, "nova.api.url"),
        ({"api": api(url="http://")}, "nova.api.url"),
        ({"api": api(url="http://[::1/v2.1")}, "nova.api.url"),
        ({"api": api(token="t\u00f6ken")}, "nova.api.token"),
        ({"api": api(token="to\nken")}, "nova.api.token"),
        ({"api": api(ca_file="/nowhere/\0")}, "nova.api.ca_file"),
        (
            {"api": api(keystone=KeystoneLogin(auth_url="http://h:70000/v3", username="u"))},
            "nova.api.keystone.auth_url",
        ),
        ({"api": api(keystone=KeystoneLogin(auth_url="http://h/v3"))}, "nova.api.keystone"),
        ({"api": api(keystone=KeystoneLogin(auth_url="http://h/v3", username="\udcff"))}, "nova.api.keystone"),
        ({"api": NovaApiConfig()}, "nova.cells_unset"),
        ({"api": NovaApiConfig(cells_database="nonsense")}, "nova.cells_database"),
        ({"api": NovaApiConfig(cells_database="mysql+nodriver://h/nova_api")}, "nova.cells_database"),
    ],
)
async def test_settings_with_which_it_does_not_start(config: dict[str, Any], code: str) -> None:
    with pytest.raises(SettingsError) as refused:
        built(config)
    assert refused.value.code == code


def built(config: dict[str, Any]) -> WorkerRuntime:
    broker = MemoryBroker(SystemClock())
    env = Environment("w1", transports=partial(MemoryTransport, broker), rng=random.Random(1))
    settings = {"transport_url": "rabbit://u:p@h:5672/nova", "api": NovaApiConfig(cells={CELL: ("*",)}), **config}
    return build(env, NovaConfig(**settings), SchedulerConfig())


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("control_exchange", "x" * 128),
        ("control_exchange", "nova\n"),
        ("control_exchange", "\u00e9"),
        ("host", "h" * 246),
        ("host", "h\u00f6st"),
        ("notifications", {"versioned_notifications_topics": ["\u00e9"]}),
        ("rabbit", {"rabbit_transient_queues_ttl": 2**31 - 1}),
    ],
)
def test_a_name_that_amqp_does_not_take_is_refused(setting: str, value: object) -> None:
    """aio-pika raises ValueError when a queue is declared, which ended the process with a traceback."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({setting: value}, NovaConfig)


@pytest.mark.parametrize(
    "config",
    [
        {"enabled_filters": ("ComputeFilter", "IoOpsFilter", "Mine"), "fallback_url": "rabbit://u:p@h:5672/stock"},
        {"rabbit": RabbitOptions(heartbeat_rate=3, kombu_reconnect_delay=0.5, use_queue_manager=True, processname="x")},
    ],
)
async def test_settings_with_which_it_starts(config: dict[str, Any]) -> None:
    assert built(config)


WITH_CELLS = NovaApiConfig(cells={CELL: ("*",)}, cell_databases={CELL: "postgresql+asyncpg://h/d"})


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"enabled_filters": ("ComputeFilter", "NUMATopologyFilter")}, [["NUMATopologyFilter"]]),
        ({"enabled_filters": ("NUMATopologyFilter", "JsonFilter"), "api": WITH_CELLS}, [["JsonFilter"]]),
        ({"enabled_filters": ("NUMATopologyFilter",), "fallback_url": "rabbit://u:p@h:5672/stock"}, []),
        ({}, []),
    ],
)
async def test_a_filter_that_only_a_fallback_has_is_told_of_without_one(
    config: dict[str, Any], told: list[Any]
) -> None:
    with capture_logs() as lines:
        built(config)
    assert [list(one["filters"]) for one in lines if one["event"] == "nova.no_fallback"] == told


async def test_the_front_is_drained_before_the_book_at_which_its_calls_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []

    def part(name: str, turns: int) -> Callable[..., WorkerRuntime]:
        async def drain(_grace_s: float) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            ends.append(name)

        made = WorkerRuntime(name, clock=SystemClock())
        made.add_drain(drain)
        return lambda *_, **__: made

    monkeypatch.setattr("placement_worker.app.build", part("placement", 1))
    monkeypatch.setattr("nova_scheduler.app.build", part("front", 100))
    broker = MemoryBroker(SystemClock())
    env = Environment("w1", transports=partial(MemoryTransport, broker), rng=random.Random(1))
    stop, service = asyncio.Event(), both(env, Settings())
    running = asyncio.create_task(service.run(stop))
    await service.ready.wait()
    stop.set()
    await running
    assert ends == ["front", "placement"]
