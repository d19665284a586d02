"""The breaker of one compute service: too many machines that are lost, unexplained or over in one report stop
destruction.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct

from .events import Event, HostMissing
from .report import Unexplained

# Machines named in the record of a breaker; the others are counted.
MAX_NAMED = 10_000


class Finding(Struct, frozen=True):
    """One event that ends or destroys a machine because of a report and not of a client's request.

    ordered: the record has commanded that itself (`proof.is_ordered`): the report only repeats it, and is not counted.
    """

    uuid: str
    event: Event
    ordered: bool = False

    @property
    def key(self) -> str:
        """Names the machine: its instance, on this host."""
        return f"{self.uuid}@{getattr(self.event, 'host_uuid', '')}"


class Breaker(Struct, frozen=True, kw_only=True):
    """The record of one service's breaker. machines: the keys of those that opened it.

    reset_at, reset_by: when and by whom an operator reset it, for these machines and no others (0, "": not yet).
    """

    service: str
    tripped_at: float
    lost: int = 0
    quarantined: int = 0
    over: int = 0
    machines: tuple[str, ...] = ()
    reset_at: float = 0.0
    reset_by: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it stops destruction."""
        return not self.reset_at


class BreakerVerdict(Struct, frozen=True):
    """The findings of one report that take effect. tripped: the breaker to put on record, if it opens now."""

    go: tuple[Finding, ...] = ()
    held: int = 0
    tripped: Breaker | None = None


def assess(
    service: str,
    findings: Sequence[Finding],
    quarantined: Sequence[Unexplained],
    breaker: Breaker | None,
    *,
    limit: int,
    now: float,
) -> BreakerVerdict:
    """Which findings of one report take effect. quarantined: machines that were put on record with this report.

    All or nothing: up to the limit, losses count as failures; more of them at once suggest a wrong database.
    """
    if breaker is not None and breaker.is_open:
        return BreakerVerdict(held=len(findings))
    passed: Collection[str] = frozenset(breaker.machines) if breaker is not None else ()
    new = [finding for finding in findings if not finding.ordered and finding.key not in passed]
    unknown = [f"{one.uuid}@{one.host_uuid}" for one in quarantined]
    if len(new) + len(unknown) <= limit:
        return BreakerVerdict(go=tuple(findings))
    lost = sum(isinstance(finding.event, HostMissing) for finding in new)
    # Findings that were passed before count, too: one reset is for a whole report, or the next report would need
    # another.
    machines = sorted({*(finding.key for finding in findings if not finding.ordered), *unknown})[:MAX_NAMED]
    tripped = Breaker(
        service=service,
        tripped_at=now,
        lost=lost,
        quarantined=len(unknown),
        over=len(new) - lost,
        machines=tuple(machines),
    )
    return BreakerVerdict(held=len(findings), tripped=tripped)


class ScanFindings:
    """The findings of the pages of one scan of a service's hosts so far. A scan is assessed as a whole."""

    def __init__(self, key: tuple[int, int, int]) -> None:
        self.key = key
        self.pages = 0
        self.findings: list[Finding] = []
        self.quarantined: list[Unexplained] = []
