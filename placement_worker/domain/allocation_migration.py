"""Migrates allocations when a provider loses a class to others of its tree: a flat host that turns nested.

A report names the providers that take over (`ProviderReport.receives_from`); this module decides which consumer moves
to which of them. The largest allocations move first, each whole to the first taker with room for all of it. An
allocation that no taker has room for is split. Allocations that do not fit at all stay on their provider, whose
inventory is then orphaned, and migrate with a later report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from bus.contracts.placement import ProviderReport
from placement_worker.domain.claim_ledger import Decision
from placement_worker.domain.values import ConsumerState, Provider, ProviderAllocations, StoredInventory

Used = Mapping[str, Mapping[str, int]]
Inventories = Mapping[str, Mapping[str, StoredInventory]]


def sources_of(reports: Sequence[ProviderReport]) -> list[str]:
    """Providers that others take over from, each once, in the order in which they are named."""
    return list(dict.fromkeys(report.receives_from for report in reports if report.receives_from is not None))


def migrating_classes(reports: Sequence[ProviderReport]) -> list[tuple[str, str]]:
    """The (provider, class) pairs whose allocations migrate, if there are allocations of them."""
    kept = {report.uuid: set(report.inventories) for report in reports}
    pairs = [(report.receives_from, name) for report in reports for name in report.inventories]
    return list(dict.fromkeys((uuid, name) for uuid, name in pairs if uuid and name not in kept.get(uuid, ())))


def migrate_allocations(
    reports: Sequence[ProviderReport],
    source: str,
    inventories: Inventories,
    used: Used,
    allocations: Mapping[str, ProviderAllocations],
) -> dict[str, ProviderAllocations]:
    """Return the new allocations of the consumers that move; unchanged consumers are left out.

    inventories: of every reported provider; used: of every provider of the tree; allocations: of all consumers that
    hold something of `source`.
    """
    moving = _Migration(source, inventories, used, allocations)
    known = {report.uuid: frozenset(report.known_consumers) for report in reports}
    for classes, takers in _bundles(reports, source, inventories):
        for consumer in _in_order(allocations, source, classes, takers):
            named = [report.uuid for report in takers if consumer in known[report.uuid]]
            moving.move(consumer, classes, named or [report.uuid for report in takers])
    return moving.moved


def usage_after(
    used: Mapping[str, int], provider: str, before: Iterable[ProviderAllocations], after: Iterable[ProviderAllocations]
) -> dict[str, int]:
    """Return the usage of one provider after its allocations are replaced; classes without usage are left out."""
    amounts = dict(used)
    for sign, allocations in ((-1, before), (1, after)):
        for holding in allocations:
            for name, amount in holding.get(provider, {}).items():
                amounts[name] = amounts.get(name, 0) + sign * amount
    return {name: amount for name, amount in amounts.items() if amount}


def old_and_new(before: Mapping[str, Provider], after: Mapping[str, Provider]) -> dict[str, Provider]:
    """Return the old and the new providers and inventories together, so that allocations can move between them. An
    inventory that is closed by now has room for what has moved there before.
    """
    both = {uuid: _with_old(before.get(uuid), provider) for uuid, provider in after.items()}
    return {**both, **{uuid: provider for uuid, provider in before.items() if uuid not in after}}


def _with_old(old: Provider | None, new: Provider) -> Provider:
    former = {} if old is None else old.inventories
    stocks = new.inventories.items()
    roomy = {
        name: replace(one, capacity=new.used[name]) for name, one in stocks if new.used.get(name, 0) > one.capacity
    }
    if old is new or not (roomy or former.keys() - new.inventories.keys()):
        return new
    return replace(new, inventories={**former, **new.inventories, **roomy})


def migrated(
    before: Mapping[str, Provider],
    after: Mapping[str, Provider],
    moved: Mapping[str, ProviderAllocations],
    consumers: Mapping[str, ConsumerState],
) -> Decision:
    """Return the rows of the consumers whose allocations have moved, which keep their generation, and the usage of the
    providers where it has changed.
    """
    used: dict[str, dict[str, int]] = {}
    generations: dict[str, int] = {}
    for uuid in {**before, **after}:
        old, new = before.get(uuid), after.get(uuid)
        was, now = old.used if old is not None else {}, new.used if new is not None else {}
        differs = {name: now.get(name, 0) for name in (*was, *now) if was.get(name, 0) != now.get(name, 0)}
        if differs:
            used[uuid] = differs
            generations[uuid] = new.generation if new is not None else before[uuid].generation
    changed: dict[str, ConsumerState | None] = {
        uuid: replace(consumers[uuid], allocations=holding) for uuid, holding in moved.items()
    }
    return Decision([], changed, used, generations)


def _bundles(
    reports: Sequence[ProviderReport], source: str, inventories: Inventories
) -> Iterator[tuple[list[str], list[ProviderReport]]]:
    """Yield (classes, takers): classes that the same providers take move together (VCPU and MEMORY_MB)."""
    kept = inventories.get(source, {})
    takers: dict[str, list[ProviderReport]] = {}
    for report in reports:
        if report.receives_from == source:
            for name in report.inventories:
                takers.setdefault(name, []).append(report)
    bundles: dict[tuple[str, ...], list[str]] = {}
    for name, named in takers.items():
        if name not in kept:
            bundles.setdefault(tuple(report.uuid for report in named), []).append(name)
    for classes in bundles.values():
        yield sorted(classes), takers[classes[0]]


def _in_order(
    allocations: Mapping[str, ProviderAllocations],
    source: str,
    classes: Sequence[str],
    takers: Sequence[ProviderReport],
) -> list[str]:
    """Sort the consumers: those whose destination is known come first, then the largest, which are the hardest to
    place.
    """
    known = {consumer for report in takers for consumer in report.known_consumers}

    def rank(consumer: str) -> tuple[bool, list[int], str]:
        held = allocations[consumer][source]
        return consumer not in known, [-held.get(name, 0) for name in classes], consumer

    return sorted((consumer for consumer, held in allocations.items() if source in held), key=rank)


class _Migration:
    """The allocations and the free amounts after the moves so far."""

    def __init__(
        self, source: str, inventories: Inventories, used: Used, allocations: Mapping[str, ProviderAllocations]
    ) -> None:
        self.moved: dict[str, ProviderAllocations] = {}
        self._source = source
        self._inventories = inventories
        self._recorded = allocations
        self._used = {uuid: dict(amounts) for uuid, amounts in used.items()}

    def move(self, consumer: str, classes: Sequence[str], takers: Sequence[str]) -> None:
        """Move these classes of one consumer to the takers, as far as they have room."""
        held = self._allocations(consumer).get(self._source, {})
        wanted = {name: held[name] for name in classes if name in held}
        for taker in takers:
            if all(self._takes(consumer, taker, name, amount) == amount for name, amount in wanted.items()):
                for name, amount in wanted.items():
                    self._give(consumer, taker, name, amount)
                return
        for name, amount in wanted.items():
            left = amount
            for taker in takers:
                part = self._takes(consumer, taker, name, left)
                if part:
                    self._give(consumer, taker, name, part)
                    left -= part

    def _allocations(self, consumer: str) -> ProviderAllocations:
        return self.moved.get(consumer, self._recorded[consumer])

    def _takes(self, consumer: str, taker: str, name: str, amount: int) -> int:
        """Return how much of the amount fits on this taker, by its free capacity and by the inventory's unit
        constraints.
        """
        inventory = self._inventories[taker][name]
        has = self._allocations(consumer).get(taker, {}).get(name, 0)
        free = max(0, inventory.capacity - self._used.get(taker, {}).get(name, 0))
        total = min(has + min(amount, free), inventory.max_unit)
        total -= total % inventory.step_size
        return max(0, total - has) if total >= inventory.min_unit else 0

    def _give(self, consumer: str, taker: str, name: str, amount: int) -> None:
        allocations = {uuid: dict(resources) for uuid, resources in self._allocations(consumer).items()}
        for uuid, more in ((self._source, -amount), (taker, amount)):
            resources = allocations.setdefault(uuid, {})
            resources[name] = resources.get(name, 0) + more
            if not resources[name]:
                del resources[name]
            if not resources:
                del allocations[uuid]
        used = self._used.setdefault(taker, {})
        used[name] = used.get(name, 0) + amount
        self.moved[consumer] = allocations
