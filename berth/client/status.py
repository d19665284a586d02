"""The answer of `GET /api/v1/status`: what waits for a person."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Severity(StrEnum):
    """How bad a row is."""

    CRITICAL = "critical"  # something does not work, or is lost
    NOT_KNOWN = "not_known"  # a part could not be read
    WARNING = "warning"


class SystemState(StrEnum):
    """The state of the whole: that of the worst row."""

    FINE = "fine"
    WARNING = "warning"
    CRITICAL = "critical"
    NOT_KNOWN = "not_known"


class StatusKind(StrEnum):
    """What waits, ranked by harm: what other rows may follow from, then what is lost, then what goes on without."""

    DATABASE_AWAY = "database.away"
    BUS_AWAY = "bus.away"
    SCHEDULER_AWAY = "scheduler.away"
    PLACEMENT_AWAY = "placement.away"
    CONDUCTOR_AWAY = "conductor.away"
    RECOVERY_WAITS = "recovery.waits"
    BREAKER_OPEN = "breaker.open"
    INSTANCES_LOST = "instances.lost"
    SERVICES_SILENT = "services.silent"
    FENCER_HELD = "fencer.held"
    FENCE_UNACKNOWLEDGED = "fence.unacknowledged"
    QUARANTINE = "machines.quarantined"
    CELL_RECOVERING = "recovery.under_way"
    DRAIN_STUCK = "drains.stuck"
    DEAD_LETTERS = "dead_letters.waiting"
    AUDIT_FINDINGS = "audit.findings"
    HOSTS_NOT_IN_PLACEMENT = "hosts.not_in_placement"
    HOSTS_NOT_REPORTED = "hosts.not_reported"
    NO_HOSTS = "hosts.none"
    NODE_PROBLEMS = "nodes.problems"
    WORKERS_SILENT = "workers.silent"
    WORKERS_NOT_READY = "workers.not_ready"
    NOT_READ = "status.not_read"


class StatusRow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that waits for a person. subject: a cell, a bus, a drain; "": the whole. since: seconds since the
    epoch, null: not known. next: the command that shows more or mends it. page: where the pages show it.
    """

    severity: Severity
    kind: StatusKind
    subject: str = ""
    what: str
    detail: str = ""
    since: float | None = None
    next: str = ""
    page: str = ""


class SystemStatus(Struct, frozen=True, kw_only=True):
    """All that waits for a person, the worst first. at: seconds since the epoch."""

    state: SystemState
    at: float
    rows: tuple[StatusRow, ...]
