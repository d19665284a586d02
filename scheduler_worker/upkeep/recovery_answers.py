"""Queue `scheduler.recoveries` of a cell's bus: a cell whose database was restored asks for what the schedulers and
placement have of it, and one scheduler answers with a page; all share a database, so any does. What cannot be answered
now is dropped: the cell asks again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from bus.bus import Bus
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import DatabaseMark
from bus.contracts.build import ENDED_WITHOUT_MACHINE
from bus.contracts.operations import CellFence
from bus.contracts.placement_queries import CellConsumersPage, CellConsumersQuery, ConsumerRecord
from bus.contracts.recovery import MAX_KNOWN, CellKnown, CellRecovering, KnownPlace
from bus.faults import RequestRefused, Transient
from bus.transport import BusError
from placement_worker.replica.sharing import sharing_of
from scheduler_worker.objects.fence_rules import command
from scheduler_worker.objects.object_registry import ObjectRegistry
from scheduler_worker.placement_client import ClaimPort, PlacementUnavailable, answer_or_raise
from scheduler_worker.records.action_record import ActionContext
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store.port import SchedulerStore
from scheduler_worker.upkeep.recovery_rules import InstanceSources, KnownPage, UuidRange, joined, known_record

log = structlog.get_logger(__name__)

ANSWER_S = 10.0  # of placement
AT_ONCE = 100  # instances whose records are read at a time: a request has up to some ten thousand bytes
ACTIONS = 8  # of one instance, the newest: one is under way at the most, and one may hold its source


class RecoveryAnswers:
    """The answers of one scheduler to one cell."""

    def __init__(
        self,
        store: SchedulerStore,
        claims: ClaimPort,
        registry: ObjectRegistry,
        selector: Selector,
        *,
        bus: Bus,  # the cell's
        api: Bus,  # the bus to placement
    ) -> None:
        self._store = store
        self._claims = claims
        self._registry = registry
        self._selector = selector
        self._bus = bus
        self._api = api

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """A cell asks about itself only."""
        for received in batch:
            question = received.message
            if not isinstance(question, CellRecovering):
                continue
            if question.cell != self._bus.name:
                log.warning("recovery.foreign_cell", cell=self._bus.name, named=question.cell)
                continue
            try:
                await self._bus.publish(await self.answer(question), cause=question.query_id)
            except (Transient, RequestRefused, BusError) as fault:
                log.warning("recovery.not_answered", cell=question.cell, code=fault.code, reason=str(fault))
        return [Done()] * len(batch)

    async def answer(self, question: CellRecovering) -> CellKnown:
        """The page that a question asks for, as of now. Raises Transient, or RequestRefused."""
        await self._registry.reload()
        wanted, marks = await self._wanted(question)
        page = KnownPage(question, wanted, self._fences(question.cell), marks=marks)
        uuids = page.wanted.uuids
        for start in range(0, len(uuids), AT_ONCE):
            if page.is_full:
                break
            part = uuids[start : start + AT_ONCE]
            facts = await self._facts(part)
            own = {} if question.asked else await self._with_instance(question.cell, facts)
            for uuid in part:
                if uuid not in own:
                    page.add(known_record(uuid, facts[uuid], self._host_of, self._selector.config.settings))
        return page.message()

    async def _wanted(self, question: CellRecovering) -> tuple[UuidRange, tuple[DatabaseMark, ...]]:
        """The range of the page, and the marks. Placement first: what is dispatched meanwhile has held something
        before.
        """
        if question.asked:
            return UuidRange(tuple(sorted(set(question.asked)))), ()
        query = CellConsumersQuery(cell=question.cell, after=question.after, limit=MAX_KNOWN)
        try:
            page = await self._api.request(query, CellConsumersPage, timeout_s=ANSWER_S)
        except BusError as error:
            raise PlacementUnavailable(str(error)) from error
        mapped = await self._store.in_cell(question.cell, question.after, MAX_KNOWN)
        wanted = joined(UuidRange(page.consumers, page.last), UuidRange(tuple(mapped.instances), mapped.last))
        return wanted, (page.mark, await self._store.mark_of(question.cell))

    async def _facts(self, uuids: Sequence[str]) -> dict[str, InstanceSources]:
        async with self._store.operation() as unit:
            known = await unit.known([(uuid, uuid) for uuid in uuids])
        actions = await self._store.actions_of(uuids, ACTIONS)
        consumers = sorted({*uuids, *(one.request_id for them in actions.values() for one in them)})
        answers = await self._claims.allocations(consumers)
        by_uuid: Mapping[str, ConsumerRecord] = {
            one.consumer: one for answer in answers if (one := answer_or_raise(answer)) is not None
        }
        return {uuid: InstanceSources(known[uuid, uuid], actions.get(uuid, ()), by_uuid) for uuid in uuids}

    async def _with_instance(self, cell: str, facts: Mapping[str, InstanceSources]) -> set[str]:
        """Those of these consumers that are migrations of instances of the cell, which name them. A client may have had
        an instance built under the id of one.
        """
        actions = {uuid: one.known.action for uuid, one in facts.items() if one.known.build is None}
        instances = sorted({action.instance_uuid for action in actions.values() if action is not None})
        if not instances:
            return set()
        async with self._store.operation() as unit:
            known = await unit.known([(uuid, uuid) for uuid in instances])
        there = [uuid for uuid in instances if _is_in(cell, known[uuid, uuid])]
        newest = await self._store.actions_of(there, ACTIONS)
        return {one.request_id for them in newest.values() for one in them if one.request_id in actions}

    def _fences(self, cell: str) -> list[CellFence]:
        """Of the cell's hosts, and of hosts whose cell is not known."""
        known = self._registry.fences
        there = (uuid for uuid, one in known.items() if one.cell in (None, cell))
        return [command(uuid, known[uuid], self._registry.decision_of(uuid)) for uuid in there]

    def _host_of(self, uuid: str) -> KnownPlace | None:
        replica, table = self._selector.replica, self._selector.table
        row = replica.row_of(uuid)
        is_host = table.index_of(uuid) is not None
        if row is not None and not is_host and row in sharing_of(replica).donors:
            return None
        return KnownPlace(
            host_uuid=uuid, host=self._selector.name_of(uuid), service=table.last_service_of(uuid), allocations={}
        )


def _is_in(cell: str, known: ActionContext) -> bool:
    """Whether the map has an instance in a cell with a machine, so that a page names it."""
    build = known.build
    return build is not None and build.cell == cell and build.state not in ENDED_WITHOUT_MACHINE
