"""Names of reply queues, by requester. A reply goes by the exchange of replies, under the name of its requester's
queue. The permissions of both sides and the check of each `reply-to` come from here: a worker that published where its
user may not would lose its channel, and what others have under way on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bus.contracts.catalogue import MessageRow, queues_taking
from bus.contracts.queues import (
    CLIENT,
    COMPUTE,
    CONDUCTOR,
    FRONTEND,
    GATEWAY,
    IRONIC,
    OPERATOR,
    PLACEMENT,
    SCHEDULER,
)

REPLY_PREFIX = "berth.reply."  # + the requester's process + a random word

# How the names of a role's processes begin. All others are an operator's programs.
_PROCESSES: Mapping[str, str] = {
    PLACEMENT: "placement",
    SCHEDULER: "scheduler",
    FRONTEND: "nova",
    CONDUCTOR: "conductor",
    COMPUTE: "compute",
    IRONIC: "ironic-sync",
    GATEWAY: "gateway",
}
_OTHERS = f"(?!{'|'.join(_PROCESSES.values())})"
# Of programs that are not berth's: queues that the broker has named, whose names no other can guess, and trusted ones.
_SERVER_NAMED = r"amq\.gen-[A-Za-z0-9_-]+"
_NAMED_BY_CLIENT = r"client\.reply\.[A-Za-z0-9._-]+"


def replies_of(asker: str, prefix: str = "") -> str:
    """The pattern of the reply queues of a package that publishes, or of the operator's programs. prefix: of a bus's
    names, as a pattern.
    """
    return rf"{prefix}berth\.reply\.{_PROCESSES.get(asker, _OTHERS)}[A-Za-z0-9_-]*\.[0-9a-f]+"


def replies_to(queues: Iterable[str], prefix: str = "", foreign: str = "") -> tuple[str, ...]:
    """The patterns of the reply queues to which the consumer of these queues (names of rows) answers: those of the
    publishers of what it takes, and always an operator's. foreign: how the names of programs that are not berth's
    begin, as a pattern.
    """
    rows = [row for queue in queues for row in queues_taking(queue) if is_answered(row)]
    others = (foreign + _SERVER_NAMED, prefix + _NAMED_BY_CLIENT) if any(row.public for row in rows) else ()
    return (*(replies_of(asker, prefix) for asker in _askers(rows)), *others)


def _askers(rows: Iterable[MessageRow]) -> dict[str, None]:
    askers = dict.fromkeys(asker for row in rows for asker in (*row.publishers, OPERATOR) if asker != CLIENT)
    return askers | dict.fromkeys([FRONTEND] if SCHEDULER in askers else [])


def sample_reply_keys(rows: Sequence[MessageRow]) -> list[str]:
    """A key of each kind of reply queue to which the consumer of such messages answers."""
    rows = [row for row in rows if is_answered(row)]
    keys = [f"{REPLY_PREFIX}{_PROCESSES.get(asker, 'x')}.0" for asker in _askers(rows)]
    return [*keys, "client.reply.x"] if any(row.public for row in rows) else keys


def is_answered(row: MessageRow) -> bool:
    """Whether a publisher of such messages that names a `reply-to` gets a reply, or a refusal."""
    return row.reply is not None or (row.public and row.owner not in row.publishers)
