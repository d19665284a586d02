"""The cost of a run: CPU of process trees, broker messages from /metrics, transactions and statements of PostgreSQL."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import asyncpg
from prometheus_client import REGISTRY, generate_latest

PROFILE_HZ = 250
PROFILE_S = 5
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SAMPLE = re.compile(r"^(\w+?)(?:_total)?(?:\{([^}]*)\})? ([0-9.e+-]+)$", re.MULTILINE)

_TRANSACTIONS = "SELECT sum(xact_commit)::float8 FROM pg_stat_database WHERE datname = current_database()"
_STATEMENTS = "SELECT query, calls::float8, total_exec_time AS ms FROM pg_stat_statements WHERE NOT query ~ '^EXPLAIN'"


def cpu_s(root: int) -> float:
    """CPU seconds that a process and its living descendants have used, with those of children that have ended."""
    parents, used = _processes()
    return sum(used[pid] for pid in _tree(root, parents))


def memory_mb(root: int) -> float:
    """Resident memory of a process and its living descendants (shared pages counted in each)."""
    parents, _ = _processes()
    page_mb = os.sysconf("SC_PAGE_SIZE") / 2**20
    total = 0.0
    for pid in _tree(root, parents):
        try:
            with open(f"/proc/{pid}/statm", encoding="ascii") as file:
                total += int(file.read().split()[1]) * page_mb
        except OSError:
            continue
    return total


def tree(root: int) -> list[int]:
    """A process and its living descendants."""
    return _tree(root, _processes()[0])


def shared_out_mb(root: int, *, alone: bool = False) -> float:
    """Memory of a process and (unless alone) its descendants; shared pages divided among those who share them (PSS)."""
    parents, _ = ({}, {}) if alone else _processes()
    total = 0.0
    for pid in [root] if alone else _tree(root, parents):
        try:
            with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1024
        except OSError:  # it has just ended
            continue
    return total


def counters(text: str, names: Iterable[str]) -> Counter[str]:
    """Some Prometheus counters of a /metrics page: the sum over all labels by name, and by `name{labels}` each."""
    wanted = set(names)
    found: Counter[str] = Counter()
    for name, labels, value in _SAMPLE.findall(text):
        if name in wanted:
            found[name] += float(value)  # type: ignore[assignment]
            found[f"{name}{{{labels}}}"] += float(value)  # type: ignore[assignment]
    return found


def own_counters(names: Iterable[str]) -> Counter[str]:
    """The same of this process."""
    return counters(generate_latest(REGISTRY).decode(), names)


def profile(pids: Mapping[str, int], directory: Path) -> None:
    """Let py-spy watch these processes for a while, one file of folded stacks each. py-spy must be installed."""
    directory.mkdir(parents=True, exist_ok=True)
    beside = Path(sys.executable).with_name("py-spy")
    py_spy = str(beside) if beside.exists() else "py-spy"
    for name, pid in pids.items():
        command = [py_spy, "record", "-r", str(PROFILE_HZ), "-d", str(PROFILE_S), "-f", "raw", "-p", str(pid)]
        output = str(directory / f"{name}.raw")
        subprocess.Popen([*command, "-o", output], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def transactions(url: str) -> float:
    """Transactions committed so far, the instruments' own included."""
    return await _value(url, _TRANSACTIONS)


async def count_statements(url: str) -> None:
    """Begin to count statements. The server must have loaded pg_stat_statements."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    finally:
        await connection.close()


async def statements(url: str) -> Mapping[str, tuple[float, float]] | None:
    """{statement: (calls, milliseconds)} where the server counts them; None where it does not."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch(_STATEMENTS)
    except asyncpg.PostgresError:
        return None
    else:
        found: dict[str, tuple[float, float]] = {}
        for row in rows:
            calls, ms = found.get(row["query"], (0.0, 0.0))
            found[row["query"]] = (calls + row["calls"], ms + row["ms"])
        return found
    finally:
        await connection.close()


async def _value(url: str, statement: str) -> float:
    connection = await asyncpg.connect(url)
    try:
        return float(await connection.fetchval(statement))
    finally:
        await connection.close()


def _tree(root: int, parents: Mapping[int, int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, todo = [], [root] if root in parents else []
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def _processes() -> tuple[dict[int, int], dict[int, float]]:
    """({pid: parent}, {pid: CPU seconds, ended children included})."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(name)] = int(fields[1])
        used[int(name)] = sum(map(int, fields[11:15])) / TICKS_PER_S
    return parents, used
