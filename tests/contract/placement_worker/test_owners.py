"""Whose a host is: of one compute service, and of one cell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial

import pytest
from msgspec.structs import replace

from bus.bus import API
from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received, Refuse
from bus.contracts.base import Message, Meta
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimResult,
    ConsumerAllocations,
    Inventory,
    InventoryConflict,
    InventoryReleased,
    InventoryResult,
    InventoryStale,
    InventoryUpdate,
    ProviderReport,
    Release,
    Swap,
)
from bus.contracts.placement_queries import ServiceHostsPage, ServiceHostsQuery
from bus.persistence.database import Database
from placement_worker.domain.claims import ClaimItem
from placement_worker.domain.refusal import RefusalCode, WriteRefusal
from placement_worker.domain.reports import ReportRefusal
from placement_worker.domain.trees import CreateProvider, DeleteTree, SetInventories, SetTraits, UpdateProvider
from placement_worker.domain.values import ABOVE_CELLS, Provider, stored_inventory
from placement_worker.handlers import PlacementHandlers
from placement_worker.operations.audit import set_host_cell
from placement_worker.service import PlacementService
from placement_worker.store.postgres_rows import PostgresPlacementRows
from tests.contract.books import KINDS, books

# --- A host that placement has as one compute service's is not another one's, until that one takes it over.


FIRST, SECOND, THIRD = "compute-s1", "compute-s2", "compute-s3"
TAKEN = "host.other_service"
NO_HOST = "b0000000-0000-4000-8000-000000000000"


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[PlacementService]:
    async with books(request) as make:
        made = make()
        await made.open()
        yield made


def first(version: int, *children: str, vcpus: int = 4) -> InventoryUpdate:
    return host(MINE, version, *children, reporter=FIRST, vcpus=vcpus)


def second(version: int, *, vcpus: int = 9, takes_over: str | None = None, reporter: str = SECOND) -> InventoryUpdate:
    return replace(host(MINE, version, reporter=reporter, vcpus=vcpus), former_reporter=takes_over)


async def outcomes(store: PlacementService, *updates: InventoryUpdate) -> list[str]:
    results = await store.apply_reports(updates, bus="c1")
    return [result.code if isinstance(result, ReportRefusal) else result.outcome for result in results]


async def capacity(store: PlacementService) -> float | None:
    (provider,) = [one for one in (await store.snapshot(None, 100)).providers if one.uuid == MINE] or [None]
    return None if provider is None else provider.inventories["VCPU"][0]


@pytest.mark.parametrize("is_held", [False, True])
async def test_who_has_given_a_node_to_another_source_takes_it_out_no_more(
    store: PlacementService, is_held: bool
) -> None:
    """An Ironic's removals are repeated for days; each took out, or closed, the node that another one had by then."""
    east, west = (host(MINE, 1, reporter=f"ironic_{name}") for name in ("east", "west"))
    assert await outcomes(store, east) == ["applied"]
    if is_held:
        await store.apply([claim(MINE)])
    for version, outcome in ((2, "applied"), (3, "unchanged")):
        assert await outcomes(store, replace(east, version=version, providers=())) == [outcome]
        assert await outcomes(store, replace(west, version=version)) == [outcome]
    assert await capacity(store) == 4
    assert await store.remove_retired_trees(10, keep_given_s=3600.0) == []
    assert await outcomes(store, replace(west, version=9, providers=())) == ["applied"]
    assert await capacity(store) == (0 if is_held else None)


async def test_the_next_one_takes_it_over_and_the_former_one_is_refused(store: PlacementService) -> None:
    await outcomes(store, first(1, CHILD))
    await store.release_roots(FIRST, [MINE], bus="c1")
    assert await outcomes(store, second(1, takes_over=THIRD)) == [TAKEN], "it is not that one's"
    assert await outcomes(store, second(1, takes_over=FIRST)) == ["applied"]
    assert await capacity(store) == 9
    assert CHILD not in {one.uuid for one in (await store.snapshot(None, 100)).providers}, (
        "the new owner has no such child"
    )
    assert await outcomes(store, first(2, CHILD)) == [TAKEN]
    assert await outcomes(store, second(2, takes_over=FIRST)) == ["unchanged"], "delivered once more"
    await store.release_roots(SECOND, [MINE], bus="c1")
    assert await outcomes(store, replace(first(3), former_reporter=SECOND)) == ["applied"]
    assert await outcomes(store, second(3)) == [TAKEN]


async def test_what_the_conductor_has_not_released_is_taken_over_by_none(store: PlacementService) -> None:
    """A worker with its cell's rights could name any owner, and have its hosts."""
    await outcomes(store, first(1))
    assert await outcomes(store, second(1, takes_over=FIRST)) == [TAKEN]
    for reporter, root, bus in ((THIRD, MINE, "c1"), (FIRST, CHILD, "c1"), (FIRST, MINE, "c2")):
        await store.release_roots(reporter, [root], bus=bus)
        assert await outcomes(store, second(2, takes_over=FIRST)) == [TAKEN], (reporter, root, bus)
    await store.release_roots(FIRST, [MINE], bus="c1")
    assert await outcomes(store, first(2)) == ["unchanged"], "it has come back"
    assert await outcomes(store, second(3, takes_over=FIRST)) == [TAKEN]
    await store.release_roots(FIRST, [MINE], bus="c1")
    assert await outcomes(store, second(4, takes_over=FIRST)) == ["applied"]
    assert await capacity(store) == 9


@pytest.mark.parametrize(("is_first", "vcpus"), [(True, 9), (False, 4)])
async def test_a_release_counts_for_the_reports_that_come_after_it(
    store: PlacementService, is_first: bool, vcpus: int
) -> None:
    handlers = PlacementHandlers(store, clock=SystemClock(), committed=lambda: None, claimed=lambda: None)
    await outcomes(store, first(1))
    released: Message = InventoryReleased(reporter=FIRST, roots=(MINE,))
    messages = [released, second(1, takes_over=FIRST)] if is_first else [second(1, takes_over=FIRST), released]
    batch = [Received(one, Meta(id=str(at)), "c1", "placement.inventory") for at, one in enumerate(messages)]
    assert [type(one) for one in await handlers.inventory(batch)] == [Done, Done]
    assert await capacity(store) == vcpus


async def test_the_refused_service_is_sent_whose_the_host_is(store: PlacementService) -> None:
    published: list[tuple[str, Message]] = []

    async def publish(bus: str, messages: Sequence[Message]) -> None:
        published.extend((bus, message) for message in messages)

    handlers = PlacementHandlers(
        store, clock=SystemClock(), committed=lambda: None, claimed=lambda: None, publish=publish
    )
    batch = [Received(one, Meta(id=str(one.version)), "c1", "placement.inventory") for one in (first(1), second(2))]
    results = await handlers.inventory(batch)
    assert [type(one) for one in results] == [Done, Done], "it is no dead letter: it is repeated with every report"
    assert published == [("c1", InventoryConflict(reporter=SECOND, root_uuid=MINE, owner=FIRST))]


async def test_a_service_whose_host_has_anothers_name_is_sent_that(store: PlacementService) -> None:
    """It was a dead letter, and the host stayed out of placement when the name was free."""
    published: list[Message] = []

    async def publish(_: str, messages: Sequence[Message]) -> None:
        published.extend(messages)

    handlers = PlacementHandlers(
        store, clock=SystemClock(), committed=lambda: None, claimed=lambda: None, publish=publish
    )
    (report,) = first(1).providers
    again = replace(first(1), root_uuid=CHILD, providers=(replace(report, uuid=CHILD),))
    batch = [Received(one, Meta(id=one.root_uuid), "c1", "placement.inventory") for one in (first(1), again)]
    assert [type(one) for one in await handlers.inventory(batch)] == [Done, Done]
    (taken,) = published
    assert isinstance(taken, InventoryConflict)
    assert (taken.root_uuid, taken.owner, taken.code) == (CHILD, None, "provider.name_taken")


async def test_two_hosts_that_have_swapped_their_names_are_put_right(store: PlacementService) -> None:
    """Each of them waited for the other one, for ever."""
    (report,) = first(1).providers
    other = replace(first(1), root_uuid=CHILD, providers=(replace(report, uuid=CHILD, name="other"),))
    assert await outcomes(store, first(1), other) == ["applied", "applied"]
    swapped = [
        replace(first(2), providers=(replace(report, name="other"),)),
        replace(other, version=2, providers=(replace(report, uuid=CHILD),)),
    ]
    assert await outcomes(store, swapped[0]) == ["provider.name_taken"]
    assert await outcomes(store, *swapped) == ["applied", "applied"]
    assert await outcomes(store, *(replace(one, version=3) for one in swapped)) == ["unchanged", "unchanged"]


async def test_hosts_that_exchange_names_are_all_changed_or_none(store: PlacementService) -> None:
    """Found by reading: of two that were applied together the second was refused for what the first had changed. The
    placement in memory then had two providers of one name, and PostgreSQL failed the whole group, whenever it was
    repeated.
    """
    mine, other, child = (ProviderReport(uuid=one, name=f"n-{one[0]}") for one in (MINE, OTHER, CHILD))
    below = replace(child, parent_uuid=MINE)
    tree = host(MINE, 1, reporter="agent")
    await outcomes(store, replace(tree, providers=(mine, below)), replace(host(OTHER, 1), providers=(other,)))
    taking = (replace(other, name=child.name), replace(mine, parent_uuid=OTHER))
    giving = (replace(mine, is_reference=True), replace(below, name=other.name))
    group = [replace(host(OTHER, 2), providers=taking), replace(tree, version=2, providers=giving)]
    assert await outcomes(store, *group) == ["provider.name_taken", "provider.name_taken"]
    states = (await store.snapshot(None, 100)).providers
    assert {one.uuid: (one.name, one.root_uuid) for one in states} == {
        MINE: (mine.name, MINE),
        OTHER: (other.name, OTHER),
        CHILD: (child.name, MINE),
    }


async def test_what_rest_has_changed_of_a_host_is_put_right_by_the_same_report(store: PlacementService) -> None:
    """A total of 1,000,000 stayed: a report of the content that its source had reported before was not looked at."""
    assert [*await outcomes(store, first(1)), *await outcomes(store, first(2))] == ["applied", "unchanged"]
    (changed,) = await store.write_trees([SetInventories(MINE, {"VCPU": stored_inventory(Inventory(total=1_000_000))})])
    assert isinstance(changed, Provider) and await capacity(store) == 1_000_000
    assert [*await outcomes(store, first(3)), *await outcomes(store, first(4))] == ["applied", "unchanged"]
    assert await capacity(store) == 4


async def test_what_rest_adds_to_a_host_stays_beside_its_inventory_alone(store: PlacementService) -> None:
    """As in Nova: a host's inventory is its own service's. A class beside it is a provider's below it."""
    await outcomes(store, first(1))
    kept = {"VCPU": stored_inventory(Inventory(total=4))}
    added = stored_inventory(Inventory(total=100))
    writes = (
        SetInventories(MINE, {**kept, "SRIOV_NET_VF": added}),
        SetTraits(MINE, ("COMPUTE_NODE",)),
        CreateProvider(CHILD, "below", parent=MINE),
        SetInventories(CHILD, {"SRIOV_NET_VF": added}),
    )
    assert all(isinstance(one, Provider) for one in await store.write_trees(writes))
    assert await outcomes(store, first(2)) == ["applied"]
    states = {one.uuid: one for one in (await store.snapshot(None, 100)).providers}
    assert {uuid: list(one.inventories) for uuid, one in states.items()} == {MINE: ["VCPU"], CHILD: ["SRIOV_NET_VF"]}
    assert (states[MINE].traits, states[CHILD].parent_uuid) == (("COMPUTE_NODE",), MINE)


async def test_a_report_of_a_class_that_was_renamed_counts(store: PlacementService) -> None:
    """`unchanged` for ever: placement had the other name, and the host was offered as what its service never said."""
    gold = ProviderReport(uuid=MINE, name="gold", inventories={"CUSTOM_GOLD": Inventory(total=1)})
    reports = [InventoryUpdate(reporter=FIRST, version=n, root_uuid=MINE, providers=(gold,)) for n in range(1, 4)]
    assert [await outcomes(store, one) for one in reports[:2]] == [["applied"], ["unchanged"]]
    assert await store.rename_class("CUSTOM_GOLD", "CUSTOM_SILVER")
    assert await outcomes(store, reports[2]) == ["applied"]
    (state,) = (await store.snapshot(None, 100)).providers
    assert list(state.inventories) == ["CUSTOM_GOLD"]


async def test_rest_puts_no_host_that_a_source_reports_below_another(store: PlacementService) -> None:
    """Builds went to it by the other's root, and 18 of 24 failed."""
    await outcomes(store, first(1))
    created = await store.write_trees([CreateProvider(CHILD, "above"), CreateProvider(NO_HOST, "no-host")])
    assert all(isinstance(one, Provider) for one in created)
    put, other = (UpdateProvider(uuid, uuid, parent=CHILD, may_reparent=True) for uuid in (MINE, NO_HOST))
    refused, moved = await store.write_trees([put, other])
    assert isinstance(refused, WriteRefusal) and refused.code is RefusalCode.BAD_PARENT
    assert isinstance(moved, Provider) and moved.parent == CHILD
    await outcomes(store, replace(first(2), providers=()))
    (gone,) = await store.write_trees([put])
    assert isinstance(gone, WriteRefusal) and gone.code is RefusalCode.NO_PROVIDER


async def test_the_hosts_of_a_service_are_those_that_it_owns(store: PlacementService) -> None:
    handlers = PlacementHandlers(store, clock=SystemClock(), committed=lambda: None, claimed=lambda: None)

    async def has(service: str, cell: str = "c1") -> int:
        query = ServiceHostsQuery(service=service, cell=cell)
        (done,) = await handlers.reads([Received(query, Meta(id="q"), ABOVE_CELLS, "placement.reads")])
        assert isinstance(done, Done) and isinstance(done.reply, ServiceHostsPage)
        return len(done.reply.hosts)

    assert await has("s1") == 0
    await outcomes(store, first(1, CHILD), host(MINE, 1, reporter="agent"))
    await outcomes(store, second(1))
    assert (await has("s1"), await has("s2"), await has("s1", "c2")) == (1, 0, 0)
    assert await store.reads.hosts_of_service(ServiceHostsQuery(service="s1", cell="c1")) == ServiceHostsPage(
        hosts={MINE: first(1).providers[0].name}
    )
    await store.release_roots(FIRST, [MINE], bus="c1")
    assert await has("s1") == 1, "until another one takes it over"
    await outcomes(store, second(2, takes_over=FIRST))
    assert (await has("s1"), await has("s2")) == (0, 1)
    await store.write_trees([DeleteTree(MINE)])
    assert await has("s2") == 0


# --- Messages on a cell's bus may create, report and claim objects that belong to that cell, and nothing of
# another's.


MINE, OTHER = (f"{n}0000000-0000-4000-8000-000000000000" for n in range(1, 3))
CHILD = "a0000000-0000-4000-8000-000000000000"
CONSUMER = "c0000000-0000-4000-8000-000000000000"


@pytest.fixture
async def postgres(postgres_url: str) -> AsyncIterator[PlacementService]:
    made = PlacementService(PostgresPlacementRows(Database(postgres_url, "placement")))
    await made.open()
    yield made
    await made.close()


def host(root: str, version: int, *children: str, reporter: str = "compute", vcpus: int = 4) -> InventoryUpdate:
    inventory = {"VCPU": Inventory(total=vcpus)}
    reports = [ProviderReport(uuid=root, name=root, inventories=inventory)]
    reports += [ProviderReport(uuid=child, name=child, parent_uuid=root, inventories=inventory) for child in children]
    return InventoryUpdate(reporter=reporter, version=version, root_uuid=root, providers=tuple(reports))


def claim(*roots: str, attempt: int = 1, **fields: object) -> Claim:
    options = tuple(ClaimOption(allocations={root: {"VCPU": 1}}) for root in roots)
    return Claim(consumer=CONSUMER, attempt=attempt, options=options, project_id="p", **fields)  # type: ignore[arg-type]


async def notify(store: PlacementService, bus: str, *updates: InventoryUpdate) -> list[str]:
    results = await store.apply_reports(updates, bus=bus)
    return [result.code if isinstance(result, ReportRefusal) else result.outcome for result in results]


async def ask(store: PlacementService, bus: str, item: ClaimItem) -> str:
    (answer,) = await store.apply([item], bus=bus)
    return str(answer.outcome)


async def test_a_cell_claims_nothing_of_another(store: PlacementService) -> None:
    await notify(store, "c1", host(MINE, 1, CHILD))
    await notify(store, "c2", host(OTHER, 1))
    (answer,) = await store.apply([claim(MINE, CHILD, OTHER)], bus="c2")
    assert isinstance(answer, ClaimResult)
    assert (answer.option, [str(o) for o in answer.outcomes]) == (
        2,
        ["provider_removed", "provider_removed", "claimed"],
    )
    (answer,) = await store.apply([replace(claim(MINE), consumer=CHILD)], bus="c2")
    assert isinstance(answer, ClaimResult)
    assert (str(answer.outcome), answer.reason.split(":")[0]) == ("provider_removed", "claim.foreign_cell")
    assert await ask(store, API, replace(claim(MINE), consumer=CHILD)) == "claimed"


async def test_a_cell_releases_and_moves_nothing_of_another(store: PlacementService) -> None:
    await notify(store, "c1", host(MINE, 1))
    await notify(store, "c2", host(OTHER, 1))
    await ask(store, API, claim(MINE))
    again = claim(OTHER, attempt=2, release_first=True, consumer_generation=1)
    assert await ask(store, "c2", again) == "consumer_conflict"
    assert await ask(store, "c2", claim(MINE)) == "consumer_conflict"
    swap = ConsumerAllocations(consumer=CONSUMER, consumer_generation=1, project_id="p")
    assert await ask(store, "c2", Swap(consumers=(swap,))) == "consumer_conflict"
    taken = ConsumerAllocations(consumer=CHILD, project_id="p", allocations={MINE: {"VCPU": 1}})
    assert await ask(store, "c2", Swap(consumers=(taken,))) == "provider_removed"
    assert await ask(store, "c2", Release(consumer=CONSUMER)) == "consumer_conflict"
    assert await ask(store, "c2", Release(consumer=CONSUMER, attempt=9)) == "consumer_conflict"
    assert await ask(store, "c1", Release(consumer=CONSUMER)) == "released"


async def test_the_bus_that_a_message_came_on_decides(store: PlacementService) -> None:
    handlers = PlacementHandlers(store, clock=SystemClock(), committed=lambda: None, claimed=lambda: None)
    await notify(store, "c1", host(MINE, 1))
    (refused,) = await handlers.inventory([Received(host(MINE, 2), Meta(id="m"), "c2", "placement.inventory")])
    assert isinstance(refused, Refuse)
    assert refused.code == "inventory.foreign_cell"
    (done,) = await handlers.requests([Received(claim(MINE), Meta(id="m"), "c2", "placement.requests")])
    assert isinstance(done, Done)
    assert isinstance(done.reply, ClaimResult)
    assert str(done.reply.outcome) == "provider_removed"


async def test_a_reporter_learns_which_version_of_its_report_placement_has(store: PlacementService) -> None:
    sent: list[tuple[str, Message]] = []

    async def send(bus: str, messages: Sequence[Message]) -> None:
        sent.extend((bus, message) for message in messages)

    handlers = PlacementHandlers(store, clock=SystemClock(), committed=lambda: None, claimed=lambda: None, publish=send)
    for version in (7, 7, 3, 8):
        await handlers.inventory([Received(host(MINE, version), Meta(id="m"), "c1", "placement.inventory")])
    known = InventoryStale(reporter=host(MINE, 1).reporter, root_uuid=MINE, version=7)
    assert sent == [("c1", known)], "a report that comes twice is not outdated"


async def test_a_trait_that_placement_does_not_know_holds_up_no_report(store: PlacementService) -> None:
    handlers = PlacementHandlers(store, clock=SystemClock(), committed=lambda: None, claimed=lambda: None)
    (free,) = host(MINE, 1).providers
    for version, vcpus in ((1, 4), (2, 1)):
        named = replace(free, traits=("HW_NEWER", "CUSTOM_X"), inventories={"VCPU": Inventory(total=vcpus)})
        update = replace(host(MINE, version), providers=(named,))
        (done,) = await handlers.inventory([Received(update, Meta(id="m"), "c1", "placement.inventory")])
        assert isinstance(done, Done) and isinstance(done.reply, InventoryResult)
        assert (done.reply.outcome, done.reply.unknown_traits) == ("applied", ("HW_NEWER",))
    (state,) = (await store.snapshot(None, 10)).providers
    assert (state.traits, state.inventories["VCPU"][0]) == (("CUSTOM_X",), 1)


def node(version: int, cell: str | None = None) -> InventoryUpdate:
    return replace(host(MINE, version), reporter="ironic-sync", cell=cell)


async def test_a_source_above_cells_names_the_cell_of_a_node(store: PlacementService) -> None:
    """Without a word any cell may claim it: several may share the nodes of one Ironic."""
    await notify(store, API, node(1, "c1"))
    assert await ask(store, "c2", claim(MINE)) == "provider_removed"
    assert await notify(store, "c2", host(MINE, 9)) == ["inventory.foreign_cell"]
    assert await notify(store, API, node(2, "c1"), node(3)) == ["unchanged", "unchanged"]
    assert await ask(store, "c2", claim(MINE)) == "provider_removed", "a word less opens nothing"
    assert await ask(store, "c1", claim(MINE)) == "claimed"


async def test_an_open_node_is_closed_when_it_is_unused(store: PlacementService) -> None:
    """Its instance may be the other cell's, which has to be able to release it."""
    await notify(store, API, node(1))
    assert await ask(store, "c2", claim(MINE)) == "claimed"
    await notify(store, API, node(2, "c1"))
    assert await ask(store, "c2", Release(consumer=CONSUMER)) == "released"
    await notify(store, API, node(3, "c1"))
    assert await ask(store, "c2", claim(MINE, attempt=2)) == "provider_removed"
    assert await ask(store, "c1", claim(MINE, attempt=2)) == "claimed"


async def test_a_cells_own_bus_gives_nothing_to_another_cell(store: PlacementService) -> None:
    await notify(store, "c1", replace(host(MINE, 1), cell="c2"))
    assert await notify(store, API, node(1, "c2")) == ["inventory.foreign_cell"]
    assert await ask(store, "c2", claim(MINE)) == "provider_removed"
    assert await ask(store, "c1", claim(MINE)) == "claimed"


async def test_a_node_uuid_of_two_sources_above_cells_stays_with_the_first_cell(store: PlacementService) -> None:
    """Two Ironics, one a cell. One that another cell serves from now on gives it what it has reported before."""
    other = replace(node(9, "c2"), reporter="ironic-sync-west")
    assert await notify(store, API, node(1, "c1"), other) == ["applied", "inventory.foreign_cell"]
    assert await notify(store, API, replace(other, version=10, providers=())) == ["inventory.foreign_cell"]
    assert await notify(store, API, node(2, "c2")) == ["applied"]
    assert await ask(store, "c1", claim(MINE)) == "provider_removed"
    assert await ask(store, "c2", claim(MINE)) == "claimed"


async def unbind(store: PlacementService) -> None:
    async with store.rows.database.raw() as connection:
        await connection.execute("UPDATE providers SET cell = NULL")


@pytest.mark.postgres
async def test_a_host_of_an_older_placement_is_bound_by_its_next_report(postgres: PlacementService) -> None:
    await notify(postgres, API, host(MINE, 1))
    await unbind(postgres)
    assert await notify(postgres, "c1", host(MINE, 2)) == ["applied"]
    assert await notify(postgres, "c2", host(MINE, 3)) == ["inventory.foreign_cell"]


@pytest.mark.postgres
async def test_an_operator_moves_an_empty_host(postgres: PlacementService) -> None:
    await notify(postgres, "c1", host(MINE, 7, CHILD))
    await ask(postgres, "c1", claim(CHILD))
    move = partial(set_host_cell, host=CHILD, cell="c2")
    async with postgres.rows.database.raw() as connection:
        refused = await move(connection)
    assert (refused.outcome, refused.root, refused.consumers) == ("in_use", MINE, 1)
    await ask(postgres, "c1", Release(consumer=CONSUMER))
    async with postgres.rows.database.raw() as connection:
        moved, again = await move(connection), await move(connection)
        unknown = await set_host_cell(connection, CONSUMER, "c2")
    assert (moved.outcome, moved.before, again.outcome, unknown.outcome) == ("changed", "c1", "unchanged", "unknown")
    assert await notify(postgres, "c1", host(MINE, 8)) == ["inventory.foreign_cell"]
    (result,) = await postgres.apply_reports([host(MINE, 1, vcpus=5)], bus="c2")
    assert isinstance(result, InventoryResult)
    assert result.outcome == "applied"
