"""How actions are scheduled: check against the record, without locks; choose hosts; write request, event and command in
one transaction, after a check that nothing has changed. Nothing is claimed here: the cell's conductor claims, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from bus.bus import API
from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Retry, RetryWhenAvailable
from bus.contracts.actions import ActionKind, ActionRequest, ActionState, CellAction, CellTransferOut
from bus.contracts.base import MAX_REASON, Refusal
from bus.faults import Fault
from bus.persistence.outbox import OutboxMessage
from bus.yielding import yield_to_loop
from scheduler_worker import metrics as metrics_module
from scheduler_worker.action.action_checks import (
    CHANGED,
    accepted,
    check_action,
    in_progress,
    needs_hosts,
    superseded_refusal,
)
from scheduler_worker.action.destination import Chosen, DestinationChooser
from scheduler_worker.action.destination_request import Located, build_request_for, limits_of
from scheduler_worker.action.pending_action import PendingAction, record_of
from scheduler_worker.build.decision import NO_HOST, instance_spec
from scheduler_worker.build.host_search import HostSearchRefused, result_of_fault
from scheduler_worker.build.pending_build import Answered
from scheduler_worker.build.quota import Rooms, rooms_of
from scheduler_worker.placement_client import PlacementUnavailable
from scheduler_worker.records.action_record import (
    ActionContext,
    RecordedAction,
    RequestKey,
    WrittenActions,
    begin_transfer,
    event_of,
    flavor_of,
)
from scheduler_worker.records.build_record import Actor, BuildUpdate
from scheduler_worker.requests.request_delivery import waits
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store.port import OperationUnit, SchedulerStore

Admit: TypeAlias = Callable[[OperationUnit, Sequence[PendingAction]], Awaitable[Sequence[PendingAction]]]


class ActionEngine:
    """Schedules batches of actions. One per scheduler process."""

    # Before the commit nothing has changed, so a request that is delivered again is processed again.

    def __init__(
        self,
        store: SchedulerStore,
        selector: Selector,
        destinations: DestinationChooser,
        *,
        clock: Clock,
        process: str = "",
    ) -> None:
        self._store = store
        self._selector = selector
        self._destinations = destinations
        self._clock = clock
        self._who = process or "scheduler"

    async def process(self, actions: Sequence[PendingAction], admit: Admit | None = None) -> dict[int, Outcome]:
        """Schedule a batch; returns the outcomes by batch index. What placement does not answer about waits.

        admit: which of them may still begin, asked in the transaction that writes them.
        """
        self._selector.assumed.drop_confirmed()
        async with self._store.operation() as unit:
            known = await unit.known([one.key for one in actions])
        sound = [one for one in actions if check_action(one, known[one.key], self._selector.config) is None]
        choosing = [one for one in sound if needs_hosts(one.request, known[one.key])]
        results: dict[int, Chosen | Outcome] = {one.batch_index: Chosen() for one in sound}
        # Together, in their order: those that fit nowhere wait for the newest state once, not one after the other.
        rooms = await rooms_of(self._store, self._selector, {one.request.project_id for one in choosing})
        located = zip(choosing, await self._destinations.locate(choosing, known), strict=True)
        of_choosing = [self._answered(one, known[one.key], rooms, found) for one, found in located]
        answers = await asyncio.gather(*of_choosing)
        results |= {one.batch_index: answer for one, answer in zip(choosing, answers, strict=True)}
        chosen = {batch_index: one for batch_index, one in results.items() if isinstance(one, Chosen)}
        outcomes = {batch_index: one for batch_index, one in results.items() if not isinstance(one, Chosen)}
        to_write = [one for one in actions if one.batch_index not in outcomes]
        return outcomes | await self._write(to_write, known, chosen, admit)

    async def _answered(
        self, pending: PendingAction, known: ActionContext, rooms: Rooms, located: Located | Fault
    ) -> Chosen | Outcome:
        if isinstance(located, Fault):
            return _without_answer(located)
        await yield_to_loop()  # each looks at every host
        request = pending.request
        try:
            chosen = await self._destinations.choose(pending, known, located)
        except PlacementUnavailable as fault:
            return _without_answer(fault)
        if isinstance(chosen, Retry):
            return chosen
        return replace(chosen, limits=limits_of(request, rooms[request.project_id]))

    async def _write(
        self,
        actions: Sequence[PendingAction],
        known: Mapping[RequestKey, ActionContext],
        chosen: Mapping[int, Chosen],
        admit: Admit | None,
    ) -> dict[int, Outcome]:
        """Check again under the instances' locks, and write what follows."""
        if not actions:
            return {}
        outcomes: dict[int, Outcome] = {}
        async with self._store.operation() as unit:
            if admit is not None:
                actions = await admit(unit, actions)
            now = await unit.known([one.key for one in actions], lock=True)
            # Once all is locked: of a drain with a rate the next move waits from this time on.
            batch = WrittenActions(Actor(self._who, self._clock.time()))
            for pending in actions:
                found = batch.with_written(now[pending.key], pending.request)
                outcomes[pending.batch_index] = await self._write_one(
                    unit, batch, pending, known[pending.key], found, chosen.get(pending.batch_index)
                )
        for label in batch.labels:
            metrics_module.count_requests("action", label)
        return outcomes

    async def _write_one(  # noqa: PLR0917  (a step of _write)
        self,
        unit: OperationUnit,
        batch: WrittenActions,
        pending: PendingAction,
        before: ActionContext,
        found: ActionContext,
        chosen: Chosen | None,
    ) -> Outcome:
        """One action of a batch. before, found: the record when it was decided, and that under the lock. chosen: None
        where `check` had a refusal or an answer then.
        """
        request, actor = pending.request, batch.actor
        result = check_action(pending, found, self._selector.config)
        if result is None and (chosen is None or found.build != before.build):
            result = superseded_refusal(pending)
        if isinstance(result, Answered):
            for message in result.messages:
                unit.emit(message)
            batch.labels.append(result.label)
            return result.outcome
        action, command = self._decided(pending, found, result, chosen, actor)
        if not await unit.insert_actions([action], actor.at):
            # Another scheduler has just put it on record.
            return RetryWhenAvailable(CHANGED.code, CHANGED.reason)
        batch.actions[request.request_id], build = action, found.build
        # What a client requests in vain, as often as it likes, is on record as a request alone.
        if build is not None and action.state is not ActionState.REFUSED:
            assert chosen is not None
            build = build if command is None else replace(build, instance=in_progress(request, found))
            entry = actor.entry(f"{request.kind} {action.state}", _detail(action, chosen), by=request.by)
            entry = replace(entry, scores=chosen.scores)
            await unit.update([BuildUpdate(build=build, timeline=(entry,))], actor.at)
            batch.builds[request.instance_uuid] = build
        if command is not None:
            assert action.cell is not None
            unit.emit(OutboxMessage(action.cell, command, request.request_id))
        unit.emit(OutboxMessage(API, event_of(action, found, actor.at), request.request_id))
        batch.labels.append(action.code or action.state.value)
        if action.state is ActionState.REFUSED:
            return Done(reply=Refusal(code=action.code, reason=action.reason))
        return accepted(request)

    def _decided(
        self,
        pending: PendingAction,
        known: ActionContext,
        refusal: Refusal | None,
        chosen: Chosen | None,
        actor: Actor,
    ) -> tuple[RecordedAction, CellAction | CellTransferOut | None]:
        """The record of a request, and the command to its cell if there is one."""
        if refusal is not None:
            return record_of(pending, ActionState.REFUSED, actor, code=refusal.code, reason=refusal.reason), None
        assert chosen is not None
        if chosen.failure is not None:
            failure = chosen.failure
            state = ActionState.FAILED if failure.code == NO_HOST else ActionState.REFUSED
            return record_of(
                pending, state, actor, code=failure.code, reason=failure.reason, funnel=chosen.funnel
            ), None
        request = pending.request
        assert known.build is not None and known.build.cell is not None
        command = self._command(request, known, chosen)
        action = record_of(pending, ActionState.SCHEDULED, actor, cell=known.build.cell)
        for first in chosen.selections[:1]:
            action = replace(action, host=first.host, host_uuid=first.host_uuid)
        if chosen.cell is None or chosen.cell == known.build.cell:
            return action, command
        return begin_transfer(action, command, chosen.cell, known.build)

    def _command(self, request: ActionRequest, known: ActionContext, chosen: Chosen) -> CellAction:
        assert known.build is not None
        built, config = build_request_for(request, known), self._selector.config.settings
        # A rebuild changes the image, and hosts are chosen for the flavor as it is now.
        is_told = request.kind is ActionKind.REBUILD or bool(chosen.selections)
        return CellAction(
            request_id=request.request_id,
            instance_uuid=request.instance_uuid,
            project_id=request.project_id,
            kind=request.kind,
            spec=instance_spec(built, config) if is_told else None,
            expected_flavor="" if request.kind is ActionKind.RESIZE else flavor_of(known),
            selections=chosen.selections,
            server_group=built.server_group,
            limits=chosen.limits,
            fenced_hosts=chosen.fenced_hosts,
            migration=request.migration,
            auto_confirm_s=request.auto_confirm_s,
            offload=request.offload,
            soft=request.soft,
            rescue_password=request.rescue_password,
            fenced=request.fenced,
            force=request.force,
            step_timeout_s=request.timeout_s or built.build_timeout_s or config.build_timeout_s,
            sequence=known.build.sequence,
        )


def _without_answer(fault: Fault) -> Chosen | Outcome:
    """What follows where placement has no answer: the move waits, or ends if placement has refused for good."""
    ended = result_of_fault(fault)
    if isinstance(ended, HostSearchRefused):
        return Chosen(failure=Refusal(code=ended.code, reason=ended.reason[:MAX_REASON]))
    return waits(ended)


def _detail(action: RecordedAction, chosen: Chosen) -> str:
    """The text of a timeline line: the destination, or the reason of a failure."""
    if action.code:
        return f"{action.code}: {action.reason}"
    if not chosen.selections:
        return f"to cell {action.cell}"
    names = ", ".join(selection.host for selection in chosen.selections)
    cell = action.cell if chosen.cell is None else chosen.cell
    return f"to cell {cell}: {names} of {chosen.passing_hosts} candidates, request {action.request_id}"
