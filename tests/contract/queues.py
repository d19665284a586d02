"""The queues and messages of the transport's suites, and the adapters that they test."""

from __future__ import annotations

import pytest

from bus.contracts.catalogue import COMMANDS, QueueKind, QueueRow, Where
from bus.port import Outgoing, Transport

LASTING = ["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)]
EVERY_ADAPTER = pytest.mark.parametrize("kind", ["local", *LASTING])
# The socket's broker goes with its process, so there is nothing to come back to.
EVERY_ADAPTER_THAT_RECONNECTS = pytest.mark.parametrize("kind", LASTING)


def row(kind: QueueKind = QueueKind.DURABLE, **fields: object) -> QueueRow:
    given = {"name": "work", "where": Where.BOTH, "kind": kind, "consumer": "tests", "bindings": (), **fields}
    return QueueRow(**given)  # type: ignore[arg-type]


async def declare(transport: Transport, kind: QueueKind = QueueKind.DURABLE, **fields: object) -> str:
    template = row(kind, **{"bindings": ((COMMANDS, "work.#"),), **fields})
    await transport.declare_queue(template, template.name, template.bindings)
    return template.name


def command(body: bytes, key: str = "work.do", **fields: object) -> Outgoing:
    return Outgoing(exchange=COMMANDS, routing_key=key, body=body, mandatory=True, **fields)  # type: ignore[arg-type]


async def depth_is(transport: Transport, queue: str, count: int) -> bool:
    return await transport.depth(queue) == count
