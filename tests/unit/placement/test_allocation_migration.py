"""A flat host turns nested, as tables: who goes where, what is split, what finds no room."""

from __future__ import annotations

from collections.abc import Mapping

from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from placement_worker.domain.reports import Applied, ReportPlan, ReportRefusal, changes_of, flaw, plan
from placement_worker.domain.values import Holding, Provider

ROOT, LEFT, RIGHT, OTHER = (f"{letter * 8}-0000-4000-8000-000000000000" for letter in "abcd")
ONE, TWO, THREE = (f"{number * 8}-0000-4000-8000-000000000000" for number in "123")


def node(uuid: str, parent: str | None = None, takes: tuple[str, ...] = (), **totals: int) -> ProviderReport:
    inventories = {name: Inventory(total=total) for name, total in totals.items()}
    source = parent if parent is not None and totals else None
    return ProviderReport(
        uuid=uuid, name=uuid, parent_uuid=parent, inventories=inventories, takes_from=source, takes=takes
    )


def update(*nodes: ProviderReport, version: int = 1) -> InventoryUpdate:
    return InventoryUpdate(source="s", version=version, root_uuid=nodes[0].uuid, providers=nodes)


FLAT = update(node(ROOT, VCPU=8, MEMORY_MB=8, DISK_GB=9, VGPU=4))
NESTED = update(
    node(ROOT, DISK_GB=9, VGPU=4), node(LEFT, ROOT, VCPU=4, MEMORY_MB=4), node(RIGHT, ROOT, VCPU=4, MEMORY_MB=4)
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
    result, planned, book = upgrade({ONE: {ROOT: {**small, "DISK_GB": 5}}, TWO: {ROOT: large}})
    # One would have fitted beside Two by its processors, not by its memory.
    assert planned.moved == {TWO: {LEFT: large}, ONE: {ROOT: {"DISK_GB": 5}, RIGHT: small}}
    assert (result.stranded, result.changed) == ((), True)
    assert planned.after[ROOT].inventories.keys() == {"DISK_GB", "VGPU"}
    for change in changes_of(book, planned.after):
        assert change.state is not None
        known = book.get(change.provider)
        assert change.generation == (1 if known is None else known.generation + 1)


def test_who_fits_nowhere_whole_is_split() -> None:
    _, planned, _ = upgrade({ONE: {ROOT: {"VCPU": 6, "MEMORY_MB": 2}}})
    assert planned.moved == {ONE: {LEFT: {"VCPU": 4, "MEMORY_MB": 2}, RIGHT: {"VCPU": 2}}}


def test_what_finds_no_room_stays_stranded_and_goes_with_a_later_report() -> None:
    smaller = update(node(ROOT, DISK_GB=9, VGPU=4), node(LEFT, ROOT, VCPU=2, MEMORY_MB=4))
    holdings: dict[str, Holding] = {ONE: {ROOT: {"VCPU": 2}}, TWO: {ROOT: {"VCPU": 1}}}
    result, planned, _ = upgrade(holdings, smaller)
    assert planned.moved == {ONE: {LEFT: {"VCPU": 2}}}
    assert result.stranded == (f"{ROOT}/VCPU",)
    assert planned.after[ROOT].inventories["VCPU"].capacity == 0
    again = plan([smaller], [[ROOT, LEFT]], held(planned.after, {TWO: holdings[TWO]}), {TWO: holdings[TWO]}, shape=3)
    assert again.moved == {TWO: {LEFT: {"VCPU": 1}}}
    assert again.after[ROOT].inventories.keys() == {"DISK_GB", "VGPU"}


def test_whose_place_is_known_goes_there() -> None:
    known = update(
        node(ROOT, VCPU=8, MEMORY_MB=8, DISK_GB=9), node(LEFT, ROOT, VGPU=2), node(RIGHT, ROOT, takes=(ONE,), VGPU=2)
    )
    _, planned, _ = upgrade({ONE: {ROOT: {"VGPU": 1}}, TWO: {ROOT: {"VGPU": 2}}, THREE: {ROOT: {"VGPU": 1}}}, known)
    assert planned.moved == {ONE: {RIGHT: {"VGPU": 1}}, TWO: {LEFT: {"VGPU": 2}}, THREE: {RIGHT: {"VGPU": 1}}}


def test_nested_turns_flat_again() -> None:
    holdings: dict[str, Holding] = {ONE: {LEFT: {"VCPU": 3}, ROOT: {"DISK_GB": 1}}, TWO: {RIGHT: {"VCPU": 4}}}
    book = held(plan([NESTED], [()], {}, shape=1).after, holdings)
    flat = update(
        ProviderReport(uuid=ROOT, name=ROOT, inventories={"DISK_GB": Inventory(total=9), "VCPU": Inventory(total=8)},
                       takes_from=LEFT)
    )  # fmt: skip
    planned = plan([flat], [[ROOT, LEFT, RIGHT]], book, holdings, shape=2)
    assert planned.moved == {ONE: {ROOT: {"DISK_GB": 1, "VCPU": 3}}}
    assert planned.after.keys() == {ROOT, RIGHT}  # no consumer takes from the right cell: it is stranded


def test_a_class_that_the_source_keeps_and_a_provider_of_others_stay() -> None:
    both = update(node(ROOT, VCPU=8, MEMORY_MB=8, DISK_GB=9, VGPU=4), node(LEFT, ROOT, VCPU=4))
    assert upgrade({ONE: {ROOT: {"VCPU": 1}}}, both)[1].moved == {}
    holdings: dict[str, Holding] = {ONE: {OTHER: {"VCPU": 1}}}
    book = held(plan([FLAT, update(node(OTHER, VCPU=4))], [(), ()], {}, shape=1).after, holdings)
    greedy = ProviderReport(uuid=ROOT, name=ROOT, inventories={"VCPU": Inventory(total=9)}, takes_from=OTHER)
    assert plan([update(greedy)], [[ROOT]], book, holdings, shape=2).moved == {}


def test_a_refused_update_moves_nothing() -> None:
    holdings: dict[str, Holding] = {ONE: {ROOT: {"VCPU": 1}}}
    taken = ProviderReport(uuid=OTHER, name=LEFT)
    book = held(plan([FLAT, update(taken)], [(), ()], {}, shape=1).after, holdings)
    planned = plan([NESTED], [[ROOT]], book, holdings, shape=2)
    assert isinstance(planned.results[0], ReportRefusal)
    assert planned.moved == {} and planned.after == book
    itself = ProviderReport(uuid=ROOT, name=ROOT, takes_from=ROOT)
    assert flaw(update(itself), ()) == ReportRefusal("inventory.takes_from", f"{ROOT} cannot take from itself")
