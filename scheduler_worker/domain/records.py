"""What a build's record becomes when its cell announces something: pure, and exactly one terminal event a request."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.build import TERMINAL_STATES, AttemptRecord, BuildEvent, BuildState, StoryLine

# The scheduler's own sequence numbers; a conductor starts at 10, so the stream of one instance always rises.
MALFORMED, ACCEPTED, SCHEDULED, DECIDED, DELETED = 0, 1, 2, 3, 4
FIRST_OF_CONDUCTOR = 10


class Standing(Struct, frozen=True, kw_only=True):
    """Where one build stands on record. `terminal`: its build request's one terminal event was announced."""

    instance_uuid: str
    project_id: str
    state: BuildState
    sequence: int
    terminal: bool
    cell: str | None
    host: str | None = None
    code: str = ""
    reason: str = ""
    history: tuple[AttemptRecord, ...] = ()


def record(standing: Standing, event: BuildEvent, cell: str) -> tuple[Standing, BuildEvent | None]:
    """Fold one announcement of a cell in; None: it is old, or not this cell's to say, and nothing is announced."""
    if event.sequence <= standing.sequence or standing.state is BuildState.DELETED or standing.cell != cell:
        return standing, None
    # Whatever the cell called it: the one it meant as the end may have been overtaken, and is late from now on.
    ends = event.terminal or event.state in TERMINAL_STATES
    terminal = ends and (event.state is BuildState.DELETED or not standing.terminal)
    # A delete is under way: what the build still does is told, but the record keeps saying so.
    deleting = standing.state is BuildState.DELETING and event.state is not BuildState.DELETED
    folded = replace(
        standing,
        state=standing.state if deleting else event.state,
        sequence=event.sequence,
        terminal=standing.terminal or terminal,
        host=event.host or standing.host,
        code=event.code,
        reason=event.reason,
        history=event.history or standing.history,
    )
    return folded, replace(event, terminal=terminal, cell=cell, project_id=standing.project_id)


def told(event: BuildEvent, known: int, now: float) -> tuple[StoryLine, ...]:
    """One announcement as lines of the build's story: the attempts it reports for the first time, then itself.

    known: how many attempts are on record already. Each line has its own time, so that sorted they read in order.
    """
    who = f"conductor {event.cell}" if event.cell else "conductor"
    tries = tuple(
        StoryLine(at=tried.at or now, who=who, what=tried.outcome, detail=_detail(tried.host, tried))
        for tried in event.history[known:]
        if tried.outcome != "active"  # the announcement itself says so
    )
    itself = StoryLine(
        at=event.at or now,
        who=who,
        what=event.state.value,
        detail=_detail(event.host, event),
        stamps=event.stamps,
    )
    return (*tries, itself)


def _detail(host: str | None, said: BuildEvent | AttemptRecord) -> str:
    where = f"{host} (attempt {said.attempt})" if host else ""
    why = f"{said.code}: {said.reason}" if said.code and said.reason else said.code or said.reason
    return "; ".join(part for part in (where, why) if part)
