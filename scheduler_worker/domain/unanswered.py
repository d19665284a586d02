"""Which requests have had no event from their cells for too long, and are queried. Pure.

Times are one process's own (monotonic): clocks of different hosts do not decide how old an event is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import Message
from bus.contracts.build import BuildState
from bus.contracts.cell import CellDelete
from bus.contracts.cell_queries import CellBuildQuery
from bus.contracts.moves import CellMoveQuery
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.builds import OpenBuild
from scheduler_worker.domain.decision_messages import NO_FLAVOR, instance_spec
from scheduler_worker.domain.recorded_moves import RecordedMove
from scheduler_worker.domain.transfers import repeated

# After this many queries without an answer the record of the request states that its cell is silent.
SILENT_AFTER = 2
MAX_PAUSE_S = 600.0  # between two queries about one request
MAX_QUERIES = 500  # of one pass; the rest is queried with the next
CELL_SILENT = "cell.silent"
CELL_UNKNOWN = "cell.unknown"


OpenRequest = RecordedMove | OpenBuild
R = TypeVar("R", RecordedMove, OpenBuild)


class Watched(Struct, frozen=True):
    """One request that has not ended. sequence: of its newest event, since since_s. queried: how often, since then.

    due_s: when it is queried about next.
    """

    sequence: int
    since_s: float
    due_s: float
    queried: int = 0


class Watching(Struct, Generic[R], frozen=True):
    """The findings of one pass. query: about these. silent: the records of these are to state it.

    waiting: how many have been queried without an answer.
    """

    watched: dict[str, Watched]
    query: tuple[R, ...] = ()
    silent: tuple[R, ...] = ()
    waiting: int = 0


def look(watched: dict[str, Watched], requests: Iterable[R], *, now_s: float, pause_s: float) -> Watching[R]:
    """All requests that are open now, with the counts of those that were open at the last pass."""
    after: dict[str, Watched] = {}
    query: list[R] = []
    silent: list[R] = []
    for one in requests:
        before = watched.get(one.request_id)
        if before is None or before.sequence != one.sequence:
            after[one.request_id] = Watched(one.sequence, now_s, now_s + pause_s)
            continue
        if now_s < before.due_s or len(query) >= MAX_QUERIES:
            after[one.request_id] = before
            continue
        queried = before.queried + 1
        pause = min(pause_s * 2**queried, max(pause_s, MAX_PAUSE_S))
        after[one.request_id] = replace(before, due_s=now_s + pause, queried=queried)
        query.append(one)
        if before.queried >= SILENT_AFTER and one.code not in (CELL_SILENT, CELL_UNKNOWN):
            silent.append(one)
    waiting = sum(one.queried >= SILENT_AFTER for one in after.values())
    return Watching(after, tuple(query), tuple(silent), waiting)


def message_to_cell(request: OpenRequest, config: SchedulerConfig) -> Message:
    """The message about a request that has had no event: the command once more if a query would end what it has begun,
    otherwise a query, which begins nothing.

    A delete is its own query: nothing revokes it, and its cell carries it out whatever it has forgotten.
    """
    if isinstance(request, RecordedMove):
        return repeated(request) or CellMoveQuery(
            request_id=request.request_id,
            instance_uuid=request.instance_uuid,
            project_id=request.project_id,
            kind=request.kind,
        )
    build, requested = request.build, request.request
    if build.state is BuildState.DELETING:
        return CellDelete(instance_uuid=build.instance_uuid, project_id=build.project_id, begun=True)
    return CellBuildQuery(
        spec=instance_spec(requested, config.flavors.get(requested.flavor, NO_FLAVOR), config.on_host_failure),
        build_timeout_s=requested.build_timeout_s or config.build_timeout_s,
        sequence=build.sequence,
    )


def marked(request: R, queried: Watched, now_s: float, *, known: bool) -> R:
    """Its record, which states that no event arrives. known: whether this deployment has its cell."""
    code = CELL_SILENT if known else CELL_UNKNOWN
    why = (
        f"nothing is received of it from cell {request.cell}"
        if known
        else f"there is no cell {request.cell} in this scheduler's settings"
    )
    reason = f"{why}: queried {queried.queried} times in {now_s - queried.since_s:.0f} s"
    if isinstance(request, RecordedMove):
        return replace(request, code=code, reason=reason)
    return replace(request, build=replace(request.build, code=code, reason=reason))
