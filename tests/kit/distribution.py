"""How tests are handed to pytest's processes: what is long first, and a file's tests to one process.

A file's tests share what its fixtures start, or the runs of the simulation that they look at; two processes with some
of them each would do all of it twice. One process begins with the files that never wait, so that the processor has work
while the others' tests wait, and two with the files that borrow a broker, so that the others start none (`lent`). A
process takes what is left when its own kind is done."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# The files that take longest. One that begins last would have the machine to itself, most of it idle.
LONGEST = (
    *(f"tests/drills/test_{name}.py" for name in ("chaos", "real_processes", "up", "failover", "fresh_clone")),
    *(
        f"tests/system/test_{name}.py"
        for name in ("command_line", "moves_commands", "audit", "nested", "traces", "permissions", "cells_at_run_time")
    ),
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


# Their tests read all sources: one process parses them once.
READERS = ("tests/test_house.py", "tests/unit/berth/test_architecture.py", "tests/unit/berth/test_codes.py")


def unit_of(nodeid: str) -> str:
    """What a test is handed out with: the tests of its file, or of all readers."""
    path = nodeid.partition("::")[0]
    return READERS[0] if path in READERS else path


LEAST_PROCESSES = 4  # with a kind of files each; fewer have none
NEVER_WAITING = ("tests/sim/", "tests/unit/", "tests/test_")
# How a test file comes to a broker of `tests/kit/lent.py`.
BORROWING = re.compile(
    r"\b(own_broker|brokers\.lend|lent_servers|small_processes)\b|^from tests.system.*\brig\b", re.MULTILINE
)


def never_waits(path: str) -> bool:
    """Whether a file's tests only compute."""
    return path.startswith(NEVER_WAITING)


def borrows(root: Path, path: str) -> bool:
    """Whether a file's tests have a broker of their own, for a time."""
    return not never_waits(path) and BORROWING.search((root / path).read_text(encoding="utf-8")) is not None


def next_of(paths: Sequence[str], process: int, processes: int, borrowing: Callable[[str], bool]) -> str:
    """The file that a process is handed, of those that are left, in their order."""
    if processes < LEAST_PROCESSES:
        return paths[0]
    if process < 2:
        wanted: Iterator[str] = filter(borrowing, paths)
    elif process == processes - 1:
        wanted = filter(never_waits, paths)
    else:
        wanted = (path for path in paths if not never_waits(path) and not borrowing(path))
    return next(wanted, paths[0])


class ByFile(LoadScopeScheduling):
    """A unit of work is a file, or all readers."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._borrows = cache(partial(borrows, config.rootpath))

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        processes = list(self.registered_collections)
        chosen = next_of([*self.workqueue], processes.index(node), len(processes), self._borrows)
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)


# --- a share of some tests, drawn by a text: the same text draws the same ones, whatever order they come in


def drawn(names: Collection[str], share: int, by: str) -> frozenset[str]:
    """One in `share` of the names, rounded up."""
    ordered = sorted(names, key=lambda name: (sha256(f"{by} {name}".encode()).digest(), name))
    return frozenset(ordered[: -(-len(ordered) // share)])
