"""Marks: whether the cell's database lacks commits whose messages have left it. Pure, and nothing calls it yet.

Each commit that waits for the disk raises the number on record; what leaves afterwards carries it. Whoever receives
that keeps the highest. A database that has less on record was set back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct


class DatabaseMark(Struct, frozen=True, order=True):
    """The highest number that has left a database in this incarnation (0: none has)."""

    incarnation: int = 0
    sent_sequence: int = 0


def is_recovery_needed(own: DatabaseMark, heard: Iterable[DatabaseMark], ended: Mapping[int, int]) -> bool:
    """Whether a mark that was heard is above what the database has of that incarnation.

    own: on record. ended: the number on record when each earlier incarnation ended in this database; one that is not
    among them was another copy's. Of incarnation 0 is who was never commanded.
    """
    return any(_is_above(mark, own, ended) for mark in heard if mark.incarnation)


def _is_above(mark: DatabaseMark, own: DatabaseMark, ended: Mapping[int, int]) -> bool:
    if mark.incarnation >= own.incarnation:
        return mark > own
    return mark.sent_sequence > ended.get(mark.incarnation, -1)
