"""The leases of compute services: a row for each bound and each condition."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cell_conductor.domain import leases
from cell_conductor.domain.leases import FARTHEST_EPOCH, Lease, LeaseState, LeaseTable


class Listened(LeaseTable):
    """A table whose clock has advanced so far."""

    def __init__(self, seconds: float = 100.0, *, missed: int = 3) -> None:
        super().__init__(missed)
        self.tenths = 0
        self.advance_clock(0.0)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """By deliveries that all count whole."""
        for _ in range(round(seconds * 10)):
            self.tenths += 1
            self.advance_clock(self.tenths / 10)


@pytest.mark.parametrize(
    ("deliveries", "known"),
    [
        ([0.0, *(2.0 * n for n in range(1, 8)), 15.0], True),
        ([0.0, *(2.0 * n for n in range(1, 8)), 14.9], False),
        ([1000.0, *(1000.0 + 2.0 * n for n in range(1, 8))], False),
        ([0.0, *(99.0 * n for n in range(1, 8))], False),
        ([0.0, *(99.0 * n for n in range(1, 9))], True),
        ([0.0, *(2.0 * n for n in range(1, 8)), 13.5, 14.4], False),
        ([0.0, *(2.0 * n for n in range(1, 8)), 13.5, 14.5], True),
    ],
    ids=["15 s", "less", "the first", "7 steps of 2 s", "8 steps", "back", "back, and on"],
)
def test_who_is_up_is_known_when_the_clock_has_advanced_far_enough(deliveries: list[float], known: bool) -> None:
    table = LeaseTable(3)
    for at in deliveries:
        table.advance_clock(at)
    assert (table.up is not None) is known


@pytest.mark.parametrize(("interval", "heard", "s"), [(40.0, True, 60.0), (40.0, False, 15.0), (4.0, True, 6.0)])
def test_the_slowest_service_that_was_heard_says_how_long_to_listen(interval: float, heard: bool, s: float) -> None:
    for short, up in ((0.1, None), (0.0, ("a",))):
        table = Listened(s - short)
        if heard:
            table.renew("a", 0, 0, at=1.0, interval_s=interval)
        else:
            table.adopt([Lease(service="a", epoch=0, interval_s=interval)])
        assert table.up == up


def test_the_interval_that_was_stated_last_counts() -> None:
    table = Listened()
    for sequence, (stated, counts) in enumerate([(0.0, 10.0), (0.5, 0.5), (0.0, 0.5), (7.0, 7.0)]):
        table.renew("a", 1, sequence, at=1.0, interval_s=stated)
        assert table.leases["a"].interval_s == counts


@pytest.mark.parametrize(
    ("stops", "seconds", "state", "abandoned"),
    [
        (False, 30.0, LeaseState.UP, False),
        (False, 30.1, LeaseState.SILENT, True),
        (True, 30.0, LeaseState.STOPPED, False),
        (True, 30.1, LeaseState.STOPPED, True),
    ],
)
def test_a_lease_ends_after_so_many_intervals(stops: bool, seconds: float, state: LeaseState, abandoned: bool) -> None:
    table = Listened()
    table.renew("a", 1, 1, at=1.0, stopping=stops)
    table.advance(seconds)
    assert [lease.state for lease in table.assess(9.0)] == [state] * (state is LeaseState.SILENT)
    lease = table.leases["a"]
    assert (lease.state, lease.since) == (state, 9.0 if state is LeaseState.SILENT else 1.0)
    assert lease.code == {LeaseState.UP: "", LeaseState.SILENT: "service.silent"}.get(state, "service.stopped")
    assert (list(table.abandoned), list(table.down)) == (["a"] * abandoned, ["a"] * (state is not LeaseState.UP))
    assert table.up == (("a",) if state is LeaseState.UP else ())


@pytest.mark.parametrize(
    ("state", "listens_s", "at", "gone"),
    [
        (None, 14.0, 50.0, False),
        (None, 15.0, 50.0, True),
        (LeaseState.UP, 99.0, 500.0, False),
        (LeaseState.SILENT, 99.0, 50.0, False),
        (LeaseState.SILENT, 99.0, 62.9, False),
        (LeaseState.SILENT, 99.0, 63.0, True),
        (LeaseState.STOPPED, 99.0, 500.0, True),
        (LeaseState.STOPPED, 20.0, 500.0, False),
    ],
)
def test_a_service_is_gone_for_good(state: LeaseState | None, listens_s: float, at: float, gone: bool) -> None:
    table = Listened(0.0)
    if state is not None:
        table.adopt([Lease(service="a", epoch=1, state=state, since=3.0)])
    table.advance(listens_s)
    assert table.is_gone("a", at, takeover_s=60.0) is gone


DOWN = Lease(service="a", epoch=5, state=LeaseState.SILENT, since=3.0)


@pytest.mark.parametrize(
    ("recorded", "forgotten_at", "adopted"),
    [
        (DOWN, None, True),
        (replace(DOWN, since=0.0), None, True),
        (DOWN, 2.9, True),
        (DOWN, 3.0, False),
        (DOWN, 3.1, False),
        (replace(DOWN, state=LeaseState.UP), 3.1, True),
    ],
)
def test_a_lease_from_before_its_service_was_forgotten_is_not_adopted(
    recorded: Lease, forgotten_at: float | None, adopted: bool
) -> None:
    table = Listened()
    if forgotten_at is not None:
        table.adopt([DOWN])
        table.forget("a", forgotten_at)
        assert len(table) == 0 and table.forgotten == {"a"}
    table.adopt([recorded])
    assert table.leases == ({"a": recorded} if adopted else {})
    assert table.forgotten == (set() if adopted or forgotten_at is None else {"a"})


def test_a_service_that_is_up_is_not_forgotten() -> None:
    table = Listened()
    table.renew("a", 1, 1, at=1.0)
    table.forget("a", 2.0)
    assert table.up == ("a",) and table.forgotten == set()


@pytest.mark.parametrize(("known", "recorded", "sent"), [(5, 4, {}), (5, 5, {}), (5, 6, {"a": 6}), (None, 6, {})])
def test_a_service_below_its_recorded_epoch_is_sent_that_one(
    known: int | None, recorded: int, sent: dict[str, int]
) -> None:
    table = Listened()
    if known is not None:
        table.renew("a", known, 1, at=1.0)
    table.adopt([Lease(service="a", epoch=recorded)])
    assert table.outdated() == sent
    if known is not None:
        table.renew("a", recorded, 2, at=1.0)
        assert table.outdated() == ({"a": 5} if recorded < known else {})


def test_the_highest_epoch_that_a_message_may_name_is_sent() -> None:
    table = Listened()
    for epoch in (FARTHEST_EPOCH, 7, FARTHEST_EPOCH + 1):
        table.note_outdated("a", epoch)
    assert table.outdated() == {"a": FARTHEST_EPOCH}


def test_more_services_than_the_bound_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_SERVICES", 1)
    table = Listened()
    table.adopt([DOWN, replace(DOWN, service="b")])
    assert not table.renew("c", 1, 1, at=1.0)
    assert list(table.leases) == ["a"]
    for service, epoch in (("a", 1), ("b", 1), ("a", 2)):
        table.note_outdated(service, epoch)
    assert table.outdated() == {"a": 2}
    for service, at in (("a", 3.0), ("b", 3.0), ("a", 4.0)):
        table.forget(service, at)
    assert table.forgotten == {"a"}
    table.adopt([replace(DOWN, since=4.0)])
    assert not table.leases


@pytest.mark.parametrize(
    ("epoch", "sequence", "stopping", "changed"),
    [
        (5, 7, False, False),
        (5, 6, False, False),
        (4, 99, False, False),
        (5, 8, False, False),
        (5, 8, True, True),
        (6, 0, False, True),
        (6, 0, True, True),
        (2**63 - 1, 2**63 - 1, False, True),
        (2**63, 0, False, False),
        (6, 2**63, False, False),
        (-1, 9, False, False),
        (6, -1, False, False),
    ],
)
def test_a_message_of_a_service_changes_its_lease(epoch: int, sequence: int, stopping: bool, changed: bool) -> None:
    table = Listened()
    assert table.renew("a", 5, 7, at=1.0, interval_s=4.0)
    before = table.leases["a"]
    assert table.renew("a", epoch, sequence, at=2.0, interval_s=4.0, stopping=stopping) is changed
    state = LeaseState.STOPPED if stopping else LeaseState.UP
    after = table.leases["a"]
    assert (after.epoch, after.since, after.state) == ((epoch, 2.0, state) if changed else (5, 1.0, LeaseState.UP))
    assert changed or after is before


@pytest.mark.parametrize("state", [LeaseState.SILENT, LeaseState.STOPPED])
def test_a_service_that_was_down_on_record_is_up_by_its_next_message(state: LeaseState) -> None:
    table = Listened()
    table.adopt([replace(DOWN, state=state)])
    assert list(table.abandoned) == ["a"] * (state is LeaseState.SILENT)
    assert table.renew("a", 5, 0, at=2.0) is (state is LeaseState.SILENT), "a stopped one's life is over"
    assert table.renew("a", 6, 0, at=2.0) and table.up == ("a",)


@pytest.mark.parametrize(
    ("ring", "seconds", "rings"),
    [("r", 30.0, {"r": ("a",)}), ("r", 30.1, {}), (None, 0.0, {}), ("", 0.0, {})],
)
def test_a_ring_loses_who_missed_three_heartbeats(
    ring: str | None, seconds: float, rings: dict[str, tuple[str, ...]]
) -> None:
    table = Listened(missed=9)
    table.renew("a", 0, 0, at=1.0, ring=ring)
    table.advance(seconds)
    assert table.rings() == rings
    table.adopt([replace(DOWN, service="b")])
    assert table.rings() == rings
    table.adopt([Lease(service="c", epoch=1)])
    assert table.rings() is None
