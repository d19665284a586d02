"""The record of one load run: the requests, the outcome of every boot, the state of the system meanwhile.

`scripts/load --json FILE` writes it; `lab.load.report.report` renders it, and compares two. The large parts are columns
(parallel lists), so that a million boots stay readable to any program: row `i` of every column of `Operations` is the
same boot, row `i` of every column of `Samples` the same moment. `None` in a column: not known, or it never happened.

Every time is in seconds since `LoadRecord.started_at` (unix time, the first intended arrival), on the load
generator's own monotonic clock; durations are seconds as well. Only summaries with `_ms` in their names are in
milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta as Bound
from msgspec import Struct, field

from bus.contracts import stages
from bus.contracts.base import reason_of

FORMAT = "berth.load.v1"

# How one operation ended, as `Operations.outcome` counts them. The first four are answers of the system.
#   active: the machine runs. deleted: a delete's good end. failed: built nowhere, with a code.
#   refused: the scheduler refused it (no host, no such flavor, ...), with a code.
#   backpressure: the broker refused the request (its queue is full): the publisher knows it, never accepted. Not lost.
#   unsent: the run ended, or was interrupted, or the bus was unavailable, before the broker confirmed it. Not lost.
#   open: still under way when the run was interrupted. Not lost: it was not waited for to the bound.
#   lost: the broker confirmed it, no terminal event came within `Settings.lost_after_s`, and no scheduler that was
#   queried then had it under way.
#   late: the same, but a scheduler has it under way: accepted, scheduled, building or deleting.
OUTCOMES: tuple[str, ...] = ("active", "deleted", "failed", "refused", "backpressure", "unsent", "open", "lost", "late")
Outcome = Literal["active", "deleted", "failed", "refused", "backpressure", "unsent", "open", "lost", "late"]

# The stages of a boot in their order: `Operations.stages[name][i]` is the time that boot `i` spent in that stage; a
# boot's stages add up to its latency, from the intended time. queued: until a scheduler took it. decided: until it had
# chosen a host. claimed: until placement gave it, lost claims included. dispatched: until the host's compute service
# had the command. built: until a host reported how the last attempt ended, failed attempts and claims of alternates
# included. announced: until the client received it. A stage that this version of the workers does not report is absent
# from the dict, never zero.
STAGES: tuple[str, ...] = stages.STAGES

# Past these a record has less detail, and no error: hosts are thinned evenly, snapshots are taken less often.
MAX_HEAT_HOSTS = 2_000
MAX_HEAT_SNAPSHOTS = 240
MAX_SAMPLES = 20_000

# No record that we wrote is larger; a file from elsewhere is refused unread.
MAX_RECORD_BYTES = 2**31

Seconds = float
Column = list[float | None]
Index = Annotated[int, Bound(ge=0)]


class RecordError(ValueError):
    """A file is not a load record. `code` is stable: record.unreadable, record.format, record.invalid."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class LoadSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The plan of the run.

    mode: "open" (arrivals at their times, whatever comes back: `rate_per_s`), "ramp" (open, the rate rising or
    falling evenly from `ramp_from_per_s` to `rate_per_s` within `ramp_s`), "trace" (open, arrivals from a file),
    "closed" (`concurrency` in flight), "burst" (all at once).
    mix: {flavor: weight}. churn: the share of boots that is deleted after it was active.
    speed: a trace's time runs so many times faster. bus: the bus's URL without its password.
    """

    mode: Literal["open", "ramp", "trace", "closed", "burst"]
    boots: int
    mix: dict[str, float] = {}
    rate_per_s: float = 0.0
    ramp_from_per_s: float = 0.0
    ramp_s: float = 0.0
    concurrency: int = 0
    churn: float = 0.0
    trace: str = ""
    speed: float = 1.0
    timeout_s: float = 0.0
    lost_after_s: float = 0.0
    project_id: str = ""
    seed: int | None = None
    bus: str = ""
    cells: tuple[str, ...] = ()


class MachineInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the load generator ran, and on what."""

    hostname: str = ""
    system: str = ""
    cpus: int = 0
    cpu_model: str = ""
    memory_mb: int = 0
    python: str = ""
    berth: str = ""


class Operations(Struct, frozen=True, kw_only=True):
    """Boots (or deletes), a column each. Strings that repeat are kept once: a column holds the index into its table.

    intended_s: when it was meant to leave; latency is counted from here, so a stall hides nothing. sent_s: when the
    broker had confirmed it. accepted_s: when the client received that it is on record. ended_s: its terminal event.
    outcome -> OUTCOMES; flavor -> flavors (and kinds: "vm" or "metal"); code -> codes ("" = nothing to explain);
    cell -> cells, host -> hosts ("" = none or not known).
    attempts: hosts it was tried on (0: none). conflicts: claims it lost to others before one held; None: not reported.
    again: times the publisher was refused by backpressure and sent it again.
    stages: {stage of STAGES: seconds spent there}. Columns of `stages` that were not reported are absent.
    """

    flavors: list[str] = []
    kinds: list[str] = []
    codes: list[str] = []
    cells: list[str] = []
    hosts: list[str] = []

    instance_uuid: list[str] = []
    intended_s: list[float] = []
    sent_s: Column = []
    accepted_s: Column = []
    ended_s: Column = []
    outcome: list[Index] = []
    flavor: list[Index] = []
    code: list[Index] = []
    cell: list[Index] = []
    host: list[Index] = []
    attempts: list[int] = []
    conflicts: list[int | None] = []
    again: list[int] = []
    stages: dict[str, Column] = {}

    def __len__(self) -> int:
        return len(self.intended_s)

    def latency_s(self, row: int) -> float | None:
        """From the intended time until the terminal event; None when there was none."""
        ended = self.ended_s[row]
        return None if ended is None else ended - self.intended_s[row]

    def outcome_of(self, row: int) -> str:
        """The name of how one ended."""
        return OUTCOMES[self.outcome[row]]


class Samples(Struct, frozen=True, kw_only=True):
    """How it went, a row about each half second (`at_s`). Rates are over the time since the row before.

    offered_per_s: arrivals that fell due. sent_per_s: confirmed by the broker. ended_per_s: terminal events received.
    in_flight: sent and not ended. p50_ms, p95_ms, p99_ms: latency, from the intended time, of the boots that ended
    since the row before; None when none did.
    conflicts, retries, backpressure: cumulative. conflicts: claims lost to others, over all schedulers whose /metrics
    are known, else as the boots report them. retries: builds tried on another host. backpressure: refusals.
    depths: {queue (a cell's as `cell1/conductor.requests`): messages ready}; a message may carry many items.
    deleted_per_s: deletes that ended.
    """

    at_s: list[float] = []
    offered_per_s: list[float] = []
    sent_per_s: list[float] = []
    ended_per_s: list[float] = []
    deleted_per_s: list[float] = []
    in_flight: list[int] = []
    p50_ms: Column = []
    p95_ms: Column = []
    p99_ms: Column = []
    conflicts: list[int | None] = []
    retries: list[int] = []
    backpressure: list[int] = []
    depths: dict[str, list[int | None]] = {}

    def __len__(self) -> int:
        return len(self.at_s)


class Utilisation(Struct, frozen=True, kw_only=True):
    """How full the hosts were: a row of `share` a moment (`at_s`), a column a host (`hosts`, `cells` beside them).

    share: used over capacity of the fullest of the host's VCPU, MEMORY_MB, DISK_GB or CUSTOM_ classes, 0..1, rounded
    to three digits. The last row is the end of the run. At most MAX_HEAT_HOSTS hosts (`of_hosts`: of how many).
    """

    hosts: list[str] = []
    cells: list[str] = []
    of_hosts: int = 0
    at_s: list[float] = []
    share: list[list[float]] = []


class Totals(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The honest end, as printed. Every boot is in exactly one of OUTCOMES; `by_code` explains failed and refused.

    accepted: the broker confirmed it. duplicates: ended more than once (a defect). interrupted: by a signal.
    latency_ms: p50, p90, p95, p99, max, mean over active boots, from the intended time; delete_ms: of deletes.
    """

    boots: int = 0
    accepted: int = 0
    outcomes: dict[str, int] = {}
    by_code: dict[str, int] = {}
    deletes: int = 0
    delete_outcomes: dict[str, int] = {}
    delete_by_code: dict[str, int] = {}
    duplicates: int = 0
    interrupted: bool = False
    seconds: float = 0.0
    boots_per_s: float = 0.0
    latency_ms: dict[str, float] = {}
    delete_ms: dict[str, float] = {}
    stages_ms: dict[str, dict[str, float]] = {}
    attempts: dict[str, int] = {}
    conflicts: int | None = None
    backpressure: int = 0
    knee: dict[str, float] = {}


class LoadRecord(Struct, frozen=True, kw_only=True):
    """One load run. `format` names and versions it; unknown fields of a newer one are passed over.

    started_at: unix time of the first intended arrival. seconds: from there until the last terminal event.
    deletes: what --churn deleted, rows of their own (their `sent_s`, `ended_s` and latency are the delete's).
    """

    settings: LoadSettings
    totals: Totals
    format: str = FORMAT
    started_at: float = 0.0
    seconds: Seconds = 0.0
    machine: MachineInfo = MachineInfo()
    boots: Operations = field(default_factory=Operations)
    deletes: Operations = field(default_factory=Operations)
    samples: Samples = field(default_factory=Samples)
    utilisation: Utilisation = field(default_factory=Utilisation)


def encode(record: LoadRecord) -> bytes:
    """The record as JSON, on one line: a large one is for programs."""
    return msgspec.json.encode(record)


def decode(body: bytes) -> LoadRecord:
    """A record from JSON. Raises RecordError: not JSON, another format, columns that do not fit each other."""
    if len(body) > MAX_RECORD_BYTES:
        raise RecordError("record.unreadable", f"{len(body)} bytes are more than any record has")
    try:
        record = msgspec.json.decode(body, type=LoadRecord)
    except (msgspec.DecodeError, RecursionError) as fault:
        raise RecordError("record.unreadable", f"not a record of a load: {reason_of(fault)}") from fault
    if record.format != FORMAT:
        raise RecordError("record.format", f"a record of format {record.format!r}; this berth reads {FORMAT}")
    for name, rows in (("boots", record.boots), ("deletes", record.deletes)):
        _check(name, rows)
    _check_samples(record.samples)
    _check_heat(record.utilisation)
    return record


def _check(name: str, rows: Operations) -> None:
    size = len(rows)
    columns = {
        column: getattr(rows, column)
        for column in (
            "instance_uuid", "sent_s", "accepted_s", "ended_s", "outcome", "flavor", "code", "cell", "host",
            "attempts", "conflicts", "again",
        )
    }  # fmt: skip
    _same_length(name, size, columns | {f"stages.{stage}": column for stage, column in rows.stages.items()})
    tables: tuple[tuple[str, Sequence[int], int], ...] = (
        ("outcome", rows.outcome, len(OUTCOMES)),
        ("flavor", rows.flavor, min(len(rows.flavors), len(rows.kinds))),
        ("code", rows.code, len(rows.codes)),
        ("cell", rows.cell, len(rows.cells)),
        ("host", rows.host, len(rows.hosts)),
    )
    for column, indexes, most in tables:
        if indexes and max(indexes) >= most:
            raise RecordError("record.invalid", f"{name}.{column} points past its table of {most}")


def _check_samples(samples: Samples) -> None:
    columns = {
        column: getattr(samples, column)
        for column in samples.__struct_fields__
        if column not in {"at_s", "depths"}
    }  # fmt: skip
    depths = {f"depths.{queue}": column for queue, column in samples.depths.items()}
    _same_length("samples", len(samples), columns | depths)


def _check_heat(heat: Utilisation) -> None:
    _same_length("utilisation", len(heat.hosts), {"cells": heat.cells})
    _same_length("utilisation", len(heat.at_s), {"share": heat.share})
    _same_length("utilisation.share", len(heat.hosts), {str(row): shares for row, shares in enumerate(heat.share)})


def _same_length(name: str, size: int, columns: Mapping[str, Sequence[object]]) -> None:
    for column, values in columns.items():
        if len(values) != size:
            raise RecordError("record.invalid", f"{name}.{column} has {len(values)} rows, not {size}")
