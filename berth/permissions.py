"""The permissions of each user of a RabbitMQ, derived from the catalogue: least for every worker, operator and project.

RabbitMQ has three patterns for each user in each virtual host (configure, write, read; over names of exchanges and
queues), and two of each topic exchange (write and read; over routing and binding keys). A topic exchange without
patterns of a user's own is open to it, so every exchange that a user may touch has some.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from berth.config.settings import MEMORY, Settings
from bus.bus import API
from bus.bus_ownership import OWNERS, SHARED_DATABASE
from bus.contracts.catalogue import MESSAGES, OF_PROJECT
from bus.contracts.publishers import keys_of, published_by
from bus.contracts.queues import (
    CLIENT,
    DEAD,
    DEAD_LETTERS,
    EVENTS,
    FEED,
    FRONTEND,
    QUEUES,
    QUEUES_OF_FRONTENDS,
    REPLAY,
    REPLY,
    RETURN,
    QueueKind,
    QueueRow,
    Where,
)
from bus.contracts.replies import replies_of, replies_to
from bus.rabbitmq.address import parse_bus_url
from bus.topology import OWNER_EXCHANGE, OWNER_ID, QueueNames, delay_exchange, shared_exchanges, shared_queues
from ironic_sync.app import role_of
from nova_scheduler.config import as_amqp
from nova_scheduler.wire.envelope import REPLY_QUEUES
from nova_scheduler.wire.queues import FRONTENDS, TOPIC

# How RabbitMQ calls the default exchange. Nova's virtual host alone needs it, as oslo.messaging replies by it.
DEFAULT_EXCHANGE = "amq.default"
# Queues that the broker names, which no client can choose: names that begin so are reserved, for exchanges too.
SERVER_NAMED = r"amq\.gen-[A-Za-z0-9_-]+"
NOTHING = "^$"

# A word in place of a placeholder (`base.Word`), and what a binding may have there.
WORD = "[A-Za-z0-9_-]+"
ONE_OR_ANY = r"(\*|[a-z_]+)"


class PermissionRole(StrEnum):
    """The purpose of a user of the broker. Conductor and compute are of one cell each."""

    PLACEMENT = "placement"
    SCHEDULER = "scheduler"
    CONDUCTOR = "conductor"
    COMPUTE = "compute"
    IRONIC_SYNC = "ironic-sync"
    GATEWAY = "gateway"
    IRONIC = "ironic"
    NOVA_SCHEDULER = "nova-scheduler"
    OPERATOR = "operator"
    PUBLISHER = "publisher"


# The name of a role in the catalogue, and the kinds of bus it enters.
_CATALOGUE: dict[PermissionRole, tuple[str, tuple[Where, ...]]] = {
    PermissionRole.PLACEMENT: ("placement_worker", (Where.API, Where.CELL)),
    PermissionRole.SCHEDULER: ("scheduler_worker", (Where.API, Where.CELL)),
    PermissionRole.CONDUCTOR: ("cell_conductor", (Where.CELL,)),
    PermissionRole.COMPUTE: ("compute_agent", (Where.CELL,)),
    PermissionRole.IRONIC_SYNC: ("ironic_sync", (Where.API,)),
    PermissionRole.GATEWAY: ("gateway", (Where.API,)),
    PermissionRole.OPERATOR: ("operator", (Where.API, Where.CELL)),
    PermissionRole.PUBLISHER: (CLIENT, (Where.API,)),
}
OF_A_CELL = (PermissionRole.CONDUCTOR, PermissionRole.COMPUTE)
# The roles that declare a bus's shared topology. To make a queue of delayed messages is to be allowed to read it
# (RabbitMQ requires that where a queue has a dead-letter exchange), so the others find it there: there are many of
# them, on every host one.
MAKERS = (PermissionRole.PLACEMENT, PermissionRole.SCHEDULER, PermissionRole.CONDUCTOR, PermissionRole.OPERATOR)
# The operator's load runs watch the feed as a scheduler does.
_WATCHED = (FEED,)


class BusLocation(Struct, frozen=True):
    """Where a bus is: its broker, its virtual host, and what stands before its names."""

    broker: str
    vhost: str
    prefix: str


class Topic(Struct, frozen=True):
    """The keys that a user may publish to and bind from one topic exchange."""

    write: str
    read: str


class Grant(Struct, frozen=True, kw_only=True):
    """All that one user may do in one virtual host."""

    role: str
    user: str
    broker: str
    vhost: str
    configure: str
    write: str
    read: str
    topics: dict[str, Topic]


class _Allowed:
    """Patterns as they gather: a user may have several buses in one virtual host."""

    def __init__(self) -> None:
        self.configure: dict[str, None] = {}
        self.write: dict[str, None] = {}
        self.read: dict[str, None] = {}
        self.topics: dict[str, tuple[dict[str, None], dict[str, None]]] = defaultdict(lambda: ({}, {}))

    def allow_ownership(self, name: str) -> None:
        """A queue (a pattern) to declare, bind and consume."""
        for patterns in (self.configure, self.write, self.read):
            patterns[name] = None

    def allow_publish(self, exchange: str, key: str) -> None:
        self.write[_literal(exchange)] = None
        self.topics[exchange][0][key] = None

    def allow_bind(self, exchange: str, key: str) -> None:
        self.read[_literal(exchange)] = None
        self.topics[exchange][1][key] = None

    def allow_route(self, exchange: str) -> None:
        """To name it as a dead-letter or alternate exchange, which takes a permission to write, though to no key."""
        self.write[_literal(exchange)] = None
        _ = self.topics[exchange]

    def grant(self, role: str, user: str, broker: str, vhost: str) -> Grant:
        return Grant(
            role=role,
            user=user,
            broker=broker,
            vhost=vhost,
            configure=_any_of(self.configure),
            write=_any_of(self.write),
            read=_any_of(self.read),
            topics={exchange: Topic(_any_of(write), _any_of(read)) for exchange, (write, read) in self.topics.items()},
        )


def bus_locations(settings: Settings) -> dict[str, BusLocation]:
    """Where every bus of these settings is. Where they name no broker: virtual hosts `berth`, and one a cell."""
    buses = {API: (settings.bus.url, settings.bus.prefix)}
    for name, cell in settings.cells.items():
        shares = not cell.url and settings.bus.url != MEMORY
        url = cell.url or settings.bus.url
        buses[name] = (url, (cell.prefix or f"{settings.bus.prefix}{name}.") if shares else cell.prefix)
    return {name: _bus_location("berth" if name == API else name, *bus) for name, bus in buses.items()}


def of_role(
    role: PermissionRole, settings: Settings, *, cell: str | None = None, user: str | None = None
) -> list[Grant]:
    """The grants of one role; conductor and compute: of one cell's, or of each; nova-scheduler: none where no Nova is
    set. user: instead of its usual name.
    """
    where = bus_locations(settings)
    if role is PermissionRole.IRONIC:
        return [_ironic(settings, where[API], user or f"berth-{role}")]
    if role is PermissionRole.NOVA_SCHEDULER:
        return _nova_scheduler(settings, where[API], user or f"berth-{role}")
    cells = [cell] if cell is not None else list(settings.cells)
    if role in OF_A_CELL:
        return [
            grant
            for one in cells
            for grant in _grants(role, f"{role} of {one}", user or f"berth-{role}-{one}", settings, {one: where[one]})
        ]
    return _grants(role, str(role), user or f"berth-{role}", settings, where)


def commands(grants: Sequence[Grant]) -> Iterator[str]:
    """The grants as `rabbitmqctl` commands, with a comment before each user's.

    `rabbitmqctl` reads its standard input, which would be the rest of the commands where a shell gets them from a pipe.
    """
    for grant in grants:
        yield f"# {grant.role}, on {grant.broker}"
        for exchange, topic in grant.topics.items():
            yield _line("set_topic_permissions", grant, exchange, topic.write, topic.read)
        # Last: where a command before it fails, the user stays out, and is not let in to all keys.
        yield _line("set_permissions", grant, grant.configure, grant.write, grant.read)


def definitions(grants: Sequence[Grant]) -> dict[str, list[dict[str, str]]]:
    """The grants as `rabbitmqctl import_definitions` takes them, all at once. The users are there already."""
    return {
        "permissions": [
            {"user": one.user, "vhost": one.vhost, "configure": one.configure, "write": one.write, "read": one.read}
            for one in grants
        ],
        "topic_permissions": [
            {"user": one.user, "vhost": one.vhost, "exchange": exchange, "write": topic.write, "read": topic.read}
            for one in grants
            for exchange, topic in one.topics.items()
        ],
    }


def exchanges(grants: Sequence[Grant], settings: Settings) -> dict[str, list[dict[str, Any]]]:
    """The exchanges that these grants name keys of, as `rabbitmqctl import_definitions` takes them: as the first worker
    would declare them, and Ironic's as oslo.messaging does.

    RabbitMQ 4 takes topic permissions only of an exchange that is there.
    """
    shared: dict[str, str] = {}  # {name: its alternate exchange}
    for place in bus_locations(settings).values():
        for exchange in shared_exchanges():
            planned = QueueNames(place.prefix).plan_exchange(exchange)
            shared[planned.name] = planned.alternate
    novas = settings.nova.control_exchange  # is there as Nova's services declare it
    named = {
        (one.vhost, exchange): None
        for one in grants
        for exchange in one.topics
        if one.role != PermissionRole.NOVA_SCHEDULER or exchange != novas
    }
    return {
        "exchanges": [
            {
                "vhost": vhost,
                "name": name,
                "type": "topic",
                "durable": name in shared,
                "auto_delete": False,
                "internal": False,
                "arguments": {"alternate-exchange": shared[name]} if shared.get(name) else {},
            }
            for vhost, name in named
        ]
    }


def as_plain(grants: Sequence[Grant]) -> list[dict[str, Any]]:
    """The grants for `-o json`."""
    plain: list[dict[str, Any]] = msgspec.to_builtins(list(grants))
    return plain


def _line(command: str, grant: Grant, *patterns: str) -> str:
    quoted = " ".join("'" + pattern.replace("'", "'\\''") + "'" for pattern in patterns)
    return f"rabbitmqctl {command} -p {shlex.quote(grant.vhost)} {shlex.quote(grant.user)} {quoted} </dev/null"


def _grants(
    role: PermissionRole, title: str, user: str, settings: Settings, buses: dict[str, BusLocation]
) -> list[Grant]:
    found: dict[tuple[str, str], _Allowed] = {}
    for name, place in buses.items():
        kind = Where.API if name == API else Where.CELL
        if kind in _CATALOGUE[role][1]:
            allowed = found.setdefault((place.broker, place.vhost), _Allowed())
            _allow(allowed, role, kind, QueueNames(place.prefix))
            if role is PermissionRole.IRONIC_SYNC:
                _allow_notifications(allowed, settings, QueueNames(place.prefix))
    return [allowed.grant(title, user, broker, vhost) for (broker, vhost), allowed in found.items()]


def _allow(allowed: _Allowed, role: PermissionRole, kind: Where, names: QueueNames) -> None:
    """The permissions of a role on a bus of one kind."""
    package, _ = _CATALOGUE[role]
    if role in MAKERS:
        _allow_making(allowed, names)
    for owner_name in _owner_names(role):
        _allow_owner(allowed, owner_name, names)
    for queue in QUEUES:
        watched = role is PermissionRole.OPERATOR and queue.name in _WATCHED
        if queue.where in (kind, Where.BOTH) and (package in (queue.consumer, *queue.declared_by) or watched):
            _allow_queue(allowed, queue, names, gives_up=package == queue.consumer)
    _allow_messages(allowed, package, kind, names)
    if role is PermissionRole.PUBLISHER:
        _allow_others(allowed, names)
    if role is PermissionRole.OPERATOR:  # who looks at dead letters, drops them, and sends them back to their queues
        allowed.allow_publish(names.exchange(REPLAY), f"{_literal(names.queue(''))}.+")
        allowed.read[_literal(names.queue(DEAD_LETTERS))] = None


def _allow_messages(allowed: _Allowed, package: str, kind: Where, names: QueueNames) -> None:
    """To publish a package's messages on a bus of this kind, and to receive the replies."""
    published, replies = published_by(package, kind), replies_of(package, _literal(names.queue("")))
    for row in published:
        for key in keys_of(row, package):
            allowed.allow_publish(names.exchange(row.exchange), _filled(key))
    if package != CLIENT and any(row.reply is not None for row in published):
        allowed.allow_ownership(replies)
        allowed.allow_bind(names.exchange(REPLY), replies)


def _allow_others(allowed: _Allowed, names: QueueNames) -> None:
    """A program that is not berth's: queues that the broker names, for replies and the events of all projects."""
    allowed.allow_ownership(SERVER_NAMED)
    allowed.allow_bind(names.exchange(REPLY), SERVER_NAMED)
    for row in MESSAGES:
        if row.exchange == EVENTS and row.public and row.key.endswith(OF_PROJECT) and row.where is not Where.PROJECT:
            allowed.allow_bind(names.exchange(EVENTS), rf"{_literal(row.key.partition('.{')[0])}\..+")


def _owner_names(role: PermissionRole) -> tuple[str, ...]:
    """The names on a bus that a role's user sets the owner of."""
    if role is PermissionRole.OPERATOR:
        return (SHARED_DATABASE, *OWNERS)
    return (SHARED_DATABASE, str(role)) if role in OWNERS else ()


def _allow_making(allowed: _Allowed, names: QueueNames) -> None:
    """To declare and bind what the bus shares."""
    for exchange in shared_exchanges():
        name = _literal(names.exchange(exchange.name))
        allowed.configure[name] = None
        if exchange.alternate:
            allowed.read[name] = None
            allowed.allow_route(names.exchange(exchange.alternate))
    for planned in shared_queues():
        name = _literal(names.queue(planned.name))
        allowed.configure[name] = allowed.write[name] = None
        for source, key in planned.bindings:
            allowed.allow_bind(names.exchange(source), _literal(key))
        if planned.dead_exchange is not None:
            allowed.read[name] = None
            allowed.allow_route(names.exchange(planned.dead_exchange))


def _allow_owner(allowed: _Allowed, owner_name: str, names: QueueNames) -> None:
    """To set the owner of a role's name on the bus (`bus.bus_ownership`). RabbitMQ requires read and write of an
    alternate exchange.
    """
    name = _literal(names.exchange(f"{OWNER_EXCHANGE}{owner_name}"))
    allowed.configure[name] = allowed.read[name] = None
    allowed.write[f"{_literal(OWNER_ID)}.+"] = None


def _allow_queue(allowed: _Allowed, queue: QueueRow, names: QueueNames, *, gives_up: bool = True) -> None:
    """A queue to read from; its readers answer, and retry and park what they give up. gives_up: False: who only
    declares it.
    """
    name = _filled(names.queue(queue.name))
    allowed.allow_ownership(name)
    for exchange, key in queue.bindings:
        allowed.allow_bind(names.exchange(exchange), _filled(key))
    if queue.drops_to:
        allowed.allow_route(names.exchange(RETURN))
    for replies in replies_to([queue.name], _literal(names.queue(""))) if gives_up else ():
        allowed.allow_publish(names.exchange(REPLY), replies)
    if queue.kind is QueueKind.DURABLE:
        allowed.allow_route(names.exchange(DEAD))
        if gives_up:
            allowed.allow_publish(names.exchange(DEAD), name)
        for exchange in (RETURN, REPLAY):
            allowed.allow_bind(names.exchange(exchange), name)
        retried = _filled(names.queue(queue.retries_to)) if queue.retries_to else name
        for delay_s in queue.retry_s if gives_up else ():
            allowed.allow_publish(names.exchange(delay_exchange(delay_s)), retried)


def _allow_notifications(allowed: _Allowed, settings: Settings, names: QueueNames) -> None:
    """Ironic's notifications, from its own exchange into the sync's queue."""
    config = settings.ironic_sync
    allowed.allow_ownership(_literal(names.queue(config.own_queue)))
    if config.name:
        _allow_owner(allowed, role_of(config.name), names)
    for topic in config.topics:
        allowed.allow_bind(config.exchange, _literal(f"{topic}.*"))


def _ironic(settings: Settings, place: BusLocation, user: str) -> Grant:
    """Ironic's own user here, for its notifications only: oslo.messaging declares its exchange, and a queue a key."""
    config = settings.ironic_sync
    allowed = _Allowed()
    allowed.configure[_literal(config.exchange)] = None
    for topic in config.topics:
        keys = f"{_literal(topic)}\\.[a-z]+"
        allowed.allow_ownership(keys)
        allowed.allow_publish(config.exchange, keys)
        allowed.allow_bind(config.exchange, keys)
    return allowed.grant(str(PermissionRole.IRONIC), user, place.broker, place.vhost)


def _nova_scheduler(settings: Settings, bus: BusLocation, user: str) -> list[Grant]:
    """A frontend of Nova: on the API bus, unless that is in its process; on Nova's virtual host; on the fallback's."""
    config = settings.nova
    found: dict[tuple[str, str], _Allowed] = {}

    def at(place: BusLocation) -> _Allowed:
        return found.setdefault((place.broker, place.vhost), _Allowed())

    if config.transport_url and settings.bus.url != MEMORY:
        names = QueueNames(bus.prefix)
        for row in QUEUES:
            if row.name in QUEUES_OF_FRONTENDS:
                _allow_queue(at(bus), row, names)
        _allow_messages(at(bus), FRONTEND, Where.API, names)
    if config.transport_url:
        of_nova = at(_bus_location("nova", as_amqp(config.transport_url), ""))
        of_nova.configure[_literal(config.control_exchange)] = None
        hosts = _literal(f"{TOPIC}.{config.host}") if config.host else rf"{TOPIC}\..+"
        for queue in (_literal(TOPIC), hosts, _literal(FRONTENDS)):
            of_nova.allow_ownership(queue)
            of_nova.allow_bind(config.control_exchange, queue)
        for key in map(_literal, config.notifications.keys):
            of_nova.allow_ownership(key)
            of_nova.allow_bind(config.control_exchange, key)
            of_nova.allow_publish(config.control_exchange, key)
        of_nova.allow_ownership(rf"{TOPIC}_fanout(_[0-9a-f]+)?")  # the exchange and its queues
        of_nova.write[_literal(DEFAULT_EXCHANGE)] = None
    if config.transport_url and config.fallback_url:
        of_stock = at(_bus_location("stock", as_amqp(config.fallback_url), ""))
        of_stock.allow_ownership(f"{REPLY_QUEUES}[0-9a-f]+")
        of_stock.allow_publish(config.control_exchange, _literal(TOPIC))
        of_stock.write[f"{TOPIC}_fanout"] = None
    role = str(PermissionRole.NOVA_SCHEDULER)
    return [allowed.grant(role, user, broker, vhost) for (broker, vhost), allowed in found.items()]


def _bus_location(name: str, url: str, prefix: str) -> BusLocation:
    if url == MEMORY:
        return BusLocation("the broker", name, prefix)
    address = parse_bus_url(url)
    return BusLocation(",".join(map(str, address.hosts)), address.vhost, prefix)


def _filled(template: str, by: str = WORD) -> str:
    """A template of the catalogue as a pattern."""
    return "".join(by if part.startswith("{") else _literal(part) for part in re.split(r"(\{[a-z_]+\})", template))


def _literal(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", lambda found: "\\" + found.group(), text)


def _any_of(patterns: dict[str, None]) -> str:
    return f"^({'|'.join(patterns)})$" if patterns else NOTHING
