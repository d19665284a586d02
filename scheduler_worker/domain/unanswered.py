"""Which requests have had no event from their cells for too long, and are queried. Pure.

Times are one process's own (monotonic): clocks of different hosts do not decide how old an event is.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from scheduler_worker.domain.recorded_moves import RecordedMove

# After this many queries without an answer the record of the request states that its cell is silent.
SILENT_AFTER = 2
MAX_PAUSE_S = 600.0  # between two queries about one request
CELL_SILENT = "cell.silent"
CELL_UNKNOWN = "cell.unknown"


class Watched(Struct, frozen=True):
    """One request that has not ended. sequence: of its newest event, since since_s. queried: how often, since then.

    due_s: when it is queried about next.
    """

    sequence: int
    since_s: float
    due_s: float
    queried: int = 0


class Watching(Struct, frozen=True):
    """The findings of one pass. query: about these. silent: the records of these are to state it.

    waiting: how many have been queried without an answer.
    """

    watched: dict[str, Watched]
    query: tuple[RecordedMove, ...] = ()
    silent: tuple[RecordedMove, ...] = ()
    waiting: int = 0


def look(watched: dict[str, Watched], moves: Iterable[RecordedMove], *, now_s: float, pause_s: float) -> Watching:
    """All requests that are open now, with the counts of those that were open at the last pass."""
    after: dict[str, Watched] = {}
    query: list[RecordedMove] = []
    silent: list[RecordedMove] = []
    for move in moves:
        before = watched.get(move.request_id)
        if before is None or before.sequence != move.sequence:
            after[move.request_id] = Watched(move.sequence, now_s, now_s + pause_s)
            continue
        if now_s < before.due_s:
            after[move.request_id] = before
            continue
        queried = before.queried + 1
        pause = min(pause_s * 2**queried, max(pause_s, MAX_PAUSE_S))
        after[move.request_id] = replace(before, due_s=now_s + pause, queried=queried)
        query.append(move)
        if before.queried >= SILENT_AFTER and move.code not in (CELL_SILENT, CELL_UNKNOWN):
            silent.append(move)
    waiting = sum(one.queried >= SILENT_AFTER for one in after.values())
    return Watching(after, tuple(query), tuple(silent), waiting)


def marked(move: RecordedMove, queried: Watched, now_s: float, *, known: bool) -> RecordedMove:
    """Its record, which states that no event arrives. known: whether this deployment has its cell."""
    code = CELL_SILENT if known else CELL_UNKNOWN
    why = (
        f"nothing is received of it from cell {move.cell}"
        if known
        else f"there is no cell {move.cell} in this scheduler's settings"
    )
    return replace(move, code=code, reason=f"{why}: queried {queried.queried} times in {now_s - queried.since_s:.0f} s")
