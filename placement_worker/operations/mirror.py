"""A replica of an OpenStack Placement, which has no change feed: read in whole passes, by its REST API or from its
database. What a pass has read is put into the replica at once, when all of it has been read.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

import structlog
from msgspec import Struct, field
from msgspec.structs import replace
from prometheus_client import Gauge

from bus.clock import Clock
from bus.contracts.feed import Change
from placement_worker.domain.server_groups import hosts_of
from placement_worker.domain.values import Provider, state_of
from placement_worker.operations.export import InvalidExport, check_trees, problem_of_names, problem_of_provider
from placement_worker.replica.replica import Replica

log = structlog.get_logger("placement.mirror")

MAX_PROVIDERS = 200_000  # that a source takes
LATE_S = 10.0  # without a complete pass, after which the replica is too old; of a longer interval, three of them

_read_at = Gauge(
    "berth_mirror_read_timestamp_seconds", "When the last complete read of another Placement began (0: none yet)"
)

Held = dict[str, dict[str, int]]  # {consumer: {class: amount}} of one provider


class PlacementCopy(Struct):
    """What is known of a Placement, by its providers. It is the mirror's: a source reads it."""

    providers: dict[str, Provider] = field(default_factory=dict)  # without usage
    ids: dict[str, int] = field(default_factory=dict)  # in the source's database: another one, and it was made again
    held: dict[str, Held] = field(default_factory=dict)  # the one read longest ago first
    of_consumer: dict[str, set[str]] = field(default_factory=dict)  # {consumer: providers}

    def hold(self, uuid: str, part: Held) -> None:
        """Take over what consumers hold of a provider. It is now the one read last."""
        before = self.held.pop(uuid, {})
        self.held[uuid] = part
        for consumer in before.keys() - part.keys():
            self.of_consumer[consumer].discard(uuid)
            if not self.of_consumer[consumer]:
                del self.of_consumer[consumer]
        for consumer in part.keys() - before.keys():
            self.of_consumer.setdefault(consumer, set()).add(uuid)


class PlacementPass(Struct, frozen=True):
    """What one read of a Placement has found."""

    present: Collection[str]  # all its providers
    read: Mapping[str, Provider]  # those that may have changed
    held: Mapping[str, Held]  # of those, and of others of which it may have changed
    ids: Mapping[str, int] = {}


class PlacementSource(Protocol):
    """Reads a Placement."""

    async def read(self, known: PlacementCopy, since_s: float) -> PlacementPass:
        """What may have changed. known: what the passes before have read, the last one `since_s` ago. Raises
        InvalidExport.
        """

    async def close(self) -> None:
        """Close the connections."""


class PlacementMirror:
    """Keeps a replica equal to a running Placement. One task runs `run`; `ready` is set after the first pass."""

    def __init__(
        self,
        source: PlacementSource,
        replica: Replica,
        *,
        clock: Clock,
        interval_s: float,  # from the begin of one pass to that of the next
    ) -> None:
        self.replica = replica
        self.ready = asyncio.Event()
        self._source = source
        self._clock = clock
        self._interval_s = interval_s
        self._known = PlacementCopy()
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
        limit_s = max(LATE_S, 3 * self._interval_s)
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
        held = (self._known.providers.get(uuid) for uuid in self._known.of_consumer.get(consumer, ()))
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
        found = await self._source.read(self._known, since_s)
        gone = self._known.providers.keys() - set(found.present)
        kept = {uuid: one for uuid, one in self._known.providers.items() if uuid not in gone}
        _check(found, kept | dict(found.read))
        # Nothing awaits from here on: the replica goes from one pass to the next.
        self._take(gone, found)

    def _take(self, gone: Collection[str], found: PlacementPass) -> None:
        changes = [self._remove(uuid) for uuid in sorted(gone, key=self._is_root)]
        for uuid, part in found.held.items():
            self._known.hold(uuid, part)
        for uuid, provider in found.read.items():
            changes += self._put(uuid, provider)
        changes += [change for uuid in found.held if uuid not in found.read for change in self._usage(uuid)]
        self._known.ids.update(found.ids)
        self._apply(changes)

    def _is_root(self, uuid: str) -> bool:
        return uuid in self._known.providers and self._known.providers[uuid].parent is None

    def _put(self, uuid: str, provider: Provider) -> Iterator[Change]:
        """A provider that may have changed."""
        before, used = self._known.providers.get(uuid), self._sum(uuid)
        is_made_again = before is not None and provider.generation < before.generation
        if is_made_again:
            yield Change(provider=uuid, generation=provider.generation, removed=True)
        if before is None or is_made_again or replace(provider, spec_generation=0) != _at(before, provider.generation):
            self._spec_generation += 1
            spec_generation = self._spec_generation
            known = self._known.providers[uuid] = replace(provider, spec_generation=spec_generation)
            self._used[uuid] = used
            state = state_of(replace(known, used=used))
            yield Change(provider=uuid, generation=provider.generation, state=state)
            return
        self._known.providers[uuid] = replace(before, generation=provider.generation)
        yield from self._usage(uuid)

    def _usage(self, uuid: str) -> Iterator[Change]:
        """What a provider's usage is now, where the replica has another one."""
        before, now = self._used.get(uuid, {}), self._sum(uuid)
        changed = {name: now.get(name, 0) for name in before | now if now.get(name, 0) != before.get(name, 0)}
        if changed:
            self._used[uuid] = now
            yield Change(provider=uuid, generation=self._known.providers[uuid].generation, used=changed)

    def _remove(self, uuid: str) -> Change:
        self._known.hold(uuid, {})
        del self._known.held[uuid]
        self._known.ids.pop(uuid, None)
        self._used.pop(uuid, None)
        return Change(provider=uuid, generation=self._known.providers.pop(uuid).generation, removed=True)

    def _sum(self, uuid: str) -> dict[str, int]:
        total = Counter[str]()
        for consumer, resources in self._known.held.get(uuid, {}).items():
            if not self.is_left_out(consumer):
                total.update(resources)
        return dict(total)

    def _recount(self, consumers: Iterable[str]) -> None:
        touched = {uuid for one in consumers for uuid in self._known.of_consumer.get(one, ())}
        self._apply([change for uuid in sorted(touched) for change in self._usage(uuid)])

    def _apply(self, changes: Iterable[Change]) -> None:
        first = self.replica.sequence + 1
        self.replica.apply([replace(change, sequence=number) for number, change in enumerate(changes, first)])


def _at(provider: Provider, generation: int) -> Provider:
    return replace(provider, generation=generation, spec_generation=0)


def _check(found: PlacementPass, providers: Mapping[str, Provider]) -> None:
    """Raises InvalidExport: what was read is no part of a Placement, or was read while a tree changed."""
    classes = {name for part in found.held.values() for resources in part.values() for name in resources}
    for problem in filter(None, (*map(problem_of_provider, found.read.values()), problem_of_names(classes))):
        raise InvalidExport(problem)
    if found.read:
        check_trees(providers)
