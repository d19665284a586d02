"""Arrivals as they were once: a file of requests with the times at which they came and went.

The format is that of the public GPU cluster traces: a CSV with columns cpu_milli, memory_mib, num_gpu, creation_time
and deletion_time (seconds); others are passed over. A request becomes the smallest of the flavors known that covers
what it asked for, or the largest when none does.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from berth.load.plan import Arrival, PlanError

MAX_TRACE_ROWS = 10_000_000
NEEDED = ("cpu_milli", "memory_mib", "creation_time")


class Shape(Struct, frozen=True):
    """What a flavor gives, or a request asks: smaller means that every part is."""

    vcpus: float
    memory_mb: float
    gpus: float = 0.0

    def covers(self, asked: Shape) -> bool:
        """Whether everything asked for is there."""
        return self.vcpus >= asked.vcpus and self.memory_mb >= asked.memory_mb and self.gpus >= asked.gpus


def read_trace(path: Path, flavors: Mapping[str, Shape], *, speed: float) -> tuple[Arrival, ...]:
    """The arrivals of a file, in order, from 0. Deletions past the last arrival are not replayed. Raises PlanError."""
    rows = sorted(_rows(path), key=lambda row: row[0])
    if not rows:
        raise PlanError("load.trace", f"{path} has no requests")
    first, last = rows[0][0], rows[-1][0]
    order = sorted(flavors, key=lambda name: (flavors[name].gpus, flavors[name].vcpus, flavors[name].memory_mb, name))
    return tuple(
        Arrival(
            at_s=(created - first) / speed,
            flavor=_flavor(shape, order, flavors),
            lifetime_s=None if deleted is None or deleted > last else max(deleted - created, 0.0) / speed,
        )
        for created, deleted, shape in rows
    )


def _flavor(asked: Shape, order: list[str], flavors: Mapping[str, Shape]) -> str:
    for name in order:
        if flavors[name].covers(asked):
            return name
    return max(order, key=lambda name: (min(flavors[name].gpus, asked.gpus), flavors[name].vcpus))


def _rows(path: Path) -> list[tuple[float, float | None, Shape]]:
    found: list[tuple[float, float | None, Shape]] = []
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise PlanError("load.trace", f"{path} lacks the column {missing[0]}")
            for row in reader:
                if len(found) >= MAX_TRACE_ROWS:
                    raise PlanError("load.trace", f"{path} has more than {MAX_TRACE_ROWS} requests")
                found.append(_row(path, reader.line_num, row))
    except OSError as fault:
        raise PlanError("load.trace", f"cannot read {path}: {fault.strerror or fault}") from fault
    except csv.Error as fault:
        raise PlanError("load.trace", f"{path} is not a CSV file: {fault}") from fault
    return found


def _row(path: Path, line: int, row: Mapping[str, str]) -> tuple[float, float | None, Shape]:
    def number(name: str, default: str) -> float:
        value = float(row.get(name) or default)
        if not math.isfinite(value):
            raise ValueError(name)
        return value

    try:
        created = number("creation_time", "")
        deleted = number("deletion_time", "-1")
        shape = Shape(number("cpu_milli", "") / 1000, number("memory_mib", ""), number("num_gpu", "0"))
    except ValueError as fault:
        raise PlanError("load.trace", f"{path}, line {line}: not a request: {fault}") from fault
    return created, deleted if deleted >= created else None, shape
