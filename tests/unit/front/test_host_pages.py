"""Lists of hosts are read a page at a time, whichever releases the schedulers are of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from berth import host_pages
from berth.client import BuildClient
from berth.host_pages import json_of, read_hosts
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
    """A bus on which these schedulers answer in turn: True is one of the release before pages."""

    def __init__(self, are_old: Sequence[bool] = (False,)) -> None:
        self.are_old = are_old
        self.queries: list[HostsQuery] = []

    async def request(self, query: Message, _reply: type[Any], **_: Any) -> HostsPage:
        assert isinstance(query, HostsQuery)
        is_old = self.are_old[len(self.queries) % len(self.are_old)]
        self.queries.append(query)
        if is_old and query.after is not None:
            raise RequestRefused("unknown field `after`", code="message.invalid")
        after = (query.after or "", query.after_uuid or "")
        found = [host for host in HOSTS if (host.name, host.uuid) > after]
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
    """A scheduler of the release before pages does not know `after` and answers without `more`."""
    assert tuple(await all_by(reader, Schedulers(are_old))()) == HOSTS


@pytest.mark.parametrize("reader", ["command", "api", "pages"])
async def test_item_16_no_answer_has_more_hosts_than_a_page(reader: str) -> None:
    """40,000 hosts in one answer were one call of C, of up to 43 ms."""
    schedulers = Schedulers()
    await all_by(reader, schedulers)()
    assert [one.limit for one in schedulers.queries] == [3, 3, 3]
    assert [one.after for one in schedulers.queries] == [None, "h1", "h2"], "two hosts are called h1"


@pytest.mark.parametrize(("limit", "limits"), [(2, [2]), (3, [3]), (4, [3, 1]), (7, [3, 3, 1])])
@pytest.mark.parametrize("is_old", [False, True])
async def test_no_more_hosts_are_read_than_requested(limit: int, limits: list[int], is_old: bool) -> None:
    schedulers = Schedulers((is_old,))
    page = await read_hosts(schedulers, HostsQuery(cell="c", limit=limit), timeout_s=1.0)  # type: ignore[arg-type]
    assert page.hosts == HOSTS[:limit] and page.feed_sequence == (len(schedulers.queries) if is_old else 1)
    assert [one.limit for one in schedulers.queries] == ([3, limit] if is_old and limit > 3 else limits)
    assert {replace(one, after=None, after_uuid=None, limit=1).cell for one in schedulers.queries} == {"c"}


async def test_a_query_that_is_refused_at_once_is_refused() -> None:
    with pytest.raises(RequestRefused):
        await read_hosts(Schedulers((True,)), HostsQuery(after="h"), timeout_s=1.0)  # type: ignore[arg-type]


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
