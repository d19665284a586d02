"""A database that lacks what has left it is found by its marks, whatever has happened to it before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from cell_conductor.domain.marks import DatabaseMark as Mark
from cell_conductor.domain.marks import is_recovery_needed


@pytest.mark.parametrize(
    ("heard", "needed"),
    [
        ([], False),
        ([Mark()], False),
        ([Mark(3, 5)], False),
        ([Mark(3, 4)], False),
        ([Mark(3, 6)], True),
        ([Mark(3, 4), Mark(3, 6)], True),
        ([Mark(4, 0)], True),  # of a history that it has never had
        ([Mark(4, 1)], True),
        ([Mark(1, 2)], False),
        ([Mark(1, 3)], True),  # weeks later, too
        ([Mark(2, 0)], True),  # it has never had that one either
    ],
)
def test_which_marks_are_above_what_is_on_record(heard: list[Mark], *, needed: bool) -> None:
    assert is_recovery_needed(Mark(3, 5), heard, {1: 2}) is needed


class Story:
    """A database, a backup of it, and two services; what each commit was is known here alone."""

    def __init__(self) -> None:
        self.own, self.ended, self.has = Mark(1, 0), dict[int, int](), frozenset[int]()
        self.backup = (self.own, dict(self.ended), self.has)
        self.commits = 0
        self.left = dict.fromkeys("ab", frozenset[int]())  # what has reached each
        self.marks = dict.fromkeys("ab", Mark())

    def commit(self, reaches: str) -> None:
        """A commit that is on disk, and whose messages reach these. Who was away in a recovery is recovered first: its
        mark is overwritten.
        """
        self.commits += 1
        self.own, self.has = Mark(self.own.incarnation, self.own.sent_sequence + 1), self.has | {self.commits}
        for one in reaches:
            is_told = self.marks[one].incarnation in {0, self.own.incarnation}
            self.left[one] = self.left[one] | self.has if is_told else self.has
            self.marks[one] = max(self.marks[one], self.own)

    def copy(self) -> None:
        self.backup = (self.own, dict(self.ended), self.has)

    def restore(self, hears: str) -> tuple[bool, bool]:
        """The database is set back, which begins an incarnation. Who is heard is told of it. Returns (whether a
        recovery was found to be needed, whether it is).
        """
        self.own, ended, self.has = self.backup
        lost = any(self.left[one] - self.has for one in hears)
        found = is_recovery_needed(self.own, [self.marks[one] for one in hears], ended)
        self.ended = {**ended, self.own.incarnation: self.own.sent_sequence}
        highest = max(self.own, *(self.marks[one] for one in hears)).incarnation
        self.own = Mark(highest + 1, self.own.sent_sequence)
        self.commits += 1
        self.has |= {self.commits}
        for one in hears:
            self.left[one] = self.has
            self.marks[one] = Mark(self.own.incarnation, 0)
        return found, lost


STEPS = ("commit", "commit a", "commit b", "commit ab", "copy", "restore ab", "restore a")


def stories(length: int) -> Iterator[tuple[str, ...]]:
    return (story for story in product(STEPS, repeat=length) if "restore" in story[-1])


def test_in_every_story_a_loss_is_found_and_nothing_else() -> None:
    for steps in stories(6):
        story = Story()
        for step in steps:
            what, _, whom = step.partition(" ")
            if what == "commit":
                story.commit(whom)
            elif what == "copy":
                story.copy()
            else:
                found, lost = story.restore(whom)
                assert found is lost, (steps, step)
