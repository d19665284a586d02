"""Inventory reports: what is wrong with one, what it changes, what it takes along, and which trees are retired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from placement_worker.domain.report_group import is_retired
from placement_worker.domain.reports import Applied, ReportPlan, ReportRefusal, changes_of, flaw, plan
from placement_worker.domain.values import Holding, Provider, capacity

# --- inventory updates as tables: trees made, changed, moved and removed; names; what is in use is stranded

ROOT, CHILD, GRANDCHILD, SECOND = (f"{letter * 8}-0000-4000-8000-000000000000" for letter in "abcd")
TRAITS = {"HW_CPU_X86_AVX2"}


def node(uuid: str, parent: str | None = None, name: str = "", total: int = 4, **fields: Any) -> ProviderReport:
    inventories = {"VCPU": Inventory(total=total)} if total else {}
    return ProviderReport(uuid=uuid, name=name or f"n-{uuid[0]}", parent_uuid=parent, inventories=inventories, **fields)


def update(*nodes: ProviderReport, root: str = "", version: int = 1) -> InventoryUpdate:
    return InventoryUpdate(source="s", version=version, root_uuid=root or nodes[0].uuid, providers=nodes)


def book_of(*updates: InventoryUpdate) -> dict[str, Provider]:
    return plan(updates, [()] * len(updates), {}, shape=1).after


def using(book: Mapping[str, Provider], uuid: str, **used: int) -> dict[str, Provider]:
    old = book[uuid]
    fields = {name: getattr(old, name) for name in Provider.__struct_fields__}
    return {**book, uuid: Provider(**{**fields, "used": used})}


def after(
    book: Mapping[str, Provider], requested: InventoryUpdate, earlier: Sequence[str] = ()
) -> tuple[Applied, ReportPlan]:
    planned = plan([requested], [earlier], book, shape=2)
    (result,) = planned.results
    assert isinstance(result, Applied), result
    return result, planned


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("VCPUS", "VCPU"),
        ("vcpu", "VCPU"),
        ("MEMORY", "MEMORY_MB"),
        ("GOLD", "CUSTOM_GOLD"),
        ("baremetal.with-GPU", "CUSTOM_BAREMETAL_WITH_GPU"),
        ("CUSTOM_a-b", "CUSTOM_A_B"),
    ],
)
def test_a_class_that_does_not_exist_is_refused_with_the_nearest_name(name: str, meant: str) -> None:
    """GOLD was renamed to CUSTOM_GOLD without a word; a host that reported VCPUS offered nothing of use."""
    wrong = flaw(update(ProviderReport(uuid=ROOT, name="r", inventories={name: Inventory(total=1)})), TRAITS)
    assert wrong is not None and wrong.code == "class.unknown"
    assert wrong.reason == f"{name!r} is neither a standard resource class nor CUSTOM_; did you mean {meant}?"


@pytest.mark.parametrize("name", ["x" * 256, "CUSTOM_" + "X" * 249, "CUSTOM_", "", "\x00"])
def test_a_class_name_beyond_bounds_is_refused(name: str) -> None:
    wrong = flaw(update(ProviderReport(uuid=ROOT, name="r", inventories={name: Inventory(total=1)})), TRAITS)
    assert wrong is not None and wrong.code == "class.unknown" and len(wrong.reason) < 500


@pytest.mark.parametrize(
    ("total", "reserved", "ratio", "expected"), [(10, 2, 1.0, 8), (3, 0, 1.5, 4), (4, 4, 16.0, 0), (1, 0, 0.5, 0)]
)
def test_capacity(total: int, reserved: int, ratio: float, expected: int) -> None:
    assert capacity(total, reserved, ratio) == expected


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (update(node(ROOT), root=SECOND), "inventory.root"),
        (update(node(ROOT, parent=SECOND)), "inventory.root"),
        (update(node(ROOT), node(CHILD, SECOND)), "inventory.parent"),
        (update(node(ROOT), node(CHILD)), "inventory.parent"),
        (update(node(ROOT), node(CHILD, GRANDCHILD), node(GRANDCHILD, CHILD)), "inventory.parent"),
        (update(node(ROOT), node(ROOT, ROOT)), "inventory.duplicate"),
        (update(node(ROOT, name="x"), node(CHILD, ROOT, name="x")), "provider.name_taken"),
        (update(node(ROOT, name="a\0b")), "provider.name"),
        (update(node(ROOT, traits=("HW_NO_SUCH",))), "trait.unknown"),
        (
            update(ProviderReport(uuid=ROOT, name="r", inventories={"VCPU": Inventory(total=1, reserved=2)})),
            "inventory.reserved",
        ),
    ],
)
def test_what_is_wrong_with_an_update_by_itself(bad: InventoryUpdate, code: str) -> None:
    wrong = flaw(bad, TRAITS)
    assert wrong is not None
    assert wrong.code == code


def test_a_new_tree_is_created_parents_first() -> None:
    requested = update(node(ROOT, traits=("CUSTOM_X", "HW_CPU_X86_AVX2")), node(CHILD, ROOT), node(GRANDCHILD, CHILD))
    assert flaw(requested, TRAITS) is None
    result, planned = after({}, requested)
    assert result == Applied((ROOT, CHILD, GRANDCHILD), (), True)
    changes = changes_of({}, planned.after)
    states = [change.state for change in changes]
    assert [(s.uuid, s.parent_uuid, s.root_uuid) for s in states if s] == [
        (ROOT, None, ROOT),
        (CHILD, ROOT, ROOT),
        (GRANDCHILD, CHILD, ROOT),
    ]
    assert states[0] is not None
    assert states[0].inventories == {"VCPU": (4.0, 1, 2**31 - 1, 1, 4, 0, 1.0)}
    assert states[0].traits == ("CUSTOM_X", "HW_CPU_X86_AVX2")


def test_only_what_differs_moves_its_generations() -> None:
    book = book_of(update(node(ROOT), node(CHILD, ROOT)))
    result, planned = after(book, update(node(ROOT), node(CHILD, ROOT, total=9)))
    assert result.changed
    (change,) = changes_of(book, planned.after)
    assert (change.provider, change.generation) == (CHILD, 2)
    assert (planned.after[CHILD].shape, planned.after[ROOT].shape) == (2, 1)
    result, _ = after(planned.after, update(node(ROOT), node(CHILD, ROOT, total=9)))
    assert not result.changed


def test_aggregates_none_leaves_them_alone() -> None:
    book = book_of(update(node(ROOT, aggregates=(SECOND,))))
    assert after(book, update(node(ROOT, total=5)))[1].after[ROOT].aggregates == (SECOND,)
    assert after(book, update(node(ROOT, aggregates=())))[1].after[ROOT].aggregates == ()


def test_what_its_source_no_longer_reports_goes_and_what_others_reported_stays() -> None:
    book = book_of(update(node(ROOT), node(CHILD, ROOT), node(SECOND, ROOT)))
    result, planned = after(book, update(node(ROOT)), earlier=[ROOT, CHILD])
    assert result.stranded == ()
    assert set(planned.after) == {ROOT, SECOND}
    assert [(c.provider, c.removed) for c in changes_of(book, planned.after)] == [(CHILD, True)]


def test_the_former_parent_of_what_is_reported_elsewhere_goes() -> None:
    book = book_of(update(node(ROOT), node(CHILD, ROOT), node(GRANDCHILD, CHILD)))
    result, planned = after(book, update(node(ROOT), node(GRANDCHILD, ROOT)), earlier=[ROOT, CHILD, GRANDCHILD])
    assert (result.stranded, set(planned.after)) == ((), {ROOT, GRANDCHILD})


def test_an_empty_report_removes_the_tree() -> None:
    book = book_of(update(node(ROOT), node(CHILD, ROOT), node(GRANDCHILD, CHILD)))
    assert after(book, update(root=ROOT))[1].after == {}


def test_a_provider_in_use_is_stranded_with_its_parents_and_goes_when_unused() -> None:
    book = using(book_of(update(node(ROOT), node(CHILD, ROOT), node(GRANDCHILD, CHILD))), GRANDCHILD, VCPU=2)
    result, planned = after(book, update(node(ROOT)), earlier=[ROOT, CHILD, GRANDCHILD])
    assert result.stranded == (GRANDCHILD, CHILD)
    inventory = planned.after[GRANDCHILD].inventories["VCPU"]
    assert (inventory.capacity, inventory.reserved, inventory.total, inventory.stranded) == (0, 4, 4, True)
    assert planned.after[CHILD].inventories == {}
    freed = using(planned.after, GRANDCHILD)
    result, planned = after(freed, update(node(ROOT)), earlier=[ROOT, CHILD, GRANDCHILD])
    assert result.stranded == ()
    assert set(planned.after) == {ROOT}


def test_a_class_in_use_is_stranded_and_comes_back_when_reported_again() -> None:
    book = using(book_of(update(node(ROOT))), ROOT, VCPU=2)
    result, planned = after(book, update(node(ROOT, total=0)))
    assert result.stranded == (f"{ROOT}/VCPU",)
    assert planned.after[ROOT].inventories["VCPU"].capacity == 0
    result, planned = after(planned.after, update(node(ROOT, total=8)))
    assert result.stranded == ()
    assert planned.after[ROOT].inventories["VCPU"].capacity == 8


def test_an_inventory_may_shrink_under_what_is_used() -> None:
    book = using(book_of(update(node(ROOT, total=8))), ROOT, VCPU=6)
    result, planned = after(book, update(node(ROOT, total=2)))
    assert result.stranded == ()
    assert planned.after[ROOT].inventories["VCPU"].capacity == 2
    assert planned.after[ROOT].used == {"VCPU": 6}


def test_a_provider_moves_to_another_root_with_what_is_under_it() -> None:
    book = book_of(update(node(ROOT), node(CHILD, ROOT), node(GRANDCHILD, CHILD)), update(node(SECOND)))
    _, planned = after(book, update(node(SECOND), node(CHILD, SECOND)), earlier=[SECOND])
    assert {uuid: (p.parent, p.root) for uuid, p in planned.after.items()} == {
        ROOT: (None, ROOT),
        CHILD: (SECOND, SECOND),
        GRANDCHILD: (CHILD, SECOND),
        SECOND: (None, SECOND),
    }


def test_reports_that_give_up_each_others_names_are_applied_together() -> None:
    """Found by reading: each of two hosts that had swapped their names waited for the other one, for ever."""
    first, second = [(), (), ()], {ROOT: "two", CHILD: "three", SECOND: "one"}
    book = book_of(
        *(update(node(uuid, name=name)) for uuid, name in ((ROOT, "one"), (CHILD, "two"), (SECOND, "three")))
    )
    swapped = [update(node(uuid, name=name)) for uuid, name in second.items()]
    planned = plan(swapped, first, book, shape=2)
    assert [type(result) for result in planned.results] == [Applied] * 3
    assert {uuid: provider.name for uuid, provider in planned.after.items()} == second
    again = plan([update(node(uuid, name=f"{name}'")) for uuid, name in second.items()], first, planned.after, shape=3)
    assert [type(result) for result in again.results] == [Applied] * 3, "each name is its provider's"


def test_reports_of_which_one_keeps_a_name_are_refused_together() -> None:
    book = book_of(
        *(update(node(uuid, name=name)) for uuid, name in ((ROOT, "one"), (CHILD, "two"), (SECOND, "three")))
    )
    wanted = [update(node(ROOT, name="two")), update(node(CHILD, name="three")), update(node(SECOND, name="three"))]
    planned = plan(wanted, [(), (), ()], book, shape=2)
    assert [type(result) for result in planned.results] == [ReportRefusal, ReportRefusal, Applied]
    assert planned.after[ROOT] == book[ROOT] and planned.after[CHILD] == book[CHILD]


def test_a_child_becomes_a_root_and_a_root_becomes_a_child() -> None:
    book = book_of(update(node(ROOT), node(CHILD, ROOT), node(GRANDCHILD, CHILD)))
    _, planned = after(book, update(node(CHILD)))
    assert {uuid: p.root for uuid, p in planned.after.items()} == {ROOT: ROOT, CHILD: CHILD, GRANDCHILD: CHILD}
    _, planned = after(planned.after, update(node(CHILD), node(ROOT, CHILD)))
    assert {uuid: p.root for uuid, p in planned.after.items()} == {ROOT: CHILD, CHILD: CHILD, GRANDCHILD: CHILD}


def test_a_name_belongs_to_one_provider_and_passes_on_when_it_is_given_up() -> None:
    book = book_of(update(node(ROOT, name="one")), update(node(SECOND, name="two")))
    planned = plan([update(node(ROOT, name="two")), update(node(ROOT, name="three"))], [(), ()], book, shape=2)
    refused, applied = planned.results
    assert isinstance(refused, ReportRefusal)
    assert refused.code == "provider.name_taken"
    assert isinstance(applied, Applied)
    assert planned.after[ROOT].name == "three"
    result, planned = after(planned.after, update(node(CHILD, name="one")))
    assert result.changed
    tree = book_of(update(node(ROOT, name="r"), node(CHILD, ROOT, name="x"), node(GRANDCHILD, ROOT, name="y")))
    _, planned = after(
        tree, update(node(ROOT, name="r"), node(CHILD, ROOT, name="y"), node(GRANDCHILD, ROOT, name="x"))
    )
    assert [planned.after[uuid].name for uuid in (CHILD, GRANDCHILD)] == ["y", "x"]


def test_reserving_everything_takes_a_node_out_and_leaves_its_allocation_alone() -> None:
    """Microversion 1.26: how a bare-metal node leaves the pool."""
    book = using(book_of(update(node(ROOT, total=1))), ROOT, VCPU=1)
    taken = update(ProviderReport(uuid=ROOT, name="n-a", inventories={"VCPU": Inventory(total=1, reserved=1)}))
    assert flaw(taken, TRAITS) is None
    result, planned = after(book, taken)
    assert result.stranded == ()
    assert (planned.after[ROOT].inventories["VCPU"].capacity, planned.after[ROOT].used) == (0, {"VCPU": 1})


def place(uuid: str, parent: str | None = None) -> ProviderReport:
    """A provider that another source reports."""
    return ProviderReport(uuid=uuid, name="whatever", parent_uuid=parent, theirs=True)


def test_a_second_source_adds_to_a_tree_and_leaves_the_rest_as_it_is() -> None:
    book = book_of(update(node(ROOT, traits=("HW_CPU_X86_AVX2",), aggregates=(SECOND,)), node(CHILD, ROOT)))
    result, planned = after(book, update(place(ROOT), place(CHILD, ROOT), node(GRANDCHILD, CHILD)))
    assert result.reported == (GRANDCHILD,)
    assert planned.after[ROOT] is book[ROOT]
    assert planned.after[CHILD] is book[CHILD]
    assert planned.after[GRANDCHILD].root == ROOT


def test_a_second_source_withdraws_its_own_and_the_first_one_keeps_off() -> None:
    both = plan([update(node(ROOT)), update(place(ROOT), node(CHILD, ROOT))], [(), ()], {}, shape=1).after
    _, planned = after(both, update(node(ROOT, total=9)), [ROOT])
    assert planned.after[CHILD] is both[CHILD]
    result, planned = after(planned.after, update(place(ROOT)), [CHILD])
    assert (result.changed, list(planned.after)) == (True, [ROOT])
    # A provider that it once owned and now calls another's stays.
    result, planned = after(both, update(place(ROOT), place(CHILD, ROOT)), [CHILD])
    assert (result.reported, result.changed) == ((), False)


@pytest.mark.parametrize(
    "requested",
    [
        update(place(ROOT), place(CHILD, ROOT), node(GRANDCHILD, CHILD, name="whatever")),
        update(place(ROOT), node(CHILD, ROOT, name="whatever"), place(GRANDCHILD, CHILD)),
    ],
)
def test_what_a_second_source_calls_a_place_is_nobodys_name(requested: InventoryUpdate) -> None:
    assert flaw(requested, TRAITS) is None


@pytest.mark.parametrize(
    "requested", [update(place(ROOT), node(CHILD, ROOT)), update(place(SECOND), place(ROOT, SECOND))]
)
def test_a_place_that_is_not_there_is_refused(requested: InventoryUpdate) -> None:
    book = book_of(update(node(SECOND)), update(node(GRANDCHILD), node(ROOT, GRANDCHILD)))
    if requested.root_uuid == ROOT:
        book = book_of(update(node(SECOND)))
    (result,) = plan([requested], [()], book, shape=2).results
    assert isinstance(result, ReportRefusal)
    assert result.code == "inventory.not_there"


# --- which trees are retired: taken out by their source, unused, and without new inventory

HOST, GPU = (f"{letter * 8}-0000-4000-8000-000000000000" for letter in "ab")


def taken_out() -> dict[str, Provider]:
    """A tree that was taken out while its child was in use, and whose child was freed then."""
    reports = (
        ProviderReport(uuid=HOST, name="host"),
        ProviderReport(uuid=GPU, name="gpu", parent_uuid=HOST, inventories={"VGPU": Inventory(total=1)}),
    )
    whole = InventoryUpdate(source="s", version=1, root_uuid=HOST, providers=reports)
    book = plan([whole], [()], {}, shape=1).after
    in_use = {**book, GPU: replace(book[GPU], used={"VGPU": 1})}
    left = plan([InventoryUpdate(source="s", version=2, root_uuid=HOST)], [()], in_use, shape=2).after
    return {uuid: replace(provider, used={}) for uuid, provider in left.items()}


def test_what_was_taken_out_and_is_free_is_an_empty_shell() -> None:
    assert is_retired(taken_out().values())


def test_it_is_not_while_a_consumer_uses_it() -> None:
    tree = taken_out()
    assert not is_retired({**tree, GPU: replace(tree[GPU], used={"VGPU": 1})}.values())


def test_it_is_not_once_it_has_inventory_to_offer() -> None:
    tree = taken_out()
    live = {name: replace(inventory, stranded=False) for name, inventory in tree[GPU].inventories.items()}
    assert not is_retired({**tree, GPU: replace(tree[GPU], inventories=live)}.values())


def test_a_bare_provider_is_none_for_it_may_be_about_to_be_filled() -> None:
    assert not is_retired([replace(taken_out()[HOST], inventories={})])
    assert not is_retired([])


# --- a flat host turns nested, as tables: who goes where, what is split, what finds no room

FLAT_ROOT, LEFT, RIGHT, OTHER = (f"{letter * 8}-0000-4000-8000-000000000000" for letter in "abcd")
ONE, TWO, THREE = (f"{number * 8}-0000-4000-8000-000000000000" for number in "123")


def part(uuid: str, parent: str | None = None, takes: tuple[str, ...] = (), **totals: int) -> ProviderReport:
    inventories = {name: Inventory(total=total) for name, total in totals.items()}
    source = parent if parent is not None and totals else None
    return ProviderReport(
        uuid=uuid, name=uuid, parent_uuid=parent, inventories=inventories, takes_from=source, takes=takes
    )


def report_of(*nodes: ProviderReport, version: int = 1) -> InventoryUpdate:
    return InventoryUpdate(source="s", version=version, root_uuid=nodes[0].uuid, providers=nodes)


FLAT = report_of(part(FLAT_ROOT, VCPU=8, MEMORY_MB=8, DISK_GB=9, VGPU=4))
NESTED = report_of(
    part(FLAT_ROOT, DISK_GB=9, VGPU=4),
    part(LEFT, FLAT_ROOT, VCPU=4, MEMORY_MB=4),
    part(RIGHT, FLAT_ROOT, VCPU=4, MEMORY_MB=4),
)


def held(book: Mapping[str, Provider], holdings: Mapping[str, Holding]) -> dict[str, Provider]:
    """The book with what these consumers use of it."""
    used: dict[str, dict[str, int]] = {uuid: {} for uuid in book}
    for holding in holdings.values():
        for uuid, resources in holding.items():
            for name, amount in resources.items():
                used[uuid][name] = used[uuid].get(name, 0) + amount
    fields = Provider.__struct_fields__
    return {
        uuid: Provider(**{name: getattr(old, name) for name in fields} | {"used": used[uuid]})
        for uuid, old in book.items()
    }


def upgrade(
    holdings: Mapping[str, Holding], requested: InventoryUpdate = NESTED, before: InventoryUpdate = FLAT
) -> tuple[Applied, ReportPlan, dict[str, Provider]]:
    book = held(plan([before], [()], {}, shape=1).after, holdings)
    planned = plan([requested], [[report.uuid for report in before.providers]], book, holdings, shape=2)
    (result,) = planned.results
    assert isinstance(result, Applied), result
    # Whatever moved: usage is what is held, in every provider.
    now = {**holdings, **planned.moved}
    assert {u: p.used for u, p in planned.after.items()} == {u: p.used for u, p in held(planned.after, now).items()}
    return result, planned, book


def test_who_fits_moves_whole_the_largest_first() -> None:
    small, large = {"VCPU": 1, "MEMORY_MB": 2}, {"VCPU": 3, "MEMORY_MB": 3}
    result, planned, book = upgrade({ONE: {FLAT_ROOT: {**small, "DISK_GB": 5}}, TWO: {FLAT_ROOT: large}})
    # One would have fitted beside Two by its processors, not by its memory.
    assert planned.moved == {TWO: {LEFT: large}, ONE: {FLAT_ROOT: {"DISK_GB": 5}, RIGHT: small}}
    assert (result.stranded, result.changed) == ((), True)
    assert planned.after[FLAT_ROOT].inventories.keys() == {"DISK_GB", "VGPU"}
    for change in changes_of(book, planned.after):
        assert change.state is not None
        known = book.get(change.provider)
        assert change.generation == (1 if known is None else known.generation + 1)


def test_who_fits_nowhere_whole_is_split() -> None:
    _, planned, _ = upgrade({ONE: {FLAT_ROOT: {"VCPU": 6, "MEMORY_MB": 2}}})
    assert planned.moved == {ONE: {LEFT: {"VCPU": 4, "MEMORY_MB": 2}, RIGHT: {"VCPU": 2}}}


def test_what_finds_no_room_stays_stranded_and_goes_with_a_later_report() -> None:
    smaller = report_of(part(FLAT_ROOT, DISK_GB=9, VGPU=4), part(LEFT, FLAT_ROOT, VCPU=2, MEMORY_MB=4))
    holdings: dict[str, Holding] = {ONE: {FLAT_ROOT: {"VCPU": 2}}, TWO: {FLAT_ROOT: {"VCPU": 1}}}
    result, planned, _ = upgrade(holdings, smaller)
    assert planned.moved == {ONE: {LEFT: {"VCPU": 2}}}
    assert result.stranded == (f"{ROOT}/VCPU",)
    assert planned.after[FLAT_ROOT].inventories["VCPU"].capacity == 0
    again = plan(
        [smaller], [[FLAT_ROOT, LEFT]], held(planned.after, {TWO: holdings[TWO]}), {TWO: holdings[TWO]}, shape=3
    )
    assert again.moved == {TWO: {LEFT: {"VCPU": 1}}}
    assert again.after[FLAT_ROOT].inventories.keys() == {"DISK_GB", "VGPU"}


def test_what_an_earlier_report_of_the_group_has_moved_is_not_moved_again() -> None:
    holdings: dict[str, Holding] = {ONE: {FLAT_ROOT: {"VCPU": 1}}}
    book = held(plan([FLAT], [()], {}, shape=1).after, holdings)
    planned = plan([NESTED, NESTED], [[FLAT_ROOT], [FLAT_ROOT, LEFT, RIGHT]], book, holdings, shape=2)
    assert [isinstance(one, Applied) and one.changed for one in planned.results] == [True, False]
    assert planned.moved == {ONE: {LEFT: {"VCPU": 1}}}


def test_whose_place_is_known_goes_there() -> None:
    known = report_of(
        part(FLAT_ROOT, VCPU=8, MEMORY_MB=8, DISK_GB=9),
        part(LEFT, FLAT_ROOT, VGPU=2),
        part(RIGHT, FLAT_ROOT, takes=(ONE,), VGPU=2),
    )
    _, planned, _ = upgrade(
        {ONE: {FLAT_ROOT: {"VGPU": 1}}, TWO: {FLAT_ROOT: {"VGPU": 2}}, THREE: {FLAT_ROOT: {"VGPU": 1}}}, known
    )
    assert planned.moved == {ONE: {RIGHT: {"VGPU": 1}}, TWO: {LEFT: {"VGPU": 2}}, THREE: {RIGHT: {"VGPU": 1}}}


def test_nested_turns_flat_again() -> None:
    holdings: dict[str, Holding] = {ONE: {LEFT: {"VCPU": 3}, FLAT_ROOT: {"DISK_GB": 1}}, TWO: {RIGHT: {"VCPU": 4}}}
    book = held(plan([NESTED], [()], {}, shape=1).after, holdings)
    flat = report_of(
        ProviderReport(
            uuid=FLAT_ROOT,
            name=FLAT_ROOT,
            inventories={"DISK_GB": Inventory(total=9), "VCPU": Inventory(total=8)},
            takes_from=LEFT,
        )
    )
    planned = plan([flat], [[FLAT_ROOT, LEFT, RIGHT]], book, holdings, shape=2)
    assert planned.moved == {ONE: {FLAT_ROOT: {"DISK_GB": 1, "VCPU": 3}}}
    assert planned.after.keys() == {FLAT_ROOT, RIGHT}  # no consumer takes from the right cell: it is stranded


def test_a_class_that_the_source_keeps_and_a_provider_of_others_stay() -> None:
    both = report_of(part(FLAT_ROOT, VCPU=8, MEMORY_MB=8, DISK_GB=9, VGPU=4), part(LEFT, FLAT_ROOT, VCPU=4))
    assert upgrade({ONE: {FLAT_ROOT: {"VCPU": 1}}}, both)[1].moved == {}
    holdings: dict[str, Holding] = {ONE: {OTHER: {"VCPU": 1}}}
    book = held(plan([FLAT, report_of(part(OTHER, VCPU=4))], [(), ()], {}, shape=1).after, holdings)
    greedy = ProviderReport(uuid=FLAT_ROOT, name=FLAT_ROOT, inventories={"VCPU": Inventory(total=9)}, takes_from=OTHER)
    assert plan([report_of(greedy)], [[FLAT_ROOT]], book, holdings, shape=2).moved == {}


def test_a_refused_update_moves_nothing() -> None:
    holdings: dict[str, Holding] = {ONE: {FLAT_ROOT: {"VCPU": 1}}}
    taken = ProviderReport(uuid=OTHER, name=LEFT)
    book = held(plan([FLAT, report_of(taken)], [(), ()], {}, shape=1).after, holdings)
    planned = plan([NESTED], [[FLAT_ROOT]], book, holdings, shape=2)
    assert isinstance(planned.results[0], ReportRefusal)
    assert planned.moved == {} and planned.after == book
    itself = ProviderReport(uuid=FLAT_ROOT, name=FLAT_ROOT, takes_from=FLAT_ROOT)
    assert flaw(report_of(itself), ()) == ReportRefusal("inventory.takes_from", f"{ROOT} cannot take from itself")
