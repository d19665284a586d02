"""The queues, a row each, with their bounds."""

from __future__ import annotations

from bus.contracts.catalogue.rows import COMMANDS, DEAD, EVENTS, GIVEN_UP, QueueKind, QueueRow, Where

# Requests of a lane that no scheduler has taken yet. Past this a client is refused at once (bus.full), so that accepted
# requests are answered within seconds: some thirteen thousand requests, at two thousand a second seven seconds' work.
MAX_WAITING_BYTES = 2 * 2**20
MAX_WAITING_MESSAGES = 20_000
# A scheduler takes a few hundred broker messages ahead. With few requests in each it does not take the queue's whole
# backlog into its own hands, where no bound but this one holds.
MAX_REQUESTS_PER_MESSAGE = 32

RETRY_S = (0.2, 1.0, 5.0, 20.0)  # the delays of every bus; a queue's retries take some of them
BUILD_EVENTS = "build.events"  # the events of `build.event.<state>.<project>`, in batches

# Values of one message where more are legal by its fields. Each message is decoded by one call in C, during which
# nothing else runs on the loop: 18 ms for a gang's claims, 7 ms for an inventory update (and 20 to apply it). A
# scheduler sends a gang with fewer options each rather than with more providers than `MAX_GANG_PROVIDERS`.
MAX_CLAIM_VALUES = 49_152
MAX_INVENTORY_VALUES = 32_768
# Conductors send the machines to reserve in pages (`MAX_RESERVED_AT_ONCE`, 5 ms). A conductor of the first release
# sends all machines of a page of a report: 5,000 with the resources of one provider each have 41,000 values (11 ms),
# and 5,000 with those of three 81,000 (27 ms), which are refused.
MAX_CONTROL_VALUES = 57_344

# A page of hosts that were looked at, and two machines with the resources of three providers of each instance in
# question, have 31,000 values. A compute service of the first release sends its hosts in one list: 40,000 take 13 to 19
# ms, and an answer with more is refused.
MAX_FOUND_VALUES = 40_960

QUEUES: tuple[QueueRow, ...] = (
    QueueRow(
        name="scheduler.requests",
        where=Where.API,
        kind=QueueKind.DURABLE,
        consumer="scheduler_worker",
        bindings=(
            (COMMANDS, "build.request.{lane}.#"),
            (COMMANDS, "build.delete.{lane}.#"),
            (COMMANDS, "instance.move.{lane}.#"),
        ),
        retry_s=RETRY_S,
        max_length=MAX_WAITING_MESSAGES,
        max_bytes=MAX_WAITING_BYTES,
        keeps_keys=True,
    ),
    QueueRow(
        name="scheduler.given_up",
        where=Where.API,
        kind=QueueKind.DURABLE,
        consumer="scheduler_worker",
        bindings=((DEAD, "scheduler.requests"), (GIVEN_UP, "#")),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="scheduler.records",
        where=Where.API,
        kind=QueueKind.EXPIRING,
        consumer="scheduler_worker",
        bindings=(
            (COMMANDS, "build.query"),
            (COMMANDS, "objects.query"),
            (COMMANDS, "cells.query"),
            (COMMANDS, "objects.log"),
            (COMMANDS, "instance.query"),
            (COMMANDS, "hosts.drain.query"),
            (COMMANDS, "drains.query"),
        ),
        max_length=10_000,
        ttl_s=30.0,
    ),
    # Queries that a scheduler answers from its memory. They have a queue of their own, because a database that does not
    # answer holds those of `scheduler.records` for as long as a statement may take.
    QueueRow(
        name="scheduler.status",
        where=Where.API,
        kind=QueueKind.EXPIRING,
        consumer="scheduler_worker",
        bindings=(
            (COMMANDS, "hosts.query"),
            (COMMANDS, "hosts.metrics.query"),
            (COMMANDS, "services.query"),
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
        bindings=(
            (COMMANDS, "objects.change"),
            (COMMANDS, "hosts.set"),
            (COMMANDS, "hosts.forget"),
            (COMMANDS, "services.forget"),
            (COMMANDS, "drain.start"),
            (COMMANDS, "drain.command"),
        ),
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
            (COMMANDS, "placement.claim_all"),
            (COMMANDS, "placement.release"),
            (COMMANDS, "placement.revert"),
            (COMMANDS, "placement.swap"),
        ),
        max_length=100_000,
        max_values=MAX_CLAIM_VALUES,
        ttl_s=60.0,
    ),
    QueueRow(
        name="placement.releases",
        where=Where.API,
        kind=QueueKind.DURABLE,
        consumer="placement_worker",
        bindings=((COMMANDS, "placement.release_run"),),
        retry_s=RETRY_S,
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
            (COMMANDS, "placement.holding"),
            (COMMANDS, "placement.service"),
            (COMMANDS, "placement.tree"),
            (COMMANDS, "placement.usage"),
            (COMMANDS, "placement.group"),
        ),
        max_length=10_000,
        ttl_s=30.0,
    ),
    QueueRow(
        name="placement.control.{process}",
        where=Where.API,
        kind=QueueKind.PRIVATE,
        consumer="placement_worker",
        bindings=((EVENTS, "objects.revision"),),
        max_length=10_000,
    ),
    QueueRow(
        name="placement.inventory",
        where=Where.BOTH,
        kind=QueueKind.DURABLE,
        consumer="placement_worker",
        bindings=(
            (COMMANDS, "inventory.update.#"),
            (COMMANDS, "inventory.members"),
            (COMMANDS, "inventory.forget"),
            (COMMANDS, "inventory.released"),
        ),
        max_values=MAX_INVENTORY_VALUES,
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
        bindings=(
            (COMMANDS, "cell.build"),
            (COMMANDS, "cell.build.query"),
            (COMMANDS, "cell.delete"),
            (COMMANDS, "cell.move"),
            (COMMANDS, "cell.move.query"),
            (COMMANDS, "cell.check"),
            (COMMANDS, "cell.book"),
            (COMMANDS, "cell.fence"),
            (COMMANDS, "cell.service.forget"),
        ),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="conductor.given_up",
        where=Where.CELL,
        kind=QueueKind.DURABLE,
        consumer="cell_conductor",
        bindings=((DEAD, "conductor.requests"),),
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
        bindings=(
            (EVENTS, "compute.heartbeat.#"),
            (EVENTS, "services.digest"),
            (EVENTS, "services.gone"),
            (EVENTS, "host.fence"),
        ),
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
            (COMMANDS, "compute.find.{service}"),
            (COMMANDS, "compute.marker.{service}"),
        ),
        retry_s=RETRY_S,
    ),
    QueueRow(
        name="compute.control.{service}",  # who has it has the service's name
        where=Where.CELL,
        kind=QueueKind.PRIVATE,
        consumer="compute_sim",
        bindings=(
            (EVENTS, "compute.report"),
            (EVENTS, "compute.rescan.{service}"),
            (EVENTS, "compute.heartbeat.{service}"),
            (EVENTS, "compute.outdated.{service}"),
            (EVENTS, "compute.reserve.{service}"),
            (EVENTS, "compute.contested.{service}"),
            (EVENTS, "compute.released.{service}"),
            (EVENTS, "inventory.outdated.{source}"),
            (EVENTS, "inventory.taken.{source}"),
        ),
        max_values=MAX_CONTROL_VALUES,
        max_length=1_000,
    ),
    QueueRow(
        name="compute.ring.{service}",
        where=Where.CELL,
        kind=QueueKind.PRIVATE,
        consumer="compute_sim",
        bindings=((EVENTS, "services.ring.{ring}"),),
        max_length=1_000,
    ),
    QueueRow(
        name="scheduler.builds",
        where=Where.CELL,
        kind=QueueKind.DURABLE,
        consumer="scheduler_worker",
        bindings=(
            (EVENTS, "build.event.#"),
            (EVENTS, BUILD_EVENTS),
            (EVENTS, "instance.event.#"),
            (EVENTS, "host.fence"),
            (EVENTS, "cell.asks"),
        ),
        retry_s=RETRY_S,
        declared_by=("cell_conductor",),
    ),
    QueueRow(
        name="scheduler.hosts.{process}",
        where=Where.CELL,
        kind=QueueKind.PRIVATE,
        consumer="scheduler_worker",
        bindings=(
            (EVENTS, "compute.hosts.#"),
            (EVENTS, "compute.waiting.#"),
            (EVENTS, "services.digest"),
            (EVENTS, "services.gone"),
            (EVENTS, "worker.heartbeat.#"),
        ),
        max_length=100_000,
    ),
    QueueRow(
        name="scheduler.metrics.{process}",  # of its own: a flood of numbers pushes nothing else out
        where=Where.BOTH,
        kind=QueueKind.PRIVATE,
        consumer="scheduler_worker",
        bindings=((EVENTS, "host.metrics.#"),),
        max_length=1_000,
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
