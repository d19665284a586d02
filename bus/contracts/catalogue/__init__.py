"""The catalogue: one row a message, one row a queue. Topology, permissions and the reference page are derived from it.

Two kinds of bus: the API bus, and one bus per cell. Both have the same exchanges. A placeholder in a
routing key (`{project_id}`) is a field of the message; one in a queue name (`{service}`) is given by its consumer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

from bus.contracts.base import Message
from bus.contracts.catalogue.lanes import LANE, LANES, lane_of
from bus.contracts.catalogue.messages import MESSAGES, REPLIES
from bus.contracts.catalogue.queues import (
    BUILD_EVENTS,
    MAX_REQUESTS_PER_MESSAGE,
    MAX_WAITING_BYTES,
    MAX_WAITING_MESSAGES,
    QUEUES,
    RETRY_S,
)
from bus.contracts.catalogue.rights import FORBIDDEN, OPERATORS, forbidden, operators_rights
from bus.contracts.catalogue.rows import (
    COMMANDS,
    DEAD,
    DEAD_LETTERS,
    DELAY,
    DELAYED,
    EVENTS,
    GIVEN_UP,
    RETURN,
    MessageRow,
    QueueKind,
    QueueRow,
    Where,
)

__all__ = [  # besides what is derived below
    "BUILD_EVENTS",
    "COMMANDS",
    "DEAD",
    "DEAD_LETTERS",
    "DELAY",
    "DELAYED",
    "EVENTS",
    "FORBIDDEN",
    "GIVEN_UP",
    "LANE",
    "LANES",
    "MAX_REQUESTS_PER_MESSAGE",
    "MAX_WAITING_BYTES",
    "MAX_WAITING_MESSAGES",
    "MESSAGES",
    "OPERATORS",
    "QUEUES",
    "REPLIES",
    "RETRY_S",
    "RETURN",
    "MessageRow",
    "QueueKind",
    "QueueRow",
    "Where",
    "forbidden",
    "lane_of",
    "operators_rights",
]

BY_TYPE: dict[type[Message], MessageRow] = {row.message: row for row in MESSAGES}
BY_QUEUE: dict[str, QueueRow] = {row.name: row for row in QUEUES}
# Queues whose dead letters another queue gets: its consumer announces the end of what they requested.
ENDED_BY_LETTER = frozenset(key for row in QUEUES for exchange, key in row.bindings if exchange == DEAD)
# Queues that get what the broker gives up of a queue that `keeps_keys`; their consumers park its letters.
TAKES_GIVEN_UP = frozenset(row.name for row in QUEUES if any(exchange == GIVEN_UP for exchange, _ in row.bindings))

OF_PROJECT = ".{project_id}"  # how the key template of a message ends that is bound to one project

# A project id as a word of a routing key: as it is, since the contract allows no other letters (`base.Word`).
_PROJECT = re.compile(r"[A-Za-z0-9_\-]{1,64}")
# The words before the project in the keys of clients' commands, by lane.
_OF_LANES = tuple(
    frozenset(
        row.key.removesuffix(OF_PROJECT).replace(LANE, str(lane))
        for row in MESSAGES
        if row.exchange == COMMANDS and row.key.endswith(OF_PROJECT)
    )
    for lane in range(LANES)
)


def routing_key(message: Message) -> str:
    """The routing key of a message, from its catalogue row and its own fields. KeyError: not in the catalogue."""
    form, fields = _key_of(type(message))
    key: str = form % fields(message)
    return key


def destination(message: Message) -> tuple[str, str]:
    """(exchange, routing key) under which a message leaves. KeyError: not in the catalogue.

    A message that uses an operator's rights goes to its queue itself, by the default exchange. The broker lets no
    project write there, which distinguishes it from a project's message: the two have one routing key.
    """
    if operators_rights(message):
        return "", _QUEUE_OF[type(message)]
    return BY_TYPE[type(message)].exchange, routing_key(message)


def may_come_under(message: Message, key: str) -> bool:
    """Whether a message may have been published under this key: its own, or the one under which batches of it leave.

    The broker's permissions bind a publisher to keys, never to bodies, so this is what binds a body to its publisher.
    A message that uses an operator's rights comes under no key (`destination`).
    """
    row = BY_TYPE.get(type(message))
    if row is None:
        return True
    own = key == routing_key(message) or bool(row.batch_key and key == row.batch_key)
    return own and not operators_rights(message)


def why_not_under(message: Message, key: str) -> str:
    """Why a message may not come under this key, in words."""
    own = routing_key(message)
    return forbidden(message) if key == own else f"it came under the routing key {key!r}; its own is {own!r}"


def project_of(key: str) -> str:
    """The project that the routing key of a client's command names; empty: it is no such key.

    With another lane than the project's it is none: no project may publish under it.
    """
    head, _, last = key.rpartition(".")
    return last if _PROJECT.fullmatch(last) and head in _OF_LANES[lane_of(last)] else ""


def projects_key(template: str, project_id: str) -> str:
    """A key template of one project's messages, with the project and its lane filled in."""
    return template.replace(LANE, str(lane_of(project_id))).replace(OF_PROJECT, f".{project_id}")


@cache
def _key_of(kind: type[Message]) -> tuple[str, Callable[[Message], Any]]:
    """A key template as what `%` takes: the form, and what reads the fields (every message pays for this)."""
    template = BY_TYPE[kind].key
    names = [part[1:-1] for part in template.split(".") if part.startswith("{")]
    form = ".".join("%s" if part.startswith("{") else part for part in template.split("."))
    if "lane" in names:
        readers = [_lane if name == "lane" else attrgetter(name) for name in names]
        return form, lambda message: tuple(read(message) for read in readers)
    return form, attrgetter(*names) if names else lambda _: ()


def _lane(message: Any) -> int:
    return lane_of(message.project_id)


@cache
def taken_by(queue: str) -> tuple[MessageRow, ...]:
    """The message rows that a queue's bindings admit, in catalogue order."""
    row = BY_QUEUE[queue]
    return tuple(
        message
        for message in MESSAGES
        if any(
            (exchange == message.exchange and (_admits(pattern, message.key) or pattern == message.batch_key))
            or (exchange == DEAD and message in taken_by(pattern))
            for exchange, pattern in row.bindings
        )
    )


def _admits(pattern: str, template: str) -> bool:
    """Whether a binding pattern of this catalogue (words, and `#` only at the end) takes a key template."""
    if pattern.endswith(".#"):
        head = pattern[:-2]
        return template == head or template.startswith(head + ".")
    return pattern == template


# The one queue of each message that may use an operator's rights.
_QUEUE_OF: dict[type[Message], str] = {
    kind: queue.name
    for kind in OPERATORS
    for queue in QUEUES
    if any(exchange == COMMANDS and _admits(pattern, BY_TYPE[kind].key) for exchange, pattern in queue.bindings)
}
