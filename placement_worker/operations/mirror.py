"""A replica of an OpenStack Placement, which has no change feed: read over its REST API in whole passes.

A pass reads the list of providers with their generations, the parts and allocations of those that have moved, and the
allocations of some others in turn: `DELETE /allocations` moves no generation. What a pass has read is put into the
replica at once, when all of it has been read.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import structlog
from msgspec.structs import replace
from prometheus_client import Gauge

from bus.clock import Clock
from bus.contracts.feed import Change
from bus.faults import first_fault
from placement_worker.domain.server_groups import hosts_of
from placement_worker.domain.values import Provider, state_of
from placement_worker.operations.export import (
    InvalidExport,
    ListedProvider,
    PlacementReader,
    check_trees,
    problem_of_names,
    problem_of_provider,
)
from placement_worker.replica.replica import Replica

log = structlog.get_logger("placement.mirror")

T = TypeVar("T")

MAX_PROVIDERS = 200_000
LATE_S = 10.0  # without a complete pass, after which the replica is too old; of a longer interval, two of them

_read_at = Gauge(
    "berth_mirror_read_timestamp_seconds", "When the last complete read of another Placement began (0: none yet)"
)

Held = dict[str, dict[str, int]]  # {consumer: {class: amount}} of one provider


class PlacementMirror:
    """Keeps a replica equal to a running Placement. One task runs `run`; `ready` is set after the first pass."""

    def __init__(
        self,
        source: PlacementReader,
        replica: Replica,
        *,
        clock: Clock,
        interval_s: float,  # from the begin of one pass to that of the next
        whole_s: float,  # within which the allocations of every provider are read
    ) -> None:
        self.replica = replica
        self.ready = asyncio.Event()
        self._source = source
        self._clock = clock
        self._interval_s = interval_s
        self._whole_s = whole_s
        self._providers: dict[str, Provider] = {}  # without usage
        self._held: dict[str, Held] = {}  # by provider; the one read longest ago first
        self._of_consumer: dict[str, set[str]] = {}  # {consumer: providers}
        self._left_out = Counter[str]()
        self._used: dict[str, dict[str, int]] = {}  # by provider, as the replica has it
        self._spec_generation = 0
        self._begun = self._ended = 0  # passes; of the last complete one the number
        self._read_s = -math.inf  # when the last complete pass began
        self._passed = asyncio.Condition()

    # --- what users ask

    @property
    def age_s(self) -> float:
        """Seconds since the last complete pass began."""
        return self._clock.monotonic() - self._read_s

    @property
    def unavailable_reason(self) -> str:
        """Why the replica must not be decided by; "": it is new enough."""
        if not self.ready.is_set():
            return "nothing was read yet"
        limit_s = max(LATE_S, 2 * self._interval_s)
        return f"read {self.age_s:.0f} s ago" if self.age_s > limit_s else ""

    async def next_pass(self) -> None:
        """Wait for the end of a complete pass that begins from now on."""
        wanted = self._begun + 1
        async with self._passed:
            await self._passed.wait_for(lambda: self._ended >= wanted)

    async def refresh(self, *, timeout_s: float) -> bool:
        """False: the replica is too old. Nobody can hasten the next pass, so none is waited for."""
        return not self.unavailable_reason

    def hosts_of(self, consumer: str) -> tuple[str, ...]:
        """The roots of the trees in which a consumer holds something."""
        held = (self._providers.get(uuid) for uuid in self._of_consumer.get(consumer, ()))
        return hosts_of(provider for provider in held if provider is not None)

    def is_left_out(self, consumer: str) -> bool:
        """Whether what it holds does not count."""
        return self._left_out[consumer] > 0

    def leave_out(self, consumers: Iterable[str]) -> None:
        """What these hold does not count until `count_again` was called as often."""
        named = list(consumers)
        self._left_out.update(named)
        self._recount(named)

    def count_again(self, consumers: Iterable[str]) -> None:
        """The opposite of `leave_out`."""
        named = list(consumers)
        self._left_out -= Counter(named)
        self._recount(named)

    # --- passes

    async def run(self) -> None:
        """Read until cancelled. What cannot be read is read by the next pass; what is known counts until then."""
        while True:
            begun_s = self._clock.monotonic()
            try:
                await self.read()
            except InvalidExport as error:
                log.warning("placement.mirror_unread", reason=str(error))
            await self._clock.sleep(max(0.0, begun_s + self._interval_s - self._clock.monotonic()))

    async def read(self) -> None:
        """One pass. Raises InvalidExport; the replica is then as it was."""
        begun_at, begun_s = self._clock.time(), self._clock.monotonic()
        self._begun += 1
        await self._pass(begun_s - self._read_s)
        self._read_s, self._ended = begun_s, self._begun
        _read_at.set(begun_at)
        self.ready.set()
        async with self._passed:
            self._passed.notify_all()

    async def _pass(self, since_s: float) -> None:
        """since_s: the time since the last complete pass began (seconds)."""
        rows = {row.uuid: row for row in await self._source.rows()}
        if len(rows) > MAX_PROVIDERS:
            raise InvalidExport(f"it has more than {MAX_PROVIDERS} providers")
        moved = [row for row in rows.values() if not self._is_known(row)]
        read = {one.uuid: one for one in await _all(map(self._source.provider, moved)) if one is not None}
        gone = {row.uuid for row in moved} - read.keys() | (self._providers.keys() - rows.keys())
        providers = {uuid: one for uuid, one in self._providers.items() if uuid not in gone} | read
        _check(read.values(), providers)
        held = await self._holdings(self._due(read, providers, since_s))
        held |= await self._holdings(self._elsewhere(held, providers))
        # Nothing awaits from here on: the replica goes from one pass to the next.
        self._take(gone, read, held)

    async def _holdings(self, providers: Collection[str]) -> dict[str, Held]:
        """What consumers hold of these. Raises InvalidExport."""
        parts = await _all(map(self._source.allocations, providers))
        if problem := problem_of_names({name for part in parts for one in part.values() for name in one.resources}):
            raise InvalidExport(problem)
        return {
            uuid: {consumer: one.resources for consumer, one in part.items()}
            for uuid, part in zip(providers, parts, strict=True)
        }

    def _elsewhere(self, held: Mapping[str, Held], providers: Collection[str]) -> Collection[str]:
        """Where consumers held something before that hold something anew: a claim moves no generation of the providers
        that it lets go.
        """
        anew = {one for uuid, part in held.items() for one in part.keys() - self._held.get(uuid, {}).keys()}
        there = {uuid for one in anew for uuid in self._of_consumer.get(one, ())}
        return (there & set(providers)) - held.keys()

    def _is_known(self, row: ListedProvider) -> bool:
        known = self._providers.get(row.uuid)
        return known is not None and row.is_of(known)

    def _due(self, read: Collection[str], providers: Collection[str], since_s: float) -> list[str]:
        """Whose allocations are read: of providers that have moved, and of those that were read longest ago."""
        left = [uuid for uuid in self._held if uuid not in read and uuid in providers]
        share = min(1.0, max(since_s, self._interval_s) / self._whole_s)
        return [*read, *left[: math.ceil(len(providers) * share)]]

    def _take(self, gone: Collection[str], read: Mapping[str, Provider], held: Mapping[str, Held]) -> None:
        changes = [self._remove(uuid) for uuid in sorted(gone, key=self._is_root) if uuid in self._providers]
        for uuid, part in held.items():
            self._hold(uuid, part)
        for uuid, provider in read.items():
            changes += self._put(uuid, provider)
        changes += [change for uuid in held if uuid not in read for change in self._usage(uuid)]
        self._apply(changes)

    def _is_root(self, uuid: str) -> bool:
        return uuid in self._providers and self._providers[uuid].parent is None

    def _put(self, uuid: str, provider: Provider) -> Iterator[Change]:
        """A provider that has moved."""
        before, used = self._providers.get(uuid), self._sum(uuid)
        is_made_again = before is not None and provider.generation < before.generation
        if is_made_again:
            yield Change(provider=uuid, generation=provider.generation, removed=True)
        if before is None or is_made_again or replace(provider, spec_generation=0) != _at(before, provider.generation):
            self._spec_generation += 1
            spec_generation = self._spec_generation
            known = self._providers[uuid] = replace(provider, spec_generation=spec_generation)
            self._used[uuid] = used
            state = state_of(replace(known, used=used))
            yield Change(provider=uuid, generation=provider.generation, state=state)
            return
        self._providers[uuid] = replace(before, generation=provider.generation)
        yield from self._usage(uuid)

    def _usage(self, uuid: str) -> Iterator[Change]:
        """What a provider's usage is now, where the replica has another one."""
        before, now = self._used.get(uuid, {}), self._sum(uuid)
        changed = {name: now.get(name, 0) for name in before | now if now.get(name, 0) != before.get(name, 0)}
        if changed:
            self._used[uuid] = now
            yield Change(provider=uuid, generation=self._providers[uuid].generation, used=changed)

    def _remove(self, uuid: str) -> Change:
        self._hold(uuid, {})
        del self._held[uuid]
        self._used.pop(uuid, None)
        return Change(provider=uuid, generation=self._providers.pop(uuid).generation, removed=True)

    def _hold(self, uuid: str, part: Held) -> None:
        """Take over what consumers hold of a provider. It is now the one read last."""
        before = self._held.pop(uuid, {})
        self._held[uuid] = part
        for consumer in before.keys() - part.keys():
            self._of_consumer[consumer].discard(uuid)
            if not self._of_consumer[consumer]:
                del self._of_consumer[consumer]
        for consumer in part.keys() - before.keys():
            self._of_consumer.setdefault(consumer, set()).add(uuid)

    def _sum(self, uuid: str) -> dict[str, int]:
        total = Counter[str]()
        for consumer, resources in self._held.get(uuid, {}).items():
            if not self.is_left_out(consumer):
                total.update(resources)
        return dict(total)

    def _recount(self, consumers: Iterable[str]) -> None:
        touched = {uuid for one in consumers for uuid in self._of_consumer.get(one, ())}
        self._apply([change for uuid in sorted(touched) for change in self._usage(uuid)])

    def _apply(self, changes: Iterable[Change]) -> None:
        first = self.replica.sequence + 1
        self.replica.apply([replace(change, sequence=number) for number, change in enumerate(changes, first)])


async def _all(reads: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them read; the first that fails ends the others. Raises InvalidExport."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in reads]
    except BaseExceptionGroup as failed:
        raise first_fault(failed) from failed
    return [task.result() for task in tasks]


def _at(provider: Provider, generation: int) -> Provider:
    return replace(provider, generation=generation, spec_generation=0)


def _check(read: Collection[Provider], providers: Mapping[str, Provider]) -> None:
    """Raises InvalidExport: what was read is no part of a Placement, or was read while a tree changed."""
    for problem in filter(None, map(problem_of_provider, read)):
        raise InvalidExport(problem)
    if read:
        check_trees(providers)
