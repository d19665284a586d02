"""What each role may publish, tried on a real RabbitMQ with exactly the permissions that `berth permissions` prints:
every message of the catalogue, every reply, and every queue by each exchange whose keys are names of queues.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import aiormq
import pytest
from aiormq.exceptions import AMQPError, ChannelAccessRefused

from berth.permissions import PermissionRole, definitions, exchanges, of_role
from berth.up.servers import API_VHOST, RealServers, SystemPlan
from bus.contracts.catalogue import MESSAGES, OPERATORS
from bus.contracts.queues import (
    BY_QUEUE,
    COMMANDS,
    DEAD,
    QUEUES,
    REPLAY,
    REPLY,
    RETURN,
    QueueKind,
    Where,
)
from bus.published_key import published_key
from bus.rabbitmq.transport import RabbitTransport
from bus.topology import delay_exchange
from bus.transport import Delivery
from tests.kit.lent import lent_servers
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]

CELL = "cell1"
PLAN = SystemPlan(cells=(CELL,), schedulers=1, placements=1, durable=False)
PASSWORD = "secret"
MINE, THEIRS = "demo", "other-project"
DELAY = delay_exchange(0.2)
Address = tuple[str, str]  # (exchange, routing key)

# Of each user: its package in the catalogue, and the bus on which it publishes what goes on both.
USERS: dict[str, tuple[str, Where]] = {
    "berth-placement": ("placement_worker", Where.API),
    "berth-scheduler": ("scheduler_worker", Where.API),
    "berth-conductor-cell1": ("cell_conductor", Where.CELL),
    "berth-compute-cell1": ("compute_agent", Where.CELL),
    "berth-ironic-sync": ("ironic_sync", Where.API),
    "berth-gateway": ("gateway", Where.API),
    "berth-operator": ("operator", Where.API),
    "berth-publisher": ("client", Where.API),
}
REPLIES = {
    "placement_worker": "berth.reply.placement-h-1.0a",
    "scheduler_worker": "berth.reply.scheduler-h-1.0a",
    "nova_scheduler": "berth.reply.nova-h-1.0a",
    "cell_conductor": "berth.reply.conductor-cell1-h-1.0a",
    "compute_agent": "berth.reply.compute-cell1-h-1.0a",
    "ironic_sync": "berth.reply.ironic-sync-h-1.0a",
    "gateway": "berth.reply.gateway-h-1.0a",
    "operator": "berth.reply.cli-h-1.0a",
    "client": "amq.gen-TwFY9rzBoMgsQd2aCAsNlQ",
    "a trusted program": "client.reply.mine",
}
# Who answers whom on a bus.
SERVED = ("scheduler_worker", "nova_scheduler", "operator")
PROGRAMS = ("client", "a trusted program")
ANSWERS: dict[tuple[str, Where], tuple[str, ...]] = {
    ("placement_worker", Where.API): (*SERVED, "cell_conductor", "compute_agent", "ironic_sync", *PROGRAMS),
    ("placement_worker", Where.CELL): (*SERVED, "cell_conductor", "compute_agent", "ironic_sync", *PROGRAMS),
    ("scheduler_worker", Where.API): (
        "operator",
        "placement_worker",
        "compute_agent",
        "ironic_sync",
        "gateway",
        *PROGRAMS,
    ),
    ("scheduler_worker", Where.CELL): ("operator", "compute_agent", "ironic_sync", *PROGRAMS),
    ("cell_conductor", Where.CELL): SERVED,
    ("compute_agent", Where.CELL): ("cell_conductor", "operator"),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[RealServers]:
    with lent_servers(PLAN.cells) as lent:
        settings = lent.settings(PLAN)
        grants = [grant for role in PermissionRole for grant in of_role(role, settings)]
        lent.broker.define(**exchanges(grants, settings))
        lent.broker.define(users=[{"name": one.user, "password": PASSWORD, "tags": ""} for one in grants])
        lent.broker.define(**definitions(grants))
        yield lent


def filled(template: str, project: str = THEIRS) -> str:
    return re.sub(r"\{[a-z_]+\}", "some-1", template.replace("{project_id}", project))


def queues_on(kind: Where) -> dict[str, str]:
    """{name of a queue with dead letters of its own: its consumer} on a bus of this kind."""
    return {
        filled(queue.name): queue.consumer
        for queue in QUEUES
        if queue.kind is QueueKind.DURABLE and queue.where in (kind, Where.BOTH)
    }


def addresses() -> set[Address]:
    """Wherever anyone might publish on a bus."""
    found: set[Address] = {("", name) for row in QUEUES for name in (filled(row.name),)}
    found |= {("", name) for name in ("berth.dead-letters", "berth.delayed.200", *REPLIES.values())}
    found |= {(REPLY, name) for name in REPLIES.values()}
    for project in (MINE, THEIRS):
        found |= {(row.exchange, filled(row.key, project)) for row in MESSAGES}
        found |= {(COMMANDS, f"{head}.{project}") for head in ("operator.request", "door.request")}
    found |= {(row.exchange, row.cell_key) for row in MESSAGES if row.cell_key}
    names = {filled(row.name) for row in QUEUES if row.kind is QueueKind.DURABLE}
    return found | {(exchange, name) for exchange in (DEAD, RETURN, REPLAY, DELAY) for name in names}


def retried_elsewhere(name: str) -> bool:
    """Whether the retries of a queue come back to another."""
    return name in BY_QUEUE and bool(BY_QUEUE[name].retries_to)


def by_catalogue(package: str, home: Where, kind: Where) -> set[Address]:
    """What the catalogue lets a package publish on a bus of this kind."""
    rows = [row for row in MESSAGES if package in row.publishers]
    if package == "client":  # a publisher that the operator trusts: what a gateway sends on for others
        rows = [row for row in MESSAGES if row.public and "gateway" in row.publishers]
    rows = [row for row in rows if row.where is kind or (row.where is Where.BOTH and kind is home)]
    projects = (MINE, THEIRS)
    if package == "gateway":  # what a project requests it sends on under a key of its own
        own = {(row.exchange, filled(row.key)) for row in rows if "client" not in row.publishers}
        return own | {(COMMANDS, f"door.request.{project}") for project in projects}
    found = {(row.exchange, filled(row.key, project)) for row in rows for project in projects}
    found |= {(row.exchange, row.cell_key) for row in rows if row.cell_key and package != "client"}
    if package != "client" and any(row.message in OPERATORS for row in rows):
        found |= {(COMMANDS, f"operator.request.{project}") for project in projects}
    if package == "operator" and any("client" in row.publishers for row in rows):
        found |= {(COMMANDS, f"door.request.{project}") for project in projects}
    queues = queues_on(kind)
    found |= {(DEAD, name) for name, by in queues.items() if by == package}
    found |= {(DELAY, name) for name, by in queues.items() if by == package and not retried_elsewhere(name)}
    if package == "operator":
        found |= {(REPLAY, filled(row.name)) for row in QUEUES if row.kind is QueueKind.DURABLE}
    return found | {(REPLY, REPLIES[asker]) for asker in ANSWERS.get((package, kind), ())}


async def taken(url: str, tried: set[Address]) -> set[Address]:
    """The addresses at which a broker takes a message of this user."""
    connection = await aiormq.connect(url)
    found: set[Address] = set()
    try:
        channel = await connection.channel(publisher_confirms=True)
        for exchange, key in sorted(tried):
            try:
                await channel.basic_publish(b"{}", exchange=exchange, routing_key=key, timeout=PATIENCE_S)
            except ChannelAccessRefused:
                channel = await connection.channel(publisher_confirms=True)
            else:
                found.add((exchange, key))
    finally:
        await connection.close()
    return found


@pytest.mark.parametrize("kind", [Where.API, Where.CELL])
@pytest.mark.parametrize("user", USERS)
async def test_a_role_publishes_what_its_rows_of_the_catalogue_say_and_nothing_else(
    servers: RealServers, user: str, kind: Where
) -> None:
    """A compute service claimed for any project: the default exchange, open for replies, opened every queue."""
    package, home = USERS[user]
    url = servers.broker.url(API_VHOST if kind is Where.API else CELL, user=user, password=PASSWORD)
    if kind is not home and package in {"cell_conductor", "compute_agent", "ironic_sync", "gateway", "client"}:
        with pytest.raises(AMQPError):
            await aiormq.connect(url)
        return
    found, expected = await taken(url, addresses()), by_catalogue(package, home, kind)
    assert (found - expected, expected - found) == (set(), set())


async def bound(url: str, queue: str, exchange: str, key: str) -> bool:
    """Whether a user may declare a queue ("": the broker names it) and bind it so."""
    connection = await aiormq.connect(url)
    try:
        channel = await connection.channel()
        made = await channel.queue_declare(queue, exclusive=True)
        await channel.queue_bind(made.queue, exchange, key or made.queue)
    except ChannelAccessRefused:
        return False
    finally:
        await connection.close()
    return True


@pytest.mark.parametrize("user", USERS)
async def test_a_role_takes_its_own_replies_and_nobody_elses(servers: RealServers, user: str) -> None:
    package, home = USERS[user]
    url = servers.broker.url(API_VHOST if home is Where.API else CELL, user=user, password=PASSWORD)
    own = "" if package == "client" else REPLIES[package]
    asks = package in {"client", *(one for row in MESSAGES if row.reply is not None for one in row.publishers)}
    assert await bound(url, own, REPLY, "") is asks
    for key in {*REPLIES.values(), "#", "berth.reply.#", "*.*", "amq.*", "client.#", "amq.gen-#"} - {own}:
        if package == "client" and key == REPLIES["client"]:
            continue  # what it cannot guess
        assert not await bound(url, own, REPLY, key), key


async def test_no_user_consumes_what_another_is_replied(servers: RealServers) -> None:
    url = servers.broker.url(CELL, user="berth-compute-cell1", password=PASSWORD)
    for asker in REPLIES.values():
        connection = await aiormq.connect(url)
        try:
            channel = await connection.channel()
            with pytest.raises((ChannelAccessRefused, aiormq.exceptions.ChannelNotFoundEntity)) as refused:
                await channel.basic_get(asker)
            mine = asker == REPLIES["compute_agent"]
            assert isinstance(refused.value, aiormq.exceptions.ChannelNotFoundEntity) is mine
        finally:
            await asyncio.shield(connection.close())


async def test_no_queue_of_a_workers_own_passes_on_what_it_may_not_publish(servers: RealServers) -> None:
    """By a dead-letter exchange the broker checks no key: a compute service commanded its conductor by a delay."""
    url = servers.broker.url(CELL, user="berth-compute-cell1", password=PASSWORD)
    mine, wanted = "compute.x", "conductor.requests"
    operators = RabbitTransport(servers.broker.url(CELL), name=CELL)
    await operators.open()
    await operators.declare_shared()
    row = BY_QUEUE[wanted]
    await operators.declare_queue(row, wanted, row.bindings)
    came: asyncio.Queue[Delivery] = asyncio.Queue()
    await operators.consume(wanted, came.put_nowait, prefetch=1)
    connection = await aiormq.connect(url)
    try:
        channel = await connection.channel(publisher_confirms=True)
        dead = {"x-dead-letter-exchange": DELAY, "x-dead-letter-routing-key": wanted, "x-message-ttl": 1}
        await channel.queue_declare(mine, exclusive=True, arguments=dead)
        await channel.exchange_declare(mine, exchange_type="fanout")
        await channel.queue_bind(mine, mine, "")
        await channel.basic_publish(b"{}", exchange=mine, routing_key="")
        delivery = await asyncio.wait_for(came.get(), PATIENCE_S)
        assert published_key(delivery) is None
        delivery.ack()
        await channel.exchange_delete(mine)
    finally:
        await connection.close()
        await operators.close()
