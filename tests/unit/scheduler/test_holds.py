"""A choice for a move counts as used until the feed has its claim, and no longer."""

from __future__ import annotations

from msgspec.structs import replace

from scheduler_worker.domain.selector import Holds
from tests.unit.scheduler.hosts import Hosts

EIGHT = {"VCPU": 8}


class Room:
    """Two hosts of 8 VCPU and the holds on them."""

    def __init__(self) -> None:
        self.hosts = Hosts([EIGHT, EIGHT])
        self.book = self.hosts.book
        self.holds = Holds(self.book)
        self._used = [0, 0]

    def hold(self, key: str, host: int, vcpus: int = 1, until: float = 5.0) -> None:
        self.holds.add(key, {self.hosts.uuids[host]: {"VCPU": vcpus}}, until)

    def claimed(self, host: int, vcpus: int) -> None:
        """A change of the feed: so much more is in use there."""
        self._used[host] += vcpus
        states = [
            replace(state, used={"VCPU": used} if used else {}, generation=state.generation + used)
            for state, used in zip(self.hosts.states, self._used, strict=True)
        ]
        self.book.load(states, self.book.sequence + 1)
        self.holds.settle()

    def free(self, host: int) -> int:
        row = self.book.row_of(self.hosts.uuids[host])
        assert row is not None
        return self.book.inventory_of(row)["VCPU"][2]


def test_a_choice_counts_as_used_until_its_claim_is_in_the_feed() -> None:
    room = Room()
    room.hold("a", 0)
    assert room.free(0) == 7
    room.claimed(0, 1)
    assert room.free(0) == 7, "once, not twice"
    assert room.holds.next_until is None


def test_each_claim_ends_the_oldest_hold_that_it_can_be_of() -> None:
    room = Room()
    for number, key in enumerate("abc"):
        room.hold(key, 0, until=float(number))
    room.claimed(0, 2)
    assert room.free(0) == 5 and room.holds.next_until == 2.0
    room.claimed(1, 1)
    assert room.holds.next_until == 2.0, "another host's"
    room.claimed(0, 1)
    assert room.free(0) == 5 and room.holds.next_until is None


def test_a_smaller_claim_is_another_requests() -> None:
    room = Room()
    room.hold("a", 0, vcpus=4)
    room.claimed(0, 2)
    assert room.free(0) == 2


def test_a_hold_ends_at_its_time_and_all_end_when_they_are_released() -> None:
    room = Room()
    room.hold("a", 0, until=1.0)
    room.hold("b", 1, until=2.0)
    room.holds.expire(1.0)
    assert (room.free(0), room.free(1)) == (8, 7)
    room.hold("b", 0, until=3.0)
    assert (room.free(0), room.free(1)) == (7, 8), "one request is held once"
    room.holds.release()
    assert (room.free(0), room.free(1)) == (8, 8) and room.holds.next_until is None


def test_many_holds_of_one_time_end_together() -> None:
    room = Room()
    for number in range(8):
        room.hold(str(number), number % 2, until=1.0)
    room.holds.expire(1.0)
    assert (room.free(0), room.free(1), room.holds.next_until) == (8, 8, None)
