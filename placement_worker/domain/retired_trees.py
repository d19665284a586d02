"""Retired trees: trees that their source removed while consumers used them. They are deleted when the last consumer is
gone.
"""

from __future__ import annotations

from collections.abc import Iterable

from placement_worker.domain.values import Provider


def is_retired(tree: Iterable[Provider]) -> bool:
    """Whether all inventory of a tree is stranded and unused, so that the tree can be removed.

    A tree without inventory is not retired: a client may be about to add some.
    """
    providers = list(tree)
    inventories = [inventory for provider in providers for inventory in provider.inventories.values()]
    unused = not any(any(provider.used.values()) for provider in providers)
    return bool(inventories) and unused and all(inventory.stranded for inventory in inventories)
