"""How tests are handed to pytest's processes: what is long first, and a file's tests to one process.

A file's tests share what its fixtures start, or the runs of the simulation that they look at; two processes with some
of them each would do all of it twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadScopeScheduling

# The files that take longest. One that begins last would have the machine to itself, most of it idle.
LONGEST = (
    *(
        f"tests/drills/test_{name}.py"
        for name in ("chaos", "real_processes", "up_servers", "failover", "fresh_clone", "up_processes", "dead_service")
    ),
    *(f"tests/system/test_{name}.py" for name in ("command_line", "moves_commands", "permissions", "nested")),
    "tests/sim/test_simulation.py",
)
FOLDERS = ("tests/drills", "tests/system", "tests/sim", "tests/integration", "tests/contract", "tests/unit")


def rank(path: str) -> tuple[int, int]:
    """Where a file's tests come: the longest files, then the folders, from few long tests to many short ones."""
    if path in LONGEST:
        return 0, LONGEST.index(path)
    return 1, next((number for number, folder in enumerate(FOLDERS) if path.startswith(folder)), len(FOLDERS))


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests as they are handed out; those of a file stay together and as they were."""
    return sorted(items, key=lambda item: rank(item.nodeid.partition("::")[0]))


class ByFile(LoadScopeScheduling):
    """A unit of work is a file."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]
