"""Inventory reports: whose root it is, which report is stale, which changes nothing, and what each one leaves."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.placement import Inventory, InventoryResult, InventoryUpdate, ProviderReport
from placement_worker.domain.report_group import (
    RELEASED,
    TAKEN_OUT,
    ReportGroup,
    ReportSource,
    digest_of,
    is_retired,
    names_of_reports,
    trees_of_reports,
)
from placement_worker.domain.reports import Applied, ReportRefusal, flaw, plan
from placement_worker.domain.trees import WantedTrees
from placement_worker.domain.values import Provider, StoredInventory
from tests.unit.placement.test_reports import CHILD, GRANDCHILD, ROOT, SECOND, TRAITS, book_of, node, place, update
from tests.unit.placement_rest.test_decisions import inventory, provider


def told(version: int = 2, total: int = 4, source: str = "s", **fields: Any) -> InventoryUpdate:
    return replace(update(node(ROOT, total=total), version=version), source=source, **fields)


def last(version: int = 1, total: int = 4, *, settled: bool = True, providers: Any = (ROOT,)) -> ReportSource:
    return ReportSource(version, digest_of(told(total=total).providers), settled, providers)


def group(*updates: InventoryUpdate, sources: Any = None, cell: str | None = None, bus: str = "api") -> ReportGroup:
    return ReportGroup(updates, sources or {}, cells={ROOT: cell} if cell else {}, bus=bus)


# --- what a group names


def test_what_valid_reports_name_is_created_before_their_transaction() -> None:
    good = update(node(ROOT, traits=("CUSTOM_X", "HW_CPU_X86_AVX2")), node(CHILD, ROOT, total=0))
    bad = update(replace(node(SECOND, parent=ROOT), inventories={"CUSTOM_BAD": Inventory(total=1)}))
    assert names_of_reports([bad, good], TRAITS) == ({"VCPU"}, {"CUSTOM_X"})
    assert trees_of_reports([good, update(root=GRANDCHILD)]) == WantedTrees(
        names={"n-a", "n-b"}, whole={ROOT, CHILD, GRANDCHILD}, creating=[ROOT, CHILD]
    )


@pytest.mark.parametrize(
    ("bus", "cell", "code"),
    [("api", "c2", None), ("c1", "c1", None), ("c1", None, None), ("c1", "c2", "inventory.foreign_cell")],
)
def test_a_report_of_another_cells_root_is_refused(bus: str, cell: str | None, code: str | None) -> None:
    both = group(told(), cell=cell, bus=bus)
    both.refuse_invalid(())
    assert getattr(both.results.get(0), "code", None) == code


# --- whose root it is

MINE, YOURS, THEIRS = (f"compute-{letter}" for letter in "myt")
GIVEN_UP = replace(last(), digest=RELEASED)
OUT = replace(last(), digest=TAKEN_OUT)
TAKES = told(source=MINE, takes_over=YOURS)


@pytest.mark.parametrize(
    ("updates", "sources", "owners"),
    [
        ([told(source=MINE)], {}, [None]),
        ([told(source=MINE)], {MINE: last()}, [None]),
        ([told(source=MINE)], {YOURS: last()}, [YOURS]),
        ([told(source=MINE)], {"ironic": last()}, [None]),
        ([told(source="ironic")], {YOURS: last()}, [None]),
        ([told(source=MINE)], {YOURS: last(providers=(CHILD,))}, [None]),
        ([told(source=MINE), told(source=YOURS)], {}, [None, MINE]),
        ([told(source=MINE), told(source=MINE, version=3)], {}, [None, None]),
        ([told(source="ironic"), told(source=MINE)], {YOURS: last()}, [None, YOURS]),
        ([TAKES], {YOURS: GIVEN_UP}, [None]),
        ([TAKES], {YOURS: OUT}, [None]),
        ([TAKES], {YOURS: last()}, [YOURS]),
        ([TAKES], {THEIRS: GIVEN_UP}, [THEIRS]),
        ([told(source=MINE)], {YOURS: GIVEN_UP}, [YOURS]),
        ([TAKES, told(source=YOURS)], {YOURS: GIVEN_UP}, [YOURS, None]),
        ([TAKES, told(source=THEIRS), told(source=YOURS, total=0, cell="bad")], {YOURS: GIVEN_UP}, [None, MINE, None]),
    ],
    ids=[
        "nobody's",
        "its own",
        "another's",
        "no service's",
        "not a service's report",
        "no longer another's",
        "the first one's",
        "twice its own",
        "beside a report of no service",
        "given up",
        "taken out",
        "not given up",
        "of another than is named",
        "not named",
        "reported again beside it",
        "taken over before another's",
    ],
)
def test_a_root_has_one_owner(updates: list[InventoryUpdate], sources: Any, owners: list[str | None]) -> None:
    both = group(*updates, sources={(ROOT, source): row for source, row in sources.items()})
    both.results.update(
        {n: ReportRefusal("flawed", "") for n, one in enumerate(updates) if one.cell == "bad"}
    )  # a flawed report of the owner does not make the root its own again
    both.refuse_owned()
    refused = [both.results.get(number) for number in range(len(updates))]
    assert [getattr(one, "owner", None) for one in refused] == owners


def test_who_takes_a_root_over_answers_for_what_its_owner_reported() -> None:
    yours = replace(GIVEN_UP, version=7, providers=(ROOT, CHILD))
    sources = {(ROOT, MINE): last(providers=(GRANDCHILD, ROOT)), (ROOT, YOURS): yours}
    sources[ROOT, MINE] = replace(sources[ROOT, MINE], providers=(GRANDCHILD,))
    both = group(TAKES, told(source="s"), sources={**sources, (ROOT, "s"): last()})
    both.refuse_owned()
    assert [tuple(both.earlier(number)) for number in (0, 1)] == [(GRANDCHILD, ROOT, CHILD), (ROOT,)]
    both.settle([0], [Applied(changed=True, stranded=(), reported=(ROOT,))])
    assert both.written() == {
        (ROOT, MINE): replace(last(2), settled=True),
        (ROOT, YOURS): ReportSource(7, b"", False, ()),
    }


# --- which report is stale, and which changes nothing

STALE = InventoryResult(outcome="stale")
SAME = InventoryResult(outcome="unchanged")


@pytest.mark.parametrize(
    ("updates", "known", "results"),
    [
        ([told(0)], None, [None]),
        ([told(2)], last(), [None]),
        ([told(1)], last(), [SAME]),
        ([told(1, total=9)], last(), [replace(STALE, version=1)]),
        ([told(0)], last(), [replace(STALE, version=1)]),
        ([told(2), told(3)], last(), [STALE, None]),
        ([told(3), told(2)], last(), [None, replace(STALE, version=3)]),
        ([told(3), told(3)], last(), [None, SAME]),
        ([told(3), told(3, total=9)], last(), [None, replace(STALE, version=3)]),
        ([told(3), told(2, source="other")], last(), [None, None]),
        ([told(1), told(2)], last(), [SAME, None]),
    ],
)
def test_of_each_source_the_newest_report_counts(
    updates: list[InventoryUpdate], known: ReportSource | None, results: list[InventoryResult | None]
) -> None:
    both = group(*updates, sources={(ROOT, "s"): known} if known else {})
    both.sort_out_stale()
    assert [both.results.get(number) for number in range(len(updates))] == results


@pytest.mark.parametrize(
    ("bus", "cell", "named", "known", "is_fresh"),
    [
        ("api", None, None, last(), False),
        ("api", None, "c1", last(), True),
        ("api", "api", "c1", last(), True),
        ("api", "c1", "c1", last(), False),
        ("c1", None, None, last(), True),
        ("c1", "c1", None, last(), False),
        ("api", None, None, last(settled=False), True),
        ("api", None, None, last(total=9), True),
    ],
)  # fmt: skip
def test_a_report_of_the_same_content_changes_its_version_alone(
    bus: str, cell: str | None, named: str | None, known: ReportSource, is_fresh: bool
) -> None:
    both = group(told(cell=named), told(9, source="decided"), sources={(ROOT, "s"): known}, cell=cell, bus=bus)
    both.results[1] = STALE
    assert both.fresh() == [0] * is_fresh
    assert both.results == {1: STALE} if is_fresh else {0: SAME, 1: STALE}
    assert both.written() == ({} if is_fresh else {(ROOT, "s"): replace(known, version=2)})


@pytest.mark.parametrize(
    ("result", "answer", "row"),
    [
        (Applied((ROOT,), (), True), InventoryResult(outcome="applied", sequence=7), last(2)),
        (Applied((ROOT,), (), False), SAME, last(2)),
        (
            Applied((ROOT,), (CHILD, f"{ROOT}/VCPU"), True),
            InventoryResult(outcome="applied", sequence=7, stranded=(CHILD, f"{ROOT}/VCPU")),
            last(2, settled=False, providers=(ROOT, CHILD)),
        ),
        (
            Applied((ROOT,), (f"{ROOT}/VCPU",), False),
            replace(SAME, stranded=(f"{ROOT}/VCPU",)),
            last(2, settled=False),
        ),
        (ReportRefusal("some.code", ""), ReportRefusal("some.code", ""), None),
    ],
    ids=["applied", "unchanged", "stranded", "stranded before", "refused"],
)
def test_the_answer_to_a_planned_report(result: Any, answer: Any, row: ReportSource | None) -> None:
    both = group(told())
    both.settle([0], [result])
    assert both.answers(7) == [answer]
    assert both.written() == ({(ROOT, "s"): row} if row else {})
    with pytest.raises(ValueError, match="zip"):
        both.settle([0], [])


GONE = {"VCPU": inventory(4, stranded=True)}


@pytest.mark.parametrize(
    ("tree", "retired"),
    [
        ([provider("a", inventories=GONE)], True),
        ([provider("a"), provider("b", inventories=GONE, used={"VCPU": 0})], True),
        ([provider("a", inventories=GONE), provider("b", inventories=GONE, used={"VCPU": 1})], False),
        ([provider("a", inventories=GONE), provider("b", inventories={"VCPU": inventory(4)})], False),
        ([provider("a")], False),
    ],
)
def test_a_tree_is_retired_when_all_that_it_has_is_stranded_and_free(tree: list[Provider], retired: bool) -> None:
    assert is_retired(tree) is retired


# --- one report

FULL = {"VCPU": Inventory(total=1, reserved=1)}


@pytest.mark.parametrize(
    ("good", "code"),
    [
        (update(root=ROOT), None),
        (update(node(ROOT, traits=("CUSTOM_ANY", "HW_CPU_X86_AVX2")), node(CHILD, ROOT), node(SECOND, CHILD)), None),
        (update(replace(node(ROOT), inventories=FULL)), None),
        (update(node(ROOT, name="x"), replace(place(CHILD, ROOT), name="x")), None),
        (update(replace(place(ROOT), name="x"), node(CHILD, ROOT, name="x")), None),
        (update(node(ROOT), node(CHILD, ROOT, takes_from=ROOT)), None),
        (update(node(ROOT), node(CHILD, ROOT, traits=("NO",))), "trait.unknown"),
        (update(node(ROOT), node(CHILD, ROOT, takes_from=CHILD)), "inventory.takes_from"),
        (update(node(ROOT), node(CHILD, ROOT), node(CHILD, ROOT, name="y")), "inventory.duplicate"),
    ],
)
def test_a_report_by_itself(good: InventoryUpdate, code: str | None) -> None:
    assert getattr(flaw(good, TRAITS), "code", None) == code


REPORTED = told().providers


def of_cell(cell: str | None, **used: int) -> dict[str, Provider]:
    book = book_of(update(node(ROOT), node(CHILD, ROOT)))
    return {**book, ROOT: replace(book[ROOT], cell=cell), CHILD: replace(book[CHILD], used=used)}


@pytest.mark.parametrize(
    ("book", "bus", "named", "cell"),
    [
        ({}, "api", None, "api"),
        ({}, "api", "c1", "c1"),
        ({}, "c1", None, "c1"),
        ({}, "c1", "c2", "c1"),
        (of_cell(None), "api", None, None),
        (of_cell(None), "api", "c1", "c1"),
        (of_cell(None, VCPU=1), "api", "c1", None),
        (of_cell(None, VCPU=0), "api", "c1", "c1"),
        (of_cell(None), "c1", None, "c1"),
        (of_cell("api"), "api", "c1", "c1"),
        (of_cell("api", VCPU=1), "api", "c1", "api"),
        (of_cell("api"), "c1", None, "foreign"),
        (of_cell("c1"), "c1", None, "c1"),
        (of_cell("c1"), "c2", None, "foreign"),
        (of_cell("c1"), "api", None, "c1"),
        (of_cell("c1"), "api", "c1", "c1"),
        (of_cell("c1"), "api", "c2", "foreign"),
    ],
)
def test_the_cell_of_a_root_after_a_report(book: dict[str, Provider], bus: str, named: str | None, cell: Any) -> None:
    planned = plan([told(cell=named)], [()], book, bus=bus, shape=2)
    (result,) = planned.results
    if cell == "foreign":
        assert isinstance(result, ReportRefusal) and result.code == "inventory.foreign_cell"
    else:
        assert isinstance(result, Applied) and planned.after[ROOT].cell == cell


def test_a_source_that_has_reported_a_root_before_may_name_another_cell() -> None:
    planned = plan([told(cell="c2", total=9)], [(ROOT,)], of_cell("c1"), shape=2)
    assert planned.after[ROOT].cell == "c1" and isinstance(planned.results[0], Applied)


def test_a_report_that_names_a_provider_of_another_cell_is_refused() -> None:
    wanted = update(node(SECOND), node(CHILD, SECOND))
    (result,) = plan([wanted], [()], of_cell("c1"), bus="c2", shape=2).results
    assert isinstance(result, ReportRefusal) and result.code == "inventory.foreign_cell"


def stored(total: int, **fields: Any) -> StoredInventory:
    return inventory(total, max_unit=2**31 - 1, **fields)


@pytest.mark.parametrize(
    ("before", "report", "fields"),
    [
        ({}, node(ROOT), None),
        ({"name": "other"}, node(ROOT), {}),
        ({"used": {"VCPU": 2, "DISK_GB": 0}}, node(ROOT), None),
        (
            {"inventories": {"DISK_GB": stored(9), "MEMORY_MB": stored(8)}, "used": {"DISK_GB": 2, "MEMORY_MB": 0}},
            node(ROOT),
            {"inventories": {"VCPU": stored(4), "DISK_GB": stored(9, reserved=9, capacity=0, stranded=True)}},
        ),
        ({"aggregates": (SECOND,)}, node(ROOT), None),
        ({"aggregates": (SECOND,)}, node(ROOT, aggregates=()), {"aggregates": ()}),
        ({}, node(ROOT, aggregates=(SECOND, CHILD, SECOND)), {"aggregates": (CHILD, SECOND)}),
        ({"traits": ("CUSTOM_L",), "lasting": ("CUSTOM_L",)}, node(ROOT), None),
        ({"traits": ("CUSTOM_T",)}, node(ROOT), {"traits": ()}),
        (
            {"traits": ("CUSTOM_L",), "lasting": ("CUSTOM_L",)},
            node(ROOT, traits=("CUSTOM_Z", "CUSTOM_A")),
            {"traits": ("CUSTOM_A", "CUSTOM_L", "CUSTOM_Z")},
        ),
    ],
)
def test_the_provider_after_a_report(before: dict[str, Any], report: ProviderReport, fields: Any) -> None:
    made = {"cell": "api", "inventories": {"VCPU": stored(4)}, "generation": 3, "shape": 1}
    old = replace(provider(ROOT), **{"name": "n-a", **made, **before})
    planned = plan([update(report)], [()], {ROOT: old}, shape=2)
    (result,) = planned.results
    assert isinstance(result, Applied) and result.changed is (fields is not None)
    expected = old if fields is None else replace(old, **{"name": "n-a", "generation": 4, "shape": 2, **fields})
    assert planned.after == {ROOT: expected}


def test_a_new_provider_of_a_report() -> None:
    planned = plan([update(node(ROOT, traits=("CUSTOM_T",)))], [()], {}, shape=2)
    new = provider(ROOT, generation=1, shape=2, inventories={"VCPU": stored(4)}, traits=("CUSTOM_T",), cell="api")
    assert planned.after == {ROOT: replace(new, name="n-a")}
