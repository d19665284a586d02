"""The failure detector of a cell: who is suspected, and who never is."""

from __future__ import annotations

from cell_conductor.domain.leases import FARTHEST_EPOCH, STEP_S, Lease, LeaseState, LeaseTable

MISSED = 5


class Story:
    """A conductor that hears its keeper's digest each second, and services that beat each second unless told."""

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
    story = Story("a", "b")
    assert story.run(MISSED, without="a") == []
    assert story.run(1, without="a") == ["a"]
    lease = story.table.leases["a"]
    assert (lease.state, lease.code, lease.since) == (LeaseState.SILENT, "service.silent", story.now)
    assert "6.0 s" in lease.reason and "every 1 s" in lease.reason
    assert list(story.table.down) == list(story.table.abandoned) == ["a"]
    assert story.run(3, without="a") == [], "said once"


def test_missing_heartbeats_with_one_between_them_mean_nothing() -> None:
    story = Story("a", "b")
    for _ in range(10):
        assert story.run(MISSED, without="a") == []
        story.run(1)


def test_a_heartbeat_ends_the_suspicion_in_the_same_life_and_in_the_next() -> None:
    for epoch in (1, 2):
        story = Story("a")
        story.run(MISSED + 1, without="a")
        story.services["a"] = epoch
        story.run(1)
        assert story.state("a") is LeaseState.UP and not story.table.down


def test_a_service_is_measured_by_its_own_interval() -> None:
    story = Story("a")
    story.table.renew("slow", 1, 1, at=story.now, interval_s=60.0)
    assert story.run(60 * MISSED) == []
    assert story.run(1) == ["slow"]


def test_a_conductor_that_was_paused_or_cut_off_suspects_no_service_for_it() -> None:
    """Nothing was delivered for a minute, to it or by the broker: that says nothing of the services."""
    story = Story("a", "b")
    for _ in range(3):
        story.now += 60.0
        assert story.table.assess(story.now) == []
        assert story.run(1, without="a") == [], f"a pause counts for {STEP_S} s at most"
        story.run(1)


def test_a_cell_that_delivers_nothing_is_not_judged() -> None:
    story = Story("a", "b")
    for _ in range(100):
        story.now += 1.0
        assert story.table.assess(story.now) == []


def test_a_service_that_says_good_bye_takes_no_builds_at_once_and_its_builds_are_waited_for_a_lease() -> None:
    story = Story("a", "b")
    story.sequence += 1
    assert story.beat("a", 1, stopping=True)
    assert story.state("a") is LeaseState.STOPPED and list(story.table.down) == ["a"] and not story.table.abandoned
    story.run(1)
    assert story.state("a") is LeaseState.STOPPED, "a heartbeat that came late, of a life that is over"
    story.run(MISSED, without="a")
    assert list(story.table.abandoned) == ["a"]
    story.services["a"] = 2
    story.run(1)
    assert not story.table.down


def test_what_comes_late_or_twice_renews_nothing() -> None:
    story = Story("a", "b")
    first = story.sequence
    for _ in range(MISSED):
        story.run(1, without="a")
        assert not story.table.renew("a", 1, first, at=story.now, interval_s=1.0)
        assert not story.table.renew("a", 0, first + 99, at=story.now, interval_s=1.0)
    assert story.run(1, without="a") == ["a"]


def test_a_restarted_conductor_gives_a_whole_lease_to_who_was_up_and_believes_who_was_away() -> None:
    story = Story("b")
    story.table.adopt(
        [
            Lease(service="a", epoch=1, interval_s=1.0),
            Lease(service="b", epoch=0, interval_s=1.0, state=LeaseState.SILENT, since=3.0),
            Lease(service="gone", epoch=1, interval_s=1.0, state=LeaseState.SILENT, since=3.0, reason="why"),
            Lease(service="left", epoch=1, interval_s=1.0, state=LeaseState.STOPPED, since=3.0),
        ]
    )
    assert sorted(story.table.down) == ["gone", "left"], "b was heard here, which counts for more"
    assert story.table.leases["gone"].since == 3.0
    assert story.run(MISSED) == [] and story.run(1) == ["a"]
    story.sequence += 1
    assert not story.beat("left", 1) and story.beat("left", 2) and story.beat("gone", 1)
    assert list(story.table.down) == ["a"]


def test_purged_services_are_not_published_and_living_ones_are_not_purged() -> None:
    story = Story("a", "b")
    story.run(MISSED + 1, without="a")
    story.table.forget(["a", "b", "c"])
    assert list(story.table.leases) == ["b"]


def test_numbers_that_no_service_has_and_too_many_names_are_left_out() -> None:
    table = LeaseTable(MISSED)
    table.advance_clock(1.0)
    for epoch, sequence in ((-1, 1), (2**63, 1), (1, -1), (1, 2**70)):
        assert not table.renew("a", epoch, sequence, at=1.0)
    assert len(table) == 0


def test_a_life_whose_epoch_is_lower_than_one_on_record_is_told_which_it_has_to_outgrow() -> None:
    """Seed 1035: a second process had the name, its clock was ahead, and the first one counted for older for good."""
    story = Story("a", "b")
    assert story.table.outdated() == {}
    story.beat("a", 7)
    assert story.run(1) == [] and story.table.outdated() == {"a": 7}, "b is as it was"
    assert story.table.outdated() == {}, "told once"
    story.services["a"] = 8
    story.run(10)
    assert story.state("a") is LeaseState.UP and story.table.outdated() == {}


def test_an_epoch_that_no_message_may_name_is_told_to_none() -> None:
    table = LeaseTable(MISSED)
    table.note_outdated("a", FARTHEST_EPOCH + 1)
    assert table.outdated() == {}


def test_a_ring_has_the_services_that_are_heard_and_loses_one_after_three_heartbeats() -> None:
    story = Story("other")

    def beat(*services: str) -> None:
        for service in services:
            story.table.renew(service, 1, story.sequence, at=story.now, interval_s=1.0, ring="r")

    for _ in range(3):
        story.run(1)
        beat("a", "b")
    assert story.table.rings() == {"r": ("a", "b")}
    for _ in range(3):
        story.run(1)
        beat("b")
        assert story.table.rings() == {"r": ("a", "b")}, "three may be late"
    story.run(1)
    beat("b")
    assert story.table.rings() == {"r": ("b",)} and "a" not in story.table.down, "it may live, and its builds go on"
    beat("a")
    assert story.table.rings() == {"r": ("a", "b")}
    story.table.renew("a", 1, story.sequence + 1, at=story.now, stopping=True, ring="r")
    assert story.table.rings() == {"r": ("b",)}, "at once, when it says so"


def test_no_ring_is_known_before_each_service_on_record_was_heard_or_is_silent() -> None:
    """A conductor that has just started would move the nodes of those it has not heard yet."""
    story = Story("b")
    story.table.adopt([Lease(service="a", epoch=1, interval_s=1.0), Lease(service="b", epoch=1, interval_s=1.0)])
    story.table.renew("b", 1, story.sequence + 1, at=story.now, interval_s=1.0, ring="r")
    assert story.table.rings() is None
    story.table.renew("a", 1, 1, at=story.now, interval_s=1.0, ring="r")
    assert story.table.rings() == {"r": ("a", "b")}
    dead = Story("b")
    dead.table.adopt([Lease(service="a", epoch=1, interval_s=1.0)])
    dead.run(MISSED)
    assert dead.table.rings() is None
    dead.run(1)
    assert dead.table.rings() == {}
