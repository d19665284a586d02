"""A Placement in memory that changes as its clients change it, and what a replica of it must then show."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import msgspec

from bus.clock import new_uuid
from placement_worker.domain.values import Provider, StoredInventory, capacity
from placement_worker.operations.export import HeldOfProvider, InvalidExport, ListedProvider, PlacementReader
from placement_worker.replica.replica import Replica

CLASSES = ("VCPU", "MEMORY_MB", "CUSTOM_FPGA")


class Source(PlacementReader):
    """A Placement as its API answers, and what its clients do. A claim moves the generations of what it
    takes alone.
    """

    def __init__(self, rng: random.Random) -> None:
        self.refuses = ""  # whose allocations cannot be read
        self.rng = rng
        self.there: dict[str, Provider] = {}
        self.held: dict[str, dict[str, dict[str, int]]] = {}  # by consumer
        self.asked: list[str] = []  # whose allocations
        self.parts: list[str] = []  # whose inventories, traits and aggregates
        self.moved: set[str] = set()  # since the last pass
        self.during: Any = None  # called between two reads of a pass

    # --- reads

    async def rows(self) -> list[ListedProvider]:
        return [ListedProvider(p.uuid, p.name, p.generation, p.parent, p.root) for p in self.there.values()]

    async def provider(self, row: ListedProvider) -> Provider | None:
        self.parts.append(row.uuid)
        if self.during is not None:
            self.during()
        return self.there.get(row.uuid)

    async def allocations(self, provider: str) -> dict[str, HeldOfProvider]:
        if provider == self.refuses:
            raise InvalidExport("500")
        self.moved.clear()
        self.asked.append(provider)
        return {
            consumer: HeldOfProvider(dict(parts[provider]), 1)
            for consumer, parts in self.held.items()
            if provider in parts
        }

    # --- what clients do

    def make(self, parent: str | None = None) -> str:
        uuid = new_uuid(self.rng)
        root = uuid if parent is None else self.there[parent].root
        self.there[uuid] = Provider(uuid, f"p-{uuid}", parent, root, 0, 0, inventories(), {}, (), ())
        return uuid

    def bump(self, uuids: Iterable[str], **fields: Any) -> None:
        for uuid in uuids:
            self.moved.add(uuid)
            known = self.there[uuid]
            self.there[uuid] = msgspec.structs.replace(known, generation=known.generation + 1, **fields)

    def claim(self, consumer: str, *providers: str) -> None:
        self.held[consumer] = {one: {"VCPU": self.rng.randrange(1, 5)} for one in providers}
        self.bump(providers)

    def step(self) -> bool:
        """One of these at random. True: a provider was made again, which must not come to the generation that it had
        before the next pass: nobody could see that.
        """
        rng, every = self.rng, sorted(self.there)
        match rng.randrange(8):
            case 0:
                self.make()
            case 1 if every:
                self.make(rng.choice(every))
            case 2 if every:
                self.bump([rng.choice(every)], inventories=inventories(rng.randrange(1, 99)), traits=("CUSTOM_A",))
            case 3 if every:
                self.bump([rng.choice(every)], aggregates=(new_uuid(rng),))
            case 4 if self.held:
                del self.held[rng.choice(sorted(self.held))]
            case 5:
                parents, used = {p.parent for p in self.there.values()}, {u for one in self.held.values() for u in one}
                if unused := [uuid for uuid in every if uuid not in parents and uuid not in used]:
                    gone = self.there.pop(rng.choice(unused))
                    if gone.generation and gone.uuid not in self.moved:
                        self.there[gone.uuid] = msgspec.structs.replace(gone, generation=0, inventories=inventories())
                        return True
            case _ if every:
                consumer = rng.choice([new_uuid(rng), *self.held])
                self.claim(consumer, *rng.sample(every, min(2, len(every))))
        return False


def inventories(total: int = 16) -> dict[str, StoredInventory]:
    return {name: StoredInventory(total, 0, 1, total, 1, 1.0, capacity(total, 0, 1.0)) for name in CLASSES}


def shown(replica: Replica) -> dict[str, Any]:
    """What the replica has, by provider."""
    found = {}
    for row in range(replica.top):
        if replica.live[row]:
            own = replica.inventory_of(row)
            uuid = replica.uuid_of(row)
            used = {name: used for name, (_, used, _) in own.items() if used}
            kinds = {name: numbers.total for name, (numbers, _, _) in own.items()}
            root = replica.uuid_of(int(replica.root[row]))
            found[uuid] = (root, kinds, used, replica.traits_of(row), replica.aggregates_of(row))
    return found


def true(source: Source, but: Iterable[str] = ()) -> dict[str, Any]:
    """The same of the source, without what these consumers hold."""
    used: dict[str, dict[str, int]] = {}
    for consumer, parts in source.held.items():
        for uuid, resources in parts.items() if consumer not in but else ():
            for name, amount in resources.items():
                of = used.setdefault(uuid, {})
                of[name] = of.get(name, 0) + amount
    return {
        p.uuid: (p.root, {n: i.total for n, i in p.inventories.items()}, used.get(p.uuid, {}), p.traits, p.aggregates)
        for p in source.there.values()
    }
