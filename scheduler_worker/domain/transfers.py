"""Requests that end in another cell than they begin in (decision 0021). Pure.

The instance's cell is commanded to move it to hosts of the other one (`to_cell`), and checks these by way of the
schedulers. When nothing of it is left there, it states what it has given away; with that the other cell is commanded
(`arrival`), and the map names it, in one transaction.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import Message
from bus.contracts.build import BuildState
from bus.contracts.cell import CellDelete
from bus.contracts.moves import CellCheck, CellMoveQuery, CheckTowards, Departure, MoveEvent, MoveKind
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.recorded_moves import InstanceRecord, RecordedMove


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
    if build.state is BuildState.DELETING:
        commands.append(CellDelete(instance_uuid=build.instance_uuid, project_id=build.project_id))
    return Transfer(replace(build, cell=cell, host=None, host_uuid=None), move, cell, tuple(commands))


def handed_on(check: CellCheck, cell: str) -> OutboxMessage | None:
    """A check on its way between two cells, as it goes on from this one; None: it is not this cell's to send."""
    sender, receiver = check.asked_by.cell, check.cell
    if check.answer is not None:
        sender, receiver = receiver, sender
    if sender != cell:
        return None
    return OutboxMessage(receiver, replace(check, towards=CheckTowards.CELL), check.asked_by.request_id)
