"""Marks: whether the cell's database lacks commits whose messages have left it. Pure."""

# Each commit that waits for the disk raises one of the counters on record; what leaves afterwards states it. Whoever
# receives that keeps the highest of each. A database that has less on record was restored.

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from bus.contracts.base import DatabaseMark, SentSequences


class RecordedMarks(Struct, frozen=True):
    """What a cell's database has on record."""

    own: DatabaseMark  # mark of the present incarnation
    # What it had when each incarnation since the last recovery ended: a recovery has settled what was before it.
    ended: Mapping[int, SentSequences] = {}

    @property
    def incarnation(self) -> int:
        """The present one."""
        return self.own.database_incarnation

    def begun(self, incarnation: int, *, recovers: bool) -> RecordedMarks:
        """What is on record once this incarnation has begun."""
        sent = self.own.sent_sequences
        ended = {} if recovers else {**self.ended, self.incarnation: sent}
        return RecordedMarks(DatabaseMark(incarnation, sent), ended)


class Stated(Struct, frozen=True):
    """What others state of the database."""

    marks: tuple[DatabaseMark, ...] = ()  # those above what this process knows it to have
    conductor: int = 0  # the incarnation that another conductor goes by
    is_known: bool = True  # each service would have stated its mark by now
    is_whole: bool = False  # each service that is up has stated its mark
    may_act: bool = True  # whether this process may go on with its database

    def highest(self, *known: DatabaseMark) -> int:
        """The highest incarnation of all."""
        return max(self.conductor, *(one.database_incarnation for one in (*self.marks, *known)))


NOTHING = Stated()


def is_behind(recorded: RecordedMarks, stated: DatabaseMark) -> bool:
    """Whether a mark stated outside is above what the database has of that incarnation: it was restored."""
    incarnation = stated.database_incarnation
    if incarnation >= recorded.incarnation:
        return stated.is_above(recorded.own)
    ended = recorded.ended.get(incarnation)
    return ended is not None and stated.is_above(DatabaseMark(incarnation, ended))
