"""A host's report that meets an outage of the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from bus.clock import SystemClock
from bus.contracts.base import Meta
from bus.contracts.cell import ComputeHosts, HostReport, Running
from bus.faults import DatabaseUnavailable
from bus.outcome import Done, Received
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.instance import State
from cell_conductor.engine import Arrival, Engine
from cell_conductor.handlers import HostHandlers
from cell_conductor.store.port import Brief, InstanceStore

VM, HOST = (f"{letter * 8}-0000-4000-8000-000000000000" for letter in "ab")


class Away:
    """A store that is away for the first look, and an engine that keeps what it is given."""

    deployment = "cccccccc-0000-4000-8000-000000000000"

    def __init__(self) -> None:
        self.looks = 0
        self.taken: list[Arrival] = []

    async def briefs(self, hosts: Sequence[str], running: Sequence[str]) -> list[Brief]:
        self.looks += 1
        if self.looks == 1:
            raise DatabaseUnavailable("it restarts")
        return [Brief(VM, State.FAILED, HOST, "s", 1, 0.0)]

    async def take(self, arrivals: Sequence[Arrival], *, source: str) -> None:
        self.taken += arrivals


async def test_a_hosts_report_that_met_an_outage_is_compared_when_it_comes_again() -> None:
    """It was noted as heard before it was compared: the same report, handed in again, was old news."""
    away = Away()
    config = ConductorConfig()
    handlers = HostHandlers(cast(Engine, away), cast(InstanceStore, away), SystemClock(), config)
    running = Running(instance_uuid=VM, attempt=1, deployment=away.deployment)
    host = HostReport(uuid=HOST, name="h", running=(running,))
    said = ComputeHosts(service="s", cell="c", epoch=1, sequence=5, hosts=(host,), seen_at=1.0)
    batch = [Received(message=said, meta=Meta(id="m"), bus="c", queue="q")]
    with pytest.raises(DatabaseUnavailable):
        await handlers.hosts(batch)
    assert await handlers.hosts(batch) == [Done()]
    assert away.looks == 2
    assert [arrival.uuid for arrival in away.taken] == [VM]
    assert await handlers.hosts(batch) == [Done()]
    assert away.looks == 2, "now it is old news"
