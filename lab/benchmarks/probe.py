"""The cost of a run: CPU of process trees, broker messages from /metrics, transactions and statements of PostgreSQL."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import asyncpg
import psutil
from prometheus_client import REGISTRY, Metric
from prometheus_client.parser import text_string_to_metric_families

PROFILE_HZ = 250
PROFILE_S = 5
_TRANSACTIONS = "SELECT sum(xact_commit)::float8 FROM pg_stat_database WHERE datname = current_database()"
_STATEMENTS = "SELECT query, calls::float8, total_exec_time AS ms FROM pg_stat_statements WHERE NOT query ~ '^EXPLAIN'"


def cpu_s(root: int) -> float:
    """CPU seconds that a process and its living descendants have used, with those of children that have ended."""
    return _sum(root, lambda process: sum(process.cpu_times()[:4]))


def memory_mb(root: int) -> float:
    """Resident memory of a process and its living descendants (shared pages counted in each)."""
    return _sum(root, lambda process: process.memory_info().rss) / 2**20


def tree(root: int) -> list[int]:
    """A process and its living descendants, parents first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    return []


def shared_out_mb(root: int, *, alone: bool = False) -> float:
    """Memory of a process and (unless alone) its descendants; shared pages divided among those who share them (PSS)."""
    return _sum(root, lambda process: process.memory_full_info().pss, alone=alone) / 2**20


def _sum(root: int, read: Callable[[psutil.Process], float], *, alone: bool = False) -> float:
    total = 0.0
    for pid in [root] if alone else tree(root):
        with contextlib.suppress(psutil.Error):  # it has just ended
            total += read(psutil.Process(pid))
    return total


def counters(families: Iterable[Metric], names: Iterable[str]) -> Counter[str]:
    """Some Prometheus counters: the sum over all labels by name, and by `name{label="value"}` each."""
    wanted = set(names)
    found: Counter[str] = Counter()
    for family in families:
        for sample in family.samples if family.name in wanted else ():
            if not sample.name.endswith("_created"):
                labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                found[family.name] += sample.value  # type: ignore[assignment]
                found[f"{family.name}{{{labels}}}"] += sample.value  # type: ignore[assignment]
    return found


def scraped(page: str, names: Iterable[str]) -> Counter[str]:
    """Those of a /metrics page."""
    return counters(text_string_to_metric_families(page), names)


def own_counters(names: Iterable[str]) -> Counter[str]:
    """Those of this process."""
    return counters(REGISTRY.collect(), names)


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
    connection = await asyncpg.connect(url)
    try:
        return float(await connection.fetchval(_TRANSACTIONS))
    finally:
        await connection.close()


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
