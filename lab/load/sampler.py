"""Looks at a run and at the system each half second: rates, what is in flight, latencies, queue depths, hosts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec import Struct

from berth.bus_client import BuildClient
from berth.bus_client.host_pages import HOSTS_PER_PAGE
from bus.clock import Clock
from bus.contracts.build import HostRecord
from bus.contracts.queues import DEAD_LETTERS, QUEUES, QueueKind, Where
from bus.faults import Fault, Transient
from bus.transport import BusError, Transport
from lab.load.record import MAX_HEAT_HOSTS, MAX_HEAT_SNAPSHOTS, MAX_SAMPLES, Samples, Utilisation
from lab.load.report.summary import percentiles
from lab.load.run import LoadRun

SAMPLE_S = 0.5
# Hosts are queried so often, and never more than a twentieth of the time: a large fleet is a large answer.
HEAT_S = 1.0
HEAT_SHARE = 20
HEAT_PAGE = HOSTS_PER_PAGE  # one query: of a larger fleet the first hosts by name
HEAT_TIMEOUT_S = 5.0
# A broker that does not answer delays a sample by no more than this.
DEPTHS_TIMEOUT_S = 3.0
API = "api"
# The queues that a boot passes through. Private queues are their consumers' own business.
_WATCHED = [row for row in QUEUES if row.kind is QueueKind.DURABLE and "{" not in row.name]


class Sample(Struct):
    """One row of `record.Samples`."""

    at_s: float
    offered_per_s: float
    sent_per_s: float
    ended_per_s: float
    deleted_per_s: float
    in_flight: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    conflicts: int | None
    retries: int
    backpressure: int
    depths: dict[str, int]


class Sampler:
    """Watches a run. `transports`: the buses whose queues can be looked at, by name ("api", or the cell's)."""

    def __init__(
        self,
        run: LoadRun,
        client: BuildClient,
        *,
        clock: Clock,
        transports: Mapping[str, Transport] | None = None,
        on_sample: Callable[[Sample], None] | None = None,
    ) -> None:
        self._on_sample = on_sample
        self.rows: list[Sample] = []
        self.stopping = False  # Python 3.11's wait_for can swallow a cancellation; this it cannot
        self._run = run
        self._client = client
        self._clock = clock
        self._transports = dict(transports or {})
        self._period_s = SAMPLE_S
        self._before = (0.0, 0, 0, 0, 0)
        self._heat: list[tuple[float, list[HostRecord]]] = []
        self._next_heat = 0.0
        self._heat_period_s = HEAT_S

    async def watch(self) -> None:
        """Take samples, until cancelled or stopped."""
        while not self.stopping:
            await self._clock.sleep(self._period_s)
            sample = await self.take_sample()
            if self._on_sample is not None:
                self._on_sample(sample)
            if self._now() >= self._next_heat:
                await self.sample_hosts()

    async def take_sample(self) -> Sample:
        """One row, from the row before until now."""
        depths = await self._depths()
        run, now = self._run, self._now()
        sent = len(run.boots) - run.boots.counts["unsent"] - run.boots.counts["backpressure"]
        ended = sum(run.boots.counts[name] for name in ("active", "failed", "refused", "deleted"))
        deleted = run.deletes.counts["deleted"] + run.deletes.counts["refused"]
        at, *before = self._before
        seconds = max(now - at, 1e-6)
        counts = (len(run.boots), sent, ended, deleted)
        rates = [round(max(new - old, 0) / seconds, 2) for new, old in zip(counts, before, strict=True)]
        self._before = (now, *counts)
        ranks = percentiles([1000 * latency for latency in run.drain_latencies()])
        row = Sample(
            at_s=round(now, 3),
            offered_per_s=rates[0],
            sent_per_s=rates[1],
            ended_per_s=rates[2],
            deleted_per_s=rates[3],
            in_flight=run.in_flight,
            p50_ms=ranks.get("p50"),
            p95_ms=ranks.get("p95"),
            p99_ms=ranks.get("p99"),
            conflicts=run.conflicts,
            retries=run.retries,
            backpressure=run.refusals,
            depths=depths,
        )
        self.rows.append(row)
        if len(self.rows) >= MAX_SAMPLES:
            self.rows = [_merged(*pair) for pair in zip(self.rows[::2], self.rows[1::2], strict=False)]
            self._period_s *= 2
        return row

    async def sample_hosts(self) -> None:
        """How full each host is, as a scheduler's replica has it."""
        began = self._now()
        self._next_heat = began + self._heat_period_s
        try:
            page = await self._client.hosts(limit=HEAT_PAGE, timeout_s=HEAT_TIMEOUT_S)
        except (Transient, BusError, Fault):
            return  # no answer now; the next sample may have one
        self._next_heat = max(self._next_heat, self._now() + HEAT_SHARE * (self._now() - began))
        self._heat.append((self._now(), list(page.hosts)))
        if len(self._heat) >= MAX_HEAT_SNAPSHOTS:
            self._heat = self._heat[::2]
            self._heat_period_s *= 2

    def samples(self) -> Samples:
        """All rows, as columns."""
        queues = sorted({queue for row in self.rows for queue in row.depths})
        columns = {
            name: [getattr(row, name) for row in self.rows]
            for name in Sample.__struct_fields__
            if name != "depths"
        }  # fmt: skip
        return Samples(**columns, depths={queue: [row.depths.get(queue) for row in self.rows] for queue in queues})

    def utilisation(self) -> Utilisation:
        """How full the hosts were, thinned evenly to what a picture can hold."""
        known = {host.name: host.cell or "" for _, hosts in self._heat for host in hosts}
        names = sorted(known, key=lambda name: (known[name], name))
        of_hosts = len(names)
        if of_hosts > MAX_HEAT_HOSTS:
            names = [names[number * of_hosts // MAX_HEAT_HOSTS] for number in range(MAX_HEAT_HOSTS)]
        return Utilisation(
            hosts=names,
            cells=[known[name] for name in names],
            of_hosts=of_hosts,
            at_s=[round(at, 3) for at, _ in self._heat],
            share=[shares_of(hosts, names) for _, hosts in self._heat],
        )

    def _now(self) -> float:
        return self._clock.monotonic() - self._run.started

    async def _depths(self) -> dict[str, int]:
        found = await asyncio.gather(*(self._depths_of(bus, one) for bus, one in self._transports.items()))
        return {queue: depth for depths in found for queue, depth in depths.items()}

    async def _depths_of(self, bus: str, transport: Transport) -> dict[str, int]:
        where = {Where.API, Where.BOTH} if bus == API else {Where.CELL, Where.BOTH}
        reading = {row.name: partial(transport.depth, row.name) for row in _WATCHED if row.where in where}
        if bus == API:
            reading[DEAD_LETTERS] = partial(transport.depth, DEAD_LETTERS)
        depths: dict[str, int] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEPTHS_TIMEOUT_S):
                for queue, read in reading.items():
                    with contextlib.suppress(BusError):  # not there yet, or the broker is unavailable
                        depths[queue if bus == API else f"{bus}/{queue}"] = await read()
        return depths


def shares_of(hosts: Sequence[HostRecord], names: Sequence[str]) -> list[float]:
    """How full the named hosts are, in their order; 0 of those that are not there."""
    full = {host.name: _share(host) for host in hosts}
    return [full.get(name, 0.0) for name in names]


def _share(host: HostRecord) -> float:
    """Used over capacity of the fullest class; a deployed node is full, though its capacity is reserved down to 0."""
    shares = [
        used / capacity if capacity > 0 else 1.0 for used, capacity in host.resources.values() if used or capacity
    ]
    return round(max(shares, default=0.0), 3)


def _merged(one: Sample, two: Sample) -> Sample:
    """Two rows as one twice as long."""
    for name in ("offered_per_s", "sent_per_s", "ended_per_s", "deleted_per_s"):
        setattr(two, name, (getattr(one, name) + getattr(two, name)) / 2)
    for name in ("p50_ms", "p95_ms", "p99_ms"):
        values = [value for value in (getattr(one, name), getattr(two, name)) if value is not None]
        setattr(two, name, max(values, default=None))
    return two
