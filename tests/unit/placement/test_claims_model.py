"""Random groups against a small model: usage is what is held, no provider is overcommitted, splits do not matter."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from bus.contracts.placement import Claim, ClaimOption, ConsumerAllocations, Release, Swap
from placement_worker.domain.claims import ClaimItem, decide
from placement_worker.domain.values import ClaimedProvider, ConsumerState, InventoryUsage

PROVIDERS = [f"{n}0000000-0000-4000-8000-000000000000" for n in range(3)]
CONSUMERS = [f"c000000{n}-0000-4000-8000-000000000000" for n in range(4)]
CAPACITY = {"VCPU": 4, "DISK_GB": 6}
CLASSES = {"VCPU": 1, "DISK_GB": 2}

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
        decision = decide(items, self.consumers, self.providers, CLASSES)
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
            self.providers[uuid] = ClaimedProvider(generation, old.shape, inventories, root=uuid)
        assert set(decision.used) == set(decision.generations)
        return [verdict.outcome for verdict in decision.verdicts]

    def held(self) -> dict[tuple[str, str], int]:
        held: dict[tuple[str, str], int] = {}
        for consumer in self.consumers.values():
            for uuid, amounts in consumer.holding.items():
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
        assert model.write([late]) == ["consumer_changed"]
    assert model.held() == held
