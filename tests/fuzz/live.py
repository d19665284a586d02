"""Doors of real processes' parts on real servers: a scheduler and placement behind RabbitMQ, and placement's REST API.

They run on this process's loop, so that the processor time of each callback can be seen. AMQP_URL and DATABASE_URL name
the servers; without them private ones are started.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import re
import time
from asyncio.events import Handle
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import aiormq.exceptions
import msgspec
from aiormq.abc import DeliveredMessage
from pamqp import commands, header

from berth.config.ports import free_port
from bus.bus import API
from bus.clock import new_uuid
from bus.codec import JSON, Codec, Read
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import BuildEvent, BuildRequest, BuildState, DeleteRequest
from bus.contracts.cell import CellBuild
from bus.contracts.queues import COMMANDS
from bus.rabbitmq.channels import RabbitDelivery
from bus.rabbitmq.transport import RabbitTransport
from bus.service.main import GC_THRESHOLD
from bus.topology import QueueNames
from bus.transport import Transport
from placement_worker.rest import bodies
from placement_worker.rest.config import RestConfig
from placement_worker.rest.routes import ROUTES
from tests.fuzz import hostile
from tests.fuzz.doors import NEW_ID, packed, property_of
from tests.integration.placement_rest.conftest import Placement
from tests.integration.scheduler_worker.world import World
from tests.kit import servers
from tests.kit.raw_amqp import FLAGS, publish_frames, raw_publisher
from tests.kit.waiting import until

LIMIT_S = 0.1
PATIENCE_S = 120.0
HOSTS = 20
TOGETHER = 20  # messages that are sent before the next good request
CONNECTIONS = 32
SILENCE_S = 0.3  # a connection that sends nothing for so long is ended: its request was not whole
MAX_ANSWER = 2**20
# A broker closes the channel of a client that sends these as nonsense: nothing of them reaches berth.
BROKERS_OWN = {"expiration", "user_id", "delivery_mode", "headers"}
PROPERTIES = tuple(name for name in FLAGS if name not in BROKERS_OWN)


class Stalls:
    """Callbacks of the running loop that took more processor time than they may."""

    def __init__(self) -> None:
        self.slowest_s = 0.0
        self.found: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[Stalls]:
        """Measure each callback until the block ends, with garbage collected as a worker's process has it."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLD)
        run = Handle._run

        def measured(handle: Handle) -> None:
            began = time.thread_time()
            run(handle)
            took = time.thread_time() - began
            self.slowest_s = max(self.slowest_s, took)
            if took > LIMIT_S:
                whose = getattr(handle._callback, "__self__", handle)
                self.found.append(f"{took * 1000:.0f} ms of processor time in {whose!r}"[:500])

        Handle._run = measured  # type: ignore[method-assign]
        try:
            yield self
        finally:
            Handle._run = run  # type: ignore[method-assign]


class _Brokered(World):
    """A world whose API bus is a RabbitMQ; a conductor that announces each build as active at once."""

    def __init__(self, postgres_url: str, amqp_url: str, prefix: str) -> None:
        super().__init__(postgres_url)
        self.amqp_url = amqp_url
        self.prefix = prefix

    def transport(self, bus: str) -> Transport:
        return RabbitTransport(self.amqp_url, name=API, prefix=self.prefix) if bus == API else super().transport(bus)

    async def _command(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        for received in batch:
            if isinstance(received.message, CellBuild):
                spec = received.message.spec
                event = BuildEvent(
                    instance_uuid=spec.instance_uuid,
                    project_id=spec.project_id,
                    state=BuildState.ACTIVE,
                    sequence=10,
                    terminal=True,
                )
                await self.buses[received.bus].publish(event)
        return [Done()] * len(batch)


async def broker(seed: int, numbers: range) -> dict[str, Any]:
    """Foreign messages among good requests, to a scheduler and placement on a real broker and database."""
    with servers.amqp_server() as amqp_url, servers.postgres_server() as admin, servers.fresh_database(admin) as url:
        world = _Brokered(url, amqp_url, f"f{random.SystemRandom().randrange(2**32):08x}.")
        await world.open()
        try:
            await world.placement()
            await world.scheduler()
            await world.add_hosts("c1", HOSTS, VCPU=10_000, MEMORY_MB=2**30, DISK_GB=10**6)
            stalls = Stalls()
            with stalls.watched():
                return await _to_broker(world, seed, numbers, stalls)
        finally:
            await world.close()


async def _to_broker(world: _Brokered, seed: int, numbers: range, stalls: Stalls) -> dict[str, Any]:
    began, accepted, deleted, closed = time.monotonic(), set[str](), set[str](), 0
    stalls.found.clear()
    exchange = world.prefix + COMMANDS
    kinds = hostile.kinds([BuildRequest, DeleteRequest])
    codec = Codec([BuildRequest, DeleteRequest], queue="scheduler.requests")
    sent = 0

    async def requests_are_taken() -> bool:
        """A full queue refuses messages, and a publisher without confirms does not learn which."""
        return await world.buses[API].transport.depth("scheduler.requests") == 0

    while sent < len(numbers):
        # A broker may close the channel over a message of ours: the next ones go through a new one.
        try:
            async with raw_publisher(world.amqp_url) as raw:
                while sent < len(numbers):
                    await until(requests_are_taken)
                    made = [_foreign(seed, number, kinds) for number in numbers[sent : sent + TOGETHER]]
                    sent += len(made)
                    await raw.send(b"".join([publish_frames(raw.number, exchange, *one) for one in made]))
                    await raw.taken()
                    accepted |= {uuid for one in made if (uuid := _accepted(codec, BuildRequest, *one))}
                    deleted |= {uuid for one in made if (uuid := _accepted(codec, DeleteRequest, *one))}
                    good = world.request(flavor="m1.small")
                    await world.ask(good)
                    accepted.add(good.instance_uuid)
        except (aiormq.exceptions.AMQPError, ConnectionError):
            closed += 1
    defects = await _unended(world, accepted, deleted)
    defects += [{"number": -1, "wrong": wrong, "input": ""} for wrong in stalls.found]
    for name, (_, _, task) in world.services.items():
        if task.done():
            defects.append({"number": -1, "wrong": f"{name} has ended: {task.exception()!r}", "input": ""})
    return {
        "inputs": sent,
        "defects": defects,
        "accepted": len(accepted),
        "channels_closed": closed,
        "slowest_ms": round(stalls.slowest_s * 1000, 2),
        "stalls": len(stalls.found),
        "seconds": round(time.monotonic() - began, 1),
    }


async def _unended(world: World, accepted: set[str], deleted: set[str]) -> list[dict[str, Any]]:
    """Accepted requests without exactly one terminal event, or one more for a delete of the same uuid."""

    def ends() -> Counter[str]:
        return Counter(event.instance_uuid for event in world.events if event.terminal and event.sequence)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while not accepted <= set(ends()):  # noqa: ASYNC110  (a list that others append to has no event)
                await asyncio.sleep(0.05)
    counted = ends()
    return [
        {"number": -1, "wrong": f"{counted[uuid]} terminal events of an accepted request", "input": uuid}
        for uuid in sorted(accepted)
        if counted[uuid] not in ((1, 2) if uuid in deleted else (1,))
    ]


def _foreign(seed: int, number: int, kinds: Sequence[msgspec.inspect.Type]) -> tuple[bytes, dict[str, bytes], bytes]:
    """(key, properties, body) of one message."""
    rng = random.Random(f"{seed}/broker/{number}")
    share = rng.choice((0.0, 0.1, 0.5))
    given = {name: property_of(name, rng) for name in PROPERTIES if rng.random() < share}
    if rng.random() < 0.1:  # one in ten: a broker closes the channel over types of values that it does not know
        given["headers"] = property_of("headers", rng, bare=True)
    kind = kinds[0] if rng.random() < 0.8 else kinds[1]
    tree = hostile.value_of(kind, rng)
    if isinstance(tree, dict):
        if rng.random() < 0.5:
            tree = {name: tree[name] for name in ("type", rng.choice(list(tree)))}
        tree["instance_uuid"] = new_uuid(rng)
        tree["flavor"] = rng.choice(("m1.small", "m1.large", "none.such"))
        tree["project_id"] = rng.choice(("p", "q"))
    if kind is not kinds[0] and isinstance(tree, dict):
        tree.pop("flavor")
    key = b"build.request.p" if kind is kinds[0] else b"build.delete.p"
    if rng.random() < 0.3:
        tree = hostile.spoiled(tree, rng)
    body = hostile.as_json(tree)
    if rng.random() < 0.3:
        body = hostile.broken(body, rng)
    if rng.random() < 0.5:
        given["content_type"] = JSON.encode()
        given.pop("type", None)
    return key, given, body


def _accepted(
    codec: Codec, kind: type[BuildRequest | DeleteRequest], key: bytes, given: dict[str, bytes], body: bytes
) -> str:
    """The uuid of a request of this kind that a scheduler reads out of this message; else "".

    It ends with an event.
    """
    properties = commands.Basic.Properties()
    properties.unmarshal(*packed(given))
    message = DeliveredMessage(
        delivery=commands.Basic.Deliver("c", 1, False, COMMANDS, key.decode()),
        header=header.ContentHeader(0, len(body), properties),
        body=body,
        channel=None,  # type: ignore[arg-type]
    )
    reads = codec.read(RabbitDelivery(message, None, QueueNames("")), NEW_ID)  # type: ignore[arg-type]
    for read in reads:
        if isinstance(read, Read) and isinstance(read.message, kind) and len(reads) == 1:
            meta = read.meta
            return read.message.instance_uuid if meta.reply_to is None and meta.timeout_s is None else ""
    return ""


async def http(seed: int, numbers: range) -> dict[str, Any]:
    """Requests to placement's REST API that are whole, odd and broken, as bytes on connections of their own."""
    with servers.postgres_server() as admin, servers.fresh_database(admin) as url:
        placement = Placement(url, RestConfig(listen=f"127.0.0.1:{free_port()}"))
        await placement.start()
        try:
            stalls = Stalls()
            with stalls.watched():
                return await _to_http(placement, seed, numbers, stalls)
        finally:
            await placement.stop()


async def _to_http(placement: Placement, seed: int, numbers: range, stalls: Stalls) -> dict[str, Any]:
    began = time.monotonic()
    statuses: Counter[int] = Counter()
    defects: list[dict[str, Any]] = []
    left = iter(numbers)
    kinds = _kinds()

    async def visitor() -> None:
        for number in left:
            raw = _request(random.Random(f"{seed}/http/{number}"), kinds)
            for status in await _answers(placement.base_url, raw):
                statuses[status] += 1
                if status >= 500:
                    defects.append({"number": number, "wrong": f"answered {status}", "input": repr(raw)[:2_000]})

    await asyncio.gather(*(visitor() for _ in range(CONNECTIONS)))
    await placement.call("GET", "/resource_providers", status=200)
    defects += [{"number": -1, "wrong": wrong, "input": ""} for wrong in stalls.found]
    defects += [{"number": -1, "wrong": wrong, "input": ""} for wrong in await placement.findings()]
    return {
        "inputs": len(numbers),
        "defects": defects,
        "answers": dict(sorted(statuses.items())),
        "slowest_ms": round(stalls.slowest_s * 1000, 2),
        "stalls": len(stalls.found),
        "seconds": round(time.monotonic() - began, 1),
    }


async def _answers(url: str, raw: bytes) -> list[int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answered = b""
    try:
        writer.write(raw)
        while len(answered) < MAX_ANSWER:
            async with asyncio.timeout(SILENCE_S if answered else SILENCE_S * 3):
                piece = await reader.read(2**16)
            if not piece:
                break
            answered += piece
    except (TimeoutError, ConnectionError):
        pass  # it was not whole, or was refused before it was read
    finally:
        writer.transport.abort()
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", answered)]


def _kinds() -> list[msgspec.inspect.Type]:
    tables = (*bodies.PUT_ALLOCATIONS, *bodies.POST_ALLOCATIONS, *bodies.RESHAPE)
    plain = [value for value in vars(bodies).values() if isinstance(value, bodies.Body)]
    return hostile.kinds([body._kind for body in (*plain, *(body for _, body in tables))])


def _request(rng: random.Random, kinds: Sequence[msgspec.inspect.Type]) -> bytes:
    route = rng.choice(ROUTES)
    words = (
        *hostile.UUIDS,
        "VCPU",
        "CUSTOM_GOLD",
        "%00",
        "%ff",
        "..",
        quote(hostile.text(rng), errors="surrogatepass"),
    )
    path = re.sub(r"\{\w+\}", lambda _: rng.choice(words), route.path)
    if rng.random() < 0.4:
        query = f"resources={rng.choice(('VCPU:1', 'VCPU:0', 'X', ''))}&limit={rng.choice(('1', '0', '9' * 400))}"
        path += "?" + rng.choice((query, quote(hostile.text(rng), safe="=&", errors="surrogatepass")))
    body = hostile.bytes_of(rng.choice(kinds), rng) if route.takes or rng.random() < 0.1 else b""
    lines = [f"{route.method} {path} HTTP/1.1", "Host: x", "X-Auth-Token: admin", "Connection: close"]
    version = rng.choice(
        ("placement 1.39", "placement latest", f"placement 1.{rng.randrange(50)}", "placement 9.9", "\x80")
    )
    lines.append(f"OpenStack-API-Version: {version}")
    if body or rng.random() < 0.1:
        length = len(body) if rng.random() < 0.9 else rng.choice((0, len(body) + 5, -1, 10**30))
        lines += ["Content-Type: " + rng.choice(("application/json", "text/plain", "")), f"Content-Length: {length}"]
    if rng.random() < 0.1:
        lines.append(
            rng.choice(("Transfer-Encoding: chunked", "Expect: 100-continue", "Accept: \xff", "X: " + "y" * 70_000))
        )
    raw = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body
    return hostile.broken(raw, rng) if rng.random() < 0.3 else raw


DOORS: dict[str, Callable[[int, range], Awaitable[dict[str, Any]]]] = {"broker": broker, "http": http}
