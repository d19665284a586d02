"""The rows of the catalogue: of a queue, and of a message."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Any

from msgspec import Struct, structs

from bus.contracts.base import Message, tag_of
from bus.contracts.catalogue.lanes import LANE, LANES

COMMANDS = "berth"  # topic; mandatory: a command that no queue takes is an error of its publisher
EVENTS = "berth.events"  # topic; an event may have no listener
DEAD = "berth.dead"  # topic; routing key = the queue that gave the message up
GIVEN_UP = (
    "berth.given-up"  # topic; messages that the broker gives up of a queue that `keeps_keys`, under their own keys
)
DELAY = "berth.delay"  # + a delay in ms: topic; routing key = the queue that gets the message when the delay is over
RETURN = "berth.return"  # topic, for the broker alone: a delayed message goes by it to the queue that its key names
# On these three, as on the default exchange, a routing key is the name of a queue.

DEAD_LETTERS = "berth.dead-letters"  # the queue behind DEAD: what every queue of the bus gave up
DELAYED = "berth.delayed"  # + a delay in ms: the queue behind DELAY


class Where(StrEnum):
    """Which bus a message or queue lives on."""

    API = "api"
    CELL = "cell"
    BOTH = "both"


API, CELL, BOTH = Where

# The packages of the workers, and who else publishes and consumes.
SCHEDULER, PLACEMENT, CONDUCTOR = "scheduler_worker", "placement_worker", "cell_conductor"
COMPUTE, IRONIC = "compute_sim", "ironic_sync"
CLIENT, OPERATOR = "client", "operator"


class QueueKind(StrEnum):
    """How long a queue and its messages live.

    durable: quorum queue, survives the broker; delivery limit; retries and dead letters wait in the bus's own queues.
    expiring: for requests that their sender repeats: a quorum queue whose messages end after ttl_s; no delivery limit,
    no retries, no dead letters.
    private: one consumer process's own, gone with its connection; bounded, the oldest dropped.
    """

    DURABLE = "durable"
    EXPIRING = "expiring"
    PRIVATE = "private"


class QueueRow(Struct, frozen=True, kw_only=True):
    """One queue: its name (a template), the binding keys on an exchange, and its bounds.

    consumer: the package of a worker, or "operator". bindings: ((exchange, key pattern), ...); on the exchange of dead
    letters the key is the name of the queue whose letters it gets as well. retry_s: delays of the
    first, second, ... retry, each one of the bus's; after the last the message is a dead letter. delivery_limit:
    redeliveries (a consumer died or gave no answer) before the broker gives it up. max_length: messages; past it a
    publisher is refused (durable, expiring) or the oldest goes (private).
    declared_by: a worker that declares it besides its reader, so that its messages there are kept from the beginning.
    A row with `{lane}` in its bindings has a queue for each lane besides the one of its name (`queues`).
    keeps_keys: programs that are not berth's publish to it; a message of it that the broker gives up keeps its routing
    key, which the broker alone knows to be its publisher's. max_bytes: the same of their bodies; 0: not bounded. (One
    message may carry many requests; bytes go with them.) max_values: values that one message may have, by an upper
    bound (`has_more_values`); 0: not bounded.
    """

    name: str
    where: Where
    kind: QueueKind
    consumer: str
    bindings: tuple[tuple[str, str], ...]
    retry_s: tuple[float, ...] = ()
    delivery_limit: int = 20
    max_length: int = 1_000_000
    max_bytes: int = 0
    max_values: int = 0
    ttl_s: float | None = None
    declared_by: tuple[str, ...] = ()
    keeps_keys: bool = False

    @property
    def has_lanes(self) -> bool:
        """Whether there is a queue for each lane besides the one of this name."""
        return any(LANE in key for _, key in self.bindings)

    @property
    def queues(self) -> tuple[QueueRow, ...]:
        """The queues of this row, a row each: the one of its name, and those of the lanes.

        A lane has the bindings of its number and the same bounds. A retry of its messages comes back to the queue of
        the row's name, to which no project may publish.
        """
        return _queues_of(self)

    @property
    def takes_letters(self) -> bool:
        """Whether it gets copies of dead letters.

        A message that this queue gives up itself is no second letter: the first one stays.
        """
        return any(exchange == DEAD for exchange, _ in self.bindings)

    @property
    def has_clients(self) -> bool:
        """Whether programs that are not berth's publish to it, or what they published comes to it as a letter."""
        return self.keeps_keys or any(exchange == GIVEN_UP for exchange, _ in self.bindings)

    @property
    def has_letters(self) -> bool:
        """Whether a message that this queue gives up is a dead letter."""
        return self.kind is QueueKind.DURABLE and not self.takes_letters


@cache
def _queues_of(row: QueueRow) -> tuple[QueueRow, ...]:
    if not row.has_lanes:
        return (row,)
    shared = tuple((exchange, key) for exchange, key in row.bindings if LANE not in key)
    of_lanes = tuple((exchange, key) for exchange, key in row.bindings if LANE in key)
    lanes = (
        structs.replace(
            row,
            name=f"{row.name}.{lane}",
            bindings=tuple((exchange, key.replace(LANE, str(lane))) for exchange, key in of_lanes),
        )
        for lane in range(LANES)
    )
    return (structs.replace(row, bindings=shared), *lanes)


class MessageRow(Struct, frozen=True, kw_only=True):
    """One message: who may publish it, where it goes, its reply, and what makes it idempotent.

    publishers: packages of workers; "client": any program of the project that its key names; "operator": the operator's
    programs, of which the command line is one. The broker's permissions decide what a program may publish (`berth
    permissions`). batch_key: a public event on the API bus leaves twice: alone under `key`, as any program can read it,
    and with what else has gathered under this key, for listeners that read batches (a tenth of the cost under load).
    Where nothing has gathered it leaves once, as a plain message under both keys. On a cell's bus, where no other
    program listens, it leaves under this key only. max_reply_values: as a queue's `max_values`, of its reply.
    """

    message: type[Message]
    owner: str  # the package that decides about this message
    publishers: tuple[str, ...]
    where: Where
    exchange: str
    key: str
    idempotency: str
    reply: type[Message] | None = None
    max_reply_values: int = 0
    persistent: bool = True
    public: bool = False  # part of the interface for programs that are not berth's
    batch_key: str = ""
    max_batch: int = 0  # at most this many in one broker message; 0: as many as the bus's limits allow

    @property
    def tag(self) -> str:
        """The versioned tag on the wire."""
        return tag_of(self.message)

    @property
    def mandatory(self) -> bool:
        """Commands must reach a queue; events need not."""
        return self.exchange == COMMANDS


def command(
    message: type[Message], key: str, idempotency: str, *, where: Where, owner: str, by: tuple[str, ...], **options: Any
) -> MessageRow:
    """The row of a message that one queue of its bus takes. by: its publishers. options: fields of MessageRow."""
    return MessageRow(
        message=message,
        key=key,
        idempotency=idempotency,
        where=where,
        owner=owner,
        publishers=by,
        **{"exchange": COMMANDS, **options},
    )


def event(
    message: type[Message], key: str, idempotency: str, *, where: Where, by: tuple[str, ...], **options: Any
) -> MessageRow:
    """The row of a message that may have no listener. Its owner is by default its first publisher."""
    return command(message, key, idempotency, where=where, by=by, **{"owner": by[0], "exchange": EVENTS, **options})


def query(
    message: type[Message],
    reply: type[Message],
    key: str,
    *,
    owner: str = SCHEDULER,
    by: tuple[str, ...] = (OPERATOR,),
    public: bool = True,
) -> MessageRow:
    """The row of a question on the API bus, whose answer changes nothing."""
    return command(
        message, key, "reads only", where=API, owner=owner, by=by, reply=reply, persistent=False, public=public
    )
