"""Random trees with everything that a candidate search can meet, and random requests for them."""

from __future__ import annotations

import random

from msgspec import structs

from bus.contracts.placement import ProviderState
from placement_worker.replica.book import Book
from placement_worker.replica.candidates import CandidatesRequest, Group
from placement_worker.replica.sharing import SHARING_TRAIT
from tests.unit.replica.books import inventory, uuid

CLASSES = ("VCPU", "MEMORY_MB", "SRIOV_NET_VF")
TRAITS = ("CUSTOM_T1", "CUSTOM_T2", "CUSTOM_T3")
AGGREGATES = tuple(uuid(900 + number) for number in range(3))


def random_world(rng: random.Random) -> list[ProviderState]:
    """A few trees, some deep, some of whose members share, some nearly alike."""
    states: list[ProviderState] = []
    sharing = rng.random() < 0.5
    deep = rng.random() < 0.8
    for _ in range(rng.randint(1, 4)):
        if states and rng.random() < 0.4:
            states += _alike(rng, states)
            continue
        tree: list[ProviderState] = []
        for _ in range(rng.randint(1, 4) if deep else 1):
            parent = rng.choice(tree) if tree else None
            tree.append(_member(rng, len(states) + len(tree), tree[0] if tree else None, parent, sharing=sharing))
        states += tree
    return states


def _alike(rng: random.Random, states: list[ProviderState]) -> list[ProviderState]:
    """The last tree once more, with one member hung or used differently."""
    old = [state for state in states if state.root_uuid == states[-1].root_uuid]
    at = rng.randrange(len(old))
    to = {state.uuid: uuid(len(states) + number) for number, state in enumerate(old)}
    tree = [
        structs.replace(
            state,
            uuid=to[state.uuid],
            name=f"p{len(states) + number}",
            root_uuid=to[state.root_uuid],
            parent_uuid=None if state.parent_uuid is None else to[state.parent_uuid],
        )
        for number, state in enumerate(old)
    ]
    if at and rng.random() < 0.7:
        tree[at] = structs.replace(tree[at], parent_uuid=tree[rng.randrange(at)].uuid)
    elif tree[at].inventories:
        tree[at] = structs.replace(tree[at], used={name: rng.randint(0, 3) for name in tree[at].inventories})
    return tree


def _member(
    rng: random.Random, number: int, root: ProviderState | None, parent: ProviderState | None, *, sharing: bool
) -> ProviderState:
    traits = [trait for trait in TRAITS if rng.random() < 0.5]
    if sharing and rng.random() < 0.3:
        traits.append(SHARING_TRAIT)
    has = {
        name: inventory(
            rng.randint(1, 8), low=rng.choice((1, 1, 1, 2)), high=rng.randint(2, 8), step=rng.choice((1, 1, 1, 2))
        )
        for name in CLASSES
        if rng.random() < 0.7
    }
    return ProviderState(
        uuid=uuid(number),
        name=f"p{number}",
        root_uuid=uuid(number) if root is None else root.uuid,
        parent_uuid=None if parent is None else parent.uuid,
        generation=1,
        shape=number,
        inventories=has,
        used={name: rng.randint(1, 2) for name in has if rng.random() < 0.3},
        traits=tuple(traits),
        aggregates=tuple(aggregate for aggregate in AGGREGATES if rng.random() < 0.4),
    )


def random_request(rng: random.Random, states: list[ProviderState]) -> CandidatesRequest:
    """One to four groups with any of the conditions there are."""
    suffixes = [f"_{number}" for number in range(rng.randint(0, 3))]
    groups = [_group(rng, suffix, states, may_be_empty=True) for suffix in suffixes]
    if not suffixes or rng.random() < 0.6 or not any(group.resources for group in groups):
        groups.insert(rng.randint(0, len(groups)), _group(rng, "", states, may_be_empty=False))
    empty = tuple(group.suffix for group in groups if not group.resources)
    subtrees = [tuple(suffix for suffix in suffixes if rng.random() < 0.6) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
    if empty:
        subtrees.append(tuple(dict.fromkeys((*empty, *(rng.sample(suffixes, rng.randint(0, len(suffixes))))))))
    return CandidatesRequest(
        groups=tuple(groups),
        group_policy=rng.choice(("none", "isolate")),
        root_required=tuple((trait,) for trait in TRAITS if rng.random() < 0.03),
        root_forbidden=tuple(trait for trait in TRAITS if rng.random() < 0.03),
        same_subtree=tuple(subtree for subtree in subtrees if subtree),
        one_per_tree=rng.random() < 0.1,
    )


def _group(rng: random.Random, suffix: str, states: list[ProviderState], *, may_be_empty: bool) -> Group:
    names = rng.sample(CLASSES, rng.choice((1, 1, 2) if suffix else (1, 2, 3)))
    empty = may_be_empty and rng.random() < 0.2
    required = tuple(
        tuple(rng.sample(TRAITS, rng.randint(1, 2)))
        for _ in range(rng.choice((1, 1, 2) if empty else (0, 0, 0, 0, 0, 1, 2)))
    )
    forbidden = tuple(trait for trait in TRAITS if rng.random() < 0.04)
    return Group(
        suffix=suffix,
        resources={} if empty else {name: rng.choice((1, 1, 1, 2, 3)) for name in names},
        required=required,
        forbidden=tuple(trait for trait in forbidden if not any(set(group) <= set(forbidden) for group in required)),
        member_of=tuple(
            tuple(rng.sample(AGGREGATES, rng.randint(1, 2))) for _ in range(rng.choice((0, 0, 0, 0, 0, 0, 0, 1, 2)))
        ),
        forbidden_aggregates=tuple(aggregate for aggregate in AGGREGATES if rng.random() < 0.02),
        in_tree=rng.choice(states).uuid if not empty and rng.random() < 0.06 else None,
    )


def loaded(states: list[ProviderState]) -> Book:
    """A book of these providers."""
    book = Book()
    book.load(states, 1)
    return book
