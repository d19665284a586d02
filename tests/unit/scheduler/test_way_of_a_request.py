"""A boot and a move walk through the files of the scheduler as docs/concepts/architecture.md draws it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from msgspec import Struct

import scheduler_worker
from bus.clock import new_uuid
from bus.consuming.outcome import Done, Received
from bus.contracts.base import Message, Meta
from bus.contracts.cell import CellBuild
from bus.contracts.moves import CellMove, MoveKind, MoveRequest
from bus.contracts.placement import LocatePage, LocateRequest
from bus.faults import Fault
from scheduler_worker.config import SchedulerConfig
from tests.kit.sources import ROOT
from tests.unit.scheduler.hosts import PLENTY, Hosts
from tests.unit.scheduler.test_placing import Cluster
from tests.unit.scheduler.test_without_an_answer import Site

DRAWN = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
HERE = Path(scheduler_worker.__file__).parent
# No rooms: settings, figures, values with the questions that they answer, and what the choice works with.
VALUES = {
    "config.py", "metrics.py", "fleet.py", "domain/builds.py", "domain/explain.py", "domain/fences.py",
    "domain/flavors.py", "domain/fleet.py", "domain/gangs.py", "domain/hosts.py", "domain/placement.py",
    "domain/plugins.py", "domain/ranking.py", "domain/recorded_moves.py", "domain/requests.py", "domain/selector.py",
    "domain/view.py",
}  # fmt: skip


class Walk:
    """The files that are entered, in order, while it is the profiler. A coroutine that goes on enters nothing."""

    def __init__(self) -> None:
        self.stays: list[str] = []
        self._seen: set[FrameType] = set()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(HERE) or code.co_name.startswith("<") or frame in self._seen:
            return
        self._seen.add(frame)
        name = path.relative_to(HERE).as_posix()
        folder = name.partition("/")[0]
        is_value = name in VALUES or folder in {"filters", "weighers"} or isinstance(frame.f_locals.get("self"), Struct)
        room = "store/" if folder == "store" else name
        if not is_value and self.stays[-1:] != [room]:
            self.stays.append(room)

    @contextmanager
    def profiling(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(before)


def drawn(what: str) -> list[str]:
    """The files of the table, in order."""
    table = DRAWN.partition(f"## The way of a {what} through the scheduler\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| `([\w./]+)` \|", table, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert re.search(rf"[Tt]here (?:is|are) {len(rows) - len({file for _, file in rows})}\b", table.replace("\n", " "))
    return [file for _, file in rows]


async def walked(site: Site, asked: Message) -> list[str]:
    walk = Walk()
    with walk.profiling():
        (outcome,) = await site.handler([Received(asked, Meta(id="m"), "api", "scheduler.requests")])
    assert isinstance(outcome, Done)
    return walk.stays


@pytest.fixture
def site() -> Site:
    config = SchedulerConfig()
    return Site(Cluster(Hosts([PLENTY] * 3, config=config), config))


async def test_a_boot_walks_as_it_is_drawn(site: Site) -> None:
    assert await walked(site, site.cluster.hosts.request()) == drawn("boot")
    assert len(site.emitted(CellBuild)) == 1


async def test_a_move_walks_as_it_is_drawn(site: Site) -> None:
    hosts, uuid = site.cluster.hosts, await site.runs()

    async def on_its_host(requests: Sequence[LocateRequest]) -> list[LocatePage | Fault]:
        return [LocatePage(hosts={uuid: (hosts.uuids[0],)}) for _ in requests]

    site.cluster.port.locate = on_its_host  # type: ignore[method-assign]
    move = MoveRequest(request_id=new_uuid(hosts.rng), instance_uuid=uuid, project_id="p", kind=MoveKind.MIGRATE)
    assert await walked(site, move) == drawn("move")
    assert len(site.emitted(CellMove)) == 1
