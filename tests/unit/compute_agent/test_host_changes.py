"""The hosts of a service that are to be announced, and whose inventory is to be published, after any events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bus.clock import SystemClock
from bus.contracts.cell import RescanHosts
from compute_agent.hosts import pending_reports as host_changes
from compute_agent.hosts.pending_reports import UNDONE_S, PendingHostReports, PendingReport
from tests.kit.virtual_time import on_virtual_time

HOSTS = tuple(f"{number}0000000-0000-4000-8000-000000000001" for number in range(3))
RESCANS = tuple(f"{number}0000000-0000-4000-8000-00000000000a" for number in range(4))
MOST = 3
hosts = st.lists(st.sampled_from(HOSTS), min_size=1, unique=True).map(tuple)
EVERYTHING = None


class Stopped(SystemClock):
    """A clock that a test moves."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class InAnyOrder(RuleBasedStateMachine):
    """The model: what each of the two reports is to have, which rescans are open, and when hosts changed."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Stopped()
        self.changes = PendingHostReports(self.clock)
        self.due: dict[str, set[str] | None] = {"announcements": EVERYTHING, "inventory": EVERYTHING}
        self.changed: dict[str, float] = {}
        self.rescans: dict[str, tuple[str, ...]] = {}

    def wants(self, report: str, found: Sequence[str] | None) -> None:
        due = self.due[report]
        self.due[report] = None if found is None or due is None else due | set(found)

    @rule()
    def request(self) -> None:
        self.changes.on_request()
        self.wants("announcements", EVERYTHING)

    @rule(found=hosts)
    def host_changed(self, found: tuple[str, ...]) -> None:
        self.changes.on_host_changed(found)
        self.wants("announcements", found)
        self.wants("inventory", found)
        self.changed |= dict.fromkeys(found, self.clock.now_s)

    @rule(host=st.sampled_from(HOSTS))
    def failures_changed(self, host: str) -> None:
        self.changes.on_failures_changed(host)
        self.wants("announcements", (host,))

    @rule()
    def reconnected(self) -> None:
        self.changes.on_reconnected()
        self.wants("announcements", EVERYTHING)
        self.wants("inventory", EVERYTHING)

    @rule(seconds=st.sampled_from([UNDONE_S / 2, UNDONE_S]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def repeat(self) -> None:
        self.changes.repeat_changed()
        found = [host for host, at in self.changed.items() if at <= self.clock.now_s - UNDONE_S]
        for host in found:
            del self.changed[host]
        if found:
            self.wants("inventory", found)

    @rule(rescans=st.lists(st.sampled_from(RESCANS), min_size=1, max_size=2, unique=True), found=hosts)
    def rescan(self, rescans: list[str], found: tuple[str, ...]) -> None:
        with patch.object(host_changes, "MAX_RESCANS", MOST):
            self.changes.on_rescan(RescanHosts(service="s", rescans=tuple(rescans), hosts=found))
        if all(self.rescans.get(one) == found for one in rescans):
            return  # repeated
        self.rescans |= dict.fromkeys(rescans, found)
        while len(self.rescans) > MOST:
            del self.rescans[next(iter(self.rescans))]
        self.wants("announcements", found)

    @precondition(lambda self: self.rescans)
    @rule(data=st.data())
    def scan_published(self, data: st.DataObject) -> None:
        named = data.draw(st.sets(st.sampled_from(sorted(self.rescans))))
        self.changes.clear_rescans([*named, "another"])
        for one in named:
            del self.rescans[one]

    @rule(report=st.sampled_from(["announcements", "inventory"]))
    def take(self, report: str) -> None:
        pending: PendingReport = getattr(self.changes, report)
        taken = pending.take()
        assert (None if taken is None else set(taken)) == self.due[report]
        self.due[report] = set()

    @invariant()
    def as_the_model(self) -> None:
        assert self.changes.rescans == tuple(self.rescans)
        assert self.changes._changed == self.changed
        for report, due in self.due.items():
            pending: PendingReport = getattr(self.changes, report)
            assert pending.everything is (due is None)
            assert pending._some.is_set() is (due != set())


TestInAnyOrder = InAnyOrder.TestCase


@pytest.mark.parametrize(("adds", "taken", "waited_s"), [((HOSTS[0],), [HOSTS[0]], 0.0), (None, None, 7.0)])
def test_after_a_time_everything_is_reported(
    adds: tuple[str, ...] | None, taken: list[str] | None, waited_s: float
) -> None:
    @on_virtual_time
    async def test() -> None:
        pending = PendingReport()
        assert pending.take() is None, "a start"
        if adds is not None:
            pending.add(adds)
        began_s = asyncio.get_running_loop().time()
        await pending.wait(7.0)
        assert asyncio.get_running_loop().time() - began_s == waited_s
        assert pending.take() == taken

    test()
