"""What is not settled yet: the invariants over everything, and that everything comes to an end."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from berth.invariants import Facts, InstanceFact, InventoryFact, RunningFact, judge
from berth.sim.world import World
from bus.contracts.build import TERMINAL_STATES, BuildState
from placement_worker.replica.book import Book
from placement_worker.store.memory import MemoryBookTable

# The processes of a cell, by the first word of their name.
FROM_CELLS = ("conductor", "compute")


def unsettled(world: World, confirmed: Sequence[str], deleted: Collection[str]) -> list[str]:
    """One line each, empty when the world is at rest as it should be: the first word names the invariant.

    confirmed: builds that the broker took from clients; deleted: those that clients asked to delete.
    """
    found = list(_requests(world, confirmed, deleted))
    for schema, table in world.schemas.items():
        if table.outbox:
            found.append(f"liveness: {len(table.outbox)} rows in the outbox of {schema}")
        if table.deadlocks:
            found.append(f"no_deadlock: {table.deadlocks} in {schema}")
    found += _breaches(facts_of(world, confirmed))
    found += list(_leftovers(world))
    found += [f"no_upcall: {words}" for words in world.listener.upward]
    found += [f"no_dead_letters: {words}" for words in world.listener.dead[:1]]
    for name, replica in world.replicas.items():
        if words := _replica_differs(world.book, replica):
            found.append(f"replica_agrees: {name}: {words}")
    return found


def _leftovers(world: World) -> Iterator[str]:
    """What a failed build left half-built on its host is cleared away too."""
    for fleet in world.fleets.values():
        for host, guest in fleet.guests():
            if not guest.complete:
                yield f"no_leftovers: {guest.instance_uuid} attempt {guest.attempt} is half-built on {host}"


def _requests(world: World, confirmed: Sequence[str], deleted: Collection[str]) -> Iterator[str]:
    for uuid in confirmed:
        standing = world.builds.standings.get(uuid)
        if standing is None:
            yield f"liveness: {uuid} was accepted by the broker and is not on record"
        elif standing.state not in TERMINAL_STATES:
            yield f"liveness: {uuid} is still {standing.state.value}"
        elif uuid in deleted and standing.state is not BuildState.DELETED:
            yield f"liveness: {uuid} was to be deleted and is {standing.state.value}"


def facts_of(world: World, accepted: Sequence[str]) -> Facts:
    """Everything `berth.invariants.judge` wants to know, from the stores and the machines themselves."""
    book, builds = world.book, world.builds
    return Facts(
        inventories=[
            InventoryFact(p.uuid, name, s.total, s.reserved, s.allocation_ratio, float(s.capacity), p.used.get(name, 0))
            for p in book.providers.values()
            for name, s in p.stocks.items()
        ],
        allocations={
            uuid: {provider: dict(held) for provider, held in kept.consumer.holding.items()}
            for uuid, kept in book.consumers.items()
            if kept.consumer.holding
        },
        roots={p.uuid: p.root for p in book.providers.values()},
        requests={uuid: standing.state.value for uuid, standing in builds.standings.items()},
        cells=dict(builds.cells),
        instances=[
            InstanceFact(i.uuid, cell, i.state.value, i.host_uuid, i.attempt)
            for cell, table in world.cells.items()
            for i in table.instances.values()
        ],
        running=[
            RunningFact(guest.instance_uuid, guest.attempt, host)
            for fleet in world.fleets.values()
            for host, guest in fleet.guests()
            if guest.complete
        ],
        feed=(book.changes[0].sequence if book.changes else 0, book.head, len(book.changes)),
        audit=list(_audit(book)),
        accepted=accepted,
        events=list(world.listener.events.values()),
        changes=book.changes,
        connections=[(name, bus, name.startswith(FROM_CELLS)) for name, bus in world.connections],
    )


def _audit(book: MemoryBookTable) -> Iterator[str]:
    """Where what the book keeps as used is not the sum of its allocations."""
    sums: dict[tuple[str, str], int] = {}
    for kept in book.consumers.values():
        for provider, held in kept.consumer.holding.items():
            for name, amount in held.items():
                sums[provider, name] = sums.get((provider, name), 0) + amount
    used = {(p.uuid, name): amount for p in book.providers.values() for name, amount in p.used.items()}
    for key in sorted(sums.keys() | used.keys()):
        if sums.get(key, 0) != used.get(key, 0):
            yield f"{key[0]} {key[1]}: used {used.get(key, 0)}, allocated {sums.get(key, 0)}"


def _replica_differs(book: MemoryBookTable, replica: Book) -> str:
    """What a scheduler's replica has otherwise than the book; "" when they agree."""
    if replica.sequence != book.head:
        return f"the replica is at {replica.sequence}, the book at {book.head}"
    if len(replica) != len(book.providers):
        return f"the replica has {len(replica)} providers, the book {len(book.providers)}"
    assumed = sorted(replica.assumed_keys())
    if assumed:
        return f"still assumed: {assumed[:3]}"
    for uuid, provider in book.providers.items():
        row = replica.row_of(uuid)
        if row is None:
            return f"the replica has no {provider.name}"
        mine = {name: int(used) for name, (_, used, _) in replica.inventory_of(row).items() if used}
        theirs = {name: used for name, used in provider.used.items() if used and name in provider.stocks}
        if replica.generation_of(row) != provider.generation or mine != theirs:
            return f"{provider.name}: the replica has {mine}, the book {theirs}"
    return ""


def _breaches(facts: Facts) -> list[str]:
    """Breaches of DESIGN.md's invariants, one line each.

    Not of capacity: inventories shrink here, and `BookWatch` has seen that no usage rose past its capacity.
    """
    verdicts = [verdict for verdict in judge(facts) if not verdict.holds and verdict.name != "capacity"]
    return [f"{verdict.name}: {example}" for verdict in verdicts for example in verdict.examples]
