"""How the end of scheduling is written down and said: the record, the command to the cell, the event. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.contracts.base import MAX_REASON
from bus.contracts.build import BuildEvent, BuildRequest, BuildState, FunnelStep, StoryLine
from bus.contracts.catalogue import project_of
from bus.contracts.cell import CellBuild, InstanceSpec
from bus.contracts.stages import Stamps
from bus.outbox import Addressed
from bus.wire import Malformed
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.builds import DECIDED, MALFORMED, SCHEDULED, BuildDecision, RecordedBuild
from scheduler_worker.domain.explain import sentence, step
from scheduler_worker.domain.request_spec import RequestSpec, Unsatisfiable
from scheduler_worker.domain.selector import NoValidHost
from scheduler_worker.endings import ATTEMPT, Away, Contended, Ending, Placed, Stopped, Stranded

NO_HOST = "no_valid_host"
CONTENDED = "claims.contended"
EXHAUSTED = "delivery.exhausted"
STRANDED = "claim.stranded"


class Author(Struct, frozen=True):
    """Who writes a story, and when."""

    who: str
    at: float

    def line(self, what: str, detail: str = "") -> StoryLine:
        """One line of the story."""
        return StoryLine(at=self.at, who=self.who, what=what, detail=detail)


def decision(
    request: BuildRequest, spec: RequestSpec, ending: Ending, author: Author, *, nearest: int
) -> BuildDecision:
    """What is written down about one ending. An Away is none: it is tried again."""
    match ending:
        case Placed():
            return _placed(request, ending, author)
        case NoValidHost():
            return _failed(request, NO_HOST, sentence(spec, ending.funnel, nearest), author, funnel=ending.funnel)
        case Stopped():
            return _failed(request, ending.code, ending.reason, author)
        case Contended():
            reason = f"{ending.claims} claims in the last delivery alone were lost to others, after every retry"
            return _failed(request, CONTENDED, reason, author)
        case Stranded():
            return _failed(request, STRANDED, ending.reason, author)
        case Away():
            raise AssertionError(ending)


def unsatisfiable(request: BuildRequest, why: Unsatisfiable, hosts: int, author: Author) -> BuildDecision:
    """A request that no host may take as things are configured: a funnel of one step, all hosts fallen."""
    reason = f"No host can take {request.flavor}: {why.reason}."
    return _failed(request, NO_HOST, reason, author, funnel=(step(why.step, hosts, {why.code: hosts}),))


def exhausted(request: BuildRequest, author: Author) -> BuildDecision:
    """A request that was delivered again and again without an end: its client is told before the broker gives it up."""
    reason = "it was delivered to one scheduler after another, and none of them came to an end with it"
    return _failed(request, EXHAUSTED, reason, author)


def _placed(request: BuildRequest, ending: Placed, author: Author) -> BuildDecision:
    main = ending.selections[0]
    alternates = ", ".join(selection.host for selection in ending.selections[1:]) or "none"
    return BuildDecision(
        build=RecordedBuild(
            instance_uuid=request.instance_uuid,
            project_id=request.project_id,
            state=BuildState.SCHEDULED,
            sequence=SCHEDULED,
            cell=ending.cell,
            host=main.host,
        ),
        host_uuid=main.host_uuid,
        story=(
            *(author.line("not_claimed", lost) for lost in ending.lost),
            author.line("chosen", f"{main.host} of {ending.passed} candidates, weight {ending.score:.4g}"),
            author.line("claimed", f"{main.host} after {ending.claims} claim(s); alternates: {alternates}"),
            author.line("dispatched", f"to cell {ending.cell}"),
        ),
    )


def _failed(
    request: BuildRequest, code: str, reason: str, author: Author, *, funnel: tuple[FunnelStep, ...] = ()
) -> BuildDecision:
    return BuildDecision(
        build=RecordedBuild(
            instance_uuid=request.instance_uuid,
            project_id=request.project_id,
            state=BuildState.FAILED,
            sequence=DECIDED,
            terminal=True,
            code=code,
            reason=reason[:MAX_REASON],
        ),
        funnel=funnel,
        story=(author.line("failed", f"{code}: {reason}"),),
    )


def with_stages(one: BuildDecision, stamps: Stamps) -> BuildDecision:
    """An end that the scheduler decides by itself: how long the stages took goes with the story's last line."""
    *before, last = one.story
    return replace(one, story=(*before, replace(last, stamps=stamps)))


def decided_event(one: BuildDecision, at: float, stamps: Stamps | None = None) -> BuildEvent:
    """What clients hear about a decision; how long the stages took, where it is the end."""
    build = one.build
    return BuildEvent(
        instance_uuid=build.instance_uuid,
        project_id=build.project_id,
        state=build.state,
        sequence=build.sequence,
        terminal=build.terminal,
        cell=build.cell,
        host=build.host,
        attempt=ATTEMPT if build.host is not None else 0,
        code=build.code,
        reason=build.reason,
        funnel=one.funnel,
        at=at,
        stamps=stamps if build.terminal else None,
    )


def cell_build(request: BuildRequest, placed: Placed, at: float, stamps: Stamps, config: SchedulerConfig) -> CellBuild:
    """The command to the cell (C-6)."""
    return CellBuild(
        spec=InstanceSpec(
            instance_uuid=request.instance_uuid,
            project_id=request.project_id,
            user_id=request.user_id,
            name=request.name,
            image=request.image,
            flavor=request.flavor,
        ),
        selections=placed.selections,
        consumer_generation=placed.consumer_generation,
        build_timeout_s=request.build_timeout_s or config.build_timeout_s,
        requested_at=at,
        server_group=request.server_group,
        limits=config.quota_of(request.project_id),
        stamps=replace(stamps, lost_claims=len(placed.lost)) if placed.lost else stamps,
    )


def to_clients(event: BuildEvent) -> Addressed:
    """An event on the API bus."""
    return Addressed(API, event, event.instance_uuid)


class _Named(Struct):
    """The field of an unreadable request that an answer on the event stream needs."""

    instance_uuid: str


def refused_event(malformed: Malformed) -> Sequence[BuildEvent]:
    """An unreadable request, answered on the event stream of the project whose routing key it came under.

    The broker has let its publisher use that key; what the body says of a project may be forged, so no other project
    hears of it. Sequence 0 is below everything that a build on record ever announced, so the event of a clash with a
    good request is old news to whoever follows that one.
    """
    project_id = project_of(malformed.key)
    if not project_id:
        return ()
    try:
        event = BuildEvent(
            instance_uuid=msgspec.json.decode(malformed.body, type=_Named).instance_uuid,
            project_id=project_id,
            state=BuildState.REFUSED,
            sequence=MALFORMED,
            terminal=True,
            code=malformed.code,
            reason=malformed.reason[:MAX_REASON],
        )
        # Only what the contract allows.
        return (msgspec.convert(msgspec.to_builtins(event), BuildEvent),)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()
