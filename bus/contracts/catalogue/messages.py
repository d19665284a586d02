"""The messages, a row each, by the bus they live on."""

from __future__ import annotations

from functools import partial

from bus.contracts import (
    book,
    build,
    cell,
    cell_queries,
    cells,
    drains,
    feed,
    fences,
    host_metrics,
    moves,
    objects,
    operations,
    placement,
    workers,
)
from bus.contracts.base import Message, Refusal
from bus.contracts.catalogue.queues import BUILD_EVENTS, MAX_FOUND_VALUES, MAX_REQUESTS_PER_MESSAGE
from bus.contracts.catalogue.rows import (
    API,
    BOTH,
    CELL,
    CLIENT,
    COMPUTE,
    CONDUCTOR,
    IRONIC,
    OPERATOR,
    PLACEMENT,
    SCHEDULER,
    MessageRow,
    command,
    event,
    query,
)

# Who says what to whom: what the rows of one way have in common.
clients_request = partial(
    command, where=API, owner=SCHEDULER, by=(CLIENT, OPERATOR), public=True, max_batch=MAX_REQUESTS_PER_MESSAGE
)
operators_command = partial(command, where=API, owner=SCHEDULER, by=(OPERATOR,), public=True)
to_placement = partial(command, where=API, owner=PLACEMENT, by=(SCHEDULER,))
of_placement = partial(event, where=BOTH, by=(PLACEMENT,), persistent=False)
claims = partial(command, where=BOTH, owner=PLACEMENT, by=(SCHEDULER, CONDUCTOR), persistent=False)
conductor_to_placement = partial(command, where=BOTH, owner=PLACEMENT, by=(CONDUCTOR,), persistent=False)
read_of_book = partial(query, owner=PLACEMENT, by=(SCHEDULER,), public=False)
to_conductor = partial(command, where=CELL, owner=CONDUCTOR, by=(SCHEDULER,))
to_compute = partial(command, where=CELL, owner=COMPUTE, by=(CONDUCTOR,))
asked_of_compute = partial(event, where=CELL, owner=COMPUTE, by=(CONDUCTOR,), persistent=False)
result_of_compute = partial(command, where=CELL, owner=COMPUTE, by=(COMPUTE,))
of_compute = partial(event, where=CELL, by=(COMPUTE,), persistent=False)
of_conductor = partial(event, where=CELL, by=(CONDUCTOR,), persistent=False)
of_requests = partial(event, where=BOTH, owner=SCHEDULER, by=(CONDUCTOR, SCHEDULER), public=True)
for_operators = partial(event, where=CELL, by=(CONDUCTOR,), public=True)

MESSAGES: tuple[MessageRow, ...] = (
    # --- the API bus: clients
    clients_request(
        build.BuildRequest,
        "build.request.{lane}.{project_id}",
        "instance_uuid; the same uuid with other content is refused (request.duplicate)",
        reply=build.BuildAccepted,
    ),
    clients_request(
        build.DeleteRequest, "build.delete.{lane}.{project_id}", "instance_uuid", reply=build.BuildAccepted
    ),
    of_requests(
        build.BuildEvent,
        "build.event.{state}.{project_id}",
        "instance_uuid and sequence; a lower sequence is old",
        batch_key=BUILD_EVENTS,
    ),
    query(build.BuildQuery, build.BuildPage, "build.query"),
    query(build.HostsQuery, build.HostsPage, "hosts.query"),
    query(host_metrics.HostMetricsQuery, host_metrics.HostMetricsPage, "hosts.metrics.query"),
    event(
        host_metrics.HostMetrics,
        "host.metrics.{source}",
        "host, metric and time; an older number is ignored",
        where=BOTH,
        owner=SCHEDULER,
        by=(COMPUTE, IRONIC, OPERATOR),
        persistent=False,
        public=True,
    ),
    clients_request(
        moves.MoveRequest,
        "instance.move.{lane}.{project_id}",
        "request_id; the same id with other content is refused (request.duplicate)",
        by=(CLIENT, OPERATOR, SCHEDULER),
        reply=moves.MoveAccepted,
    ),
    of_requests(
        moves.MoveEvent, "instance.event.{state}.{project_id}", "instance_uuid and sequence; a terminal one request_id"
    ),
    query(moves.MoveQuery, moves.MovePage, "instance.query"),
    query(drains.DrainQuery, drains.DrainPlan, "hosts.drain.query"),
    operators_command(
        drains.DrainStart,
        "drain.start",
        "drain; a drain on record under this id is not begun again",
        max_batch=1,
        reply=drains.DrainResult,
    ),
    operators_command(drains.DrainCommand, "drain.command", "the message's id", reply=drains.DrainResult),
    query(drains.DrainsQuery, drains.DrainsPage, "drains.query"),
    event(
        workers.WorkerHeartbeat,
        "worker.heartbeat.{role}",
        "the newest one counts",
        where=BOTH,
        owner="bus",
        by=(PLACEMENT, SCHEDULER, CONDUCTOR, COMPUTE, IRONIC),
        persistent=False,
    ),
    query(workers.WorkersQuery, workers.WorkersPage, "workers.query"),
    operators_command(operations.SetAdminState, "hosts.set", "the message's id", reply=operations.AdminStateSet),
    operators_command(
        operations.ForgetHost,
        "hosts.forget",
        "the message's id; a host that is forgotten already",
        reply=operations.HostForgotten,
    ),
    operators_command(
        operations.ForgetService,
        "services.forget",
        "the message's id; a service that is forgotten already",
        reply=operations.ServiceForgotten,
    ),
    to_conductor(
        cell.ForgetServiceInCell,
        "cell.service.forget",
        "service; one that is forgotten already",
        reply=cell.ServiceForgottenInCell,
    ),
    of_conductor(cell.ServiceGone, "services.gone", "service and at"),
    query(operations.ServicesQuery, operations.ServicesPage, "services.query"),
    operators_command(
        objects.ObjectsChange, "objects.change", "the message's id", max_batch=1, reply=objects.ObjectsChanged
    ),
    query(objects.ObjectsQuery, objects.ObjectsPage, "objects.query"),
    query(objects.ObjectLogQuery, objects.ObjectLogPage, "objects.log"),
    query(cells.CellsQuery, cells.CellsPage, "cells.query", by=(OPERATOR, PLACEMENT)),
    event(
        objects.ObjectsRevision,
        "objects.revision",
        "revision; a lower one is old",
        where=API,
        by=(SCHEDULER,),
        persistent=False,
        public=True,
    ),
    # --- the resource book
    command(
        placement.InventoryUpdate,
        "inventory.update.{root_uuid}",
        "(source, root_uuid) and version; an older version loses",
        where=BOTH,
        owner=PLACEMENT,
        by=(COMPUTE, IRONIC, OPERATOR),
        public=True,
        reply=placement.InventoryResult,
    ),
    to_placement(
        placement.AggregateMembers,
        "inventory.members",
        "the members that it names",
        persistent=False,
        reply=placement.AggregateMembersSet,
    ),
    to_placement(
        placement.InventoryForget, "inventory.forget", "root_uuid", persistent=False, reply=placement.InventoryForgotten
    ),
    claims(placement.Claim, "placement.claim", "(consumer, attempt)", reply=placement.ClaimResult),
    to_placement(
        placement.ClaimAll,
        "placement.claim_all",
        "each claim's (consumer, attempt)",
        persistent=False,
        reply=placement.ClaimAllResult,
    ),
    of_placement(placement.InventoryOutdated, "inventory.outdated.{source}", "source, root_uuid and version"),
    claims(placement.Release, "placement.release", "consumer and attempt", reply=placement.ReleaseResult),
    to_placement(placement.ReleaseRun, "placement.release_run", "consumer, attempt and run"),
    claims(placement.Revert, "placement.revert", "consumer and attempt", reply=placement.RevertResult),
    claims(placement.Swap, "placement.swap", "each consumer's generation", reply=placement.SwapResult),
    read_of_book(feed.ChangesRequest, feed.ChangesPage, "placement.changes", by=(SCHEDULER, OPERATOR)),
    read_of_book(feed.SnapshotRequest, feed.SnapshotPage, "placement.snapshot", by=(SCHEDULER, OPERATOR)),
    read_of_book(placement.LocateRequest, placement.LocatePage, "placement.locate"),
    read_of_book(book.HoldingRequest, book.HoldingPage, "placement.holding"),
    read_of_book(book.ServiceHostsQuery, book.ServiceHostsPage, "placement.service"),
    read_of_book(book.HostTreeQuery, book.HostTree, "placement.tree", by=(OPERATOR, SCHEDULER), public=True),
    read_of_book(book.GroupMembersQuery, book.GroupMembersPage, "placement.group", by=(OPERATOR,), public=True),
    read_of_book(
        book.ProjectUsageQuery, book.ProjectUsagePage, "placement.usage", by=(OPERATOR, SCHEDULER), public=True
    ),
    of_placement(
        feed.FeedChanges, "placement.event.changes", "each change's sequence", where=API, persistent=True, public=True
    ),
    of_placement(feed.FeedHead, "placement.event.head", "sequence", where=API, public=True),
    # --- a cell's bus
    to_conductor(cell.CellBuild, "cell.build", "instance_uuid"),
    to_conductor(
        cell_queries.CellBuildQuery, "cell.build.query", "instance_uuid; the answer may be published more than once"
    ),
    to_conductor(cell.CellDelete, "cell.delete", "instance_uuid", by=(SCHEDULER, CONDUCTOR, OPERATOR)),
    to_conductor(moves.CellMove, "cell.move", "request_id"),
    to_conductor(moves.CellMoveQuery, "cell.move.query", "request_id; the answer may be published more than once"),
    # A conductor makes these two as well, and has the schedulers hand them on.
    to_conductor(
        moves.CellCheck, "cell.check", "order of the change; a check changes nothing", by=(SCHEDULER, CONDUCTOR)
    ),
    to_conductor(moves.CellBook, "cell.book", "consumer and attempt of the question", by=(SCHEDULER, CONDUCTOR)),
    event(moves.CellAsks, "cell.asks", "as the message in it", where=CELL, by=(CONDUCTOR,)),
    to_conductor(fences.CellFence, "cell.fence", "host_uuid and version; an older version is ignored"),
    for_operators(fences.HostFence, "host.fence", "host_uuid, version and state"),
    to_compute(moves.ChangeMachine, "compute.change.{service}", "instance_uuid, attempt and order"),
    result_of_compute(moves.MachineChanged, "compute.changed", "instance_uuid, attempt and order"),
    to_compute(cell.Spawn, "compute.spawn.{service}", "instance_uuid and attempt"),
    to_compute(cell.Destroy, "compute.destroy.{service}", "instance_uuid and attempt"),
    to_compute(
        cell.FindMachines,
        "compute.find.{service}",
        "a question",
        persistent=False,
        max_reply_values=MAX_FOUND_VALUES,
        reply=cell.MachinesFound,
    ),
    result_of_compute(cell.QueueMarker, "compute.marker.{service}", "epoch"),
    result_of_compute(cell.ComputeResult, "compute.result", "instance_uuid, attempt and outcome"),
    asked_of_compute(cell.ReportHosts, "compute.report", "requests a report", by=(SCHEDULER, CONDUCTOR, OPERATOR)),
    asked_of_compute(cell.RescanHosts, "compute.rescan.{service}", "requests a report"),
    of_compute(cell.ComputeHosts, "compute.hosts.{service}", "service, epoch and sequence"),
    of_compute(cell.Heartbeat, "compute.heartbeat.{service}", "service, epoch and sequence"),
    of_compute(cell.BuildsWaiting, "compute.waiting.{service}", "replaces the one before"),
    of_conductor(cell.ServicesDigest, "services.digest", "cell, term, number and page"),
    of_conductor(cell.RingMembers, "services.ring.{ring}", "cell, ring, term and number"),
    of_conductor(cell.ServiceOutdated, "compute.outdated.{service}", "service and epoch", by=(CONDUCTOR, SCHEDULER)),
    of_placement(placement.InventoryTaken, "inventory.taken.{source}", "source, root_uuid and owner"),
    conductor_to_placement(placement.InventoryReleased, "inventory.released", "source and roots", where=CELL),
    of_conductor(cell.HostsContested, "compute.contested.{service}", "service, other and hosts"),
    of_conductor(cell.HostsReleased, "compute.released.{service}", "service, owner and hosts"),
    asked_of_compute(cell.ReserveMachines, "compute.reserve.{service}", "service, epoch and sequence of the report"),
    for_operators(cell.MachinesUnexplained, "conductor.unexplained.{service}", "service and at"),
    for_operators(cell.BreakerTripped, "conductor.breaker.{service}", "service; a breaker that is open already"),
)

# Replies go to the asker's own queue through the default exchange; they have no row of their own.
REPLIES: tuple[type[Message], ...] = (
    Refusal,
    *{row.reply: None for row in MESSAGES if row.reply is not None},
)
