"""A replica of placement: what follows what, and a follower that catches up."""

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
from placement_worker.replica.catch_up import AT_ONCE, CatchUp, LocalReplica, apply
from placement_worker.replica.columns import CHANGES_KEPT, ChangedRows
from placement_worker.replica.replica import CLASS_WEIGHS, SWEEP_FROM, Gap, Replica
from placement_worker.replica.request import Query
from placement_worker.replica.search import search
from placement_worker.replica.sharing import Sharing, sharing_of
from placement_worker.replica.trees import FIRST_SIZE, NO_ROW
from placement_worker.rest.api import copy_of
from tests.unit.replica.worlds import changed, provider, removed, used, uuid

# --- folding in changes, trees, and claims in flight


def loaded(*states: object) -> Replica:
    replica = Replica()
    replica.load(states, 10)  # type: ignore[arg-type]
    return replica


def free(replica: Replica, number: int = 0, name: str = "VCPU") -> int:
    row = replica.row_of(uuid(number))
    assert row is not None
    return int(replica.free(name, np.array([row]))[0])


def test_a_hole_stops_and_is_reported() -> None:
    replica = loaded(provider(0, inventories={"VCPU": 8}))
    gap = replica.apply([used(11, 0, 2, {"VCPU": 1}), used(13, 0, 4, {"VCPU": 7}), used(14, 0, 5, {"VCPU": 8})])
    assert gap == Gap(expected=12, got=13)
    assert (replica.sequence, free(replica)) == (11, 7)


def test_known_changes_are_ignored() -> None:
    replica = loaded(provider(0, inventories={"VCPU": 8}))
    assert replica.apply([used(11, 0, 2, {"VCPU": 1})]) is None
    assert (
        replica.apply([used(10, 0, 9, {"VCPU": 5}), used(11, 0, 9, {"VCPU": 5}), used(12, 0, 3, {"VCPU": 2})]) is None
    )
    assert (replica.sequence, free(replica)) == (12, 6)


def test_an_older_generation_loses_to_a_later_page_of_the_snapshot() -> None:
    replica = loaded(provider(0, generation=7, inventories={"VCPU": 8}, used={"VCPU": 4}))
    older = provider(0, generation=6, inventories={"VCPU": 2})
    assert replica.apply([used(11, 0, 5, {"VCPU": 1}), changed(12, older)]) is None
    assert (replica.sequence, free(replica), replica.generation[0]) == (12, 4, 7)


def test_a_provider_made_again_starts_from_generation_zero() -> None:
    replica = loaded(provider(0, generation=7, inventories={"VCPU": 8}))
    again = provider(0, generation=0, spec_generation=0, inventories={"VCPU": 3})
    assert replica.apply([removed(11, 0, 8), changed(12, again)]) is None
    assert (free(replica), replica.generation[replica.row_of(uuid(0)) or 0], len(replica)) == (3, 0, 1)


def test_children_may_come_before_their_root() -> None:
    child = provider(1, root=0, parent=0, inventories={"VGPU": 4})
    replica = Replica()
    replica.apply([changed(1, child)])
    assert len(replica) == 1
    assert len(replica.rows_of_roots()) == 0
    assert replica.row_of(uuid(0)) is None
    replica.apply([changed(2, provider(0, inventories={"VCPU": 8}))])
    root = replica.row_of(uuid(0))
    assert root is not None
    assert replica.rows_of_roots().tolist() == [root]
    assert [replica.name_of(row) for row in replica.members(np.array([root]))[0].tolist()] == ["p0", "p1"]
    assert free(replica, 0, "VGPU") == 4


def test_a_tree_has_its_root_first() -> None:
    states = [provider(3, root=0, parent=1), provider(2, root=0, parent=0), provider(1, root=0, parent=0), provider(0)]
    replica = loaded(*states)
    first, *others = (replica.name_of(row) for row in replica.members(replica.rows_of_roots())[0].tolist())
    assert (first, sorted(others)) == ("p0", ["p1", "p2", "p3"])
    assert replica.parent[replica.row_of(uuid(3)) or 0] == replica.row_of(uuid(1))
    assert replica.parent[replica.row_of(uuid(0)) or 0] == NO_ROW


def test_rows_of_removed_trees_are_used_again() -> None:
    replica = Replica()
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
                replica.apply(
                    [
                        type(change)(
                            **{**{f: getattr(change, f) for f in change.__struct_fields__}, "sequence": sequence}
                        )
                    ]
                )
                is None
            )
    assert (len(replica), replica.size) == (0, FIRST_SIZE)
    assert replica.top <= 4
    assert not any(column.root_free.any() for column in (replica.column("VCPU"), replica.column("VGPU")) if column)


def test_growing_keeps_everything() -> None:
    count = 3 * FIRST_SIZE
    replica = Replica()
    replica.apply([changed(1 + number, provider(number, inventories={"VCPU": number + 1})) for number in range(count)])
    assert replica.free("VCPU", replica.rows_of_roots()).tolist() == list(range(1, count + 1))


def test_values_that_no_provider_has_any_more_are_dropped() -> None:
    replica = Replica()
    for turn in range(1, 3 * SWEEP_FROM):
        state = provider(0, generation=turn, traits=(f"T{turn}",), inventories={"VCPU": turn})
        assert replica.apply([changed(turn, state)]) is None
        assert len(replica.trait_sets) <= SWEEP_FROM
    assert replica.traits_of(0) == (f"T{3 * SWEEP_FROM - 1}",)
    assert free(replica) == 3 * SWEEP_FROM - 1


def test_a_failed_claim_and_one_that_landed_elsewhere_are_dropped_at_once() -> None:
    replica = loaded(provider(0, inventories={"VCPU": 8}), provider(1, inventories={"VCPU": 8}))
    replica.assume("failed", {uuid(0): {"VCPU": 2}})
    replica.assume("elsewhere", {uuid(0): {"VCPU": 3}})
    replica.drop_assumed("failed")
    replica.confirm("elsewhere", {uuid(1): 2})
    replica.drop_assumed("never seen")
    assert free(replica) == 8
    assert not list(replica.assumptions.keys())


def test_claims_in_flight_outlive_a_snapshot() -> None:
    replica = loaded(provider(0, generation=1, inventories={"VCPU": 8}), provider(1, inventories={"VCPU": 8}))
    replica.assume("open", {uuid(0): {"VCPU": 1}})
    replica.assume("waits", {uuid(0): {"VCPU": 2}, uuid(1): {"VCPU": 1}})
    replica.confirm("waits", {uuid(0): 5, uuid(1): 5}, 21)
    replica.load([provider(0, generation=4, inventories={"VCPU": 8})], 20)
    assert free(replica) == 5
    replica.load([provider(0, generation=5, inventories={"VCPU": 8}, used={"VCPU": 2})], 21)
    assert free(replica) == 5
    assert list(replica.assumptions.keys()) == ["open"]


def test_the_answer_of_a_former_history_is_not_waited_for() -> None:
    """Seed 1795406506: a claim was committed, placement set back to before it, and the late answer waited for."""
    replica = loaded(provider(0, generation=1, inventories={"VCPU": 8}))
    replica.assume("k", {uuid(0): {"VCPU": 2}})
    replica.load([provider(0, generation=1, inventories={"VCPU": 8})], 5, "restored")
    assert free(replica) == 6  # it may be claimed in this incarnation yet
    replica.confirm("k", {uuid(0): 2}, 11)
    assert free(replica) == 8
    replica.assume("k", {uuid(0): {"VCPU": 2}})  # claimed again, in this incarnation
    replica.confirm("k", {uuid(0): 2}, 6)
    assert (free(replica), list(replica.assumptions.keys())) == (6, ["k"])


def test_a_removed_provider_takes_its_settled_claims_along() -> None:
    replica = loaded(provider(0, generation=1, inventories={"VCPU": 8}))
    replica.assume("k", {uuid(0): {"VCPU": 2}})
    replica.confirm("k", {uuid(0): 9})
    replica.apply([removed(11, 0, 2)])
    assert not list(replica.assumptions.keys())


def test_versions_show_which_roots_moved() -> None:
    replica = loaded(provider(0, inventories={"VCPU": 8}), provider(1, root=0, parent=0), provider(2))
    version, kept = replica.changes.end, replica.cache(list)
    assert replica.changes.since(version) is not None
    assert replica.changes.since(version).tolist() == []  # type: ignore[union-attr]
    replica.apply([used(11, 1, 2, {"VCPU": 0})])
    assert replica.changes.since(version).tolist() == [replica.row_of(uuid(0))]  # type: ignore[union-attr]
    assert replica.cache(list) is kept
    replica.load([], 30)
    assert replica.cache(list) is not kept  # nor what else a reader has kept, with the version that it is of


def test_moves_are_remembered_within_their_bound() -> None:
    changes = ChangedRows()
    for row in range(CHANGES_KEPT):
        changes.add(row)
    assert len(changes.since(0)) == CHANGES_KEPT  # type: ignore[arg-type]
    changes.add(7)
    assert changes.since(0) is None
    assert changes.since(CHANGES_KEPT).tolist() == [7]  # type: ignore[union-attr]
    assert changes.since(CHANGES_KEPT + 1).tolist() == []  # type: ignore[union-attr]


def test_what_is_handed_out_cannot_be_written_to() -> None:
    replica = loaded(provider(0, inventories={"VCPU": 8}))
    for rows in (replica.rows_of_roots(), search(replica, Query(resources={"VCPU": 1})).roots):
        with pytest.raises(ValueError, match="read-only"):
            rows[0] = 5


def test_a_settled_claim_is_counted_no_more_by_a_snapshot_over_a_provider_that_was_made_anew() -> None:
    """It waited for the old provider's generation, which the new one may not reach for days: phantom use."""
    replica = Replica()
    replica.load([provider(0, generation=6, inventories={"VCPU": 8})], 10)
    replica.assume("boot", {uuid(0): {"VCPU": 2}})
    replica.confirm("boot", {uuid(0): 7}, 11)
    assert replica.free("VCPU", replica.rows_of_roots())[0] == 6
    replica.load([provider(0, generation=6, inventories={"VCPU": 8})], 10)
    assert replica.free("VCPU", replica.rows_of_roots())[0] == 6, "this snapshot does not count it yet"
    replica.load([provider(0, generation=0, inventories={"VCPU": 8})], 20)
    assert replica.free("VCPU", replica.rows_of_roots())[0] == 8
    assert list(replica.assumptions.keys()) == []


def test_a_claim_that_the_replica_has_seen_already_is_dropped_when_it_settles() -> None:
    """Its provider was deleted and created again meanwhile, so its generation is lower than the claim's."""
    replica = Replica()
    replica.load([provider(0, generation=1, inventories={"VCPU": 8})], 20)
    replica.assume("boot", {uuid(0): {"VCPU": 2}})
    replica.confirm("boot", {uuid(0): 7}, 15)
    assert replica.free("VCPU", replica.rows_of_roots())[0] == 8
    assert list(replica.assumptions.keys()) == []


# --- a snapshot and many changes leave the event loop its turns, and readers see the old replica or the new one

MANY = 10 * AT_ONCE


class Turns:
    """The work on placements in each turn of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        self._now = 0
        for name in ("_put", "_use"):
            monkeypatch.setattr(Replica, name, self._counted(getattr(Replica, name)))

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


def free_after(replica: Replica, number: int = 0) -> int:
    row = replica.row_of(uuid(number))
    assert row is not None
    return int(replica.free("VCPU", np.array([row]))[0])


def hosts(count: int, capacity: int = 8) -> list[ProviderState]:
    return [provider(number, inventories={"VCPU": capacity}) for number in range(count)]


class Source:
    """A store with one page of providers and one of changes."""

    async def head(self) -> FeedHead:
        return FeedHead(sequence=MANY, incarnation="h")

    async def changes(self, after: int, limit: int, incarnation: str = "") -> ChangesPage:
        changes = [used(number + 1, number, 2, {"VCPU": 1}) for number in range(after, min(after + limit, MANY))]
        return ChangesPage(rows=feed_rows(changes), head=MANY, incarnation="h")

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        return SnapshotPage(sequence=0, providers=tuple(hosts(MANY)), incarnation="h")


class Snapshot(Source):
    """A store with a snapshot of these providers, and nothing new since. meanwhile: called when it has been read."""

    def __init__(self, states: list[ProviderState], sequence: int, meanwhile: Callable[[], None] = bool) -> None:
        self.states, self.sequence, self.meanwhile = tuple(states), sequence, meanwhile

    async def changes(self, after: int, limit: int, incarnation: str = "") -> ChangesPage:
        self.meanwhile()
        return ChangesPage(rows=(), head=self.sequence, incarnation="h")

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        return SnapshotPage(sequence=self.sequence, providers=self.states, incarnation="h")


async def test_a_replica_is_loaded_and_brought_up_to_date_in_turns(turns: Turns) -> None:
    replica = LocalReplica(Source())
    await turns.during(replica.fresh())
    assert 0 < turns.most <= AT_ONCE
    assert len(replica.replica) == MANY
    assert replica.replica.sequence == MANY
    assert free_after(replica.replica, MANY - 1) == 7
    assert catch_up.PAGE <= 1000


async def test_readers_have_the_old_replica_until_the_new_one_is_whole() -> None:
    replica = Replica()
    replica.load(hosts(3), 5, "h")
    replica.assume("k", {uuid(1): {"VCPU": 2}})
    kept = replica.cache(list)

    def meanwhile() -> None:
        assert (len(replica), free_after(replica), free_after(replica, 1), replica.sequence) == (3, 8, 6, 5)
        replica.assume("l", {uuid(2): {"VCPU": 3}})
        replica.drop_assumed("k")
        assert replica.cache(list) is kept

    await CatchUp(replica, Snapshot(hosts(MANY, capacity=16), 9, meanwhile)).run()
    now = (len(replica), free_after(replica), free_after(replica, 1), free_after(replica, 2), replica.sequence)
    assert now == (MANY, 16, 16, 13, 9)
    assert replica.cache(list) is not kept
    replica.drop_assumed("l")
    assert free_after(replica, 2) == 16


async def test_the_first_search_after_a_load_builds_nothing_that_the_next_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Replica()
    await CatchUp(replica, Snapshot(hosts(3), 1)).run()
    built: list[str] = []
    monkeypatch.setattr(Sharing, "__init__", lambda *_: built.append("sharing"))
    flatnonzero = np.flatnonzero
    monkeypatch.setattr(np, "flatnonzero", lambda flags: built.append("rows") or flatnonzero(flags))
    roots = replica.rows_of_roots()
    assert sharing_of(replica) is sharing_of(replica)
    assert (roots.tolist(), built) == ([0, 1, 2], [])


async def test_changes_are_applied_in_turns_up_to_a_hole(turns: Turns) -> None:
    replica = Replica()
    replica.load(hosts(MANY), 0)
    changes = [used(number + 1, number, 2, {"VCPU": 1}) for number in range(MANY)]
    turns.most = 0
    hole = [*changes[: 2 * AT_ONCE], *changes[2 * AT_ONCE + 1 :]]
    assert await turns.during(apply(replica, hole)) == Gap(2 * AT_ONCE + 1, 2 * AT_ONCE + 2)
    assert replica.sequence == 2 * AT_ONCE
    assert await turns.during(apply(replica, changes)) is None
    assert replica.sequence == MANY
    assert 0 < turns.most <= AT_ONCE


def test_columns_of_classes_that_came_and_went_are_freed() -> None:
    replica = Replica()
    replica.load([*hosts(2), provider(2, inventories={"CUSTOM_STAYS": 4})], 0)
    rounds = 4 * SWEEP_FROM // CLASS_WEIGHS
    for turn in range(rounds):
        name = f"CUSTOM_{turn}"
        state = provider(
            0, generation=2 + turn, spec_generation=2 + turn, inventories={"VCPU": 8, name: 4}, used={name: 1}
        )
        replica.apply([changed(replica.sequence + 1, state)])
    assert len(replica.resource_classes()) < rounds // 2
    assert {"VCPU", "CUSTOM_STAYS", f"CUSTOM_{rounds - 1}"} < set(replica.resource_classes())
    rows = {number: replica.row_of(uuid(number)) for number in range(3)}
    assert {number: list(replica.inventory_of(row or 0)) for number, row in rows.items()} == {
        0: [f"CUSTOM_{rounds - 1}", "VCPU"],
        1: ["VCPU"],
        2: ["CUSTOM_STAYS"],
    }
    # A class that was freed comes again, also with a claim in flight.
    replica.assume("k", {uuid(1): {"CUSTOM_0": 1}})
    replica.apply([changed(replica.sequence + 1, provider(1, generation=9, inventories={"CUSTOM_0": 4}))])
    assert int(replica.free("CUSTOM_0", np.array([rows[1]]))[0]) == 3
    replica.apply([removed(replica.sequence + 1, 2, 2)])
    replica._sweep_at = 0
    replica.apply([used(replica.sequence + 1, 1, 10, {"CUSTOM_0": 2})])
    assert "CUSTOM_STAYS" not in replica.resource_classes()
    assert int(replica.free("CUSTOM_0", np.array([rows[1]]))[0]) == 1


def uncounted(replica: Replica) -> int:
    """Distinct inventories that the next search would have to turn into columns."""
    return sum(len(column.kinds) - column.kinds._filled for column in replica._by_number)


async def test_a_load_leaves_nothing_to_be_built_by_the_first_search() -> None:
    replica = Replica()
    await CatchUp(replica, Snapshot([provider(n, inventories={"VCPU": 8 + n}) for n in range(MANY)], 1)).run()
    column = replica.column("VCPU")
    assert column is not None and len(column.kinds) == MANY + 1 and uncounted(replica) == 0
    copied = copy_of(replica)
    assert uncounted(copied) == 0
    rows = replica.rows_of_roots()
    assert replica.totals("VCPU", rows).tolist() == copied.totals("VCPU", rows).tolist() == list(range(8, 8 + MANY))


def reported(replica: Replica) -> Replica:
    """A replica that one host has reported to."""
    assert replica.apply([changed(1, provider(0, inventories={"VCPU": 8}))]) is None
    return replica


def test_a_copy_has_its_own_log_of_changes() -> None:
    made = reported(Replica())
    copy = copy_of(made)
    assert copy.changes is not made.changes
    assert copy.spec_changes is not made.spec_changes


def test_a_copy_gets_none_of_placements_later_values() -> None:
    """Another thread reads it: a list that grows meanwhile has another length than the columns made of it."""
    made = reported(Replica())
    copy = copy_of(made)
    later = provider(0, generation=2, spec_generation=2, inventories={"VCPU": 9}, traits=("T",), aggregates=(uuid(9),))
    assert made.apply([changed(2, later)]) is None

    def counted(replica: Replica) -> list[int]:
        kinds = [column.kinds for column in replica._by_number]
        return [len(one) for one in (*kinds, replica.trait_sets, replica.aggregate_sets)]

    assert (counted(copy), counted(made)) == ([2, 1, 1], [3, 2, 2])


def test_the_pairs_of_a_copy_are_computed_once_however_the_replica_moves_on() -> None:
    made = reported(Replica())
    copy = copy_of(made)
    first = sharing_of(copy)
    assert sharing_of(copy) is first
    rebuilt = 0
    for sequence in range(2, 12):
        report = provider(0, generation=sequence, spec_generation=sequence, inventories={"VCPU": sequence % 8})
        assert made.apply([changed(sequence, report)]) is None
        found = sharing_of(copy)
        rebuilt += found is not first
        first = found
    assert rebuilt == 0, f"computed again after {rebuilt} of 10 reports to the live replica"


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
    replica = loaded(replace(provider(0, inventories={"X": 1}, used={"X": used}), inventories={"X": node}))
    rows = np.array([replica.row_of(uuid(0))])
    assert (replica.usage("X", rows)[0], replica.capacities_in_use("X", rows)[0]) == (used, shown)
    assert replica.capacities_in_use("Y", rows).tolist() == [0]


async def test_forgotten_inventories_leave_the_columns_of_the_others() -> None:
    replica = Replica()
    replica.load([provider(number, inventories={"VCPU": 8 + number}) for number in range(SWEEP_FROM)], 1)
    smaller = [provider(number, generation=2, inventories={"VCPU": 5}) for number in range(0, SWEEP_FROM, 2)]
    changes = [changed(sequence, state) for sequence, state in enumerate(smaller, 2)]
    assert replica.apply(changes) is None
    column = replica.column("VCPU")
    assert column is not None and len(column.kinds) == SWEEP_FROM // 2 + 2, "swept: the odd ones, 5 and none"
    assert uncounted(replica) == 0
    expected = [5 if number % 2 == 0 else 8 + number for number in range(SWEEP_FROM)]
    assert replica.totals("VCPU", np.array([replica.row_of(uuid(n)) for n in range(SWEEP_FROM)])).tolist() == expected


def test_the_first_search_imports_nothing() -> None:
    """NumPy imports a part of itself when `numpy.unique` is first called: 8 ms of the first search."""
    script = (
        "import sys; from placement_worker.replica.replica import Replica; "
        "from placement_worker.replica.search import *; "
        "before = set(sys.modules); search(Replica(), Query(resources={'VCPU': 1})); print(set(sys.modules) - before)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "set()"


# --- a replica that is set back while a replica reads its snapshot: the snapshot begins again from its first page


class SetBackAfter:
    """A store of ten providers that becomes another incarnation's after so many pages of a snapshot."""

    def __init__(self, pages: int) -> None:
        self.states = [provider(number, inventories={"VCPU": 8}) for number in range(10)]
        self.pages, self.left = 0, pages

    @property
    def incarnation(self) -> str:
        return "h1" if self.left > 0 else "h2"

    async def head(self) -> FeedHead:
        return FeedHead(sequence=5, incarnation=self.incarnation)

    async def changes(self, after: int, limit: int, incarnation: str = "") -> ChangesPage:
        return ChangesPage(head=5, too_old=incarnation not in ("", self.incarnation), incarnation=self.incarnation)

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        limit = 3
        left = [one for one in self.states if after is None or one.uuid > after]
        page = SnapshotPage(
            sequence=5, providers=tuple(left[:limit]), more=len(left) > limit, incarnation=self.incarnation
        )
        self.left -= 1
        return page


async def test_a_local_replica_reads_all_of_a_replica_that_was_restored_while_it_read() -> None:
    for pages in range(6):
        replica = LocalReplica(SetBackAfter(pages))
        for _ in range(3):
            fresh = await replica.fresh()
        assert (len(fresh), fresh.incarnation) == (10, "h2" if pages < 5 else fresh.incarnation), pages
