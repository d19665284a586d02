"""A database that lacks what has left it is found by its marks, whatever has happened to it before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from msgspec.structs import replace

from bus.contracts.base import DatabaseMark as Mark
from cell_conductor.state.database_marks import RecordedMarks, is_behind

RECORDED = RecordedMarks(Mark(3, (5, 2)), {2: (2, 1)})


@pytest.mark.parametrize(
    ("stated", "behind"),
    [
        (Mark(), False),
        (Mark(0, (9,)), False),
        (Mark(3), False),
        (Mark(3, (5,)), False),
        (Mark(3, (5, 2)), False),
        (Mark(3, (4, 2, 0)), False),
        (Mark(3, (6,)), True),
        (Mark(3, (0, 3)), True),
        (Mark(3, (1, 1, 1)), True),
        (Mark(4), True),  # of a history that it has never had
        (Mark(4, (1,)), True),
        (Mark(2, (2, 1)), False),
        (Mark(2, (3,)), True),  # weeks later, too
        (Mark(2, (0, 2)), True),
        (Mark(1), False),
        (Mark(1, (9,)), False),  # from before a recovery: of a process that was paused, or a service that was away
    ],
)
def test_which_marks_are_above_what_is_on_record(stated: Mark, *, behind: bool) -> None:
    assert is_behind(RECORDED, stated) is behind


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (Mark(), Mark(), Mark()),
        (Mark(), Mark(1, (2,)), Mark(1, (2,))),
        (Mark(1, (9,)), Mark(2), Mark(2)),
        (Mark(1, (9, 0)), Mark(1, (3, 4, 1)), Mark(1, (9, 4, 1))),
        (Mark(1, (9, 4)), Mark(1, (3,)), Mark(1, (9, 4))),
    ],
)
def test_of_two_marks_the_highest_of_each_counter_is_kept(one: Mark, other: Mark, both: Mark) -> None:
    assert one.joined(other) == other.joined(one) == both
    assert not one.is_above(both) and not other.is_above(both)


class Story:
    """A database, a backup of it, and two services; what each commit was is known here alone."""

    def __init__(self) -> None:
        self.recorded, self.has = RecordedMarks(Mark(1)), frozenset[int]()
        self.backup = (self.recorded, self.has)
        self.commits = 0
        self.left = dict.fromkeys("ab", frozenset[int]())  # what has reached each
        self.marks = dict.fromkeys("ab", Mark())

    def commit(self, slot: int, reaches: str) -> None:
        """A commit that is on disk, counted here, and whose messages reach these. Who was away in a recovery is
        recovered first: its mark is overwritten.
        """
        own = self.recorded.own
        numbers = [*own.sent_sequences, 0, 0][:2]
        numbers[slot] += 1
        self.commits += 1
        self.has |= {self.commits}
        self.recorded = replace(self.recorded, own=replace(own, sent_sequences=tuple(numbers)))
        # Its process may know of no other counter.
        stated = replace(own, sent_sequences=tuple(number if at == slot else 0 for at, number in enumerate(numbers)))
        for one in reaches:
            is_told = self.marks[one].database_incarnation in {0, own.database_incarnation}
            self.left[one] = (self.left[one] if is_told else frozenset()) | {self.commits}
            self.marks[one] = self.marks[one].joined(stated)

    def copy(self) -> None:
        self.backup = (self.recorded, self.has)

    def restore(self, hears: str) -> tuple[bool, bool]:
        """The database is restored, which begins an incarnation. Who is heard is told of it, and who is not lists late
        if it recovers. Returns (whether it was found to be behind, whether it is).
        """
        self.recorded, self.has = self.backup
        own = self.recorded.own
        lost = any(self.left[one] - self.has for one in hears)
        found = any(is_behind(self.recorded, self.marks[one]) for one in hears)
        highest = max(own.database_incarnation, *(self.marks[one].database_incarnation for one in hears))
        self.recorded = self.recorded.begun(highest + 1, recovers=found)
        if found:
            self.left = dict.fromkeys(self.left, frozenset[int]())
        self.commits += 1
        self.has |= {self.commits}
        for one in hears:
            self.left[one] = frozenset({self.commits})
            self.marks[one] = Mark(highest + 1)
        return found, lost


STEPS = ("commit", "0 a", "1 a", "0 b", "1 ab", "copy", "restore ab", "restore a")


def stories(length: int) -> Iterator[tuple[str, ...]]:
    return (story for story in product(STEPS, repeat=length) if "restore" in story[-1])


def test_in_every_story_a_loss_is_found_and_nothing_else() -> None:
    for steps in stories(5):
        story = Story()
        for step in steps:
            what, _, whom = step.partition(" ")
            if what == "copy":
                story.copy()
            elif what == "restore":
                found, lost = story.restore(whom)
                assert found is lost, (steps, step)
            else:
                story.commit(0 if what == "commit" else int(what), whom)
