"""Requests that end in another cell than they begin in: an instance without a host that is unshelved elsewhere. Pure.

The former cell is commanded to give it up (`to_cell`), and states once what it has; with that the next one is commanded
(`arrival`), and the map names it, in one transaction. Nothing runs and nothing is held meanwhile.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import Message
from bus.contracts.build import BuildState
from bus.contracts.cell import CellDelete
from bus.contracts.moves import CellMove, CellMoveQuery, Departure, MoveEvent, MoveKind
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.recorded_moves import InstanceRecord, RecordedMove


def for_former_cell(command: CellMove) -> CellMove:
    """The command to the cell that the instance leaves: it names the new cell, and no host there."""
    return replace(command, selections=(), server_group=None, limits={})


class Transfer(Struct, frozen=True):
    """The effect of a departure: the records after it, and the commands to the instance's new cell."""

    build: RecordedBuild
    move: RecordedMove | None
    cell: str
    commands: tuple[Message, ...]


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
    if move is not None and not move.terminal and move.command is not None and move.command.to_cell == cell:
        command = replace(move.command, to_cell=None, arrival=arrival)
        move = replace(move, cell=cell, host=None, command=command)
        commands.append(command)
    else:
        commands.append(
            CellMoveQuery(
                request_id=event.request_id,
                instance_uuid=build.instance_uuid,
                project_id=build.project_id,
                kind=event.kind or MoveKind.UNSHELVE,
                arrival=arrival,
            )
        )
    if build.state is BuildState.DELETING:
        commands.append(CellDelete(instance_uuid=build.instance_uuid, project_id=build.project_id))
    return Transfer(replace(build, cell=cell, host=None), move, cell, tuple(commands))


def repeated(move: RecordedMove) -> Message | None:
    """The message to its cell when no event of it comes: the command itself, if a query would end it as lost."""
    if move.command is None:
        return None
    return for_former_cell(move.command) if move.command.to_cell is not None else move.command
