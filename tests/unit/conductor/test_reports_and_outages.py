"""A host's report that meets an outage of the database."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received
from bus.contracts.base import Meta
from bus.contracts.cell import ComputeHosts
from bus.faults import DatabaseUnavailable
from cell_conductor.domain.report import Newest
from cell_conductor.handlers import HostHandlers


async def test_a_hosts_report_that_met_an_outage_is_compared_when_it_comes_again() -> None:
    """It was noted as received before it was compared: the same report, handed in again, was outdated."""
    looks: list[int] = []

    async def compare(self: HostHandlers, report: ComputeHosts) -> None:
        looks.append(report.sequence)
        if len(looks) == 1:
            raise DatabaseUnavailable("it restarts")

    with patch.object(HostHandlers, "_compare", compare), patch.object(HostHandlers, "__init__", lambda self: None):
        handlers = HostHandlers()  # type: ignore[call-arg]
        handlers._newest, handlers._clock = Newest(), SystemClock()
        page = ComputeHosts(service="s", cell="c", epoch=1, sequence=5, hosts=(), seen_at=1.0)
        batch = [Received(message=page, meta=Meta(id="m"), bus="c", queue="q")]
        with pytest.raises(DatabaseUnavailable):
            await handlers.hosts(batch)
        assert await handlers.hosts(batch) == [Done()]
        assert looks == [5, 5]
        assert await handlers.hosts(batch) == [Done()]
        assert looks == [5, 5], "now it is old news"


async def test_a_report_of_a_lower_epoch_sends_its_service_the_one_it_has_to_outgrow() -> None:
    reported: list[tuple[str, int]] = []

    async def compare(self: HostHandlers, report: ComputeHosts) -> None:
        pass

    with patch.object(HostHandlers, "_compare", compare), patch.object(HostHandlers, "__init__", lambda self: None):
        handlers = HostHandlers()  # type: ignore[call-arg]
        handlers._newest, handlers._clock = Newest(), SystemClock()
        handlers._outdated = lambda service, epoch: reported.append((service, epoch))
        for epoch, sequence in ((9, 5), (9, 5), (9, 4), (3, 6)):
            page = ComputeHosts(service="s", cell="c", epoch=epoch, sequence=sequence, seen_at=1.0)
            await handlers.hosts([Received(message=page, meta=Meta(id="m"), bus="c", queue="q")])
    assert reported == [("s", 9)], "copies of its own life are none of it"
