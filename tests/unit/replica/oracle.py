"""Placement's rules written slowly: every combination of providers is tried. The book that the replica is compared
with.
"""

from __future__ import annotations

from itertools import product

from bus.contracts.placement import ProviderState
from placement_worker.replica.query import Query

Assignment = tuple[tuple[str, str], ...]  # ((class, provider), ...), by class


def ways(
    providers: dict[str, ProviderState], assumed: dict[str, dict[str, int]], query: Query
) -> dict[str, set[Assignment]]:
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
) -> set[Assignment]:
    if any(trait in root.traits for trait in query.root_forbidden):
        return set()
    if not all(set(group) & set(root.traits) for group in query.root_required):
        return set()
    members = [state for state in providers.values() if state.root_uuid == root.uuid]
    requested = sorted((name, amount) for name, amount in query.resources.items() if amount > 0)
    givers = [
        [one for one in members if _gives(one, root, assumed, query, (name, amount))] for name, amount in requested
    ]
    found: set[Assignment] = set()
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
