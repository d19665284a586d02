"""Providers and changes of them, random worlds, and Placement's rules written slowly to compare the replica with."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import product

from msgspec import Struct, structs

from bus.contracts.feed import Change
from bus.contracts.placement import ProviderState
from placement_worker.domain.values import SHARING
from placement_worker.replica.candidates import CandidateSet
from placement_worker.replica.replica import Replica
from placement_worker.replica.request import CandidatesRequest, Group, Query
from placement_worker.replica.trees import NO_ROW

# --- providers and changes for tests


def uuid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def inventory(
    capacity: int, *, low: int = 1, high: int = 2**31 - 1, step: int = 1
) -> tuple[float, int, int, int, int, int, float]:
    return (float(capacity), low, high, step, max(capacity, 1), 0, 1.0)


def provider(
    number: int,
    *,
    root: int | None = None,
    parent: int | None = None,
    generation: int = 1,
    spec_generation: int = 1,
    inventories: dict[str, int] | None = None,
    used: dict[str, int] | None = None,
    traits: tuple[str, ...] = (),
    aggregates: tuple[str, ...] = (),
) -> ProviderState:
    return ProviderState(
        uuid=uuid(number),
        name=f"p{number}",
        root_uuid=uuid(number if root is None else root),
        parent_uuid=None if parent is None else uuid(parent),
        generation=generation,
        spec_generation=spec_generation,
        inventories={name: inventory(capacity) for name, capacity in (inventories or {}).items()},
        used=used or {},
        traits=traits,
        aggregates=aggregates,
    )


def changed(sequence: int, state: ProviderState) -> Change:
    return Change(sequence=sequence, provider=state.uuid, generation=state.generation, state=state)


def used(sequence: int, number: int, generation: int, amounts: dict[str, int]) -> Change:
    return Change(sequence=sequence, provider=uuid(number), generation=generation, used=amounts)


def removed(sequence: int, number: int, generation: int) -> Change:
    return Change(sequence=sequence, provider=uuid(number), generation=generation, removed=True)


# --- random trees with everything that a candidate search can meet, and random requests for them

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
        traits.append(SHARING)
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
        spec_generation=number,
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
        for _ in range(rng.choice((0, 1, 2) if empty else (0, 0, 0, 0, 0, 1, 2)))
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
        in_tree=rng.choice(states).uuid if rng.random() < (0.3 if empty else 0.06) else None,
    )


def loaded(states: Iterable[ProviderState]) -> Replica:
    """A replica of these providers."""
    replica = Replica()
    replica.load(list(states), 1)
    return replica


# --- placement's rules for granular requests, written slowly: every choice of providers is tried

Found = tuple[frozenset[tuple[str, str, int]], frozenset[tuple[str, frozenset[str]]]]


class AllocationCandidate(Struct, frozen=True):
    """One way to satisfy a request. mappings: for each suffix, the providers that satisfy that group."""

    allocations: dict[str, dict[str, int]]
    mappings: dict[str, list[str]]
    spec_generations: dict[str, int]


def each_of(answer: CandidateSet) -> list[AllocationCandidate]:
    """The candidates of an answer, one by one."""
    listed = []
    replica = answer._replica
    for rows in answer.rows.tolist():
        one = AllocationCandidate({}, {}, {})
        for slot, row in zip(answer.slots, rows, strict=True):
            provider = replica.uuid_of(row)
            mapped = one.mappings.setdefault(slot.suffix, [])
            if provider not in mapped:
                mapped.append(provider)
            for name, amount in slot.resources.items():
                given = one.allocations.setdefault(provider, {})
                given[name] = given.get(name, 0) + amount
                one.spec_generations[provider] = replica.spec_generation_of(row)
        listed.append(one)
    return listed


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
        if state.root_uuid != root.uuid and SHARING in state.traits and in_aggregates & set(state.aggregates)
    ]
    tree = None if group.in_tree is None else world[group.in_tree].root_uuid
    if group.suffix:
        for one in [*own, *sharers]:
            fits = all(_can_give(one, name, amount) for name, amount in group.resources.items())
            meets = all(set(names) & set(one.traits) for names in group.required)
            allowed = _clean(one, group) and _member_of(one, group) and not _excluded(one, group)
            if fits and meets and allowed and tree in {None, one.root_uuid}:
                yield dict.fromkeys(group.resources, one.uuid) or {"": one.uuid}
        return
    usable = []
    if tree in {None, root.uuid}:
        usable += [one for one in own if _member_of(one, group) or _member_of(root, group)]
    if tree is None:
        usable += [one for one in sharers if _member_of(one, group)]
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


def _member_of(one: ProviderState, group: Group) -> bool:
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


# --- the content of a replica for every provider, for comparing two of them


def dump(replica: Replica) -> dict[str, object]:
    """{provider: everything placement holds of it}, of providers that hang under a root."""
    rows = replica.members(replica.rows_of_roots())[0].tolist()
    return {replica.uuid_of(row): _row(replica, row) for row in rows}


def _row(replica: Replica, row: int) -> tuple[object, ...]:
    parent = int(replica.parent[row])
    return (
        replica.name_of(row),
        replica.generation[row],
        replica.spec_generation_of(row),
        replica.traits_of(row),
        replica.aggregates_of(row),
        replica.inventory_of(row),
        None if parent == NO_ROW else replica.uuid_of(parent),
        replica.uuid_of(replica.root_of(row)),
    )


# --- placement's rules written slowly: every combination of providers is tried. Placement that the replica is compared
# with

Way = tuple[tuple[str, str], ...]  # ((class, provider), ...), by class


def ways(providers: dict[str, ProviderState], assumed: dict[str, dict[str, int]], query: Query) -> dict[str, set[Way]]:
    """{root: every way to satisfy the query on its tree}; roots with none are absent."""
    found = {}
    roots = [uuid for uuid, state in providers.items() if state.root_uuid == uuid]
    for root in roots:
        if (query.only_roots and root not in query.only_roots) or root in query.ignore_roots:
            continue
        if query.in_tree and (query.in_tree not in providers or providers[query.in_tree].root_uuid != root):
            continue
        tree_ways = _ways_of_tree(providers, assumed, query, providers[root])
        if tree_ways:
            found[root] = tree_ways
    return found


def _ways_of_tree(
    providers: dict[str, ProviderState], assumed: dict[str, dict[str, int]], query: Query, root: ProviderState
) -> set[Way]:
    if any(trait in root.traits for trait in query.root_forbidden):
        return set()
    if not all(set(group) & set(root.traits) for group in query.root_required):
        return set()
    members = [state for state in providers.values() if state.root_uuid == root.uuid]
    requested = sorted((name, amount) for name, amount in query.resources.items() if amount > 0)
    givers = [
        [one for one in members if _gives(one, root, assumed, query, (name, amount))] for name, amount in requested
    ]
    found: set[Way] = set()
    for chosen in product(*givers) if requested else ():
        together = {trait for one in chosen for trait in one.traits}
        if all(together & set(group) for group in query.required):
            found.add(tuple((name, one.uuid) for (name, _), one in zip(requested, chosen, strict=True)))
    return found


def _gives(
    one: ProviderState,
    root: ProviderState,
    assumed: dict[str, dict[str, int]],
    query: Query,
    requested: tuple[str, int],
) -> bool:
    name, amount = requested
    if set(query.forbidden) & set(one.traits):
        return False
    itself_or_root = any(all(set(group) & set(which.aggregates) for group in query.member_of) for which in (one, root))
    if not itself_or_root or set(query.forbidden_aggregates) & {*one.aggregates, *root.aggregates}:
        return False
    if name not in one.inventories:
        return False
    capacity, low, high, step = one.inventories[name][:4]
    used = one.used.get(name, 0) + assumed.get(one.uuid, {}).get(name, 0)
    return low <= amount <= high and amount % step == 0 and used + amount <= capacity
