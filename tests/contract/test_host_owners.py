"""A host that the book has as one compute service's is not another one's, until that one takes it over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received
from bus.contracts.base import Message, Meta
from bus.contracts.book import ServiceHostsPage, ServiceHostsQuery
from bus.contracts.placement import (
    Inventory,
    InventoryReleased,
    InventoryResult,
    InventoryTaken,
    InventoryUpdate,
)
from placement_worker.book import ResourceBook
from placement_worker.domain.refusal import Why, WriteRefusal
from placement_worker.domain.reports import ReportRefusal
from placement_worker.domain.trees import CreateProvider, DeleteTree, SetInventories, UpdateProvider
from placement_worker.domain.values import ABOVE_CELLS, Provider, stored_inventory
from placement_worker.handlers import PlacementHandlers
from tests.contract.books import KINDS, books
from tests.contract.test_cells import CHILD, MINE, host

FIRST, SECOND, THIRD = "compute-s1", "compute-s2", "compute-s3"
TAKEN = "host.other_service"
NO_HOST = "b0000000-0000-4000-8000-000000000000"


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[ResourceBook]:
    async with books(request) as make:
        made = make()
        await made.open()
        yield made


def first(version: int, *children: str, vcpus: int = 4) -> InventoryUpdate:
    return host(MINE, version, *children, source=FIRST, vcpus=vcpus)


def second(version: int, *, vcpus: int = 9, takes_over: str | None = None, source: str = SECOND) -> InventoryUpdate:
    return replace(host(MINE, version, source=source, vcpus=vcpus), takes_over=takes_over)


async def outcomes(store: ResourceBook, *updates: InventoryUpdate) -> list[str]:
    results = await store.report(updates, bus="c1")
    return [result.code if isinstance(result, ReportRefusal) else result.outcome for result in results]


async def capacity(store: ResourceBook) -> float | None:
    (provider,) = [one for one in (await store.snapshot(None, 100)).providers if one.uuid == MINE] or [None]
    return None if provider is None else provider.inventories["VCPU"][0]


async def test_the_book_keeps_the_inventory_of_the_first(store: ResourceBook) -> None:
    """The inventory that was reported last counted."""
    assert await outcomes(store, first(1)) == ["applied"]
    assert await outcomes(store, second(1), replace(second(2), providers=())) == [TAKEN, TAKEN]
    assert await capacity(store) == 4
    assert await outcomes(store, first(2)) == ["unchanged"]
    assert await outcomes(store, first(3, vcpus=5), second(9)) == ["applied", TAKEN]
    (refused,) = await store.report([second(10)], bus="c1")
    assert isinstance(refused, InventoryResult) and refused.owner == FIRST


async def test_of_two_in_one_group_the_first_has_it(store: ResourceBook) -> None:
    assert await outcomes(store, second(1), first(1)) == ["applied", TAKEN]
    assert await capacity(store) == 9


async def test_other_sources_may_report_below_a_host_and_beside_it(store: ResourceBook) -> None:
    assert await outcomes(store, host(MINE, 1, source="agent"), first(1)) == ["applied", "unchanged"]
    assert await outcomes(store, host(MINE, 2, source="agent", vcpus=5)) == ["applied"]


async def test_the_next_one_takes_it_over_and_the_former_one_is_refused(store: ResourceBook) -> None:
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
    assert await outcomes(store, replace(first(3), takes_over=SECOND)) == ["applied"]
    assert await outcomes(store, second(3)) == [TAKEN]


async def test_what_the_conductor_has_not_released_is_taken_over_by_none(store: ResourceBook) -> None:
    """A worker with its cell's rights could name any owner, and have its hosts."""
    await outcomes(store, first(1))
    assert await outcomes(store, second(1, takes_over=FIRST)) == [TAKEN]
    for source, root, bus in ((THIRD, MINE, "c1"), (FIRST, CHILD, "c1"), (FIRST, MINE, "c2")):
        await store.release_roots(source, [root], bus=bus)
        assert await outcomes(store, second(2, takes_over=FIRST)) == [TAKEN], (source, root, bus)
    await store.release_roots(FIRST, [MINE], bus="c1")
    assert await outcomes(store, first(2)) == ["unchanged"], "it has come back"
    assert await outcomes(store, second(3, takes_over=FIRST)) == [TAKEN]
    await store.release_roots(FIRST, [MINE], bus="c1")
    assert await outcomes(store, second(4, takes_over=FIRST)) == ["applied"]
    assert await capacity(store) == 9


async def test_a_release_counts_for_the_reports_that_come_with_it(store: ResourceBook) -> None:
    handlers = PlacementHandlers(store, clock=SystemClock(), committed=lambda: None, claimed=lambda: None)
    await outcomes(store, first(1))
    released = InventoryReleased(source=FIRST, roots=(MINE,))
    batch = [
        Received(one, Meta(id=str(number)), "c1", "placement.inventory")
        for number, one in enumerate((second(1, takes_over=FIRST), released))
    ]
    assert [type(one) for one in await handlers.inventory(batch)] == [Done, Done]
    assert await capacity(store) == 9


async def test_it_is_not_taken_over_while_its_owner_reports_it(store: ResourceBook) -> None:
    await outcomes(store, first(1))
    await store.release_roots(FIRST, [MINE], bus="c1")
    assert await outcomes(store, second(1, takes_over=FIRST), first(2, vcpus=5)) == [TAKEN, "applied"]
    assert await capacity(store) == 5


async def test_a_takeover_that_is_refused_otherwise_leaves_the_owner(store: ResourceBook) -> None:
    other = host(CHILD, 1, source=FIRST)
    await outcomes(store, first(1), other)
    await store.release_roots(FIRST, [MINE], bus="c1")
    (report,) = second(1).providers
    named = replace(second(1, takes_over=FIRST), providers=(replace(report, name=other.providers[0].name),))
    assert await outcomes(store, named) == ["provider.name_taken"]
    assert await outcomes(store, second(2)) == [TAKEN]


async def test_the_refused_service_is_sent_whose_the_host_is(store: ResourceBook) -> None:
    published: list[tuple[str, Message]] = []

    async def publish(bus: str, messages: Sequence[Message]) -> None:
        published.extend((bus, message) for message in messages)

    handlers = PlacementHandlers(
        store, clock=SystemClock(), committed=lambda: None, claimed=lambda: None, publish=publish
    )
    batch = [Received(one, Meta(id=str(one.version)), "c1", "placement.inventory") for one in (first(1), second(2))]
    results = await handlers.inventory(batch)
    assert [type(one) for one in results] == [Done, Done], "it is no dead letter: it is repeated with every report"
    assert published == [("c1", InventoryTaken(source=SECOND, root_uuid=MINE, owner=FIRST))]


async def test_a_service_whose_host_has_anothers_name_is_sent_that(store: ResourceBook) -> None:
    """It was a dead letter, and the host stayed out of the book when the name was free."""
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
    assert isinstance(taken, InventoryTaken)
    assert (taken.root_uuid, taken.owner, taken.code) == (CHILD, None, "provider.name_taken")


async def test_two_hosts_that_have_swapped_their_names_are_put_right(store: ResourceBook) -> None:
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


async def test_what_rest_has_changed_of_a_host_is_put_right_by_the_same_report(store: ResourceBook) -> None:
    """A total of 1,000,000 stayed: a report of the content that its source had reported before was not looked at."""
    assert [*await outcomes(store, first(1)), *await outcomes(store, first(2))] == ["applied", "unchanged"]
    (changed,) = await store.write_trees([SetInventories(MINE, {"VCPU": stored_inventory(Inventory(total=1_000_000))})])
    assert isinstance(changed, Provider) and await capacity(store) == 1_000_000
    assert [*await outcomes(store, first(3)), *await outcomes(store, first(4))] == ["applied", "unchanged"]
    assert await capacity(store) == 4


async def test_rest_puts_no_host_that_a_source_reports_below_another(store: ResourceBook) -> None:
    """Builds went to it by the other's root, and 18 of 24 failed."""
    await outcomes(store, first(1))
    created = await store.write_trees([CreateProvider(CHILD, "above"), CreateProvider(NO_HOST, "no-host")])
    assert all(isinstance(one, Provider) for one in created)
    put, other = (UpdateProvider(uuid, uuid, parent=CHILD, may_move=True) for uuid in (MINE, NO_HOST))
    refused, moved = await store.write_trees([put, other])
    assert isinstance(refused, WriteRefusal) and refused.why is Why.BAD_PARENT
    assert isinstance(moved, Provider) and moved.parent == CHILD
    await outcomes(store, replace(first(2), providers=()))
    (gone,) = await store.write_trees([put])
    assert isinstance(gone, WriteRefusal) and gone.why is Why.NO_PROVIDER


async def test_the_hosts_of_a_service_are_those_that_it_owns(store: ResourceBook) -> None:
    handlers = PlacementHandlers(store, clock=SystemClock(), committed=lambda: None, claimed=lambda: None)

    async def has(service: str, cell: str = "c1") -> int:
        query = ServiceHostsQuery(service=service, cell=cell)
        (done,) = await handlers.reads([Received(query, Meta(id="q"), ABOVE_CELLS, "placement.reads")])
        assert isinstance(done, Done) and isinstance(done.reply, ServiceHostsPage)
        return len(done.reply.hosts)

    assert await has("s1") == 0
    await outcomes(store, first(1, CHILD), host(MINE, 1, source="agent"))
    await outcomes(store, second(1))
    assert (await has("s1"), await has("s2"), await has("s1", "c2")) == (1, 0, 0)
    assert await store.reads.hosts_of_service(ServiceHostsQuery(service="s1", cell="c1")) == ServiceHostsPage(
        hosts=(first(1).providers[0].name,)
    )
    await store.release_roots(FIRST, [MINE], bus="c1")
    assert await has("s1") == 1, "until another one takes it over"
    await outcomes(store, second(2, takes_over=FIRST))
    assert (await has("s1"), await has("s2")) == (0, 1)
    await store.write_trees([DeleteTree(MINE)])
    assert await has("s2") == 0
