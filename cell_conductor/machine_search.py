"""Queries compute services whether a host has the machine to which a move is to go back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.cell import MAX_LOOKUP_AT_ONCE, LookUpMachines, MachineLookupResult
from bus.faults import Fault, Forbidden, Transient
from bus.transport import BusError
from cell_conductor import metrics
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import Engine
from cell_conductor.pending_lookups import PendingLookups
from cell_conductor.reports.listings import HostListings
from cell_conductor.rules.rollback_rules import answer_about
from cell_conductor.state.events import InstanceEvent, MachineDecided, SourceAnswered, SourceQuery
from cell_conductor.store.port import InstanceStore

log = structlog.get_logger(__name__)


class SourceLookup:
    """One conductor's search for the sources of moves. listings: what the services have reported."""

    def __init__(
        self,
        engine: Engine,
        store: InstanceStore,
        bus: Bus,
        *,
        clock: Clock,
        config: ConductorConfig,
        listings: HostListings,
        pending: PendingLookups,
    ) -> None:
        self._engine = engine
        self._store = store
        self._bus = bus
        self._clock = clock
        self._config = config
        self._listings = listings
        self._pending = pending

    async def look_up(self) -> None:
        """Wait for moves that are to be rolled back, and look for their sources; have what operators have decided on
        looked at.
        """
        # All at once, so that one silent service delays none of them longer than another. It has a task of its own:
        # nothing else waits for a service that does not answer.
        sources, adoptions = await self._pending.take()
        await self._by_halves(self._look_up_sources, sources)
        await self._by_halves(self._take_decided, adoptions)

    async def _by_halves(self, take: Callable[[Sequence[str]], Awaitable[None]], waiting: Sequence[str]) -> None:
        """Take all of these instances at once, and by halves where a defect prevents that: one stops no other. It is
        logged, and comes again with its deadline, or with a report of its host.
        """
        if not waiting:
            return
        try:
            await take(waiting)
        except (Transient, BusError, Forbidden):
            raise
        except Exception as error:  # any: it must not end the task
            if (middle := len(waiting) // 2) > 0:
                await self._by_halves(take, waiting[:middle])
                await self._by_halves(take, waiting[middle:])
                return
            metrics.STEPS_FAILED.labels("", "search").inc()
            code = getattr(error, "code", type(error).__name__)
            log.exception("instance.lookup_failed", instance=waiting[0], code=code, cause=waiting[0])

    async def _look_up_sources(self, instances: Sequence[str]) -> None:
        known = await self._engine.read_recorded(instances)
        asked = {
            uuid: one
            for uuid, instance in known.items()
            if isinstance(one := awaited_request_of(instance), SourceQuery)
        }
        seen = await self._query(asked) if asked else {}
        if seen:
            await self._engine.advance([InstanceEvent(uuid, one) for uuid, one in seen.items()])

    async def _take_decided(self, instances: Sequence[str]) -> None:
        now = self._clock.time()
        await self._engine.advance([InstanceEvent(one, MachineDecided(at=now)) for one in instances])

    async def _query(self, sources: Mapping[str, SourceQuery]) -> dict[str, SourceAnswered]:
        """Query the services that have the hosts of these machines, by the record or by their reports, whether the
        hosts list them now; by instance. None of it counts if the cell has recovered since.
        """
        incarnation, queried = self._store.incarnation, defaultdict[str, dict[str, SourceQuery]](dict)
        for uuid, source in sorted(sources.items()):
            for service in sorted({source.service, *self._listings.reporting_services(source.host_uuid)}):
                queried[service][uuid] = source
        queries = [
            LookUpMachines(
                service=service,
                database_id=self._store.database_id,
                instance_uuids=piece,
                on_hosts=tuple(dict.fromkeys(about[uuid].host_uuid for uuid in piece)),
            )
            for service, about in sorted(queried.items())
            for piece in batched(about, MAX_LOOKUP_AT_ONCE)
        ]
        causes = [query.instance_uuids[0] for query in queries]
        timeout_s = self._config.answer_timeout_s
        answers = await self._bus.request_all(queries, MachineLookupResult, timeout_s=timeout_s, causes=causes)
        if incarnation != self._store.incarnation:
            return {}
        found: dict[str, list[tuple[str, MachineLookupResult | Fault]]] = defaultdict(list)
        for query, answer in zip(queries, answers, strict=True):
            for uuid in query.instance_uuids:
                found[uuid].append((query.service, answer))
        at = self._clock.time()
        seen = {uuid: answer_about(uuid, source, found[uuid], at) for uuid, source in sources.items()}
        for uuid, one in seen.items():
            if one.code:
                log.warning("action.source_not_seen", instance=uuid, code=one.code, reason=one.reason, cause=uuid)
        return seen


def batched(uuids: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    """These, so many at a time."""
    left = iter(uuids)
    while piece := tuple(islice(left, size)):
        yield piece
