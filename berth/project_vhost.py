"""The virtual host of a project whose clients nobody trusts: its limits, its policy, and the rights of its two users.

RabbitMQ isolates by virtual host and by nothing finer. Within it the project's user may publish, and read what its
own queues get; it declares queues that the broker names, so it can neither take the gateway's nor put others before it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from berth.config.settings import MEMORY, Settings
from berth.config.site import clients_url
from berth.permissions import SERVER_NAMED, Grant, bus_locations, commands, definitions
from bus.bus import API
from bus.contracts.base import Word
from bus.contracts.queues import (
    COMMANDS,
    EVENTS,
    GATEWAY,
    MAX_PROJECT_MESSAGES,
    PROJECT_TTL_S,
    QUEUES,
    REPLY,
    Where,
    project_bus,
)
from bus.rabbitmq.address import parse_bus_url
from bus.topology import QueueNames, shared_exchanges

MAX_USER_CONNECTIONS = 16
MAX_USER_CHANNELS = 64
MAX_CONNECTIONS = MAX_USER_CONNECTIONS + 16  # a gateway has two of each virtual host, one more while it connects anew
MAX_QUEUES = 32
# Of each queue of the project's own. The gateway's have bounds by their declarations, of which a policy would take the
# place: with drop-head requests would go that the broker has confirmed.
MAX_QUEUE_MESSAGES = MAX_PROJECT_MESSAGES
MAX_QUEUE_BYTES = 4 * 2**20
POLICY = "berth-bounds"
BOUNDED = f"^{SERVER_NAMED}$"


class VirtualHost(Struct, frozen=True, kw_only=True):
    """What one project needs on the clients' broker. grants: of its user, and of the gateway's."""

    project: str
    name: str
    broker: str
    user: str
    grants: tuple[Grant, ...]
    limits: dict[str, int]
    user_limits: dict[str, int]
    policy: dict[str, Any]


def virtual_host(project_id: str, settings: Settings, *, user: str | None = None) -> VirtualHost:
    """The virtual host of a project. ValueError: no project id."""
    try:
        project = msgspec.convert(project_id, Word)
    except msgspec.ValidationError as error:
        raise ValueError(f"{project_id!r} is no project id: 1 to 64 of the letters A-Z a-z 0-9 _ -") from error
    name = project_bus(project)
    url = clients_url(settings, name)
    broker = "the broker" if url == MEMORY else ",".join(map(str, parse_bus_url(url).hosts))
    user = user or f"berth-project-{project}"
    exchanges = [one.name for one in shared_exchanges(name)]
    own = _any([*exchanges, *(row.name for row in QUEUES if row.where is Where.PROJECT)])
    rights = {
        (f"project {project}", user): (
            f"^{SERVER_NAMED}$",
            f"^({SERVER_NAMED}|{_any([COMMANDS])})$",
            f"^({SERVER_NAMED}|{_any([EVENTS, REPLY])})$",
        ),
        (f"gateway of {project}", f"berth-{GATEWAY}"): (f"^({own})$",) * 3,
    }
    grants = tuple(
        Grant(role=role, user=who, broker=broker, vhost=name, configure=one[0], write=one[1], read=one[2], topics={})
        for (role, who), one in rights.items()
    )
    return VirtualHost(
        project=project,
        name=name,
        broker=broker,
        user=user,
        grants=grants,
        limits={"max-connections": MAX_CONNECTIONS, "max-queues": MAX_QUEUES},
        user_limits={"max-connections": MAX_USER_CONNECTIONS, "max-channels": MAX_USER_CHANNELS},
        policy={
            "max-length": MAX_QUEUE_MESSAGES,
            "max-length-bytes": MAX_QUEUE_BYTES,
            "message-ttl": int(PROJECT_TTL_S * 1000),
            "overflow": "drop-head",
        },
    )


def making(host: VirtualHost) -> Iterator[str]:
    """The virtual host as `rabbitmqctl` commands. The users are there already."""
    where = shlex.quote(host.name)
    yield f"# project {host.project}, on {host.broker}: its virtual host"
    yield f"rabbitmqctl add_vhost {where} </dev/null"
    yield f"rabbitmqctl set_vhost_limits -p {where} {_json(host.limits)} </dev/null"
    yield limiting(host)
    yield f"rabbitmqctl set_policy -p {where} --apply-to queues {POLICY} '{BOUNDED}' {_json(host.policy)} </dev/null"
    yield from commands(host.grants)


def limiting(host: VirtualHost) -> str:
    """The limits of the project's user, which are no definition of the virtual host."""
    return f"rabbitmqctl set_user_limits {shlex.quote(host.user)} {_json(host.user_limits)} </dev/null"


def ending(host: VirtualHost, settings: Settings) -> Iterator[str]:
    """Its end, as `rabbitmqctl` commands: take the project out of `gateway.projects` first."""
    yield f"# project {host.project}, on {host.broker}: its virtual host with all that is in it, and its user"
    yield f"rabbitmqctl delete_vhost {shlex.quote(host.name)} </dev/null"
    yield f"rabbitmqctl delete_user {shlex.quote(host.user)} </dev/null"
    api = bus_locations(settings)[API]
    yield f"# project {host.project}, on {api.broker}: the events that wait for it"
    for row in QUEUES:
        if row.consumer == GATEWAY and row.where is Where.API:
            queue = shlex.quote(QueueNames(api.prefix).queue(row.name.format(project=host.project)))
            yield f"rabbitmqctl delete_queue -p {shlex.quote(api.vhost)} {queue} </dev/null"


def host_definitions(hosts: list[VirtualHost]) -> dict[str, list[dict[str, Any]]]:
    """Virtual hosts as `rabbitmqctl import_definitions` takes them. A user's own limits are none of them."""
    return {
        "vhosts": [{"name": one.name} for one in hosts],
        "parameters": [
            {"vhost": one.name, "component": "vhost-limits", "name": "limits", "value": one.limits} for one in hosts
        ],
        "policies": [
            {
                "vhost": one.name,
                "name": POLICY,
                "pattern": BOUNDED,
                "apply-to": "queues",
                "priority": 0,
                "definition": one.policy,
            }
            for one in hosts
        ],
        "permissions": definitions([grant for one in hosts for grant in one.grants])["permissions"],
    }


def _any(names: list[str]) -> str:
    return "|".join(name.replace(".", r"\.") for name in names)


def _json(value: dict[str, Any]) -> str:
    return f"'{json.dumps(value)}'"
