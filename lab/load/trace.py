"""Arrivals as they were once: a file of requests with the times at which they came and went.

The format is that of the public GPU cluster traces: a CSV with columns cpu_milli, memory_mib, num_gpu, gpu_milli (the
share of one GPU), gpu_spec (models it may have, `A|B`), creation_time and deletion_time (seconds); others are passed
over. A request becomes the flavor that is named for just what it requests, where the settings are made for the trace
(`lab.load.fleet`); else the smallest of the flavors known that covers it, or the largest when none does.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from lab.load.plan import Arrival, PlanError

MAX_TRACE_ROWS = 10_000_000
NEEDED = ("cpu_milli", "memory_mib", "creation_time")
# The largest number that a row may have: seconds, MiB or thousandths of a core.
MAX_NUMBER = 1e12
WHOLE_GPU = 1000
MODEL = re.compile(r"[A-Z0-9_]{1,32}", re.ASCII)


class Shape(Struct, frozen=True):
    """The size of a flavor or of a request: smaller means that every part is."""

    vcpus: float
    memory_mb: float
    gpus: float = 0.0

    def covers(self, requested: Shape) -> bool:
        """Whether no part of the request is larger."""
        return self.vcpus >= requested.vcpus and self.memory_mb >= requested.memory_mb and self.gpus >= requested.gpus


class TraceRequest(Struct, frozen=True, order=True):
    """One request of a trace: thousandths of a core, MiB, so many GPUs, thousandths of each, of any of these.

    models empty: whatever model.
    """

    cpu_milli: int
    memory_mib: int
    gpus: int = 0
    gpu_milli: int = 0
    models: tuple[str, ...] = ()

    @property
    def flavor(self) -> str:
        """The name of the flavor that is just this."""
        words = [f"trace.{self.cpu_milli}m-{self.memory_mib}M"]
        if self.gpus:
            words.append(f"{self.gpus}x{self.gpu_milli}")
        return "-".join([*words, *self.models])

    @property
    def shape(self) -> Shape:
        """The same in what flavors have."""
        return Shape(self.cpu_milli / 1000, self.memory_mib, self.gpus)


class TraceRow(Struct, frozen=True):
    """One row of a trace. deleted_s None: never."""

    created_s: float
    deleted_s: float | None
    requested: TraceRequest

    @property
    def lifetime_s(self) -> float:
        """From its creation to its deletion."""
        return math.inf if self.deleted_s is None else max(self.deleted_s - self.created_s, 0.0)

    def ends_by(self, last_s: float) -> bool:
        """Whether it is deleted, and by then."""
        return self.deleted_s is not None and self.deleted_s <= last_s


def read_trace(
    path: Path,
    flavors: Mapping[str, Shape],
    *,
    speed: float,
    deletes: bool = True,
    skip_s: float = 0.0,
    most: int | None = None,
) -> tuple[Arrival, ...]:
    """The arrivals of a file, in order, from 0. Deletions past the last arrival are not replayed. Raises PlanError.

    deletes False: nothing is deleted, so that what came in all has to fit at once. skip_s: see `skipped`. most: only
    the first so many.
    """
    return arrivals_of(skipped(read_requests(path), skip_s)[:most], flavors, speed=speed, deletes=deletes)


def skipped(requests: list[TraceRow], skip_s: float) -> list[TraceRow]:
    """A trace without its first `skip_s` seconds: instances that were there then arrive at once. Raises PlanError."""
    begin = requests[0].created_s + skip_s
    if begin > requests[-1].created_s:
        raise PlanError("load.trace", f"nothing arrives after the first {skip_s:g} s that are skipped")
    return [
        TraceRow(max(one.created_s, begin), one.deleted_s, one.requested) for one in requests if not one.ends_by(begin)
    ]


def arrivals_of(
    requests: Sequence[TraceRow], flavors: Mapping[str, Shape], *, speed: float, deletes: bool
) -> tuple[Arrival, ...]:
    """When each of these is meant to leave, as what, and how long it lives."""
    first, last = requests[0].created_s, requests[-1].created_s
    order = sorted(flavors, key=lambda name: (flavors[name].gpus, flavors[name].vcpus, flavors[name].memory_mb, name))
    return tuple(
        Arrival(
            at_s=(one.created_s - first) / speed,
            flavor=_flavor(one.requested, order, flavors),
            lifetime_s=one.lifetime_s / speed if deletes and one.ends_by(last) else None,
        )
        for one in requests
    )


def read_requests(path: Path) -> list[TraceRow]:
    """The rows of a file by when they came. Raises PlanError."""
    rows = sorted(_rows(path), key=lambda row: row.created_s)
    if not rows:
        raise PlanError("load.trace", f"{path} has no requests")
    return rows


def _flavor(request: TraceRequest, order: list[str], flavors: Mapping[str, Shape]) -> str:
    if request.flavor in flavors:
        return request.flavor
    requested = request.shape
    for name in order:
        if flavors[name].covers(requested):
            return name
    return max(order, key=lambda name: (min(flavors[name].gpus, requested.gpus), flavors[name].vcpus))


def _rows(path: Path) -> list[TraceRow]:
    return [_request(path, line, row) for line, row in csv_rows(path, NEEDED)]


def csv_rows(path: Path, needed: Sequence[str], *, code: str = "load.trace") -> list[tuple[int, dict[str, str]]]:
    """The lines of a CSV file with a head that has these columns, each with its number. Raises PlanError."""
    found: list[tuple[int, dict[str, str]]] = []
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            reader = csv.DictReader(file)
            missing = [name for name in needed if name not in (reader.fieldnames or ())]
            if missing:
                raise PlanError(code, f"{path} lacks the column {missing[0]}")
            for row in reader:
                if len(found) >= MAX_TRACE_ROWS:
                    raise PlanError(code, f"{path} has more than {MAX_TRACE_ROWS} rows")
                found.append((reader.line_num, row))
    except OSError as fault:
        raise PlanError(code, f"cannot read {path}: {fault.strerror or fault}") from fault
    except csv.Error as fault:
        raise PlanError(code, f"{path} is not a CSV file: {fault}") from fault
    return found


def amount(row: Mapping[str, str], name: str, default: str = "") -> float:
    """A number of a row, not negative. Raises ValueError."""
    value = float(row.get(name) or default)
    if not 0 <= value <= MAX_NUMBER:
        raise ValueError(name)
    return value


def _request(path: Path, line: int, row: Mapping[str, str]) -> TraceRow:
    try:
        created = amount(row, "creation_time")
        deleted = float(row.get("deletion_time") or "-1")  # below its creation: never
        if not math.isfinite(deleted):
            raise ValueError("deletion_time")
        gpus = int(amount(row, "num_gpu", "0"))
        models = tuple(sorted({model(name) for name in (row.get("gpu_spec") or "").split("|") if name.strip()}))
        requested = TraceRequest(
            cpu_milli=math.ceil(amount(row, "cpu_milli")),
            memory_mib=math.ceil(amount(row, "memory_mib")),
            gpus=gpus,
            gpu_milli=(int(amount(row, "gpu_milli", "0")) or WHOLE_GPU) if gpus else 0,
            models=models if gpus else (),
        )
    except ValueError as fault:
        raise PlanError("load.trace", f"{path}, line {line}: not a request: {fault}") from fault
    return TraceRow(created, deleted if deleted >= created else None, requested)


def model(text: str) -> str:
    """The name of a GPU model as a word of a trait. Raises ValueError."""
    name = text.strip().upper()
    if not MODEL.fullmatch(name):
        raise ValueError(f"{text!r} is no model of a GPU")
    return name
