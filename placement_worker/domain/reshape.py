"""Decides one reshape, which replaces inventories and the allocations that follow them, all or none (microversion
1.30).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace as changed

from placement_worker.domain.allocations import replace
from placement_worker.domain.causes import Caused
from placement_worker.domain.claim_ledger import ClaimLedger, ConsumerWrite, Decision
from placement_worker.domain.refusal import Why, WriteRefusal, no_such_class
from placement_worker.domain.trees import in_use
from placement_worker.domain.values import ConsumerState, Provider, StoredInventory, claimed_provider


class Reshape(Caused, frozen=True):
    """One reshape. inventories: {provider: (the generation that it must have, its new inventories)}. writes: the new
    allocations.
    """

    inventories: Mapping[str, tuple[int, Mapping[str, StoredInventory]]]
    writes: tuple[ConsumerWrite, ...]


class Reshaped(Struct, frozen=True):
    """The rows of a reshape. interim: providers with their old and new inventories together, so that allocations can
    move between them. final: providers with their new inventories alone.
    """

    interim: dict[str, Provider]
    decision: Decision
    final: dict[str, Provider]


def reshape(
    item: Reshape,
    consumers: Mapping[str, ConsumerState],
    providers: Mapping[str, Provider],
    known_classes: Mapping[str, int],
    *,
    shape: int,
) -> Reshaped | WriteRefusal:
    """Return the rows to write, or the refusal.

    providers: every provider that the reshape names or that a named consumer holds. shape: the new shape of the
    providers whose inventories are written.
    """
    refusal = _check(item, providers, known_classes)
    if refusal is not None:
        return refusal
    interim = dict(providers)
    for uuid, (_, inventories) in item.inventories.items():
        before = providers[uuid]
        interim[uuid] = changed(before, inventories={**before.inventories, **inventories}, shape=shape)
    ledger = ClaimLedger(consumers, {uuid: claimed_provider(p) for uuid, p in interim.items()}, known_classes)
    refusal = replace(ledger, item.writes)
    if refusal is not None:
        return refusal
    final: dict[str, Provider] = {}
    for uuid, (_, inventories) in item.inventories.items():
        used = {**interim[uuid].used, **ledger.used.get(uuid, {})}
        left = [name for name in interim[uuid].inventories if name not in inventories and used.get(name)]
        if left:
            return in_use(uuid, left)
        # Placement increments the generation once for the interim inventories if there are any, once for the
        # allocations, and once for the final inventories.
        generation = ledger.generations.get(uuid, interim[uuid].generation) + bool(inventories) + 1
        kept = {name: amount for name, amount in used.items() if amount}
        final[uuid] = changed(interim[uuid], inventories=dict(inventories), used=kept, generation=generation)
    return Reshaped({uuid: interim[uuid] for uuid in item.inventories}, ledger.decision([]), final)


def _check(item: Reshape, providers: Mapping[str, Provider], known_classes: Mapping[str, int]) -> WriteRefusal | None:
    for uuid, (generation, _) in item.inventories.items():
        provider = providers.get(uuid)
        if provider is None:
            words = f"Resource provider {uuid} in inventories not found: No resource provider with uuid {uuid} found"
            return WriteRefusal(Why.NO_PROVIDER, words, uuid)
        if provider.generation != generation:
            return WriteRefusal(
                Why.GENERATION,
                f"resource provider generation conflict for provider {uuid}: "
                f"actual: {provider.generation}, given: {generation}",
            )
    for _, inventories in item.inventories.values():
        for name in inventories:
            if name not in known_classes:
                return no_such_class(name)
    return None
