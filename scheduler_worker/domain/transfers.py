"""Requests that end in another cell than they begin in (decision 0021). Pure.

The former cell is commanded to give the instance up (`to_cell`), and states once what it has; with that the next one is
commanded (`arrival`), and the map names it, in one transaction. An instance without a host leaves nothing behind. Of
one with a machine the former cell keeps that, stopped. The next cell gives the instance back the same way when it
cannot be built there; when it is active there for good, the former cell is commanded to destroy what it has kept.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import Message
from bus.contracts.build import BuildState
from bus.contracts.cell import CellDelete
from bus.contracts.moves import CellMove, CellMoveQuery, Condition, Departure, MoveEvent, MoveKind
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.recorded_moves import InstanceRecord, RecordedMove

_OVER = frozenset({BuildState.DELETED, BuildState.FAILED})
_SETTLED = frozenset(
    {
        Condition.ACTIVE,
        Condition.STOPPED,
        Condition.RESIZED,
        Condition.SHELVED,
        Condition.RESCUED,
        Condition.OFFLOADED,
    }
)


def for_former_cell(command: CellMove) -> CellMove:
    """The command to the cell that the instance leaves: it names the new cell, and no host there."""
    return replace(command, selections=(), server_group=None, limits={})


class Transfer(Struct, frozen=True):
    """The effect of a departure: the records after it, and the commands to the instance's new cell. handed: the
    departure, if a cell keeps a machine, or gets the instance back.
    """

    build: RecordedBuild
    move: RecordedMove | None
    cell: str
    commands: tuple[Message, ...]
    handed: Departure | None = None


def is_departure(event: MoveEvent, build: RecordedBuild, instance: InstanceRecord, cell: str) -> bool:
    """Whether an announcement of its cell hands the instance on: the cell on record, by news of it."""
    return event.departure is not None and build.cell == cell and event.sequence > instance.sequence


def transfer(event: MoveEvent, build: RecordedBuild, move: RecordedMove | None) -> Transfer:
    """The instance has left its cell: the next one is commanded what it was requested for, and deleted if it is to be.

    move: as the announcement leaves it. Where no request is under way that leads there (the schedulers' database was
    set back), the next cell is queried, with what the former one has stated: that begins nothing.
    """
    assert event.departure is not None
    departure: Departure = event.departure
    spec = replace(departure.spec, instance_uuid=build.instance_uuid, project_id=build.project_id)
    arrival, cell = replace(departure, spec=spec), departure.cell
    commands: list[Message] = []
    command = None if move is None or move.terminal else _commanded(move, arrival)
    if move is not None and command is not None:
        move = replace(move, cell=cell, host=None, command=command)
        commands.append(command)
    else:
        commands.append(_query(event, build, arrival))
        if move is not None and departure.given_back is not None:
            move = replace(move, cell=cell)  # what becomes of it now is announced there
    if build.state is BuildState.DELETING:
        commands.append(CellDelete(instance_uuid=build.instance_uuid, project_id=build.project_id))
    is_handed = departure.kept is not None or departure.given_back is not None
    return Transfer(replace(build, cell=cell, host=None), move, cell, tuple(commands), arrival if is_handed else None)


def _commanded(move: RecordedMove, arrival: Departure) -> CellMove | None:
    """The command to the cell that the instance goes to; None: the request is not known to lead there."""
    if arrival.given_back is not None:
        return CellMove(
            request_id=move.request_id,
            instance_uuid=move.instance_uuid,
            project_id=move.project_id,
            kind=move.kind,
            arrival=arrival,
        )
    if move.command is None or move.command.to_cell != arrival.cell:
        return None
    return replace(move.command, to_cell=None, arrival=arrival)


def _query(event: MoveEvent, build: RecordedBuild, arrival: Departure) -> CellMoveQuery:
    return CellMoveQuery(
        request_id=event.request_id,
        instance_uuid=build.instance_uuid,
        project_id=build.project_id,
        kind=event.kind or MoveKind.UNSHELVE,
        arrival=arrival,
    )


def is_settled(event: MoveEvent) -> bool:
    """Whether the cell that has the instance states that it does not go back: nothing is under way with it there that
    could fail, and no cell keeps a machine for that.
    """
    return event.kept_in is None and event.departure is None and event.condition in _SETTLED


def released(handed: Departure | None, build: RecordedBuild) -> CellMove | None:
    """The command to destroy the machine that a cell has kept of an instance that is active in another one."""
    if handed is None or handed.kept is None or build.cell is None:
        return None
    return CellMove(
        request_id=handed.kept.migration,
        instance_uuid=build.instance_uuid,
        project_id=build.project_id,
        kind=handed.kind,
        active_in=build.cell,
    )


def answer_keeper(
    event: MoveEvent, build: RecordedBuild, instance: InstanceRecord, cell: str
) -> tuple[str, Message] | None:
    """The answer to a cell that announces again that it keeps a machine, and the cell that it goes to.

    It is to be destroyed once the instance is active elsewhere for good, or has ended there. A cell that does not know
    that it has got the instance back is sent that once more. Otherwise the cell that has the instance is queried, with
    the departure: if it has never had it, it gives it back.
    """
    departure, handed = event.departure, instance.handed
    if departure is None or departure.kept is None or departure.kept.cell != cell or build.cell is None:
        return None
    if build.cell == cell:
        is_back = handed is not None and handed.given_back is not None
        return (cell, _query(event, build, handed)) if is_back and handed is not None else None
    is_kept = handed is not None and handed.kept is not None and handed.kept.cell == cell
    if handed is not None and is_kept and build.state not in _OVER:
        return build.cell, _query(event, build, handed)
    command = released(departure, build)
    return None if command is None else (cell, command)


def repeated(move: RecordedMove) -> Message | None:
    """The message to its cell when no event of it comes: the command itself, if a query would end it as lost."""
    if move.command is None:
        return None
    return for_former_cell(move.command) if move.command.to_cell is not None else move.command
