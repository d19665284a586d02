"""`transport_url` of nova.conf as the address of a bus, and settings with which the front does not start."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from berth.commands.nova import both
from berth.settings import Settings
from bus.clock import SystemClock
from bus.memory import MemoryBroker, MemoryTransport
from bus.openstack.login import KeystoneLogin
from bus.rabbitmq.address import BadBusUrl
from bus.service.environment import Environment
from bus.service.service import Service
from bus.service.settings import SettingsError
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.nova.api_config import NovaApiConfig
from scheduler_worker.nova.app import build
from scheduler_worker.nova.config import NovaConfig, as_amqp
from scheduler_worker.nova.queues import RabbitOptions

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
        ({"enabled_filters": ("ComputeFilter", "IoOpsFilter")}, "plugin.invalid"),
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


def built(config: dict[str, Any]) -> Service:
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


async def test_the_front_is_drained_before_the_book_at_which_its_calls_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []

    def part(name: str, turns: int) -> Callable[..., Service]:
        async def drain(_grace_s: float) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            ends.append(name)

        made = Service(name, clock=SystemClock())
        made.add_drain(drain)
        return lambda *_, **__: made

    monkeypatch.setattr("placement_worker.app.build", part("placement", 1))
    monkeypatch.setattr("scheduler_worker.nova.app.build", part("front", 100))
    broker = MemoryBroker(SystemClock())
    env = Environment("w1", transports=partial(MemoryTransport, broker), rng=random.Random(1))
    stop, service = asyncio.Event(), both(env, Settings())
    running = asyncio.create_task(service.run(stop))
    await service.ready.wait()
    stop.set()
    await running
    assert ends == ["front", "placement"]
