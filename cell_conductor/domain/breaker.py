"""The breaker of one compute service: too many machines that are lost, unexplained or over within a short time stop
destruction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

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


class CountedAs(StrEnum):
    """Why a machine counts for the breaker."""

    LOST = "lost"
    QUARANTINED = "quarantined"
    OVER = "over"


NONE_COUNTED: Mapping[str, CountedAs] = MappingProxyType({})


class Breaker(Struct, frozen=True, kw_only=True):
    """The record of one service's breaker. lost, quarantined, over: how many machines were, in the report that opened
    it and in earlier ones of the window. machines: the keys of those of the report.

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
    """The findings of one report that take effect. tripped: the breaker to put on record, if it opens now. counted:
    the machines that take effect and count for the reports that follow within the window.
    """

    go: tuple[Finding, ...] = ()
    held: int = 0
    tripped: Breaker | None = None
    counted: Mapping[str, CountedAs] = {}


def assess(
    service: str,
    findings: Sequence[Finding],
    quarantined: Sequence[Unexplained],
    breaker: Breaker | None,
    *,
    limit: int,
    now: float,
    recent: Mapping[str, CountedAs] = NONE_COUNTED,
) -> BreakerVerdict:
    """Which findings of one report take effect. quarantined: machines that were put on record with this report.
    recent: what earlier reports of the window counted.

    All or nothing: up to the limit, losses count as failures; more of them at once suggest a wrong database.
    """
    if breaker is not None and breaker.is_open:
        return BreakerVerdict(held=len(findings))
    passed: Collection[str] = frozenset(breaker.machines) if breaker is not None else ()
    new = dict(_counted(findings, quarantined, passed))
    earlier = {key: kind for key, kind in recent.items() if key not in new and key not in passed}
    if not new or len(new) + len(earlier) <= limit:
        return BreakerVerdict(go=tuple(findings), counted=new)
    kinds = Counter([*new.values(), *earlier.values()])
    # Findings that were passed before count, too: one reset is for a whole report, or the next report would need
    # another.
    machines = sorted({*(finding.key for finding in findings if not finding.ordered), *new})[:MAX_NAMED]
    tripped = Breaker(
        service=service,
        tripped_at=now,
        lost=kinds[CountedAs.LOST],
        quarantined=kinds[CountedAs.QUARANTINED],
        over=kinds[CountedAs.OVER],
        machines=tuple(machines),
    )
    return BreakerVerdict(held=len(findings), tripped=tripped)


def _counted(
    findings: Sequence[Finding], quarantined: Sequence[Unexplained], passed: Collection[str]
) -> Iterator[tuple[str, CountedAs]]:
    for finding in findings:
        if not finding.ordered and finding.key not in passed:
            yield finding.key, CountedAs.LOST if isinstance(finding.event, HostMissing) else CountedAs.OVER
    for one in quarantined:
        yield f"{one.uuid}@{one.host_uuid}", CountedAs.QUARANTINED


class RecentFindings:
    """The machines that the reports of each service have counted within the window, in one conductor's memory.

    A service reports a host as soon as it changes: machines that vanish within a minute come in many reports.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._of: dict[str, dict[str, tuple[CountedAs, float]]] = {}  # {service: {machine: (why, when)}}

    def of(self, service: str, now_s: float) -> dict[str, CountedAs]:
        """The machines that count, by their keys. now_s: monotonic seconds."""
        since_s = now_s - self._window_s
        self._of = {
            name: kept
            for name, found in self._of.items()
            if (kept := {key: one for key, one in found.items() if one[1] > since_s})
        }
        return {key: kind for key, (kind, _) in self._of.get(service, {}).items()}

    def add(self, service: str, counted: Mapping[str, CountedAs], now_s: float) -> None:
        """Record what a report has counted."""
        if counted:
            self._of.setdefault(service, {}).update({key: (kind, now_s) for key, kind in counted.items()})

    def clear(self, service: str) -> None:
        """Its breaker has opened: an operator looks at the service, and counting begins anew."""
        self._of.pop(service, None)


class ScanFindings:
    """The findings of the pages of one scan of a service's hosts so far. A scan is assessed as a whole."""

    def __init__(self, key: tuple[int, int, int]) -> None:
        self.key = key
        self.pages = 0
        self.findings: list[Finding] = []
        self.quarantined: list[Unexplained] = []
