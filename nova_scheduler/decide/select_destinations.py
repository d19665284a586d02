"""`select_destinations` of topic `scheduler`: a RequestSpec of Nova, placed by berth's own placer, several instances as
a gang. Claims are external ones, owned by the id of the call's message, so a redelivered call adopts what it had
claimed. Nothing is kept: the state is Nova's and placement's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.clock import Clock
from bus.contracts.base import MAX_REASON
from bus.contracts.cell import Selection
from bus.contracts.nova_calls import MAX_NAMED as MAX_EXPLAINED
from bus.contracts.nova_calls import CallDecision, DecisionStep
from bus.faults import Transient
from nova_scheduler.cloud.poller import CASTS, NovaStateUpdates
from nova_scheduler.cloud.state import NovaState
from nova_scheduler.decide.decision_log import ANSWERED, SHADOWED, CallRecorder, lost_of, placed, steps_of
from nova_scheduler.decide.placer_requests import PlacerRequests, SelectArguments, claim_owner_of, parse_arguments
from nova_scheduler.decide.selection import legacy, primitive
from nova_scheduler.request.request_spec import NotDecided, NovaRequest, parse_request_spec
from nova_scheduler.request.resource_request import named_nodes
from nova_scheduler.wire.envelope import Call, RemoteFault, no_such_method, no_valid_host
from nova_scheduler.wire.versioned import Primitive
from scheduler_worker.build.decision import CONTENDED
from scheduler_worker.build.host_search import ClaimsContended, HostClaimed, HostSearchRequest, HostSearchResult
from scheduler_worker.build.placer import ReplicaFollower, await_newest
from scheduler_worker.placement_client import PlacementUnavailable
from scheduler_worker.selection.explain import NoValidHost, message_of
from scheduler_worker.selection.request_spec import RequestSpec, Unsatisfiable
from scheduler_worker.selection.selector import Selector

log = structlog.get_logger("nova")

METHOD: Final = "select_destinations"
ENOUGH: Final = "There are not enough hosts available."  # Nova's own sentence, where there is no better one
# What a call claims whose client has been answered, or has given up, nobody would release.
OUTLIVED: Final = "The server does not wait for a host any more."
CLAIMED: Final = "A host was claimed for the server before, and how it is placed cannot be decided any more."
UNSUITED: Final = "The host of the instance does not support the image."
MAX_UUID: Final = 64  # letters of a cell's that are logged
CellHosts = tuple[str, tuple[Selection, ...]]  # a cell, and its hosts for one instance


class PlacerPort(Protocol):
    """What is called of the placer."""

    async def place(self, requests: Sequence[HostSearchRequest]) -> list[HostSearchResult]:
        """The result of each request, in order."""

    async def located(self, requests: Sequence[HostSearchRequest]) -> list[RequestSpec]:
        """The spec of each request, with where the instances are that it depends on. Raises PlacementUnavailable."""

    async def has_claimed(self, claim_owner: str, instances: Sequence[str]) -> bool:
        """Whether an instance of these holds what this claim owner has claimed. Raises PlacementUnavailable,
        RequestRefused.
        """


class Notifier(Protocol):
    """What tells others of calls (`NovaNotifier`)."""

    def notify(self, call: Call, begun_at: float, *, placed: bool) -> None:
        """Have notifications about a call published that was decided; it waits for nothing. begun_at: Unix time."""


class SelectionContended(Transient):
    """The claims of a call were lost to others, as many as one delivery makes: it is placed again."""

    code = CONTENDED


class Ended(Struct, frozen=True, kw_only=True):
    """Why a call ends without hosts."""

    reason: str  # for the user of the request, without names of hosts
    step: str = ""
    # lost, funnel: with them
    lost: tuple[str, ...] = ()
    funnel: tuple[DecisionStep, ...] = ()


class Destinations:
    """Answers the calls and takes the casts of topic `scheduler`. One per process."""

    def __init__(
        self,
        placer: PlacerPort,
        selector: Selector,
        nova_state: NovaState,
        source: NovaStateUpdates,
        follower: ReplicaFollower,
        *,
        requests: PlacerRequests,
        configure: Callable[[], None],  # puts newer state of Nova into the selector
        notifier: Notifier,
        clock: Clock,
        in_shadow: bool = False,
        recorder: CallRecorder | None = None,  # takes how each call was decided
    ) -> None:
        self._placer = placer
        self._selector = selector
        self._nova_state = nova_state
        self._source = source
        self._follower = follower
        self._requests = requests
        self._configure = configure
        self._notifier = notifier
        self._clock = clock
        self._recorder = recorder or CallRecorder()
        self._events = SHADOWED if in_shadow else ANSWERED
        self._claims = not in_shadow
        self._roots: object = None  # of placement, as they were looked at last
        self._unnamed: frozenset[str] = frozenset()  # those of them that Nova has named no compute node for

    async def call(self, call: Call) -> object:
        """The result of a call (`CallDispatcher`). Raises NotDecided, RemoteFault, SpecRefused, Transient."""
        # What is not decided here may have been before: by a frontend that was killed, or while placement's answer was
        # lost. A stock nova-scheduler would claim a second host beside that claim.
        if call.method in CASTS:
            return self._source.apply_cast(call.method, call.arguments)
        if call.method != METHOD or not call.is_answered:  # for nobody, a cast would claim
            raise no_such_method(call.method)
        asked = parse_arguments(call.arguments)
        try:
            return await self._decided(call, asked)
        except NotDecided:
            if await self._placer.has_claimed(claim_owner_of(call), asked.instance_uuids or ()):
                raise self._refused(call, asked, Ended(reason=CLAIMED)) from None
            raise

    async def _decided(self, call: Call, asked: SelectArguments) -> object:
        request = parse_request_spec(asked.spec_obj)
        if asked.instance_uuids is None:
            raise NotDecided("no_instance_uuids", "a conductor of before Nova 16")
        may_be_outlived = self._may_be_outlived(call) and not request.is_rebuild
        if may_be_outlived and not await self._source.waits_for_host(asked.instance_uuids):
            log.info("nova.call_outlived", request_id=call.request_id, instances=asked.instance_uuids)
            raise self._refused(call, asked, Ended(reason=OUTLIVED))
        why = self._requests.undecided(request)
        if why is not None:
            raise why
        await self._source.prepare(self._to_meet(request))
        self._configure()
        asked_for = request.requested_destination
        if asked_for is not None and asked_for.cell is not None and not self._nova_state.has_cell(asked_for.cell.uuid):
            log.warning("nova.cell_unknown", cell=asked_for.cell.uuid[:MAX_UUID], request_id=call.request_id)
        self._requests.check_architecture(request)
        begun_at = self._clock.time()
        try:
            found = await self._hosts(call, asked, request)
        except RemoteFault:
            self._notifier.notify(call, begun_at, placed=False)
            raise
        self._notifier.notify(call, begun_at, placed=True)
        return self._answer(asked, request, found)

    def _may_be_outlived(self, call: Call) -> bool:
        """Whether its client may have got an answer, or given up while the call waited in the topic; and what were
        claimed now nobody would release.
        """
        asked_at, limit_s = call.requested_at, call.answer_timeout_s
        is_late = asked_at is not None and limit_s is not None and self._clock.time() - asked_at > limit_s
        return self._claims and (call.redelivered or is_late)

    async def _hosts(self, call: Call, asked: SelectArguments, request: NovaRequest) -> list[CellHosts]:
        """The hosts of each instance. Raises NoValidHost of Nova's."""
        if request.is_rebuild:
            return [self._rebuilt(call, asked, request)]
        return [(one.cell, one.selections) for one in await self._claimed(call, asked, request)]

    async def _claimed(self, call: Call, asked: SelectArguments, request: NovaRequest) -> list[HostClaimed]:
        """The hosts of each instance: claimed, then alternates. Raises NoValidHost of Nova's."""
        instances = asked.instance_uuids or ()
        ended: Ended | None = None
        for is_last in (False, True):
            found = self._requests.spec(request)
            if isinstance(found, Unsatisfiable):
                ended = Ended(reason=f"{found.reason}.", step=found.step)
            for spec in () if isinstance(found, Unsatisfiable) else self._requests.own_cell_first(request, found):
                results = await self._placer.place(self._requests.for_instances(call, asked, request, spec))
                claimed = [one for one in results if isinstance(one, HostClaimed)]
                if len(claimed) == len(results):
                    claimed = without_siblings(claimed, self._selector.config.settings.max_attempts)
                    self._recorder.record_decision(placed(self._events.placed, call, instances, claimed))
                    return claimed
                ended = self._ended(spec, results)
            if is_last or not await self._is_news():
                break
            self._configure()
        assert ended is not None
        raise self._refused(call, asked, ended)

    def _refused(self, call: Call, asked: SelectArguments, ended: Ended) -> RemoteFault:
        """NoValidHost of Nova's, explained to operators."""
        instances = asked.instance_uuids or ()
        self._recorder.record_decision(
            CallDecision(
                event=self._events.no_host,
                request_id=call.request_id,
                project_id=call.project_id,
                instances=instances[:MAX_EXPLAINED],
                count=len(instances),
                reason=ended.reason[:MAX_REASON],
                step=ended.step,
                lost=ended.lost,
                funnel=ended.funnel,
            )
        )
        return no_valid_host(ended.reason)

    async def _is_news(self) -> bool:
        """Whether placement or Nova has changed since what a call was decided by: a host that is new, or has room.

        Raises PlacementUnavailable.
        """
        replica = self._selector.replica
        before = replica.sequence
        await await_newest(self._follower, self._selector.config.settings.claim_timeout_s)
        is_changed = await self._source.ask(self._unknown())
        return is_changed or replica.sequence != before

    async def broken_rule(self, call: Call, hosts: Sequence[tuple[str, str]]) -> str:
        """What rejects one of these hosts (host, node) of a call's instances, in their order; "": nothing does.

        For another scheduler's choice, which holds its claims already: what Placement has granted is not looked at.
        """
        asked = parse_arguments(call.arguments)
        request = parse_request_spec(asked.spec_obj)
        spec = self._requests.spec(request)
        if isinstance(spec, Unsatisfiable) or request.is_rebuild:
            return ""
        requests = self._requests.for_instances(call, asked, request, spec)
        for (host, node), located in zip(hosts, await self._placer.located(requests), strict=False):
            for uuid in self._nova_state.nodes_named(host, node):
                if (rejected := self._selector.rejects(uuid, located)) is not None:
                    return f"{host}: {message_of(located, rejected.funnel)}"
        return ""

    def _to_meet(self, request: NovaRequest) -> Sequence[str]:
        """The hosts that have come to placement since the last call: Nova has made their compute nodes first. Until the
        next poll they would be nobody's choice, and nobody's alternate. Where the request names a host that is not
        known, all such hosts: as soon as it is, it must not be the choice of a request that is to ignore it.
        """
        roots, before = self._selector.replica.rows_of_roots(), self._unnamed
        if roots is not self._roots:
            self._roots, self._unnamed = roots, frozenset(self._unknown())
        is_named = all(map(self._nova_state.nodes_named, request.named_hosts))
        return sorted(self._unnamed - before) if is_named else self._unknown()

    def _unknown(self) -> tuple[str, ...]:
        replica = self._selector.replica
        return self._nova_state.unknown(replica.uuids_of(replica.rows_of_roots()))

    def _ended(self, spec: RequestSpec, results: Sequence[HostSearchResult]) -> Ended:
        """Why not all of the instances have a host. Raises Transient: it is not known, or worth another try."""
        # Nothing is given back: several are claimed together or not at all, so what one of them holds is of an earlier
        # delivery of this call, and its instance may run by now.
        for result in results:
            if isinstance(result, PlacementUnavailable):
                raise result
        for result in results:
            if isinstance(result, ClaimsContended):
                raise SelectionContended(f"{result.claims} claims were lost to others")
        return ended_by(spec, results, self._name_of)

    def _name_of(self, row: int) -> str:
        """The name of a host of the replica, for operators."""
        replica = self._selector.replica
        return self._named(replica.uuid_of(row)) or replica.name_of(row)

    def _named(self, uuid: str) -> str:
        """The same of a compute node; "": Nova has named none."""
        node = self._nova_state.node(uuid)
        if node is None:
            return ""
        return node.host if node.host == node.nodename else f"{node.host} ({node.nodename})"

    def _rebuilt(self, call: Call, asked: SelectArguments, request: NovaRequest) -> CellHosts:
        """The host of a rebuild from another image, if it may stay there: nothing is claimed. Raises NoValidHost."""
        named = named_nodes(request, self._nova_state)
        ended = Ended(reason="No host has the requested name.", step="requested_host")
        for host in () if isinstance(named, Unsatisfiable) else named:
            node, cell = self._nova_state.node(host), self._nova_state.cell_of(host)
            if node is None or cell is None:
                continue
            rejected = self._selector.suits_rebuild(host, self._requests.spec_of_rebuild(request))
            if rejected is None:
                stays = Selection(host_uuid=host, host=node.nodename, service=node.host, allocations={})
                return cell, (replace(stays, zone=self._selector.zone_of(host)),)
            steps = steps_of(rejected, self._name_of)
            funnel = tuple(replace(one, hosts=dict.fromkeys(one.rejected, (self._named(host),))) for one in steps)
            ended = Ended(reason=UNSUITED, step=funnel[-1].step, funnel=funnel)
        raise self._refused(call, asked, ended)

    def _answer(
        self, asked: SelectArguments, request: NovaRequest, instances: Sequence[CellHosts]
    ) -> list[list[Primitive]] | list[Primitive]:
        """The reply: for each instance its host and the alternates. As they were when they were claimed: a host that
        has left Nova since is answered, too, as by Nova: without an answer nobody would release what is claimed there.
        """
        if not asked.return_objects:
            return [legacy(hosts[0], self._requests.limits(hosts[0].host_uuid, request)) for _, hosts in instances]
        default = self._selector.config.settings.default_availability_zone
        return [
            [
                primitive(one, cell=cell, zone=one.zone or default, numa=self._requests.limits(one.host_uuid, request))
                for one in hosts
            ]
            for cell, hosts in instances
        ]


def without_siblings(claimed: Sequence[HostClaimed], most: int) -> list[HostClaimed]:
    """The claims of one call, without alternates on which another of its instances is, and at most this many hosts of
    each: Nova's conductor claims an alternate without a look at the server group.
    """
    chosen = {one.selections[0].host_uuid for one in claimed}
    return [
        replace(
            one, selections=(one.selections[0], *[s for s in one.selections[1:] if s.host_uuid not in chosen])[:most]
        )
        for one in claimed
    ]


def ended_by(spec: RequestSpec, results: Sequence[HostSearchResult], name_of: Callable[[int], str]) -> Ended:
    """The end of a call by its results: of several, the first that no host could take explains it. name_of: of a row of
    the replica.
    """
    unplaced = [one for one in results if not isinstance(one, HostClaimed | PlacementUnavailable)]
    first = min(unplaced, key=lambda one: 0 if isinstance(one, NoValidHost) else 1)
    lost = lost_of(loss for one in unplaced for loss in one.lost)
    if isinstance(first, NoValidHost):
        reason, funnel = message_of(spec, first.funnel), steps_of(first, name_of)
        return Ended(reason=reason, step=funnel[-1].step if funnel else "", lost=lost, funnel=funnel)
    return Ended(reason=getattr(first, "reason", "") or ENOUGH, step=getattr(first, "code", ""), lost=lost)
