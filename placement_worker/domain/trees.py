"""The effects of the REST API's writes on providers, decided one write at a time, against the providers that are locked
for the group.

Generations are incremented exactly as Placement does: by every write of inventories, even when nothing changes; by a
write of traits only when they change; by every write of aggregates from 1.19 on and by none before; not by a rename or
a new parent. berth's own `spec_generation` changes with inventory, traits, aggregates and parentage. Each new spec
generation is a number that placement has never given before, so a provider that is deleted and created again has none
of its old spec generations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import os_resource_classes
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from placement_worker.domain.refusal import (
    Caused,
    RefusalCode,
    WriteRefusal,
    generation_conflict,
    no_provider,
    no_such_class,
)
from placement_worker.domain.values import Provider, StoredInventory

_STANDARD_ORDER = {name: number for number, name in enumerate(os_resource_classes.STANDARDS)}


class ProviderWrite(Caused, frozen=True):
    """A write of one provider."""

    uuid: str


class CreateProvider(ProviderWrite, frozen=True):
    """Create a provider, as a root or below a parent."""

    name: str
    parent: str | None = None


class UpdateProvider(ProviderWrite, frozen=True):
    """Rename a provider, and give it another parent unless `parent` is UNSET. may_reparent: whether a provider that has
    a parent may get another or become a root (from 1.37).
    """

    name: str
    parent: str | UnsetType | None = UNSET
    may_reparent: bool = False


class DeleteProvider(ProviderWrite, frozen=True):
    """Delete a provider and its inventory, unless it has allocations or children."""


class DeleteTree(ProviderWrite, frozen=True):
    """Delete a provider with everything below it, unless one of these providers has allocations."""


class SetInventories(ProviderWrite, frozen=True):
    """Replace all inventories of a provider. generation: the one that the provider must have; None: any. problem: the
    first error among the inventories, empty when there is none.
    """

    inventories: Mapping[str, StoredInventory]
    generation: int | None = None
    problem: str = ""


class WriteInventory(ProviderWrite, frozen=True):
    """Replace one inventory. generation: the one that the provider must have; None: the inventory must not exist yet,
    and is added.
    """

    resource_class: str
    inventory: StoredInventory
    generation: int | None = None
    problem: str = ""


class DeleteInventory(ProviderWrite, frozen=True):
    """Delete one inventory."""

    resource_class: str


class SetTraits(ProviderWrite, frozen=True):
    """Replace all traits of a provider."""

    traits: Sequence[str]
    generation: int | None = None


class SetAggregates(ProviderWrite, frozen=True):
    """Replace all aggregates of a provider. generation: None before 1.19, where the generation is neither compared nor
    incremented.
    """

    aggregates: Sequence[str]
    generation: int | None = None


class ChangeMembership(ProviderWrite, frozen=True):
    """Add a provider to one aggregate or remove it from one; the other aggregates stay. The generation is incremented
    when something changes.
    """

    aggregate: str
    member: bool


TreeWrite = (
    CreateProvider
    | UpdateProvider
    | DeleteProvider
    | DeleteTree
    | SetInventories
    | WriteInventory
    | DeleteInventory
    | SetTraits
    | SetAggregates
    | ChangeMembership
)
TreeOutcome = Provider | WriteRefusal


class TreesToLock(Struct, frozen=True):
    """The providers that a group of writes locks: these, and the whole trees of those in `whole` and of those that have
    one of the names. creating: the providers that may be created.
    """

    uuids: Collection[str] = ()
    names: Collection[str] = ()
    whole: Collection[str] = ()
    creating: Sequence[str] = ()


def trees_to_lock(writes: Iterable[TreeWrite]) -> TreesToLock:
    """The providers that the writes name by uuid or name, and the trees of those that are updated or deleted."""
    uuids: set[str] = set()
    names: set[str] = set()
    whole: set[str] = set()
    creating: dict[str, None] = {}
    for write in writes:
        uuids.add(write.uuid)
        if isinstance(write, CreateProvider | UpdateProvider):
            names.add(write.name)
            if isinstance(write.parent, str):
                uuids.add(write.parent)
        if isinstance(write, CreateProvider):
            creating[write.uuid] = None
        elif isinstance(write, UpdateProvider | DeleteProvider | DeleteTree):
            whole.add(write.uuid)
            if isinstance(write, UpdateProvider) and isinstance(write.parent, str):
                whole.add(write.parent)
    return TreesToLock(uuids, names, whole, list(creating))


def entries_of_tree(write: TreeWrite) -> int:
    """The rows that a write names, by which the work on it grows."""
    if isinstance(write, SetInventories):
        return 1 + len(write.inventories)
    if isinstance(write, SetTraits):
        return 1 + len(write.traits)
    return 1 + len(write.aggregates) if isinstance(write, SetAggregates) else 1


def classes_of_trees(writes: Iterable[TreeWrite]) -> set[str]:
    """The resource classes that the writes name."""
    named: set[str] = set()
    for write in writes:
        if isinstance(write, SetInventories):
            named.update(write.inventories)
        elif isinstance(write, WriteInventory):
            named.add(write.resource_class)
    return named


def traits_of_trees(writes: Iterable[TreeWrite]) -> set[str]:
    """The traits that the writes name."""
    return {trait for write in writes if isinstance(write, SetTraits) for trait in write.traits}


def reparented_providers(writes: Iterable[TreeWrite]) -> list[str]:
    """The providers that writes of a group put below another one."""
    return [write.uuid for write in writes if isinstance(write, UpdateProvider) and isinstance(write.parent, str)]


def deleted_trees(writes: Iterable[TreeWrite], outcomes: Iterable[TreeOutcome]) -> list[str]:
    """The providers that writes of a group have deleted with everything below them."""
    pairs = zip(writes, outcomes, strict=True)
    return [write.uuid for write, outcome in pairs if isinstance(write, DeleteTree) and isinstance(outcome, Provider)]


class ProviderTrees:
    """The providers of one group of writes: first as loaded, then as the writes so far have left them.

    spec_generation: the spec generation of every provider that the group creates or changes. reported: roots that a
    source reports.
    """

    def __init__(
        self,
        providers: Mapping[str, Provider],
        known_classes: Collection[str],
        known_traits: Collection[str],
        *,
        spec_generation: int,
        reported: Collection[str] = (),
    ) -> None:
        self.providers = dict(providers)
        self._spec_generation = spec_generation
        self._reported = reported
        self._names = {provider.name: provider.uuid for provider in providers.values()}
        self._known_classes = known_classes
        self._known_traits = known_traits

    def apply(self, write: TreeWrite) -> TreeOutcome:
        """Apply one write. Returns the provider as the write leaves it (for a delete: as it was before), or the
        refusal.
        """
        if isinstance(write, CreateProvider):
            return self._create(write)
        before = self.providers.get(write.uuid)
        if before is None:
            return no_provider(write.uuid)
        outcome = _APPLY[type(write)](self, before, write)
        if isinstance(outcome, Provider) and not isinstance(write, DeleteProvider | DeleteTree):
            self.providers[write.uuid] = outcome
        return outcome

    def _create(self, write: CreateProvider) -> TreeOutcome:
        taken = []
        if write.uuid in self.providers:
            taken.append(f"uuid: {write.uuid}")
        if write.name in self._names:
            taken.append(f"name: {write.name}")
        root = write.uuid
        if write.parent is not None:
            if write.parent == write.uuid:
                return _bad_parent(
                    "create",
                    "parent provider UUID cannot be same as UUID. "
                    "Please set parent provider UUID to None if there is no parent.",
                )
            parent = self.providers.get(write.parent)
            if parent is None:
                return _bad_parent("create", "parent provider UUID does not exist.")
            root = parent.root
        if taken:
            return WriteRefusal(RefusalCode.DUPLICATE, ", ".join(taken), write.name)
        created = Provider(write.uuid, write.name, write.parent, root, 0, self._spec_generation, {}, {}, (), ())
        self.providers[write.uuid] = created
        self._names[write.name] = write.uuid
        return created

    def update(self, before: Provider, write: UpdateProvider) -> TreeOutcome:
        """Rename the provider and give it another parent."""
        moved = before
        subtree: list[str] = []
        if write.parent is not UNSET and (write.parent is not None or before.parent is not None):
            target = self._target(before, write.parent, may_reparent=write.may_reparent)
            if isinstance(target, WriteRefusal):
                return target
            subtree = self._subtree(before)
            if write.parent in subtree:
                return _bad_parent("update", "creating loop in the provider tree is not allowed.")
            if (write.parent, target) != (before.parent, before.root):
                moved = replace(before, parent=write.parent, root=target, spec_generation=self._spec_generation)
        if self._names.get(write.name, before.uuid) != before.uuid:
            return WriteRefusal(RefusalCode.DUPLICATE, f"name: {write.name}", write.name)
        if moved.root != before.root:
            for uuid in subtree[1:]:
                below = self.providers[uuid]
                self.providers[uuid] = replace(below, root=moved.root, spec_generation=self._spec_generation)
        if write.name != before.name:
            self._names.pop(before.name, None)
            self._names[write.name] = before.uuid
            moved = replace(moved, name=write.name)
        return moved

    def _target(self, before: Provider, wanted: str | None, *, may_reparent: bool) -> str | WriteRefusal:
        """Return the root of the provider below the wanted parent, or the refusal."""
        if wanted is None:
            if not may_reparent:
                return _bad_parent("update", "un-parenting a provider is not currently allowed.")
            return before.uuid
        parent = self.providers.get(wanted)
        if parent is None:
            return _bad_parent("create", "parent provider UUID does not exist.")
        if before.uuid in self._reported:
            # Builds would be sent to the host by another root than its own, until its source reports it again.
            return _bad_parent("update", "the provider is a host, which its source reports as a root.")
        if before.parent is not None and before.parent != parent.uuid and not may_reparent:
            return _bad_parent("update", "re-parenting a provider is not currently allowed.")
        return parent.root

    def _subtree(self, top: Provider) -> list[str]:
        """The provider and everything below it, itself first."""
        children: dict[str | None, list[str]] = {}
        for provider in self.providers.values():
            children.setdefault(provider.parent, []).append(provider.uuid)
        found = [top.uuid]
        for uuid in found:  # `found` grows while it is read; the loop ends because a tree has no cycles
            found.extend(children.get(uuid, ()))
        return found

    def delete(self, before: Provider, _write: DeleteProvider) -> TreeOutcome:
        """Remove the provider."""
        if any(provider.parent == before.uuid for provider in self.providers.values()):
            return WriteRefusal(RefusalCode.IS_PARENT, "It has child resource providers.", before.uuid)
        if any(before.used.values()):
            return WriteRefusal(RefusalCode.PROVIDER_IN_USE, "Resource provider has allocations.", before.uuid)
        del self.providers[before.uuid]
        self._names.pop(before.name, None)
        return before

    def delete_tree(self, before: Provider, _write: DeleteTree) -> TreeOutcome:
        """Remove the provider and everything below it."""
        tree = [self.providers[uuid] for uuid in self._subtree(before)]
        if used := used_of(tree):
            amounts = ", ".join(f"{name} {amount}" for name, amount in sorted(used.items()))
            return WriteRefusal(RefusalCode.PROVIDER_IN_USE, f"consumers hold {amounts} of it", before.uuid)
        for provider in tree:
            del self.providers[provider.uuid]
            self._names.pop(provider.name, None)
        return before

    def set_inventories(self, before: Provider, write: SetInventories) -> TreeOutcome:
        """Replace all inventories."""
        return self._refusal(before, write, write.inventories) or with_inventories(
            before, self._spec_generation, write.inventories
        )

    def write_inventory(self, before: Provider, write: WriteInventory) -> TreeOutcome:
        """Change or add one inventory."""
        name = write.resource_class
        if (refusal := self._refusal(before, write, (name,))) is not None:
            return refusal
        if write.generation is None and name in before.inventories:
            return WriteRefusal(RefusalCode.DUPLICATE, f"inventory of class {name} already exists")
        if write.generation is not None and name not in before.inventories:
            return WriteRefusal(RefusalCode.NO_INVENTORY, f"No inventory of class {name} found.")
        return with_inventories(before, self._spec_generation, {**before.inventories, name: write.inventory})

    def _refusal(
        self, before: Provider, write: SetInventories | WriteInventory, classes: Iterable[str]
    ) -> WriteRefusal | None:
        """What speaks against a write of inventories, whatever inventories the provider has."""
        if write.generation not in {None, before.generation}:
            return generation_conflict()
        if write.problem:
            return WriteRefusal(RefusalCode.BAD_INVENTORY, write.problem)
        return next((no_such_class(name) for name in classes if name not in self._known_classes), None)

    def delete_inventory(self, before: Provider, write: DeleteInventory) -> TreeOutcome:
        """Remove one inventory."""
        if write.resource_class not in self._known_classes:
            return WriteRefusal(RefusalCode.NO_INVENTORY, no_such_class(write.resource_class).words)
        if write.resource_class not in before.inventories:
            return WriteRefusal(
                RefusalCode.NO_INVENTORY, f"No inventory of class {write.resource_class} found for delete"
            )
        return with_inventories(
            before,
            self._spec_generation,
            {name: s for name, s in before.inventories.items() if name != write.resource_class},
        )

    def set_traits(self, before: Provider, write: SetTraits) -> TreeOutcome:
        """Replace all traits."""
        if write.generation is not None and write.generation != before.generation:
            return WriteRefusal(RefusalCode.GENERATION, _CHANGED)
        unknown = [trait for trait in dict.fromkeys(write.traits) if trait not in self._known_traits]
        if unknown:
            return WriteRefusal(RefusalCode.NO_SUCH, f"No such trait {', '.join(unknown)}")
        traits = tuple(sorted(set(write.traits)))
        if traits == before.traits:
            return before
        # New traits are lasting: reports do not remove what was set through the API. Other traits keep their mark.
        marked, known = set(before.own_traits), set(before.traits)
        lasting = tuple(trait for trait in traits if trait in marked or trait not in known)
        return replace(
            before,
            traits=traits,
            own_traits=lasting,
            generation=before.generation + 1,
            spec_generation=self._spec_generation,
        )

    def set_aggregates(self, before: Provider, write: SetAggregates) -> TreeOutcome:
        """Replace all aggregates."""
        if write.generation is not None and write.generation != before.generation:
            return WriteRefusal(RefusalCode.GENERATION, _CHANGED)
        generation = before.generation + (write.generation is not None)
        aggregates = tuple(sorted(set(write.aggregates)))
        if aggregates == before.aggregates:
            return replace(before, generation=generation) if generation != before.generation else before
        return replace(before, aggregates=aggregates, generation=generation, spec_generation=self._spec_generation)

    def change_membership(self, before: Provider, write: ChangeMembership) -> TreeOutcome:
        """Add or remove one aggregate."""
        if (write.aggregate in before.aggregates) is write.member:
            return before
        others = {one for one in before.aggregates if one != write.aggregate}
        aggregates = tuple(sorted(others | {write.aggregate} if write.member else others))
        return replace(
            before, aggregates=aggregates, generation=before.generation + 1, spec_generation=self._spec_generation
        )


_CHANGED = "Resource provider's generation already changed. Please update the generation and try again."

_APPLY: dict[type[TreeWrite], Callable[..., TreeOutcome]] = {
    UpdateProvider: ProviderTrees.update,
    DeleteProvider: ProviderTrees.delete,
    DeleteTree: ProviderTrees.delete_tree,
    SetInventories: ProviderTrees.set_inventories,
    WriteInventory: ProviderTrees.write_inventory,
    DeleteInventory: ProviderTrees.delete_inventory,
    SetTraits: ProviderTrees.set_traits,
    SetAggregates: ProviderTrees.set_aggregates,
    ChangeMembership: ProviderTrees.change_membership,
}


def used_of(providers: Iterable[Provider]) -> Counter[str]:
    """How much consumers hold of these providers together, by resource class; only classes of which they hold some."""
    used: Counter[str] = Counter()
    for provider in providers:
        used.update(provider.used)
    return +used


def with_inventories(before: Provider, spec_generation: int, inventories: Mapping[str, StoredInventory]) -> TreeOutcome:
    """Return the provider with these inventories, and with this spec generation if they differ from its own; or the
    refusal when an inventory in use would be removed.
    """
    missing = [name for name in before.inventories if name not in inventories and before.used.get(name)]
    if missing:
        return in_use(before.uuid, missing)
    spec_generation = before.spec_generation if before.inventories == inventories else spec_generation
    return replace(
        before, inventories=dict(inventories), generation=before.generation + 1, spec_generation=spec_generation
    )


def in_use(provider: str, classes: Iterable[str]) -> WriteRefusal:
    """The refusal to remove inventories in use. It lists the standard classes in Placement's order, then custom
    ones.
    """
    named = ", ".join(sorted(classes, key=lambda name: (_STANDARD_ORDER.get(name, len(_STANDARD_ORDER)), name)))
    return WriteRefusal(
        RefusalCode.IN_USE, f"Inventory for '{named}' on resource provider '{provider}' in use.", provider
    )


def _bad_parent(action: str, reason: str) -> WriteRefusal:
    return WriteRefusal(RefusalCode.BAD_PARENT, f"Object action {action} failed because: {reason}")
