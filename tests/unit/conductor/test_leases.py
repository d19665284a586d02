"""The failure detector of a cell, its keeper's messages, and a cell's additions to the stages of a build."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.build import BuildEvent
from bus.contracts.cell import Heartbeat, ServicesDigest
from bus.contracts.stages import Stamps
from cell_conductor.config import ConductorConfig
from cell_conductor.domain import events as e
from cell_conductor.domain.leases import Lease, LeaseState, LeaseTable
from cell_conductor.lease_keeper import MAX_PAGES, PER_PAGE, LeaseKeeper, pages_of
from tests.unit.conductor.scenario import (
    SILENT,
    announced,
    claimed,
    failed,
    host,
    queried,
    run,
    spawned,
)

# --- The failure detector of a cell: who is suspected, and who never is.


MISSED = 5


class LeaseScenario:
    """A conductor that receives its keeper's digest each second, and services that beat each second unless left out."""

    def __init__(self, *services: str) -> None:
        self.table = LeaseTable(MISSED)
        self.services = dict.fromkeys(services, 1)  # the epoch
        self.now = 1000.0
        self.sequence = 0
        self.run(1)

    def run(self, seconds: int, *, without: str = "") -> list[str]:
        silent: list[str] = []
        for _ in range(seconds):
            self.now += 1.0
            self.sequence += 1
            self.table.advance_clock(self.now)  # the digest
            for service, epoch in self.services.items():
                if service not in without.split():
                    self.beat(service, epoch)
            silent += [lease.service for lease in self.table.assess(self.now)]
        return silent

    def beat(self, service: str, epoch: int, *, stopping: bool = False) -> bool:
        self.table.advance_clock(self.now)
        return self.table.renew(service, epoch, self.sequence, at=self.now, interval_s=1.0, stopping=stopping)

    def state(self, service: str) -> LeaseState:
        return self.table.leases[service].state


def test_so_many_missing_heartbeats_in_a_row_make_a_service_silent_with_a_reason() -> None:
    scenario = LeaseScenario("a", "b")
    assert scenario.run(10) == []
    assert scenario.run(MISSED, without="a") == []
    assert scenario.run(1, without="a") == ["a"]
    lease = scenario.table.leases["a"]
    assert (lease.state, lease.code, lease.since) == (LeaseState.SILENT, "service.silent", scenario.now)
    assert "for 6.0 s" in lease.reason and "every 1 s" in lease.reason
    assert list(scenario.table.down) == list(scenario.table.abandoned) == ["a"]
    assert scenario.run(3, without="a") == [], "published once"


def test_what_comes_late_or_twice_renews_nothing() -> None:
    scenario = LeaseScenario("a", "b")
    first = scenario.sequence
    for _ in range(MISSED):
        scenario.run(1, without="a")
        assert not scenario.table.renew("a", 1, first, at=scenario.now, interval_s=1.0)
        assert not scenario.table.renew("a", 0, first + 99, at=scenario.now, interval_s=1.0)
    assert scenario.run(1, without="a") == ["a"]


def test_purged_services_are_not_published_and_living_ones_are_not_purged() -> None:
    scenario = LeaseScenario("a", "b")
    scenario.run(MISSED + 1, without="a")
    scenario.table.remove(["a", "b", "c"])
    assert list(scenario.table.leases) == ["b"]


# --- A keeper's messages must be readable for its listeners.


def test_a_digest_that_names_services_is_read_by_every_receiver() -> None:
    """Its codes were not of the declared form, and each scheduler dropped it."""
    down = {
        name: Lease(service=name, epoch=1, state=state, since=2.0, reason="why")
        for name, state in (("a", LeaseState.SILENT), ("b", LeaseState.STOPPED))
    }
    (page,) = pages_of(down)
    digest = ServicesDigest(cell="c1", term=1, number=1, down=page, up=3, at=4.0)
    parsed = msgspec.json.decode(msgspec.json.encode(digest), type=ServicesDigest)
    assert parsed == digest and [one.code for one in parsed.down] == ["service.silent", "service.stopped"]


def test_a_digest_has_one_page_at_least_and_pages_of_bounded_length() -> None:
    assert pages_of({}) == [()]
    many = {f"s{n:06}": Lease(service=f"s{n:06}", epoch=1, state=LeaseState.STOPPED) for n in range(PER_PAGE + 1)}
    assert [len(page) for page in pages_of(many)] == [PER_PAGE, 1]
    more = {f"s{n:06}": next(iter(many.values())) for n in range(PER_PAGE * MAX_PAGES + 1)}
    assert len(pages_of(more)) == MAX_PAGES


async def test_a_conductor_that_is_not_the_keeper_learns_from_the_digest_who_was_down_before_it_started() -> None:
    """Seed 10005: restarted beside a keeper it did not know the dead service, and took alternates there."""
    nothing: Any = None
    keeper = LeaseKeeper(
        nothing, nothing, clock=SystemClock(), config=ConductorConfig(), cell="c1", process="conductor"
    )

    async def receive(message: ServicesDigest | Heartbeat) -> None:
        await keeper.handle([Received(message, Meta(id="m"), "c1", "conductor.leases")])

    (page,) = pages_of(
        {
            "a": Lease(service="a", epoch=5, state=LeaseState.SILENT, since=2.0, reason="why"),
            "b": Lease(service="b", epoch=5, state=LeaseState.STOPPED, since=2.0, reason="why"),
        }
    )
    await receive(ServicesDigest(cell="c2", term=1, number=1, down=page))
    assert keeper.down() == {}, "another cell's"
    await receive(ServicesDigest(cell="c1", term=1, number=1, down=page))
    assert {name: lease.state for name, lease in keeper.down().items()} == {
        "a": LeaseState.SILENT,
        "b": LeaseState.STOPPED,
    }
    await receive(Heartbeat(service="a", cell="c1", epoch=5, sequence=9))
    assert list(keeper.down()) == ["b"], "its heartbeat shows that it is up"
    await receive(ServicesDigest(cell="c1", term=1, number=2, down=page))
    assert list(keeper.down()) == ["b"], "what arrives here counts for more"


# --- A cell's additions to the stages of a build: when the first host began, and when the last attempt ended.


SO_FAR = Stamps(requested=90.0, queued=91.0, decided=92.0, claimed=93.0)
BEGIN = replace(queried(), stamps=SO_FAR)  # at 100


def ended(*happened: e.Event) -> BuildEvent:
    (event,) = announced(run(BEGIN, *happened))
    assert event.terminal
    return event


@pytest.mark.parametrize(
    ("first", "dispatched"),
    [
        ((replace(failed(), started_at=101.0, ended_at=104.0),), 101.0),
        (SILENT, 100.0),
        ((e.Destroyed(at=105.0, attempt=1, host_uuid=host(1), service="s1"),), 100.0),
    ],
)
def test_failed_attempts_are_in_the_time_of_building(first: tuple[e.Event, ...], dispatched: float) -> None:
    event = ended(*first, claimed(), replace(spawned(2), started_at=205.0, ended_at=206.0))
    assert event.stamps == replace(SO_FAR, dispatched=dispatched, built=206.0)
