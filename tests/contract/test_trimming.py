"""Placement's purges, in both books: nothing that any client may still need, and never much at once."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import pytest

from bus.clock import SystemClock
from bus.contracts.feed import FeedChanges
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    ProviderReport,
    Release,
)
from placement_worker.book import ResourceBook
from tests.contract.books import KINDS, books

KEPT, GONE = (f"{n}0000000-0000-4000-8000-000000000000" for n in range(1, 3))
CHILD = "a0000000-0000-4000-8000-000000000000"
LONG_S = 3600.0


class Ticking(SystemClock):
    """No two looks at it show one time; nor does PostgreSQL to two transactions one after the other."""

    def __init__(self) -> None:
        self._seen = 0.0

    def time(self) -> float:
        self._seen = max(super().time(), math.nextafter(self._seen, math.inf))
        return self._seen


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[ResourceBook]:
    async with books(request, Ticking()) as make:
        made = make()
        await made.open()
        yield made


async def notify(store: ResourceBook, root: str, source: str, version: int, *children: str, gone: bool = False) -> str:
    inventory = {"VCPU": Inventory(total=4)}
    reports = [ProviderReport(uuid=root, name=root, inventories=inventory)]
    reports += [ProviderReport(uuid=child, name=child, parent_uuid=root, inventories=inventory) for child in children]
    update = InventoryUpdate(source=source, version=version, root_uuid=root, providers=() if gone else tuple(reports))
    (result,) = await store.report([update])
    assert isinstance(result, InventoryResult)
    return result.outcome


async def trim(store: ResourceBook, *, sources_s: float = 0.0, fences_s: float = LONG_S, limit: int = 100) -> bool:
    return await store.trim(keep_changes=0, keep_fences_s=fences_s, keep_sources_s=sources_s, limit=limit)


async def test_a_source_of_a_host_that_is_gone_is_forgotten_after_its_time(store: ResourceBook) -> None:
    await notify(store, GONE, "s", 5)
    await notify(store, GONE, "s", 6, gone=True)
    await trim(store, sources_s=LONG_S)
    assert await notify(store, GONE, "s", 4) == "stale"  # an old report brings no host back
    await trim(store)
    assert await notify(store, GONE, "s", 4) == "applied"


async def test_a_source_that_still_answers_for_something_is_kept(store: ResourceBook) -> None:
    await notify(store, KEPT, "rare", 5, CHILD)
    await notify(store, KEPT, "often", 1)
    await trim(store)
    assert await notify(store, KEPT, "rare", 4) == "stale"
    assert await notify(store, KEPT, "rare", 6) == "applied"  # and still takes its child back
    page = await store.snapshot(None, 10)
    assert [provider.uuid for provider in page.providers] == [KEPT]


async def test_a_dead_source_whose_host_another_took_over_is_forgotten(store: ResourceBook) -> None:
    await notify(store, KEPT, "dead", 5, CHILD)
    await notify(store, KEPT, "heir", 1, CHILD)
    await trim(store)
    assert await notify(store, KEPT, "heir", 1) == "stale"
    assert await notify(store, KEPT, "dead", 1, CHILD) == "unchanged"


async def test_little_is_dropped_at_once_and_the_rest_is_reported(store: ResourceBook) -> None:
    await notify(store, KEPT, "s", 1)
    consumers = [f"c000000{n}-0000-4000-8000-000000000000" for n in range(3)]
    option = ClaimOption(allocations={KEPT: {"VCPU": 1}})
    await store.apply([Claim(consumer=uuid, options=(option,), project_id="p") for uuid in consumers])
    await store.apply([Release(consumer=uuid, attempt=1) for uuid in consumers])

    async def claimed(*consumers: str) -> dict[str, str]:
        replies = await store.apply([Claim(consumer=uuid, options=(option,), project_id="p") for uuid in consumers])
        return {uuid: str(reply.outcome) for uuid, reply in zip(consumers, replies, strict=True)}

    assert await trim(store, fences_s=0.0, limit=2)
    found = await claimed(*consumers)
    assert sorted(found.values()) == ["claimed", "claimed", "consumer_changed"]
    assert not await trim(store, fences_s=0.0, limit=2)
    (last,) = (uuid for uuid, outcome in found.items() if outcome != "claimed")
    assert await claimed(last) == {last: "claimed"}


async def test_few_changes_are_forgotten_at_once(store: ResourceBook) -> None:
    await notify(store, KEPT, "s", 1)
    option = ClaimOption(allocations={KEPT: {"VCPU": 1}})
    for number in range(4):
        consumer = f"c000000{number}-0000-4000-8000-000000000000"
        await store.apply([Claim(consumer=consumer, options=(option,), project_id="p")])
    head = (await store.head()).sequence

    async def send(published: FeedChanges) -> None:
        del published

    assert not await trim(store, limit=2), "what was not published is kept"
    await store.publish(send, 100)
    assert await trim(store, limit=2)
    page = await store.changes(head - 3, 10)
    assert [change.sequence for change in page.changes] == [head - 2, head - 1, head] and not page.too_old
    assert (await store.changes(head - 4, 10)).too_old


async def hold(store: ResourceBook, consumer: str, provider: str) -> str:
    option = ClaimOption(allocations={provider: {"VCPU": 1}})
    (reply,) = await store.apply([Claim(consumer=consumer, options=(option,), project_id="p")])
    return str(reply.outcome)


async def providers(store: ResourceBook) -> list[str]:
    return [provider.uuid for provider in (await store.snapshot(None, 10)).providers]


async def test_the_shell_of_a_host_that_was_taken_out_goes_with_its_last_user(store: ResourceBook) -> None:
    """Its source has left for good and never reports it again."""
    user = "c0000000-0000-4000-8000-000000000000"
    await notify(store, KEPT, "s", 1)
    await notify(store, GONE, "s", 1, CHILD)
    await hold(store, user, CHILD)
    await notify(store, GONE, "s", 2, gone=True)
    assert await store.remove_retired_trees(100) == []
    assert await providers(store) == [KEPT, GONE, CHILD], "a consumer uses it"
    await store.apply([Release(consumer=user)])
    head = (await store.head()).sequence
    assert await store.remove_retired_trees(100) == [GONE]
    assert await providers(store) == [KEPT]
    changes = (await store.changes(head, 10)).changes
    assert sorted((change.provider, change.removed) for change in changes) == [(GONE, True), (CHILD, True)]
    assert await notify(store, GONE, "s", 1, CHILD) == "stale"
    assert await store.remove_retired_trees(100) == []
    assert await notify(store, GONE, "s", 3, CHILD) == "applied", "it may come back"


async def test_a_host_that_another_source_reports_by_then_is_not_retired(store: ResourceBook) -> None:
    user = "c0000000-0000-4000-8000-000000000000"
    await notify(store, GONE, "s", 1)
    await hold(store, user, GONE)
    await notify(store, GONE, "s", 2, gone=True)
    await notify(store, GONE, "heir", 1)
    await store.apply([Release(consumer=user)])
    assert await store.remove_retired_trees(100) == []
    assert await hold(store, user.replace("c", "d"), GONE) == "claimed"


async def test_few_retired_trees_go_at_once_and_one_in_use_holds_none_up(store: ResourceBook) -> None:
    in_use = KEPT.replace("1", "0")
    for root in (in_use, KEPT, GONE):
        await notify(store, root, "s", 1)
        await hold(store, root.replace("0", "c"), root)
        await notify(store, root, "s", 2, gone=True)
    await store.apply([Release(consumer=root.replace("0", "c")) for root in (KEPT, GONE)])
    assert [await store.remove_retired_trees(1) for _ in range(3)] == [[KEPT], [GONE], []]
