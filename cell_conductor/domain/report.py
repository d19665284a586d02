"""Compare what a compute service says its hosts run with what is on record for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct

from bus.contracts.cell import UNKNOWN_ATTEMPT, ComputeHosts

from .events import Event, HostMissing, HostRuns
from .instance import Look, State


class Recorded(Protocol):
    """As much of an instance as the comparison reads."""

    @property
    def uuid(self) -> str:
        """Its uuid."""

    @property
    def state(self) -> State:
        """Where it stands."""

    @property
    def host_uuid(self) -> str | None:
        """The current attempt's host."""

    @property
    def attempt(self) -> int:
        """The current attempt."""

    @property
    def service(self) -> str:
        """The compute service that was last known to manage that host."""

    @property
    def since(self) -> float:
        """When its state was entered."""


class Unknown(Struct, frozen=True):
    """Something runs that no record knows."""

    uuid: str
    attempt: int
    host_uuid: str


class Differences(Struct, frozen=True):
    """What does not agree: events for instances, and what no record knows (among the events too, if destroyed)."""

    events: tuple[tuple[str, Event], ...] = ()
    unknown: tuple[Unknown, ...] = ()


# While an instance stands so, its host running its current attempt is as it should be.
AT_HOME = frozenset({State.ACTIVE, State.DELETING})


def differences(
    report: ComputeHosts,
    recorded: Iterable[Recorded],
    *,
    now: float,
    seen_at: float,
    grace_s: float,
    destroy_unknown: bool,
) -> Differences:
    """What a report and the record disagree about. The state machine decides what to do; most reports agree.

    Unlocked reading: the record may move on meanwhile, so every event is judged again by the machine.
    """
    by_uuid = {record.uuid: record for record in recorded}
    said = {host.uuid: host.running for host in report.hosts if host.running is not None}
    events: list[tuple[str, Event]] = []
    unknown: list[Unknown] = []
    for host_uuid, running in said.items():
        for one in running:
            record = by_uuid.get(one.instance_uuid)
            if record is None:
                unknown.append(Unknown(one.instance_uuid, one.attempt, host_uuid))
                if not destroy_unknown:
                    continue
            elif _agrees(record, host_uuid, one.attempt, report.service):
                continue
            events.append((one.instance_uuid, _runs(report, one.attempt, host_uuid, now, seen_at)))
    listed = {(host_uuid, one.instance_uuid) for host_uuid, running in said.items() for one in running}
    for record in by_uuid.values():
        if record.host_uuid is None or record.host_uuid not in said or record.state not in AT_HOME:
            continue
        # Of its own service's times the machine knows which was first; another's clock may be minutes off.
        counts = seen_at > 0 if record.service == report.service else seen_at > record.since + grace_s
        if (record.host_uuid, record.uuid) not in listed and counts:
            gone = HostMissing(
                at=now, host_uuid=record.host_uuid, seen_at=seen_at, service=report.service, look=_look(report)
            )
            events.append((record.uuid, gone))
    return Differences(tuple(events), tuple(unknown))


def _agrees(record: Recorded, host_uuid: str, attempt: int, service: str) -> bool:
    at_home = record.state in AT_HOME and record.host_uuid == host_uuid and record.service == service
    return at_home and attempt in (record.attempt, UNKNOWN_ATTEMPT)


def _runs(report: ComputeHosts, attempt: int, host_uuid: str, now: float, seen_at: float) -> HostRuns:
    look = _look(report)
    return HostRuns(at=now, attempt=attempt, host_uuid=host_uuid, service=report.service, seen_at=seen_at, look=look)


def _look(report: ComputeHosts) -> Look | None:
    return Look(report.epoch, report.look) if report.look else None


# So many compute services are remembered at most; the one heard of longest ago is forgotten first.
MAX_SERVICES = 100_000


class Newest:
    """Which report of each compute service is the newest handled: older ones lose (they come late, or twice)."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[int, int]] = {}

    def is_news(self, report: ComputeHosts) -> bool:
        """Whether it is newer than every report of its service that was handled."""
        last = self._heard.get(report.service)
        return last is None or (report.epoch, report.sequence) > last

    def note(self, report: ComputeHosts) -> None:
        """The report has been handled. Not before: one that met an outage comes again, and is still news then."""
        at = (report.epoch, report.sequence)
        self._heard[report.service] = max(at, self._heard.pop(report.service, at))
        if len(self._heard) > MAX_SERVICES:
            del self._heard[next(iter(self._heard))]
