"""The claim decision as tables: every outcome, fencing, idempotency, the over-capacity escape, swaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimOutcome,
    ConsumerAllocations,
    Release,
    Swap,
)
from placement_worker.domain.claim_ledger import Decision
from placement_worker.domain.claims import ClaimItem, changes_of, decide
from placement_worker.domain.values import ClaimedProvider, ConsumerState, InventoryUsage

A, B, NOWHERE = (f"{letter * 8}-0000-4000-8000-000000000000" for letter in "abf")
VM, OTHER, MIGRATION = (f"0000000{n}-0000-4000-8000-000000000000" for n in (1, 2, 3))
CLASSES = {"VCPU": 1, "DISK_GB": 2, "VGPU": 3}
Hold = Mapping[str, Mapping[str, int]]


def provider(shape: int = 1, generation: int = 10, **inventories: InventoryUsage) -> ClaimedProvider:
    return ClaimedProvider(generation, shape, inventories, root=A)


def room(capacity: int, used: int = 0, *, low: int = 1, high: int = 1000, step: int = 1) -> InventoryUsage:
    return InventoryUsage(capacity, low, high, step, used)


def holder(hold: Hold, *, generation: int = 1, attempt: int = 1) -> ConsumerState:
    return ConsumerState(generation, attempt, "p", "u", "INSTANCE", hold)


def claim(hold: Hold, *more: Hold, consumer: str = VM, shapes: Mapping[str, int] | None = None, **fields: Any) -> Claim:
    options = tuple(
        ClaimOption(allocations={p: dict(r) for p, r in h.items()}, shapes=dict(shapes or {})) for h in (hold, *more)
    )
    return Claim(consumer=consumer, options=options, project_id="p", **fields)


def run(
    *items: ClaimItem, providers: Mapping[str, ClaimedProvider], consumers: Mapping[str, ConsumerState] | None = None
) -> Decision:
    return decide(items, consumers or {}, providers, CLASSES)


def outcome(item: ClaimItem, host: ClaimedProvider, consumers: Mapping[str, ConsumerState] | None = None) -> str:
    return run(item, providers={A: host}, consumers=consumers).verdicts[0].outcome


@pytest.mark.parametrize(
    ("item", "host", "expected"),
    [
        (claim({A: {"VCPU": 4}}), provider(VCPU=room(4)), "claimed"),
        (claim({A: {"VCPU": 5}}), provider(VCPU=room(4)), "full"),
        (claim({A: {"VCPU": 1}}), provider(VCPU=room(4, 4)), "full"),
        (claim({A: {"VCPU": 1}}), provider(VCPU=room(4, 9)), "full"),
        (claim({A: {"DISK_GB": 1}}), provider(VCPU=room(4)), "full"),
        (claim({A: {"CUSTOM_NONE": 1}}), provider(VCPU=room(4)), "invalid"),
        (claim({A: {"VCPU": 3}}), provider(VCPU=room(4, step=2)), "invalid"),
        (claim({A: {"VCPU": 1}}), provider(VCPU=room(4, low=2)), "invalid"),
        (claim({A: {"VCPU": 3}}), provider(VCPU=room(4, high=2)), "invalid"),
        (claim({A: {}}), provider(VCPU=room(4)), "invalid"),
        (claim({NOWHERE: {"VCPU": 1}}), provider(VCPU=room(4)), "gone"),
        (claim({A: {"VCPU": 1}, NOWHERE: {"VCPU": 1}}), provider(VCPU=room(4)), "gone"),
        (claim({A: {"VCPU": 1}}, shapes={A: 1}), provider(1, VCPU=room(4)), "claimed"),
        (claim({A: {"VCPU": 1}}, shapes={A: 1}), provider(2, VCPU=room(4)), "raced"),
        (claim({A: {"VCPU": 5}}, shapes={A: 1}), provider(2, VCPU=room(4)), "full"),
        (claim({A: {"VCPU": 3}}, shapes={A: 1}), provider(2, VCPU=room(4, step=2)), "raced"),
        # Usage moves the generation, never the shape: many claims since, and still no conflict.
        (claim({A: {"VCPU": 1}}, shapes={A: 1}), provider(1, generation=999, VCPU=room(4, 3)), "claimed"),
    ],
)
def test_one_claim_on_one_provider(item: Claim, host: ClaimedProvider, expected: str) -> None:
    assert outcome(item, host) == expected


def test_options_are_tried_in_order_and_the_most_hopeful_outcome_is_answered() -> None:
    providers = {A: provider(VCPU=room(1)), B: provider(VCPU=room(9))}
    verdict = run(claim({A: {"VCPU": 2}}, {B: {"VCPU": 2}}), providers=providers).verdicts[0]
    assert (verdict.outcome, verdict.option) == ("claimed", 1)
    assert verdict.outcomes == (ClaimOutcome.FULL, ClaimOutcome.CLAIMED)
    assert verdict.generations == {B: 11}
    none = run(claim({NOWHERE: {"VCPU": 2}}, {A: {"VCPU": 2}}), providers=providers).verdicts[0]
    assert (none.outcome, none.option, none.outcomes) == ("full", None, (ClaimOutcome.GONE, ClaimOutcome.FULL))


def test_each_item_sees_what_the_ones_before_it_did() -> None:
    items = [
        claim({A: {"VCPU": 3}}, consumer=VM),
        claim({A: {"VCPU": 3}}, consumer=OTHER),
        Release(consumer=VM),
        claim({A: {"VCPU": 3}}, consumer=OTHER),
    ]
    decision = run(*items, providers={A: provider(VCPU=room(4))})
    assert [verdict.outcome for verdict in decision.verdicts] == ["claimed", "full", "released", "claimed"]
    assert decision.used == {A: {"VCPU": 3}}
    assert decision.generations == {A: 13}
    assert decision.consumers[VM] is None
    (change,) = changes_of(decision)
    assert (change.generation, change.used) == (13, {"VCPU": 3})


HELD = {A: {"VCPU": 2}}
FENCE: Hold = {}


@pytest.mark.parametrize(
    ("known", "fields", "expected"),
    [
        (None, {}, "claimed"),
        (None, {"consumer_generation": 1}, "consumer_changed"),
        (None, {"consumer_generation": 1, "release_first": True, "attempt": 2}, "claimed"),
        (holder(HELD), {"attempt": 2, "consumer_generation": 1}, "claimed"),
        (holder(HELD), {"attempt": 2, "consumer_generation": 7}, "consumer_changed"),
        (holder(HELD), {"attempt": 2}, "consumer_changed"),
        (holder(HELD, attempt=3), {"attempt": 2, "consumer_generation": 1}, "consumer_changed"),
        (holder(HELD, attempt=0), {"attempt": 1}, "consumer_changed"),
        (holder(FENCE, attempt=1), {"attempt": 1}, "consumer_changed"),
        (holder(FENCE, attempt=1), {"attempt": 2}, "claimed"),
        (holder(FENCE, attempt=1), {"attempt": 2, "consumer_generation": 1, "release_first": True}, "claimed"),
        (holder(FENCE, attempt=1), {"attempt": 2, "consumer_generation": 1}, "consumer_changed"),
    ],
)
def test_who_may_claim(known: ConsumerState | None, fields: dict[str, Any], expected: str) -> None:
    host = provider(VCPU=room(8, 2 if known is not None and known.holding else 0))
    assert outcome(claim({A: {"VCPU": 1}}, **fields), host, {VM: known} if known else {}) == expected


@pytest.mark.parametrize(
    ("known", "attempt", "shown"),
    [
        (holder(HELD, attempt=2), 1, (2, HELD)),
        (holder(HELD, attempt=2), 2, (0, {})),  # its own
        (holder(HELD, attempt=1), 2, (0, HELD)),  # its generation is not named
        (holder(HELD, attempt=0), 1, (0, HELD)),  # of the REST API
        (holder(FENCE, attempt=2), 1, (0, {})),
        (ConsumerState(1, 2, "another", "u", "INSTANCE", HELD), 1, (0, {})),
        (ConsumerState(1, 2, "p", "u", "MIGRATION", HELD), 1, (0, HELD)),  # a move's request of this uuid
        (ConsumerState(1, 2, "p", "u", "", HELD), 1, (0, HELD)),  # of an old client of the REST API
    ],
)
def test_a_refusal_names_the_later_attempt_that_holds_the_consumer(
    known: ConsumerState, attempt: int, shown: tuple[int, Hold]
) -> None:
    host = provider(VCPU=room(8, 2 if known.holding else 0))
    (verdict,) = run(claim(HELD, attempt=attempt), providers={A: host}, consumers={VM: known}).verdicts
    assert (verdict.attempt, verdict.holding) == shown


def test_the_same_attempt_again_is_answered_with_what_it_holds() -> None:
    decision = run(
        claim({B: {"VCPU": 1}}, HELD),
        providers={A: provider(VCPU=room(2, 2)), B: provider()},
        consumers={VM: holder(HELD)},
    )
    (verdict,) = decision.verdicts
    assert (verdict.outcome, verdict.option, verdict.consumer_generation, verdict.changed) == ("claimed", 1, 1, False)
    assert verdict.generations == {A: 10}
    assert not verdict.holding  # the option holds it
    assert not decision.generations
    assert not decision.consumers


def test_an_earlier_claim_of_something_else_carries_what_it_holds() -> None:
    decision = run(
        claim({B: {"VCPU": 1}}), providers={A: provider(VCPU=room(2, 2)), B: provider()}, consumers={VM: holder(HELD)}
    )
    (verdict,) = decision.verdicts
    assert (verdict.outcome, verdict.option, verdict.holding) == ("claimed", None, HELD)


def test_the_same_attempt_of_another_project_is_another_consumer() -> None:
    foreign = ConsumerState(1, 1, "another", "u", "INSTANCE", HELD)
    assert outcome(claim(HELD), provider(VCPU=room(9, 2)), {VM: foreign}) == "consumer_changed"


def test_release_first_gives_back_even_when_nothing_fits_and_may_be_repeated() -> None:
    item = claim({B: {"VCPU": 9}}, attempt=2, consumer_generation=1, release_first=True)
    providers = {A: provider(VCPU=room(4, 2)), B: provider(VCPU=room(4))}
    decision = run(item, providers=providers, consumers={VM: holder(HELD)})
    assert decision.verdicts[0].outcome == "full"
    assert decision.used == {A: {"VCPU": 0}}
    fence = decision.consumers[VM]
    assert fence is not None
    assert (fence.holding, fence.attempt) == ({}, 1)
    # The same message again, after a crash between its commit and its reply; meanwhile there is room.
    again = run(item, providers={**providers, B: provider(VCPU=room(9))}, consumers={VM: fence})
    assert again.verdicts[0].outcome == "claimed"


def test_release_first_replaces_and_counts_what_is_given_back() -> None:
    item = claim({A: {"VCPU": 4}}, attempt=2, consumer_generation=1, release_first=True)
    decision = run(item, providers={A: provider(VCPU=room(4, 2))}, consumers={VM: holder(HELD)})
    assert decision.verdicts[0].outcome == "claimed"
    assert decision.used == {A: {"VCPU": 4}}


@pytest.mark.parametrize(
    ("known", "attempt", "expected", "fenced"),
    [
        (None, None, "absent", None),
        (None, 1, "absent", 1),
        (holder(HELD), None, "released", None),
        (holder(HELD), 1, "released", 1),
        (holder(HELD), 5, "released", 5),
        (holder(HELD, attempt=2), 1, "consumer_changed", 2),
        (holder(FENCE, attempt=1), 2, "absent", 2),
        (holder(FENCE, attempt=2), 1, "absent", 2),
    ],
)
def test_release(known: ConsumerState | None, attempt: int | None, expected: str, fenced: int | None) -> None:
    consumers = {VM: known} if known else {}
    decision = run(Release(consumer=VM, attempt=attempt), providers={A: provider(VCPU=room(4, 2))}, consumers=consumers)
    assert decision.verdicts[0].outcome == expected
    after = decision.consumers.get(VM, known)
    assert (after.attempt if after else None) == fenced


def swap(*entries: tuple[str, int | None, Hold]) -> Swap:
    return Swap(
        consumers=tuple(
            ConsumerAllocations(
                consumer=uuid,
                consumer_generation=generation,
                allocations={p: dict(r) for p, r in hold.items()},
                project_id="p",
            )
            for uuid, generation, hold in entries
        )
    )


def test_a_swap_moves_an_allocation_to_the_migration_and_takes_the_target() -> None:
    providers = {A: provider(VCPU=room(2, 2)), B: provider(VCPU=room(2))}
    decision = run(
        swap((VM, 1, {B: {"VCPU": 2}}), (MIGRATION, None, HELD)), providers=providers, consumers={VM: holder(HELD)}
    )
    assert decision.verdicts[0].outcome == "claimed"
    assert decision.used == {A: {"VCPU": 2}, B: {"VCPU": 2}}
    vm, migration = decision.consumers[VM], decision.consumers[MIGRATION]
    assert vm is not None
    assert migration is not None
    assert (vm.generation, vm.attempt, vm.holding) == (2, 1, {B: {"VCPU": 2}})
    assert (migration.generation, migration.attempt, migration.holding) == (1, 0, HELD)


@pytest.mark.parametrize(
    ("entries", "expected", "named"),
    [
        ([(VM, 1, {B: {"VCPU": 9}}), (MIGRATION, None, HELD)], "full", VM),
        ([(VM, 2, {}), (MIGRATION, None, HELD)], "consumer_changed", VM),
        ([(VM, 1, {}), (MIGRATION, 1, HELD)], "consumer_changed", MIGRATION),
        ([(VM, 1, {NOWHERE: {"VCPU": 1}})], "gone", VM),
        ([(VM, 1, {B: {"CUSTOM_NONE": 1}})], "invalid", VM),
        ([(VM, 1, {}), (VM, 1, {})], "invalid", None),
        # Together too much, though each alone would fit.
        ([(VM, 1, {B: {"VCPU": 1}}), (MIGRATION, None, {B: {"VCPU": 2}})], "full", VM),
    ],
)
def test_a_swap_is_all_or_none(entries: list[tuple[str, int | None, Hold]], expected: str, named: str | None) -> None:
    providers = {A: provider(VCPU=room(2, 2)), B: provider(VCPU=room(2))}
    decision = run(swap(*entries), providers=providers, consumers={VM: holder(HELD)})
    assert (decision.verdicts[0].outcome, decision.verdicts[0].consumer) == (expected, named)
    assert not decision.generations
    assert not decision.consumers


@pytest.mark.parametrize(
    ("attempt", "known", "expected"),
    [
        (2, holder({}, attempt=2), ("claimed", 2)),
        (2, holder({}, attempt=3), ("consumer_changed", None)),
        (3, holder({}, attempt=2), ("claimed", 3)),
        (3, None, ("claimed", 3)),
        (None, holder({}, attempt=3), ("claimed", 3)),
    ],
)
def test_a_swap_of_an_attempt_yields_to_a_newer_one(
    attempt: int | None, known: ConsumerState | None, expected: tuple[str, int | None]
) -> None:
    [entry] = swap((VM, None, {A: {"VCPU": 1}})).consumers
    consumers = {} if known is None else {VM: known}
    decision = run(
        Swap(consumers=(replace(entry, attempt=attempt),)), providers={A: provider(VCPU=room(2))}, consumers=consumers
    )
    after = decision.consumers.get(VM)
    assert (decision.verdicts[0].outcome, after.attempt if after else None) == expected


def test_a_swap_already_done_is_done() -> None:
    consumers = {VM: holder({B: {"VCPU": 2}}, generation=2), MIGRATION: holder(HELD, attempt=0)}
    decision = run(
        swap((VM, 1, {B: {"VCPU": 2}}), (MIGRATION, None, HELD)),
        providers={A: provider(VCPU=room(2, 2)), B: provider(VCPU=room(2, 2))},
        consumers=consumers,
    )
    assert (decision.verdicts[0].outcome, decision.verdicts[0].changed) == ("claimed", False)


def test_what_does_not_worsen_an_over_capacity_provider_is_allowed() -> None:
    """The inventory shrank to 2 under 4 used; moving or shrinking what is held there must not get stuck."""
    providers = {A: provider(VCPU=room(2, 4))}
    consumers = {VM: holder({A: {"VCPU": 4}})}
    moved = run(swap((VM, 1, {}), (MIGRATION, None, {A: {"VCPU": 4}})), providers=providers, consumers=consumers)
    assert moved.verdicts[0].outcome == "claimed"
    smaller = run(claim({A: {"VCPU": 3}}, attempt=2, consumer_generation=1), providers=providers, consumers=consumers)
    assert smaller.verdicts[0].outcome == "claimed"
    larger = run(claim({A: {"VCPU": 5}}, attempt=2, consumer_generation=1), providers=providers, consumers=consumers)
    assert larger.verdicts[0].outcome == "full"
