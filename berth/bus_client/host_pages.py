"""Reads lists of hosts from schedulers, a page at a time, so that no answer holds an event loop for long."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from bus.bus import Bus
from bus.contracts.build import HostRecord, HostsPage, HostsQuery
from bus.yielding import YieldingParts

# A page takes 3 ms of a scheduler's loop to write, and 10 of this process's to read. For each one the scheduler lists
# all hosts, 30 ms for 40,000 (in parts), so shorter pages would cost it more.
HOSTS_PER_PAGE = 5_000
MAX_HOSTS = 100_000  # that are read, as many as one query may ask for; which ones they are is by uuid
MERGED_AT_ONCE = 1_000  # in one turn of the event loop, 2 ms


async def read_hosts(bus: Bus, query: HostsQuery, *, timeout_s: float) -> HostsPage:
    """The first `query.limit` hosts, by name and uuid. `feed_sequence` is of the first page.

    Where they are more than a page, each may be of another scheduler, which may know hosts under other names. So pages
    go by uuid, and all of them are read to find the first ones by name.

    timeout_s: for each page. Raises RequestTimeout when no scheduler answers, RequestRefused when one refuses it.
    """
    most = min(query.limit, HOSTS_PER_PAGE)
    page = await bus.request(replace(query, limit=most), HostsPage, timeout_s=timeout_s)
    if most == query.limit or not page.more:
        return page
    parts: list[list[HostRecord]] = []
    sequence, last = 0, ""
    while True:
        following = replace(query, by_uuid=True, after_uuid=last or None, limit=HOSTS_PER_PAGE)
        page = await bus.request(following, HostsPage, timeout_s=timeout_s)
        found = {host.uuid: host for host in page.hosts if host.uuid > last}
        if found:
            parts.append(sorted(found.values(), key=_by_name))
            sequence, last = sequence or page.feed_sequence, max(found)
        if not page.more or not found or sum(map(len, parts)) >= MAX_HOSTS:
            hosts, more = await _first(parts, query.limit)
            return HostsPage(hosts=hosts, feed_sequence=sequence or page.feed_sequence, more=more or page.more)


def _by_name(host: HostRecord) -> tuple[str, str]:
    return host.name, host.uuid


async def _first(parts: Sequence[Sequence[HostRecord]], limit: int) -> tuple[tuple[HostRecord, ...], bool]:
    """The first hosts of these lists by name, and whether there are more."""
    hosts: list[HostRecord] = []
    async for some in YieldingParts(heapq.merge(*parts, key=_by_name), MERGED_AT_ONCE):
        hosts += some
        if len(hosts) > limit:
            break
    return tuple(hosts[:limit]), len(hosts) > limit


async def json_of(hosts: Sequence[HostRecord]) -> bytes:
    """The hosts as a JSON array, written a page at a time between turns of the event loop."""
    parts = [msgspec.json.encode(part)[1:-1] async for part in YieldingParts(hosts, HOSTS_PER_PAGE)]
    return b"[" + b",".join(parts) + b"]"
