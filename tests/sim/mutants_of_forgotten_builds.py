"""Deliberate defects of the search for machines of builds that a cell's database has forgotten. FOUND_BY: the seed of
`builds_forgotten` that finds each.

A search that is skipped for builds alone is found by no seed: a command that comes a second time names the same hosts,
and each attempt ends there as it did. `tests/integration/conductor/test_restored.py` has it with certainty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from cell_conductor.search import MachineSearch, Searched


def search_finds_nothing() -> AbstractContextManager[Any]:
    """The compute services are not queried, as if none had a machine."""

    async def find(self: MachineSearch, uuids: Collection[str]) -> Searched:
        return Searched()

    return patch.object(MachineSearch, "find", find)


def deletes_are_not_searched() -> AbstractContextManager[Any]:
    """A delete of an instance without a record is one that came before its build."""

    async def find_unrecorded(self: MachineSearch, uuids: Collection[str]) -> set[str]:
        return set()

    return patch.object(MachineSearch, "find_unrecorded", find_unrecorded)


MUTANTS_OF_FORGOTTEN_BUILDS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    search_finds_nothing,
    deletes_are_not_searched,
)
FOUND_BY: dict[str, int] = {
    "search_finds_nothing": 2,
    "deletes_are_not_searched": 1,
}
BREAKS: dict[str, str] = {
    "search_finds_nothing": "never_running_unclaimed",
    "deletes_are_not_searched": "liveness",
}
