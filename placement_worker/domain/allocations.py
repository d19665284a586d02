"""Decides a group of REST allocation writes, in order, by Placement's rules and against the rows that are locked for
it.

These writes differ from claims of the bus (`claims.py`) where Placement's API does. A write increments the generation
of each provider that it names, and of each provider that a consumer holds when the write leaves that consumer nothing.
It does not increment the generation of a provider that a replacement no longer names, and DELETE increments none.
Amounts must satisfy the inventory's unit constraints even where they do not change. There are no shapes and no
attempts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from placement_worker.domain.causes import Caused
from placement_worker.domain.claim_verdict import Decision
from placement_worker.domain.refusal import Why, WriteRefusal, no_such_class
from placement_worker.domain.units import is_allowed_amount
from placement_worker.domain.values import NOTHING, ClaimedProvider, ConsumerState, Holding


class AnyGeneration(Struct, frozen=True):
    """The write names no consumer generation, as all writes before microversion 1.28."""


ANY = AnyGeneration()
Expected = int | None | AnyGeneration


class ConsumerWrite(Struct, frozen=True):
    """The new allocations of one consumer; an empty holding removes it.

    expects: the generation that the consumer must have; None: the consumer must not exist. consumer_type: None before
    1.38; an existing consumer then keeps its type, and a new one has none.
    """

    consumer: str
    holding: Holding
    project_id: str
    user_id: str
    consumer_type: str | None = None
    expects: Expected = ANY


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
    return {name for write in writes for resources in write.holding.values() for name in resources}


def entries_of_allocations(item: AllocationWrite) -> int:
    """The consumers, providers and amounts that a write names, by which the work on it grows."""
    if isinstance(item, Remove):
        return 1
    return sum(1 + len(each.holding) + sum(map(len, each.holding.values())) for each in item.writes)


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
            providers.update(*(each.holding for each in item.writes))
        yield item.cause, providers


def expect(writes: Iterable[ConsumerWrite], expected: dict[str, ConsumerState], wanted: set[str]) -> None:
    """Add the row that each consumer gets if it is new, and the providers that the writes name."""
    for each in writes:
        wanted.update(each.holding)
        if each.consumer not in expected:
            expected[each.consumer] = ConsumerState(1, 0, each.project_id, each.user_id, each.consumer_type or "")


def providers_held(consumers: Mapping[str, ConsumerState]) -> set[str]:
    """The providers that these consumers hold something of."""
    return {provider for consumer in consumers.values() for provider in consumer.holding}


class AllocationLedger:
    """The state of one group while it is decided: the loaded rows, overlaid by the decisions so far."""

    def __init__(
        self,
        consumers: Mapping[str, ConsumerState],
        providers: Mapping[str, ClaimedProvider],
        known_classes: Mapping[str, int],
    ) -> None:
        self._consumers = consumers
        self.providers = providers
        self.known_classes = known_classes
        self.changed: dict[str, ConsumerState | None] = {}
        self.used: dict[str, dict[str, int]] = {}
        self.generations: dict[str, int] = {}

    def decision(self) -> Decision:
        """The rows to write."""
        return Decision([], self.changed, self.used, self.generations)

    def consumer(self, uuid: str) -> ConsumerState | None:
        """The consumer after the decisions so far. A consumer that holds nothing is only a fence against old
        attempts.
        """
        return self.changed[uuid] if uuid in self.changed else self._consumers.get(uuid)

    def used_of(self, uuid: str, name: str) -> int:
        """The usage of one class of a provider after the decisions so far."""
        touched = self.used.get(uuid)
        if touched is not None and name in touched:
            return touched[name]
        return self.providers[uuid].inventories[name].used

    def move(self, before: Holding, after: Holding) -> None:
        """Change the usage by the difference between two holdings, and leave the generations as they are."""
        for sign, holding in ((-1, before), (1, after)):
            for uuid, resources in holding.items():
                touched = self.used.setdefault(uuid, {})
                for name, amount in resources.items():
                    touched[name] = self.used_of(uuid, name) + sign * amount
                self.generations.setdefault(uuid, self.providers[uuid].generation)

    def bump(self, uuids: Iterable[str]) -> None:
        """Increment the generation of each of these providers."""
        for uuid in uuids:
            self.generations[uuid] = self.generations.get(uuid, self.providers[uuid].generation) + 1


def decide(
    items: Sequence[AllocationWrite],
    consumers: Mapping[str, ConsumerState],
    providers: Mapping[str, ClaimedProvider],
    known_classes: Mapping[str, int],
) -> tuple[list[AllocationOutcome], Decision]:
    """Decide a group in order. Each item sees the effects of earlier ones, and is applied as a whole or not at all."""
    ledger = AllocationLedger(consumers, providers, known_classes)
    outcomes = [remove(ledger, item) if isinstance(item, Remove) else replace(ledger, item.writes) for item in items]
    return outcomes, ledger.decision()


def remove(ledger: AllocationLedger, item: Remove) -> AllocationOutcome:
    """Remove all allocations of one consumer."""
    known = ledger.consumer(item.consumer)
    if known is None or not known.holding:
        return WriteRefusal(Why.NO_ALLOCATIONS, f"No allocations for consumer '{item.consumer}'", item.consumer)
    ledger.move(known.holding, NOTHING)
    ledger.changed[item.consumer] = None
    return None


def replace(ledger: AllocationLedger, writes: Sequence[ConsumerWrite]) -> AllocationOutcome:
    """Give each consumer exactly the allocations of its write, or return the refusal and change nothing."""
    known = {write.consumer: _holder(ledger, write.consumer) for write in writes}
    for write in writes:
        refusal = _check_generation(write, known[write.consumer])
        if refusal is not None:
            return refusal
    refusal = _check_names(ledger, writes) or _check_capacity(ledger, writes, known)
    if refusal is not None:
        return refusal
    written: dict[str, None] = {}  # each provider once, in a stated order
    for write in writes:
        consumer = known[write.consumer]
        held = consumer.holding if consumer is not None else NOTHING
        ledger.move(held, write.holding)
        written.update(dict.fromkeys(write.holding or held))
        if write.holding:
            ledger.changed[write.consumer] = _written(ledger, write)
        elif consumer is not None:
            # A late claim of an attempt that is over must not bring the consumer back.
            fence = ConsumerState(
                consumer.generation, consumer.attempt, consumer.project_id, consumer.user_id, consumer.consumer_type
            )
            ledger.changed[write.consumer] = fence if consumer.attempt else None
    ledger.bump(written)
    return None


def _holder(ledger: AllocationLedger, uuid: str) -> ConsumerState | None:
    known = ledger.consumer(uuid)
    return known if known is not None and known.holding else None


def _written(ledger: AllocationLedger, write: ConsumerWrite) -> ConsumerState:
    known = ledger.consumer(write.consumer)
    consumer_type = write.consumer_type
    if consumer_type is None:
        consumer_type = known.consumer_type if known is not None and known.holding else ""
    return ConsumerState(
        generation=1 if known is None else known.generation + 1,
        attempt=0 if known is None else known.attempt,
        project_id=write.project_id,
        user_id=write.user_id,
        consumer_type=consumer_type,
        holding=write.holding,
    )


def _check_generation(write: ConsumerWrite, known: ConsumerState | None) -> AllocationOutcome:
    expects = write.expects
    if isinstance(expects, AnyGeneration):
        return None
    if known is None:
        if expects is None:
            return None
        words = f"consumer generation conflict - expected null but got {expects}"
    elif known.generation == expects:
        return None
    else:
        words = f"consumer generation conflict - expected {known.generation} but got {expects}"
    return WriteRefusal(Why.CONSUMER_GENERATION, words, write.consumer)


def _check_names(ledger: AllocationLedger, writes: Sequence[ConsumerWrite]) -> AllocationOutcome:
    for write in writes:
        for uuid in write.holding:
            if uuid not in ledger.providers:
                return WriteRefusal(
                    Why.NO_PROVIDER, f"Allocation for resource provider '{uuid}' that does not exist.", uuid
                )
    for write in writes:
        for resources in write.holding.values():
            for name in resources:
                if name not in ledger.known_classes:
                    return no_such_class(name)
    return None


def _check_capacity(
    ledger: AllocationLedger, writes: Sequence[ConsumerWrite], known: Mapping[str, ConsumerState | None]
) -> AllocationOutcome:
    """Compare the total that all these consumers hold before and after with the capacities and unit constraints."""
    more: dict[tuple[str, str], int] = {}
    for write in writes:
        consumer = known[write.consumer]
        for sign, holding in ((-1, consumer.holding if consumer is not None else NOTHING), (1, write.holding)):
            for uuid, resources in holding.items():
                for name, amount in resources.items():
                    more[uuid, name] = more.get((uuid, name), 0) + sign * amount
    for write in writes:
        for uuid, resources in write.holding.items():
            inventories = ledger.providers[uuid].inventories
            for name, amount in resources.items():
                inventory = inventories.get(name)
                if inventory is None:
                    return WriteRefusal(
                        Why.DOES_NOT_FIT, f"Inventory for '{name}' on resource provider '{uuid}' invalid.", uuid
                    )
                if not is_allowed_amount(amount, inventory):
                    return _does_not_fit(name, uuid, "violate inventory constraints")
                extra = more[uuid, name]
                if extra > 0 and ledger.used_of(uuid, name) + extra > inventory.capacity:
                    return _does_not_fit(name, uuid, "exceed the capacity")
    return None


def _does_not_fit(name: str, uuid: str, how: str) -> WriteRefusal:
    words = f"Unable to create allocation for '{name}' on resource provider '{uuid}'. The requested amount would {how}."
    return WriteRefusal(Why.DOES_NOT_FIT, words, uuid)
