"""The effects of the conductor's messages on its instances. Batches in, one outcome each; the engine does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import structlog
from msgspec import Struct

from bus.bus import Bus
from bus.clock import Clock
from bus.consuming.outcome import DEAD_LETTERED_BY_BROKER, Done, Outcome, Received, Refuse, dead_letter_reason_of
from bus.contracts.base import Message, Refusal
from bus.contracts.cell import (
    MAX_RESCANS,
    CellBuild,
    CellBuildQuery,
    CellDelete,
    CellServiceDelete,
    ComputeHosts,
    ComputeOutcome,
    ComputeResult,
    RescanHosts,
)
from bus.contracts.moves import ActionKind, CellAction, CellActionQuery, CellTransferOut, MachineChanged
from bus.contracts.operations import CellFence

from . import metrics
from .config import ConductorConfig
from .domain.breaker import Listings
from .domain.events import (
    ActionRequested,
    BuildRequested,
    ChangeEnded,
    DeleteRequested,
    Destroyed,
    Event,
    InstanceEvent,
    MachineRunning,
    Spawned,
    SpawnFailed,
    TransferEnded,
    TransferRequested,
    action_event,
)
from .domain.report import Differences, NewestReports, Rescans, differences
from .engine import Engine, Listening
from .fences import FenceController
from .guard import HostOwners, ReportGuard
from .lease_keeper import LeaseController
from .store.port import InstanceStore

E = TypeVar("E", bound=Event)
log = structlog.get_logger(__name__)

DONE = Done()
DEAD_LETTER_QUEUE = "conductor.dead_letters"
LOST = Refusal(code="build.lost", reason="no compute service that is up has a machine of it")
LOGGED_HOSTS = 10  # of one page


class RequestHandlers:
    """Queues conductor.requests, .given_up and .results. They carry requests for instances, and results of attempts."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        bus: Bus,
        *,
        fences: FenceController,
        leases: LeaseController,
    ) -> None:
        """`bus`: the cell's, on which checks for other cells are passed on."""
        self._bus = bus
        self._leases = leases
        self._engine = engine
        self._clock = clock
        self._fences = fences

    async def requests(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """CellBuild, CellAction, CellDelete, and queries of them; CellFence, which is handled first, because the others
        depend on it; and CellServiceDelete, which is handled last: no build waits for it.
        """
        decisions = [one.message for one in batch if isinstance(one.message, CellFence)]
        if decisions:
            await self._fences.take(decisions, self._engine)
        elif any(_is_evacuation(one.message) for one in batch):
            await self._fences.load()  # another conductor may have taken the fence a moment ago
        rest = [one for one in batch if not isinstance(one.message, CellFence | CellServiceDelete)]
        handled = iter(await self._take(rest, "requests") if rest else ())
        outcomes: list[Outcome] = []
        for received in batch:
            if isinstance(received.message, CellServiceDelete):
                outcomes.append(await self._delete_service(received, received.message))
            else:
                outcomes.append(DONE if isinstance(received.message, CellFence) else next(handled))
        return outcomes

    async def _delete_service(self, received: Received, command: CellServiceDelete) -> Outcome:
        if received.is_late():
            return DONE  # its operator has been answered that this cell did not answer
        return await self._leases.delete(command)

    async def dead_letters(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Queue conductor.dead_letters: a dead-lettered build or action ends with one event, and is not started."""
        # A delete is tried once more, without the messages that it came with.
        return await self._take(batch, "dead_letters")

    async def results(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """ComputeResult and MachineChanged."""
        return await self._take(batch, "results")

    async def _take(self, batch: Sequence[Received], source: str) -> list[Outcome]:
        at = self._clock.time()
        outcomes: list[Outcome] = []
        incoming: list[InstanceEvent] = []
        for received in batch:
            is_query = isinstance(received.message, CellBuildQuery | CellActionQuery)
            if is_query and not self._engine.acts:  # it comes again: what it is about may wait behind it
                outcomes.append(DONE)
                continue
            instance_event = _instance_event(received, at)
            if instance_event is None:
                outcomes.append(Refuse("message.unexpected", type(received.message).__name__))
            else:
                outcomes.append(DONE)
                incoming.append(instance_event)
        flushed = await self._engine.take(incoming, source=source) if incoming else None
        if flushed is None:
            return outcomes
        return [Done(after=flushed) if outcome is DONE else outcome for outcome in outcomes]


class HostHandlers:
    """Queue conductor.hosts.{process}: compare the machines of hosts with the record, and repair the difference."""

    def __init__(
        self,
        engine: Engine,
        store: InstanceStore,
        clock: Clock,
        config: ConductorConfig,
        bus: Bus,
        *,
        listings: Listings,
        fences: FenceController,
        leases: LeaseController,
    ) -> None:
        """listings: what it receives. leases: which services are up, and which are gone for good."""
        self._engine = engine
        self._store = store
        self._clock = clock
        self._config = config
        self._newest = NewestReports()
        self._listings = listings
        self._host_conflicts: dict[str, frozenset[str]] = {}
        self._up, self._stated = leases.up, leases.stated
        self._record_superseded = leases.record_superseded
        self._fences = fences
        self._guard = ReportGuard(
            store, bus, clock, config, effective=engine.effective, adopt=engine.adopt_machine, may_have=self._may_have
        )
        self._bus = bus
        self._owners = HostOwners(bus, listings, leases)

    async def hosts(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """ComputeHosts. Raises Listening."""
        if not self._stated().may_act:
            raise Listening
        for received in batch:
            message = received.message
            if not isinstance(message, ComputeHosts):
                continue
            if self._store.is_recovering:  # by its records no machine is judged; another report comes
                self._listings.record(message)
                continue
            if self._newest.is_newer(message):
                await self._compare(message)
                self._newest.record(message)
            elif message.epoch < (newest := self._newest.epoch(message.service)):
                self._record_superseded(message.service, newest)
        return [Done()] * len(batch)

    async def _compare(self, report: ComputeHosts) -> None:
        self._record_listed(report)
        report = await self._owners.answer(report)
        rescans: list[tuple[str, str]] = []
        listed = [host for host in report.hosts if host.running is not None]
        blocked = set[str]()
        if listed:
            running = sorted({one.instance_uuid for host in listed for one in host.running or ()})
            summaries = await self._store.summaries([host.uuid for host in listed], running)
            await self._fences.ensure_loaded()
            fenced = self._fences.fences
            rescans = await self._fences.compare(
                report, summaries, self._store.database_id, self._owners.has_changed_owner
            )
            protected = {(host, one.uuid) for one in summaries for host in one.protected_hosts}
            blocked = {one.uuid for one in summaries if one.blocked_reason}
            found = differences(
                report,
                summaries,
                now=self._clock.time(),
                grace_s=self._config.report_grace_s,
                database_id=self._store.database_id,
                may_have=self._may_have,
                fenced=fenced,
            )
        else:
            found, protected = Differences(), set()
        await self._take(report.service, found.events)
        await self._guard.reserve(report, found.unknown_machines)
        rescans += await self._guard.delete_resolved(report, found.unknown_machines, protected, blocked)
        destructive = await self._guard.assess(report, found)
        await self._take(report.service, destructive)
        rescans = [*rescans, *_of_hosts(found.rescans)]
        # A scan does not end a demand whose event is blocked: such demands would fill the bounded request, each time.
        if found.destructive_rescans and not await self._guard.is_open(report.service):
            rescans += _of_hosts(found.destructive_rescans)
        await self._request_rescan(report, rescans)

    def _may_have(self, service: str, host: str) -> bool:
        return not self._owners.has_changed_owner(host, service)

    def _record_listed(self, report: ComputeHosts) -> None:
        """Log and count the hosts of this report that another service which is up lists, too, when that changes."""
        self._listings.record(report)
        found = self._listings.conflicts(report, self._up() or ())
        listed = {host.uuid for host in report.hosts}
        before = self._host_conflicts.get(report.service, frozenset())
        now = {uuid for uuid in before - listed if self._listings.may_have(report.service, uuid)} | found.keys()
        if now == before:
            return
        self._host_conflicts[report.service] = frozenset(now)
        metrics.HOST_CONFLICTS.labels(report.service).set(len(now))
        for host in sorted(found.keys() - before)[:LOGGED_HOSTS]:
            log.error(
                "host.reported_twice",
                host=host,
                service=report.service,
                other=found[host],
                hosts=len(found),
                cause=host,
                hint="two compute services that are up report a host of this uuid: stop one of them. Until then no"
                " report of one of them shows that a machine of the other one is lost",
            )

    async def _request_rescan(self, report: ComputeHosts, rescans: Sequence[tuple[str, str]]) -> None:
        """Request a later scan of hosts that another service reported, if only that shows which machines are lost."""
        if not rescans:
            return
        bounded = rescans[:MAX_RESCANS]
        metrics.RESCANS.labels(report.service).inc(len(bounded))
        command = RescanHosts(
            service=report.service,
            hosts=tuple(dict.fromkeys(host for host, _ in bounded)),
            rescans=tuple(dict.fromkeys(rescan for _, rescan in bounded)),
        )
        await self._bus.publish(command, cause=report.service)

    async def _take(self, service: str, events: Sequence[tuple[str, Event]]) -> None:
        incoming = [InstanceEvent(uuid, event) for uuid, event in events]
        for start in range(0, len(incoming), self._config.max_batch):
            piece = incoming[start : start + self._config.max_batch]
            for instance_event in piece:
                kind = "runs" if isinstance(instance_event.event, MachineRunning) else "missing"
                metrics.REPAIRED.labels(kind).inc()
                log.info("instance.differs", instance=instance_event.uuid, kind=kind, service=service)
            flushed = await self._engine.take(piece, source="reports")
            if flushed is not None:
                await flushed


def _of_hosts(rescans: Rescans) -> list[tuple[str, str]]:
    return [(host, rescan) for (host, _), rescan in rescans.items()]


def _is_evacuation(message: Message) -> bool:
    return isinstance(message, CellAction) and message.kind is ActionKind.EVACUATE


def _instance_event(received: Received, at: float) -> InstanceEvent | None:
    """The event that a message brings; None: not a message of these queues."""
    message, meta = received.message, received.meta
    uuid = ""
    event: Event | None = None
    if isinstance(message, CellBuild):
        uuid = message.spec.instance_uuid
        event = build_requested(message, at, meta.cause or uuid, _dead_letter_reason(received))
    elif isinstance(message, CellBuildQuery):
        uuid = message.spec.instance_uuid
        event = build_queried(message, at, meta.cause)
    elif isinstance(message, CellDelete):
        uuid = message.instance_uuid
        event = _event(DeleteRequested, message, at, cause=meta.cause or uuid)
    elif isinstance(message, CellAction):
        uuid = message.instance_uuid
        event = action_event(
            message, at, meta.cause or message.request_id, dead_letter_reason=_dead_letter_reason(received)
        )
    elif isinstance(message, CellActionQuery):
        uuid, event = message.instance_uuid, action_queried(message, at, meta.cause)
    elif isinstance(message, CellTransferOut):
        uuid, event = message.instance_uuid, transfer_event(message, at, meta.cause, _dead_letter_reason(received))
    elif isinstance(message, MachineChanged):
        uuid, event = message.instance_uuid, _event(ChangeEnded, message, at)
    elif isinstance(message, ComputeResult):
        uuid, event = message.instance_uuid, _result(message, at)
    return None if event is None else InstanceEvent(uuid, event, meta.id, meta.cause)


def _dead_letter_reason(received: Received) -> Refusal | None:
    """Why a request is not carried out any more; None: it is carried out."""
    return dead_letter_reason_of(received) or (DEAD_LETTERED_BY_BROKER if received.queue == DEAD_LETTER_QUEUE else None)


def _common(message: Message, kind: type[Struct]) -> dict[str, Any]:
    """The fields of a message that a struct of this kind has as well."""
    return {name: getattr(message, name) for name in kind.__struct_fields__ if name in message.__struct_fields__}


def _event(kind: type[E], message: Message, at: float, **other: Any) -> E:
    """The event that a message brings: the fields of both, and those that the event alone has."""
    return kind(**{**_common(message, kind), **other, "at": at})


def build_requested(
    message: CellBuild, at: float, cause: str, dead_letter_reason: Refusal | None = None
) -> BuildRequested:
    """The event that a CellBuild brings."""
    return _event(BuildRequested, message, at, cause=cause, dead_letter_reason=dead_letter_reason)


def build_queried(message: CellBuildQuery, at: float, cause: str = "") -> BuildRequested:
    """The event that a CellBuildQuery brings: a build that is not started any more."""
    nothing: dict[str, Any] = {"selections": (), "consumer_generation": None}
    cause = cause or message.spec.instance_uuid
    return _event(BuildRequested, message, at, cause=cause, dead_letter_reason=LOST, is_query=True, **nothing)


def action_queried(message: CellActionQuery, at: float, cause: str = "") -> ActionRequested:
    """The event that a CellActionQuery brings."""
    return action_event(CellAction(**_common(message, CellAction)), at, cause or message.request_id, is_query=True)


def transfer_event(
    message: CellTransferOut, at: float, cause: str = "", dead_letter_reason: Refusal | None = None
) -> Event:
    """The event that a CellDepart brings."""
    if message.ended:
        return _event(TransferEnded, message, at)
    request, cause = CellAction(**_common(message, CellAction), offload=True), cause or message.request_id
    if dead_letter_reason is not None:
        return action_event(request, at, cause, dead_letter_reason=dead_letter_reason)
    return TransferRequested(at=at, request=request, cause=cause, attempt=message.attempt)


def _result(message: ComputeResult, at: float) -> Event:
    match message.outcome:
        case ComputeOutcome.ACTIVE:
            return _event(Spawned, message, at, warning=message.reason, ended_at=message.at)
        case ComputeOutcome.FAILED:
            return _event(SpawnFailed, message, at, code=message.code or "spawn.failed", ended_at=message.at)
        case ComputeOutcome.DESTROYED:
            return _event(Destroyed, message, at)
