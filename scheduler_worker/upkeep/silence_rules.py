"""Which requests have had no event for too long, and what their cells are sent. Times are one process's own
(monotonic): clocks of different hosts do not decide how old an event is. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import itemgetter

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.actions import CellAction, CellActionQuery
from bus.contracts.base import Message
from bus.contracts.build import DELETE_REQUESTED, BuildState
from scheduler_worker.build.decision import build_query
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.records.action_record import ActionContext, RecordedAction, RequestKey
from scheduler_worker.records.build_record import OPEN, RecordedBuild, delete_of

# After this many queries without an answer the record of the request states that its cell is silent.
SILENT_AFTER = 2
MAX_PAUSE_S = 600.0  # between two queries about one request
MAX_QUERIES = 500  # of one pass, which is one transaction; the rest is queried with the next
MAX_WATCHED = 20_000  # requests whose silence one process keeps track of; the rest comes to its turn later
CELL_SILENT = "cell.silent"
CELL_UNKNOWN = "cell.unknown"
BUILD, DELETE = "build", "delete"


class OpenRequest(Struct, frozen=True):
    """A request without an end: a build, the delete of one, or an action."""

    request_id: str
    instance_uuid: str
    kind: str
    cell: str  # that has to end it ("": none has it yet)
    sequence: int  # of its newest event
    code: str  # of its record

    @property
    def is_action(self) -> bool:
        """Whether it is a request about an instance after its build, other than its delete."""
        return self.kind not in (BUILD, DELETE)

    @property
    def key(self) -> RequestKey:
        """The key of the records that it concerns. A build may have the uuid of a request about another instance."""
        return self.request_id, self.instance_uuid


def open_build(build: RecordedBuild) -> OpenRequest | None:
    """The build, or its delete, if it has no end. Its id is its instance's. A delete waits while an action of its
    instance is under way: a cell that has not received the instance yet would take it for deleted.
    """
    is_delete = build.state is BuildState.DELETING
    if build.state not in OPEN or (is_delete and build.current.under_way is not None):
        return None
    kind = DELETE if is_delete else BUILD
    return OpenRequest(build.instance_uuid, build.instance_uuid, kind, build.cell or "", build.sequence, build.code)


def open_action(action: RecordedAction) -> OpenRequest | None:
    """The action, if a cell has to end it."""
    if action.terminal or action.cell is None:
        return None
    return OpenRequest(action.request_id, action.instance_uuid, action.kind, action.cell, action.sequence, action.code)


def open_now(request: OpenRequest, known: ActionContext) -> OpenRequest | None:
    """The request by its records as they are now; None: it has ended, or waits for another one."""
    if request.is_action:
        action = known.action_of(request.instance_uuid)
        return None if action is None else open_action(action)
    return None if known.build is None else open_build(known.build)


class Watched(Struct, frozen=True):
    """One request that has not ended."""

    seen: OpenRequest  # as it was at its newest event
    since_s: float  # when that event came, monotonic
    due_s: float  # when it is queried about next
    queried: int = 0  # how often in all: the pause grows with it until the request ends, whatever is answered
    unanswered: int = 0  # how often since its newest event


class Watching(Struct, frozen=True):
    """The findings of one pass."""

    watched: dict[RequestKey, Watched]
    query: tuple[OpenRequest, ...] = ()  # about these
    silent: tuple[OpenRequest, ...] = ()  # those among them whose records are to state it
    waiting: int = 0  # how many have been queried without an answer


def shared_out(requests: Iterable[OpenRequest], limit: int) -> list[OpenRequest]:
    """At most so many of these: the first of each cell, then the second of each, and so on. So a cell that is silent
    about thousands takes no other cell's turn, nor that of the builds that no cell has.
    """
    turns = Counter[str]()
    ranked: list[tuple[int, OpenRequest]] = []
    for one in requests:
        turns[one.cell] += 1
        ranked.append((turns[one.cell], one))
    return [one for _, one in sorted(ranked, key=itemgetter(0))[:limit]]


def look(
    watched: dict[RequestKey, Watched], requests: Iterable[OpenRequest], *, now_s: float, pause_s: float
) -> Watching:
    """The requests that are open now, with the counts of those that were open at the last pass. Where there are too
    many, one that has been queried in vain for long gives its place to one that has not been watched yet.
    """

    def place(one: OpenRequest) -> tuple[bool, bool]:
        known = watched.get(one.key)
        return known is not None and known.unanswered > SILENT_AFTER, known is None

    after: dict[RequestKey, Watched] = {}
    due: list[OpenRequest] = []
    silent: list[OpenRequest] = []
    for one in shared_out(sorted(requests, key=place), MAX_WATCHED):
        before = watched.get(one.key) or Watched(one, now_s, now_s + pause_s)
        if _has_changed(one, before.seen):
            due_s = now_s + _pause(before.queried, pause_s)
            before = replace(before, seen=one, since_s=now_s, due_s=due_s, unanswered=0)
        after[one.key] = before
        if now_s >= before.due_s:
            due.append(one)
    query = shared_out(sorted(due, key=lambda one: after[one.key].due_s), MAX_QUERIES)
    for one in query:
        before = after[one.key]
        queried = before.queried + 1
        due_s = now_s + _pause(queried, pause_s)
        after[one.key] = replace(before, due_s=due_s, queried=queried, unanswered=before.unanswered + 1)
        if one.cell and before.unanswered >= SILENT_AFTER and one.code not in (CELL_SILENT, CELL_UNKNOWN):
            silent.append(one)
    waiting = sum(one.unanswered >= SILENT_AFTER for one in after.values())
    return Watching(after, tuple(query), tuple(silent), waiting)


def _has_changed(now: OpenRequest, seen: OpenRequest) -> bool:
    return (now.sequence, now.cell, now.kind) != (seen.sequence, seen.cell, seen.kind)


def _pause(queried: int, pause_s: float) -> float:
    return float(min(pause_s * 2**queried, max(pause_s, MAX_PAUSE_S)))


def messages_to_cell(
    request: OpenRequest, known: ActionContext, config: SchedulerConfig, at: float
) -> tuple[Message, ...]:
    """The messages about a request that has had no event: the command again if a query would end what it has begun,
    otherwise a query, which begins nothing. A delete is its own query: nothing revokes it. at: seconds since the epoch.
    """
    build, requested = known.build, known.build_request
    if request.is_action:
        assert known.action is not None
        return _about_action(known.action, known)
    assert build is not None
    if request.kind == DELETE:
        return (delete_of(build, may_have_started=True),)
    assert requested is not None
    return (build_query(requested, build, at, config),)


def _about_action(action: RecordedAction, known: ActionContext) -> tuple[Message, ...]:
    """Of an instance that is to be deleted, or is, its delete ends the action: a cell that was restored to the middle
    of the action would wait for ever, with no machine. Where the instance has to arrive first, the delete follows it.
    """
    command, build = None if action.transfer is None else action.transfer.command, known.build
    query = CellActionQuery(
        request_id=action.request_id, instance_uuid=action.instance_uuid, project_id=action.project_id, kind=action.kind
    )
    if build is None:
        return (command or query,)
    if command is not None:  # the instance may have had more events since
        command = replace(command, sequence=build.sequence)
    if build.state not in DELETE_REQUESTED:
        return (command or query,)
    if isinstance(command, CellAction):
        return command, delete_of(build, may_have_started=False)
    return delete_of(build, may_have_started=True), query


def silence(watched: Watched, now_s: float, *, known: bool) -> tuple[str, str]:
    """The code and the reason of a request of which no event arrives. known: whether this deployment has its cell."""
    cell = watched.seen.cell
    code, reason = (
        (CELL_SILENT, f"nothing is received of it from cell {cell}")
        if known
        else (CELL_UNKNOWN, f"there is no cell {cell} in this scheduler's settings")
    )
    return code, f"{reason}: queried {watched.unanswered} times in {now_s - watched.since_s:.0f} s"
