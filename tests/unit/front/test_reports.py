"""When the judge has heard enough of hosts: not before everybody who must has reported."""

from __future__ import annotations

from berth.gather import Reports
from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.cell import ComputeHosts, HostReport, Running

HOSTS = [f"{n:08x}-0000-4000-8000-000000000000" for n in range(4)]
INSTANCE = "a0000000-0000-4000-8000-000000000000"


def page(sequence: int, *hosts: str, began: int = 0, pages: int = 1, service: str = "s", epoch: int = 1) -> Received:
    running = (Running(instance_uuid=INSTANCE, attempt=sequence),)
    listed = tuple(HostReport(uuid=uuid, name=uuid, running=running) for uuid in hosts)
    message = ComputeHosts(
        service=service, cell="c", epoch=epoch, sequence=sequence, hosts=listed, began=began, pages=pages
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
    await reports.take([page(7, HOSTS[2], began=5, pages=3), page(5, HOSTS[0], began=5, pages=3)])
    await reports.take([page(5, HOSTS[0], began=5, pages=3)])  # twice
    assert not reports.is_whole
    await reports.take([page(6, HOSTS[1], began=5, pages=3)])
    assert reports.is_whole
    assert [(fact.host_uuid, fact.attempt) for fact in reports.facts()] == [
        (HOSTS[2], 7),
        (HOSTS[0], 5),
        (HOSTS[1], 6),
    ]
    await reports.take([page(9, HOSTS[0], began=9, pages=2)])
    await reports.take([page(8, HOSTS[0], began=8)])  # one that began before, and comes late
    assert not reports.is_whole
    assert [fact.attempt for fact in reports.facts() if fact.host_uuid == HOSTS[0]] == [9]
    await reports.take([page(1, HOSTS[0], began=1, epoch=2)])  # the service began anew
    assert reports.is_whole
