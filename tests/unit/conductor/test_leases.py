"""The failure detector of a cell: who is suspected, and who never is."""

from __future__ import annotations

from cell_conductor.domain.leases import FARTHEST_EPOCH, STEP_S, Lease, LeaseState, LeaseTable

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
