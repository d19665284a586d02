"""When enough hosts have reported: not before every service that must has reported."""

from __future__ import annotations

import contextlib
import os

import pytest

from berth.audit import gather
from berth.audit.gather import REPORT_TIMEOUT_S, SILENCE_S, Reports
from berth.audit.invariants import InstanceFact
from berth.settings import CellSettings, Settings
from berth.site import Site
from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.cell import ComputeHosts, HostReport, Running

HOSTS = [f"{n:08x}-0000-4000-8000-000000000000" for n in range(4)]
INSTANCE = "a0000000-0000-4000-8000-000000000000"


def page(
    sequence: int, *hosts: str, first_sequence: int = 0, pages: int = 1, service: str = "s", epoch: int = 1
) -> Received:
    running = (Running(instance_uuid=INSTANCE, attempt=sequence),)
    listed = tuple(HostReport(uuid=uuid, name=uuid, running=running) for uuid in hosts)
    message = ComputeHosts(
        service=service,
        cell="c",
        epoch=epoch,
        sequence=sequence,
        hosts=listed,
        first_sequence=first_sequence,
        pages=pages,
    )
    return Received(message, Meta(id="m", cause="", sent_at=0.0), "c", "q", False)


async def test_hosts_that_must_report_are_waited_for() -> None:
    reports = Reports(SystemClock(), {HOSTS[0], HOSTS[3]})
    await reports.take([page(1, HOSTS[0])])
    assert not reports.is_whole
    await reports.take([page(2, HOSTS[3])])
    assert reports.is_whole


async def test_a_report_that_began_is_waited_for_page_by_page() -> None:
    reports = Reports(SystemClock(), set())
    await reports.take([page(7, HOSTS[2], first_sequence=5, pages=3), page(5, HOSTS[0], first_sequence=5, pages=3)])
    await reports.take([page(5, HOSTS[0], first_sequence=5, pages=3)])  # twice
    assert not reports.is_whole
    await reports.take([page(6, HOSTS[1], first_sequence=5, pages=3)])
    assert reports.is_whole
    assert [(fact.host_uuid, fact.attempt) for fact in reports.facts()] == [
        (HOSTS[2], 7),
        (HOSTS[0], 5),
        (HOSTS[1], 6),
    ]
    await reports.take([page(9, HOSTS[0], first_sequence=9, pages=2)])
    await reports.take([page(8, HOSTS[0], first_sequence=8)])  # one that began before, and comes late
    assert not reports.is_whole
    assert [fact.attempt for fact in reports.facts() if fact.host_uuid == HOSTS[0]] == [9]
    await reports.take([page(1, HOSTS[0], first_sequence=1, epoch=2)])  # the service began anew
    assert reports.is_whole


class MovedClock(SystemClock):
    """A clock that goes on by what is slept."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_hosts_that_do_not_answer_are_waited_for_some_seconds_and_not_a_minute() -> None:
    clock = MovedClock()
    no_service = Reports(clock, {HOSTS[0]})
    await no_service.whole()
    assert clock.now < 2 * SILENCE_S < REPORT_TIMEOUT_S and not no_service.has_whole("s")
    began = clock.now
    some = Reports(clock, {HOSTS[0], HOSTS[1]})
    await some.take([page(1, HOSTS[0], first_sequence=1), page(1, HOSTS[2], first_sequence=1, pages=2, service="t")])
    await some.whole()
    assert clock.now - began < 2 * SILENCE_S
    assert some.has_whole("s") and not some.has_whole("t")


async def test_item_28_a_service_that_no_lease_calls_down_and_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its conductor is dead as well, or its lease has not expired yet."""

    async def down(cells: object) -> dict[tuple[str, str], object]:
        return {}

    async def deployment(database: object) -> str:
        return "d"

    async def cell_report(site: Site, cell: str, missing: set[str], deployment: str | None) -> Reports:
        reports = Reports(SystemClock(), missing, deployment)
        pages = [page(1, HOSTS[0], first_sequence=1), page(1, HOSTS[3], first_sequence=1, pages=2, service="half")]
        await reports.take(pages)
        return reports

    monkeypatch.setattr(gather, "_down", down)
    monkeypatch.setattr(gather, "_deployment", deployment)
    monkeypatch.setattr(gather, "_cell_report", cell_report)
    # The host of "s" that its whole report lacks has lost its machine; its service is there.
    where = {HOSTS[0]: "s", HOSTS[1]: "s", HOSTS[2]: "half"}
    there = [InstanceFact(INSTANCE, "c", "active", host, 1, service) for host, service in where.items()]
    there.append(InstanceFact(INSTANCE, "c", "active", "00000009-0000-4000-8000-000000000000", 1, "silent"))
    running, silent = await gather._running(Site(Settings(cells={"c": CellSettings()})), {"c": None}, there)  # type: ignore[dict-item]
    assert {fact.host_uuid for fact in running} == {HOSTS[0], HOSTS[3]}
    assert {name: (one.service, one.why, one.is_expected) for (_, name), one in silent.items()} == {
        name: (name, f"it did not answer within {SILENCE_S:g} s", False) for name in ("half", "silent")
    }


async def test_checks_of_two_processes_share_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waited for the first, which takes long while a service is silent, and was given up after a minute."""
    names: set[str] = set()

    class Named(Site):
        def bus(self, process: str, name: str = API) -> Bus:
            names.add(process)
            raise LookupError

    for pid in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        with contextlib.suppress(LookupError):
            await gather._cell_report(Named(Settings()), "c", set(), None)
    assert len(names) == 2
