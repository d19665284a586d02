"""Builds that wait for what manages their hosts, as compute services report them. Pure: times come in."""

from __future__ import annotations

from msgspec import Struct

from bus.contracts.build import BuildRecord, BuildState, TimelineEntry
from bus.contracts.waiting_builds import BuildsWaiting, WaitingBuild

MAX_SERVICES = 10_000  # services with waiting builds; a bus that invents more is ignored
WAITING = "waiting"  # in a timeline


class ReportedWaits(Struct, frozen=True):
    """The report of one service, by instance, and until when it holds (monotonic, seconds)."""

    waiting: dict[str, WaitingBuild]
    until_s: float


class WaitingTable:
    """The waiting builds by cell and service."""

    def __init__(self) -> None:
        self._reported: dict[tuple[str, str], ReportedWaits] = {}

    def apply(self, message: BuildsWaiting, now_s: float) -> None:
        """Take one report in: it replaces the service's last one."""
        key = message.cell, message.service
        self._reported.pop(key, None)
        for old in [one for one, kept in self._reported.items() if kept.until_s <= now_s]:
            del self._reported[old]
        if message.waiting and len(self._reported) < MAX_SERVICES:
            waiting = {one.instance_uuid: one for one in message.waiting}
            self._reported[key] = ReportedWaits(waiting, now_s + message.lasts_s)

    def line_of(self, build: BuildRecord, now_s: float) -> TimelineEntry | None:
        """The last line of the timeline of a build under way: what it waits for; None: nothing is known.

        A cell reports its own builds only, and an attempt that has ended waits no more.
        """
        if build.state != BuildState.BUILDING:
            return None
        for (cell, service), reported in self._reported.items():
            found = reported.waiting.get(build.instance_uuid)
            if cell != build.cell or found is None or reported.until_s <= now_s:
                continue
            if any(one.attempt >= found.attempt and one.outcome for one in build.history):
                continue
            return TimelineEntry(at=found.since, actor=f"compute {service}", what=WAITING, detail=found.reason)
        return None
