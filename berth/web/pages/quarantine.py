"""The HTTP API of `/api/v1/quarantine` and `/api/v1/breakers`: what berth does not destroy without an operator.

Read from the cells' records in the database, which schedulers do not have.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec
from msgspec import Struct
from starlette.requests import Request

from berth.audit import quarantine as records
from berth.audit import recoveries
from berth.audit.quarantine import InCells
from berth.client.types import (
    BreakersAfterReset,
    BreakersReset,
    BreakerView,
    LossesAccepted,
    QuarantineDecided,
    QuarantineDecision,
    QuarantinedMachine,
    QuarantinePage,
    Recovery,
    SeenBreaker,
    SeenMachine,
    Undecided,
    WithoutService,
)
from berth.web.api import Handlers, caller_of, converted, number_of, object_of, parsed, route, truth_of
from berth.web.pages.fleet import PAGE_TIMEOUT_S
from berth.web.problems import Problem
from berth.web.sign_in_sessions import WebRole
from bus.contracts.base import Word
from bus.faults import DatabaseUnavailable, Fault, Forbidden, Transient
from bus.service.environment import Environment, NotConfigured
from bus.service.settings import SettingsError
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.unknown_machine import UnknownMachineKind
from cell_conductor.store.keyed_tables import ADOPT, PROTECT, DecidedMachine, MachineKey, UnknownMachineRecord

MAX_SHOWN = 10_000
# At once: each opens connections to every cell's database and reads all that is on record there.
MAX_READS = 2


class SafetyCounts(Struct, frozen=True):
    """What waits for an operator: machines in quarantine, less those that one keeps, by cell; services whose breakers
    are open, by cell.
    """

    quarantined: dict[str, int]
    breakers: dict[str, tuple[str, ...]]
    never_started: tuple[str, ...] = ()


class SafetyReader:
    """Reads and decides. Raises Problem 404 for a cell that is not known, 503 where the database cannot be read."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._reads = asyncio.Semaphore(MAX_READS)

    async def counts(self) -> SafetyCounts:
        """What waits for an operator, by cell."""
        return _counted(await self.read())

    async def read(self, cell: str | None = None) -> InCells:
        """Everything on record, of all cells or of one."""
        async with self._reads, _as_problems():
            return await records.read(self._env, cell)

    async def recoveries(self, cell: str | None = None) -> list[Recovery]:
        """The recoveries of cells whose database was restored."""
        async with self._reads, _as_problems():
            async with asyncio.timeout(PAGE_TIMEOUT_S):
                return await recoveries.read(self._env, cell)

    async def go_on_without(self, cell: str, body: WithoutService, actor: str) -> Recovery:
        """State that a compute service has no machine. Raises Problem 409: it is up."""
        async with _as_problems():
            if not await recoveries.state_without(self._env, cell, body.service, actor, body.reason):
                reason = f"the compute service {body.service} of {cell} is up: it lists by itself"
                raise Problem(409, "recovery.not_without", reason)
        (found,) = await self.recoveries(cell)
        return found

    async def accept_losses(self, cell: str, seen: LossesAccepted, actor: str) -> Recovery:
        """Have a cell recover though it loses what was seen. Raises Problem 409: it waits for no such decision."""
        (found,) = await self.recoveries(cell)
        is_as_seen = (found.database_incarnation, found.losses.count) == (seen.database_incarnation, seen.losses)
        async with _as_problems():
            if not (found.is_waiting and is_as_seen and await recoveries.accept(self._env, found, actor, seen.reason)):
                raise Problem(
                    409, "recovery.not_waiting", f"the recovery of {cell} is not as it was seen: read it again"
                )
        return found

    async def page(
        self,
        *,
        cell: str | None,
        service: str | None,
        decided: bool | None,
        after: str | None,
        limit: int,
        instance: str | None = None,
        foreign: bool = False,
    ) -> QuarantinePage:
        """Machines in quarantine from this place on. foreign: also those of other databases."""
        kinds = tuple(UnknownMachineKind) if foreign else (UnknownMachineKind.QUARANTINED,)
        read = await self.read(cell)
        found = [
            _machine(name, one)
            for name, one in read.machines(*kinds)
            if service in (None, one.service)
            and instance in (None, one.machine.uuid)
            and decided in (None, bool(one.decision))
        ]
        found.sort(key=_place)
        rest = found if after is None else [one for one in found if _place(one) > after]
        following = _place(rest[limit - 1]) if len(rest) > limit else None
        return QuarantinePage(tuple(rest[:limit]), len(found), following, read.never_started)

    async def breakers(self, cell: str | None, is_open: bool | None) -> list[BreakerView]:
        """The breakers that ever tripped, the open ones first, without their machines."""
        read = await self.read(cell)
        found = [_breaker(name, one) for name, of in read.breakers.items() for one in of]
        shown = [one for one in found if is_open in (None, one.open)]
        return sorted(shown, key=lambda one: (not one.open, one.cell, one.service))

    async def breaker(self, cell: str, service: str) -> BreakerView:
        """One of them, with its machines. Raises Problem 404."""
        of_cell = (await self.read(cell)).breakers[cell]
        found = next((one for one in of_cell if one.service == service), None)
        if found is None:
            raise Problem(404, "breaker.unknown", f"no breaker of {service[:64]} has ever tripped in {cell}")
        return msgspec.structs.replace(_breaker(cell, found), machines=found.machines)

    async def decide(self, decision: QuarantineDecision, actor: str) -> QuarantineDecided:
        """Put the decision on record, for each machine that is as it was seen."""
        if decision.decision == ADOPT:
            if not decision.reason:
                raise Problem(400, "request.invalid", "an adoption needs a reason")
            async with _as_problems():
                seen = {one.place: (one.cell, one.attempt) for one in decision.machines}
                adopted, refused = await records.adopt(
                    self._env, list(seen), actor=actor, reason=decision.reason, seen=seen
                )
            return _decided(decision.machines, {(cell, *place) for place, cell in adopted.items()}, refused)
        of_cells: dict[str, list[DecidedMachine]] = defaultdict(list)
        for one in decision.machines:
            of_cells[one.cell].append(DecidedMachine(one.instance_uuid, one.host_uuid, one.attempt))
        async with _as_problems():
            found, faults = await records.decide(self._env, of_cells, decision.decision, actor)
        refused = {one.place: faults[one.cell] for one in decision.machines if one.cell in faults}
        return _decided(decision.machines, {(cell, *place) for cell, of in found.items() for place in of}, refused)

    async def reset(self, breakers: Sequence[SeenBreaker], actor: str) -> BreakersAfterReset:
        """Reset those that are as they were seen."""
        async with _as_problems():
            done, faults = await records.reset(self._env, [one.tripped for one in breakers], actor)
        return BreakersAfterReset(
            tuple(one for one in breakers if done.get(one.tripped)),
            tuple(one for one in breakers if done.get(one.tripped) is False),
            tuple(one for one in breakers if one.tripped in faults),
        )


_FOUND_BY = ("cell", "service", "instance", "decided", "foreign")


class WebQuarantine(Handlers):
    """The handlers."""

    def __init__(self, safety: SafetyReader) -> None:
        self._safety = safety

    @route("GET", "/quarantine", *_FOUND_BY, "after", "limit", role=WebRole.READER)
    async def list_quarantine(self, request: Request) -> object:
        """Machines in quarantine: ?cell=&service=&instance=&decided=true|false&foreign=true&after=&limit=. Not for
        role project.
        """
        query = request.query_params
        return await self._safety.page(
            cell=query.get("cell"),
            service=query.get("service"),
            instance=query.get("instance"),
            decided=truth_of(request, "decided"),
            foreign=truth_of(request, "foreign") or False,
            after=query.get("after"),
            limit=number_of(request, "limit", 1_000, most=MAX_SHOWN),
        )

    @route("POST", "/quarantine/decide", role=WebRole.OPERATOR)
    async def decide_quarantine(self, request: Request) -> object:
        """Decide about many machines in quarantine at once: destroy, protect, or adopt. For operators."""
        decision = converted(await object_of(request), QuarantineDecision)
        return await self._safety.decide(decision, caller_of(request).name)

    @route("GET", "/breakers", "cell", "open", role=WebRole.READER)
    async def list_breakers(self, request: Request) -> object:
        """The breakers that ever tripped: ?cell=&open=true|false. Not for role project."""
        return await self._safety.breakers(request.query_params.get("cell"), truth_of(request, "open"))

    @route("GET", "/breakers/{cell}/{service}", role=WebRole.READER)
    async def show_breaker(self, request: Request) -> object:
        """One breaker, with the machines that tripped it. Not for role project."""
        named = request.path_params
        cell, service = parsed(lambda: msgspec.convert((named["cell"], named["service"]), tuple[Word, Word]))
        return await self._safety.breaker(cell, service)

    @route("POST", "/breakers/reset", role=WebRole.OPERATOR)
    async def reset_breakers(self, request: Request) -> object:
        """Allow what tripped these breakers: it may be destroyed or counted as lost. For operators."""
        body = converted(await object_of(request), BreakersReset)
        return await self._safety.reset(body.breakers, caller_of(request).name)

    @route("GET", "/recoveries", role=WebRole.READER)
    async def list_recoveries(self, request: Request) -> object:
        """The recoveries of cells whose database was restored, and what each would lose. Not for role project."""
        return await self._safety.recoveries()

    @route("POST", "/recoveries/{cell}/without", role=WebRole.OPERATOR)
    async def go_on_without(self, request: Request) -> object:
        """State that a decommissioned compute service has no machine: what waits for its hosts goes on. For
        operators.
        """
        cell = parsed(lambda: msgspec.convert(request.path_params["cell"], Word))
        body = converted(await object_of(request), WithoutService)
        return await self._safety.go_on_without(cell, body, caller_of(request).name)

    @route("POST", "/recoveries/{cell}/accept", role=WebRole.OPERATOR)
    async def accept_losses(self, request: Request) -> object:
        """Have a cell recover though it loses these instances, as they were seen. For operators."""
        cell = parsed(lambda: msgspec.convert(request.path_params["cell"], Word))
        seen = converted(await object_of(request), LossesAccepted)
        return await self._safety.accept_losses(cell, seen, caller_of(request).name)


def _counted(read: InCells) -> SafetyCounts:
    waiting: dict[str, int] = defaultdict(int)
    for cell, one in read.machines(UnknownMachineKind.QUARANTINED):
        waiting[cell] += one.decision != PROTECT
    tripped = {cell: tuple(one.service for one in of if one.is_open) for cell, of in read.breakers.items()}
    return SafetyCounts(
        {cell: count for cell, count in waiting.items() if count},
        {cell: services for cell, services in tripped.items() if services},
        read.never_started,
    )


def _machine(cell: str, one: UnknownMachineRecord) -> QuarantinedMachine:
    return QuarantinedMachine(
        cell=cell,
        host_uuid=one.machine.host_uuid,
        instance_uuid=one.machine.uuid,
        attempt=one.machine.attempt,
        service=one.service,
        kind=one.machine.kind.value,
        reason=one.machine.reason,
        first_seen=one.first_seen,
        last_seen=one.last_seen,
        decision=one.decision,
        decided_by=one.decided_by,
        decided_at=one.decided_at,
    )


def _place(one: QuarantinedMachine) -> str:
    return f"{one.cell}/{one.host_uuid}/{one.instance_uuid}"


def _breaker(cell: str, one: Breaker) -> BreakerView:
    return BreakerView(
        cell=cell,
        service=one.service,
        open=one.is_open,
        tripped_at=one.tripped_at,
        lost=one.lost,
        quarantined=one.quarantined,
        over=one.over,
        reset_at=one.reset_at,
        reset_by=one.reset_by,
    )


def _decided(
    machines: Sequence[SeenMachine],
    decided: Collection[tuple[str, str, str]],
    refused: Mapping[MachineKey, Fault],
) -> QuarantineDecided:
    left = [
        (one, refused.get(one.place) or records.unknown(one.instance_uuid, one.host_uuid))
        for one in machines
        if (one.cell, *one.place) not in decided
    ]
    return QuarantineDecided(
        tuple(one.instance_uuid for one in machines if (one.cell, *one.place) in decided),
        tuple(Undecided(one.host_uuid, one.instance_uuid, reason.code, str(reason)) for one, reason in left),
    )


@asynccontextmanager
async def _as_problems() -> AsyncIterator[None]:
    """What is wrong with the database of these pages is no fault of their caller."""
    try:
        yield
    except (SettingsError, records.CellNeverStarted) as fault:
        raise Problem(404, fault.code, str(fault)) from fault
    except (NotConfigured, Forbidden, Transient) as fault:
        raise Problem(503, fault.code, f"the cells' records cannot be read: {fault}") from fault
    except TimeoutError as late:
        words = f"the cells' records cannot be read: no answer within {PAGE_TIMEOUT_S:g} s"
        raise Problem(503, DatabaseUnavailable.code, words) from late
