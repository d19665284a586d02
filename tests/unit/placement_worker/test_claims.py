"""Groups of claims as tables and against a small model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.contracts.placement import Claim, ClaimOption, ConsumerAllocations, Release, Swap
from placement_worker.domain.claim_ledger import Decision
from placement_worker.domain.claims import ClaimItem, decide
from placement_worker.domain.values import ClaimedProvider, ConsumerState, InventoryUsage, is_in_units
from placement_worker.operations.audit import Duplicate, excess_of
from tests.kit.claims import amounts_and_units

# --- the claim decision as tables: every outcome, fencing, idempotency, the over-capacity escape, swaps

A, B, NOWHERE = (f"{letter * 8}-0000-4000-8000-000000000000" for letter in "abf")
VM, OTHER, MIGRATION = (f"0000000{n}-0000-4000-8000-000000000000" for n in (1, 2, 3))
CLASSES = {"VCPU": 1, "DISK_GB": 2, "VGPU": 3}
Hold = Mapping[str, Mapping[str, int]]


def provider(spec_generation: int = 1, generation: int = 10, **inventories: InventoryUsage) -> ClaimedProvider:
    return ClaimedProvider(generation, spec_generation, inventories, root=A)


def room(capacity: int, used: int = 0, *, low: int = 1, high: int = 1000, step: int = 1) -> InventoryUsage:
    return InventoryUsage(capacity, low, high, step, used)


def holder(hold: Hold, *, generation: int = 1, attempt: int = 1) -> ConsumerState:
    return ConsumerState(generation, attempt, "p", "u", "INSTANCE", hold)


def claim(
    hold: Hold, *more: Hold, consumer: str = VM, spec_generations: Mapping[str, int] | None = None, **fields: Any
) -> Claim:
    options = tuple(
        ClaimOption(allocations={p: dict(r) for p, r in h.items()}, spec_generations=dict(spec_generations or {}))
        for h in (hold, *more)
    )
    return Claim(consumer=consumer, options=options, project_id="p", **fields)


def run(
    *items: ClaimItem, providers: Mapping[str, ClaimedProvider], consumers: Mapping[str, ConsumerState] | None = None
) -> Decision:
    return decide(items, consumers or {}, providers, CLASSES)


def outcome(item: ClaimItem, host: ClaimedProvider, consumers: Mapping[str, ConsumerState] | None = None) -> str:
    return run(item, providers={A: host}, consumers=consumers).replies[0].outcome


HELD = {A: {"VCPU": 2}}
NOTHING_HELD: Hold = {}


@pytest.mark.parametrize(
    ("known", "fields", "expected"),
    [
        (None, {}, "claimed"),
        (None, {"consumer_generation": 1}, "consumer_conflict"),
        (None, {"consumer_generation": 1, "release_first": True, "attempt": 2}, "claimed"),
        (holder(HELD), {"attempt": 2, "consumer_generation": 1}, "claimed"),
        (holder(HELD), {"attempt": 2, "consumer_generation": 7}, "consumer_conflict"),
        (holder(HELD), {"attempt": 2}, "consumer_conflict"),
        (holder(HELD, attempt=3), {"attempt": 2, "consumer_generation": 1}, "consumer_conflict"),
        (holder(HELD, attempt=0), {"attempt": 1}, "consumer_conflict"),
        (holder(NOTHING_HELD, attempt=1), {"attempt": 1}, "consumer_conflict"),
        (holder(NOTHING_HELD, attempt=1), {"attempt": 2}, "claimed"),
        (holder(NOTHING_HELD, attempt=1), {"attempt": 2, "consumer_generation": 1, "release_first": True}, "claimed"),
        (holder(NOTHING_HELD, attempt=1), {"attempt": 2, "consumer_generation": 1}, "consumer_conflict"),
    ],
)
def test_who_may_claim(known: ConsumerState | None, fields: dict[str, Any], expected: str) -> None:
    host = provider(VCPU=room(8, 2 if known is not None and known.allocations else 0))
    assert outcome(claim({A: {"VCPU": 1}}, **fields), host, {VM: known} if known else {}) == expected


@pytest.mark.parametrize(
    ("known", "attempt", "shown"),
    [
        (holder(HELD, attempt=2), 1, (2, HELD)),
        (holder(HELD, attempt=2), 2, (0, {})),  # its own
        (holder(HELD, attempt=1), 2, (0, HELD)),  # its generation is not named
        (holder(HELD, attempt=0), 1, (0, HELD)),  # of the REST API
        (holder(NOTHING_HELD, attempt=2), 1, (0, {})),
        (ConsumerState(1, 2, "another", "u", "INSTANCE", HELD), 1, (0, {})),
        (ConsumerState(1, 2, "p", "u", "MIGRATION", HELD), 1, (0, HELD)),  # a move's request of this uuid
        (ConsumerState(1, 2, "p", "u", "", HELD), 1, (0, HELD)),  # of an old client of the REST API
    ],
)
def test_a_refusal_names_the_later_attempt_that_holds_the_consumer(
    known: ConsumerState, attempt: int, shown: tuple[int, Hold]
) -> None:
    host = provider(VCPU=room(8, 2 if known.allocations else 0))
    (verdict,) = run(claim(HELD, attempt=attempt), providers={A: host}, consumers={VM: known}).replies
    assert (verdict.attempt, verdict.allocations) == shown


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


@pytest.mark.parametrize(
    ("attempt", "known", "expected"),
    [
        (2, holder({}, attempt=2), ("claimed", 2)),
        (2, holder({}, attempt=3), ("consumer_conflict", None)),
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
    assert (decision.replies[0].outcome, after.attempt if after else None) == expected


# --- random groups against a small model: usage is what is held, no provider is overcommitted, splits do not matter

PROVIDERS = [f"{n}0000000-0000-4000-8000-000000000000" for n in range(3)]
CONSUMERS = [f"c000000{n}-0000-4000-8000-000000000000" for n in range(4)]
CAPACITY = {"VCPU": 4, "DISK_GB": 6}
MODEL_CLASSES = {"VCPU": 1, "DISK_GB": 2}

resources = st.dictionaries(st.sampled_from(sorted(CAPACITY)), st.integers(1, 5), min_size=1)
holdings = st.dictionaries(st.sampled_from(PROVIDERS), resources, min_size=1, max_size=2)
generations = st.none() | st.integers(0, 4)
claims = st.builds(
    Claim,
    consumer=st.sampled_from(CONSUMERS),
    attempt=st.integers(1, 4),
    consumer_generation=generations,
    release_first=st.booleans(),
    options=st.lists(st.builds(ClaimOption, allocations=holdings), min_size=1, max_size=2).map(tuple),
    project_id=st.just("p"),
)
releases = st.builds(Release, consumer=st.sampled_from(CONSUMERS), attempt=st.none() | st.integers(1, 4))
entries = st.builds(
    ConsumerAllocations,
    consumer=st.sampled_from(CONSUMERS),
    consumer_generation=generations,
    allocations=holdings | st.just({}),
    project_id=st.just("p"),
)
swaps = st.builds(Swap, consumers=st.lists(entries, min_size=1, max_size=3).map(tuple))
groups = st.lists(st.lists(claims | releases | swaps, min_size=1, max_size=8), min_size=1, max_size=6)


class Model:
    """The rows after each group, as a database would have them."""

    def __init__(self) -> None:
        inventories = {name: InventoryUsage(amount, 1, 100, 1, 0) for name, amount in CAPACITY.items()}
        self.providers = {uuid: ClaimedProvider(0, 0, dict(inventories), root=uuid) for uuid in PROVIDERS}
        self.consumers: dict[str, ConsumerState] = {}

    def write(self, items: Sequence[ClaimItem]) -> list[str]:
        decision = decide(items, self.consumers, self.providers, MODEL_CLASSES)
        for uuid, consumer in decision.consumers.items():
            if consumer is None:
                self.consumers.pop(uuid, None)
            else:
                self.consumers[uuid] = consumer
        for uuid, generation in decision.generations.items():
            old = self.providers[uuid]
            assert generation > old.generation
            inventories = {
                name: InventoryUsage(r.capacity, 1, 100, 1, decision.used[uuid].get(name, r.used))
                for name, r in old.inventories.items()
            }
            self.providers[uuid] = ClaimedProvider(generation, old.spec_generation, inventories, root=uuid)
        assert set(decision.used) == set(decision.generations)
        return [verdict.outcome for verdict in decision.replies]

    def held(self) -> dict[tuple[str, str], int]:
        held: dict[tuple[str, str], int] = {}
        for consumer in self.consumers.values():
            for uuid, amounts in consumer.allocations.items():
                for name, amount in amounts.items():
                    held[uuid, name] = held.get((uuid, name), 0) + amount
        return held


@given(groups)
def test_usage_is_what_is_held_and_never_more_than_there_is(work: list[list[ClaimItem]]) -> None:
    model = Model()
    for items in work:
        model.write(items)
        held = model.held()
        for uuid, provider in model.providers.items():
            for name, room in provider.inventories.items():
                assert room.used == held.get((uuid, name), 0)
                assert 0 <= room.used <= room.capacity


@given(groups)
def test_a_group_decides_as_its_items_one_by_one_would(work: list[list[ClaimItem]]) -> None:
    together, apart = Model(), Model()
    for items in work:
        grouped = together.write(items)
        single = [outcome for item in items for outcome in apart.write([item])]
        assert grouped == single
    assert together.held() == apart.held()
    assert together.consumers == apart.consumers


@given(groups, claims)
def test_a_claim_repeated_at_once_changes_nothing(work: list[list[ClaimItem]], again: Claim) -> None:
    model = Model()
    for items in work:
        model.write(items)
    (first,) = model.write([again])
    held = model.held()
    (second,) = model.write([again])
    assert model.held() == held
    assert second == first


@given(groups, st.sampled_from(CONSUMERS), st.integers(1, 4))
def test_a_released_attempt_never_comes_back(work: list[list[ClaimItem]], consumer: str, attempt: int) -> None:
    model = Model()
    for items in work:
        model.write(items)
    (outcome,) = model.write([Release(consumer=consumer, attempt=attempt)])
    held = model.held()
    option = ClaimOption(allocations={PROVIDERS[0]: {"VCPU": 1}})
    late = Claim(consumer=consumer, attempt=attempt, options=(option,), project_id="p")
    if outcome in {"released", "absent"}:
        assert model.write([late]) == ["consumer_conflict"]
    assert model.held() == held


# --- which of a consumer's allocations are there twice, and which only look so

ROOTS = {"own": "own", "own.cell": "own", "other": "other", "other.cell": "other", "pool": "pool"}
SHARING = frozenset({"pool"})


@pytest.mark.parametrize(
    ("allocations", "others", "keeps"),
    [
        ({"own": {"VCPU": 1}, "other": {"VCPU": 1}}, ("other",), {"own": {"VCPU": 1}}),
        ({"own.cell": {"VCPU": 1}, "other.cell": {"VCPU": 2}}, ("other",), {"own.cell": {"VCPU": 1}}),
        # A class of the other host alone stays: nothing shows that it is too much.
        (
            {"own": {"VCPU": 1}, "other": {"VCPU": 1, "DISK_GB": 5}},
            ("other",),
            {"own": {"VCPU": 1}, "other": {"DISK_GB": 5}},
        ),
        # A shared pool is no host.
        (
            {"own": {"VCPU": 1, "DISK_GB": 1}, "pool": {"DISK_GB": 9}, "other": {"VCPU": 1}},
            ("other",),
            {"own": {"VCPU": 1, "DISK_GB": 1}, "pool": {"DISK_GB": 9}},
        ),
    ],
)
def test_what_is_held_twice_is_kept_on_the_own_host(
    allocations: dict[str, Any], others: tuple[str, ...], keeps: dict[str, Any]
) -> None:
    assert excess_of("c", "own", allocations, ROOTS, SHARING, 7) == [Duplicate("c", "own", others, keeps, 7)]


@pytest.mark.parametrize(
    ("allocations", "reported"),
    [
        ({}, []),
        ({"own": {"VCPU": 1}, "own.cell": {"VCPU": 1}}, []),
        ({"own": {"VCPU": 1}, "pool": {"DISK_GB": 1}}, []),
        ({"other": {"VCPU": 1}}, ["c: runs on own, holds other alone"]),
        ({"own": {"VCPU": 1}, "other": {"DISK_GB": 1}}, ["c: runs on own, holds other alone"]),
    ],
)
def test_what_is_held_once_is_left_alone(allocations: dict[str, Any], reported: list[str]) -> None:
    assert excess_of("c", "own", allocations, ROOTS, SHARING, 7) == reported


# --- the rule of units is one rule: for numbers, for columns and as SQL

ROWS = amounts_and_units(4_000)


@pytest.mark.parametrize(
    ("amount", "allowed"), [(1, False), (2, True), (3, False), (6, True), (8, True), (10, False), (9, False)]
)
def test_from_the_least_to_the_most_in_steps(amount: int, allowed: bool) -> None:
    assert is_in_units(amount, 2, 8, 2) is allowed


def test_columns_are_judged_as_each_of_their_rows() -> None:
    amounts, low, high, step = np.array(ROWS, dtype=np.int64).T
    single = [is_in_units(*row) for row in ROWS]
    assert is_in_units(amounts, low, high, step).tolist() == single
    assert 500 < sum(single) < 3_500, "both answers are met often"
