"""`transport_url` of nova.conf as the address of a bus, and settings with which the front does not start."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from berth.commands.nova import both
from berth.settings import Settings
from bus.clock import SystemClock
from bus.memory import MemoryBroker, MemoryTransport
from bus.rabbitmq.address import BadBusUrl
from bus.service.environment import Environment
from bus.service.service import Service
from bus.service.settings import SettingsError
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.nova.api_config import NovaApiConfig
from scheduler_worker.nova.app import build
from scheduler_worker.nova.config import NovaConfig, as_amqp

CELL = "ce110000-0000-4000-8000-000000000001"


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
        ({"fallback_url": "h/stock"}, "bus.url"),
        ({"shadow": True}, "nova.shadow_fallback"),
        ({"api": NovaApiConfig()}, "nova.cells_unset"),
        ({"api": NovaApiConfig(cells_database="nonsense")}, "nova.cells_database"),
        ({"api": NovaApiConfig(cells_database="mysql+nodriver://h/nova_api")}, "nova.cells_database"),
    ],
)
async def test_settings_with_which_it_does_not_start(config: dict[str, Any], code: str) -> None:
    broker = MemoryBroker(SystemClock())
    env = Environment("w1", transports=partial(MemoryTransport, broker), rng=random.Random(1))
    settings = {"transport_url": "rabbit://u:p@h:5672/nova", "api": NovaApiConfig(cells={CELL: ("*",)}), **config}
    with pytest.raises(SettingsError) as refused:
        build(env, NovaConfig(**settings), SchedulerConfig())
    assert refused.value.code == code


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
