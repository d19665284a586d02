"""The queues, a row each, with their bounds."""

from __future__ import annotations

from functools import partial
from typing import Any

from bus.contracts.catalogue.rows import (
    API,
    BOTH,
    CELL,
    COMMANDS,
    COMPUTE,
    CONDUCTOR,
    DEAD,
    EVENTS,
    GIVEN_UP,
    IRONIC,
    OPERATOR,
    PLACEMENT,
    SCHEDULER,
    QueueKind,
    QueueRow,
    Where,
)

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


def _queue(
    kind: QueueKind,
    name: str,
    consumer: str,
    where: Where,
    *,
    commands: tuple[str, ...] = (),
    events: tuple[str, ...] = (),
    letters: tuple[str, ...] = (),
    given_up: tuple[str, ...] = (),
    **options: Any,
) -> QueueRow:
    """A row by the keys that are bound to each exchange. letters: the queues whose dead letters it gets as well."""
    keys = {COMMANDS: commands, EVENTS: events, DEAD: letters, GIVEN_UP: given_up}
    bindings = tuple((exchange, key) for exchange, of_exchange in keys.items() for key in of_exchange)
    return QueueRow(kind=kind, name=name, consumer=consumer, where=where, bindings=bindings, **options)


durable = partial(_queue, QueueKind.DURABLE, retry_s=RETRY_S)
expiring = partial(_queue, QueueKind.EXPIRING, ttl_s=30.0, max_length=10_000)
private = partial(_queue, QueueKind.PRIVATE)

QUEUES: tuple[QueueRow, ...] = (
    durable(
        "scheduler.requests",
        SCHEDULER,
        API,
        commands=("build.request.{lane}.#", "build.delete.{lane}.#", "instance.move.{lane}.#"),
        max_length=MAX_WAITING_MESSAGES,
        max_bytes=MAX_WAITING_BYTES,
        keeps_keys=True,
    ),
    durable("scheduler.given_up", SCHEDULER, API, letters=("scheduler.requests",), given_up=("#",)),
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
        commands=("objects.change", "hosts.set", "hosts.forget", "services.forget", "drain.start", "drain.command"),
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
        commands=("placement.claim", "placement.claim_all", "placement.release", "placement.revert", "placement.swap"),
        max_length=100_000,
        max_values=MAX_CLAIM_VALUES,
        ttl_s=60.0,
    ),
    durable("placement.releases", PLACEMENT, API, commands=("placement.release_run",)),
    expiring(
        "placement.reads",
        PLACEMENT,
        API,
        commands=(
            "placement.changes",
            "placement.snapshot",
            "placement.locate",
            "placement.holding",
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
        commands=("inventory.update.#", "inventory.members", "inventory.forget", "inventory.released"),
        max_values=MAX_INVENTORY_VALUES,
    ),
    private("ironic.outdated.{process}", IRONIC, API, events=("inventory.outdated.{source}",), max_length=100_000),
    durable(
        "conductor.requests",
        CONDUCTOR,
        CELL,
        commands=(
            "cell.build",
            "cell.build.query",
            "cell.delete",
            "cell.move",
            "cell.move.query",
            "cell.check",
            "cell.book",
            "cell.fence",
            "cell.service.forget",
        ),
    ),
    durable("conductor.given_up", CONDUCTOR, CELL, letters=("conductor.requests",)),
    durable("conductor.results", CONDUCTOR, CELL, commands=("compute.result", "compute.changed")),
    private("conductor.hosts.{process}", CONDUCTOR, CELL, events=("compute.hosts.#",), max_length=100_000),
    private(
        "conductor.leases.{process}",
        CONDUCTOR,
        CELL,
        events=("compute.heartbeat.#", "services.digest", "services.gone", "host.fence"),
        max_length=100_000,
    ),
    durable(
        "compute.{service}",
        COMPUTE,
        CELL,
        commands=(
            "compute.spawn.{service}",
            "compute.destroy.{service}",
            "compute.change.{service}",
            "compute.find.{service}",
            "compute.marker.{service}",
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
            "compute.outdated.{service}",
            "compute.reserve.{service}",
            "compute.contested.{service}",
            "compute.released.{service}",
            "inventory.outdated.{source}",
            "inventory.taken.{source}",
        ),
        max_length=1_000,
        max_values=MAX_CONTROL_VALUES,
    ),
    private("compute.ring.{service}", COMPUTE, CELL, events=("services.ring.{ring}",), max_length=1_000),
    durable(
        "scheduler.builds",
        SCHEDULER,
        CELL,
        events=("build.event.#", BUILD_EVENTS, "instance.event.#", "host.fence"),
        declared_by=(CONDUCTOR,),
    ),
    # of its own: what is asked of placement waits for it
    durable(
        "scheduler.asks",
        SCHEDULER,
        CELL,
        events=("cell.asks",),
        max_length=MAX_WAITING_MESSAGES,
        declared_by=(CONDUCTOR,),
    ),
    private(
        "scheduler.hosts.{process}",
        SCHEDULER,
        CELL,
        events=("compute.hosts.#", "compute.waiting.#", "services.digest", "services.gone", "worker.heartbeat.#"),
        max_length=100_000,
    ),
    # of its own: a flood of numbers pushes nothing else out
    private("scheduler.metrics.{process}", SCHEDULER, BOTH, events=("host.metrics.#",), max_length=1_000),
    private(
        "client.builds.{process}", OPERATOR, API, events=("build.event.#", "instance.event.#"), max_length=1_000_000
    ),
    private("client.moves.{process}", OPERATOR, API, events=("instance.event.#",), max_length=1_000_000),
    private("client.feed.{process}", OPERATOR, API, events=(BUILD_EVENTS,), max_length=1_000_000),
    durable("client.record.{process}", OPERATOR, API, events=(BUILD_EVENTS,)),
    private("client.hosts.{process}", OPERATOR, CELL, events=("compute.hosts.#",), max_length=100_000),
    private("client.alarms.{process}", OPERATOR, CELL, events=("conductor.#",), max_length=10_000),
)
