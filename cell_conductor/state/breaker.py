"""What the reports of one compute service may destroy at once: its breaker. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from cell_conductor.state.events import Event, MachineMissing
from cell_conductor.state.unknown_machine import UnknownMachine

# Machines named in the record of a breaker; the others are counted.
MAX_NAMED = 10_000


def key_of(uuid: str, host_uuid: str) -> str:
    """Names a machine in the record of a breaker."""
    return f"{uuid}@{host_uuid}"


class DestructiveDifference(Struct, frozen=True):
    """One event that ends or destroys a machine because of a report and not of a client's request."""

    uuid: str
    event: Event
    # The record has commanded this itself (`report.is_commanded`): the report only repeats it, and is not counted.
    commanded: bool = False

    @property
    def key(self) -> str:
        """Names the machine: its instance, on this host."""
        return key_of(self.uuid, getattr(self.event, "host_uuid", ""))


class CountedAs(StrEnum):
    """Why a machine counts for the breaker."""

    LOST = "lost"
    QUARANTINED = "quarantined"
    OVER = "over"


NONE_COUNTED: Mapping[str, CountedAs] = MappingProxyType({})


class Breaker(Struct, frozen=True, kw_only=True):
    """The record of one service's breaker: too many of its machines were lost, unknown or over within a short time."""

    service: str
    tripped_at: float  # when a report last named more machines than allowed
    lost: int = 0  # machines lost in the reports of the window that opened it and in those since
    quarantined: int = 0  # machines quarantined in those reports
    over: int = 0  # machines that a record proves over, in those reports
    # Keys of those that the newest reports have, without those of the window; after a reset, of those that it still
    # allows.
    machines: tuple[str, ...] = ()
    reset_at: float = 0.0  # when an operator reset it, for these machines and no others (0: not yet)
    reset_by: str = ""  # who reset it ("": it is not reset)

    @property
    def is_open(self) -> bool:
        """Whether it stops destruction."""
        return not self.reset_at

    def after_scan(self, hosts: Collection[str], found: Collection[str]) -> Breaker:
        """As it is after a scan of these hosts. found: the keys of the machines that it found to be lost, over or
        unknown, or that are scanned again. No reset allows the others: one that is found later is counted.
        """
        machines = (key for key in self.machines if key in found or key.rpartition("@")[2] not in hosts)
        return replace(self, machines=tuple(machines))


class BreakerAssessment(Struct, frozen=True):
    """The differences of one report that take effect."""

    effective: tuple[DestructiveDifference, ...] = ()
    blocked: int = 0
    tripped: Breaker | None = None  # the breaker to record, as it opens now, or is open and names too few
    counted: Mapping[str, CountedAs] = {}  # the machines that take effect and count for later reports of the window


def assess(
    service: str,
    differences: Sequence[DestructiveDifference],
    quarantined: Sequence[UnknownMachine],
    breaker: Breaker | None,
    *,
    limit: int,
    now: float,
    recent: Mapping[str, CountedAs] = NONE_COUNTED,
) -> BreakerAssessment:
    """Which differences of one report take effect: all, or none above the limit, as that suggests a wrong database.
    quarantined: machines that were put on record with this report. recent: what earlier reports of the window counted.
    """
    passed: Collection[str] = frozenset(breaker.machines) if breaker is not None else ()
    new = dict(_counted(differences, quarantined, passed))
    if breaker is not None and breaker.is_open:
        before, earlier = breaker, {}
    else:
        before = Breaker(service=service, tripped_at=now)
        earlier = {key: kind for key, kind in recent.items() if key not in new and key not in passed}
    if before is not breaker and (not new or len(new) + len(earlier) <= limit):
        return BreakerAssessment(effective=tuple(differences), counted=new)
    # Findings that were passed before count, too: one reset is for all that is lost, or the next report would need
    # another.
    named = {*before.machines, *(difference.key for difference in differences if not difference.commanded), *new}
    machines = tuple(sorted(named)[:MAX_NAMED])
    if machines == before.machines:
        return BreakerAssessment(blocked=len(differences))
    kinds = Counter([*new.values(), *earlier.values()])
    tripped = replace(
        before,
        tripped_at=now,
        lost=before.lost + kinds[CountedAs.LOST],
        quarantined=before.quarantined + kinds[CountedAs.QUARANTINED],
        over=before.over + kinds[CountedAs.OVER],
        machines=machines,
    )
    return BreakerAssessment(blocked=len(differences), tripped=tripped)


def _counted(
    differences: Sequence[DestructiveDifference], quarantined: Sequence[UnknownMachine], passed: Collection[str]
) -> Iterator[tuple[str, CountedAs]]:
    for difference in differences:
        if not difference.commanded and difference.key not in passed:
            yield difference.key, CountedAs.LOST if isinstance(difference.event, MachineMissing) else CountedAs.OVER
    for one in quarantined:
        yield key_of(one.uuid, one.host_uuid), CountedAs.QUARANTINED


class RecentDifferences:
    """The machines that the reports of each service have counted within the window, in one conductor's memory."""

    # A service reports a host as soon as it changes: machines that vanish within a minute come in many reports.

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
        self._of.setdefault(service, {}).update({key: (kind, now_s) for key, kind in counted.items()})

    def clear(self, service: str) -> None:
        """Its breaker has opened: an operator looks at the service, and counting begins anew."""
        self._of.pop(service, None)
