"""Samples of what a worker publishes on a bus, one routing key of each kind: it tries these at its start."""

from __future__ import annotations

from bus.contracts.catalogue import queues_taking
from bus.contracts.publishers import message_keys, sample_of
from bus.contracts.queues import DEAD, FRONTEND, QUEUES, QUEUES_OF_FRONTENDS, REPLY, QueueKind, QueueRow, Where
from bus.contracts.replies import sample_reply_keys
from bus.topology import delay_exchange


def sample_answers(row: QueueRow) -> list[tuple[str, str]]:
    """(exchange, routing key) by which the consumer of a queue answers, parks and retries."""
    name = sample_of(row.name)
    found = [(REPLY, key) for key in sample_reply_keys(queues_taking(row.name))]
    if row.kind is QueueKind.DURABLE:
        found += [(DEAD, name), *((delay_exchange(delay_s), row.retries_to or name) for delay_s in row.retry_s)]
    return found


def sample_keys(package: str, where: Where) -> list[tuple[str, str]]:
    """The same of all that a worker publishes on a bus of this kind, with a word for each placeholder."""
    queues = [row for row in QUEUES if row.where in (where, Where.BOTH)]
    consumed = [
        row for row in queues if row.consumer == package or (package == FRONTEND and row.name in QUEUES_OF_FRONTENDS)
    ]
    found = [*message_keys(package, where), *(one for row in consumed for one in sample_answers(row))]
    return list(dict.fromkeys(found))
