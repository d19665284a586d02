"""Decides a group of REST allocation writes, in order, by Placement's rules and against the rows that are locked for
it.

These writes differ from claims of the bus (`claims.py`) where Placement's API does. A write increments the generation
of each provider that it names, and of each provider that a consumer holds when the write leaves that consumer nothing.
It does not increment the generation of a provider that a replacement no longer names, and DELETE increments none.
Amounts must satisfy the inventory's unit constraints even where they do not change. There are no spec generations and
no attempts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace as changed

from placement_worker.domain.claim_ledger import ClaimLedger, ConsumerWrite, Decision
from placement_worker.domain.migration import amount_of
from placement_worker.domain.refusal import Caused, RefusalCode, WriteRefusal, no_such_class
from placement_worker.domain.trees import in_use
from placement_worker.domain.values import (
    NOTHING,
    ClaimedProvider,
    ConsumerState,
    Fit,
    Provider,
    StoredInventory,
    claimed_provider,
    is_allowed_amount,
)


class Replace(Caused, frozen=True):
    """Replace the allocations of several consumers, all or none (microversion 1.13)."""

    writes: tuple[ConsumerWrite, ...]


class Remove(Caused, frozen=True):
    """Remove all allocations of a consumer, whatever its generation (DELETE)."""

    consumer: str


AllocationWrite = Replace | Remove
AllocationOutcome = WriteRefusal | None


def expected_rows(items: Iterable[AllocationWrite]) -> tuple[dict[str, ConsumerState], set[str]]:
    """Return (the row that each named consumer gets if it is new, the providers that are named)."""
    expected: dict[str, ConsumerState] = {}
    wanted: set[str] = set()
    for item in items:
        if isinstance(item, Replace):
            expect(item.writes, expected, wanted)
        else:
            expected.setdefault(item.consumer, ConsumerState(0, 0, "", "", ""))
    return expected, wanted


def classes_of_allocations(items: Iterable[AllocationWrite]) -> set[str]:
    """The resource classes that the writes name."""
    writes = (write for item in items if isinstance(item, Replace) for write in item.writes)
    return {name for write in writes for resources in write.allocations.values() for name in resources}


def entries_of_allocations(item: AllocationWrite) -> int:
    """The consumers, providers and amounts that a write names, by which the work on it grows."""
    if isinstance(item, Remove):
        return 1
    return sum(1 + len(each.allocations) + sum(map(len, each.allocations.values())) for each in item.writes)


def touched(
    items: Sequence[AllocationWrite], outcomes: Sequence[AllocationOutcome], consumers: Mapping[str, ConsumerState]
) -> Iterator[tuple[str, set[str]]]:
    """For each write that was applied, yield its cause and the providers whose usage it may have changed."""
    for item, outcome in zip(items, outcomes, strict=True):
        if isinstance(outcome, WriteRefusal):
            continue
        named = [each.consumer for each in item.writes] if isinstance(item, Replace) else [item.consumer]
        providers = providers_held({uuid: consumers[uuid] for uuid in named if uuid in consumers})
        if isinstance(item, Replace):
            providers.update(*(each.allocations for each in item.writes))
        yield item.cause, providers


def expect(writes: Iterable[ConsumerWrite], expected: dict[str, ConsumerState], wanted: set[str]) -> None:
    """Add the row that each consumer gets if it is new, and the providers that the writes name."""
    for each in writes:
        wanted.update(each.allocations)
        if each.consumer not in expected:
            expected[each.consumer] = ConsumerState(1, 0, each.project_id, each.user_id, each.consumer_type or "")


def providers_held(consumers: Mapping[str, ConsumerState]) -> set[str]:
    """The providers that these consumers hold something of."""
    return {provider for consumer in consumers.values() for provider in consumer.allocations}


def decide(
    items: Sequence[AllocationWrite],
    consumers: Mapping[str, ConsumerState],
    providers: Mapping[str, ClaimedProvider],
    known_classes: Mapping[str, int],
) -> tuple[list[AllocationOutcome], Decision]:
    """Decide a group in order. Each item sees the effects of earlier ones, and is applied as a whole or not at all."""
    ledger = ClaimLedger(consumers, providers, known_classes)
    outcomes = [remove(ledger, item) if isinstance(item, Remove) else replace(ledger, item.writes) for item in items]
    return outcomes, ledger.decision([])


def remove(ledger: ClaimLedger, item: Remove) -> AllocationOutcome:
    """Remove all allocations of one consumer."""
    known = ledger.consumer(item.consumer)
    if known is None or not known.allocations:
        return WriteRefusal(RefusalCode.NO_ALLOCATIONS, f"No allocations for consumer '{item.consumer}'", item.consumer)
    ledger.shift(known.allocations, NOTHING)
    ledger.empty(item.consumer, known)
    return None


def replace(ledger: ClaimLedger, writes: Sequence[ConsumerWrite]) -> AllocationOutcome:
    """Give each consumer exactly the allocations of its write, or return the refusal and change nothing."""
    refusal = _check_generations(ledger, writes) or _check_names(ledger, writes) or _check_capacity(ledger, writes)
    if refusal is None:
        ledger.replace(writes, bump_previous=False)
    return refusal


def _check_generations(ledger: ClaimLedger, writes: Sequence[ConsumerWrite]) -> AllocationOutcome:
    for write in writes:
        if not ledger.is_expected(write):
            known = ledger.consumer(write.consumer)
            generation = known.generation if known is not None and known.allocations else "null"
            words = f"consumer generation conflict - expected {generation} but got {write.expects}"
            return WriteRefusal(RefusalCode.CONSUMER_GENERATION, words, write.consumer)
    return None


def _check_names(ledger: ClaimLedger, writes: Sequence[ConsumerWrite]) -> AllocationOutcome:
    for write in writes:
        for uuid in write.allocations:
            if uuid not in ledger.providers:
                return WriteRefusal(
                    RefusalCode.NO_PROVIDER, f"Allocation for resource provider '{uuid}' that does not exist.", uuid
                )
    for write in writes:
        for resources in write.allocations.values():
            for name in resources:
                if name not in ledger.known_classes:
                    return no_such_class(name)
    return None


def _check_capacity(ledger: ClaimLedger, writes: Sequence[ConsumerWrite]) -> AllocationOutcome:
    """Compare the total that all these consumers hold before and after with the capacities, and each amount with the
    unit constraints.
    """
    before, after = ledger.totals(writes)
    for write in writes:
        for uuid, resources in write.allocations.items():
            inventories = ledger.providers[uuid].inventories
            for name, amount in resources.items():
                inventory = inventories.get(name)
                if inventory is None:
                    return WriteRefusal(
                        RefusalCode.DOES_NOT_FIT, f"Inventory for '{name}' on resource provider '{uuid}' invalid.", uuid
                    )
                if not is_allowed_amount(amount, inventory):
                    return _does_not_fit(name, uuid, "violate inventory constraints")
                if ledger.fit(uuid, name, amount, after[uuid][name] - amount_of(before, uuid, name)) is Fit.NO_CAPACITY:
                    return _does_not_fit(name, uuid, "exceed the capacity")
    return None


def _does_not_fit(name: str, uuid: str, how: str) -> WriteRefusal:
    words = f"Unable to create allocation for '{name}' on resource provider '{uuid}'. The requested amount would {how}."
    return WriteRefusal(RefusalCode.DOES_NOT_FIT, words, uuid)


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
    spec_generation: int,
) -> Reshaped | WriteRefusal:
    """Return the rows to write, or the refusal.

    providers: every provider that the reshape names or that a named consumer holds. spec_generation: the new spec
    generation of the providers whose inventories are written.
    """
    refusal = _check(item, providers, known_classes)
    if refusal is not None:
        return refusal
    interim = dict(providers)
    for uuid, (_, inventories) in item.inventories.items():
        before = providers[uuid]
        interim[uuid] = changed(
            before, inventories={**before.inventories, **inventories}, spec_generation=spec_generation
        )
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
            return WriteRefusal(RefusalCode.NO_PROVIDER, words, uuid)
        if provider.generation != generation:
            return WriteRefusal(
                RefusalCode.GENERATION,
                f"resource provider generation conflict for provider {uuid}: "
                f"actual: {provider.generation}, given: {generation}",
            )
    for _, inventories in item.inventories.values():
        for name in inventories:
            if name not in known_classes:
                return no_such_class(name)
    return None
