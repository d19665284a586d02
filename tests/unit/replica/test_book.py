"""The replica's book: what follows what, and a follower that catches up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from msgspec.structs import replace

from bus.contracts.feed import ChangesPage, FeedHead, SnapshotPage, feed_rows
from bus.contracts.placement import ProviderState
from placement_worker.replica import catch_up
from placement_worker.replica.book import CLASS_WEIGHS, SWEEP_FROM, Book, Gap
from placement_worker.replica.catch_up import AT_ONCE, CatchUp, LocalReplica, apply
from placement_worker.replica.columns import MOVES_KEPT, Moves
from placement_worker.replica.request import Query
from placement_worker.replica.search import search
from placement_worker.replica.sharing import Sharing, sharing_of
from placement_worker.replica.trees import FIRST_SIZE, NO_ROW
from placement_worker.rest.api import copy_of
from tests.unit.replica.worlds import changed, provider, removed, used, uuid

# --- folding in changes, trees, and claims in flight


def loaded(*states: object) -> Book:
    book = Book()
    book.load(states, 10)  # type: ignore[arg-type]
    return book


def free(book: Book, number: int = 0, name: str = "VCPU") -> int:
    row = book.row_of(uuid(number))
    assert row is not None
    return int(book.free(name, np.array([row]))[0])


def test_a_hole_stops_and_is_reported() -> None:
    book = loaded(provider(0, inventories={"VCPU": 8}))
    gap = book.apply([used(11, 0, 2, {"VCPU": 1}), used(13, 0, 4, {"VCPU": 7}), used(14, 0, 5, {"VCPU": 8})])
    assert gap == Gap(expected=12, got=13)
    assert (book.sequence, free(book)) == (11, 7)


def test_known_changes_are_ignored() -> None:
    book = loaded(provider(0, inventories={"VCPU": 8}))
    assert book.apply([used(11, 0, 2, {"VCPU": 1})]) is None
    assert book.apply([used(10, 0, 9, {"VCPU": 5}), used(11, 0, 9, {"VCPU": 5}), used(12, 0, 3, {"VCPU": 2})]) is None
    assert (book.sequence, free(book)) == (12, 6)


def test_an_older_generation_loses_to_a_later_page_of_the_snapshot() -> None:
    book = loaded(provider(0, generation=7, inventories={"VCPU": 8}, used={"VCPU": 4}))
    older = provider(0, generation=6, inventories={"VCPU": 2})
    assert book.apply([used(11, 0, 5, {"VCPU": 1}), changed(12, older)]) is None
    assert (book.sequence, free(book), book.generation[0]) == (12, 4, 7)


def test_a_provider_made_again_starts_from_generation_zero() -> None:
    book = loaded(provider(0, generation=7, inventories={"VCPU": 8}))
    again = provider(0, generation=0, shape=0, inventories={"VCPU": 3})
    assert book.apply([removed(11, 0, 8), changed(12, again)]) is None
    assert (free(book), book.generation[book.row_of(uuid(0)) or 0], len(book)) == (3, 0, 1)


def test_children_may_come_before_their_root() -> None:
    child = provider(1, root=0, parent=0, inventories={"VGPU": 4})
    book = Book()
    book.apply([changed(1, child)])
    assert len(book) == 1
    assert len(book.rows_of_roots()) == 0
    assert book.row_of(uuid(0)) is None
    book.apply([changed(2, provider(0, inventories={"VCPU": 8}))])
    root = book.row_of(uuid(0))
    assert root is not None
    assert book.rows_of_roots().tolist() == [root]
    assert [book.name_of(row) for row in book.members(np.array([root]))[0].tolist()] == ["p0", "p1"]
    assert free(book, 0, "VGPU") == 4


def test_a_tree_has_its_root_first() -> None:
    states = [provider(3, root=0, parent=1), provider(2, root=0, parent=0), provider(1, root=0, parent=0), provider(0)]
    book = loaded(*states)
    first, *others = (book.name_of(row) for row in book.members(book.rows_of_roots())[0].tolist())
    assert (first, sorted(others)) == ("p0", ["p1", "p2", "p3"])
    assert book.parent[book.row_of(uuid(3)) or 0] == book.row_of(uuid(1))
    assert book.parent[book.row_of(uuid(0)) or 0] == NO_ROW


def test_rows_of_removed_trees_are_used_again() -> None:
    book = Book()
    sequence = 0
    for turn in range(3 * FIRST_SIZE):
        root = provider(2 * turn, inventories={"VCPU": 8})
        child = provider(2 * turn + 1, root=2 * turn, parent=2 * turn, inventories={"VGPU": 1})
        orders = [
            changed(0, root),
            changed(0, child),
            removed(0, 2 * turn + turn % 2, 2),
            removed(0, 2 * turn + 1 - turn % 2, 2),
        ]
        for change in orders:
            sequence += 1
            assert (
                book.apply(
                    [
                        type(change)(
                            **{**{f: getattr(change, f) for f in change.__struct_fields__}, "sequence": sequence}
                        )
                    ]
                )
                is None
            )
    assert (len(book), book.size) == (0, FIRST_SIZE)
    assert book.top <= 4
    assert not any(column.root_free.any() for column in (book.column("VCPU"), book.column("VGPU")) if column)


def test_growing_keeps_everything() -> None:
    count = 3 * FIRST_SIZE
    book = Book()
    book.apply([changed(1 + number, provider(number, inventories={"VCPU": number + 1})) for number in range(count)])
    assert book.free("VCPU", book.rows_of_roots()).tolist() == list(range(1, count + 1))


def test_values_that_no_provider_has_any_more_are_dropped() -> None:
    book = Book()
    for turn in range(1, 3 * SWEEP_FROM):
        state = provider(0, generation=turn, traits=(f"T{turn}",), inventories={"VCPU": turn})
        assert book.apply([changed(turn, state)]) is None
        assert len(book.trait_sets) <= SWEEP_FROM
    assert book.traits_of(0) == (f"T{3 * SWEEP_FROM - 1}",)
    assert free(book) == 3 * SWEEP_FROM - 1


def test_a_member_that_moves_to_another_tree_is_missed_in_the_old_one() -> None:
    device = provider(2, root=0, parent=0, inventories={"VGPU": 1})
    book = loaded(provider(0), provider(1), device, *(provider(number) for number in range(10, 20)))
    query = Query(resources={"VGPU": 1})
    assert [book.name_of(row) for row in search(book, query).roots] == ["p0"]
    book.apply([changed(11, provider(2, root=1, parent=1, generation=2, inventories={"VGPU": 1}))])
    assert [book.name_of(row) for row in search(book, query).roots] == ["p1"]
    assert (free(book, 0, "VGPU"), free(book, 1, "VGPU")) == (0, 1)


@pytest.mark.parametrize("reached", [4, 5])
def test_a_settled_claim_counts_until_the_feed_has_it(reached: int) -> None:
    book = loaded(provider(0, generation=3, inventories={"VCPU": 8}))
    book.assume("k", {uuid(0): {"VCPU": 2}})
    book.settle("k", {uuid(0): 4})
    assert free(book) == 6
    book.apply([used(11, 0, reached, {"VCPU": 2})])
    assert free(book) == 6
    assert not list(book.assumptions.keys())


def test_a_result_that_comes_after_its_change_ends_the_assumption_at_once() -> None:
    book = loaded(provider(0, generation=3, inventories={"VCPU": 8}))
    book.assume("k", {uuid(0): {"VCPU": 2}})
    book.apply([used(11, 0, 4, {"VCPU": 2})])
    assert free(book) == 4  # careful rather than right, until the result is here
    book.settle("k", {uuid(0): 4})
    assert free(book) == 6


def test_a_failed_claim_and_one_that_landed_elsewhere_are_dropped_at_once() -> None:
    book = loaded(provider(0, inventories={"VCPU": 8}), provider(1, inventories={"VCPU": 8}))
    book.assume("failed", {uuid(0): {"VCPU": 2}})
    book.assume("elsewhere", {uuid(0): {"VCPU": 3}})
    book.forget("failed")
    book.settle("elsewhere", {uuid(1): 2})
    book.forget("never seen")
    assert free(book) == 8
    assert not list(book.assumptions.keys())


def test_a_key_assumed_again_replaces_what_it_had() -> None:
    book = loaded(provider(0, inventories={"VCPU": 8}), provider(1, inventories={"VCPU": 8}))
    book.assume("k", {uuid(0): {"VCPU": 2}})
    book.assume("k", {uuid(1): {"VCPU": 3}})
    assert (free(book, 0), free(book, 1)) == (8, 5)


def test_claims_in_flight_outlive_a_snapshot() -> None:
    book = loaded(provider(0, generation=1, inventories={"VCPU": 8}), provider(1, inventories={"VCPU": 8}))
    book.assume("open", {uuid(0): {"VCPU": 1}})
    book.assume("waits", {uuid(0): {"VCPU": 2}, uuid(1): {"VCPU": 1}})
    book.settle("waits", {uuid(0): 5, uuid(1): 5}, 21)
    book.load([provider(0, generation=4, inventories={"VCPU": 8})], 20)
    assert free(book) == 5
    book.load([provider(0, generation=5, inventories={"VCPU": 8}, used={"VCPU": 2})], 21)
    assert free(book) == 5
    assert list(book.assumptions.keys()) == ["open"]


def test_the_answer_of_a_former_history_is_not_waited_for() -> None:
    """Seed 1795406506: a claim was committed, the book set back to before it, and the late answer waited for."""
    book = loaded(provider(0, generation=1, inventories={"VCPU": 8}))
    book.assume("k", {uuid(0): {"VCPU": 2}})
    book.load([provider(0, generation=1, inventories={"VCPU": 8})], 5, "restored")
    assert free(book) == 6  # it may be claimed in this history yet
    book.settle("k", {uuid(0): 2}, 11)
    assert free(book) == 8
    book.assume("k", {uuid(0): {"VCPU": 2}})  # claimed again, in this history
    book.settle("k", {uuid(0): 2}, 6)
    assert (free(book), list(book.assumptions.keys())) == (6, ["k"])


def test_a_removed_provider_takes_its_settled_claims_along() -> None:
    book = loaded(provider(0, generation=1, inventories={"VCPU": 8}))
    book.assume("k", {uuid(0): {"VCPU": 2}})
    book.settle("k", {uuid(0): 9})
    book.apply([removed(11, 0, 2)])
    assert not list(book.assumptions.keys())


def test_versions_show_which_roots_moved() -> None:
    book = loaded(provider(0, inventories={"VCPU": 8}), provider(1, root=0, parent=0), provider(2))
    version, kept = book.moves.end, book.cache(list)
    assert book.moves.since(version) is not None
    assert book.moves.since(version).tolist() == []  # type: ignore[union-attr]
    book.apply([used(11, 1, 2, {"VCPU": 0})])
    assert book.moves.since(version).tolist() == [book.row_of(uuid(0))]  # type: ignore[union-attr]
    assert book.cache(list) is kept
    book.load([], 30)
    assert book.cache(list) is not kept  # nor what else a reader has kept, with the version that it is of


def test_moves_are_remembered_within_their_bound() -> None:
    moves = Moves()
    for row in range(MOVES_KEPT):
        moves.add(row)
    assert len(moves.since(0)) == MOVES_KEPT  # type: ignore[arg-type]
    moves.add(7)
    assert moves.since(0) is None
    assert moves.since(MOVES_KEPT).tolist() == [7]  # type: ignore[union-attr]
    assert moves.since(MOVES_KEPT + 1).tolist() == []  # type: ignore[union-attr]


def test_what_is_handed_out_cannot_be_written_to() -> None:
    book = loaded(provider(0, inventories={"VCPU": 8}))
    for rows in (book.rows_of_roots(), search(book, Query(resources={"VCPU": 1})).roots):
        with pytest.raises(ValueError, match="read-only"):
            rows[0] = 5


def test_a_settled_claim_is_counted_no_more_by_a_snapshot_over_a_provider_that_was_made_anew() -> None:
    """It waited for the old provider's generation, which the new one may not reach for days: phantom use."""
    book = Book()
    book.load([provider(0, generation=6, inventories={"VCPU": 8})], 10)
    book.assume("boot", {uuid(0): {"VCPU": 2}})
    book.settle("boot", {uuid(0): 7}, 11)
    assert book.free("VCPU", book.rows_of_roots())[0] == 6
    book.load([provider(0, generation=6, inventories={"VCPU": 8})], 10)
    assert book.free("VCPU", book.rows_of_roots())[0] == 6, "this snapshot does not count it yet"
    book.load([provider(0, generation=0, inventories={"VCPU": 8})], 20)
    assert book.free("VCPU", book.rows_of_roots())[0] == 8
    assert list(book.assumptions.keys()) == []


def test_a_claim_that_the_book_has_seen_already_is_dropped_when_it_settles() -> None:
    """Its provider was deleted and created again meanwhile, so its generation is lower than the claim's."""
    book = Book()
    book.load([provider(0, generation=1, inventories={"VCPU": 8})], 20)
    book.assume("boot", {uuid(0): {"VCPU": 2}})
    book.settle("boot", {uuid(0): 7}, 15)
    assert book.free("VCPU", book.rows_of_roots())[0] == 8
    assert list(book.assumptions.keys()) == []


# --- a snapshot and many changes leave the event loop its turns, and readers see the old book or the new one

MANY = 10 * AT_ONCE


class Turns:
    """The work on books in each turn of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        self._now = 0
        for name in ("_put", "_use"):
            monkeypatch.setattr(Book, name, self._counted(getattr(Book, name)))

    def _counted(self, done: object) -> object:
        def count(*arguments: object) -> object:
            self._now += 1
            self.most = max(self.most, self._now)
            return done(*arguments)  # type: ignore[operator]

        return count

    async def during(self, work: Awaitable[object]) -> object:
        """Until the work is done, with a task beside it that wants every turn."""
        task = asyncio.ensure_future(work)
        while not task.done():
            self._now = 0
            await asyncio.sleep(0)
        return await task


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    return Turns(monkeypatch)


def free_after(book: Book, number: int = 0) -> int:
    row = book.row_of(uuid(number))
    assert row is not None
    return int(book.free("VCPU", np.array([row]))[0])


def hosts(count: int, capacity: int = 8) -> list[ProviderState]:
    return [provider(number, inventories={"VCPU": capacity}) for number in range(count)]


class Source:
    """A store with one page of providers and one of changes."""

    async def head(self) -> FeedHead:
        return FeedHead(sequence=MANY, history="h")

    async def changes(self, after: int, limit: int, history: str = "") -> ChangesPage:
        changes = [used(number + 1, number, 2, {"VCPU": 1}) for number in range(after, min(after + limit, MANY))]
        return ChangesPage(rows=feed_rows(changes), head=MANY, history="h")

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        return SnapshotPage(sequence=0, providers=tuple(hosts(MANY)), history="h")


class Snapshot(Source):
    """A store with a snapshot of these providers, and nothing new since. meanwhile: called when it has been read."""

    def __init__(self, states: list[ProviderState], sequence: int, meanwhile: Callable[[], None] = bool) -> None:
        self.states, self.sequence, self.meanwhile = tuple(states), sequence, meanwhile

    async def changes(self, after: int, limit: int, history: str = "") -> ChangesPage:
        self.meanwhile()
        return ChangesPage(rows=(), head=self.sequence, history="h")

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        return SnapshotPage(sequence=self.sequence, providers=self.states, history="h")


async def test_a_replica_is_loaded_and_brought_up_to_date_in_turns(turns: Turns) -> None:
    replica = LocalReplica(Source())
    await turns.during(replica.fresh())
    assert 0 < turns.most <= AT_ONCE
    assert len(replica.book) == MANY
    assert replica.book.sequence == MANY
    assert free_after(replica.book, MANY - 1) == 7
    assert catch_up.PAGE <= 1000


async def test_readers_have_the_old_book_until_the_new_one_is_whole() -> None:
    book = Book()
    book.load(hosts(3), 5, "h")
    book.assume("k", {uuid(1): {"VCPU": 2}})
    kept = book.cache(list)

    def meanwhile() -> None:
        assert (len(book), free_after(book), free_after(book, 1), book.sequence) == (3, 8, 6, 5)
        book.assume("l", {uuid(2): {"VCPU": 3}})
        book.forget("k")
        assert book.cache(list) is kept

    await CatchUp(book, Snapshot(hosts(MANY, capacity=16), 9, meanwhile)).run()
    now = (len(book), free_after(book), free_after(book, 1), free_after(book, 2), book.sequence)
    assert now == (MANY, 16, 16, 13, 9)
    assert book.cache(list) is not kept
    book.forget("l")
    assert free_after(book, 2) == 16


async def test_the_first_search_after_a_load_builds_nothing_that_the_next_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    book = Book()
    await CatchUp(book, Snapshot(hosts(3), 1)).run()
    built: list[str] = []
    monkeypatch.setattr(Sharing, "__init__", lambda *_: built.append("sharing"))
    flatnonzero = np.flatnonzero
    monkeypatch.setattr(np, "flatnonzero", lambda flags: built.append("rows") or flatnonzero(flags))
    roots = book.rows_of_roots()
    assert sharing_of(book) is sharing_of(book)
    assert (roots.tolist(), built) == ([0, 1, 2], [])


async def test_changes_are_applied_in_turns_up_to_a_hole(turns: Turns) -> None:
    book = Book()
    book.load(hosts(MANY), 0)
    changes = [used(number + 1, number, 2, {"VCPU": 1}) for number in range(MANY)]
    turns.most = 0
    hole = [*changes[: 2 * AT_ONCE], *changes[2 * AT_ONCE + 1 :]]
    assert await turns.during(apply(book, hole)) == Gap(2 * AT_ONCE + 1, 2 * AT_ONCE + 2)
    assert book.sequence == 2 * AT_ONCE
    assert await turns.during(apply(book, changes)) is None
    assert book.sequence == MANY
    assert 0 < turns.most <= AT_ONCE


def test_columns_of_classes_that_came_and_went_are_freed() -> None:
    book = Book()
    book.load([*hosts(2), provider(2, inventories={"CUSTOM_STAYS": 4})], 0)
    rounds = 4 * SWEEP_FROM // CLASS_WEIGHS
    for turn in range(rounds):
        name = f"CUSTOM_{turn}"
        state = provider(0, generation=2 + turn, shape=2 + turn, inventories={"VCPU": 8, name: 4}, used={name: 1})
        book.apply([changed(book.sequence + 1, state)])
    assert len(book.resource_classes()) < rounds // 2
    assert {"VCPU", "CUSTOM_STAYS", f"CUSTOM_{rounds - 1}"} < set(book.resource_classes())
    rows = {number: book.row_of(uuid(number)) for number in range(3)}
    assert {number: list(book.inventory_of(row or 0)) for number, row in rows.items()} == {
        0: [f"CUSTOM_{rounds - 1}", "VCPU"],
        1: ["VCPU"],
        2: ["CUSTOM_STAYS"],
    }
    # A class that was freed comes again, also with a claim in flight.
    book.assume("k", {uuid(1): {"CUSTOM_0": 1}})
    book.apply([changed(book.sequence + 1, provider(1, generation=9, inventories={"CUSTOM_0": 4}))])
    assert int(book.free("CUSTOM_0", np.array([rows[1]]))[0]) == 3
    book.apply([removed(book.sequence + 1, 2, 2)])
    book._sweep_at = 0
    book.apply([used(book.sequence + 1, 1, 10, {"CUSTOM_0": 2})])
    assert "CUSTOM_STAYS" not in book.resource_classes()
    assert int(book.free("CUSTOM_0", np.array([rows[1]]))[0]) == 1


def uncounted(book: Book) -> int:
    """Distinct inventories that the next search would have to turn into columns."""
    return sum(len(column.kinds) - column.kinds._filled for column in book._by_number)


async def test_a_load_leaves_nothing_to_be_built_by_the_first_search() -> None:
    book = Book()
    await CatchUp(book, Snapshot([provider(n, inventories={"VCPU": 8 + n}) for n in range(MANY)], 1)).run()
    column = book.column("VCPU")
    assert column is not None and len(column.kinds) == MANY + 1 and uncounted(book) == 0
    copied = copy_of(book)
    assert uncounted(copied) == 0
    rows = book.rows_of_roots()
    assert book.totals("VCPU", rows).tolist() == copied.totals("VCPU", rows).tolist() == list(range(8, 8 + MANY))


def reported(book: Book) -> Book:
    """A book that one host has reported to."""
    assert book.apply([changed(1, provider(0, inventories={"VCPU": 8}))]) is None
    return book


def test_a_copy_has_its_own_log_of_changes() -> None:
    made = reported(Book())
    copy = copy_of(made)
    assert copy.moves is not made.moves
    assert copy.shape_moves is not made.shape_moves


def test_a_copy_gets_none_of_the_books_later_values() -> None:
    """Another thread reads it: a list that grows meanwhile has another length than the columns made of it."""
    made = reported(Book())
    copy = copy_of(made)
    later = provider(0, generation=2, shape=2, inventories={"VCPU": 9}, traits=("T",), aggregates=(uuid(9),))
    assert made.apply([changed(2, later)]) is None

    def counted(book: Book) -> list[int]:
        kinds = [column.kinds for column in book._by_number]
        return [len(one) for one in (*kinds, book.trait_sets, book.aggregate_sets)]

    assert (counted(copy), counted(made)) == ([2, 1, 1], [3, 2, 2])


def test_the_pairs_of_a_copy_are_computed_once_however_the_book_moves_on() -> None:
    made = reported(Book())
    copy = copy_of(made)
    first = sharing_of(copy)
    assert sharing_of(copy) is first
    rebuilt = 0
    for sequence in range(2, 12):
        report = provider(0, generation=sequence, shape=sequence, inventories={"VCPU": sequence % 8})
        assert made.apply([changed(sequence, report)]) is None
        found = sharing_of(copy)
        rebuilt += found is not first
        first = found
    assert rebuilt == 0, f"computed again after {rebuilt} of 10 reports to the live book"


@pytest.mark.parametrize(
    ("total", "capacity", "used", "shown"),
    [
        pytest.param(1, 0, 1, 1, id="a node of bare metal that is deployed"),
        pytest.param(1, 0, 0, 0, id="one that is held back"),
        pytest.param(8, 4, 6, 6, id="a part is reserved"),
        pytest.param(8, 16, 2, 16, id="overcommitted"),
        pytest.param(4, 4, 6, 4, id="shrunk under its usage"),
    ],
)
def test_what_is_used_of_a_reserved_inventory_is_a_part_of_what_there_is(
    total: int, capacity: int, used: int, shown: int
) -> None:
    """Bare metal was shown as 1 of 0."""
    node = (float(capacity), 1, 2**31 - 1, 1, total, 0, 1.0)
    book = loaded(replace(provider(0, inventories={"X": 1}, used={"X": used}), inventories={"X": node}))
    rows = np.array([book.row_of(uuid(0))])
    assert (book.usage("X", rows)[0], book.capacities_in_use("X", rows)[0]) == (used, shown)
    assert book.capacities_in_use("Y", rows).tolist() == [0]


async def test_forgotten_inventories_leave_the_columns_of_the_others() -> None:
    book = Book()
    book.load([provider(number, inventories={"VCPU": 8 + number}) for number in range(SWEEP_FROM)], 1)
    smaller = [provider(number, generation=2, inventories={"VCPU": 5}) for number in range(0, SWEEP_FROM, 2)]
    changes = [changed(sequence, state) for sequence, state in enumerate(smaller, 2)]
    assert book.apply(changes) is None
    column = book.column("VCPU")
    assert column is not None and len(column.kinds) == SWEEP_FROM // 2 + 2, "swept: the odd ones, 5 and none"
    assert uncounted(book) == 0
    expected = [5 if number % 2 == 0 else 8 + number for number in range(SWEEP_FROM)]
    assert book.totals("VCPU", np.array([book.row_of(uuid(n)) for n in range(SWEEP_FROM)])).tolist() == expected


def test_the_first_search_imports_nothing() -> None:
    """NumPy imports a part of itself when `numpy.unique` is first called: 8 ms of the first search."""
    script = (
        "import sys; from placement_worker.replica.book import Book; from placement_worker.replica.search import *; "
        "before = set(sys.modules); search(Book(), Query(resources={'VCPU': 1})); print(set(sys.modules) - before)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "set()"


# --- a book that is set back while a replica reads its snapshot: the snapshot begins again from its first page


class SetBackAfter:
    """A store of ten providers that becomes another history's after so many pages of a snapshot."""

    def __init__(self, pages: int) -> None:
        self.states = [provider(number, inventories={"VCPU": 8}) for number in range(10)]
        self.pages, self.left = 0, pages

    @property
    def history(self) -> str:
        return "h1" if self.left > 0 else "h2"

    async def head(self) -> FeedHead:
        return FeedHead(sequence=5, history=self.history)

    async def changes(self, after: int, limit: int, history: str = "") -> ChangesPage:
        return ChangesPage(head=5, too_old=history not in ("", self.history), history=self.history)

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        limit = 3
        left = [one for one in self.states if after is None or one.uuid > after]
        page = SnapshotPage(sequence=5, providers=tuple(left[:limit]), more=len(left) > limit, history=self.history)
        self.left -= 1
        return page


async def test_a_local_replica_reads_all_of_a_book_that_was_set_back_while_it_read() -> None:
    for pages in range(6):
        replica = LocalReplica(SetBackAfter(pages))
        for _ in range(3):
            book = await replica.fresh()
        assert (len(book), book.history) == (10, "h2" if pages < 5 else book.history), pages
