"""Inventory reports: what is wrong with one, what it changes, what it takes along, and which trees are retired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from bus.clock import LOG_INTERVAL_S, SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.placement import Inventory, InventoryResult, InventoryUpdate, ProviderReport
from placement_worker.domain.reports import Applied, ReportPlan, ReportRefusal, plan, problem_of
from placement_worker.domain.values import Provider, ProviderAllocations
from placement_worker.handlers import PlacementHandlers

# --- inventory updates as tables: trees made, changed, moved and removed; names; what is in use is orphaned

ROOT, CHILD, GRANDCHILD, SECOND, THIRD = (f"{letter * 8}-0000-4000-8000-000000000000" for letter in "abcde")
TRAITS = {"HW_CPU_X86_AVX2"}


def node(uuid: str, parent: str | None = None, name: str = "", total: int = 4, **fields: Any) -> ProviderReport:
    inventories = {"VCPU": Inventory(total=total)} if total else {}
    return ProviderReport(uuid=uuid, name=name or f"n-{uuid[0]}", parent_uuid=parent, inventories=inventories, **fields)


def update(*nodes: ProviderReport, root: str = "", version: int = 1) -> InventoryUpdate:
    return InventoryUpdate(reporter="s", version=version, root_uuid=root or nodes[0].uuid, providers=nodes)


def providers_of(*updates: InventoryUpdate) -> dict[str, Provider]:
    return plan(updates, [()] * len(updates), {}, spec_generation=1).after


def using(providers: Mapping[str, Provider], uuid: str, **used: int) -> dict[str, Provider]:
    old = providers[uuid]
    fields = {name: getattr(old, name) for name in Provider.__struct_fields__}
    return {**providers, uuid: Provider(**{**fields, "used": used})}


def after(
    providers: Mapping[str, Provider], requested: InventoryUpdate, earlier: Sequence[str] = ()
) -> tuple[Applied, ReportPlan]:
    planned = plan([requested], [earlier], providers, spec_generation=2)
    (result,) = planned.results
    assert isinstance(result, Applied), result
    return result, planned


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
        (
            update(ProviderReport(uuid=ROOT, name="r", inventories={"VCPU": Inventory(total=1, reserved=2)})),
            "inventory.reserved",
        ),
    ],
)
def test_what_is_wrong_with_an_update_by_itself(bad: InventoryUpdate, code: str) -> None:
    wrong = problem_of(bad)
    assert wrong is not None
    assert wrong.code == code


def test_the_former_parent_of_what_is_reported_elsewhere_goes() -> None:
    providers = providers_of(update(node(ROOT), node(CHILD, ROOT), node(GRANDCHILD, CHILD)))
    result, planned = after(providers, update(node(ROOT), node(GRANDCHILD, ROOT)), earlier=[ROOT, CHILD, GRANDCHILD])
    assert (result.orphaned, set(planned.after)) == ((), {ROOT, GRANDCHILD})


def test_each_tree_that_an_update_takes_providers_from_is_told() -> None:
    providers = providers_of(update(node(ROOT), node(CHILD, ROOT)), update(node(SECOND), node(GRANDCHILD, SECOND)))
    result, _ = after(providers, update(node(THIRD), node(CHILD, THIRD), node(GRANDCHILD, THIRD)))
    assert set(result.left) == {ROOT, SECOND}


def test_a_provider_in_use_is_stranded_with_its_parents_and_goes_when_unused() -> None:
    providers = using(providers_of(update(node(ROOT), node(CHILD, ROOT), node(GRANDCHILD, CHILD))), GRANDCHILD, VCPU=2)
    result, planned = after(providers, update(node(ROOT)), earlier=[ROOT, CHILD, GRANDCHILD])
    assert result.orphaned == (GRANDCHILD, CHILD)
    inventory = planned.after[GRANDCHILD].inventories["VCPU"]
    assert (inventory.capacity, inventory.reserved, inventory.total, inventory.orphaned) == (0, 4, 4, True)
    assert planned.after[CHILD].inventories == {}
    freed = using(planned.after, GRANDCHILD)
    result, planned = after(freed, update(node(ROOT)), earlier=[ROOT, CHILD, GRANDCHILD])
    assert result.orphaned == ()
    assert set(planned.after) == {ROOT}


def place(uuid: str, parent: str | None = None) -> ProviderReport:
    """A provider that another source reports."""
    return ProviderReport(uuid=uuid, name="whatever", parent_uuid=parent, is_reference=True)


@pytest.mark.parametrize(
    "requested",
    [
        update(place(ROOT), node(CHILD, ROOT)),
        update(place(SECOND), place(ROOT, SECOND)),
        # What is below it may not be above it: no walk to the root of this tree would end.
        update(node(GRANDCHILD), place(CHILD, GRANDCHILD), node(ROOT, CHILD)),
    ],
)
def test_a_place_that_is_not_there_is_refused(requested: InventoryUpdate) -> None:
    providers = providers_of(update(node(SECOND)), update(node(GRANDCHILD), node(ROOT, GRANDCHILD), node(CHILD, ROOT)))
    if requested.root_uuid == ROOT:
        providers = providers_of(update(node(SECOND)))
    (result,) = plan([requested], [()], providers, spec_generation=2).results
    assert isinstance(result, ReportRefusal)
    assert result.code == "inventory.not_there"


# --- a flat host turns nested, as tables: who goes where, what is split, what finds no room

FLAT_ROOT, LEFT, RIGHT, OTHER = (f"{letter * 8}-0000-4000-8000-000000000000" for letter in "abcd")
ONE, TWO, THREE = (f"{number * 8}-0000-4000-8000-000000000000" for number in "123")


def part(uuid: str, parent: str | None = None, takes: tuple[str, ...] = (), **totals: int) -> ProviderReport:
    inventories = {name: Inventory(total=total) for name, total in totals.items()}
    source = parent if parent is not None and totals else None
    return ProviderReport(
        uuid=uuid, name=uuid, parent_uuid=parent, inventories=inventories, receives_from=source, known_consumers=takes
    )


def report_of(*nodes: ProviderReport, version: int = 1) -> InventoryUpdate:
    return InventoryUpdate(reporter="s", version=version, root_uuid=nodes[0].uuid, providers=nodes)


FLAT = report_of(part(FLAT_ROOT, VCPU=8, MEMORY_MB=8, DISK_GB=9, VGPU=4))
NESTED = report_of(
    part(FLAT_ROOT, DISK_GB=9, VGPU=4),
    part(LEFT, FLAT_ROOT, VCPU=4, MEMORY_MB=4),
    part(RIGHT, FLAT_ROOT, VCPU=4, MEMORY_MB=4),
)


def held(providers: Mapping[str, Provider], allocations: Mapping[str, ProviderAllocations]) -> dict[str, Provider]:
    """Placement with what these consumers use of it."""
    used: dict[str, dict[str, int]] = {uuid: {} for uuid in providers}
    for holding in allocations.values():
        for uuid, resources in holding.items():
            for name, amount in resources.items():
                used[uuid][name] = used[uuid].get(name, 0) + amount
    fields = Provider.__struct_fields__
    return {
        uuid: Provider(**{name: getattr(old, name) for name in fields} | {"used": used[uuid]})
        for uuid, old in providers.items()
    }


def upgrade(
    allocations: Mapping[str, ProviderAllocations], requested: InventoryUpdate = NESTED, before: InventoryUpdate = FLAT
) -> tuple[Applied, ReportPlan, dict[str, Provider]]:
    providers = held(plan([before], [()], {}, spec_generation=1).after, allocations)
    planned = plan(
        [requested], [[report.uuid for report in before.providers]], providers, allocations, spec_generation=2
    )
    (result,) = planned.results
    assert isinstance(result, Applied), result
    # Whatever moved: usage is what is held, in every provider.
    now = {**allocations, **planned.moved}
    assert {u: p.used for u, p in planned.after.items()} == {u: p.used for u, p in held(planned.after, now).items()}
    return result, planned, providers


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


def test_nothing_moves_to_what_another_source_reports() -> None:
    """It stays as it is, without the class: what had moved there could not be released, and no claim of its batch."""
    below = report_of(part(FLAT_ROOT), part(LEFT, FLAT_ROOT, VCPU=4))
    theirs = ProviderReport(
        uuid=FLAT_ROOT, name=FLAT_ROOT, inventories={"VCPU": Inventory(total=4)}, receives_from=LEFT, is_reference=True
    )
    result, planned, _ = upgrade({ONE: {LEFT: {"VCPU": 1}}}, report_of(theirs, part(LEFT, FLAT_ROOT)), below)
    assert (result.orphaned, planned.moved) == ((f"{LEFT}/VCPU",), {})


# --- the handler


class HandClock(SystemClock):
    now = 0.0

    def monotonic(self) -> float:
        return self.now


async def test_unknown_traits_are_logged_once_a_minute_however_many_reports_name_them() -> None:
    """A line with each report, for ever, of each node: and each sought the nearest among all traits, some 3 ms."""

    async def report(updates: list[InventoryUpdate], *, bus: str) -> list[InventoryResult]:
        return [InventoryResult(outcome="unchanged", unknown_traits=("HW_NEWER",))] * len(updates)

    clock, store = HandClock(), SimpleNamespace(apply_reports=report, reads=cast("Any", _Reads()), names=_Names())
    handlers = PlacementHandlers(cast("Any", store), clock=clock, committed=lambda: None, claimed=lambda: None)
    received = Received(update(node(ROOT)), Meta(id="m"), "c1", "placement.inventory")
    with capture_logs() as lines:
        for clock.now in (0.0, 1.0, LOG_INTERVAL_S):
            await handlers.inventory([received] * 100)
    found = [(line["traits"], line["reports"]) for line in lines if line["event"] == "trait.unknown"]
    assert found == [(("HW_NEWER",), 1), (("HW_NEWER",), 200)]


class _Reads:
    def __getattr__(self, name: str) -> object:
        return None


class _Names:
    trait_ids: dict[str, int] = {}
