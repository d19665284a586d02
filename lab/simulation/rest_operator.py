"""An operator of Placement's REST API: the names of classes and traits, a tree of its own, and reshapes of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from lab.simulation.plan import Order
from lab.simulation.rest_caller import Holding, RestAnswer, RestCaller, allocations_body, expect_status
from lab.simulation.watch import Breach

ROOT, CHILD = (f"00000000-0000-4000-e000-00000000000{n}" for n in range(2))
CLASSES = ("CUSTOM_SITE_A", "CUSTOM_SITE_B")
TRAITS = ("CUSTOM_SITE_FAST", "CUSTOM_SITE_NEAR")
RENAMES = "1.6"  # the last version in which PUT of a class gives it another name
MAX_AMOUNT = 4
HELD = "VCPU"  # what consumers hold of the tree, and what a reshape moves
LISTS = (
    *("/resource_providers", "/resource_classes", "/traits?associated=true", f"/resource_providers?in_tree={ROOT}"),
    *(f"/resource_providers/{ROOT}/usages", f"/resource_providers?resources={CLASSES[0]}:1"),
    *(f"/resource_providers?required={TRAITS[0]}", f"/resource_providers/{ROOT}/allocations"),
)


class RestOperator:
    """Makes and removes names while they are used, and moves allocations within a tree of its own."""

    def __init__(self, caller: RestCaller, *, compares: bool) -> None:
        """compares: whether what was written is there; a book that is set back forgets it."""
        self._caller = caller
        self._compares = compares
        self.verbs: Mapping[str, Callable[[Order, random.Random], Awaitable[None]]] = {
            "tree": self._make_tree,
            "fell": self._remove_tree,
            "rename-provider": self._rename_provider,
            "name": self._make_names,
            "unname": self._remove_names,
            "rename-class": self._rename_class,
            "equip": self._equip,
            "race": self._equip_while_removed,
            "hold": self._hold,
            "reshape": self._reshape,
            "reshape-stale": partial(self._reshape, is_stale=True),
            "move-provider": self._move_provider,
            "lists": self._list,
        }

    async def _request(self, method: str, path: str, body: Any, *statuses: int, version: str = "") -> RestAnswer | None:
        answer = await self._caller.request(method, path, body, version=version)
        expect_status(method, path, answer, *statuses)
        return answer

    # --- a tree

    async def _make_tree(self, _order: Order, rng: random.Random) -> None:
        root: dict[str, Any] = {"uuid": ROOT, "name": "site"}
        await self._request("POST", "/resource_providers", root, 200, 409)
        child = {"uuid": CHILD, "name": "site-child", "parent_provider_uuid": ROOT}
        await self._request("POST", "/resource_providers", child, 200, 400, 409)
        await self._put(ROOT, "inventories", {HELD: {"total": 64}})

    async def _remove_tree(self, _order: Order, rng: random.Random) -> None:
        for uuid in (CHILD, ROOT):
            await self._request("DELETE", f"/resource_providers/{uuid}", None, 204, 404, 409)

    async def _rename_provider(self, _order: Order, rng: random.Random) -> None:
        named = {"name": f"site-{rng.randrange(3)}"}
        await self._request("PUT", f"/resource_providers/{rng.choice((ROOT, CHILD))}", named, 200, 404, 409)

    async def _move_provider(self, _order: Order, rng: random.Random) -> None:
        """Out of the tree, or into it again."""
        named = {"name": "site-child", "parent_provider_uuid": rng.choice((ROOT, None))}
        await self._request("PUT", f"/resource_providers/{CHILD}", named, 200, 400, 404, 409)

    async def _put(self, uuid: str, what: str, value: Any) -> None:
        path = f"/resource_providers/{uuid}/{what}"
        before = await self._request("GET", path, None, 200, 404)
        if before is not None and before.status == 200:
            body = {"resource_provider_generation": before.body["resource_provider_generation"], what: value}
            await self._request("PUT", path, body, 200, 400, 404, 409)

    async def _equip(self, _order: Order, rng: random.Random) -> None:
        """Give a provider classes and traits, of which some may not exist."""
        uuid = rng.choice((ROOT, CHILD))
        read = await self._request("GET", f"/resource_providers/{uuid}/inventories", None, 200, 404)
        if read is None or read.status != 200:
            return
        kept = {name: {"total": one["total"]} for name, one in read.body["inventories"].items() if name == HELD}
        some = {name: {"total": 8} for name in rng.sample(CLASSES, rng.randint(0, 2))}
        await self._put(uuid, "inventories", {**kept, **some})
        await self._put(uuid, "traits", sorted(rng.sample(TRAITS, rng.randint(0, 2))))

    # --- names

    async def _make_names(self, _order: Order, rng: random.Random) -> None:
        name = rng.choice(CLASSES)
        await self._request("POST", "/resource_classes", {"name": name}, 201, 409)
        await self._request("PUT", f"/resource_classes/{rng.choice(CLASSES)}", None, 201, 204)
        await self._request("PUT", f"/traits/{rng.choice(TRAITS)}", None, 201, 204)

    async def _remove_names(self, _order: Order, rng: random.Random) -> None:
        await self._request("DELETE", f"/resource_classes/{rng.choice(CLASSES)}", None, 204, 404, 409)
        await self._request("DELETE", f"/traits/{rng.choice(TRAITS)}", None, 204, 404, 409)

    async def _rename_class(self, _order: Order, rng: random.Random) -> None:
        old, new = rng.sample(CLASSES, 2)
        await self._request("PUT", f"/resource_classes/{old}", {"name": new}, 200, 404, 409, version=RENAMES)

    async def _equip_while_removed(self, order: Order, rng: random.Random) -> None:
        """Names end at one worker while another one, which has them in its cache, writes them."""
        await self._make_names(order, rng)
        await self._equip(order, rng)
        emptied = self._put(ROOT, "traits", [])
        await asyncio.gather(emptied, self._equip(order, rng), self._remove_names(order, rng))
        await asyncio.gather(self._equip(order, rng), self._rename_class(order, rng), self._remove_names(order, rng))

    # --- consumers

    async def _hold(self, order: Order, rng: random.Random) -> None:
        for uuid in (ROOT, CHILD):
            read = await self._request("GET", f"/resource_providers/{uuid}/inventories", None, 200, 404)
            if read is not None and read.status == 200 and HELD in read.body["inventories"]:
                held = allocations_body({uuid: {HELD: rng.randint(1, MAX_AMOUNT)}}, None)
                await self._request("PUT", f"/allocations/{order.uuid}", held, 204, 400, 409)
                return

    async def _reshape(self, _order: Order, rng: random.Random, *, is_stale: bool = False) -> None:
        """What one provider of the tree has, and what consumers hold of it, passes to the other one, in one write.
        is_stale: or nothing does, as the write names a generation that is not the provider's.
        """
        source, target = (ROOT, CHILD) if rng.random() < 0.5 else (CHILD, ROOT)
        read = [
            await self._request("GET", f"/resource_providers/{uuid}/inventories", None, 200, 404)
            for uuid in (source, target)
        ]
        if any(one is None or one.status != 200 for one in read):
            return
        offered = {uuid: one.body for uuid, one in zip((source, target), read, strict=True) if one is not None}
        if HELD not in offered[source]["inventories"]:
            return
        moved = offered[source]["inventories"].pop(HELD)
        offered[target]["inventories"][HELD] = moved
        holders = await self._request("GET", f"/resource_providers/{source}/allocations", None, 200, 404)
        if holders is None or holders.status != 200:
            return
        wanted: dict[str, Holding] = {}
        allocations = {}
        for consumer in sorted(holders.body["allocations"]):
            found = await self._request("GET", f"/allocations/{consumer}", None, 200)
            if found is None or not found.body["allocations"]:
                continue
            held = {uuid: one["resources"] for uuid, one in found.body["allocations"].items()}
            held[target] = held.pop(source, {HELD: 1})
            wanted[consumer] = held
            allocations[consumer] = allocations_body(held, found.body["consumer_generation"])
        inventories = {
            uuid: {
                "resource_provider_generation": body["resource_provider_generation"],
                "inventories": {name: {"total": one["total"]} for name, one in body["inventories"].items()},
            }
            for uuid, body in offered.items()
        }
        inventories[target]["resource_provider_generation"] += 1000 * is_stale
        body = {"inventories": inventories, "allocations": allocations}
        answer = await self._request("POST", "/reshaper", body, *((400, 409) if is_stale else (204, 400, 409)))
        if answer is not None and answer.status == 204 and not answer.repeated and self._compares:
            await self._compare(wanted)

    async def _compare(self, wanted: Mapping[str, Holding]) -> None:
        """Everything moved, not some of it. Nobody else changes these consumers."""
        for consumer, holding in wanted.items():
            read = await self._request("GET", f"/allocations/{consumer}", None, 200)
            held = {} if read is None else {uuid: one["resources"] for uuid, one in read.body["allocations"].items()}
            if read is not None and held != holding:
                raise Breach("rest_reads_writes", f"{consumer} was moved to {holding}, and holds {held}")

    async def _list(self, _order: Order, rng: random.Random) -> None:
        for path in rng.sample(LISTS, 3):
            await self._request("GET", path, None, 200, 400, 404)
