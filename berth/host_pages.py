"""Reads lists of hosts from schedulers, a page at a time, so that no answer holds an event loop for long."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from bus.bus import Bus
from bus.contracts.build import HostRecord, HostsPage, HostsQuery
from bus.faults import RequestRefused
from bus.turns import InParts

# A page takes 3 ms of a scheduler's loop to write, and 10 of this process's to read. For each one the scheduler lists
# all hosts, 30 ms for 40,000 (in parts), so shorter pages would cost it more.
HOSTS_PER_PAGE = 5_000


async def read_hosts(bus: Bus, query: HostsQuery, *, timeout_s: float) -> HostsPage:
    """The first `query.limit` hosts. Each page may be of another scheduler; `feed_sequence` is of the first one.

    timeout_s: for each page. Raises RequestTimeout when no scheduler answers, RequestRefused when one refuses it.
    """
    hosts: list[HostRecord] = []
    sequence: int | None = None
    while True:
        most = min(query.limit - len(hosts), HOSTS_PER_PAGE)
        last = hosts[-1] if hosts else None
        following = query if last is None else replace(query, after=last.name, after_uuid=last.uuid)
        try:
            page = await bus.request(replace(following, limit=most), HostsPage, timeout_s=timeout_s)
        except RequestRefused:
            if last is None:
                raise
            page = HostsPage()
        if page.more is None and most < query.limit:
            # A scheduler of a release before pages, which refuses `after` too: it is asked for everything at once. That
            # its page is not full proves nothing, because it leaves out hosts that left the book meanwhile.
            return await bus.request(query, HostsPage, timeout_s=timeout_s)
        hosts += page.hosts
        sequence = page.feed_sequence if sequence is None else sequence
        if not page.more or not page.hosts or len(hosts) >= query.limit:
            return replace(page, hosts=tuple(hosts), feed_sequence=sequence)


async def json_of(hosts: Sequence[HostRecord]) -> bytes:
    """The hosts as a JSON array, written a page at a time between turns of the event loop."""
    parts = [msgspec.json.encode(part)[1:-1] async for part in InParts(hosts, HOSTS_PER_PAGE)]
    return b"[" + b",".join(parts) + b"]"
