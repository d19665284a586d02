"""The records of requests about instances, and the changes to them by the decision; and those of a batch of
announcements, to builds as well. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent, BuildRequest, BuildState, FunnelStep, TimelineEntry
from bus.contracts.moves import (
    ARRIVED,
    NOT_ARRIVED,
    CellBook,
    CellCheck,
    CellMove,
    CellMoveQuery,
    Condition,
    Departure,
    MachineChanged,
    MoveEvent,
    MoveKind,
    MoveRequest,
    MoveState,
)
from bus.contracts.objects import CellDecision
from bus.contracts.placement import Claim, ClaimOutcome, ClaimResult, Release, ReleaseResult, Revert, RevertResult
from bus.faults import Fault, RequestRefused
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.domain.builds import (
    FAILED_OR_REFUSED,
    SCHEDULED,
    Author,
    BuildUpdate,
    RecordedBuild,
    SinceBuild,
    announced_build,
    delete_of,
    is_early,
    is_known,
    present_flavor,
)
from scheduler_worker.domain.requests import (
    OFF_RECORD,
    RecordedRequest,
    RequestDelivery,
    digest_of,
    is_newer,
    timeline_of,
)

# (its id, its instance). The id alone names no request: a client may give it to two, about two instances.
RequestKey: TypeAlias = tuple[str, str]


class RecordedMove(RecordedRequest, frozen=True, kw_only=True):
    """The record of one request.

    created_at: seconds since the epoch. command: of one that ends in another cell than it begins in, what its cell is
    to do now; None: of every other one, and once it has ended.
    """

    request_id: str
    kind: MoveKind
    state: MoveState
    funnel: tuple[FunnelStep, ...] = ()
    created_at: float = 0.0
    command: CellMove | None = None


class PendingMove(Struct, frozen=True, kw_only=True):
    """A request that has no outcome yet. position: in its batch."""

    position: int
    request: MoveRequest
    taken_at: float
    delivery: RequestDelivery = RequestDelivery()

    @property
    def key(self) -> RequestKey:
        """The key of the records that it concerns."""
        return self.request.request_id, self.request.instance_uuid

    @property
    def digest(self) -> bytes:
        """Of its whole content."""
        return digest_of(self.request)


class MoveContext(Struct, frozen=True, kw_only=True):
    """The records that a request concerns. build_request: as it was built.

    names_instance: the request_id is the uuid of an instance.
    """

    move: RecordedMove | None = None
    build: RecordedBuild | None = None
    build_request: BuildRequest | None = None
    names_instance: bool = False

    @property
    def now(self) -> SinceBuild:
        """The instance's present state."""
        assert self.build is not None
        return self.build.now

    def move_of(self, instance_uuid: str) -> RecordedMove | None:
        """The request, if it is about this instance: a client may have given its id to one about another."""
        return self.move if self.move is not None and self.move.instance_uuid == instance_uuid else None


def flavor_of(known: MoveContext) -> str:
    """The flavor that the instance has now."""
    assert known.build_request is not None
    return present_flavor(known.build_request.flavor, known.now)


def image_of(known: MoveContext) -> str:
    """The image that the instance has now."""
    assert known.build_request is not None
    return known.now.image or known.build_request.image


def image_properties_of(known: MoveContext) -> Mapping[str, str]:
    """The properties of the image that the instance has now."""
    assert known.build_request is not None
    return known.now.image_properties.get(image_of(known), known.build_request.image_properties)


def recorded(pending: PendingMove, state: MoveState, author: Author, **more: object) -> RecordedMove:
    """The record of a request that was dispatched, refused, or failed because no host fits."""
    request = pending.request
    ended = state is not MoveState.SCHEDULED
    return RecordedMove(
        request_id=request.request_id,
        instance_uuid=request.instance_uuid,
        project_id=request.project_id,
        kind=request.kind,
        digest=pending.digest,
        state=state,
        sequence=FAILED_OR_REFUSED if ended else SCHEDULED,
        terminal=ended,
        created_at=author.at,
        **more,  # type: ignore[arg-type]
    )


def event_of(move: RecordedMove, known: MoveContext, at: float) -> MoveEvent:
    """The scheduler's event about its decision on a request."""
    is_theirs = known.build is not None and known.build.project_id == move.project_id
    return MoveEvent(
        request_id=move.request_id,
        instance_uuid=move.instance_uuid,
        project_id=move.project_id,
        kind=move.kind,
        state=move.state,
        sequence=move.sequence,
        terminal=move.terminal,
        condition=(known.now.condition if move.terminal else Condition.MOVING) if is_theirs else Condition.UNKNOWN,
        cell=move.cell,
        host=move.host,
        flavor=flavor_of(known) if is_theirs and known.build_request is not None else "",
        code=move.code,
        reason=move.reason,
        funnel=move.funnel,
        at=at,
    )


# --- what cells announce

# A resize may still give the instance its new flavor, or its old one again.
_MAY_CHANGE_FLAVOR = (Condition.MOVING, Condition.RESIZED, Condition.UNKNOWN)

ANNOUNCED, LATE, EARLY = "announced", "late", "early"


def announced_move(
    move: RecordedMove, build: RecordedBuild, event: MoveEvent
) -> tuple[RecordedMove, RecordedBuild, MoveEvent | None]:
    """Apply what its cell announces of a request; returns the request, the instance, and the event to publish (None: it
    is outdated).
    """
    # An event after the end (source gone, confirmed by itself) may overtake the end on the way here; the end is still
    # applied.
    if (event.terminal and move.terminal) or not is_newer(event, move.sequence, ends=event.terminal):
        return move, build, None
    instance = build.now
    is_newest, is_awaited = is_newer(event, build.sequence), instance.under_way == move.request_id
    host_uuid, number = event.host_uuid, event.sequence
    event = replace(event, cell=move.cell, project_id=move.project_id, departure=None, host_uuid=None)
    if number == OFF_RECORD:  # its cell has no record of the instance, and so no number: clients have had more
        event = replace(event, sequence=move.sequence + 1)
    if not move.terminal:
        # An event after the terminal one (confirmed by itself, source gone) does not reopen the request.
        after = replace(
            move,
            state=event.state,
            sequence=max(event.sequence, move.sequence),
            terminal=event.terminal,
            host=event.host or move.host,
            host_uuid=host_uuid or move.host_uuid,
            code=event.code,
            reason=event.reason,
            history=event.history or move.history,
            command=None if event.terminal else move.command,
        )
    else:
        after = replace(move, sequence=event.sequence)
    if is_newest or (event.terminal and is_awaited and instance.condition is Condition.MOVING):
        # A cell whose database was set back numbers from lower numbers again; its event ends the request under way.
        instance = replace(instance, condition=event.condition)
    # Before the end, host and cell are the destination's. An event after the end (source gone, undone by itself) names
    # the reason itself.
    names_what_it_is = event.terminal or (move.terminal and event.condition is not Condition.MOVING)
    if names_what_it_is and (is_newest or (event.terminal and is_awaited)):
        if event.condition is Condition.OFFLOADED:
            build = replace(build, host=None, host_uuid=None)
        elif event.host:
            build = replace(build, host=event.host, host_uuid=host_uuid)
        instance = replace(instance, flavor=event.flavor or instance.flavor, image=event.image or instance.image)
    if event.terminal and is_awaited:
        instance = replace(instance, under_way=None)
    if instance.under_way is None and instance.condition not in _MAY_CHANGE_FLAVOR:
        instance = replace(instance, new_flavor="", old_flavor="")
    return after, replace(build, instance=instance, sequence=max(number, build.sequence)), event


# --- Requests that end in another cell than they begin in (decision 0021).
#
# The instance's cell is commanded to move it to hosts of the other one (`to_cell`), and checks these by way of the
# schedulers. When nothing of it is left there, it states what it has given away; with that the other cell is commanded
# (`arrival`), and the map names it, in one transaction.


def is_owner(cell: str, stay: int, build: RecordedBuild | None) -> bool:
    """Whether a cell has the instance, in this stay: that on record, or a later one that schedulers have forgotten."""
    return build is not None and build.cell == cell and stay >= build.now.stay


def transferred(
    move: RecordedMove | None, build: RecordedBuild, event: MoveEvent
) -> tuple[RecordedMove | None, RecordedBuild, list[Message]]:
    """The instance has left its cell: the next one is commanded what it was requested for, and deleted if it is to be.
    Returns the request, the instance and these commands.

    move: as the announcement leaves it. Where no request is under way that leads there (the schedulers' database was
    set back), the next cell is queried, with what the former one has stated: that begins nothing.
    """
    assert event.departure is not None
    departure: Departure = event.departure
    spec = replace(departure.spec, instance_uuid=build.instance_uuid, project_id=build.project_id)
    sequence, cell = max(event.sequence, build.sequence), departure.cell
    arrival = replace(departure, spec=spec, sequence=sequence)
    commands: list[Message] = []
    if move is not None and not move.terminal and move.command is not None and move.command.to_cell == cell:
        # The host that is claimed there: a drain of it waits, also while that cell has not answered.
        first = arrival.selections[0]
        command = replace(move.command, to_cell=None, selections=(), arrival=arrival)
        move = replace(move, cell=cell, host=first.host, host_uuid=first.host_uuid, command=command)
        commands.append(command)
    else:
        query = CellMoveQuery(
            request_id=event.request_id,
            instance_uuid=build.instance_uuid,
            project_id=build.project_id,
            kind=event.kind or MoveKind.UNSHELVE,
            arrival=arrival,
        )
        commands.append(query)
    instance = replace(build.now, stay=departure.stay + 1)
    there = replace(build, cell=cell, host=None, host_uuid=None, sequence=sequence, instance=instance)
    if build.state is BuildState.DELETING:
        commands.append(delete_of(there, begun=False))
    return move, there, commands


def book_key(book: CellBook) -> RequestKey:
    """The key of the records that it concerns."""
    return book.asked_by.request_id, book.instance_uuid


def may_ask(book: CellBook, known: MoveContext, cell: str) -> bool:
    """Whether placement is asked this for a cell: its own instance leaves it by a move on record, for hosts that were
    chosen for that, or nothing more is claimed.
    """
    build, question, request_id = known.build, book.question, book.asked_by.request_id
    if build is None or book.asked_by.cell != cell or build.instance_uuid != book.instance_uuid:
        return False
    # What follows a claim that was given back is of the stay before: its migration is released after it.
    if not is_owner(cell, book.stay + isinstance(question, Release | Revert), build):
        return False
    if isinstance(question, Release):
        return question.consumer == book.instance_uuid or (question.consumer == request_id and question.of_migration)
    if question.consumer != book.instance_uuid:
        return False
    if isinstance(question, Revert):
        return question.migration.uuid == request_id
    move = known.move_of(book.instance_uuid)
    command = None if move is None else move.command
    if command is None or command.to_cell is None or question.project_id != build.project_id:
        return False
    chosen = [one.allocations for one in command.selections]
    is_its_own = question.migration is None or question.migration.uuid == request_id
    return is_its_own and all(option.allocations in chosen for option in question.options)


def stay_after(book: CellBook) -> int:
    """The stay that the instance is in once placement is asked this. Where by it nothing of the other cell is held any
    more a new one begins: it does not leave by what its cell has announced before. The cell was set back since, and the
    announcement may come here after this.
    """
    return book.stay + (book.question.consumer == book.instance_uuid and isinstance(book.question, Release | Revert))


def rests(asked: Sequence[CellBook], known: Mapping[RequestKey, MoveContext]) -> list[BuildUpdate]:
    """The records of instances, by request, once placement is asked this about them."""
    found: dict[str, RecordedBuild] = {}
    for one in asked:
        build = found.get(one.instance_uuid, known[book_key(one)].build)
        assert build is not None, "may_ask"
        stay = max(build.now.stay, stay_after(one))
        found[one.instance_uuid] = replace(build, instance=replace(build.now, stay=stay))
    return [BuildUpdate(build=build) for build in found.values()]


def answered(book: CellBook, answer: ClaimResult | ReleaseResult | RevertResult | Fault) -> CellBook | None:
    """With what placement has answered; None: it has not, and the cell asks again. A claim that it refuses for good is
    none that another time would be granted.
    """
    if isinstance(answer, RequestRefused) and isinstance(book.question, Claim):
        answer = ClaimResult(outcome=ClaimOutcome.INVALID, reason=f"{answer.code}: {answer.reason}")
    return None if isinstance(answer, Fault) else replace(book, answer=answer)


def refused(book: CellBook, known: MoveContext) -> CellBook | None:
    """The answer where placement is not asked for a cell: the move is not on record any more, or the instance, and
    what it holds, is another cell's. None: no cell has it on record, so what it holds is not known to be another's.
    """
    if isinstance(book.question, Claim):
        result = ClaimResult(outcome=ClaimOutcome.INVALID, reason="the move is not on record")
        return replace(book, answer=result)
    if known.build is None:
        return None
    changed = ReleaseResult if isinstance(book.question, Release) else RevertResult
    return replace(book, answer=changed(outcome="consumer_changed"))


def handed_on(check: CellCheck, cell: str) -> OutboxMessage | None:
    """A check on its way between two cells, as it goes on from this one; None: it is not this cell's to send."""
    sender, receiver = check.asked_by.cell, check.cell
    if check.answer is not None:
        sender, receiver = receiver, sender
    if sender != cell:
        return None
    return OutboxMessage(receiver, check, check.asked_by.request_id)


def check_key(check: CellCheck) -> RequestKey:
    """The key of the records that it concerns, of one without an answer."""
    assert check.change is not None
    return check.asked_by.request_id, check.change.spec.instance_uuid


def answered_for_removed(check: CellCheck, known: MoveContext, removal: CellDecision) -> OutboxMessage | None:
    """The answer to a check about a cell that was removed, by the schedulers' record: whether the instance has left the
    cell that asks. None: they have no record of it; or none that it has left, which a record that was set back does not
    show, while no operator has stated that what the cell has is abandoned.
    """
    change, asked_by = check.change, check.asked_by
    assert change is not None
    if known.build is None:
        return None
    is_here = is_owner(asked_by.cell, check.stay, known.build)
    if is_here and not removal.abandoned:
        return None
    answer = MachineChanged(
        instance_uuid=change.spec.instance_uuid,
        attempt=change.attempt,
        order=change.order,
        host_uuid=change.host_uuid,
        service=change.service,
        change=change.change,
        done=False,
        code=NOT_ARRIVED if is_here else ARRIVED,
        asked_by=asked_by,
    )
    return OutboxMessage(asked_by.cell, replace(check, change=None, answer=answer), asked_by.request_id)


class AppliedEvent(Struct, frozen=True):
    """What became of one event. verdict: `ANNOUNCED`, or why it is not; event: as it was published, or as it came.
    departed: the cell that its instance has left for.
    """

    verdict: str
    event: BuildEvent | MoveEvent
    departed: str = ""


class Announcements:
    """The records of a batch as its events leave them, one after the other; and what is published of it.

    timelines: the instances to write, with their new entries; changed: the moves to write.
    """

    def __init__(self, builds: dict[str, RecordedBuild], moves: dict[str, RecordedMove], now: float) -> None:
        self.builds = builds
        self.moves = moves
        self._now = now
        self.timelines: dict[str, list[TimelineEntry]] = {}
        self.changed: dict[str, RecordedMove] = {}
        self.messages: list[OutboxMessage] = []

    def apply(self, event: BuildEvent | MoveEvent, cell: str, *, waited: bool = False) -> AppliedEvent:
        """Apply one event. A late or unknown event is ignored, and so is another cell's. waited: it no longer waits for
        an earlier one.
        """
        applied = self._apply(event, cell, waited=waited)
        if not isinstance(event, MoveEvent) or event.departure is None:
            return applied
        build = self.builds.get(event.instance_uuid)
        if build is None or not is_owner(cell, event.departure.stay, build):
            return applied
        self._transfer(build, event)
        return AppliedEvent(ANNOUNCED, event, event.departure.cell)

    def _apply(self, event: BuildEvent | MoveEvent, cell: str, *, waited: bool) -> AppliedEvent:
        build, move = self.builds.get(event.instance_uuid), None
        request: RecordedBuild | RecordedMove | None = build
        if isinstance(event, MoveEvent):
            request = move = self._move_of(event)
        if build is None or request is None:
            return AppliedEvent("unknown", event)
        if request.cell != cell:
            return AppliedEvent("foreign", event)
        announced: BuildEvent | MoveEvent | None
        if isinstance(event, MoveEvent):
            assert move is not None
            move, after, announced = announced_move(move, build, event)
        elif is_early(build, event) and not waited:
            return AppliedEvent(EARLY, event)
        else:
            after, announced = announced_build(build, event)
            if announced is not None and announced.stamps is not None:
                announced = replace(announced, stamps=replace(announced.stamps, announced=self._now))
        if announced is None:
            # It changes nothing, but the timeline shows it. A repeated entry is shown once.
            self._add(build, timeline_of(replace(event, cell=cell), len(event.history), self._now))
            return AppliedEvent(LATE, event)
        is_shown = move is not None or not is_known(build, after)
        self._add(after, timeline_of(announced, len(request.history), self._now) if is_shown else ())
        if move is not None:
            self._change(move)
        cause = event.instance_uuid if move is None else move.request_id
        self.messages.append(OutboxMessage(API, announced, cause))
        return AppliedEvent(ANNOUNCED, announced)

    def _transfer(self, build: RecordedBuild, event: MoveEvent) -> None:
        move, after, commands = transferred(self._move_of(event), build, event)
        if move is not None:
            self._change(move)
        who = f"conductor {build.cell}"
        left = TimelineEntry(at=event.at or self._now, who=who, what="departed", detail=after.cell or "")
        self._add(after, (left,))
        self.messages += [OutboxMessage(after.cell or "", command, event.request_id) for command in commands]

    def _move_of(self, event: MoveEvent) -> RecordedMove | None:
        """The request that an event is about, if it is one about the event's instance."""
        move = self.moves.get(event.request_id)
        return move if move is not None and move.instance_uuid == event.instance_uuid else None

    def _add(self, build: RecordedBuild, lines: Sequence[TimelineEntry]) -> None:
        self.builds[build.instance_uuid] = build
        self.timelines.setdefault(build.instance_uuid, []).extend(lines)

    def _change(self, move: RecordedMove) -> None:
        self.moves[move.request_id] = self.changed[move.request_id] = move
