"""A copy of a book keeps its answers while the book moves on; a search ends when its time budget is used up."""

from __future__ import annotations

import pytest

from bus.contracts.feed import Change
from bus.contracts.placement import ProviderState
from placement_worker.replica.book import Book
from placement_worker.replica.candidates import CandidatesRequest, Group, candidates
from placement_worker.replica.copies import copy_of
from placement_worker.replica.time_budget import TimeBudget, TooLong

INVENTORY = (8.0, 1, 8, 1, 8, 0, 1.0)


def uuid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def state(number: int, parent: int | None = None, *, generation: int = 1, **amounts: int) -> ProviderState:
    root = number if parent is None else parent
    return ProviderState(
        uuid=uuid(number),
        name=f"p{number}",
        root_uuid=uuid(root),
        parent_uuid=None if parent is None else uuid(parent),
        generation=generation,
        shape=generation,
        inventories=dict.fromkeys(amounts, INVENTORY),
        used=amounts,
        traits=(f"CUSTOM_{number % 3}",),
        aggregates=(uuid(900 + number % 2),),
    )


def book() -> Book:
    """Forty hosts with a device each; one class is rare."""
    made = Book()
    states = [state(number, VCPU=number % 5) for number in range(40)]
    states += [state(100 + number, number, VGPU=number % 3) for number in range(40)]
    made.load([*states, state(200, CUSTOM_RARE=1)], 1)
    return made


REQUEST = CandidatesRequest(
    groups=(
        Group(resources={"VCPU": 4}, required=(("CUSTOM_0", "CUSTOM_1"),), member_of=((uuid(900),),)),
        Group(suffix="_D", resources={"VGPU": 6}),
    )
)


def answers(book: Book) -> list[object]:
    rows = [book.row_of(uuid(number)) for number in (*range(40), *range(100, 140), 200)]
    inventories = [None if row is None else (book.inventory_of(row), book.traits_of(row)) for row in rows]
    return [
        [candidate.allocations for candidate in candidates(book, REQUEST)],
        inventories,
        [book.uuids_of(book.members(book.rows_of_roots())[0])],
        len(book),
    ]


def test_a_copy_keeps_its_answers_while_the_book_moves_on() -> None:
    made = book()
    before = answers(made)
    assert before[0]
    copy = copy_of(made)
    changes = [Change(sequence=2, provider=uuid(0), generation=2, state=state(0, generation=2, VCPU=8))]
    changes.append(Change(sequence=3, provider=uuid(101), generation=2, removed=True))
    changes.append(Change(sequence=4, provider=uuid(1), generation=2, removed=True))
    new = [state(300 + number, 2, CUSTOM_NEW=1, VGPU=0) for number in range(1200)]  # the columns grow
    changes += [
        Change(sequence=5 + number, provider=each.uuid, generation=1, state=each) for number, each in enumerate(new)
    ]
    changes.append(Change(sequence=1205, provider=uuid(200), generation=2, used={"CUSTOM_RARE": 3}))
    made._sweep_at = 1
    assert made.apply(changes) is None
    assert answers(made) != before
    assert answers(copy) == before


def test_a_search_over_its_time_budget_returns_what_it_has_or_nothing() -> None:
    made = book()
    times = iter(range(10**6))
    whole = len(candidates(made, REQUEST))
    short = TimeBudget(lambda: float(next(times)), 8, keeps_partial=True)
    found = candidates(made, REQUEST, time_budget=short)
    assert 0 < len(found) < whole
    assert not found.exhausted
    with pytest.raises(TooLong):
        candidates(made, REQUEST, time_budget=TimeBudget(lambda: float(next(times)), 8, keeps_partial=False))
    assert len(candidates(made, REQUEST)) == whole
