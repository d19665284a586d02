"""What processes have used so far, and what they count at /metrics."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
from prometheus_client import REGISTRY, Metric
from prometheus_client.parser import text_string_to_metric_families


def cpu_s(root: int) -> float:
    """CPU seconds that a process and its living descendants have used, with those of children that have ended."""
    return _sum(root, lambda process: sum(process.cpu_times()[:4]))


def wake_ups(root: int) -> int:
    """Context switches because a thread had nothing to do, of all living threads of a process and its descendants."""
    found = 0
    for pid in tree(root):
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):  # it has just ended
                lines = status.read_text().splitlines()
                found += next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return found


def tree(root: int) -> list[int]:
    """A process and its living descendants, parents first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    return []


def memory_mb(root: int, *, alone: bool = False) -> float:
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
