"""Decides the effect of inventory updates on placement. An update is a whole tree, as its reporter sees it.

An update from the bus is applied or refused as a whole, and must not block the later updates of its reporter. So a
provider or class that a report no longer names and a consumer still uses, or a provider to which others gave something,
is no error: it becomes *orphaned* (capacity 0, no new allocations; docs/decisions/0002-orphaned-inventory.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from copy import copy

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.feed import Change
from bus.contracts.placement import InventoryUpdate, ProviderReport
from placement_worker.domain.allocation_migration import migrate_allocations, sources_of, usage_after
from placement_worker.domain.values import (
    ABOVE_CELLS,
    Provider,
    ProviderAllocations,
    StoredInventory,
    is_class,
    is_custom,
    is_foreign,
    state_of,
    stored_inventory,
    suggestion,
)

MAX_SHOWN = 64  # characters of a refused name
NO_ALLOCATIONS: Mapping[str, ProviderAllocations] = {}
_Used = dict[str, dict[str, int]]


class ReportRefusal(Struct, frozen=True):
    """An update that cannot be applied, and why."""

    code: str
    reason: str


NAME_TAKEN = "provider.name_taken"
CONSUMERS_BUSY = "inventory.consumers_busy"  # the report is applied a moment later


class Applied(Struct, frozen=True):
    """An update that was applied: the reported providers, the orphaned ones, and whether anything changed.

    orphaned: a provider's uuid, or `uuid/CLASS` where a class of a reported provider is orphaned. left: the roots of
    other trees, which it has taken providers from.
    """

    reported: tuple[str, ...]
    orphaned: tuple[str, ...]
    changed: bool
    left: Collection[str] = ()


class ReportPlan(Struct, frozen=True):
    """The plan of a group of updates: the result of each update, and the loaded providers as they are to be written.

    moved: the new allocations of the consumers whose allocations have followed a class to another provider.
    """

    results: list[Applied | ReportRefusal]
    after: dict[str, Provider]
    moved: dict[str, ProviderAllocations]


def refuse_foreign(uuid: str) -> ReportRefusal:
    """The refusal of a report that came on a cell's bus and names a provider of another cell."""
    return ReportRefusal("inventory.foreign_cell", f"{uuid} belongs to another cell")


def without_unknown(update: InventoryUpdate, known: Collection[str]) -> tuple[InventoryUpdate, tuple[str, ...]]:
    """The update without the traits that are neither custom nor known to placement, which nobody can ask for; and
    these, each once.
    """
    named = {trait: None for report in update.providers for trait in report.traits}
    unknown = {trait: None for trait in named if not is_custom(trait) and trait not in known}
    if not unknown:
        return update, ()
    left = [tuple(trait for trait in one.traits if trait not in unknown) for one in update.providers]
    reports = (replace(one, traits=traits) for one, traits in zip(update.providers, left, strict=True))
    return replace(update, providers=tuple(reports)), tuple(unknown)


def problem_of(update: InventoryUpdate) -> ReportRefusal | None:
    """Return the error of an update that can be found without placement; None when there is none."""
    reports = update.providers
    if reports and (reports[0].uuid != update.root_uuid or reports[0].parent_uuid is not None):
        return ReportRefusal("inventory.root", "the first provider is the root, and the root has no parent")
    seen: set[str] = set()
    names: set[str] = set()
    for number, report in enumerate(reports):
        if report.uuid in seen:
            return ReportRefusal("inventory.duplicate", f"provider {report.uuid} is reported twice")
        if number and report.parent_uuid not in seen:
            return ReportRefusal("inventory.parent", f"the parent of {report.uuid} does not come before it")
        if report.name in names and not report.is_reference:
            return ReportRefusal(NAME_TAKEN, f"two providers are named {report.name!r}")
        if "\x00" in report.name:
            return ReportRefusal("provider.name", f"the name of {report.uuid} has a NUL character")
        if report.receives_from == report.uuid:
            return ReportRefusal("inventory.receives_from", f"{report.uuid} cannot take from itself")
        seen.add(report.uuid)
        names.update(() if report.is_reference else (report.name,))
        wrong = _problem_of_report(report)
        if wrong is not None:
            return wrong
    return None


def _problem_of_report(report: ProviderReport) -> ReportRefusal | None:
    for name, inventory in report.inventories.items():
        if not is_class(name):
            reason = f"{name[:MAX_SHOWN]!r} is neither a standard resource class nor CUSTOM_{suggestion(name)}"
            return ReportRefusal("class.unknown", reason)
        if inventory.reserved > inventory.total:
            return ReportRefusal("inventory.reserved", f"{name} of {report.uuid}: reserved exceeds total")
    return None


def plan(
    updates: Sequence[InventoryUpdate],
    earlier: Sequence[Sequence[str]],
    recorded: Mapping[str, Provider],
    allocations: Mapping[str, ProviderAllocations] = NO_ALLOCATIONS,
    bus: str = ABOVE_CELLS,
    *,
    spec_generation: int,
    final: bool = False,
) -> ReportPlan:
    """Plan valid updates that came on one bus, in order. Each is applied as a whole or not at all, and those together
    whose providers have exchanged their names.

    earlier[n]: the providers that updates[n] takes out if it does not report them (`ReportGroup.earlier`). recorded:
    every provider of every tree that contains a root, a provider or a provider name of the updates. allocations: the
    allocations of every consumer of a provider that others take from. spec_generation: the new spec generation of every
    provider that changes; it is higher than any spec generation in placement. final: what others gave to a provider
    that is taken out goes with it.
    """
    draft = _Draft(recorded, allocations, bus, spec_generation, final=final)
    results = [draft.apply(update, before) for update, before in zip(updates, earlier, strict=True)]
    waiting = {
        number: updates[number]
        for number, one in enumerate(results)
        if isinstance(one, ReportRefusal) and one.code == NAME_TAKEN
    }
    while waiting:  # ends: each round leaves some out, or is the last
        exchanging, giving = draft.exchanging(waiting)
        trial = draft.trial()
        tried = {number: trial.apply(updates[number], earlier[number], giving) for number in exchanging}
        waiting = {number: updates[number] for number, one in tried.items() if isinstance(one, Applied)}
        if len(waiting) == len(tried):
            draft, results = trial, [tried.get(number, one) for number, one in enumerate(results)]
            break
    return ReportPlan(results, draft.providers, draft.moved)


def changes_of(before: Mapping[str, Provider], after: Mapping[str, Provider]) -> list[Change]:
    """Return the changes of the feed that turn `before` into `after`: whole states, parents before children, removals
    last.

    A provider whose generation decreases was deleted and created again in between (by the REST API, where generations
    start at 0). Its removal comes first, otherwise a reader of the feed would ignore the new state as an older one.
    """
    created_again = [uuid for uuid, old in before.items() if uuid in after and after[uuid].generation < old.generation]
    changes = [_removed(before[uuid]) for uuid in created_again]
    changes += [
        Change(provider=uuid, generation=provider.generation, state=state_of(provider))
        for uuid, provider in after.items()
        if before.get(uuid) is not provider
    ]
    changes += [_removed(provider) for uuid, provider in before.items() if uuid not in after]
    return changes


def _removed(provider: Provider) -> Change:
    return Change(provider=provider.uuid, generation=provider.generation + 1, removed=True)


class _Draft:
    """Placement after the updates so far. A refused update changes nothing."""

    def __init__(
        self,
        recorded: Mapping[str, Provider],
        allocations: Mapping[str, ProviderAllocations],
        bus: str,
        spec_generation: int,
        *,
        final: bool,
    ) -> None:
        self.providers = dict(recorded)
        self._bus = bus
        self._spec_generation = spec_generation
        self._final = final
        self._generations: dict[str, int] = {}  # of providers that an update removed; a later one may report them
        self.moved: dict[str, ProviderAllocations] = {}
        self._allocations = allocations
        self._holders: dict[str, list[str]] = {}
        for consumer, holding in allocations.items():
            for uuid in holding:
                self._holders.setdefault(uuid, []).append(consumer)
        self.names = {provider.name: provider.uuid for provider in recorded.values()}
        self.trees: dict[str, set[str]] = {}
        for provider in recorded.values():
            self.trees.setdefault(provider.root, set()).add(provider.uuid)

    def trial(self) -> _Draft:
        """A copy on which updates are tried together, so that the original stays as it is."""
        trial = copy(self)
        trial.providers, trial.names, trial.moved = dict(self.providers), dict(self.names), dict(self.moved)
        trial._generations = dict(self._generations)
        trial.trees = {root: set(uuids) for root, uuids in self.trees.items()}
        return trial

    def exchanging(self, refused: Mapping[int, InventoryUpdate]) -> tuple[Sequence[int], Set[str]]:
        """Of updates that were refused for a name, by number: those that may be applied together, because no two of
        them give the same name; and their providers.
        """
        own = {n: [report for report in u.providers if not report.is_reference] for n, u in refused.items()}
        while True:
            giving = {report.uuid for reports in own.values() for report in reports}
            times = Counter(report.name for reports in own.values() for report in reports)
            fitting = {
                number: reports for number, reports in own.items() if all(times[one.name] == 1 for one in reports)
            }
            if len(fitting) == len(own):
                return list(own), giving
            own = fitting

    def apply(
        self, update: InventoryUpdate, earlier: Sequence[str], giving: Set[str] = frozenset()
    ) -> Applied | ReportRefusal:
        """giving: providers that other updates give other names."""
        for uuid in [report.uuid for report in update.providers] or (update.root_uuid,):  # the first is the root
            if is_foreign(self._cell(uuid), self._bus):
                return refuse_foreign(uuid)
        if self._is_foreign(update, earlier):
            return refuse_foreign(update.root_uuid)
        for report in update.providers:
            known = self.providers.get(report.uuid)
            # With another parent than it has, the parents of the tree could go round in a circle.
            if report.is_reference and (known is None or known.parent != report.parent_uuid):
                reason = f"the reporter that owns {report.uuid} has not reported it there"
                return ReportRefusal("inventory.not_there", reason)
        own = [report for report in update.providers if not report.is_reference]
        reported = tuple(report.uuid for report in own)
        leaving = self._leaving(update, earlier, {report.uuid for report in update.providers})
        moved, used = self._migrate(own, {*reported, *leaving})
        removed, orphaned = self._partition_leaving(leaving, set(reported), used)
        for report in own:
            owner = self.names.get(report.name)
            # A provider that this update removes, or reports under another name, does not keep the name.
            if owner is not None and owner not in removed and owner not in reported and owner not in giving:
                return ReportRefusal(NAME_TAKEN, f"the name {report.name!r} is {owner}'s")
        touched: dict[str, Provider] = {}
        for report in own:
            old = self.providers.get(report.uuid)
            cell = self._bound(update) if report.uuid == update.root_uuid else None
            touched[report.uuid] = _reported(old, used[report.uuid], report, root=update.root_uuid, cell=cell)
        for uuid in orphaned:
            touched[uuid] = _orphan(replace(self.providers[uuid], used=used[uuid]))
        self._follow_new_roots(touched)
        classes = [
            f"{u}/{n}" for u in reported for n in sorted(n for n, one in touched[u].inventories.items() if one.orphaned)
        ]
        self.moved.update(moved)
        changed = self._commit(touched, removed)
        return Applied(reported, (*orphaned, *classes), bool(changed), changed - {update.root_uuid})

    def _cell(self, uuid: str) -> str | None:
        """The cell that a provider belongs to, which is the cell of its root."""
        provider = self.providers.get(uuid)
        return self.providers[provider.root].cell if provider is not None else None

    def _bound(self, update: InventoryUpdate) -> str | None:
        """Return the cell of a root after a report on this bus. A report on the API bus does not bind an unbound root.

        A reporter on the API bus may name the cell, unless a consumer uses the root: that consumer may belong to
        another cell, which could then no longer release its allocations.
        """
        root = update.root_uuid
        named = update.cell if self._bus == ABOVE_CELLS else None
        if root not in self.providers or (named and not self._is_used(root)):
            return named or self._bus
        return self._cell(root) or (self._bus if self._bus != ABOVE_CELLS else None)

    def _is_foreign(self, update: InventoryUpdate, earlier: Sequence[str]) -> bool:
        """Whether a reporter on the API bus reports, for one cell, a root that it never reported before and that
        belongs to another cell.

        Two Ironics may have a node of one uuid.
        """
        cell, root = self._cell(update.root_uuid), update.root_uuid
        is_other = update.cell is not None and cell not in (None, ABOVE_CELLS, update.cell)
        return self._bus == ABOVE_CELLS and is_other and root not in earlier

    def _is_used(self, root: str) -> bool:
        return any(any(self.providers[uuid].used.values()) for uuid in self.trees.get(root, ()))

    def _migrate(
        self, reports: Sequence[ProviderReport], covered: set[str]
    ) -> tuple[dict[str, ProviderAllocations], _Used]:
        """Return (the new holdings, the usage after them). Allocations move only between the providers of the report's
        own reporter, and away from those that it covers.
        """
        sources = [uuid for uuid in sources_of(reports) if uuid in covered and uuid in self._holders]
        used: _Used = {uuid: self.providers[uuid].used if uuid in self.providers else {} for uuid in sorted(covered)}
        moved: dict[str, ProviderAllocations] = {}
        for source in sources:
            inventories = {report.uuid: _inventories(report) for report in reports}
            now = {consumer: moved.get(consumer) or self._held(consumer) for consumer in self._holders[source]}
            then = migrate_allocations(reports, source, inventories, used, now)
            before = [now[consumer] for consumer in then]
            used = {uuid: usage_after(used[uuid], uuid, before, then.values()) for uuid in used}
            moved.update(then)
        return moved, used

    def _held(self, consumer: str) -> ProviderAllocations:
        return self.moved.get(consumer, self._allocations[consumer])

    def _leaving(self, update: InventoryUpdate, earlier: Sequence[str], reported: set[str]) -> list[str]:
        """The providers of this tree that the reporter no longer reports, deepest first."""
        tree = self.trees.get(update.root_uuid, set())
        is_whole = not reported and update.root_uuid in earlier
        leaving = [u for u in (sorted(tree) if is_whole else earlier) if u in tree and u not in reported]
        return sorted(leaving, key=lambda uuid: (-self._depth(uuid), uuid))

    def _depth(self, uuid: str) -> int:
        above = []
        parent = self.providers[uuid].parent
        while parent is not None:
            above.append(parent)
            parent = self.providers[parent].parent
        return len(above)

    def _partition_leaving(self, leaving: Sequence[str], reported: set[str], used: _Used) -> tuple[set[str], list[str]]:
        """Return (the providers to delete, the providers to strand: a consumer uses them, a child needs them, or
        others gave them something, which a host that is hidden for a moment has to find again).
        """
        removed: set[str] = set()
        orphaned: list[str] = []
        needed: set[str | None] = set()
        if leaving:
            going = set(leaving)
            tree = self.trees[self.providers[leaving[0]].root]
            needed = {self.providers[uuid].parent for uuid in tree if uuid not in going and uuid not in reported}
        for uuid in leaving:
            provider = self.providers[uuid]
            if uuid in needed or any(used[uuid].values()) or (provider.is_changed_by_clients and not self._final):
                orphaned.append(uuid)
                needed.add(provider.parent)
            else:
                removed.add(uuid)
        return removed, orphaned

    def _follow_new_roots(self, touched: dict[str, Provider]) -> None:
        """Set the root of the descendants that were not reported: they stay under their parent, which may have moved to
        another tree.
        """
        known = [(self.providers[uuid], new) for uuid, new in touched.items() if uuid in self.providers]
        left = {old.root for old, new in known if old.parent != new.parent or old.root != new.root}
        for root in sorted(left):
            for uuid in sorted(self.trees[root]):
                provider = touched.get(uuid, self.providers[uuid])
                top = provider
                while top.parent is not None:
                    top = touched.get(top.parent) or self.providers[top.parent]
                if provider.root != top.uuid:
                    touched[uuid] = replace(provider, root=top.uuid)

    def _commit(self, touched: Mapping[str, Provider], removed: set[str]) -> set[str]:
        """Return the roots of the trees that were changed."""
        changed = {self.providers[uuid].root for uuid in removed}
        for uuid in removed:
            provider = self.providers.pop(uuid)
            self._generations[uuid] = provider.generation
            self.trees[provider.root].discard(uuid)
            self.names.pop(provider.name, None)
        renamed = []
        for uuid, provider in touched.items():
            before = self.providers.get(uuid)
            if before == provider:
                continue
            changed |= {provider.root, provider.root if before is None else before.root}
            # A provider that one update removes and another one reports continues its generation, so that older states
            # can be recognised.
            generation = provider.generation if before is not None else self._generations.get(uuid, 0)
            self.providers[uuid] = replace(provider, generation=generation + 1, spec_generation=self._spec_generation)
            if before is not None and before.root == provider.root and before.name == provider.name:
                continue
            if before is not None:
                self.trees[before.root].discard(uuid)
                if self.names.get(before.name) == uuid:
                    del self.names[before.name]
            self.trees.setdefault(provider.root, set()).add(uuid)
            renamed.append((provider.name, uuid))
        self.names.update(renamed)
        return changed


def _inventories(report: ProviderReport) -> dict[str, StoredInventory]:
    return {name: stored_inventory(inventory) for name, inventory in report.inventories.items()}


_NEW = Provider("", "", None, "", 0, 0, {}, {}, (), ())


def _reported(
    before: Provider | None, used: dict[str, int], report: ProviderReport, *, root: str, cell: str | None
) -> Provider:
    old = before or _NEW
    inventories = _inventories(report)
    for name, inventory in old.inventories.items():
        if name not in inventories and used.get(name):
            inventories[name] = _closed(inventory)
    aggregates = old.aggregates if report.aggregates is None else report.aggregates
    return Provider(
        uuid=report.uuid,
        name=report.name,
        parent=report.parent_uuid,
        root=root,
        generation=old.generation,
        spec_generation=old.spec_generation,
        inventories=inventories,
        used=used,
        # A report without the traits that were set through the REST API does not remove them: its service does not
        # know them.
        traits=tuple(sorted({*report.traits, *old.own_traits})),
        aggregates=tuple(sorted(set(aggregates))),
        cell=cell,
        own_traits=old.own_traits,
    )


def _orphan(provider: Provider) -> Provider:
    """Strand a provider: it takes no new allocations, and its unused classes are removed at once. What is kept for
    others' gifts alone gives its name back: the host may be made anew under another uuid.
    """
    inventories = {
        name: _closed(inventory) for name, inventory in provider.inventories.items() if provider.used.get(name)
    }
    if not inventories and provider.is_changed_by_clients:
        return replace(provider, inventories={}, name=provider.uuid, traits=provider.own_traits)
    return replace(provider, inventories=inventories)


def _closed(inventory: StoredInventory) -> StoredInventory:
    return replace(inventory, reserved=inventory.total, capacity=0, orphaned=True)
