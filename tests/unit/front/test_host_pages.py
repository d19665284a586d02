"""Lists of hosts are read a page at a time, whichever releases the schedulers are of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from berth.client import BuildClient, host_pages
from berth.client.host_pages import json_of, read_hosts
from berth.web.api import WebApi
from berth.web.fleet import FleetReader
from bus.clock import SystemClock
from bus.contracts.base import Message
from bus.contracts.build import HostRecord, HostsPage, HostsQuery
from bus.faults import RequestRefused

HOSTS = tuple(
    HostRecord(uuid=f"{at:08x}-0000-4000-8000-000000000000", name=f"h{at // 2}", cell="c", service="s", up=True)
    for at in range(7)
)


class Schedulers:
    """A bus on which these schedulers answer in turn: True is one of the release before pages.

    hosts: what each of them knows, in turn.
    """

    def __init__(self, are_old: Sequence[bool] = (False,), hosts: Sequence[Sequence[HostRecord]] = (HOSTS,)) -> None:
        self.are_old = are_old
        self.hosts = hosts
        self.queries: list[HostsQuery] = []

    async def request(self, query: Message, _reply: type[Any], **_: Any) -> HostsPage:
        assert isinstance(query, HostsQuery)
        is_old = self.are_old[len(self.queries) % len(self.are_old)]
        known = self.hosts[len(self.queries) % len(self.hosts)]
        self.queries.append(query)
        if is_old and query.by_uuid:
            raise RequestRefused("unknown field `by_uuid`", code="message.invalid")
        found = [host for host in known if host.uuid > (query.after_uuid or "")]
        found.sort(key=lambda host: ("" if query.by_uuid else host.name, host.uuid))
        more = None if is_old else len(found) > query.limit
        return HostsPage(hosts=tuple(found[: query.limit]), feed_sequence=len(self.queries), more=more)


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "HOSTS_PER_PAGE", 3)


def all_by(reader: str, bus: Any) -> Callable[[], Awaitable[Sequence[HostRecord]]]:
    async def by_command() -> Sequence[HostRecord]:
        client = BuildClient.__new__(BuildClient)  # it needs a bus for this, and nothing else
        client.bus = bus
        return (await client.hosts(limit=1000, timeout_s=1.0)).hosts

    async def by_api() -> Sequence[HostRecord]:
        api = WebApi.__new__(WebApi)
        api._bus = bus
        return (await api.hosts(HostsQuery())).hosts

    return {"command": by_command, "api": by_api, "pages": FleetReader(bus, SystemClock(), ("c",)).hosts}[reader]


@pytest.mark.parametrize("are_old", [(False,), (True,), (False, True), (True, False), (False, False, True)])
@pytest.mark.parametrize("reader", ["command", "api", "pages"])
async def test_all_hosts_are_read_by_every_release(reader: str, are_old: Sequence[bool]) -> None:
    """A scheduler of the release before pages does not know `by_uuid` and answers without `more`."""
    assert tuple(await all_by(reader, Schedulers(are_old))()) == HOSTS


@pytest.mark.parametrize("reader", ["command", "api", "pages"])
async def test_item_16_no_answer_has_more_hosts_than_a_page(reader: str) -> None:
    """40,000 hosts in one answer were one call of C, of up to 43 ms."""
    schedulers = Schedulers()
    await all_by(reader, schedulers)()
    assert [one.limit for one in schedulers.queries] == [3, 3, 3, 3]
    followed = [one.after_uuid for one in schedulers.queries if one.by_uuid]
    assert followed == [None, HOSTS[2].uuid, HOSTS[5].uuid], "the first query shows that there is more than a page"


@pytest.mark.parametrize("reader", ["command", "api", "pages"])
async def test_as_many_hosts_as_a_page_has_are_one_query(reader: str) -> None:
    schedulers = Schedulers(hosts=(HOSTS[:3],))
    assert tuple(await all_by(reader, schedulers)()) == HOSTS[:3] and len(schedulers.queries) == 1


def named(*names: str) -> tuple[HostRecord, ...]:
    return tuple(replace(host, name=name) for host, name in zip(HOSTS, names, strict=True))


@pytest.mark.parametrize("reader", ["command", "api", "pages"])
@pytest.mark.parametrize(
    "hosts",
    [
        (HOSTS, named("z0", "z1", "z2", "h3", "h4", "h5", "h6")),  # the other one has read other announcements
        (HOSTS, named(*(one.uuid for one in HOSTS[::-1]))),  # ... or none yet
        (named("h6", "h5", "h4", "h3", "h2", "h1", "h0"), HOSTS),
        (named(*["h"] * 7), named(*["a"] * 7), HOSTS),  # several hosts of one name in different cells
    ],
)
async def test_each_host_is_listed_once_by_schedulers_that_know_hosts_under_different_names(
    reader: str, hosts: Sequence[Sequence[HostRecord]]
) -> None:
    for turns in (hosts, hosts[::-1]):
        found = await all_by(reader, Schedulers(hosts=turns))()
        assert sorted(host.uuid for host in found) == [host.uuid for host in HOSTS]
        assert [(one.name, one.uuid) for one in found] == sorted((one.name, one.uuid) for one in found)


async def test_a_host_that_some_schedulers_do_not_know_hides_and_doubles_no_other() -> None:
    for missing in HOSTS:
        fewer = tuple(host for host in HOSTS if host != missing)
        for turns in ((HOSTS, fewer), (fewer, HOSTS)):
            found = await all_by("command", Schedulers(hosts=turns))()
            uuids = [host.uuid for host in found]
            assert sorted({*uuids, missing.uuid}) == [host.uuid for host in HOSTS] and len(uuids) == len(set(uuids))


@pytest.mark.parametrize("more", [True, False])
async def test_a_scheduler_that_repeats_a_page_is_not_queried_for_ever(more: bool) -> None:
    class Repeating(Schedulers):
        async def request(self, query: Message, _reply: type[Any], **_: Any) -> HostsPage:
            assert len(self.queries) < 10
            page = await super().request(query, _reply)
            return replace(page, hosts=(*HOSTS[:3], *HOSTS[:2]), more=more or len(self.queries) < 3)

    schedulers: Any = Repeating()
    page = await read_hosts(schedulers, HostsQuery(limit=100), timeout_s=1.0)
    assert (page.hosts, page.more) == (HOSTS[:3], more)


async def test_no_more_hosts_are_read_than_are_listed_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "MAX_HOSTS", 5)
    schedulers: Any = Schedulers()
    page = await read_hosts(schedulers, HostsQuery(limit=7), timeout_s=1.0)
    assert (len(page.hosts), page.more, len(schedulers.queries)) == (6, True, 3)


@pytest.mark.parametrize(("limit", "limits"), [(2, [2]), (3, [3]), (4, [3, 3, 3, 3]), (7, [3, 3, 3, 3])])
@pytest.mark.parametrize("is_old", [False, True])
async def test_no_more_hosts_are_read_than_requested(limit: int, limits: list[int], is_old: bool) -> None:
    schedulers = Schedulers((is_old,))
    page = await read_hosts(schedulers, HostsQuery(cell="c", limit=limit), timeout_s=1.0)  # type: ignore[arg-type]
    assert page.hosts == HOSTS[:limit] and page.more is (None if is_old else limit < 7)
    assert page.feed_sequence == (len(schedulers.queries) if is_old else 1 if limit <= 3 else 2)
    assert [one.limit for one in schedulers.queries] == ([3, limit] if is_old and limit > 3 else limits)
    assert {one.cell for one in schedulers.queries} == {"c"}


async def test_a_query_that_is_refused_at_once_is_refused() -> None:
    with pytest.raises(RequestRefused):
        await read_hosts(Schedulers((True,)), HostsQuery(by_uuid=True), timeout_s=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7])
async def test_item_16_a_list_is_written_in_parts_as_it_is_at_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, encode = HOSTS[:count], msgspec.json.encode
    written: list[int] = []

    def counted(part: Sequence[HostRecord]) -> bytes:
        written.append(len(part))
        return encode(part)

    monkeypatch.setattr(msgspec.json, "encode", counted)
    assert await json_of(hosts) == encode(hosts)
    assert max(written, default=0) <= 3 and sum(written) == count


async def test_a_page_of_an_old_scheduler_that_is_not_full_is_not_the_last() -> None:
    """It takes so many hosts, and then leaves out those that have left the book."""

    class Leaving(Schedulers):
        async def request(self, query: Message, _reply: type[Any], **_: Any) -> HostsPage:
            page = await super().request(query, _reply)
            return replace(page, hosts=page.hosts[1:])

    schedulers: Any = Leaving(are_old=(True,))
    page = await read_hosts(schedulers, HostsQuery(), timeout_s=1.0)
    assert page.hosts == HOSTS[1:]
