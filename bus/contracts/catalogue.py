"""The catalogue: one row for each message (owner, publishers, routing, reply, idempotency), and the fields that only an
operator may use. Topology, permissions, AsyncAPI and the reference page are derived from it and from
`bus.contracts.queues`. A placeholder in a routing key (`{project_id}`) is a field of the message; one in a queue name
(`{service}`) is given by its consumer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from operator import attrgetter
from typing import Any

from msgspec import Struct, structs

from bus.contracts import (
    actions,
    build,
    cell,
    drains,
    feed,
    host_metrics,
    listing,
    nova_calls,
    objects,
    operations,
    placement,
    placement_queries,
    recovery,
    waiting_builds,
    workers,
)
from bus.contracts.base import Message, Refusal, tag_of
from bus.contracts.queues import (
    API,
    BOTH,
    BUILD_EVENTS,
    BY_QUEUE,
    CELL,
    CLIENT,
    COMMANDS,
    COMPUTE,
    CONDUCTOR,
    DEAD,
    DOOR,
    EVENTS,
    GATEWAY,
    IRONIC,
    MAX_FOUND_VALUES,
    MAX_REQUESTS_PER_MESSAGE,
    OPERATOR,
    PLACEMENT,
    PROJECT,
    RETURN,
    SCHEDULER,
    Where,
)


class MessageRow(Struct, frozen=True, kw_only=True):
    """One message: who may publish it, where it goes, its reply, and what makes it idempotent."""

    message: type[Message]
    owner: str  # the package that decides about this message
    # packages of workers; "client": any program of the project that its key names; "operator": the operator's programs,
    # one of them the command line. The broker's permissions enforce it (`berth permissions`).
    publishers: tuple[str, ...]
    where: Where
    exchange: str
    key: str
    idempotency: str
    reply: type[Message] | None = None
    max_reply_values: int = 0  # as a queue's `max_values`, of its reply
    persistent: bool = True
    public: bool = False  # part of the interface for programs that are not berth's
    # on a cell's bus, where no other program listens, it leaves under this key, with those of all states and projects
    cell_key: str = ""
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


# Who says what to whom: what the rows of one way have in common.
clients_request = partial(
    command, where=API, owner=SCHEDULER, by=(CLIENT, OPERATOR, GATEWAY), public=True, max_batch=MAX_REQUESTS_PER_MESSAGE
)
operators_command = partial(command, where=API, owner=SCHEDULER, by=(OPERATOR,), public=True)
to_placement = partial(command, where=API, owner=PLACEMENT, by=(SCHEDULER,))
of_placement = partial(event, where=BOTH, by=(PLACEMENT,), persistent=False)
claims = partial(command, where=BOTH, owner=PLACEMENT, by=(SCHEDULER, CONDUCTOR), persistent=False)
conductor_to_placement = partial(command, where=BOTH, owner=PLACEMENT, by=(CONDUCTOR,), persistent=False)
placement_read = partial(query, owner=PLACEMENT, by=(SCHEDULER,), public=False)
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
        "build.request.{project_id}",
        "instance_uuid; the same uuid with other content is refused (request.duplicate)",
        reply=build.BuildAccepted,
    ),
    clients_request(build.DeleteRequest, "build.delete.{project_id}", "instance_uuid", reply=build.BuildAccepted),
    of_requests(
        build.BuildEvent,
        "build.event.{state}.{project_id}",
        "instance_uuid and sequence; a lower sequence is old",
        cell_key=BUILD_EVENTS,
    ),
    event(
        build.EventsMissed,
        "events.missed.{project_id}",
        "says that some were missed, as often as it comes",
        where=PROJECT,
        by=(GATEWAY,),
        public=True,
    ),
    query(build.BuildQuery, build.BuildPage, "build.query", by=(OPERATOR, GATEWAY)),
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
        actions.ActionRequest,
        "instance.action.{project_id}",
        "request_id; the same id with other content is refused (request.duplicate)",
        reply=actions.ActionAccepted,
    ),
    of_requests(
        actions.ActionEvent,
        "instance.event.{state}.{project_id}",
        "instance_uuid and sequence; a terminal one request_id",
    ),
    query(actions.ActionQuery, actions.ActionPage, "instance.query", by=(OPERATOR, GATEWAY)),
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
        by=(PLACEMENT, SCHEDULER, CONDUCTOR, COMPUTE, IRONIC, GATEWAY),
        persistent=False,
    ),
    query(workers.WorkersQuery, workers.WorkersPage, "workers.query"),
    event(nova_calls.NovaCall, "nova.call", "shown as often as it comes", where=API, by=(SCHEDULER,), persistent=False),
    operators_command(operations.SetAdminState, "hosts.set", "the message's id", reply=operations.AdminStateSet),
    operators_command(
        operations.DeleteHost,
        "hosts.delete",
        "the message's id; a host that is forgotten already",
        reply=operations.HostDeleted,
    ),
    operators_command(
        operations.DeleteService,
        "services.delete",
        "the message's id; a service that is forgotten already",
        reply=operations.ServiceDeleted,
    ),
    to_conductor(
        cell.CellServiceDelete,
        "cell.service.delete",
        "service; one that is forgotten already",
        reply=cell.CellServiceDeleted,
    ),
    of_conductor(cell.ServiceRemoved, "services.removed", "service and at"),
    query(operations.ServicesQuery, operations.ServicesPage, "services.query"),
    operators_command(
        objects.ObjectsChange, "objects.change", "the message's id", max_batch=1, reply=objects.ObjectsChanged
    ),
    query(objects.ObjectsQuery, objects.ObjectsPage, "objects.query"),
    query(objects.ObjectLogQuery, objects.ObjectLogPage, "objects.log"),
    query(objects.CellsQuery, objects.CellsPage, "cells.query", by=(OPERATOR, PLACEMENT)),
    event(
        objects.ObjectsRevision,
        "objects.revision",
        "revision; a lower one is old",
        where=API,
        by=(SCHEDULER,),
        persistent=False,
        public=True,
    ),
    # --- placement
    command(
        placement.InventoryUpdate,
        "inventory.update.{root_uuid}",
        "(reporter, root_uuid) and version; an older version loses",
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
        placement.ProviderTreeDelete,
        "inventory.delete",
        "root_uuid",
        persistent=False,
        reply=placement.ProviderTreeDeleted,
    ),
    claims(placement.Claim, "placement.claim", "(consumer, attempt)", reply=placement.ClaimResult),
    to_placement(
        placement.ClaimAll,
        "placement.claim_all",
        "each claim's (consumer, attempt)",
        persistent=False,
        reply=placement.ClaimAllResult,
    ),
    of_placement(placement.InventoryStale, "inventory.stale.{reporter}", "reporter, root_uuid and version"),
    claims(placement.Release, "placement.release", "consumer and attempt", reply=placement.ReleaseResult),
    to_placement(placement.ReleaseByOwner, "placement.release_by_owner", "consumer, attempt and owner"),
    claims(placement.Revert, "placement.revert", "consumer and attempt", reply=placement.RevertResult),
    claims(placement.Restate, "placement.restate", "consumer and attempt", reply=placement.RestateResult),
    claims(placement.Swap, "placement.swap", "each consumer's generation", reply=placement.SwapResult),
    placement_read(feed.ChangesRequest, feed.ChangesPage, "placement.changes", by=(SCHEDULER, OPERATOR)),
    placement_read(feed.SnapshotRequest, feed.SnapshotPage, "placement.snapshot", by=(SCHEDULER, OPERATOR)),
    placement_read(placement.LocateRequest, placement.LocatePage, "placement.locate"),
    placement_read(placement_queries.AllocationsQuery, placement_queries.AllocationsPage, "placement.allocations"),
    placement_read(placement_queries.CellConsumersQuery, placement_queries.CellConsumersPage, "placement.cell"),
    placement_read(placement_queries.ServiceHostsQuery, placement_queries.ServiceHostsPage, "placement.service"),
    placement_read(
        placement_queries.HostTreeQuery,
        placement_queries.HostTree,
        "placement.tree",
        by=(OPERATOR, SCHEDULER),
        public=True,
    ),
    placement_read(
        placement_queries.GroupMembersQuery,
        placement_queries.GroupMembersPage,
        "placement.group",
        by=(OPERATOR,),
        public=True,
    ),
    placement_read(
        placement_queries.ProjectUsageQuery,
        placement_queries.ProjectUsagePage,
        "placement.usage",
        by=(OPERATOR, SCHEDULER),
        public=True,
    ),
    of_placement(
        feed.FeedChanges, "placement.event.changes", "each change's sequence", where=API, persistent=True, public=True
    ),
    of_placement(feed.FeedHead, "placement.event.head", "sequence", where=API, public=True),
    # --- a cell's bus
    to_conductor(cell.CellBuild, "cell.build", "instance_uuid"),
    to_conductor(cell.CellBuildQuery, "cell.build.query", "instance_uuid; the answer may be published more than once"),
    to_conductor(cell.CellDelete, "cell.delete", "instance_uuid", by=(SCHEDULER, CONDUCTOR, OPERATOR)),
    to_conductor(actions.CellAction, "cell.action", "request_id"),
    to_conductor(
        actions.CellActionQuery, "cell.action.query", "request_id; the answer may be published more than once"
    ),
    to_conductor(actions.CellTransferOut, "cell.transfer", "request_id and attempt"),
    to_conductor(operations.CellFence, "cell.fence", "host_uuid and version; an older version is ignored"),
    for_operators(operations.HostFence, "host.fence", "host_uuid, version and state"),
    of_conductor(recovery.CellRecovering, "cell.recovering", "query_id"),
    to_conductor(recovery.CellKnown, "recovery.known.{process}", "query_id", persistent=False),
    to_compute(actions.ChangeMachine, "compute.change.{service}", "instance_uuid, attempt and change_number"),
    result_of_compute(actions.MachineChanged, "compute.changed", "instance_uuid, attempt and change_number"),
    to_compute(cell.Spawn, "compute.spawn.{service}", "instance_uuid and attempt"),
    to_compute(cell.Destroy, "compute.destroy.{service}", "instance_uuid and attempt"),
    to_compute(
        cell.LookUpMachines,
        "compute.machines.query.{service}",
        "a question",
        persistent=False,
        max_reply_values=MAX_FOUND_VALUES,
        reply=cell.MachineLookupResult,
    ),
    to_compute(
        listing.ListMachines,
        "compute.listing.{service}",
        "a question",
        persistent=False,
        reply=listing.MachinesPage,
    ),
    result_of_compute(cell.QueueBarrier, "compute.barrier.{service}", "epoch"),
    result_of_compute(cell.ComputeResult, "compute.result", "instance_uuid, attempt and outcome"),
    asked_of_compute(cell.ReportHosts, "compute.report", "requests a report", by=(SCHEDULER, CONDUCTOR, OPERATOR)),
    asked_of_compute(cell.RescanHosts, "compute.rescan.{service}", "requests a report"),
    of_compute(cell.HostStates, "compute.hosts.{service}", "service, epoch and sequence"),
    of_compute(cell.Heartbeat, "compute.heartbeat.{service}", "service, epoch and sequence"),
    of_compute(waiting_builds.BuildsWaiting, "compute.waiting.{service}", "replaces the one before"),
    of_conductor(cell.ServiceStates, "service_states", "cell, term, number and page"),
    of_conductor(cell.RingMembers, "services.ring.{ring}", "ring, term and number"),
    of_conductor(cell.ServiceSuperseded, "compute.superseded.{service}", "service and epoch"),
    of_placement(placement.InventoryConflict, "inventory.conflict.{reporter}", "reporter, root_uuid and owner"),
    conductor_to_placement(placement.InventoryReleased, "inventory.released", "reporter and roots", where=CELL),
    of_conductor(cell.HostConflict, "compute.host_conflict.{service}", "service, other and hosts"),
    of_conductor(cell.HostsReleased, "compute.released.{service}", "service, owner and hosts"),
    asked_of_compute(cell.ReserveMachines, "compute.reserve.{service}", "service, epoch and sequence of the report"),
    for_operators(cell.UnknownMachinesFound, "conductor.unknown_machines.{service}", "service and at"),
    for_operators(cell.BreakerTripped, "conductor.breaker.{service}", "service; a breaker that is open already"),
)

# Replies go to the asker's own queue (bus.contracts.replies); they have no row of their own.
REPLIES: tuple[type[Message], ...] = (
    Refusal,
    *{row.reply: None for row in MESSAGES if row.reply is not None},
)

BY_TYPE: dict[type[Message], MessageRow] = {row.message: row for row in MESSAGES}

FORBIDDEN = "role.forbidden"
MAX_SHOWN = 100  # characters of a value in the reason of a refusal

# {message: {field: the values that are an operator's; None: every value but the default}}. All other fields of a
# message that a project publishes are the project's.
OPERATORS: Mapping[type[Message], Mapping[str, frozenset[Any] | None]] = {
    build.BuildRequest: {
        "host": None,
        "forced": None,  # past the filters
        "image_source": None,  # an address that Ironic reads for it, with Ironic's own rights
        "volumes": None,  # an address that a node connects to
    },
    actions.ActionRequest: {
        "kind": frozenset({actions.ActionKind.MIGRATE, actions.ActionKind.LIVE_MIGRATE, actions.ActionKind.EVACUATE}),
        "image_source": None,
        "host": None,
        "forced": None,  # past the filters
        "fenced": None,  # the statement that the host is off
        "force": None,  # a machine is given up, or started, without the proof that it may be
    },
}


# {message: (field, the values that are an operator's, its default)}
_RULES = {
    kind: [(one.name, rights[one.name], one.default) for one in structs.fields(kind) if one.name in rights]
    for kind, rights in OPERATORS.items()
}


def operators_rights(message: Message) -> tuple[str, ...]:
    """The fields by which a message requests what only an operator may; empty: any project may publish it."""
    rule = _RULES.get(type(message))
    if rule is None:
        return ()
    return tuple(
        field
        for field, values, default in rule
        if (getattr(message, field) != default if values is None else getattr(message, field) in values)
    )


def forbidden(message: Message) -> str:
    """Why a project's message is refused, in words."""
    used = ", ".join(f"{field}={str(getattr(message, field))[:MAX_SHOWN]}" for field in operators_rights(message))
    return f"only an operator may request {used}"


OF_PROJECT = ".{project_id}"  # how the key template of a message ends that is bound to one project
OPERATORS_KEY = "operator.request" + OF_PROJECT  # the key of a project's message that uses an operator's rights
DOOR_KEY = DOOR + OF_PROJECT  # the key of a project's message that a gateway sends on

PLACEHOLDER = re.compile(r"\{[a-z_]+\}")

# A project id as a word of a routing key: as it is, since the contract allows no other letters (`base.Word`).
_PROJECT = re.compile(r"[A-Za-z0-9_\-]{1,64}")
# The words before the project in the keys of clients' commands.
_OF_CLIENTS = frozenset(
    row.key.removesuffix(OF_PROJECT) for row in MESSAGES if row.exchange == COMMANDS and row.key.endswith(OF_PROJECT)
)


def routing_key(message: Message) -> str:
    """The routing key of a message, from its catalogue row and its own fields. KeyError: not in the catalogue."""
    form, fields = _key_of(type(message))
    key: str = form % fields(message)
    return key


def destination(message: Message) -> tuple[str, str]:
    """(exchange, routing key) under which a message leaves. KeyError: not in the catalogue.

    A message that uses an operator's rights has a key of its own. The broker lets no project use it.
    """
    if type(message) in _RULES and operators_rights(message):
        return COMMANDS, OPERATORS_KEY.format(project_id=message.project_id)  # type: ignore[attr-defined]
    return BY_TYPE[type(message)].exchange, routing_key(message)


def door_destination(message: Message) -> tuple[str, str]:
    """(exchange, routing key) under which a gateway sends a project's message on. It uses no right of an operator."""
    return COMMANDS, DOOR_KEY.format(project_id=message.project_id)  # type: ignore[attr-defined]


def may_come_under(message: Message, key: str) -> bool:
    """Whether a message may have been published under this key: its own, that of its batches, or a gateway's. The
    broker's permissions bind a publisher to keys, never to bodies; this binds a body to its publisher.
    """
    row = BY_TYPE.get(type(message))
    if row is None or key == destination(message)[1] or (row.cell_key and key == row.cell_key):
        return True
    return GATEWAY in row.publishers and key.startswith(DOOR) and _is_from_door(message, key)


def _is_from_door(message: Message, key: str) -> bool:
    return key == door_destination(message)[1] and not operators_rights(message)


def wrong_key(message: Message, key: str) -> str:
    """Why a message may not come under another key than its own, in words."""
    return f"it came under the routing key {key!r}; its own is {routing_key(message)!r}"


def project_of(key: str) -> str:
    """The project that the routing key of a client's command names; empty: it is no such key."""
    head, _, last = key.rpartition(".")
    return last if _PROJECT.fullmatch(last) and (head == DOOR or head in _OF_CLIENTS) else ""


@cache
def _key_of(kind: type[Message]) -> tuple[str, Callable[[Message], Any]]:
    """A key template as what `%` takes: the form, and what reads the fields (every message pays for this)."""
    template = BY_TYPE[kind].key
    names = [part[1:-1] for part in template.split(".") if part.startswith("{")]
    form = ".".join("%s" if part.startswith("{") else part for part in template.split("."))
    return form, attrgetter(*names) if names else lambda _: ()


_ANY_REQUEST = {f"{key.removesuffix(OF_PROJECT)}.#" for key in (OPERATORS_KEY, DOOR_KEY)}
# {the queue that gets what another drops: that other one}
_DROPS = {row.drops_to: row.name for row in BY_QUEUE.values() if row.drops_to}


@cache
def queues_taking(queue: str) -> tuple[MessageRow, ...]:
    """The message rows that a queue's bindings admit, in catalogue order."""
    row = BY_QUEUE[queue]
    return tuple(
        message
        for message in MESSAGES
        if any(
            (exchange == message.exchange and (_admits(pattern, message.key) or pattern == message.cell_key))
            or (pattern in _ANY_REQUEST and CLIENT in message.publishers)
            or (exchange in (DEAD, RETURN) and message in queues_taking(_DROPS.get(pattern, pattern)))
            for exchange, pattern in row.bindings
        )
    )


def _admits(pattern: str, template: str) -> bool:
    """Whether a binding pattern of this catalogue (words, and `#` only at the end) takes a key template."""
    if pattern.endswith(".#"):
        head = pattern[:-2]
        return template == head or template.startswith(head + ".")
    return PLACEHOLDER.sub("*", pattern) == PLACEHOLDER.sub("*", template)
