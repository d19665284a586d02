"""Keeps the state of Nova fresh: polls Nova's REST API, takes the fanout casts of its services, asks for unknown
hosts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import structlog

from bus.clock import Clock
from bus.contracts.base import Uuid, reason_of
from bus.faults import Fault
from nova_scheduler.cloud.api_config import NovaApiConfig
from nova_scheduler.cloud.cells import CellMap
from nova_scheduler.cloud.rest import AggregateRow, NovaApi, NovaRefused, NovaUnavailable
from nova_scheduler.cloud.state import NovaState
from scheduler_worker.hosts.host_table import HostTable

log = structlog.get_logger(__name__)

MAX_ASKED = 32  # unknown root providers that are asked for one by one; for more, all compute nodes are read
# The task states of servers that Nova's conductor asks a scheduler about: boot, resize and cold migration, live
# migration, evacuation and rebuild, unshelve.
WAITING = frozenset({"scheduling", "resize_prep", "migrating", "rebuilding", "unshelving"})
ASK_AGAIN_S = 1.0  # between two reads that a request without a host causes
ASK_LIMIT_S = 5.0  # that such a request waits for Nova's API: it has one of the places of all calls
MAX_LOGGED = 20  # names of hosts in one line of the log
MAX_CAST = 100_000  # aggregates of one cast

AGGREGATE, AGGREGATES = "Aggregate", "AggregateList"


class NovaStateUpdates(Protocol):
    """What the RPC server and the placer need of the keeper (`NovaStatePoller`)."""

    def apply_cast(self, method: str, arguments: Mapping[str, object]) -> bool:
        """Take one cast of CASTS in. False: it cannot be read; it is logged, and changes nothing."""
        ...

    async def prepare(self, new: Collection[str] = ()) -> None:
        """Before a call is decided: states that are old enough for it are read, and the compute nodes of these root
        providers. When Nova does not answer in time what is known counts.
        """
        ...

    async def ask(self, unknown: Collection[str] = ()) -> bool:
        """Before "no valid host" is final: read services, aggregates, and these root providers' compute nodes now;
        whether a fact has changed. Callers share one read, at most one a second. False also when Nova does not answer
        in time.
        """
        ...

    async def waits_for_host(self, instances: Sequence[str]) -> bool:
        """Whether one of these instances still waits for a host, or may: Nova does not tell it to this user. Raises
        NovaUnavailable.
        """
        ...


class CastUnreadable(ValueError):
    """A cast that is no cast of Nova's."""


class NovaStatePoller:
    """Of one process. `first`: all of it has been read once."""

    def __init__(
        self,
        api: NovaApi,
        nova_state: NovaState,
        table: HostTable,
        *,
        cells: CellMap,
        config: NovaApiConfig,
        clock: Clock,
    ) -> None:
        self._api = api
        self._nova_state = nova_state
        self._table = table
        self._cells = cells
        self._without_cell: tuple[str, ...] = ()  # as it was logged
        self._config = config
        self._clock = clock
        # States are read apart from compute nodes, which may be many: no call waits for these that has no need of them.
        self._reading = asyncio.Lock()
        self._asking = asyncio.Lock()
        self._announcing = asyncio.Lock()
        self._listing: asyncio.Task[bool] | None = None  # of all compute nodes
        self._read_s = -math.inf  # when the last read of states began, one under way or failed too
        self._known_s = -math.inf  # when the read began that what is known is of
        self._nodes_due_s = -math.inf
        # Changed by casts since the poll under way began: its answer may be older than they are.
        self._cast_aggregates: set[str] = set()
        self._without_nodes: frozenset[str] = frozenset()
        self._no_nodes: set[str] = set()  # root providers that Nova has no compute node for
        self.first = asyncio.Event()

    # --- polling

    async def run(self) -> None:
        """Poll until cancelled. What cannot be read is read at the next poll; what is known counts until then."""
        try:
            while True:
                try:
                    async with self._reading:
                        await self._read_states()
                    if self._is_list_due():
                        self._list_nodes()
                except Fault as fault:
                    self._log_unread(fault)
                await self._clock.sleep(self._config.poll_interval_s)
                if self._listing is not None and self._listing.done():
                    self._listing.result()
        finally:
            if self._listing is not None:
                self._listing.cancel()
                await asyncio.gather(self._listing, return_exceptions=True)

    def _log_unread(self, fault: Fault) -> None:
        log.warning("nova.unread", code=fault.code, why=fault.reason)

    async def _read_states(self) -> None:
        self._read_s = began_s = self._clock.monotonic()  # failed or not, it is not read again at once
        self._cast_aggregates.clear()
        self._nova_state.put_services(await self._api.services(), complete=True)
        try:
            aggregates = await self._api.aggregates()
        except NovaRefused:  # the states of services are newer all the same
            await self._announce()
            raise
        self._nova_state.put_aggregates(aggregates, complete=True, but=self._cast_aggregates)
        await self._announce()
        self._known_s = began_s

    def _is_list_due(self) -> bool:
        return self._clock.monotonic() >= self._nodes_due_s or self._nova_state.without_nodes() != self._without_nodes

    def _list_nodes(self) -> asyncio.Task[bool]:
        """The read of all compute nodes, whether it has succeeded: the one under way, or a new one. It goes on when who
        waits for it has ended.
        """
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._read_nodes(), name="nova nodes")
        return self._listing

    async def _read_nodes(self) -> bool:
        began_s, before = self._clock.monotonic(), self._nova_state.recorded_nodes()
        try:
            found = await self._api.nodes()
            self._nova_state.put_services([service for _, service in found], complete=False)
            self._nova_state.put_nodes([node for node, _ in found], complete=True, among=before)
            self._nodes_due_s = began_s + self._config.hosts_interval_s
            self._without_nodes = self._nova_state.without_nodes()
            self._no_nodes.clear()
            await self._announce()
        except Fault as fault:
            self._log_unread(fault)
            return False
        self.first.set()
        return True

    async def prepare(self, new: Collection[str] = ()) -> None:
        """As NovaStateUpdates has it."""
        oldest_s = self._clock.monotonic() - self._config.states_max_age_s
        if new or self._known_s < oldest_s:
            await self._read_since(oldest_s, new)

    async def ask(self, unknown: Collection[str] = ()) -> bool:
        """As NovaStateUpdates has it."""
        before = self._state()
        await self._read_since(self._clock.monotonic() - ASK_AGAIN_S, unknown)
        return self._state() != before

    async def _read_since(self, oldest_s: float, unknown: Collection[str]) -> None:
        """Have the states of a read that began at this time or later, if Nova answers in time."""
        try:
            async with asyncio.timeout(ASK_LIMIT_S):
                if self._known_s < oldest_s:
                    async with self._reading:
                        if self._read_s < oldest_s:
                            await self._read_states()
                if unknown:
                    async with self._asking:
                        await self._read_unknown(unknown)
        except TimeoutError:
            self._log_unread(NovaUnavailable(f"no answer within {ASK_LIMIT_S:g} s"))
        except Fault as fault:
            self._log_unread(fault)

    async def waits_for_host(self, instances: Sequence[str]) -> bool:
        """As NovaStateUpdates has it. One after the other until one waits: users may have deleted all others."""
        try:
            for one in dict.fromkeys(instances):
                if await self._api.task_of(one) in WAITING:
                    return True
        except NovaRefused as fault:
            self._log_unread(fault)
            return True
        return False

    async def _read_unknown(self, roots: Collection[str]) -> None:
        unknown = self._to_ask_for(roots)
        if len(unknown) > MAX_ASKED and self._listing is not None and not self._listing.done():
            await asyncio.shield(self._listing)  # it may have begun before they came
            unknown = self._to_ask_for(unknown)
        if len(unknown) > MAX_ASKED:
            if await asyncio.shield(self._list_nodes()):
                self._no_nodes.update(self._nova_state.unknown(unknown))
            return
        for uuid in unknown:
            found = await self._api.node(uuid)
            if found is None:
                self._no_nodes.add(uuid)
            else:
                self._nova_state.put_services([found[1]], complete=False)
                self._nova_state.put_nodes([found[0]], complete=False)
        if unknown:
            await self._announce()

    def _to_ask_for(self, roots: Collection[str]) -> list[str]:
        return [uuid for uuid in self._nova_state.unknown(roots) if uuid not in self._no_nodes]

    def _state(self) -> tuple[int, int]:
        return self._nova_state.version, self._table.revision

    async def _announce(self) -> None:
        async with self._announcing:
            self._nova_state.put_cells(await self._cells.of_hosts(self._nova_state.hosts()))
            self._table.disabled_cells = self._cells.disabled
        without = self._nova_state.without_cell()
        if without and without != self._without_cell:
            log.warning("nova.hosts_without_cell", hosts=without[:MAX_LOGGED], count=len(without))
        self._without_cell = without
        self._nova_state.announce(self._clock.monotonic())

    # --- casts

    def apply_cast(self, method: str, arguments: Mapping[str, object]) -> bool:
        """As NovaStateUpdates has it."""
        take = CASTS[method]
        if take is None:
            return True
        try:
            take(self, arguments)
        except (CastUnreadable, msgspec.ValidationError) as error:
            log.warning("nova.cast_unreadable", cast=method, why=reason_of(error))
            return False
        return True

    def _update_aggregates(self, arguments: Mapping[str, object]) -> None:
        given = _objects(arguments.get("aggregates"), AGGREGATE, AGGREGATES)
        found = [msgspec.convert(one, AggregateRow).as_state() for one in given]
        self._cast_aggregates.update(one.uuid for one in found)
        self._nova_state.put_aggregates(found, complete=False)

    def _delete_aggregate(self, arguments: Mapping[str, object]) -> None:
        for one in _objects(arguments.get("aggregate"), AGGREGATE, AGGREGATES):
            uuid = _uuid(one.get("uuid"))
            self._cast_aggregates.add(uuid)
            self._nova_state.drop_aggregate(uuid)


# The casts of topic `scheduler`; every scheduler receives them by its fanout queue. None: it is no fact, as placement
# tells where instances are.
CASTS: Mapping[str, Callable[[NovaStatePoller, Mapping[str, object]], None] | None] = {
    "update_aggregates": NovaStatePoller._update_aggregates,
    "delete_aggregate": NovaStatePoller._delete_aggregate,
    "update_instance_info": None,
    "delete_instance_info": None,
    "sync_instance_info": None,
}


def _objects(primitive: object, one: str, several: str) -> Iterable[Mapping[str, Any]]:
    """The fields of one versioned object, or of each of some: Nova sends them as a list object and as a plain list.

    Raises CastUnreadable.
    """
    members = [primitive]
    if isinstance(primitive, list) and primitive:
        members = _list(primitive)
    elif (whole := _object(primitive))[0] == several:
        members = _list(whole[1].get("objects"))
    listed = [_object(member) for member in members]
    if any(found != one for found, _ in listed):
        raise CastUnreadable(f"it is no {one} and no {several}")
    return [fields for _, fields in listed]


def _object(primitive: object) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(primitive, dict):
        raise CastUnreadable("it has no versioned object")
    name, data = primitive.get("nova_object.name"), primitive.get("nova_object.data")
    if not isinstance(name, str) or not isinstance(data, dict):
        raise CastUnreadable("it has no versioned object")
    return name, data


def _list(given: object) -> list[Any]:
    if not isinstance(given, list) or len(given) > MAX_CAST:
        raise CastUnreadable(f"it has no list of at most {MAX_CAST}")
    return given


def _uuid(given: object) -> str:
    return msgspec.convert(given, Uuid)
