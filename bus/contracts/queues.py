"""The queues, a row each, with their bounds; and the words of their rows: exchanges, kinds."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property, partial
from typing import Any

from msgspec import Struct

COMMANDS = "berth"  # topic; mandatory: a command that no queue takes is an error of its publisher
EVENTS = "berth.events"  # topic; an event may have no listener
DEAD = "berth.dead"  # topic; routing key = the queue that gave the message up
DELAY = "berth.delay"  # + a delay in ms: topic; routing key = the queue that gets the message when the delay is over
RETURN = "berth.return"  # topic, for the broker alone: a delayed message goes by it to the queue that its key names
REPLAY = "berth.replays"  # topic, for operators alone: dead letters that go back to the queue that their key names
REPLY = "berth.replies"  # topic; routing key = the reply queue of who asked (bus.contracts.replies)
# On these, as on the default exchange, a routing key is the name of a queue. No role may write to the default
# exchange: the broker would check no key there, so that each could publish to every queue of its virtual host.

DOOR = "door.request"  # + the project: the key of the requests that gateways send on

DEAD_LETTERS = "berth.dead-letters"  # the queue behind DEAD: what every queue of the bus gave up
DELAYED = "berth.delayed"  # + a delay in ms: the queue behind DELAY


class Where(StrEnum):
    """Which bus a message or queue lives on. project: the virtual host of a project whose clients nobody trusts."""

    API = "api"
    CELL = "cell"
    BOTH = "both"
    PROJECT = "project"


API, CELL, BOTH, PROJECT = Where

# The name of a project's bus, and of its virtual host, is this and the project. No cell's name has a dot.
_PROJECT_BUS = "client."


def project_bus(project_id: str) -> str:
    """Return the name of a project's bus, which is that of its virtual host as well."""
    return _PROJECT_BUS + project_id


def is_project_bus(bus: str) -> bool:
    """Whether a bus of this name is a project's."""
    return bus.startswith(_PROJECT_BUS)


# The packages of the workers, and who else publishes and consumes.
SCHEDULER, PLACEMENT, CONDUCTOR = "scheduler_worker", "placement_worker", "cell_conductor"
COMPUTE, IRONIC, GATEWAY = "compute_agent", "ironic_sync", "gateway"
CLIENT, OPERATOR = "client", "operator"
FRONTEND = "nova_scheduler"  # a frontend of Nova publishes some of a scheduler's messages
FEED = "scheduler.feed.{process}"
QUEUES_OF_FRONTENDS = (FEED, "scheduler.metrics.{process}")  # a scheduler's, of which a frontend has its own, too


class QueueKind(StrEnum):
    """How long a queue and its messages live."""

    # a quorum queue that survives the broker, with a delivery limit; retries and dead letters wait in the bus's own
    # queues
    DURABLE = "durable"
    # for requests that their sender repeats: a quorum queue whose messages end after ttl_s; no delivery limit, no
    # retries, no dead letters
    EXPIRING = "expiring"
    PRIVATE = "private"  # one consumer process's own, gone with its connection; bounded, the oldest dropped


class QueueRow(Struct, frozen=True, kw_only=True, dict=True):
    """One queue: its name (a template), the binding keys on an exchange, and its bounds."""

    name: str
    where: Where
    kind: QueueKind
    consumer: str  # the package of a worker, or "operator"
    # ((exchange, key pattern), ...); on the exchange of dead letters the key is the name of the queue whose dead
    # letters it gets as well
    bindings: tuple[tuple[str, str], ...]
    # delays of the first, second, ... retry in seconds, each one of the bus's; after the last the message is a dead
    # letter
    retry_s: tuple[float, ...] = ()
    delivery_limit: int = 20  # redeliveries (a consumer died or gave no answer) before the broker gives it up
    # messages; past it a publisher is refused (durable, expiring) or the oldest goes (private)
    max_length: int = 1_000_000
    max_bytes: int = 0  # of bodies, as max_length (0: not bounded): one message may carry many requests
    max_values: int = 0  # values that one message may have, by an upper bound (`has_more_values`); 0: not bounded
    ttl_s: float | None = None
    # workers that declare it besides its consumer, so that its messages are kept from the beginning
    declared_by: tuple[str, ...] = ()
    # the queue that gets its retries ("": itself). One that publishers keep full refuses them, which then hold up the
    # delays of the whole bus.
    retries_to: str = ""
    # programs that are not berth's publish to it, so that less is read of one message (`bus.codec`)
    from_outside: bool = False
    single_active: bool = False  # of several consumers one gets all deliveries, until it ends
    # when it is full the oldest goes, to the queue of this name (a template); "": a publisher is refused
    drops_to: str = ""

    @cached_property
    def takes_dead_letters(self) -> bool:
        """Whether it gets copies of dead letters.

        A message that this queue gives up itself is no second dead letter: the first one stays.
        """
        return any(exchange == DEAD for exchange, _ in self.bindings)

    @cached_property
    def has_dead_letters(self) -> bool:
        """Whether a message that this queue gives up is a dead letter."""
        return (self.kind is QueueKind.DURABLE or self.name in ENDED_BY_DEAD_LETTER) and not self.takes_dead_letters


# Requests that no scheduler has taken yet. Past this a publisher is refused at once (bus.full), so that accepted
# requests are answered within seconds: some thirteen thousand requests, at two thousand a second seven seconds' work.
MAX_WAITING_BYTES = 2 * 2**20
MAX_WAITING_MESSAGES = 20_000
# The unacknowledged broker messages of each queue of requests that a scheduler has: a batch of requests that came one a
# message has so many, and of full messages two batches wait while two are under way.
REQUEST_PREFETCH = 64
MAX_REQUESTS_PER_MESSAGE = 64

# What the gateways have sent and no scheduler has taken: a fifth of a second's work, by number and by the bytes of
# usual requests. It stands before every project's next request, so it is short; past it a gateway takes turns anew.
MAX_DOOR_MESSAGES = 400
MAX_DOOR_BYTES = 512 * 1024

# What a project may have waiting before its gateway, and the events that wait for its virtual host. The broker counts
# bodies only, and the headers of a client's message may have as many bytes as a frame: so requests are few.
MAX_PROJECT_MESSAGES = 4_096
MAX_PROJECT_EVENTS = 20_000
MAX_PROJECT_BYTES = 4 * 2**20
PROJECT_TTL_S = 86_400.0

RETRY_S = (0.2, 1.0, 5.0, 20.0)  # the delays of every bus; a queue's retries take some of them
BUILD_EVENTS = "build.events"  # on a cell's bus the events of `build.event.<state>.<project>`, of all together

# Values of one message where more are legal by its fields. Each message is decoded by one call in C, during which
# nothing else runs on the loop: 18 ms for a gang's claims, 7 ms for an inventory update (and 20 to apply it). A
# scheduler sends a gang with fewer options each rather than with more providers than `MAX_GANG_PROVIDERS`.
MAX_CLAIM_VALUES = 49_152
MAX_INVENTORY_VALUES = 32_768
# Conductors send the machines to reserve in pages (`MAX_RESERVED_AT_ONCE`, 5 ms). 5,000 machines with the resources of
# one provider each have 41,000 values (11 ms), and 5,000 with those of three 81,000 (27 ms), which are refused.
MAX_CONTROL_VALUES = 57_344

# A page of hosts that were looked at, and two machines with the resources of three providers of each instance in
# question, have 31,000 values; 40,000 take 13 to 19 ms, and an answer with more is refused.
MAX_FOUND_VALUES = 40_960


def _queue(
    kind: QueueKind,
    name: str,
    consumer: str,
    where: Where,
    *,
    commands: tuple[str, ...] = (),
    events: tuple[str, ...] = (),
    dead_letters_of: tuple[str, ...] = (),
    returned: tuple[str, ...] = (),
    **options: Any,
) -> QueueRow:
    """A row by the keys that are bound to each exchange. dead_letters_of: the queues whose dead letters it gets as
    well.
    """
    keys = {COMMANDS: commands, EVENTS: events, DEAD: dead_letters_of, RETURN: returned}
    bindings = tuple((exchange, key) for exchange, of_exchange in keys.items() for key in of_exchange)
    return QueueRow(kind=kind, name=name, consumer=consumer, where=where, bindings=bindings, **options)


durable = partial(_queue, QueueKind.DURABLE, retry_s=RETRY_S)
of_requests = partial(
    durable,
    consumer=SCHEDULER,
    where=API,
    max_length=MAX_WAITING_MESSAGES,
    max_bytes=MAX_WAITING_BYTES,
    from_outside=True,
)
_expiring = partial(_queue, QueueKind.EXPIRING)
expiring = partial(_expiring, ttl_s=30.0, max_length=10_000)
of_project = partial(
    _expiring,
    consumer=GATEWAY,
    max_length=MAX_PROJECT_MESSAGES,
    max_bytes=MAX_PROJECT_BYTES,
    from_outside=True,
    single_active=True,
)
private = partial(_queue, QueueKind.PRIVATE)

REQUEST_QUEUES = ("scheduler.operators", "scheduler.requests", "scheduler.door")

QUEUES: tuple[QueueRow, ...] = (
    # Three queues of requests, which a scheduler takes beside each other: however long one is, the others do not wait.
    # Operators' (moves of drains, evacuations), and the retries of all three; that of publishers whom the operator
    # trusts; and that of gateways and the web, which is short, because what waits there stands before every project.
    of_requests("scheduler.operators", commands=("operator.request.#",)),
    of_requests(
        "scheduler.requests",
        commands=("build.request.#", "build.delete.#", "instance.action.#"),
        retries_to="scheduler.operators",
    ),
    of_requests(
        "scheduler.door",
        commands=(f"{DOOR}.#",),
        retries_to="scheduler.operators",
        max_length=MAX_DOOR_MESSAGES,
        max_bytes=MAX_DOOR_BYTES,
    ),
    durable("scheduler.dead_letters", SCHEDULER, API, dead_letters_of=REQUEST_QUEUES, from_outside=True),
    expiring(
        "scheduler.records",
        SCHEDULER,
        API,
        commands=(
            "build.query",
            "objects.query",
            "cells.query",
            "objects.log",
            "instance.query",
            "hosts.drain.query",
            "drains.query",
        ),
    ),
    # Queries that a scheduler answers from its memory. They have a queue of their own, because a database that does not
    # answer holds those of `scheduler.records` for as long as a statement may take.
    expiring(
        "scheduler.status",
        SCHEDULER,
        API,
        commands=("hosts.query", "hosts.metrics.query", "services.query", "workers.query"),
    ),
    durable(
        "scheduler.changes",
        SCHEDULER,
        API,
        commands=("objects.change", "hosts.set", "hosts.delete", "services.delete", "drain.start", "drain.command"),
        max_length=10_000,
    ),
    private(
        "scheduler.control.{process}",
        SCHEDULER,
        API,
        events=("objects.revision", "worker.heartbeat.#"),
        max_length=10_000,
    ),
    private("scheduler.feed.{process}", SCHEDULER, API, events=("placement.event.#",), max_length=100_000),
    expiring(
        "placement.requests",
        PLACEMENT,
        BOTH,
        commands=(
            "placement.claim",
            "placement.claim_all",
            "placement.release",
            "placement.restate",
            "placement.revert",
            "placement.swap",
        ),
        max_length=100_000,
        max_values=MAX_CLAIM_VALUES,
        ttl_s=60.0,
    ),
    durable("placement.releases", PLACEMENT, API, commands=("placement.release_by_owner",)),
    expiring(
        "placement.reads",
        PLACEMENT,
        API,
        commands=(
            "placement.changes",
            "placement.snapshot",
            "placement.locate",
            "placement.allocations",
            "placement.cell",
            "placement.service",
            "placement.tree",
            "placement.usage",
            "placement.group",
        ),
    ),
    private("placement.control.{process}", PLACEMENT, API, events=("objects.revision",), max_length=10_000),
    durable(
        "placement.inventory",
        PLACEMENT,
        BOTH,
        commands=("inventory.update.#", "inventory.members", "inventory.delete", "inventory.released"),
        max_values=MAX_INVENTORY_VALUES,
    ),
    private("ironic.stale.{process}", IRONIC, API, events=("inventory.stale.{reporter}",), max_length=100_000),
    durable("conductor.requests", CONDUCTOR, CELL, commands=("cell.#",)),
    durable("conductor.dead_letters", CONDUCTOR, CELL, dead_letters_of=("conductor.requests",)),
    durable("conductor.results", CONDUCTOR, CELL, commands=("compute.result", "compute.changed")),
    private("conductor.hosts.{process}", CONDUCTOR, CELL, events=("compute.hosts.#",), max_length=100_000),
    private(
        "conductor.leases.{process}",
        CONDUCTOR,
        CELL,
        events=("compute.heartbeat.#", "service_states", "services.removed", "host.fence"),
        max_length=100_000,
    ),
    # Not behind the cell's requests, of which none is taken meanwhile. One page at a time is asked for.
    private("conductor.known.{process}", CONDUCTOR, CELL, commands=("recovery.known.{process}",), max_length=16),
    durable(
        "compute.{service}",
        COMPUTE,
        CELL,
        commands=(
            "compute.spawn.{service}",
            "compute.destroy.{service}",
            "compute.change.{service}",
            "compute.machines.query.{service}",
            "compute.listing.{service}",
            "compute.barrier.{service}",
        ),
    ),
    # who has it has the service's name
    private(
        "compute.control.{service}",
        COMPUTE,
        CELL,
        events=(
            "compute.report",
            "compute.rescan.{service}",
            "compute.heartbeat.{service}",
            "compute.superseded.{service}",
            "compute.reserve.{service}",
            "compute.host_conflict.{service}",
            "compute.released.{service}",
            "inventory.stale.{reporter}",
            "inventory.conflict.{reporter}",
        ),
        max_length=1_000,
        max_values=MAX_CONTROL_VALUES,
    ),
    private("compute.ring.{service}", COMPUTE, CELL, events=("services.ring.{ring}",), max_length=1_000),
    durable(
        "scheduler.builds",
        SCHEDULER,
        CELL,
        events=(BUILD_EVENTS, "instance.event.#", "host.fence"),
        declared_by=(CONDUCTOR,),
    ),
    private(
        "scheduler.hosts.{process}",
        SCHEDULER,
        CELL,
        events=("compute.hosts.#", "compute.waiting.#", "service_states", "services.removed", "worker.heartbeat.#"),
        max_length=100_000,
    ),
    # One scheduler answers each; of one that dies before it has, another gets it.
    expiring("scheduler.recoveries", SCHEDULER, CELL, events=("cell.recovering",)),
    # of its own: a flood of numbers pushes nothing else out
    private("scheduler.metrics.{process}", SCHEDULER, BOTH, events=("host.metrics.#",), max_length=1_000),
    private(
        "client.builds.{process}", OPERATOR, API, events=("build.event.#", "instance.event.#"), max_length=1_000_000
    ),
    private("client.actions.{process}", OPERATOR, API, events=("instance.event.#",), max_length=1_000_000),
    private("client.feed.{process}", OPERATOR, API, events=("build.event.#",), max_length=1_000_000),
    private("client.nova.{process}", OPERATOR, API, events=("nova.call", "worker.heartbeat.#"), max_length=1_000),
    durable("client.record.{process}", OPERATOR, API, events=("build.event.#",)),
    # In a project's virtual host, the gateway's: clients may publish there, and neither delete nor read them.
    of_project(
        "gateway.requests",
        where=PROJECT,
        commands=("build.request.#", "build.delete.#", "instance.action.#"),
        ttl_s=PROJECT_TTL_S,
    ),
    of_project("gateway.dead_letters", where=PROJECT, dead_letters_of=("gateway.requests",)),
    of_project("gateway.queries", where=PROJECT, commands=("build.query", "instance.query"), ttl_s=30.0),
    # On the API bus, by project: so that a virtual host that is full or away holds up no other's events.
    of_project(
        "gateway.events.{project}",
        where=API,
        events=("build.event.*.{project}", "instance.event.*.{project}"),
        drops_to="gateway.missed.{project}",
        max_length=MAX_PROJECT_EVENTS,
        ttl_s=PROJECT_TTL_S,
    ),
    expiring(  # one of those that were dropped says that some were
        "gateway.missed.{project}", GATEWAY, API, returned=("gateway.missed.{project}",), max_length=1, ttl_s=None
    ),
    private("client.hosts.{process}", OPERATOR, CELL, events=("compute.hosts.#",), max_length=100_000),
    private("client.alarms.{process}", OPERATOR, CELL, events=("conductor.#",), max_length=10_000),
)

BY_QUEUE: dict[str, QueueRow] = {row.name: row for row in QUEUES}
# Queues whose dead letters another queue gets: its consumer announces the end of what they requested.
ENDED_BY_DEAD_LETTER = frozenset(key for row in QUEUES for exchange, key in row.bindings if exchange == DEAD)
# Of these, those whose consumer has on record what it has begun: that goes on without its requester.
ON_RECORD = frozenset(name for name in ENDED_BY_DEAD_LETTER if BY_QUEUE[name].where is not PROJECT)
