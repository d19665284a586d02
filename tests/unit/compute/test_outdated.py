"""A compute service that receives a later number under its own name than any of its own (seeds 1035 and 27)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Message, Meta
from bus.contracts.cell import Heartbeat, ReportHosts, ServiceOutdated
from bus.contracts.placement import InventoryOutdated
from compute_sim.handlers import ComputeHandlers
from compute_sim.host_changes import HostChanges
from compute_sim.name import NameTaken, ServiceName
from compute_sim.records import FARTHEST, Records
from compute_sim.reporter import Reporter

ROOT = "10000000-0000-4000-8000-000000000001"


class Rig:
    """A service's records, its reporter, its name and its handlers; nothing is published."""

    def __init__(self, path: Path | None = None) -> None:
        self.clock = SystemClock()
        self.records = Records(path)
        self.records.open()
        self.records.start(1000.0)
        nothing: Any = None
        self.changes = HostChanges(self.clock)
        self.reporter = Reporter(
            nothing, service="s", cell="c", survey=nothing, records=self.records, changes=self.changes,
            offering=nothing, clock=self.clock, rng=random.Random(1), heartbeat_interval_s=1.0, report_interval_s=60.0,
        )  # fmt: skip
        self.name = ServiceName(nothing, service="s", cell="c", records=self.records, clock=self.clock, wait_s=0.0)
        self.handlers = ComputeHandlers(
            nothing, service="s", wait_for_capacity=nothing, on_report_requested=self.changes.on_request,
            on_heartbeat=self.name.on_heartbeat,
            outdated=self.reporter.outdated, on_marker=nothing, reserve=nothing, on_rescan=self.changes.on_rescan,
            find=nothing,
        )  # fmt: skip
        self.changes.announcements.take()
        self.changes.inventory.take()

    async def receive(self, *messages: Message) -> None:
        batch: Sequence[Received] = [Received(one, Meta(id="m"), "c", "compute.control.s") for one in messages]
        await self.handlers.control(batch)

    @property
    def announces_all(self) -> tuple[bool, bool]:
        """Whether all hosts are to be announced, and all inventory published."""
        return self.changes.announcements.everything, self.changes.inventory.everything


async def test_it_goes_on_above_an_epoch_of_its_name_and_publishes_everything_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "journal")
    assert rig.records.epoch == 1_000_000
    await rig.receive(ServiceOutdated(service="s", cell="c", epoch=5_000_000))
    assert rig.records.epoch == 5_000_001
    assert rig.announces_all == (True, True)
    rig.records.close()
    again = Records(tmp_path / "journal")
    again.open()
    assert again.start(1000.0) == 5_000_002, "and so does its next life"


async def test_it_goes_on_above_a_version_that_the_book_has_of_it() -> None:
    rig = Rig()
    known = rig.records.versions(1, 2000.0) + 10**9
    await rig.receive(InventoryOutdated(source="compute-s", root_uuid=ROOT, version=known))
    assert rig.records.versions(1, 1000.0) > known
    assert rig.announces_all == (True, True)


@pytest.mark.parametrize(
    "message",
    [
        ServiceOutdated(service="s", cell="c", epoch=1_000_000),
        ServiceOutdated(service="s", cell="c", epoch=999),
        ServiceOutdated(service="another", cell="c", epoch=5_000_000),
        InventoryOutdated(source="compute-s", root_uuid=ROOT, version=1),
        InventoryOutdated(source="compute-another", root_uuid=ROOT, version=2**61),
        InventoryOutdated(source="compute-s", root_uuid=ROOT, version=FARTHEST + 1),
        ServiceOutdated(service="s", cell="c", epoch=FARTHEST + 1),
    ],
)
async def test_a_late_copy_anothers_word_and_what_leaves_no_room_change_nothing(message: Message) -> None:
    rig = Rig()
    rig.records.versions(1, 2000.0)
    before = (rig.records.epoch, rig.records.version)
    await rig.receive(message)
    assert (rig.records.epoch, rig.records.version) == before
    assert rig.announces_all == (False, False)
    await rig.receive(ReportHosts(why="test"))
    assert rig.announces_all == (True, False)


async def test_its_own_heartbeats_from_before_are_not_anothers() -> None:
    rig = Rig()
    await rig.receive(ServiceOutdated(service="s", cell="c", epoch=5_000_000))
    for sequence in (1, 2, 3):
        await rig.receive(Heartbeat(service="s", cell="c", epoch=1_000_000, sequence=sequence))
    await rig.receive(Heartbeat(service="s", cell="c", epoch=4_000_000, sequence=1))
    with pytest.raises(NameTaken):
        await rig.receive(Heartbeat(service="s", cell="c", epoch=4_000_000, sequence=2))
