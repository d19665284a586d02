"""Queries compute services whether a host has the machine to which a move is to go back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.cell import MAX_LOOKUP_AT_ONCE, LookUpMachines, MachineLookupResult
from bus.faults import Fault
from cell_conductor.config import ConductorConfig
from cell_conductor.reports.listings import HostListings
from cell_conductor.rules.rollback_rules import answer_about
from cell_conductor.state.events import SourceAnswered, SourceQuery
from cell_conductor.store.port import InstanceStore

log = structlog.get_logger(__name__)


class SourceLookup:
    """One conductor's search for the sources of moves. listings: what the services have reported."""

    def __init__(
        self, store: InstanceStore, bus: Bus, *, clock: Clock, config: ConductorConfig, listings: HostListings
    ) -> None:
        self._store = store
        self._bus = bus
        self._clock = clock
        self._config = config
        self._listings = listings

    async def look_up_sources(self, sources: Mapping[str, SourceQuery]) -> dict[str, SourceAnswered]:
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
