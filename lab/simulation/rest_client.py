"""Another client of Placement's REST API."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from itertools import cycle, islice
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

from lab.simulation.plan import Action, Order
from lab.simulation.rest_caller import Holding, RestAnswer, RestCaller, allocations_body, expect_status
from lab.simulation.rest_operator import RestOperator
from lab.simulation.watch import Breach
from lab.simulation.world import World

TRAIT = "CUSTOM_THEIRS"
PROVIDERS = tuple(f"00000000-0000-4000-c000-00000000000{n}" for n in range(2))
AGGREGATES = tuple(f"00000000-0000-4000-d000-00000000000{n}" for n in range(3))
MAX_AMOUNT = 4
TURNS, AT_ONCE = 100, 4  # of reservations that begin and end again
STOP_TURNS = 50  # in which a service stops, 0.1 s each


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
            "reserve-upgraded": self._reserve_upgraded,
            "change": self._change,
            "swap": self._swap,
            "release": self._release,
            **RestOperator(self._caller, compares=self._compares).verbs,
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
        expect_status("PUT", f"/traits/{TRAIT}", made, 201, 204)
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
        expect_status("PUT", path, answer, 200, 404, 409)
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

    async def _reserve_upgraded(self, order: Order, _: random.Random) -> None:
        """While an upgrade of their service makes trees of flat hosts: hold something there for a moment, again and
        again. What becomes of it is not compared, as the upgrade moves what all consumers hold.
        """
        for _turn in range(STOP_TURNS):
            if order.service not in self._world.flat:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(order.seconds)
        plans = [host.plan for host in self._world.fleets[order.service].hosts]
        leaving = [(one.uuid, "VCPU" if one.numa else "VGPU") for one in plans if one.numa or one.gpus]
        if leaving:
            pairs = islice(cycle(leaving), AT_ONCE)
            await asyncio.gather(*(self._hold_for_moments(f"{order.uuid} {n}", *one) for n, one in enumerate(pairs)))

    async def _hold_for_moments(self, seed: str, host: str, name: str) -> None:
        for turn in range(TURNS):
            consumer = str(uuid5(NAMESPACE_OID, f"{seed} {turn}"))
            self._doubted.add(consumer)
            self._begins(consumer)
            path, body = f"/allocations/{consumer}", allocations_body({host: {name: 1}}, None)
            answer = await self._caller.request("PUT", path, body)
            expect_status("PUT", path, answer, 204, 400, 409)
            if answer is None or answer.status == 204:
                answer = await self._caller.request("DELETE", path)
                expect_status("DELETE", path, answer, 204, 404)

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
        body = allocations_body(wanted, generation)
        restores = self._begins(consumer)
        answer = await self._caller.request("PUT", f"/allocations/{consumer}", body)
        expect_status("PUT", f"/allocations/{consumer}", answer, 204, 400, 409)
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
            consumer: allocations_body({}, read.body["consumer_generation"]),
            other: allocations_body(held, None),
        }
        answer = await self._caller.request("POST", "/allocations", body)
        expect_status("POST", "/allocations", answer, 204, 400, 409)
        await self._ended(answer, {consumer: {}, other: held}, restores)

    async def _release(self, _: Order, rng: random.Random) -> None:
        consumer, held = self._one(rng)
        if held:
            restores = self._begins(consumer)
            answer = await self._caller.request("DELETE", f"/allocations/{consumer}")
            expect_status("DELETE", f"/allocations/{consumer}", answer, 204, 404)
            await self._ended(answer, {consumer: {}}, restores)
            if answer is not None and answer.status == 404:
                self._held.pop(consumer, None)  # placement was set back to before it, or judges find what let it go

    def _one(self, rng: random.Random) -> tuple[str, Holding]:
        held = [consumer for consumer, holding in self._held.items() if holding]
        consumer = rng.choice(held) if held else ""
        return consumer, self._held.get(consumer, {})

    def _begins(self, *consumers: str) -> int:
        """Let these consumers' allocations change from now on, by this client's own request.

        Returns how often placement was set back before.
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


def _shown(value: Any) -> Any:
    """The part of a provider that a client writes, without placement's own additions."""
    return {name: one["total"] for name, one in value.items()} if isinstance(value, dict) else sorted(value)
