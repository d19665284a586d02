"""How a uuid and a queue's plan look to PostgreSQL and RabbitMQ."""

from __future__ import annotations

from uuid import UUID

import pytest

from bus.persistence.database import _uuid_bytes, _uuid_text
from bus.rabbitmq.session import _arguments
from bus.topology import QueuePlan

TEXT = "01234567-89ab-4cde-8f01-23456789abcd"


@pytest.mark.parametrize("value", [TEXT, UUID(TEXT)])
def test_a_uuid_is_its_bytes_and_comes_back_as_its_text(value: str | UUID) -> None:
    assert _uuid_text(_uuid_bytes(value)) == TEXT


@pytest.mark.parametrize("drop_head", [False, True])
@pytest.mark.parametrize("durable", [False, True])
def test_a_full_queue_drops_its_oldest_or_refuses(*, durable: bool, drop_head: bool) -> None:
    planned = QueuePlan(name="q", durable=durable, exclusive=False, max_length=3, bindings=(), drop_head=drop_head)
    arguments = _arguments(planned)
    assert arguments["x-queue-type"] == ("quorum" if durable else "classic")
    assert arguments["x-overflow"] == ("drop-head" if drop_head else "reject-publish")
