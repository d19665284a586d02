"""Marks: whether the cell's database lacks commits whose messages have left it. Pure.

Each commit that waits for the disk raises one of the counters on record; what leaves afterwards states it. Whoever
receives that keeps the highest of each. A database that has less on record was set back.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from bus.contracts.base import DatabaseMark, SentSequences


class RecordedMarks(Struct, frozen=True):
    """What a cell's database has on record. own: of its incarnation. ended: what it had when each earlier one ended;
    one that is not among them was another copy's.
    """

    own: DatabaseMark
    ended: Mapping[int, SentSequences] = {}


def is_behind(recorded: RecordedMarks, stated: DatabaseMark) -> bool:
    """Whether a mark that is stated outside is above what the database has of that incarnation: it was set back.

    Of incarnation 0 is who was never commanded.
    """
    incarnation = stated.database_incarnation
    if not incarnation:
        return False
    if incarnation >= recorded.own.database_incarnation:
        return stated.is_above(recorded.own)
    if incarnation not in recorded.ended:
        return True
    return stated.is_above(DatabaseMark(incarnation, recorded.ended[incarnation]))
