"""Where a request sends its instance: hosts of the same cell as for a build, on the replica as it is now, or of another
cell where that is allowed. Nothing is claimed here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.clock import Clock
from bus.consuming.outcome import Retry
from bus.contracts.actions import MAX_SELECTIONS, ActionKind, ActionRequest, Condition, ResizePolicy
from bus.contracts.base import Refusal
from bus.contracts.build import BuildRequest, FunnelStep, HostScore
from bus.contracts.cell import Selection
from bus.contracts.placement import GroupPolicy, LocatePage, LocateRequest
from bus.faults import Fault
from bus.yielding import yield_to_loop
from placement_worker.replica.request import QueryTooWide
from scheduler_worker.action.action_checks import (
    CELL_DRAIN_USER,
    NO_REPORT,
    SOURCE_UNKNOWN,
    changes_image,
    may_leave_cell,
    releases_source,
    stays_in_cell,
)
from scheduler_worker.action.destination_request import Located, added_by, build_request_for, located_of
from scheduler_worker.action.pending_action import PendingAction
from scheduler_worker.build.decision import NO_HOST
from scheduler_worker.build.host_search import HostSearchRequest, new_host_search
from scheduler_worker.build.placer import ReplicaFollower, await_newest
from scheduler_worker.build.recovered_claim import scores_of
from scheduler_worker.placement_client import ClaimPort
from scheduler_worker.records.action_record import ActionContext, RequestKey
from scheduler_worker.records.fence_record import is_fenced
from scheduler_worker.requests.request_delivery import HOSTS_UNKNOWN
from scheduler_worker.selection.explain import NoValidHost, funnel_step, message_of
from scheduler_worker.selection.flavor_query import IMAGE_TRAITS
from scheduler_worker.selection.request_spec import RequestSpec, Unsatisfiable, related_of
from scheduler_worker.selection.selector import Selector

IMAGE_UNSUITABLE = "image.unsuitable"


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


class DestinationChooser:
    """Chooses hosts for requests. One per scheduler process."""

    # A choice counts as used for a few seconds, so that the next ones see it.

    def __init__(
        self,
        claims: ClaimPort,
        selector: Selector,
        follower: ReplicaFollower,
        *,
        clock: Clock,
        rng: random.Random,
        reload: Callable[[], Awaitable[None]],
    ) -> None:
        """reload: loads operators' objects that are newer on record. It raises Transient."""
        self._claims = claims
        self._selector = selector
        self._follower = follower
        self._clock = clock
        self._rng = rng
        self._reload = reload
        self._expiring: asyncio.TimerHandle | None = None
        # Where evacuated members of groups with affinity were to go lately: {group: (host, until)}.
        self._gathering: dict[tuple[str, str], tuple[str, float]] = {}

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

    async def choose(
        self,
        pending: PendingAction,
        known: ActionContext,
        located: Located,
        *,
        planned: Mapping[str, str] | None = None,
    ) -> Chosen | Retry:
        """Hosts in order for one request, or why there are none; tried again if a failure would be premature. Raises
        Transient. planned: {host: why it may not be chosen} of a plan, for which this call holds nothing and does not
        wait.
        """
        request, source = pending.request, located.source
        if source is None and known.current.condition is not Condition.OFFLOADED:
            return SOURCE_UNKNOWN if pending.delivery.may_be_out_of_order else Chosen(failure=NO_REPORT)
        if request.kind is ActionKind.EVACUATE and not await self._is_fenced(source):
            where = "its host" if source is None else f"host {self._selector.name_of(source)}"
            return Chosen(failure=Refusal(code="host.not_fenced", reason=f"{where} is not fenced by an operator"))
        if request.kind is ActionKind.EVACUATE and known.current.condition is Condition.SHELVED:
            return Chosen()  # its cell offloads it
        chosen = self._decide(pending, known, located, planned, is_newest=planned is not None)
        if chosen is None:
            await await_newest(self._follower, self._selector.config.settings.claim_timeout_s)
            await yield_to_loop()
            # Beside the choices of those that have waited with it, which a release would forget. None matters to an
            # image.
            is_newest = changes_image(request, known) or self._selector.assumed.next_until is None
            chosen = self._decide(pending, known, located, planned, is_newest=is_newest)
        if chosen is None:
            self._selector.assumed.release()
            chosen = self._decide(pending, known, located, planned, is_newest=True)
            assert chosen is not None
        return chosen

    def _decide(
        self,
        pending: PendingAction,
        known: ActionContext,
        located: Located,
        planned: Mapping[str, str] | None,
        *,
        is_newest: bool,
    ) -> Chosen | Retry | None:
        """As `choose`, synchronously, so that each choice sees those before it. None: no host, or one that does not
        suit; to be decided on the newest state only, and without the holds of other moves.
        """
        request, page, source = pending.request, located.page, located.source
        fenced_hosts: tuple[str, ...] = ()
        if request.kind is ActionKind.EVACUATE:
            fenced_hosts, page = self._group_place(build_request_for(request, known), page)
        spec = self._spec(request, known, page, source)
        if changes_image(request, known):  # if its flavor is gone no filter can be run: its cell decides
            if isinstance(spec, Unsatisfiable):
                failure = Refusal(code=IMAGE_UNSUITABLE, reason=spec.reason) if spec.code == IMAGE_TRAITS else None
                return Chosen(failure=failure)
            chosen = self._rebuilt_on(spec, source)
        elif isinstance(spec, Unsatisfiable):
            return self._unsatisfied(spec)
        else:
            try:
                chosen = self._pick_in_cells(pending, known, spec, located, planned, is_newest=is_newest)
            except QueryTooWide as error:
                return Chosen(failure=Refusal(code=error.code, reason=str(error)))
        if isinstance(chosen, Chosen):
            if fenced_hosts and planned is None and chosen.selections:
                self._gather(build_request_for(request, known), chosen.selections[0].host_uuid)
            return replace(chosen, fenced_hosts=fenced_hosts)
        if not is_newest:
            return None
        if chosen.may_be_out_of_order and pending.delivery.awaits_hosts:
            return HOSTS_UNKNOWN
        return Chosen(failure=self._no_host(request, known, spec, chosen, source), funnel=chosen.funnel)

    def _pick_in_cells(
        self,
        pending: PendingAction,
        known: ActionContext,
        spec: RequestSpec,
        located: Located,
        planned: Mapping[str, str] | None,
        *,
        is_newest: bool,
    ) -> Chosen | NoValidHost:
        """The hosts to try, in its own cell; on the newest state in another one, where it may leave its own."""
        may_leave = self._selector.config.settings.actions_across_cells and may_leave_cell(pending.request)
        anywhere, stays = replace(spec, cell=None, key=(*spec.key, "any cell")), stays_in_cell(known, spec)
        if pending.request.user_id == CELL_DRAIN_USER:  # whatever keeps it there: no host of its own cell will do
            if stays is not None:
                return Chosen(failure=stays)
            may_leave, spec = False, replace(anywhere if may_leave else spec, leaves=spec.cell)
        chosen = self._pick(pending, known, spec, located, planned)
        if isinstance(chosen, Chosen) or not (is_newest and may_leave):
            return chosen
        elsewhere = self._pick(pending, known, anywhere, located, planned if stays is None else planned or {})
        return Chosen(failure=stays, funnel=chosen.funnel) if stays and isinstance(elsewhere, Chosen) else elsewhere

    def _spec(
        self, request: ActionRequest, known: ActionContext, page: LocatePage, source: str | None
    ) -> RequestSpec | Unsatisfiable:
        """The request spec: as for a build of the instance in its next state, in its cell."""
        assert known.build is not None
        requested = build_request_for(request, known)
        if requested.flavor not in self._selector.config.flavors:
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

    def _unsatisfied(self, spec: Unsatisfiable) -> Chosen:
        hosts = int(self._selector.replica.rows_of_roots().size)
        failure = Refusal(code=NO_HOST, reason=f"No host can take it: {spec.reason}.")
        return Chosen(failure=failure, funnel=(funnel_step(spec.step, hosts, {spec.code: hosts}),))

    def _rebuilt_on(self, spec: RequestSpec, host: str | None) -> Chosen | NoValidHost:
        """Whether an instance may be rebuilt from another image on its host; nothing is claimed for a rebuild."""
        return (None if host is None else self._selector.suits_rebuild(host, spec)) or Chosen()

    def _no_host(
        self, request: ActionRequest, known: ActionContext, spec: RequestSpec, found: NoValidHost, source: str | None
    ) -> Refusal:
        if source is None or not changes_image(request, known):
            return Refusal(code=NO_HOST, reason=message_of(spec, found.funnel))
        reasons = ", ".join(sorted(found.funnel[-1].rejected))
        reason = f"host {self._selector.name_of(source)} does not suit the image: {reasons}"
        return Refusal(code=IMAGE_UNSUITABLE, reason=reason)

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
        settings = self._selector.config.settings
        requested = replace(build_request_for(request, known), max_attempts=None)
        state = new_host_search(HostSearchRequest(request=requested, spec=spec), self._selector)
        if planned:
            state = replace(state, rejected={**state.rejected, **planned})
        if source is not None and releases_source(request, same_host=settings.allow_resize_to_same_host):
            state = replace(state, rejected={**state.rejected, source: "host.source"})
        tried = min(request.max_attempts or settings.max_attempts, MAX_SELECTIONS)
        leaving = f"{request.request_id} leaves"
        # The present and the future allocation of one provider count once, the larger of the two.
        replica.assume(leaving, {uuid: {name: -amount for name, amount in row.items()} for uuid, row in held.items()})
        try:
            ranking, subset = self._selector.rank(state.spec, self._rng), settings.host_subset_size
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
        until = now_s + self._selector.config.settings.assumed_choice_s
        self._gathering[requested.project_id, requested.server_group.uuid] = host, until

    def _hold(self, key: str, allocations: Mapping[str, Mapping[str, int]]) -> None:
        until_s = self._clock.monotonic() + self._selector.config.settings.assumed_choice_s
        self._selector.assumed.add(key, allocations, until_s)
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
