"""Decides what inventory updates do to the book: whole trees, as their sources see them, against the providers loaded.

An update from the bus is applied or refused whole, and it must never wedge its source: a provider or class that a
report no longer mentions but a consumer still uses is not an error, it is *stranded* (capacity 0, no new allocations)
and is deleted with the first report that finds it unused (docs/decisions/0002-stranded-inventory.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.placement import Change, InventoryUpdate, ProviderReport
from placement_worker.domain.allocation_migration import migrate_allocations, sources_of, usage_after
from placement_worker.domain.names import is_class, is_custom, suggestion
from placement_worker.domain.values import (
    ABOVE_CELLS,
    Holding,
    Provider,
    StoredInventory,
    is_foreign,
    state_of,
    stored_inventory,
)

MAX_SHOWN = 64  # of a name that is refused
NO_HOLDINGS: Mapping[str, Holding] = {}
_Used = dict[str, dict[str, int]]


class ReportRefusal(Struct, frozen=True):
    """An update that cannot be applied, and why."""

    code: str
    reason: str


class Applied(Struct, frozen=True):
    """An update that was applied: the reported rows, the stranded ones, and whether anything changed.

    stranded: a provider's uuid, or `uuid/CLASS` where only a class of a reported provider is still in use.
    """

    reported: tuple[str, ...]
    stranded: tuple[str, ...]
    changed: bool


class ReportPlan(Struct, frozen=True):
    """The result of a group of updates: each one's result, and the providers loaded as they are to be afterwards.

    moved: what consumers hold afterwards whose allocations followed a class to another provider.
    """

    results: list[Applied | ReportRefusal]
    after: dict[str, Provider]
    moved: dict[str, Holding]


def foreign(uuid: str) -> ReportRefusal:
    """A cell's bus reports what belongs to another cell."""
    return ReportRefusal("inventory.foreign_cell", f"{uuid} belongs to another cell")


def flaw(update: InventoryUpdate, known_traits: Collection[str]) -> ReportRefusal | None:
    """The error of an update by itself, without a look at the book; or None."""
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
        if report.name in names and not report.theirs:
            return ReportRefusal("provider.name_taken", f"two providers are named {report.name!r}")
        if "\x00" in report.name:
            return ReportRefusal("provider.name", f"the name of {report.uuid} has a NUL character")
        if report.takes_from == report.uuid:
            return ReportRefusal("inventory.takes_from", f"{report.uuid} cannot take from itself")
        seen.add(report.uuid)
        names.update(() if report.theirs else (report.name,))
        wrong = _flaw_of_report(report, known_traits)
        if wrong is not None:
            return wrong
    return None


def _flaw_of_report(report: ProviderReport, known_traits: Collection[str]) -> ReportRefusal | None:
    for name, inventory in report.inventories.items():
        if not is_class(name):
            shown = name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}..."
            reason = f"{shown!r} is neither a standard resource class nor CUSTOM_{suggestion(name)}"
            return ReportRefusal("class.unknown", reason)
        if inventory.reserved > inventory.total:
            return ReportRefusal("inventory.reserved", f"{name} of {report.uuid}: reserved exceeds total")
    for trait in report.traits:
        if not is_custom(trait) and trait not in known_traits:
            reason = f"{trait} is neither a standard trait nor CUSTOM_{suggestion(trait, known_traits)}"
            return ReportRefusal("trait.unknown", reason)
    return None


def plan(
    updates: Sequence[InventoryUpdate],
    earlier: Sequence[Sequence[str]],
    book: Mapping[str, Provider],
    holdings: Mapping[str, Holding] = NO_HOLDINGS,
    bus: str = ABOVE_CELLS,
    *,
    shape: int,
) -> ReportPlan:
    """Apply flawless updates that came on one bus, in order, each whole or not at all.

    earlier[n]: the previous report of the source of updates[n] about that root. book: every provider of every tree that
    holds a root, a provider or a name in the updates. holdings: of every consumer of a provider that others take from.
    shape: the shape of every provider that changes; higher than any that the book has given.
    """
    draft = _Draft(book, holdings, bus, shape)
    results = [draft.apply(update, before) for update, before in zip(updates, earlier, strict=True)]
    return ReportPlan(results, draft.providers, draft.moved)


def changes_of(before: Mapping[str, Provider], after: Mapping[str, Provider]) -> list[Change]:
    """The feed's words for the way from one book to the other: whole states, parents before children, removals last.

    A generation that went back is of a provider that was deleted and created again on the way (by the REST API, where
    it starts from 0): that it was removed comes first, or readers of the feed would take its state for an older one.
    """
    created_again = [uuid for uuid, old in before.items() if uuid in after and after[uuid].generation < old.generation]
    changes = [_removed(before[uuid]) for uuid in created_again]
    changes += [
        Change(sequence=0, provider=uuid, generation=provider.generation, state=state_of(provider))
        for uuid, provider in after.items()
        if before.get(uuid) is not provider
    ]
    changes += [_removed(provider) for uuid, provider in before.items() if uuid not in after]
    return changes


def _removed(provider: Provider) -> Change:
    return Change(sequence=0, provider=provider.uuid, generation=provider.generation + 1, removed=True)


class _Draft:
    """The book as the updates so far have left it. A refused update leaves no trace."""

    def __init__(self, book: Mapping[str, Provider], holdings: Mapping[str, Holding], bus: str, shape: int) -> None:
        self.providers = dict(book)
        self._bus = bus
        self._shape = shape
        self._generations: dict[str, int] = {}  # of providers that an update has removed, and another may report again
        self.moved: dict[str, Holding] = {}
        self._holdings = holdings
        self._holders: dict[str, list[str]] = {}
        for consumer, holding in holdings.items():
            for uuid in holding:
                self._holders.setdefault(uuid, []).append(consumer)
        self.names = {provider.name: provider.uuid for provider in book.values()}
        self.trees: dict[str, set[str]] = {}
        for provider in book.values():
            self.trees.setdefault(provider.root, set()).add(provider.uuid)

    def apply(self, update: InventoryUpdate, earlier: Sequence[str]) -> Applied | ReportRefusal:
        named = {report.uuid for report in update.providers}
        for uuid in (update.root_uuid, *(report.uuid for report in update.providers)):
            if is_foreign(self._cell(uuid), self._bus):
                return foreign(uuid)
        if self._is_anothers(update, earlier):
            return foreign(update.root_uuid)
        for report in update.providers:
            known = self.providers.get(report.uuid)
            if report.theirs and (known is None or known.root != update.root_uuid):
                reason = f"the source that owns {report.uuid} has not reported it in this tree"
                return ReportRefusal("inventory.not_there", reason)
        own = [report for report in update.providers if not report.theirs]
        reported = tuple(report.uuid for report in own)
        leaving = self._leaving(update, earlier, named)
        moved, used = self._migrate(update, {*reported, *leaving})
        gone, stranded = self._partition_leaving(leaving, set(reported), used)
        for report in own:
            owner = self.names.get(report.name)
            # An owner that this update removes, or reports under another name, gives the name up.
            if owner is not None and owner not in gone and owner not in reported:
                return ReportRefusal("provider.name_taken", f"the name {report.name!r} is {owner}'s")
        touched: dict[str, Provider] = {}
        for report in own:
            old = self.providers.get(report.uuid)
            cell = self._bound(update) if report.uuid == update.root_uuid else None
            touched[report.uuid] = _reported(old, used[report.uuid], report, root=update.root_uuid, cell=cell)
        for uuid in stranded:
            touched[uuid] = _strand(replace(self.providers[uuid], used=used[uuid]))
        self._follow_moves(touched, gone)
        classes = [
            f"{u}/{n}"
            for u in reported
            for n, inventory in sorted(touched[u].inventories.items())
            if inventory.stranded
        ]
        self.moved.update(moved)
        return Applied(reported, (*stranded, *classes), self._commit(touched, gone))

    def _cell(self, uuid: str) -> str | None:
        """The cell that a provider belongs to: its root's."""
        provider = self.providers.get(uuid)
        return self.providers[provider.root].cell if provider is not None else None

    def _bound(self, update: InventoryUpdate) -> str | None:
        """The cell of a root once this bus has reported it. The API bus leaves an unbound root to its cell.

        A source above cells may name the cell of an unbound root that no consumer uses: a consumer there may be of
        another cell, which could not release it any more.
        """
        root = update.root_uuid
        named = update.cell if self._bus == ABOVE_CELLS else None
        if root not in self.providers:
            return named or self._bus
        known = self._cell(root)
        if named and known in (None, ABOVE_CELLS) and not self._is_used(root):
            return named
        return known or (self._bus if self._bus != ABOVE_CELLS else None)

    def _is_anothers(self, update: InventoryUpdate, earlier: Sequence[str]) -> bool:
        """Whether a source above cells reports, for one cell, a root that it never had and that is another cell's.

        Two Ironics may have a node of one uuid.
        """
        cell, root = self._cell(update.root_uuid), update.root_uuid
        is_other = update.cell is not None and cell not in (None, ABOVE_CELLS, update.cell)
        return self._bus == ABOVE_CELLS and is_other and root not in earlier

    def _is_used(self, root: str) -> bool:
        return any(any(self.providers[uuid].used.values()) for uuid in self.trees.get(root, ()))

    def _migrate(self, update: InventoryUpdate, own: set[str]) -> tuple[dict[str, Holding], _Used]:
        """(the moves, the usage after them). Only from providers that this report is about: `own`."""
        sources = [uuid for uuid in sources_of(update.providers) if uuid in own and uuid in self._holders]
        used: _Used = {uuid: self.providers[uuid].used if uuid in self.providers else {} for uuid in sorted(own)}
        moved: dict[str, Holding] = {}
        inventories = {report.uuid: _inventories(report) for report in update.providers} if sources else {}
        for source in sources:
            now = {consumer: moved.get(consumer) or self._held(consumer) for consumer in self._holders[source]}
            then = migrate_allocations(update.providers, source, inventories, used, now)
            before = [now[consumer] for consumer in then]
            used = {uuid: usage_after(used[uuid], uuid, before, then.values()) for uuid in used}
            moved.update(then)
        return moved, used

    def _held(self, consumer: str) -> Holding:
        return self.moved.get(consumer, self._holdings[consumer])

    def _leaving(self, update: InventoryUpdate, earlier: Sequence[str], reported: set[str]) -> list[str]:
        """Providers of this tree that this source no longer reports, deepest first."""
        tree = self.trees.get(update.root_uuid, set())
        leaving = [u for u in (sorted(tree) if not reported else earlier) if u in tree and u not in reported]
        return sorted(leaving, key=lambda uuid: (-self._depth(uuid), uuid))

    def _depth(self, uuid: str) -> int:
        depth = 0
        parent = self.providers[uuid].parent
        while parent is not None:
            depth += 1
            parent = self.providers[parent].parent
        return depth

    def _partition_leaving(self, leaving: Sequence[str], reported: set[str], used: _Used) -> tuple[set[str], list[str]]:
        """(those that can go, those that a consumer still uses or a child still hangs on)."""
        gone: set[str] = set()
        stranded: list[str] = []
        needed: set[str | None] = set()
        if leaving:
            going = set(leaving)
            tree = self.trees[self.providers[leaving[0]].root]
            needed = {self.providers[uuid].parent for uuid in tree if uuid not in going and uuid not in reported}
        for uuid in leaving:
            provider = self.providers[uuid]
            if uuid in needed or any(used[uuid].values()):
                stranded.append(uuid)
                needed.add(provider.parent)
            else:
                gone.add(uuid)
        return gone, stranded

    def _follow_moves(self, touched: dict[str, Provider], gone: set[str]) -> None:
        """Unreported descendants stay under their parent: their root follows it, wherever it went."""
        moved = {
            self.providers[uuid].root
            for uuid, provider in touched.items()
            if uuid in self.providers and self.providers[uuid].root != provider.root
        }
        for root in sorted(moved):
            for uuid in sorted(self.trees[root]):
                if uuid in gone:
                    continue
                provider = touched.get(uuid, self.providers[uuid])
                top = provider
                while top.parent is not None:
                    top = touched.get(top.parent) or self.providers[top.parent]
                if provider.root != top.uuid:
                    touched[uuid] = replace(provider, root=top.uuid)

    def _commit(self, touched: Mapping[str, Provider], gone: set[str]) -> bool:
        changed = bool(gone)
        for uuid in gone:
            provider = self.providers.pop(uuid)
            self._generations[uuid] = provider.generation
            self.trees[provider.root].discard(uuid)
            self.names.pop(provider.name, None)
        renamed = []
        for uuid, provider in touched.items():
            before = self.providers.get(uuid)
            if before == provider:
                continue
            changed = True
            if before is not None:
                self.trees[before.root].discard(uuid)
                if before.name != provider.name and self.names.get(before.name) == uuid:
                    del self.names[before.name]
            # A provider that moved from one report to another continues its generation: an older generation is
            # recognised by that.
            generation = provider.generation if before is not None else self._generations.get(uuid, 0)
            self.providers[uuid] = replace(provider, generation=generation + 1, shape=self._shape)
            self.trees.setdefault(provider.root, set()).add(uuid)
            renamed.append((provider.name, uuid))
        self.names.update(renamed)
        return changed


def _inventories(report: ProviderReport) -> dict[str, StoredInventory]:
    return {name: stored_inventory(inventory) for name, inventory in report.inventories.items()}


def _reported(
    before: Provider | None, used: dict[str, int], report: ProviderReport, *, root: str, cell: str | None
) -> Provider:
    inventories = _inventories(report)
    if before is not None:
        for name, inventory in before.inventories.items():
            if name not in inventories and used.get(name):
                inventories[name] = _closed(inventory)
    aggregates = report.aggregates
    if aggregates is None:
        aggregates = before.aggregates if before is not None else ()
    # An operator gave the host these: its service does not have them, and so cannot mean to remove them.
    lasting = before.lasting if before is not None else ()
    return Provider(
        uuid=report.uuid,
        name=report.name,
        parent=report.parent_uuid,
        root=root,
        generation=before.generation if before is not None else 0,
        shape=before.shape if before is not None else 0,
        inventories=inventories,
        used=used,
        traits=tuple(sorted({*report.traits, *lasting})),
        aggregates=tuple(sorted(set(aggregates))),
        cell=cell,
        lasting=lasting,
    )


def _strand(provider: Provider) -> Provider:
    """Nothing new goes to it. Classes that no consumer uses go at once."""
    inventories = {
        name: _closed(inventory) for name, inventory in provider.inventories.items() if provider.used.get(name)
    }
    return replace(provider, inventories=inventories)


def _closed(inventory: StoredInventory) -> StoredInventory:
    return replace(inventory, reserved=inventory.total, capacity=0, stranded=True)
