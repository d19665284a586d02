"""The catalogue: one row a message, one row a queue. Topology, permissions and docs/messages.md are derived from it.

Two kinds of bus: the API bus, and one bus per cell. Both have the same three exchanges. A placeholder in a
routing key (`{project_id}`) is a field of the message; one in a queue name (`{service}`) is given by its consumer.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any

from msgspec import Struct

from . import build, cell, placement
from .base import Message, Refusal, tag_of

COMMANDS = "berth"  # topic; mandatory: a command nobody takes is an error of its publisher
EVENTS = "berth.events"  # topic; an event may have no listener
DEAD = "berth.dead"  # topic; routing key = the queue that gave the message up


class Where(StrEnum):
    """Which bus a message or queue lives on."""

    API = "api"
    CELL = "cell"
    BOTH = "both"


class QueueKind(StrEnum):
    """How long a queue and its messages live.

    durable: quorum queue, survives the broker; delivery limit, retry and dead-letter queues beside it.
    transient: for requests whose asker asks again; gone with the broker; no retries, no dead letters.
    private: one consumer process's own, gone with its connection; bounded, the oldest dropped.
    """

    DURABLE = "durable"
    TRANSIENT = "transient"
    PRIVATE = "private"


class QueueRow(Struct, frozen=True, kw_only=True):
    """One queue: its name (a template), the binding keys on an exchange, and its bounds.

    bindings: ((exchange, key pattern), ...). retry_s: delays of the first, second, ... retry; after the last the
    message is a dead letter. delivery_limit: redeliveries (a consumer died or gave no answer) before the broker
    gives it up. max_length: messages; past it a publisher is refused (durable, transient) or the oldest goes (private).
    max_bytes: the same of their bodies; 0: not bounded. (One message may carry many requests; bytes go with them.)
    """

    name: str
    where: Where
    kind: QueueKind
    reader: str
    bindings: tuple[tuple[str, str], ...]
    retry_s: tuple[float, ...] = ()
    delivery_limit: int = 20
    max_length: int = 1_000_000
    max_bytes: int = 0
    ttl_s: float | None = None


class MessageRow(Struct, frozen=True, kw_only=True):
    """One message: who may say it, where it goes, what answers it, and what makes it idempotent.

    together: a public event on the API bus leaves twice: alone under `key`, as any program can read it, and with
    what else has gathered under this key, for listeners that read batches (a tenth of the cost under load). On a cell's
    bus, where nobody else listens, only so.
    """

    message: type[Message]
    owner: str  # the package that decides about this message
    said_by: tuple[str, ...]
    where: Where
    exchange: str
    key: str
    idempotency: str
    reply: type[Message] | None = None
    persistent: bool = True
    public: bool = False  # part of the interface for programs that are not berth's
    together: str = ""
    most: int = 0  # at most so many in one broker message; 0: as many as the bus's limits say

    @property
    def tag(self) -> str:
        """The versioned tag on the wire."""
        return tag_of(self.message)

    @property
    def mandatory(self) -> bool:
        """Commands must reach a queue; events need not."""
        return self.exchange == COMMANDS


# Requests that no scheduler has taken yet. Past this a client is refused (bus.full) and told at once, so that what is
# accepted is answered within seconds: some thirteen thousand requests, at two thousand a second seven seconds' work.
MAX_WAITING_BYTES = 2 * 2**20
MAX_WAITING_MESSAGES = 20_000
# A scheduler takes a few hundred broker messages ahead. With few requests in each it does not take the queue's whole
# backlog into its own hands, where no bound but this one holds.
MOST_REQUESTS_A_MESSAGE = 32

RETRY_S = (0.2, 1.0, 5.0, 20.0)
BUILD_EVENTS = "build.events"  # what `build.event.<state>.<project>` says one by one, in batches

QUEUES: tuple[QueueRow, ...] = (
    QueueRow(
        name="scheduler.requests",
        where=Where.API,
        kind=QueueKind.DURABLE,
        reader="scheduler_worker",
        bindings=((COMMANDS, "build.request.#"), (COMMANDS, "build.delete.#")),
        retry_s=RETRY_S,
        max_length=MAX_WAITING_MESSAGES,
        max_bytes=MAX_WAITING_BYTES,
    ),
    QueueRow(
        name="scheduler.queries",
        where=Where.API,
        kind=QueueKind.TRANSIENT,
        reader="scheduler_worker",
        bindings=((COMMANDS, "build.query"), (COMMANDS, "hosts.query")),
        max_length=10_000,
        ttl_s=30.0,
    ),
    QueueRow(
        name="scheduler.feed.{process}",
        where=Where.API,
        kind=QueueKind.PRIVATE,
        reader="scheduler_worker",
        bindings=((EVENTS, "placement.event.#"),),
        max_length=100_000,
    ),
    QueueRow(
        name="placement.requests",
        where=Where.BOTH,
        kind=QueueKind.TRANSIENT,
        reader="placement_worker",
        bindings=((COMMANDS, "placement.claim"), (COMMANDS, "placement.release"), (COMMANDS, "placement.swap")),
        max_length=100_000,
        ttl_s=60.0,
    ),
    QueueRow(
        name="placement.reads",
        where=Where.API,
        kind=QueueKind.TRANSIENT,
        reader="placement_worker",
        bindings=((COMMANDS, "placement.changes"), (COMMANDS, "placement.snapshot")),
        max_length=10_000,
        ttl_s=30.0,
    ),
    QueueRow(
        name="placement.inventory",
        where=Where.BOTH,
        kind=QueueKind.DURABLE,
        reader="placement_worker",
        bindings=((COMMANDS, "inventory.update.#"),),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="conductor.requests",
        where=Where.CELL,
        kind=QueueKind.DURABLE,
        reader="cell_conductor",
        bindings=((COMMANDS, "cell.build"), (COMMANDS, "cell.delete")),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="conductor.results",
        where=Where.CELL,
        kind=QueueKind.DURABLE,
        reader="cell_conductor",
        bindings=((COMMANDS, "compute.result"),),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="conductor.hosts.{process}",
        where=Where.CELL,
        kind=QueueKind.PRIVATE,
        reader="cell_conductor",
        bindings=((EVENTS, "compute.hosts.#"), (EVENTS, "compute.heartbeat.#")),
        max_length=100_000,
    ),
    QueueRow(
        name="compute.{service}",
        where=Where.CELL,
        kind=QueueKind.DURABLE,
        reader="compute_sim",
        bindings=((COMMANDS, "compute.spawn.{service}"), (COMMANDS, "compute.destroy.{service}")),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="compute.asked.{process}",
        where=Where.CELL,
        kind=QueueKind.PRIVATE,
        reader="compute_sim",
        bindings=((EVENTS, "compute.report"),),
        max_length=1_000,
    ),
    QueueRow(
        name="scheduler.builds",
        where=Where.CELL,
        kind=QueueKind.DURABLE,
        reader="scheduler_worker",
        bindings=((EVENTS, "build.event.#"), (EVENTS, BUILD_EVENTS)),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="scheduler.hosts.{process}",
        where=Where.CELL,
        kind=QueueKind.PRIVATE,
        reader="scheduler_worker",
        bindings=((EVENTS, "compute.hosts.#"), (EVENTS, "compute.heartbeat.#")),
        max_length=100_000,
    ),
    QueueRow(
        name="client.builds.{process}",
        where=Where.API,
        kind=QueueKind.PRIVATE,
        reader="berth",
        bindings=((EVENTS, "build.event.#"),),
        max_length=1_000_000,
    ),
    QueueRow(
        name="client.feed.{process}",
        where=Where.API,
        kind=QueueKind.PRIVATE,
        reader="berth",
        bindings=((EVENTS, BUILD_EVENTS),),
        max_length=1_000_000,
    ),
    QueueRow(
        name="client.record.{process}",
        where=Where.API,
        kind=QueueKind.DURABLE,
        reader="berth",
        bindings=((EVENTS, BUILD_EVENTS),),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="client.hosts.{process}",
        where=Where.CELL,
        kind=QueueKind.PRIVATE,
        reader="berth",
        bindings=((EVENTS, "compute.hosts.#"),),
        max_length=100_000,
    ),
)

MESSAGES: tuple[MessageRow, ...] = (
    # --- the API bus: clients
    MessageRow(
        message=build.BuildRequest,
        owner="scheduler_worker",
        said_by=("client",),
        where=Where.API,
        exchange=COMMANDS,
        key="build.request.{project_id}",
        reply=build.BuildAccepted,
        public=True,
        most=MOST_REQUESTS_A_MESSAGE,
        idempotency="instance_uuid; the same uuid with other content is refused (request.duplicate)",
    ),
    MessageRow(
        message=build.DeleteRequest,
        owner="scheduler_worker",
        said_by=("client",),
        where=Where.API,
        exchange=COMMANDS,
        key="build.delete.{project_id}",
        reply=build.BuildAccepted,
        public=True,
        most=MOST_REQUESTS_A_MESSAGE,
        idempotency="instance_uuid",
    ),
    MessageRow(
        message=build.BuildEvent,
        owner="scheduler_worker",
        said_by=("cell_conductor", "scheduler_worker"),
        where=Where.BOTH,
        exchange=EVENTS,
        key="build.event.{state}.{project_id}",
        public=True,
        together=BUILD_EVENTS,
        idempotency="instance_uuid and sequence; a lower sequence is old",
    ),
    MessageRow(
        message=build.BuildQuery,
        owner="scheduler_worker",
        said_by=("client",),
        where=Where.API,
        exchange=COMMANDS,
        key="build.query",
        reply=build.BuildPage,
        persistent=False,
        public=True,
        idempotency="reads only",
    ),
    MessageRow(
        message=build.HostsQuery,
        owner="scheduler_worker",
        said_by=("client",),
        where=Where.API,
        exchange=COMMANDS,
        key="hosts.query",
        reply=build.HostsPage,
        persistent=False,
        public=True,
        idempotency="reads only",
    ),
    # --- the resource book
    MessageRow(
        message=placement.InventoryUpdate,
        owner="placement_worker",
        said_by=("client", "compute_sim", "ironic_sync"),
        where=Where.BOTH,
        exchange=COMMANDS,
        key="inventory.update.{root_uuid}",
        reply=placement.InventoryResult,
        public=True,
        idempotency="(source, root_uuid) and version; an older version loses",
    ),
    MessageRow(
        message=placement.Claim,
        owner="placement_worker",
        said_by=("scheduler_worker", "cell_conductor"),
        where=Where.BOTH,
        exchange=COMMANDS,
        key="placement.claim",
        reply=placement.ClaimResult,
        persistent=False,
        idempotency="(consumer, attempt)",
    ),
    MessageRow(
        message=placement.Release,
        owner="placement_worker",
        said_by=("scheduler_worker", "cell_conductor"),
        where=Where.BOTH,
        exchange=COMMANDS,
        key="placement.release",
        reply=placement.ReleaseResult,
        persistent=False,
        idempotency="consumer and attempt",
    ),
    MessageRow(
        message=placement.Swap,
        owner="placement_worker",
        said_by=("scheduler_worker", "cell_conductor"),
        where=Where.BOTH,
        exchange=COMMANDS,
        key="placement.swap",
        reply=placement.SwapResult,
        persistent=False,
        idempotency="each consumer's generation",
    ),
    MessageRow(
        message=placement.ChangesRequest,
        owner="placement_worker",
        said_by=("scheduler_worker", "client"),
        where=Where.API,
        exchange=COMMANDS,
        key="placement.changes",
        reply=placement.ChangesPage,
        persistent=False,
        idempotency="reads only",
    ),
    MessageRow(
        message=placement.SnapshotRequest,
        owner="placement_worker",
        said_by=("scheduler_worker", "client"),
        where=Where.API,
        exchange=COMMANDS,
        key="placement.snapshot",
        reply=placement.SnapshotPage,
        persistent=False,
        idempotency="reads only",
    ),
    MessageRow(
        message=placement.FeedChanges,
        owner="placement_worker",
        said_by=("placement_worker",),
        where=Where.API,
        exchange=EVENTS,
        key="placement.event.changes",
        public=True,
        idempotency="each change's sequence",
    ),
    MessageRow(
        message=placement.FeedHead,
        owner="placement_worker",
        said_by=("placement_worker",),
        where=Where.API,
        exchange=EVENTS,
        key="placement.event.head",
        persistent=False,
        public=True,
        idempotency="sequence",
    ),
    # --- a cell's bus
    MessageRow(
        message=cell.CellBuild,
        owner="cell_conductor",
        said_by=("scheduler_worker",),
        where=Where.CELL,
        exchange=COMMANDS,
        key="cell.build",
        idempotency="instance_uuid",
    ),
    MessageRow(
        message=cell.CellDelete,
        owner="cell_conductor",
        said_by=("scheduler_worker",),
        where=Where.CELL,
        exchange=COMMANDS,
        key="cell.delete",
        idempotency="instance_uuid",
    ),
    MessageRow(
        message=cell.Spawn,
        owner="compute_sim",
        said_by=("cell_conductor",),
        where=Where.CELL,
        exchange=COMMANDS,
        key="compute.spawn.{service}",
        idempotency="instance_uuid and attempt",
    ),
    MessageRow(
        message=cell.Destroy,
        owner="compute_sim",
        said_by=("cell_conductor",),
        where=Where.CELL,
        exchange=COMMANDS,
        key="compute.destroy.{service}",
        idempotency="instance_uuid and attempt",
    ),
    MessageRow(
        message=cell.ComputeResult,
        owner="compute_sim",
        said_by=("compute_sim",),
        where=Where.CELL,
        exchange=COMMANDS,
        key="compute.result",
        idempotency="instance_uuid, attempt and outcome",
    ),
    MessageRow(
        message=cell.ReportHosts,
        owner="compute_sim",
        said_by=("scheduler_worker", "cell_conductor", "client"),
        where=Where.CELL,
        exchange=EVENTS,
        key="compute.report",
        persistent=False,
        idempotency="asks for a report",
    ),
    MessageRow(
        message=cell.ComputeHosts,
        owner="compute_sim",
        said_by=("compute_sim",),
        where=Where.CELL,
        exchange=EVENTS,
        key="compute.hosts.{service}",
        persistent=False,
        idempotency="service, epoch and sequence",
    ),
    MessageRow(
        message=cell.Heartbeat,
        owner="compute_sim",
        said_by=("compute_sim",),
        where=Where.CELL,
        exchange=EVENTS,
        key="compute.heartbeat.{service}",
        persistent=False,
        idempotency="service, epoch and sequence",
    ),
)

# Replies go to the asker's own queue through the default exchange; they have no row of their own.
REPLIES: tuple[type[Message], ...] = (
    Refusal,
    *{row.reply: None for row in MESSAGES if row.reply is not None},
)

BY_TYPE: dict[type[Message], MessageRow] = {row.message: row for row in MESSAGES}
BY_QUEUE: dict[str, QueueRow] = {row.name: row for row in QUEUES}


def routing_key(message: Message) -> str:
    """The routing key of a message, from its catalogue row and its own fields. KeyError: not in the catalogue."""
    form, fields = _key_of(type(message))
    key: str = form % fields(message)
    return key


@cache
def _key_of(kind: type[Message]) -> tuple[str, Callable[[Message], Any]]:
    """A key template as what `%` takes: the form, and what reads the fields (every message pays for this)."""
    template = BY_TYPE[kind].key
    names = [part[1:-1] for part in template.split(".") if part.startswith("{")]
    form = ".".join("%s" if part.startswith("{") else part for part in template.split("."))
    return form, attrgetter(*names) if names else lambda _: ()


def taken_by(queue: str) -> tuple[MessageRow, ...]:
    """The message rows that a queue's bindings admit, in catalogue order."""
    row = BY_QUEUE[queue]
    return tuple(
        message
        for message in MESSAGES
        if any(
            exchange == message.exchange and (_admits(pattern, message.key) or pattern == message.together)
            for exchange, pattern in row.bindings
        )
    )


def _admits(pattern: str, template: str) -> bool:
    """Whether a binding pattern of this catalogue (words, and `#` only at the end) takes a key template."""
    if pattern.endswith(".#"):
        head = pattern[:-2]
        return template == head or template.startswith(head + ".")
    return pattern == template
