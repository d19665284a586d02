"""Placement's rules for granular requests, written slowly: every choice of providers is tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from bus.contracts.placement import ProviderState
from placement_worker.replica.candidates import AllocationCandidate, CandidatesRequest, Group
from placement_worker.replica.sharing import SHARING_TRAIT

Found = tuple[frozenset[tuple[str, str, int]], frozenset[tuple[str, frozenset[str]]]]


def found(candidate: AllocationCandidate) -> Found:
    """A candidate as a value to compare: who gives how much of what, and who satisfies which group."""
    gives = ((uuid, name, amount) for uuid, given in candidate.allocations.items() for name, amount in given.items())
    return frozenset(gives), frozenset((suffix, frozenset(uuids)) for suffix, uuids in candidate.mappings.items())


def all_candidates(states: Iterable[ProviderState], request: CandidatesRequest) -> set[Found]:
    """Everything that the request could be claimed as."""
    world = {state.uuid: state for state in states}
    everything: set[Found] = set()
    for root in world.values():
        if root.root_uuid == root.uuid and _may_anchor(root, request):
            everything.update(_on(world, root, request))
    return everything


def _may_anchor(root: ProviderState, request: CandidatesRequest) -> bool:
    traits, aggregates = set(root.traits), set(root.aggregates)
    required = all(traits & set(names) for names in request.root_required)
    member = all(aggregates & set(names) for names in request.root_member_of)
    excluded = traits & set(request.root_forbidden) or aggregates & set(request.root_forbidden_aggregates)
    return required and member and not excluded


def _on(world: dict[str, ProviderState], root: ProviderState, request: CandidatesRequest) -> Iterator[Found]:
    ways = [list(_ways(world, root, group)) for group in request.groups]
    for choice in product(*ways):
        if _holds(world, request, choice):
            yield _merged(request, choice)


Assignment = dict[str, str | None]  # class -> provider; a group without resources: {"": provider}


def _ways(world: dict[str, ProviderState], root: ProviderState, group: Group) -> Iterator[Assignment]:
    """How one group could be satisfied by the tree of this root and who shares with it."""
    own = [state for state in world.values() if state.root_uuid == root.uuid]
    in_aggregates = {aggregate for state in own for aggregate in state.aggregates}
    sharers = [
        state
        for state in world.values()
        if state.root_uuid != root.uuid and SHARING_TRAIT in state.traits and in_aggregates & set(state.aggregates)
    ]
    tree = None if group.in_tree is None else world[group.in_tree].root_uuid
    if group.suffix:
        for one in [*own, *sharers]:
            fits = all(_can_give(one, name, amount) for name, amount in group.resources.items())
            meets = all(set(names) & set(one.traits) for names in group.required)
            allowed = _clean(one, group) and _member(one, group) and not _excluded(one, group)
            if fits and meets and allowed and tree in {None, one.root_uuid}:
                yield dict.fromkeys(group.resources, one.uuid) or {"": one.uuid}
        return
    usable = []
    if tree in {None, root.uuid}:
        usable += [one for one in own if _member(one, group) or _member(root, group)]
    if tree is None:
        usable += [one for one in sharers if _member(one, group)]
    usable = [one for one in usable if _clean(one, group) and not _excluded(one, group) and not _excluded(root, group)]
    for givers in product(*([u for u in usable if _can_give(u, n, a)] for n, a in group.resources.items())):
        traits = {trait for one in givers for trait in one.traits}
        if givers and all(set(names) & traits for names in group.required):
            yield dict(zip(group.resources, (one.uuid for one in givers), strict=True))


def _can_give(one: ProviderState, name: str, amount: int) -> bool:
    if name not in one.inventories:
        return False
    capacity, low, high, step = one.inventories[name][:4]
    return low <= amount <= high and amount % step == 0 and one.used.get(name, 0) + amount <= capacity


def _clean(one: ProviderState, group: Group) -> bool:
    return not set(group.forbidden) & set(one.traits)


def _member(one: ProviderState, group: Group) -> bool:
    return all(set(names) & set(one.aggregates) for names in group.member_of)


def _excluded(one: ProviderState, group: Group) -> bool:
    return bool(set(group.forbidden_aggregates) & set(one.aggregates))


def _holds(world: dict[str, ProviderState], request: CandidatesRequest, choice: tuple[Assignment, ...]) -> bool:
    """The rules between groups: policy, subtrees, and that all of it together fits."""
    by_suffix = {group.suffix: set(way.values()) for group, way in zip(request.groups, choice, strict=True)}
    numbered = [uuids for suffix, uuids in by_suffix.items() if suffix]
    if request.group_policy == "isolate" and len(set().union(*numbered)) != len(numbered):
        return False
    for suffixes in request.same_subtree:
        members = set().union(*(by_suffix[suffix] for suffix in suffixes))
        if not any(all(top in _line(world, str(one)) for one in members) for top in members):
            return False
    total = _total(request, choice)
    for (uuid, name), amount in total.items():
        capacity, _, high = world[uuid].inventories[name][:3]
        if world[uuid].used.get(name, 0) + amount > capacity or amount > high:
            return False
    givers = {uuid for uuid, _ in total}
    return not request.one_per_tree or len({world[uuid].root_uuid for uuid in givers}) == len(givers)


def _line(world: dict[str, ProviderState], uuid: str) -> set[str]:
    """The provider and its ancestors."""
    line, up = {uuid}, world[uuid].parent_uuid
    while up is not None:
        line.add(up)
        up = world[up].parent_uuid
    return line


def _total(request: CandidatesRequest, choice: tuple[Assignment, ...]) -> dict[tuple[str, str], int]:
    total: dict[tuple[str, str], int] = {}
    for group, way in zip(request.groups, choice, strict=True):
        for name, amount in group.resources.items():
            key = (str(way[name]), name)
            total[key] = total.get(key, 0) + amount
    return total


def _merged(request: CandidatesRequest, choice: tuple[Assignment, ...]) -> Found:
    gives = frozenset((uuid, name, amount) for (uuid, name), amount in _total(request, choice).items())
    mapped = (
        (group.suffix, frozenset(map(str, way.values()))) for group, way in zip(request.groups, choice, strict=True)
    )
    return gives, frozenset(mapped)
