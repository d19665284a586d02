"""Marks: whether the cell's database lacks commits whose messages have left it. Pure."""

# Each commit that waits for the disk raises one of the counters on record; what leaves afterwards states it. Whoever
# receives that keeps the highest of each. A database that has less on record was restored.

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from bus.contracts.base import DatabaseMark, SentSequences


class RecordedMarks(Struct, frozen=True):
    """What a cell's database has on record."""

    own: DatabaseMark  # mark of the present incarnation
    # What it had when each earlier incarnation ended; one that is not among them was another copy's.
    ended: Mapping[int, SentSequences] = {}

    @property
    def incarnation(self) -> int:
        """The present one."""
        return self.own.database_incarnation

    def ended_with(self, stated: Iterable[DatabaseMark]) -> dict[int, SentSequences]:
        """What is on record of each incarnation once this one has ended. With what others state: said once more, it
        shows nothing new.
        """
        ended = {number: DatabaseMark(number, sent) for number, sent in self.ended.items()}
        for one in (self.own, *stated):
            ended[one.database_incarnation] = one.joined(ended.get(one.database_incarnation, one))
        return {number: one.sent_sequences for number, one in sorted(ended.items())}


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
    # Of incarnation 0 is who was never commanded.
    incarnation = stated.database_incarnation
    if not incarnation:
        return False
    if incarnation >= recorded.incarnation:
        return stated.is_above(recorded.own)
    if incarnation not in recorded.ended:
        return True
    return stated.is_above(DatabaseMark(incarnation, recorded.ended[incarnation]))
