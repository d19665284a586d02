"""What placement's handlers say about reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from structlog.testing import capture_logs

from bus.clock import LOG_INTERVAL_S, SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.placement import InventoryResult, InventoryUpdate
from placement_worker.handlers import PlacementHandlers
from tests.unit.placement.test_reports import ROOT, node, update


class HandClock(SystemClock):
    now = 0.0

    def monotonic(self) -> float:
        return self.now


async def test_unknown_traits_are_logged_once_a_minute_however_many_reports_name_them() -> None:
    """A line with each report, for ever, of each node: and each sought the nearest among all traits, some 3 ms."""

    async def report(updates: list[InventoryUpdate], *, bus: str) -> list[InventoryResult]:
        return [InventoryResult(outcome="unchanged", unknown_traits=("HW_NEWER",))] * len(updates)

    clock, store = HandClock(), SimpleNamespace(report=report, reads=cast("Any", _Reads()), names=_Names())
    handlers = PlacementHandlers(cast("Any", store), clock=clock, committed=lambda: None, claimed=lambda: None)
    received = Received(update(node(ROOT)), Meta(id="m"), "c1", "placement.inventory")
    with capture_logs() as lines:
        for clock.now in (0.0, 1.0, LOG_INTERVAL_S):
            await handlers.inventory([received] * 100)
    found = [(line["traits"], line["reports"]) for line in lines if line["event"] == "trait.unknown"]
    assert found == [(("HW_NEWER",), 1), (("HW_NEWER",), 200)]


class _Reads:
    def __getattr__(self, name: str) -> object:
        return None


class _Names:
    trait_ids: dict[str, int] = {}
