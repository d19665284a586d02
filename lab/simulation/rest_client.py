"""Another client of Placement's REST API: it calls the application that serves HTTP, in the process that serves it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from uuid import UUID, uuid5

from msgspec import Struct
from msgspec.structs import replace

from lab.simulation.plan import Action, Order
from lab.simulation.watch import Breach
from lab.simulation.world import World
from placement_worker.rest.application import Application

ANSWER_S = 5.0  # an answer is waited for so long
RETRY_S = 0.5
TRIES = 4  # of one request that has no answer, or 503
SENT_S = 0.002  # how long a request is on its way at most, and its answer
LOST_SHARE = 0.05  # of the answers, in runs in which connections break
DOUBTED = 503  # whether the book has been written is open: the commit's own answer may be lost

MICROVERSION = b"placement 1.38"
PROJECT, USER, TYPE = "theirs", "another-client", "RESERVATION"
TRAIT = "CUSTOM_THEIRS"
PROVIDERS = tuple(f"00000000-0000-4000-c000-00000000000{n}" for n in range(2))
AGGREGATES = tuple(f"00000000-0000-4000-d000-00000000000{n}" for n in range(3))
MAX_AMOUNT = 4
Holding = dict[str, dict[str, int]]


class RestAnswer(Struct, frozen=True):
    """The answer to a request. repeated: it had been sent before, and that may have been carried out, too."""

    status: int
    body: Any = None
    repeated: bool = False


class RestCaller:
    """Sends requests to the placement workers that run, each to one of them at random."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"berth.sim.rest {world.plan.seed}")

    async def request(self, method: str, path: str, body: Any = None) -> RestAnswer | None:
        """One request, tried again while there is no answer; None when there never was one. Raises Breach."""
        answer = None
        for number in range(TRIES):
            if number:
                await asyncio.sleep(RETRY_S)
            answer = await self._try(method, path, body)
            if answer is not None and answer.status != DOUBTED:
                answer = replace(answer, repeated=number > 0)
                break
        self._world.event_log.record("rest-answer", f"{method} {path} {answer.status if answer else 'none'}")
        if answer is not None and answer.status >= 500 and answer.status != DOUBTED:
            raise Breach("rest_answers", f"{method} {path}: {answer.status}")
        return None if answer is None or answer.status == DOUBTED else answer

    async def _try(self, method: str, path: str, body: Any) -> RestAnswer | None:
        applications = self._world.wiring.applications
        names = sorted(name for name in applications if name in self._world.lives)
        if not names:
            return None
        name = self._rng.choice(names)
        await asyncio.sleep(self._rng.uniform(0.0, SENT_S))
        if name not in self._world.lives:
            return None
        answered: asyncio.Future[RestAnswer] = asyncio.get_running_loop().create_future()
        served = _serve(applications[name], method, path, body, answered)
        # As by a server: each request has a context of its own, of its process.
        context = self._world.lives[name].process.context.copy()
        asyncio.get_running_loop().create_task(served, name=f"rest {method} {path}", context=context)
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await answered
        except TimeoutError:
            return None  # killed, standing still, or slow: it may yet be carried out
        await asyncio.sleep(self._rng.uniform(0.0, SENT_S))
        is_lost = self._world.network_faults.rates.lost_after > 0 and self._rng.random() < LOST_SHARE
        return None if is_lost else answer


async def _serve(
    application: Application, method: str, path: str, body: Any, answered: asyncio.Future[RestAnswer]
) -> None:
    """One request in the server's process, as an ASGI server hands it over."""
    content = b"" if body is None else json.dumps(body).encode()
    path, _, query = path.partition("?")
    headers = [
        (b"x-auth-token", b"admin"),
        (b"openstack-api-version", MICROVERSION),
        (b"content-length", str(len(content)).encode()),
        *(((b"content-type", b"application/json"),) if content else ()),
    ]
    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": headers,
    }
    status, parts = 0, []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await application(scope, receive, send)
    if not answered.done():
        text = b"".join(parts)
        answered.set_result(RestAnswer(status, json.loads(text) if text else None))


class RestClient:
    """Makes providers of its own, and reserves there and on berth's hosts; what it is answered is compared at once.

    One act at a time, so that nothing of its own comes between a write and the read after it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._caller = RestCaller(world)
        self._turn = asyncio.Lock()
        # A book that is set back forgets what it answered.
        self._compares = not any(
            order.action is Action.RESTORE and order.service == "placement" for order in world.plan.orders
        )
        self._held: dict[str, Holding] = {}  # by consumer: what it holds by the answers
        self._doubted: set[str] = set()  # consumers of a write that had no answer: it may yet be carried out
        self._verbs: Mapping[str, Callable[[Order, random.Random], Awaitable[None]]] = {
            "provider": self._make_provider,
            "inventories": self._set_inventories,
            "traits": self._set_traits,
            "aggregates": self._set_aggregates,
            "host-aggregates": self._set_host_aggregates,
            "reserve": self._reserve,
            "reserve-host": self._reserve_host,
            "change": self._change,
            "swap": self._swap,
            "release": self._release,
        }

    async def action(self, order: Order) -> None:
        """One order. Raises Breach."""
        async with self._turn:
            await self._verbs[order.verb](order, random.Random(order.host))

    # --- providers

    async def _make_provider(self, order: Order, rng: random.Random) -> None:
        uuid = PROVIDERS[order.host]
        await self._caller.request("POST", "/resource_providers", {"uuid": uuid, "name": f"reserved-{order.host}"})
        await self._write(uuid, "inventories", {"VCPU": {"total": 16}, "MEMORY_MB": {"total": 65_536}})
        await self._write_traits(uuid, [TRAIT])

    async def _set_inventories(self, _: Order, rng: random.Random) -> None:
        totals = {"VCPU": {"total": rng.choice((8, 16, 32))}, "MEMORY_MB": {"total": 65_536}}
        await self._write(rng.choice(PROVIDERS), "inventories", totals)

    async def _set_traits(self, _: Order, rng: random.Random) -> None:
        await self._write_traits(rng.choice(PROVIDERS), rng.choice(([], [TRAIT], [TRAIT, "HW_CPU_X86_SGX"])))

    async def _write_traits(self, uuid: str, traits: list[str]) -> None:
        """Write a provider's traits, once the client's own trait is known to exist: a book takes no unknown one."""
        made = await self._caller.request("PUT", f"/traits/{TRAIT}") if TRAIT in traits else None
        self._expect("PUT", f"/traits/{TRAIT}", made, 201, 204)
        if made is not None or TRAIT not in traits:
            await self._write(uuid, "traits", traits)

    async def _set_aggregates(self, _: Order, rng: random.Random) -> None:
        await self._write(rng.choice(PROVIDERS), "aggregates", sorted(rng.sample(AGGREGATES, rng.randint(0, 2))))

    async def _set_host_aggregates(self, order: Order, rng: random.Random) -> None:
        if host := self._host(rng):
            await self._write(host, "aggregates", sorted(rng.sample(AGGREGATES, rng.randint(0, 2))))

    async def _write(self, uuid: str, what: str, value: Any) -> None:
        """PUT a part of a provider on its generation; then no generation is answered twice with other contents."""
        path = f"/resource_providers/{uuid}/{what}"
        before = await self._caller.request("GET", path)
        if before is None or before.status != 200:
            return
        generation = before.body["resource_provider_generation"]
        answer = await self._caller.request("PUT", path, {"resource_provider_generation": generation, what: value})
        self._expect("PUT", path, answer, 200, 404, 409)
        after = await self._caller.request("GET", path)
        is_known = answer is not None and answer.status == 200 and not answer.repeated
        if not is_known or after is None or after.status != 200 or not self._compares:
            return
        assert answer is not None
        written, read = (one.body["resource_provider_generation"] for one in (answer, after))
        if read < written or (read == written and _shown(after.body[what]) != _shown(value)):
            raise Breach("rest_reads_writes", f"GET {path}: {after.body}; generation {written} was written as {value}")

    def _host(self, rng: random.Random) -> str | None:
        """A host of berth's; not one that is reported flat, as its upgrade moves what all consumers hold."""
        world = self._world
        services = [service for _, service in world.plan.services if service not in world.plan.flat]
        hosts = [host.plan.uuid for service in services for host in world.fleets[service].hosts]
        return rng.choice(hosts) if hosts else None

    # --- consumers

    async def _reserve(self, order: Order, rng: random.Random) -> None:
        await self._hold(order.uuid, {rng.choice(PROVIDERS): {"VCPU": rng.randint(1, MAX_AMOUNT)}}, None)

    async def _reserve_host(self, order: Order, rng: random.Random) -> None:
        """On the first provider of a host's tree that has processors."""
        host = self._host(rng)
        tree = host and await self._caller.request("GET", f"/resource_providers?in_tree={host}")
        for one in tree.body["resource_providers"] if tree and tree.status == 200 else ():
            found = await self._caller.request("GET", f"/resource_providers/{one['uuid']}/inventories")
            if found is not None and found.status == 200 and "VCPU" in found.body["inventories"]:
                await self._hold(order.uuid, {one["uuid"]: {"VCPU": 1}}, None)
                return

    async def _change(self, _: Order, rng: random.Random) -> None:
        """Another amount of the same."""
        consumer, held = self._one(rng)
        if held:
            wanted = {provider: {"VCPU": rng.randint(1, MAX_AMOUNT)} for provider in held}
            read = await self._caller.request("GET", f"/allocations/{consumer}")
            if read is not None and read.status == 200 and "consumer_generation" in read.body:
                await self._hold(consumer, wanted, read.body["consumer_generation"])

    async def _hold(self, consumer: str, wanted: Holding, generation: int | None) -> None:
        """PUT what a consumer holds."""
        body = {**_allocations(wanted, generation)}
        restores = self._begins(consumer)
        answer = await self._caller.request("PUT", f"/allocations/{consumer}", body)
        self._expect("PUT", f"/allocations/{consumer}", answer, 204, 400, 409)
        await self._ended(answer, {consumer: wanted}, restores)

    async def _swap(self, order: Order, rng: random.Random) -> None:
        """One consumer's allocations pass to another, in one transaction, as in a migration."""
        consumer, held = self._one(rng)
        read = await self._caller.request("GET", f"/allocations/{consumer}") if held else None
        if read is None or "consumer_generation" not in read.body:
            return
        other = str(uuid5(UUID(order.uuid), "swap"))
        restores = self._begins(consumer, other)
        body = {
            consumer: _allocations({}, read.body["consumer_generation"]),
            other: _allocations(held, None),
        }
        answer = await self._caller.request("POST", "/allocations", body)
        self._expect("POST", "/allocations", answer, 204, 400, 409)
        await self._ended(answer, {consumer: {}, other: held}, restores)

    async def _release(self, _: Order, rng: random.Random) -> None:
        consumer, held = self._one(rng)
        if held:
            restores = self._begins(consumer)
            answer = await self._caller.request("DELETE", f"/allocations/{consumer}")
            self._expect("DELETE", f"/allocations/{consumer}", answer, 204, 404)
            await self._ended(answer, {consumer: {}}, restores)
            if answer is not None and answer.status == 404:
                self._held.pop(consumer, None)  # the book was set back to before it, or judges find what let it go

    def _one(self, rng: random.Random) -> tuple[str, Holding]:
        held = [consumer for consumer, holding in self._held.items() if holding]
        consumer = rng.choice(held) if held else ""
        return consumer, self._held.get(consumer, {})

    def _begins(self, *consumers: str) -> int:
        """Let these consumers' allocations change from now on, by this client's own request.

        Returns how often the book was set back before.
        """
        for consumer in consumers:
            self._world.harm.holdings.setdefault(consumer, {})
            self._world.harm.may_let_go.add(consumer)
        return self._world.harm.restores

    async def _ended(self, answer: RestAnswer | None, written: Mapping[str, Holding], restores: int) -> None:
        """With its only answer it is known what these consumers hold; they keep it until their next request.

        A request that is refused changes nothing. After one that met a restore nothing is known.
        """
        if answer is None or answer.repeated or self._world.harm.restores != restores:
            self._doubted.update(written)
        for consumer, wanted in written.items():
            if consumer in self._doubted:
                continue
            if answer is not None and answer.status == 204:
                self._held[consumer] = wanted
                if self._compares:
                    await self._compare(consumer, wanted)
                self._world.harm.holdings[consumer] = wanted
            self._world.harm.may_let_go.discard(consumer)

    async def _compare(self, consumer: str, wanted: Holding) -> None:
        """A read after a write sees it, whichever worker answers."""
        read = await self._caller.request("GET", f"/allocations/{consumer}")
        if read is None or read.status != 200:
            return
        held = {provider: one["resources"] for provider, one in read.body["allocations"].items()}
        if held != wanted:
            raise Breach("rest_reads_writes", f"{consumer} was given {wanted}, and holds {held}")

    def _expect(self, method: str, path: str, answer: RestAnswer | None, *statuses: int) -> None:
        if answer is not None and answer.status not in statuses:
            raise Breach("rest_answers", f"{method} {path}: {answer.status} {answer.body}")


def _allocations(wanted: Holding, generation: int | None) -> dict[str, Any]:
    return {
        "allocations": {provider: {"resources": resources} for provider, resources in wanted.items()},
        "project_id": PROJECT,
        "user_id": USER,
        "consumer_generation": generation,
        "consumer_type": TYPE,
    }


def _shown(value: Any) -> Any:
    """The part of a provider that a client writes, without the book's own additions."""
    return {name: one["total"] for name, one in value.items()} if isinstance(value, dict) else sorted(value)
