"""The failure detector of a cell, its keeper's messages, and a cell's additions to the stages of a build."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import Heartbeat, ServicesDigest
from bus.contracts.queues import EVENTS, QUEUES
from bus.contracts.stages import Stamps
from cell_conductor.config import ConductorConfig
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import State
from cell_conductor.domain.leases import FARTHEST_EPOCH, STEP_S, Lease, LeaseState, LeaseTable
from cell_conductor.lease_keeper import MAX_PAGES, PER_PAGE, LeaseKeeper, pages_of
from tests.unit.conductor.scenario import (
    DELETE,
    RELEASED,
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


def test_missing_heartbeats_with_one_between_them_mean_nothing() -> None:
    scenario = LeaseScenario("a", "b")
    for _ in range(10):
        assert scenario.run(MISSED, without="a") == []
        scenario.run(1)


def test_a_heartbeat_ends_the_suspicion_in_the_same_life_and_in_the_next() -> None:
    for epoch in (1, 2):
        scenario = LeaseScenario("a")
        scenario.run(MISSED + 1, without="a")
        scenario.services["a"] = epoch
        scenario.run(1)
        assert scenario.state("a") is LeaseState.UP and not scenario.table.down


def test_a_service_is_measured_by_its_own_interval() -> None:
    scenario = LeaseScenario("a")
    scenario.table.renew("slow", 1, 1, at=scenario.now, interval_s=60.0)
    assert scenario.run(60 * MISSED) == []
    assert scenario.run(1) == ["slow"]


def test_a_conductor_that_was_paused_or_cut_off_suspects_no_service_for_it() -> None:
    """Nothing was delivered for a minute, to it or by the broker: that proves nothing of the services."""
    scenario = LeaseScenario("a", "b")
    for _ in range(3):
        scenario.now += 60.0
        assert scenario.table.assess(scenario.now) == []
        assert scenario.run(1, without="a") == [], f"a pause counts for {STEP_S} s at most"
        scenario.run(1)


def test_a_cell_that_delivers_nothing_is_not_judged() -> None:
    scenario = LeaseScenario("a", "b")
    for _ in range(100):
        scenario.now += 1.0
        assert scenario.table.assess(scenario.now) == []


def test_a_service_that_announces_its_stop_takes_no_builds_at_once_and_its_builds_are_waited_for_a_lease() -> None:
    scenario = LeaseScenario("a", "b")
    scenario.sequence += 1
    assert scenario.beat("a", 1, stopping=True)
    assert (
        scenario.state("a") is LeaseState.STOPPED
        and list(scenario.table.down) == ["a"]
        and not scenario.table.abandoned
    )
    scenario.run(1)
    assert scenario.state("a") is LeaseState.STOPPED, "a heartbeat that came late, of a life that is over"
    scenario.run(MISSED, without="a")
    assert list(scenario.table.abandoned) == ["a"]
    scenario.services["a"] = 2
    scenario.run(1)
    assert not scenario.table.down


def test_what_comes_late_or_twice_renews_nothing() -> None:
    scenario = LeaseScenario("a", "b")
    first = scenario.sequence
    for _ in range(MISSED):
        scenario.run(1, without="a")
        assert not scenario.table.renew("a", 1, first, at=scenario.now, interval_s=1.0)
        assert not scenario.table.renew("a", 0, first + 99, at=scenario.now, interval_s=1.0)
    assert scenario.run(1, without="a") == ["a"]


def test_a_restarted_conductor_gives_a_whole_lease_to_who_was_up_and_keeps_who_was_down() -> None:
    scenario = LeaseScenario("b")
    scenario.table.adopt(
        [
            Lease(service="a", epoch=1, interval_s=1.0),
            Lease(service="b", epoch=0, interval_s=1.0, state=LeaseState.SILENT, since=3.0),
            Lease(service="gone", epoch=1, interval_s=1.0, state=LeaseState.SILENT, since=3.0, reason="why"),
            Lease(service="left", epoch=1, interval_s=1.0, state=LeaseState.STOPPED, since=3.0),
        ]
    )
    assert sorted(scenario.table.down) == ["gone", "left"], "b's heartbeat arrived here, which counts for more"
    assert scenario.table.leases["gone"].since == 3.0
    assert scenario.run(MISSED) == [] and scenario.run(1) == ["a"]
    scenario.sequence += 1
    assert not scenario.beat("left", 1) and scenario.beat("left", 2) and scenario.beat("gone", 1)
    assert list(scenario.table.down) == ["a"]


def test_purged_services_are_not_published_and_living_ones_are_not_purged() -> None:
    scenario = LeaseScenario("a", "b")
    scenario.run(MISSED + 1, without="a")
    scenario.table.remove(["a", "b", "c"])
    assert list(scenario.table.leases) == ["b"]


def test_numbers_that_no_service_has_and_too_many_names_are_left_out() -> None:
    table = LeaseTable(MISSED)
    table.advance_clock(1.0)
    for epoch, sequence in ((-1, 1), (2**63, 1), (1, -1), (1, 2**70)):
        assert not table.renew("a", epoch, sequence, at=1.0)
    assert len(table) == 0


def test_a_life_whose_epoch_is_lower_than_one_on_record_is_sent_the_one_it_has_to_outgrow() -> None:
    """Seed 1035: a second process had the name, its clock was ahead, and the first one counted for older for good."""
    scenario = LeaseScenario("a", "b")
    assert scenario.table.outdated() == {}
    scenario.beat("a", 7)
    assert scenario.run(1) == [] and scenario.table.outdated() == {"a": 7}, "b is as it was"
    assert scenario.table.outdated() == {}, "sent once"
    scenario.services["a"] = 8
    scenario.run(10)
    assert scenario.state("a") is LeaseState.UP and scenario.table.outdated() == {}


def test_a_service_that_is_received_before_its_higher_epoch_on_record_is_read_is_sent_that_one() -> None:
    """Seed 1795360430: all conductors were restarted while a service with a slower clock came back under its name."""
    table = LeaseTable(MISSED)
    table.renew("a", 5, 1, at=0.0, interval_s=1.0)
    table.renew("b", 7, 1, at=0.0, interval_s=1.0)
    table.adopt([Lease(service=name, epoch=7, interval_s=1.0) for name in ("a", "b")])
    assert table.outdated() == {"a": 7}
    assert {name: lease.epoch for name, lease in table.leases.items()} == {"a": 5, "b": 7}


def test_an_epoch_that_no_message_may_name_is_sent_to_none() -> None:
    table = LeaseTable(MISSED)
    table.note_outdated("a", FARTHEST_EPOCH + 1)
    assert table.outdated() == {}


def test_a_ring_has_the_services_that_send_heartbeats_and_loses_one_after_three_heartbeats() -> None:
    scenario = LeaseScenario("other")

    def beat(*services: str) -> None:
        for service in services:
            scenario.table.renew(service, 1, scenario.sequence, at=scenario.now, interval_s=1.0, ring="r")

    for _ in range(3):
        scenario.run(1)
        beat("a", "b")
    assert scenario.table.rings() == {"r": ("a", "b")}
    for _ in range(3):
        scenario.run(1)
        beat("b")
        assert scenario.table.rings() == {"r": ("a", "b")}, "three may be late"
    scenario.run(1)
    beat("b")
    assert scenario.table.rings() == {"r": ("b",)} and "a" not in scenario.table.down, (
        "it may live, and its builds go on"
    )
    beat("a")
    assert scenario.table.rings() == {"r": ("a", "b")}
    scenario.table.renew("a", 1, scenario.sequence + 1, at=scenario.now, stopping=True, ring="r")
    assert scenario.table.rings() == {"r": ("b",)}, "at once, when it announces its stop"


def test_no_ring_is_known_before_each_service_on_record_sent_a_heartbeat_or_is_silent() -> None:
    """A conductor that has just started would move the nodes of those whose heartbeats have not arrived yet."""
    scenario = LeaseScenario("b")
    scenario.table.adopt([Lease(service="a", epoch=1, interval_s=1.0), Lease(service="b", epoch=1, interval_s=1.0)])
    scenario.table.renew("b", 1, scenario.sequence + 1, at=scenario.now, interval_s=1.0, ring="r")
    assert scenario.table.rings() is None
    scenario.table.renew("a", 1, 1, at=scenario.now, interval_s=1.0, ring="r")
    assert scenario.table.rings() == {"r": ("a", "b")}
    dead = LeaseScenario("b")
    dead.table.adopt([Lease(service="a", epoch=1, interval_s=1.0)])
    dead.run(MISSED)
    assert dead.table.rings() is None
    dead.run(1)
    assert dead.table.rings() == {}


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


def test_item_27_no_queue_of_a_scheduler_gets_the_heartbeats_of_compute_services() -> None:
    """A million compute services would be a million messages a second to each scheduler."""
    readers = {row.consumer for row in QUEUES for _, key in row.bindings if key.startswith("compute.heartbeat")}
    assert readers == {"cell_conductor", "compute_sim"}, "and a compute service gets those of its own name"
    wide = {row.name for row in QUEUES for exchange, key in row.bindings if exchange == EVENTS and key == "#"}
    assert not [row.name for row in QUEUES if row.name in wide and row.consumer == "scheduler_worker"]


# --- A cell's additions to the stages of a build: when the first host began, and when the last attempt ended.


SO_FAR = Stamps(requested=90.0, queued=91.0, decided=92.0, claimed=93.0)
BEGIN = replace(queried(), stamps=SO_FAR)  # at 100


def ended(*happened: e.Event) -> BuildEvent:
    (event,) = announced(run(BEGIN, *happened))
    assert event.terminal
    return event


def test_a_host_reports_when_it_began_and_ended() -> None:
    event = ended(replace(spawned(), started_at=102.0, ended_at=109.0))
    assert event.stamps == replace(SO_FAR, dispatched=102.0, built=109.0)


def test_a_host_without_times_began_when_commanded_and_ended_when_reported() -> None:
    assert ended(spawned()).stamps == replace(SO_FAR, dispatched=100.0, built=110.0)
    seen = e.HostRuns(at=140.0, attempt=1, host_uuid=host(1), service="s1")
    assert ended(seen).stamps == replace(SO_FAR, dispatched=100.0, built=140.0)


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


def test_the_end_of_a_failure_has_them_as_well_and_a_delete_does_not() -> None:
    event = ended(replace(failed(final=True), started_at=101.0, ended_at=104.0), RELEASED)
    assert (event.state, event.stamps) == (BuildState.FAILED, replace(SO_FAR, dispatched=101.0, built=104.0))
    gone = e.Destroyed(at=150.0, attempt=1, host_uuid=host(1), service="s1")
    assert ended(DELETE, gone, RELEASED).stamps is None


def test_what_was_published_is_not_kept() -> None:
    active = run(BEGIN, spawned()).instance
    assert (active.state, active.stamps) == (State.ACTIVE, None)
    assert run(BEGIN).instance.stamps == SO_FAR
    assert run(queried(), spawned()).instance.stamps is None, "an older scheduler sends none"
