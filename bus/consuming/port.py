"""The operations that consumers need of a bus. `bus.bus.Bus` implements them and makes the consumers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from bus.clock import Clock
from bus.consuming.stall_watch import StallWatch
from bus.contracts.base import Message
from bus.port import Transport
from bus.publishing import Publisher
from bus.tracing.tracer import Tracer


class ConsumedBus(Protocol):
    """The bus of a consumer."""

    name: str
    clock: Clock
    rng: random.Random
    transport: Transport
    publisher: Publisher
    tracer: Tracer | None
    stall_watch: StallWatch

    async def declare(self, queue: str, **fill: str) -> str:
        """Declare a queue of the catalogue by its row's name; returns its real name."""

    async def publish_all(self, messages: Sequence[tuple[Message, str]]) -> None:
        """Publish many messages, each with its cause."""
