"""The queues, a row each, with their bounds."""

from __future__ import annotations

from bus.contracts.catalogue.rows import COMMANDS, DEAD, EVENTS, QueueKind, QueueRow, Where

# Requests that no scheduler has taken yet. Past this a client is refused at once (bus.full), so that what is
# accepted is answered within seconds: some thirteen thousand requests, at two thousand a second seven seconds' work.
MAX_WAITING_BYTES = 2 * 2**20
MAX_WAITING_MESSAGES = 20_000
# A scheduler takes a few hundred broker messages ahead. With few requests in each it does not take the queue's whole
# backlog into its own hands, where no bound but this one holds.
MOST_REQUESTS_A_MESSAGE = 32

RETRY_S = (0.2, 1.0, 5.0, 20.0)  # the delays of every bus; a queue's retries take some of them
BUILD_EVENTS = "build.events"  # what `build.event.<state>.<project>` says one by one, in batches

QUEUES: tuple[QueueRow, ...] = (
    QueueRow(
        name="scheduler.requests",
        where=Where.API,
        kind=QueueKind.DURABLE,
        consumer="scheduler_worker",
        bindings=((COMMANDS, "build.request.#"), (COMMANDS, "build.delete.#"), (COMMANDS, "instance.move.#")),
        retry_s=RETRY_S,
        max_length=MAX_WAITING_MESSAGES,
        max_bytes=MAX_WAITING_BYTES,
    ),
    QueueRow(
        name="scheduler.given_up",
        where=Where.API,
        kind=QueueKind.DURABLE,
        consumer="scheduler_worker",
        bindings=((DEAD, "scheduler.requests"),),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="scheduler.queries",
        where=Where.API,
        kind=QueueKind.EXPIRING,
        consumer="scheduler_worker",
        bindings=(
            (COMMANDS, "build.query"),
            (COMMANDS, "hosts.query"),
            (COMMANDS, "services.query"),
            (COMMANDS, "objects.query"),
            (COMMANDS, "objects.log"),
            (COMMANDS, "instance.query"),
            (COMMANDS, "hosts.drain.query"),
            (COMMANDS, "workers.query"),
        ),
        max_length=10_000,
        ttl_s=30.0,
    ),
    QueueRow(
        name="scheduler.changes",
        where=Where.API,
        kind=QueueKind.DURABLE,
        consumer="scheduler_worker",
        bindings=((COMMANDS, "objects.change"), (COMMANDS, "hosts.set")),
        retry_s=RETRY_S,
        max_length=10_000,
    ),
    QueueRow(
        name="scheduler.control.{process}",
        where=Where.API,
        kind=QueueKind.PRIVATE,
        consumer="scheduler_worker",
        bindings=((EVENTS, "objects.revision"), (EVENTS, "worker.heartbeat.#")),
        max_length=10_000,
    ),
    QueueRow(
        name="scheduler.feed.{process}",
        where=Where.API,
        kind=QueueKind.PRIVATE,
        consumer="scheduler_worker",
        bindings=((EVENTS, "placement.event.#"),),
        max_length=100_000,
    ),
    QueueRow(
        name="placement.requests",
        where=Where.BOTH,
        kind=QueueKind.EXPIRING,
        consumer="placement_worker",
        bindings=(
            (COMMANDS, "placement.claim"),
            (COMMANDS, "placement.release"),
            (COMMANDS, "placement.revert"),
            (COMMANDS, "placement.swap"),
        ),
        max_length=100_000,
        ttl_s=60.0,
    ),
    QueueRow(
        name="placement.reads",
        where=Where.API,
        kind=QueueKind.EXPIRING,
        consumer="placement_worker",
        bindings=(
            (COMMANDS, "placement.changes"),
            (COMMANDS, "placement.snapshot"),
            (COMMANDS, "placement.locate"),
            (COMMANDS, "placement.tree"),
            (COMMANDS, "placement.usage"),
        ),
        max_length=10_000,
        ttl_s=30.0,
    ),
    QueueRow(
        name="placement.inventory",
        where=Where.BOTH,
        kind=QueueKind.DURABLE,
        consumer="placement_worker",
        bindings=((COMMANDS, "inventory.update.#"),),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="ironic.outdated.{process}",
        where=Where.API,
        kind=QueueKind.PRIVATE,
        consumer="ironic_sync",
        bindings=((EVENTS, "inventory.outdated.{source}"),),
        max_length=100_000,
    ),
    QueueRow(
        name="conductor.requests",
        where=Where.CELL,
        kind=QueueKind.DURABLE,
        consumer="cell_conductor",
        bindings=((COMMANDS, "cell.build"), (COMMANDS, "cell.delete"), (COMMANDS, "cell.move")),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="conductor.results",
        where=Where.CELL,
        kind=QueueKind.DURABLE,
        consumer="cell_conductor",
        bindings=((COMMANDS, "compute.result"), (COMMANDS, "compute.changed")),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="conductor.hosts.{process}",
        where=Where.CELL,
        kind=QueueKind.PRIVATE,
        consumer="cell_conductor",
        bindings=((EVENTS, "compute.hosts.#"),),
        max_length=100_000,
    ),
    QueueRow(
        name="conductor.leases.{process}",
        where=Where.CELL,
        kind=QueueKind.PRIVATE,
        consumer="cell_conductor",
        bindings=((EVENTS, "compute.heartbeat.#"), (EVENTS, "services.digest")),
        max_length=100_000,
    ),
    QueueRow(
        name="compute.{service}",
        where=Where.CELL,
        kind=QueueKind.DURABLE,
        consumer="compute_sim",
        bindings=(
            (COMMANDS, "compute.spawn.{service}"),
            (COMMANDS, "compute.destroy.{service}"),
            (COMMANDS, "compute.change.{service}"),
        ),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="compute.asked.{service}",  # who has it has the service's name
        where=Where.CELL,
        kind=QueueKind.PRIVATE,
        consumer="compute_sim",
        bindings=(
            (EVENTS, "compute.report"),
            (EVENTS, "compute.heartbeat.{service}"),
            (EVENTS, "compute.outdated.{service}"),
            (EVENTS, "inventory.outdated.{source}"),
        ),
        max_length=1_000,
    ),
    QueueRow(
        name="scheduler.builds",
        where=Where.CELL,
        kind=QueueKind.DURABLE,
        consumer="scheduler_worker",
        bindings=((EVENTS, "build.event.#"), (EVENTS, BUILD_EVENTS), (EVENTS, "instance.event.#")),
        retry_s=RETRY_S,
        declared_by=("cell_conductor",),
    ),
    QueueRow(
        name="scheduler.hosts.{process}",
        where=Where.CELL,
        kind=QueueKind.PRIVATE,
        consumer="scheduler_worker",
        bindings=((EVENTS, "compute.hosts.#"), (EVENTS, "services.digest"), (EVENTS, "worker.heartbeat.#")),
        max_length=100_000,
    ),
    QueueRow(
        name="client.builds.{process}",
        where=Where.API,
        kind=QueueKind.PRIVATE,
        consumer="operator",
        bindings=((EVENTS, "build.event.#"), (EVENTS, "instance.event.#")),
        max_length=1_000_000,
    ),
    QueueRow(
        name="client.moves.{process}",
        where=Where.API,
        kind=QueueKind.PRIVATE,
        consumer="operator",
        bindings=((EVENTS, "instance.event.#"),),
        max_length=1_000_000,
    ),
    QueueRow(
        name="client.feed.{process}",
        where=Where.API,
        kind=QueueKind.PRIVATE,
        consumer="operator",
        bindings=((EVENTS, BUILD_EVENTS),),
        max_length=1_000_000,
    ),
    QueueRow(
        name="client.record.{process}",
        where=Where.API,
        kind=QueueKind.DURABLE,
        consumer="operator",
        bindings=((EVENTS, BUILD_EVENTS),),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="client.hosts.{process}",
        where=Where.CELL,
        kind=QueueKind.PRIVATE,
        consumer="operator",
        bindings=((EVENTS, "compute.hosts.#"),),
        max_length=100_000,
    ),
    QueueRow(
        name="client.alarms.{process}",
        where=Where.CELL,
        kind=QueueKind.PRIVATE,
        consumer="operator",
        bindings=((EVENTS, "conductor.#"),),
        max_length=10_000,
    ),
)
