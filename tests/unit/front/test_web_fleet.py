"""How often the pages request what about the fleet. A list of hosts costs the scheduler some 3 microseconds a host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from berth.web.fleet import (
    CHANGES_LOOKED_AT,
    CHANGES_SHOWN,
    COUNTED_AGE_S,
    FAILED_AGE_S,
    FleetReader,
    ProviderView,
)
from bus.clock import SystemClock
from bus.contracts.base import Message
from bus.contracts.build import HostRecord, HostsPage, HostsQuery
from bus.contracts.operations import ServiceRecord, ServicesPage, ServicesQuery
from bus.contracts.placement import Change, ChangesPage, ChangesRequest
from bus.faults import RequestTimeout

UUID = "10000000-0000-4000-8000-000000000001"


class MovedClock(SystemClock):
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Scheduler:
    """A bus that answers, and counts the requests."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.up = True
        self.failing: type[Message] | None = None

    async def request(self, query: Message, _reply: type[Any], **_: Any) -> Message:
        self.requests[type(query).__name__] += 1
        if type(query) is self.failing:
            raise RequestTimeout("no answer")
        if isinstance(query, HostsQuery):
            return HostsPage(hosts=(HostRecord(uuid=UUID, name="h", cell="c", service="s", up=self.up),), more=False)
        assert isinstance(query, ServicesQuery)
        last_seen_s = float(self.requests.total())  # of each answer another
        return ServicesPage(
            services=(ServiceRecord(name="s", cell="c", up=self.up, hosts=1, enabled=1, last_seen_s=last_seen_s),)
        )


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def fleet(scheduler: Scheduler, clock: MovedClock) -> FleetReader:
    return FleetReader(scheduler, clock, ("c",))  # type: ignore[arg-type]


async def test_a_page_that_counts_hosts_reads_them_when_a_count_has_changed(
    fleet: FleetReader, scheduler: Scheduler, clock: MovedClock
) -> None:
    """As the page Now does: each second, here for 65 s."""
    for _ in range(65):
        assert [host.up for host in await fleet.hosts_to_count()] == [True]
        clock.now += 1.0
    assert scheduler.requests == {"ServicesQuery": 22, "HostsQuery": 6}
    scheduler.requests.clear()
    scheduler.up = False
    shown = []
    for _ in range(3):
        clock.now += 1.0
        shown.append((await fleet.hosts_to_count())[0].up)
    assert shown[-1] is False, "a service that is down is not shown in time"
    assert scheduler.requests["HostsQuery"] == 1


async def test_hosts_that_another_page_has_just_read_are_counted_without_a_request(
    fleet: FleetReader, scheduler: Scheduler, clock: MovedClock
) -> None:
    await fleet.hosts()
    clock.now += 1.0
    await fleet.hosts_to_count()
    assert scheduler.requests == {"HostsQuery": 1}


@pytest.mark.parametrize("failing", [HostsQuery, ServicesQuery])
async def test_a_change_is_not_forgotten_when_no_scheduler_answers(
    fleet: FleetReader, scheduler: Scheduler, clock: MovedClock, failing: type[Message]
) -> None:
    await fleet.hosts_to_count()
    scheduler.up, scheduler.failing = False, failing
    clock.now += 3.0
    with pytest.raises(RequestTimeout):
        await fleet.hosts_to_count()
    scheduler.failing = None
    clock.now += FAILED_AGE_S
    assert [host.up for host in await fleet.hosts_to_count()] == [False]


async def test_what_no_count_of_a_service_shows_is_read_now_and_then(
    fleet: FleetReader, scheduler: Scheduler, clock: MovedClock
) -> None:
    await fleet.hosts_to_count()
    clock.now += COUNTED_AGE_S + 1.0
    await fleet.hosts_to_count()
    assert scheduler.requests["HostsQuery"] == 2


async def test_pages_do_not_wait_one_after_the_other_for_schedulers_that_do_not_answer(
    fleet: FleetReader, scheduler: Scheduler, clock: MovedClock
) -> None:
    scheduler.failing = HostsQuery
    with pytest.raises(RequestTimeout):
        await fleet.hosts()
    for page in (fleet.hosts(), fleet.hosts_to_count(), fleet.hosts()):
        with pytest.raises(RequestTimeout):
            await page
    assert scheduler.requests == {"HostsQuery": 1}
    with pytest.raises(RequestTimeout):
        await fleet.hosts(fresh=True)  # an action is decided by what is true now
    scheduler.failing = None
    clock.now += FAILED_AGE_S
    assert await fleet.hosts() and scheduler.requests["HostsQuery"] == 3


class Feed:
    """A bus on which placement answers from a feed that reaches back to a number."""

    def __init__(self, head: int, oldest: int) -> None:
        self.head = head
        self.oldest = oldest

    async def request(self, query: Message, _reply: type[Any], **_: Any) -> Message:
        assert isinstance(query, ChangesRequest)
        if query.after < self.oldest - 1:
            return ChangesPage(head=self.head, too_old=True)
        numbers = range(query.after + 1, min(self.head, query.after + query.limit) + 1)
        changes = tuple(Change(sequence=number, provider=UUID, generation=number) for number in numbers)
        return ChangesPage(changes=changes, head=self.head)


@pytest.mark.parametrize("kept", [0, 100, 1000, CHANGES_LOOKED_AT, 10_000])
async def test_a_hosts_page_shows_the_newest_changes_however_short_the_feed_is(kept: int, clock: MovedClock) -> None:
    """It showed none where the feed keeps fewer than the page looks through."""
    head = 10_000
    view = ProviderView(
        uuid=UUID, name="h", parent_uuid=None, depth=0, generation=1, inventories={}, traits=(), aggregates=()
    )
    feed = Feed(head, oldest=head - kept + 1)
    found = await FleetReader(feed, clock, ("c",)).changes([view])  # type: ignore[arg-type]
    assert [one.sequence for one in found] == [head - back for back in range(min(kept, CHANGES_SHOWN))]
