"""Inventory reports: whose root it is, which report is stale, which changes nothing, and what each one leaves."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.placement import Inventory, InventoryResult, InventoryUpdate, ProviderReport
from placement_worker.domain.report_group import (
    RELEASED,
    WITHDRAWN,
    LastReport,
    ReportGroup,
    digest_of,
    is_retired,
    names_of_reports,
    split_by_root,
    trees_of_reports,
)
from placement_worker.domain.reports import Applied, ReportRefusal, changes_of, plan, problem_of
from placement_worker.domain.trees import TreesToLock
from placement_worker.domain.values import Provider, StoredInventory
from tests.unit.placement_rest.test_decisions import inventory, provider
from tests.unit.placement_worker.test_reports import (
    CHILD,
    GRANDCHILD,
    ROOT,
    SECOND,
    TRAITS,
    node,
    place,
    providers_of,
    update,
)


def told(version: int = 2, total: int = 4, reporter: str = "s", **fields: Any) -> InventoryUpdate:
    return replace(update(node(ROOT, total=total), version=version), reporter=reporter, **fields)


def last(version: int = 1, total: int = 4, *, complete: bool = True, providers: Any = (ROOT,)) -> LastReport:
    return LastReport(version, digest_of(told(total=total).providers), complete, providers)


def group(*updates: InventoryUpdate, reporters: Any = None, cell: str | None = None, bus: str = "api") -> ReportGroup:
    return ReportGroup(updates, reporters or {}, cells={ROOT: cell} if cell else {}, bus=bus)


# --- what a group names


def test_what_valid_reports_name_is_created_before_their_transaction() -> None:
    good = update(node(ROOT, traits=("CUSTOM_X", "HW_CPU_X86_AVX2")), node(CHILD, ROOT, total=0))
    bad = update(replace(node(SECOND, parent=ROOT), inventories={"CUSTOM_BAD": Inventory(total=1)}))
    assert names_of_reports([bad, good]) == ({"VCPU"}, {"CUSTOM_X"})
    assert trees_of_reports([good, update(root=GRANDCHILD)]) == TreesToLock(
        names={"n-a", "n-b"}, whole={ROOT, CHILD, GRANDCHILD}, creating=[ROOT, CHILD]
    )


@pytest.mark.parametrize(
    ("bus", "cell", "code"),
    [("api", "c2", None), ("c1", "c1", None), ("c1", None, None), ("c1", "c2", "inventory.foreign_cell")],
)
def test_a_report_of_another_cells_root_is_refused(bus: str, cell: str | None, code: str | None) -> None:
    both = group(told(), cell=cell, bus=bus)
    both.refuse_invalid(())
    assert [getattr(one, "code", None) for one in both.results.values()] == ([code] if code else [])


def test_a_report_counts_without_the_traits_that_placement_does_not_know() -> None:
    """A trait of a newer os-traits had every report of its node refused: in maintenance it stayed on offer."""
    told_of = update(node(ROOT, traits=("HW_NEWER", "CUSTOM_X", *TRAITS)), version=2)
    one = group(told_of)
    one.refuse_invalid(TRAITS)
    (left,) = one.updates
    assert (one.updates_to_plan(), left) == ([0], update(node(ROOT, traits=("CUSTOM_X", *TRAITS)), version=2))
    one.record_results([0], [Applied((ROOT,), (), True)])
    assert one.answers(7) == [InventoryResult(outcome="applied", sequence=7, unknown_traits=("HW_NEWER",))]
    for known, fresh in ((TRAITS, []), ({*TRAITS, "HW_NEWER"}, [0])):
        again = group(replace(told_of, version=3), reporters=one.written())
        again.refuse_invalid(known)
        assert again.updates_to_plan() == fresh


# --- whose root it is

MINE, YOURS, THEIRS = (f"compute-{letter}" for letter in "myt")
GIVEN_UP = replace(last(), digest=RELEASED)
OUT = replace(last(), digest=WITHDRAWN)
TAKES = told(reporter=MINE, former_reporter=YOURS)


@pytest.mark.parametrize(
    ("report", "reporters", "owner"),
    [
        (told(reporter=MINE), {}, None),
        (told(reporter=MINE), {MINE: last()}, None),
        (told(reporter=MINE), {YOURS: last()}, YOURS),
        (told(reporter=MINE), {"ironic": last()}, None),
        (told(reporter="ironic"), {YOURS: last()}, None),
        (told(reporter=MINE), {YOURS: last(providers=(CHILD,))}, None),
        (TAKES, {YOURS: GIVEN_UP}, None),
        (TAKES, {YOURS: OUT}, None),
        (TAKES, {YOURS: last()}, YOURS),
        (TAKES, {THEIRS: GIVEN_UP}, THEIRS),
        (told(reporter=MINE), {YOURS: GIVEN_UP}, YOURS),
        (told(reporter=MINE), {YOURS: OUT}, None),
    ],
    ids=[
        "nobody's",
        "its own",
        "another's",
        "no service's",
        "not a service's report",
        "no longer another's",
        "given up",
        "taken out",
        "not given up",
        "of another than is named",
        "not named",
        "taken out, and not named",
    ],
)
def test_a_root_has_one_owner(report: InventoryUpdate, reporters: Any, owner: str | None) -> None:
    one = group(report, reporters={(ROOT, reporter): row for reporter, row in reporters.items()})
    one.refuse_owned()
    assert getattr(one.results.get(0), "owner", None) == owner


def test_who_takes_a_root_over_answers_for_what_its_owner_reported() -> None:
    yours = replace(GIVEN_UP, version=7, providers=(ROOT, CHILD))
    reporters = {(ROOT, MINE): last(providers=(GRANDCHILD, ROOT)), (ROOT, YOURS): yours}
    reporters[ROOT, MINE] = replace(reporters[ROOT, MINE], providers=(GRANDCHILD,))
    both = group(TAKES, reporters={**reporters, (ROOT, "s"): last()})
    both.refuse_owned()
    assert tuple(both.earlier(0)) == (GRANDCHILD, CHILD)
    both.record_results([0], [Applied(changed=False, orphaned=(), reported=(ROOT,))])
    assert both.written() == {
        (ROOT, MINE): replace(last(2), complete=True),
        (ROOT, YOURS): LastReport(7, RELEASED, False, ()),
        (ROOT, "s"): last(complete=False, providers=()),
    }


ENDS = replace(told(2), providers=())


@pytest.mark.parametrize(
    ("requested", "reporters", "earlier"),
    [
        (ENDS, {"s": last()}, (ROOT,)),
        (ENDS, {}, (ROOT,)),  # its row is lost
        (ENDS, {"s": last(), "heir": last()}, ()),
        (ENDS, {"s": last(providers=(ROOT, CHILD)), "heir": last()}, (CHILD,)),
        (ENDS, {"s": last(providers=()), "heir": last()}, ()),
        (ENDS, {"s": last(), "heir": replace(last(), digest=WITHDRAWN)}, (ROOT,)),
        (ENDS, {"s": last(), "agent": last(providers=(CHILD,))}, (ROOT,)),
        (told(2), {"s": last(providers=(ROOT, CHILD)), "heir": last(providers=(CHILD,))}, (ROOT,)),
    ],
)
def test_a_source_takes_out_nothing_that_another_one_reports(
    requested: InventoryUpdate, reporters: Any, earlier: tuple[str, ...]
) -> None:
    """A node that is another Ironic's by now left placement with each removal that its former one repeated."""
    one = group(requested, reporters={(ROOT, reporter): row for reporter, row in reporters.items()})
    assert tuple(one.earlier(0)) == earlier


@pytest.mark.parametrize(
    ("former", "row", "left"),
    [
        ("s", last(), ()),
        ("s", OUT, ()),
        ("s", last(providers=(ROOT, CHILD)), (CHILD,)),
        ("s", last(providers=(CHILD,)), None),
        (YOURS, last(), None),
        (YOURS, GIVEN_UP, ()),
    ],
)
def test_who_reports_a_provider_last_answers_for_it(former: str, row: LastReport, left: tuple[str, ...] | None) -> None:
    one = group(told(2, reporter="heir"), reporters={(ROOT, former): row})
    one.record_results([0], [Applied(changed=False, orphaned=(), reported=(ROOT,))])
    assert one.written().get((ROOT, former)) == (None if left is None else replace(row, complete=False, providers=left))


@pytest.mark.parametrize("digest", [RELEASED, WITHDRAWN], ids=["released", "taken out"])
def test_a_root_stays_given_up_though_another_source_reports_a_part_of_it(digest: bytes) -> None:
    """No other compute service could take the root over any more, and one that was taken out stayed for good."""
    yours = replace(last(complete=False, providers=(ROOT, CHILD)), digest=digest)
    agent = group(told(reporter="agent"), reporters={(ROOT, YOURS): yours})
    agent.record_results([0], [Applied((CHILD,), (), True)])
    assert agent.written()[ROOT, YOURS] == replace(yours, providers=(ROOT,))
    heir = group(TAKES, reporters=agent.written())
    heir.refuse_owned()
    assert heir.results == {}
    end = group(replace(ENDS, reporter="agent", version=3), reporters=agent.written())
    assert tuple(end.earlier(0)) == (CHILD, ROOT)


# --- which report is stale, and which changes nothing

STALE = InventoryResult(outcome="stale")
SAME = InventoryResult(outcome="unchanged")


@pytest.mark.parametrize(
    ("report", "known", "result"),
    [
        (told(0), None, None),
        (told(2), last(), None),
        (told(1), last(), SAME),
        (told(1, total=9), last(), replace(STALE, version=1)),
        (told(0), last(), replace(STALE, version=1)),
    ],
)
def test_a_report_that_is_not_newer_than_its_sources_last_one_is_stale(
    report: InventoryUpdate, known: LastReport | None, result: InventoryResult | None
) -> None:
    one = group(report, reporters={(ROOT, "s"): known} if known else {})
    one.refuse_stale()
    assert one.results.get(0) == result


def test_a_group_names_each_root_once_and_groups_stay_in_order() -> None:
    """One source's reports of many roots are one transaction; a second report of a root begins another one."""
    many = [update(node(f"{number:08x}-0000-4000-8000-000000000000")) for number in range(500)]
    assert split_by_root(many) == [many]
    first, second, other = told(2), told(1, reporter="other"), update(node(SECOND))
    assert split_by_root([other, first, second, first, other]) == [[other, first], [second], [first, other]]
    assert split_by_root([]) == []


@pytest.mark.parametrize(
    ("bus", "cell", "named", "known", "is_fresh"),
    [
        ("api", None, None, last(), False),
        ("api", None, "c1", last(), True),
        ("api", "api", "c1", last(), True),
        ("api", "c1", "c1", last(), False),
        ("api", "c1", "c2", last(), True),
        ("c1", None, None, last(), True),
        ("c1", "c1", None, last(), False),
        ("api", None, None, last(complete=False), True),
        ("api", None, None, last(total=9), True),
    ],
)  # fmt: skip
def test_a_report_of_the_same_content_changes_its_version_alone(
    bus: str, cell: str | None, named: str | None, known: LastReport, is_fresh: bool
) -> None:
    both = group(told(9, reporter="decided"), told(cell=named), reporters={(ROOT, "s"): known}, cell=cell, bus=bus)
    both.results[0] = STALE
    assert both.updates_to_plan() == [1] * is_fresh
    assert both.results == {0: STALE} | ({} if is_fresh else {1: SAME})
    assert both.repeated_versions == ({} if is_fresh else {(ROOT, "s"): 2})
    assert both.written() == {}


@pytest.mark.parametrize(
    ("result", "answer", "row"),
    [
        (Applied((ROOT,), (), True), InventoryResult(outcome="applied", sequence=7), last(2)),
        (Applied((ROOT,), (), False), SAME, last(2)),
        (
            Applied((ROOT,), (CHILD, f"{ROOT}/VCPU"), True),
            InventoryResult(outcome="applied", sequence=7, orphaned=(CHILD, f"{ROOT}/VCPU")),
            last(2, complete=False, providers=(ROOT, CHILD)),
        ),
        (
            Applied((ROOT,), (f"{ROOT}/VCPU",), False),
            replace(SAME, orphaned=(f"{ROOT}/VCPU",)),
            last(2, complete=False),
        ),
        (ReportRefusal("some.code", ""), ReportRefusal("some.code", ""), None),
    ],
    ids=["applied", "unchanged", "orphaned", "orphaned before", "refused"],
)
def test_the_answer_to_a_planned_report(result: Any, answer: Any, row: LastReport | None) -> None:
    both = group(told())
    both.record_results([0], [result])
    assert both.answers(7) == [answer]
    assert both.written() == ({(ROOT, "s"): row} if row else {})
    with pytest.raises(ValueError, match="zip"):
        both.record_results([0], [])
    both = group(told(), told(reporter="other"))
    both.record_results([0, 1], [ReportRefusal("some.code", ""), result])
    assert both.answers(7) == [ReportRefusal("some.code", ""), answer]


OTHER = "0f000000-0000-4000-8000-000000000001"
GONE = {"VCPU": inventory(4, orphaned=True)}


GIVEN = (replace(provider("a"), aggregates=(OTHER,)), replace(provider("a"), traits=("T",), own_traits=("T",)))


@pytest.mark.parametrize(
    ("tree", "retired"),  # at once, and long after
    [
        ([provider("a", inventories=GONE)], (True, True)),
        ([provider("a"), provider("b", inventories=GONE, used={"VCPU": 0})], (True, True)),
        ([provider("a", inventories=GONE), provider("b", inventories=GONE, used={"VCPU": 1})], (False, False)),
        ([provider("a", inventories=GONE), provider("b", inventories={"VCPU": inventory(4)})], (False, False)),
        ([provider("a")], (False, True)),
        ([GIVEN[0], provider("b", inventories=GONE)], (False, True)),
        ([GIVEN[1], provider("b", inventories=GONE)], (False, True)),
        ([], (False, False)),
    ],
)
def test_a_tree_is_retired_when_all_that_it_has_is_stranded_and_free(
    tree: list[Provider], retired: tuple[bool, bool]
) -> None:
    assert (is_retired(tree, long_ago=False), is_retired(tree, long_ago=True)) == retired


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
        (update(node(ROOT), node(CHILD, ROOT, receives_from=ROOT)), None),
        (update(node(ROOT), node(CHILD, ROOT, receives_from=CHILD)), "inventory.receives_from"),
        (update(node(ROOT), node(CHILD, ROOT), node(CHILD, ROOT, name="y")), "inventory.duplicate"),
    ],
)
def test_a_report_by_itself(good: InventoryUpdate, code: str | None) -> None:
    assert getattr(problem_of(good), "code", None) == code


def of_cell(cell: str | None, **used: int) -> dict[str, Provider]:
    providers = providers_of(update(node(ROOT), node(CHILD, ROOT)))
    return {**providers, ROOT: replace(providers[ROOT], cell=cell), CHILD: replace(providers[CHILD], used=used)}


@pytest.mark.parametrize(
    ("providers", "bus", "named", "cell"),
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
def test_the_cell_of_a_root_after_a_report(
    providers: dict[str, Provider], bus: str, named: str | None, cell: Any
) -> None:
    planned = plan([told(cell=named)], [()], providers, bus=bus, spec_generation=2)
    (result,) = planned.results
    if cell == "foreign":
        assert isinstance(result, ReportRefusal) and result.code == "inventory.foreign_cell"
    else:
        assert isinstance(result, Applied) and planned.after[ROOT].cell == cell


def test_a_source_that_has_reported_a_root_before_may_name_another_cell() -> None:
    """An Ironic that another cell serves from now on: no claim of that cell could have been released by it."""
    for used, cell in (({}, "c2"), ({"VCPU": 1}, "c1")):
        planned = plan([told(cell="c2", total=9)], [(ROOT,)], of_cell("c1", **used), spec_generation=2)
        assert planned.after[ROOT].cell == cell and isinstance(planned.results[0], Applied)


def test_a_report_that_names_a_provider_of_another_cell_is_refused() -> None:
    wanted = update(node(SECOND), node(CHILD, SECOND))
    (result,) = plan([wanted], [()], of_cell("c1"), bus="c2", spec_generation=2).results
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
            {"inventories": {"VCPU": stored(4), "DISK_GB": stored(9, reserved=9, capacity=0, orphaned=True)}},
        ),
        ({"aggregates": (SECOND,)}, node(ROOT), None),
        ({"aggregates": (SECOND,)}, node(ROOT, aggregates=()), {"aggregates": ()}),
        ({}, node(ROOT, aggregates=(SECOND, CHILD, SECOND)), {"aggregates": (CHILD, SECOND)}),
        ({"traits": ("CUSTOM_L",), "own_traits": ("CUSTOM_L",)}, node(ROOT), None),
        ({"traits": ("CUSTOM_T",)}, node(ROOT), {"traits": ()}),
        (
            {"traits": ("CUSTOM_L",), "own_traits": ("CUSTOM_L",)},
            node(ROOT, traits=("CUSTOM_Z", "CUSTOM_A")),
            {"traits": ("CUSTOM_A", "CUSTOM_L", "CUSTOM_Z")},
        ),
    ],
)
def test_the_provider_after_a_report(before: dict[str, Any], report: ProviderReport, fields: Any) -> None:
    made = {"cell": "api", "inventories": {"VCPU": stored(4)}, "generation": 3, "spec_generation": 1}
    old = replace(provider(ROOT), **{"name": "n-a", **made, **before})
    planned = plan([update(report)], [()], {ROOT: old}, spec_generation=2)
    (result,) = planned.results
    assert isinstance(result, Applied) and result.changed is (fields is not None)
    expected = (
        old if fields is None else replace(old, **{"name": "n-a", "generation": 4, "spec_generation": 2, **fields})
    )
    assert planned.after == {ROOT: expected}


def test_a_new_provider_of_a_report() -> None:
    planned = plan([update(node(ROOT, traits=("CUSTOM_T",)))], [()], {}, spec_generation=2)
    new = provider(
        ROOT, generation=1, spec_generation=2, inventories={"VCPU": stored(4)}, traits=("CUSTOM_T",), cell="api"
    )
    assert planned.after == {ROOT: replace(new, name="n-a")}
    assert providers_of(update(node(ROOT), node(CHILD, ROOT)))[CHILD].cell is None, "its root's counts"


# --- groups of reports


def applied(*results: Any) -> list[bool]:
    return [isinstance(one, Applied) for one in results]


def test_the_changes_of_a_group_in_order() -> None:
    before = {uuid: provider(uuid, generation=5) for uuid in "abcd"}
    after = {"a": before["a"], "b": provider("b", generation=6), "c": provider("c", generation=0), "e": provider("e")}
    changes = changes_of(before, after)
    assert [(one.provider, one.generation) for one in changes] == [("c", 6), ("b", 6), ("c", 0), ("e", 5), ("d", 6)]
    assert [one.removed for one in changes] == [one.state is None for one in changes] == [True, *[False] * 3, True]


def test_each_report_of_a_group_has_what_its_source_reported_before() -> None:
    with pytest.raises(ValueError, match="zip"):
        plan([told()], [], {}, spec_generation=1)


def test_a_report_refused_for_another_reason_than_a_name_is_not_tried_again() -> None:
    """Its place is reported by the second one: it comes again by itself."""
    results = plan(
        [update(place(ROOT), node(CHILD, ROOT)), update(node(ROOT))], [(), ()], {}, spec_generation=1
    ).results
    assert applied(*results) == [False, True]


NAMED = {ROOT: "one", SECOND: "two", GRANDCHILD: "three"}


def renamed(**names: str) -> list[InventoryUpdate]:
    uuids = {"root": ROOT, "second": SECOND, "third": GRANDCHILD, "new": CHILD}
    return [update(node(uuids[key], name=name)) for key, name in names.items()]


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        (renamed(root="four", second="one"), [True, True]),
        (renamed(root="two", second="one"), [True, True]),
        (renamed(root="two", second="three"), [False, False]),
        (renamed(root="two", second="one", third="two"), [False, False, False]),
        (renamed(new="one", root="two", second="three", third="four"), [True, True, True, True]),
        (renamed(new="one", root="two", second="three"), [False, False, False]),
        (renamed(new="one"), [False]),
        (renamed(root="five", new="five"), [True, False]),
        ([*renamed(root="five", new="one"), *renamed(second="one")], [True, True, False]),
        ([*renamed(root="one'", second="two'"), *renamed(root="two", second="one")], [True, True, True, True]),
    ],
)
def test_whose_name_it_is(updates: list[InventoryUpdate], expected: list[bool]) -> None:
    providers = providers_of(*(update(node(uuid, name=name)) for uuid, name in NAMED.items()))
    planned = plan(updates, [()] * len(updates), providers, spec_generation=2)
    assert applied(*planned.results) == expected
    names = {report.uuid: report.name for one in updates for report in one.providers}
    if all(expected):
        assert {uuid: planned.after[uuid].name for uuid in names} == names
    elif not any(expected):
        assert planned.after == providers


def test_reports_of_which_one_takes_a_place_of_the_other_exchange_no_names() -> None:
    tree = update(node(SECOND, name="two"), node(CHILD, SECOND))
    providers = providers_of(update(node(ROOT, name="one")), tree)
    takes, loses = (
        update(node(ROOT, name="two"), node(CHILD, ROOT)),
        update(node(SECOND, name="one"), place(CHILD, SECOND)),
    )
    planned = plan([takes, loses], [(), ()], providers, spec_generation=2)
    assert applied(*planned.results) == [False, False] and planned.after == providers


def test_what_is_called_a_place_is_in_the_way_of_no_exchange() -> None:
    trees = {"one": (ROOT, CHILD), "two": (SECOND, GRANDCHILD)}
    providers = providers_of(
        *(update(node(root, name=name), node(below, root)) for name, (root, below) in trees.items())
    )
    names = zip(trees.values(), ("two", "one"), strict=True)
    updates = [update(node(root, name=name), place(below, root)) for (root, below), name in names]
    assert applied(*plan(updates, [(), ()], providers, spec_generation=2).results) == [True, True]


def test_a_consumer_moves_from_two_providers_at_once() -> None:
    providers = providers_of(update(node(ROOT), node(CHILD, ROOT), node(SECOND, ROOT)))
    providers |= {uuid: replace(providers[uuid], used={"VCPU": 1}) for uuid in (CHILD, SECOND)}
    held = {LEAF: {CHILD: {"VCPU": 1}, SECOND: {"VCPU": 1}}}
    nested = update(node(ROOT, receives_from=CHILD), node(GRANDCHILD, ROOT, receives_from=SECOND))
    planned = plan([nested], [(ROOT, CHILD, SECOND)], providers, held, spec_generation=2)
    assert planned.moved == {LEAF: {ROOT: {"VCPU": 1}, GRANDCHILD: {"VCPU": 1}}}
    assert set(planned.after) == {ROOT, GRANDCHILD}


def test_a_provider_that_a_report_removes_leaves_its_name() -> None:
    providers = providers_of(update(node(ROOT), node(CHILD, ROOT, name="x")))
    planned = plan(
        [update(node(ROOT), node(GRANDCHILD, ROOT, name="x"))], [(ROOT, CHILD)], providers, spec_generation=2
    )
    assert applied(*planned.results) == [True] and set(planned.after) == {ROOT, GRANDCHILD}
    later = [update(node(ROOT)), update(node(SECOND, name="x")), update(node(CHILD, name="y"))]
    planned = plan(later, [(ROOT, CHILD), (), ()], providers, spec_generation=2)
    assert applied(*planned.results) == [True, True, True]
    assert planned.after[CHILD].generation == providers[CHILD].generation + 1, "it goes on where it was"


LEAF = "00000000-0000-4000-8000-000000000000"  # before all others by its uuid


def test_what_is_below_a_provider_follows_it_however_deep() -> None:
    tree = update(node(ROOT), node(CHILD, ROOT), node(GRANDCHILD, CHILD), node(LEAF, GRANDCHILD, name="leaf"))
    providers = providers_of(tree, update(node(SECOND)))
    planned = plan([update(node(SECOND), node(CHILD, SECOND))], [()], providers, spec_generation=2)
    assert {uuid: one.root for uuid, one in planned.after.items()} == {
        ROOT: ROOT, CHILD: SECOND, GRANDCHILD: SECOND, LEAF: SECOND, SECOND: SECOND
    }  # fmt: skip
    assert planned.after[LEAF].spec_generation == 2 and planned.after[ROOT] is providers[ROOT]


@pytest.mark.parametrize(
    ("used", "orphaned", "left"),
    [
        ({}, (), {ROOT}),
        ({GRANDCHILD: 1}, (GRANDCHILD, CHILD), {ROOT, CHILD, GRANDCHILD}),
        ({CHILD: 1}, (CHILD,), {ROOT, CHILD}),
        ({GRANDCHILD: 0}, (), {ROOT}),
    ],
)
def test_what_is_no_longer_reported_goes_unless_it_is_used_or_needed(
    used: dict[str, int], orphaned: tuple[str, ...], left: set[str]
) -> None:
    providers = providers_of(update(node(ROOT), node(CHILD, ROOT), node(GRANDCHILD, CHILD)))
    providers |= {uuid: replace(providers[uuid], used={"VCPU": amount}) for uuid, amount in used.items()}
    planned = plan([update(node(ROOT))], [(CHILD, GRANDCHILD)], providers, spec_generation=2)
    (result,) = planned.results
    assert isinstance(result, Applied) and (result.orphaned, set(planned.after)) == (orphaned, left)
    again = plan([update(node(ROOT))], [(CHILD, GRANDCHILD)], planned.after, spec_generation=3).results[0]
    assert isinstance(again, Applied) and (again.orphaned, again.changed) == (orphaned, False)


def test_a_parent_of_what_another_source_reports_stays() -> None:
    providers = providers_of(update(node(ROOT), node(CHILD, ROOT), node(GRANDCHILD, CHILD)))
    (result,) = plan([update(node(ROOT))], [(ROOT, CHILD)], providers, spec_generation=2).results
    assert isinstance(result, Applied) and result.orphaned == (CHILD,)


def test_only_the_last_of_a_tree_takes_all_of_it() -> None:
    """A source that reports nothing any more takes what others reported below its root, too."""
    providers = providers_of(update(node(ROOT), node(CHILD, ROOT)), update(node(SECOND)))
    assert set(plan([update(root=ROOT)], [(ROOT,)], providers, spec_generation=2).after) == {SECOND}
    assert set(plan([update(root=ROOT)], [(CHILD,)], providers, spec_generation=2).after) == {ROOT, SECOND}
    assert set(plan([update(root=GRANDCHILD)], [()], providers, spec_generation=2).after) == {ROOT, CHILD, SECOND}
    assert set(plan([update(node(ROOT))], [(ROOT, SECOND)], providers, spec_generation=2).after) == {
        ROOT,
        CHILD,
        SECOND,
    }
