"""How actions are scheduled: check against the record, without locks; choose hosts as for a build, in the same cell;
write the request, its event and the command in one transaction, after a check that nothing has changed. Nothing is
claimed here: the cell's conductor claims, in order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Retry, RetryWhenAvailable
from bus.contracts.actions import (
    MAX_SELECTIONS,
    ActionKind,
    ActionRequest,
    ActionState,
    CellAction,
    CellTransferOut,
    Condition,
    ResizePolicy,
)
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.build import BuildRequest, FunnelStep, HostScore
from bus.contracts.cell import Selection
from bus.contracts.placement import GroupPolicy, LocatePage, LocateRequest
from bus.faults import Fault
from bus.persistence.outbox import OutboxMessage
from bus.yielding import yield_to_loop
from placement_worker.replica.request import QueryTooWide
from scheduler_worker import metrics as metrics_module
from scheduler_worker.action.action_checks import (
    CELL_DRAIN_USER,
    CHANGED,
    NO_REPORT,
    SOURCE_UNKNOWN,
    Located,
    accepted,
    added_by,
    build_request_for,
    changes_image,
    check_action,
    in_progress,
    limits_of,
    located_of,
    may_leave_cell,
    needs_hosts,
    releases_source,
    stays_in_cell,
    superseded_refusal,
)
from scheduler_worker.action.pending_action import PendingAction, recorded
from scheduler_worker.build.decision import NO_HOST, instance_spec
from scheduler_worker.build.pending_build import Answered
from scheduler_worker.build.placement_state import (
    PlacementRefused,
    PlacementRequest,
    new_placement_state,
    result_of_fault,
)
from scheduler_worker.build.placer import NEWEST_WAIT_S, ReplicaFollower
from scheduler_worker.build.quota import Rooms, rooms_of
from scheduler_worker.build.recovered_claim import scores_of
from scheduler_worker.placement_client import ClaimPort
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
from scheduler_worker.records.fence_record import is_fenced
from scheduler_worker.requests.request_delivery import HOSTS_UNKNOWN, waits
from scheduler_worker.selection.explain import NoValidHost, funnel_step, message_of
from scheduler_worker.selection.flavor_query import IMAGE_TRAITS
from scheduler_worker.selection.request_spec import RequestSpec, Unsatisfiable, related_of
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store.port import OperationUnit, SchedulerStore

log = structlog.get_logger(__name__)

IMAGE_UNSUITABLE = "image.unsuitable"
Admit: TypeAlias = Callable[[OperationUnit, Sequence[PendingAction]], Awaitable[Sequence[PendingAction]]]


class Chosen(Struct, frozen=True, kw_only=True):
    """The hosts for one request, in `cell` (None: the instance's own), or why there are none, with the funnel."""

    selections: tuple[Selection, ...] = ()
    limits: dict[str, int] = {}  # that its claims are held to
    failure: Refusal | None = None
    funnel: tuple[FunnelStep, ...] = ()
    passing_hosts: int = 0
    scores: tuple[HostScore, ...] = ()
    cell: str | None = None
    fenced_hosts: tuple[str, ...] = ()


class ActionEngine:
    """Schedules batches of actions. One per scheduler process."""

    # Before the commit nothing has changed, so a request that is delivered again is processed again. A choice counts as
    # used for a few seconds, so that the next ones see it.

    def __init__(
        self,
        store: SchedulerStore,
        claims: ClaimPort,
        selector: Selector,
        follower: ReplicaFollower,
        *,
        clock: Clock,
        rng: random.Random,
        reload: Callable[[], Awaitable[None]],
        process: str = "",
    ) -> None:
        """reload: loads operators' objects that are newer on record. It raises Transient."""
        self._reload = reload
        self._store = store
        self._claims = claims
        self._selector = selector
        self._follower = follower
        self._clock = clock
        self._rng = rng
        self._who = process or "scheduler"
        self._expiring: asyncio.TimerHandle | None = None
        # Where evacuated members of groups with affinity were to go lately: {group: (host, until)}.
        self._gathering: dict[tuple[str, str], tuple[str, float]] = {}

    async def process(self, actions: Sequence[PendingAction], admit: Admit | None = None) -> dict[int, Outcome]:
        """Schedule a batch; returns the outcomes by batch index. What placement does not answer about waits.

        admit: which of them may still begin, asked in the transaction that writes them.
        """
        self._selector.assumed.drop_confirmed()
        async with self._store.operation() as unit:
            known = await unit.known([one.key for one in actions])
        sound = [one for one in actions if self.check(one, known[one.key]) is None]
        choosing = [one for one in sound if needs_hosts(one.request, known[one.key])]
        results: dict[int, Chosen | Outcome] = {one.batch_index: Chosen() for one in sound}
        # Together, in their order: those that fit nowhere wait for the newest state once, not one after the other.
        rooms = await rooms_of(self._store, self._selector, {one.request.project_id for one in choosing})
        located = zip(choosing, await self.locate(choosing, known), strict=True)
        of_choosing = [self._answered(one, known[one.key], rooms, found) for one, found in located]
        answers = await asyncio.gather(*of_choosing)
        results |= {one.batch_index: answer for one, answer in zip(choosing, answers, strict=True)}
        chosen = {batch_index: one for batch_index, one in results.items() if isinstance(one, Chosen)}
        outcomes = {batch_index: one for batch_index, one in results.items() if not isinstance(one, Chosen)}
        to_write = [one for one in actions if one.batch_index not in outcomes]
        return outcomes | await self._write(to_write, known, chosen, admit)

    def check(self, pending: PendingAction, known: ActionContext) -> Answered | Refusal | None:
        """Whether the request can be made of the instance as it is on record (see `check_action`)."""
        return check_action(pending, known, self._selector, same_host=self._selector.config.allow_resize_to_same_host)

    # --- choose

    async def locate(
        self, actions: Sequence[PendingAction], known: Mapping[RequestKey, ActionContext]
    ) -> list[Located | Fault]:
        """Where the instances and those that they depend on are, and what they hold."""
        if not actions:
            return []
        questions = []
        for pending in actions:
            requested = build_request_for(pending.request, known[pending.key])
            consumers = (requested.instance_uuid, *requested.different_host, *requested.same_host)
            questions.append(
                LocateRequest(
                    project_id=requested.project_id,
                    server_group=requested.server_group.uuid if requested.server_group is not None else None,
                    excluding=requested.instance_uuid,
                    consumers=tuple(dict.fromkeys(consumers)),
                )
            )
        pages, holdings = await asyncio.gather(
            self._claims.locate(questions), self._claims.allocations([one.request.instance_uuid for one in actions])
        )
        return [located_of(*found) for found in zip(actions, pages, holdings, strict=True)]

    async def _answered(
        self, pending: PendingAction, known: ActionContext, rooms: Rooms, located: Located | Fault
    ) -> Chosen | Outcome:
        if isinstance(located, Fault):
            return _without_answer(located)
        await yield_to_loop()  # each looks at every host
        chosen, request = await self.choose(pending, known, located), pending.request
        if isinstance(chosen, Retry):
            return chosen
        return replace(chosen, limits=limits_of(request, rooms[request.project_id]))

    async def choose(
        self,
        pending: PendingAction,
        known: ActionContext,
        located: Located,
        *,
        planned: Mapping[str, str] | None = None,
    ) -> Chosen | Retry:
        """Hosts in order for one request, or why there are none; tried again if a failure would be premature. planned:
        {host: why it may not be chosen} of a plan, for which this call holds nothing and does not wait.
        """
        request, page, source = pending.request, located.page, located.source
        if source is None and known.now.condition is not Condition.OFFLOADED:
            return SOURCE_UNKNOWN if pending.delivery.may_be_out_of_order else Chosen(failure=NO_REPORT)
        if request.kind is ActionKind.EVACUATE and not await self._is_fenced(source):
            where = "its host" if source is None else f"host {self._selector.name_of(source)}"
            return Chosen(failure=Refusal(code="host.not_fenced", reason=f"{where} is not fenced by an operator"))
        if request.kind is ActionKind.EVACUATE and known.now.condition is Condition.SHELVED:
            return Chosen()  # its cell offloads it
        fenced_hosts: tuple[str, ...] = ()
        if request.kind is ActionKind.EVACUATE:
            fenced_hosts, page = self._group_place(build_request_for(request, known), page)
        spec = self._spec(request, known, page, source)
        if changes_image(request, known):  # if its flavor is gone no filter can be run: its cell decides
            if isinstance(spec, Unsatisfiable):
                failure = Refusal(code=IMAGE_UNSUITABLE, reason=spec.reason) if spec.code == IMAGE_TRAITS else None
                return Chosen(failure=failure)
            return self._suits(pending, spec, source) or Chosen()
        if isinstance(spec, Unsatisfiable):
            hosts = int(self._selector.replica.rows_of_roots().size)
            return Chosen(
                failure=Refusal(code=NO_HOST, reason=f"No host can take it: {spec.reason}."),
                funnel=(funnel_step(spec.step, hosts, {spec.code: hosts}),),
            )
        try:
            chosen = await self._pick_on_newest(pending, known, spec, located, planned)
        except QueryTooWide as error:
            return Chosen(failure=Refusal(code=error.code, reason=str(error)))
        if isinstance(chosen, Chosen):
            if fenced_hosts and planned is None:
                self._gather(build_request_for(request, known), chosen.selections[0].host_uuid)
            return replace(chosen, fenced_hosts=fenced_hosts)
        if chosen.may_be_out_of_order and pending.delivery.awaits_hosts:
            return HOSTS_UNKNOWN
        reason = message_of(spec, chosen.funnel)
        return Chosen(failure=Refusal(code=NO_HOST, reason=reason), funnel=chosen.funnel)

    async def _pick_on_newest(
        self,
        pending: PendingAction,
        known: ActionContext,
        spec: RequestSpec,
        located: Located,
        planned: Mapping[str, str] | None,
    ) -> Chosen | NoValidHost:
        """The hosts to try. "No host" is decided on the newest state only, and without the holds of other moves."""
        may_leave = self._selector.config.actions_across_cells and may_leave_cell(pending.request)
        anywhere, stays = replace(spec, cell=None, key=(*spec.key, "any cell")), stays_in_cell(known, spec)
        if pending.request.user_id == CELL_DRAIN_USER:  # whatever keeps it there: no host of its own cell will do
            if stays is not None:
                return Chosen(failure=stays)
            may_leave, spec = False, replace(anywhere if may_leave else spec, leaves=spec.cell)
        chosen = self._pick(pending, known, spec, located, planned)
        if isinstance(chosen, Chosen):
            return chosen
        if planned is None:
            await self._follower.refresh(timeout_s=NEWEST_WAIT_S)
            await yield_to_loop()
        self._selector.assumed.release()
        chosen = self._pick(pending, known, spec, located, planned)
        if isinstance(chosen, Chosen) or not may_leave:
            return chosen
        elsewhere = self._pick(pending, known, anywhere, located, planned if stays is None else planned or {})
        return Chosen(failure=stays, funnel=chosen.funnel) if stays and isinstance(elsewhere, Chosen) else elsewhere

    def _spec(
        self, request: ActionRequest, known: ActionContext, page: LocatePage, source: str | None
    ) -> RequestSpec | Unsatisfiable:
        """The request spec: as for a build of the instance in its next state, in its cell."""
        assert known.build is not None
        requested = build_request_for(request, known)
        if requested.flavor not in self._selector.flavors:
            return Unsatisfiable("flavor.unknown", f"flavor {requested.flavor} is no longer configured", "flavor")
        spec = self._selector.request_spec(requested)
        if isinstance(spec, Unsatisfiable):
            return spec
        if request.kind is ActionKind.RESIZE and request.policy is ResizePolicy.SAME_HOST and source is not None:
            spec = spec.only_on((source,))
        spec = replace(spec, cell=known.build.cell, key=(*spec.key, request.request_id))
        if requested.server_group is not None or requested.different_host or requested.same_host:
            spec = spec.with_related(related_of(requested, page), request.request_id)
        return spec

    def _suits(self, pending: PendingAction, spec: RequestSpec, host: str | None) -> Chosen | Retry | None:
        """Why an instance may not be rebuilt from another image on its host; nothing is claimed for a rebuild."""
        result = None if host is None else self._selector.suits_rebuild(host, spec)
        if host is None or result is None:
            return None
        if result.may_be_out_of_order and pending.delivery.awaits_hosts:
            return HOSTS_UNKNOWN
        reasons = ", ".join(sorted(result.funnel[-1].rejected))
        reason = f"host {self._selector.name_of(host)} does not suit the image: {reasons}"
        return Chosen(failure=Refusal(code=IMAGE_UNSUITABLE, reason=reason), funnel=result.funnel)

    def _pick(
        self,
        pending: PendingAction,
        known: ActionContext,
        spec: RequestSpec,
        located: Located,
        planned: Mapping[str, str] | None,
    ) -> Chosen | NoValidHost:
        """One synchronous choice on the replica as it is now; the choice counts as used from here on."""
        request, replica, source, held = pending.request, self._selector.replica, located.source, located.allocations
        requested = replace(build_request_for(request, known), max_attempts=None)
        state = new_placement_state(PlacementRequest(request=requested, spec=spec), self._selector)
        if planned:
            state = replace(state, rejected={**state.rejected, **planned})
        if source is not None and releases_source(request, same_host=self._selector.config.allow_resize_to_same_host):
            state = replace(state, rejected={**state.rejected, source: "host.source"})
        tried = min(request.max_attempts or self._selector.config.max_attempts, MAX_SELECTIONS)
        leaving = f"{request.request_id} leaves"
        # The present and the future allocation of one provider count once, the larger of the two.
        replica.assume(leaving, {uuid: {name: -amount for name, amount in row.items()} for uuid, row in held.items()})
        try:
            subset = self._selector.config.host_subset_size
            ranking = self._selector.rank(state.spec, self._rng)
            choice = ranking.pick(self._selector.rows_of(state.rejected), subset=subset, alternates=tried - 1)
            if choice is None:
                return self._selector.explain(state.spec, state.rejected)
            hosts = (choice.selected, *choice.alternates)
            selections = tuple(self._selector.selection(host) for host in hosts)
        finally:
            replica.drop_assumed(leaving)
        if planned is None:
            self._hold(request.request_id, added_by(choice.selected.options[0].allocations, held))
        cell = self._selector.cell_of(choice.selected.uuid) if state.spec.cell is None else None
        scores = scores_of(selections, choice.weights_of_hosts) or (HostScore(host=selections[0].host),)
        return Chosen(selections=selections, passing_hosts=choice.passing_hosts, scores=scores, cell=cell)

    def choose_now(self, pending: PendingAction, known: ActionContext) -> Sequence[Selection]:
        """Hosts for what has none, by what is known here now. Its server group is judged with each claim."""
        nowhere = Located(pending.request.instance_uuid, LocatePage(), {})
        spec = self._spec(pending.request, known, nowhere.page, None)
        try:
            chosen = spec if isinstance(spec, Unsatisfiable) else self._pick(pending, known, spec, nowhere, None)
        except QueryTooWide:
            return ()
        return chosen.selections if isinstance(chosen, Chosen) else ()

    async def _is_fenced(self, host: str | None) -> bool:
        """Whether an operator has fenced it, by the newest decision: another scheduler may have answered the operator.
        Raises Transient.
        """
        if host is not None and not is_fenced(self._selector.table.decision_of(host)):
            await self._reload()
        return host is not None and is_fenced(self._selector.table.decision_of(host))

    def _group_place(self, requested: BuildRequest, page: LocatePage) -> tuple[tuple[str, ...], LocatePage]:
        """The fenced hosts that have members of an evacuated instance's group, and where the others are. Members on
        fenced hosts keep nobody there: the first that is evacuated chooses, and the next ones follow its choice.
        """
        group = requested.server_group
        if group is None or group.policy is not GroupPolicy.AFFINITY:
            return (), page
        fenced = tuple(host for host in page.members if is_fenced(self._selector.table.decision_of(host)))
        members = {host: count for host, count in page.members.items() if host not in fenced}
        host, until = self._gathering.get((requested.project_id, group.uuid), ("", 0.0))
        if fenced and not members and until > self._clock.monotonic():
            members = {host: 1}
        return fenced, LocatePage(members=members, hosts=page.hosts)

    def _gather(self, requested: BuildRequest, host: str) -> None:
        """Have the group's next evacuated members follow, until placement knows of this one."""
        assert requested.server_group is not None
        now_s = self._clock.monotonic()
        self._gathering = {group: place for group, place in self._gathering.items() if place[1] > now_s}
        until = now_s + self._selector.config.assumed_choice_s
        self._gathering[requested.project_id, requested.server_group.uuid] = host, until

    def _hold(self, key: str, allocations: Mapping[str, Mapping[str, int]]) -> None:
        self._selector.assumed.add(key, allocations, self._clock.monotonic() + self._selector.config.assumed_choice_s)
        self._expire_later()

    def _expire_later(self) -> None:
        """Without another move no later choice would release them."""
        until = self._selector.assumed.next_until
        if self._expiring is None and until is not None:
            remaining_s = max(0.0, until - self._clock.monotonic())
            self._expiring = asyncio.get_running_loop().call_later(remaining_s, self._expire)

    def _expire(self) -> None:
        self._expiring = None
        self._selector.assumed.expire(self._clock.monotonic())
        self._expire_later()

    # --- write

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
        result = self.check(pending, found)
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
            entry = actor.entry(f"{request.kind} {action.state}", _detail(action, chosen))
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
            return recorded(pending, ActionState.REFUSED, actor, code=refusal.code, reason=refusal.reason), None
        assert chosen is not None
        if chosen.failure is not None:
            failure = chosen.failure
            state = ActionState.FAILED if failure.code == NO_HOST else ActionState.REFUSED
            return recorded(pending, state, actor, code=failure.code, reason=failure.reason, funnel=chosen.funnel), None
        request = pending.request
        assert known.build is not None and known.build.cell is not None
        command = self._command(request, known, chosen)
        action = recorded(pending, ActionState.SCHEDULED, actor, cell=known.build.cell)
        for first in chosen.selections[:1]:
            action = replace(action, host=first.host, host_uuid=first.host_uuid)
        if chosen.cell is None or chosen.cell == known.build.cell:
            return action, command
        return begin_transfer(action, command, chosen.cell, known.build)

    def _command(self, request: ActionRequest, known: ActionContext, chosen: Chosen) -> CellAction:
        assert known.build is not None
        built, config = build_request_for(request, known), self._selector.config
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
            rescue_password=request.rescue_password,
            fenced=request.fenced,
            force=request.force,
            step_timeout_s=request.timeout_s or built.build_timeout_s or config.build_timeout_s,
            sequence=known.build.sequence,
        )


def _without_answer(fault: Fault) -> Chosen | Outcome:
    """What follows where placement has no answer: the move waits, or ends if placement has refused for good."""
    ended = result_of_fault(fault)
    if isinstance(ended, PlacementRefused):
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
