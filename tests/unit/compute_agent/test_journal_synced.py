"""The journal on a disk that loses power, or that may not be written."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received
from bus.contracts.base import Meta
from bus.contracts.cell import ComputeOutcome, ComputeResult, Destroy
from compute_agent.attempts.result_publisher import ResultSender
from compute_agent.driver import DriverFault
from compute_agent.driver_guard import isolate_driver
from compute_agent.driver_plugin import load
from compute_agent.drivers.ironic.config import IronicConfig
from compute_agent.drivers.ironic.driver import IronicDriver
from compute_agent.handlers import ComputeHandlers
from compute_agent.records.journal import NOT_WRITTEN, Journal, JournalUnusable
from compute_agent.records.records import PurgeRow, Records

UUID = "10000000-0000-4000-8000-000000000001"


class Disk:
    """What is synced, by name, and by which thread; it can hold a sync, and fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[str] = []
        self.threads: set[int] = set()
        self.asked, self.let = threading.Event(), threading.Event()
        self.let.set()
        self.fault: OSError | None = None
        monkeypatch.setattr(os, "fsync", self._sync)
        real = os.replace

        def replace(old: Any, new: Any) -> None:
            self.synced.append(f"{Path(old).name} > {Path(new).name}")
            real(old, new)

        monkeypatch.setattr(os, "replace", replace)

    def _sync(self, file: int) -> None:
        self.asked.set()
        self.let.wait()
        self.threads.add(threading.get_ident())
        if self.fault is not None:
            raise self.fault
        self.synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def opened(path: Path, *, synced: bool = True) -> Journal[int]:
    journal = Journal(path, int, synced=synced)
    journal.open()
    return journal


def test_a_new_file_and_a_rewritten_one_are_whole_on_the_disk_and_in_their_directory(
    tmp_path: Path, disk: Disk
) -> None:
    """Fences and `gone` of `driver = "ironic"` are in this file; a power cut takes the last of them."""
    journal = opened(tmp_path / "j")
    assert disk.synced == ["j", tmp_path.name]
    journal.append([1])
    journal.rewrite([1])
    journal.close()
    assert disk.synced[2:] == ["j.new", "j.new > j", tmp_path.name]


def test_what_a_process_that_was_killed_had_not_synced_is_synced_before_it_is_relied_on(
    tmp_path: Path, disk: Disk
) -> None:
    killed = opened(tmp_path / "j")
    killed.append([1])
    killed.close()
    disk.synced.clear()
    opened(tmp_path / "j").close()
    assert disk.synced == ["j", tmp_path.name]


async def test_one_sync_is_for_all_that_wait_and_for_none_that_come_later(tmp_path: Path, disk: Disk) -> None:
    journal = opened(tmp_path / "j")
    disk.synced.clear()
    await journal.sync()
    assert not disk.synced, "nothing is new"
    disk.asked.clear()
    disk.threads.clear()
    disk.let.clear()
    journal.append([1])
    first = asyncio.ensure_future(journal.sync())
    await asyncio.to_thread(disk.asked.wait)
    journal.append([2, 3])
    later = [asyncio.ensure_future(journal.sync()) for _ in range(50)]
    disk.let.set()
    await asyncio.gather(first, *later)
    assert disk.synced == ["j", "j"]
    assert threading.get_ident() not in disk.threads
    journal.close()
    await journal.sync()


async def test_a_simulated_fleet_goes_without(tmp_path: Path, disk: Disk) -> None:
    journal = opened(tmp_path / "j", synced=False)
    journal.append([1])
    await journal.sync()
    journal.rewrite([1])
    journal.close()
    assert disk.synced == ["j.new > j"]


@pytest.mark.parametrize(("driver", "synced"), [("ironic", True), ("simulated", False)])
async def test_the_driver_determines_it(tmp_path: Path, disk: Disk, driver: str, synced: bool) -> None:
    records = Records.of_service(str(tmp_path), "c1", "s", synced=load(driver).synced)
    records.open()
    records.write([PurgeRow("h", "i")])
    await records.sync()
    records.close()
    assert ("c1.s.records" in disk.synced) is synced


async def test_a_journal_that_could_not_be_synced_is_never_synced_again(tmp_path: Path, disk: Disk) -> None:
    """Linux drops what it could not write: the next fsync succeeds, and the rows are not on the disk."""
    journal = opened(tmp_path / "j")
    journal.append([1])
    disk.fault = OSError(5, "Input/output error")
    for _ in range(2):
        with pytest.raises(JournalUnusable) as unusable:
            await journal.sync()
        assert unusable.value.code == NOT_WRITTEN
        disk.fault = None
    journal.close()


async def test_a_node_is_not_undeployed_whose_mark_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver's faults do not end the service: the destruction is tried again, when memory has the mark already."""
    records = Records(tmp_path / "j")
    records.open()
    asked: list[str] = []
    tag = {"database_id": UUID, "cell": "c", "service": "s", "instance": UUID, "attempt": 1}
    node = {"uuid": UUID, "provision_state": "active", "instance_uuid": UUID, "instance_info": {"berth": tag}}

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        return httpx.Response(200, json=node)

    config, transport = IronicConfig(clean_timeout_s=0.05, poll_interval_s=0.01), httpx.MockTransport(answer)
    ironic = IronicDriver(config, cell="c", service="s", clock=SystemClock(), records=records, transport=transport)
    await ironic.open()
    with monkeypatch.context() as full:
        full.setattr(Journal, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(DriverFault):
            await isolate_driver(ironic).destroy(UUID, UUID, 1, UUID)
    for _ in range(2):
        with pytest.raises(DriverFault):
            await isolate_driver(ironic).destroy(UUID, UUID, 1, UUID)
    await ironic.close()
    records.close()
    assert set(asked) == {"GET"}


def rewrite(path: Path) -> None:
    journal = opened(path)
    try:
        journal.rewrite([1])
    finally:
        journal.close()


@pytest.mark.parametrize("refused", [".new", ".lock", "j", "directory"])
@pytest.mark.parametrize("call", [opened, rewrite])
def test_a_journal_that_cannot_be_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, call: Callable[[Path], object]
) -> None:
    """A directory that has become read-only: a raw OSError left `rewrite`, which promises JournalUnusable."""
    if (call, refused) == (opened, ".new"):
        return
    real = os.open

    def refuse(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(tmp_path.name if refused == "directory" else refused):
            raise OSError(30, "Read-only file system")
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(JournalUnusable) as unusable:
        call(tmp_path / "j")
    assert unusable.value.code == NOT_WRITTEN


# --- what relies on it


class Story:
    """What happened, in order."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    async def sync(self) -> None:
        self.steps.append("sync")

    def handle(self, commands: list[Any]) -> None:
        self.steps.append(f"take {len(commands)}")

    async def publish_all(self, messages: Any, traceparents: Any = ()) -> None:
        self.steps.append(f"publish {len(messages)}")

    async def wait_for_capacity(self) -> None:
        """There is some."""


async def test_a_command_is_acknowledged_and_a_result_published_when_its_record_is_on_the_disk() -> None:
    story, nothing = Story(), None
    handlers = ComputeHandlers(
        story, service="s", wait_for_capacity=story.wait_for_capacity, on_report_requested=nothing,
        on_heartbeat=nothing, superseded=nothing,
        on_barrier=nothing, pending_destroys=nothing, reserve=nothing, on_rescan=nothing, look_up=nothing,
        list_machines=nothing,
        sync=story.sync, may_predate_restore=lambda _: False,
    )  # type: ignore[arg-type]  # fmt: skip
    command = Destroy(service="s", instance_uuid=UUID, attempt=1, host_uuid=UUID, database_id=UUID)
    outcomes = await handlers.commands([Received(command, Meta(id="m"), "c", "compute.s")] * 2)
    assert [type(one) for one in outcomes] == [Done, Done]
    sender = ResultSender(
        story, clock=SystemClock(), rng=random.Random(1), on_reported=lambda _: None, sync=story.sync, service="s"
    )
    result = ComputeResult(instance_uuid=UUID, attempt=1, host_uuid=UUID, service="s", outcome=ComputeOutcome.DESTROYED)
    sender.send(result)
    assert await sender.flush(10.0)
    assert story.steps == ["take 2", "sync", "sync", "publish 1"]
