"""Placement's purges, in both stores, and a snapshot that the feed no longer reaches."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from bus.clock import SystemClock
from bus.contracts.feed import ChangesPage, FeedChanges, FeedHead, SnapshotPage
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    ProviderReport,
    Release,
)
from placement_worker.domain.trees import ChangeMembership, SetTraits
from placement_worker.replica.catch_up import LocalReplica
from placement_worker.replica.replica import Replica
from placement_worker.service import PlacementService
from tests.contract.books import HOSTS, KINDS, books

# --- Placement's purges, in both stores: nothing that any client may still need, and never much at once.


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
async def ticking(request: pytest.FixtureRequest) -> AsyncIterator[PlacementService]:
    async with books(request, Ticking()) as make:
        made = make()
        await made.open()
        yield made


async def notify(
    ticking: PlacementService,
    root: str,
    reporter: str,
    version: int,
    *children: str,
    gone: bool = False,
    name: str = "",
) -> str:
    inventory = {"VCPU": Inventory(total=4)}
    reports = [ProviderReport(uuid=root, name=name or f"h-{root}", inventories=inventory)]
    reports += [ProviderReport(uuid=child, name=child, parent_uuid=root, inventories=inventory) for child in children]
    update = InventoryUpdate(
        reporter=reporter, version=version, root_uuid=root, providers=() if gone else tuple(reports)
    )
    (result,) = await ticking.apply_reports([update])
    assert isinstance(result, InventoryResult)
    return result.outcome


async def trim(
    ticking: PlacementService, *, reporters_s: float = 0.0, ended_attempts_s: float = LONG_S, limit: int = 100
) -> bool:
    return await ticking.trim(
        keep_changes=0, keep_ended_attempts_s=ended_attempts_s, keep_reporters_s=reporters_s, limit=limit
    )


async def test_a_reporter_of_a_host_that_is_gone_is_purged_after_its_time(ticking: PlacementService) -> None:
    await notify(ticking, GONE, "s", 5)
    await notify(ticking, GONE, "s", 6, gone=True)
    await trim(ticking, reporters_s=LONG_S)
    assert await notify(ticking, GONE, "s", 4) == "stale"  # an old report brings no host back
    await trim(ticking)
    assert await notify(ticking, GONE, "s", 4) == "applied"


async def test_a_source_that_still_answers_for_something_is_kept(ticking: PlacementService) -> None:
    await notify(ticking, KEPT, "rare", 5, CHILD)
    await notify(ticking, KEPT, "often", 1)
    await trim(ticking)
    assert await notify(ticking, KEPT, "rare", 4) == "stale"
    assert await notify(ticking, KEPT, "rare", 6) == "applied"  # and still takes its child back
    page = await ticking.snapshot(None, 10)
    assert [provider.uuid for provider in page.providers] == [KEPT]


async def test_a_dead_reporter_whose_host_another_took_over_is_purged(ticking: PlacementService) -> None:
    await notify(ticking, KEPT, "dead", 5, CHILD)
    await notify(ticking, KEPT, "heir", 1, CHILD)
    await trim(ticking)
    assert await notify(ticking, KEPT, "heir", 1) == "stale"
    assert await notify(ticking, KEPT, "dead", 1, CHILD) == "unchanged"


async def test_little_is_dropped_at_once_and_the_rest_is_reported(ticking: PlacementService) -> None:
    await notify(ticking, KEPT, "s", 1)
    consumers = [f"c000000{n}-0000-4000-8000-000000000000" for n in range(3)]
    option = ClaimOption(allocations={KEPT: {"VCPU": 1}})
    await ticking.apply([Claim(consumer=uuid, options=(option,), project_id="p") for uuid in consumers])
    await ticking.apply([Release(consumer=uuid, attempt=1) for uuid in consumers])

    async def claimed(*consumers: str) -> dict[str, str]:
        replies = await ticking.apply([Claim(consumer=uuid, options=(option,), project_id="p") for uuid in consumers])
        return {uuid: str(reply.outcome) for uuid, reply in zip(consumers, replies, strict=True)}

    assert await trim(ticking, ended_attempts_s=0.0, limit=2)
    found = await claimed(*consumers)
    assert sorted(found.values()) == ["claimed", "claimed", "consumer_conflict"]
    assert not await trim(ticking, ended_attempts_s=0.0, limit=2)
    (last,) = (uuid for uuid, outcome in found.items() if outcome != "claimed")
    assert await claimed(last) == {last: "claimed"}


async def test_few_changes_are_purged_at_once(ticking: PlacementService) -> None:
    await notify(ticking, KEPT, "s", 1)
    option = ClaimOption(allocations={KEPT: {"VCPU": 1}})
    for number in range(4):
        consumer = f"c000000{number}-0000-4000-8000-000000000000"
        await ticking.apply([Claim(consumer=consumer, options=(option,), project_id="p")])
    head = (await ticking.head()).sequence

    async def send(published: FeedChanges) -> None:
        del published

    assert not await trim(ticking, limit=2), "what was not published is kept"
    await ticking.publish(send, 100)
    assert await trim(ticking, limit=2)
    page = await ticking.changes(head - 3, 10)
    assert [change.sequence for change in page.changes] == [head - 2, head - 1, head] and not page.too_old
    assert (await ticking.changes(head - 4, 10)).too_old


async def hold(ticking: PlacementService, consumer: str, provider: str) -> str:
    option = ClaimOption(allocations={provider: {"VCPU": 1}})
    (reply,) = await ticking.apply([Claim(consumer=consumer, options=(option,), project_id="p")])
    return str(reply.outcome)


async def providers(ticking: PlacementService) -> list[str]:
    return [provider.uuid for provider in (await ticking.snapshot(None, 10)).providers]


async def test_the_shell_of_a_host_that_was_taken_out_goes_with_its_last_user(ticking: PlacementService) -> None:
    """Its source has left for good and never reports it again."""
    user = "c0000000-0000-4000-8000-000000000000"
    await notify(ticking, KEPT, "s", 1)
    await notify(ticking, GONE, "s", 1, CHILD)
    await hold(ticking, user, CHILD)
    await notify(ticking, GONE, "s", 2, gone=True)
    assert await ticking.remove_retired_trees(100, keep_given_s=LONG_S) == []
    assert await providers(ticking) == [KEPT, GONE, CHILD], "a consumer uses it"
    await ticking.apply([Release(consumer=user)])
    head = (await ticking.head()).sequence
    assert await ticking.remove_retired_trees(100, keep_given_s=LONG_S) == [GONE]
    assert await providers(ticking) == [KEPT]
    changes = (await ticking.changes(head, 10)).changes
    assert sorted((change.provider, change.removed) for change in changes) == [(GONE, True), (CHILD, True)]
    assert await notify(ticking, GONE, "s", 1, CHILD) == "stale"
    assert await ticking.remove_retired_trees(100, keep_given_s=LONG_S) == []
    assert await notify(ticking, GONE, "s", 3, CHILD) == "applied", "it may come back"


async def test_a_host_that_another_source_reports_by_then_is_not_retired(ticking: PlacementService) -> None:
    user = "c0000000-0000-4000-8000-000000000000"
    await notify(ticking, GONE, "s", 1)
    await hold(ticking, user, GONE)
    await notify(ticking, GONE, "s", 2, gone=True)
    await notify(ticking, GONE, "heir", 1)
    await ticking.apply([Release(consumer=user)])
    assert await ticking.remove_retired_trees(100, keep_given_s=LONG_S) == []
    assert await hold(ticking, user.replace("c", "d"), GONE) == "claimed"


TRAIT = "HW_CPU_X86_AVX2"
HOST, AGGREGATE = (f"{n}0000000-0000-4000-8000-000000000000" for n in "be")


async def given(ticking: PlacementService, root: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """What others gave to a provider: its aggregates and traits."""
    found = {one.uuid: one for one in (await ticking.snapshot(None, 10)).providers}
    return (found[root].aggregates, found[root].traits) if root in found else None


@pytest.mark.parametrize("held", [False, True])
async def test_what_others_gave_a_host_outlasts_a_reporter_that_hides_it(
    ticking: PlacementService, *, held: bool
) -> None:
    """Found A11: an Ironic, and a driver, that listed a part of their hosts for seconds took out the providers of the
    others, with the aggregates and traits that operators had given them.
    """
    user = "c0000000-0000-4000-8000-000000000000"
    await notify(ticking, GONE, "compute-s", 1)
    await ticking.write_trees([ChangeMembership(GONE, AGGREGATE, member=True)])
    await ticking.write_trees([SetTraits(GONE, traits=(TRAIT,))])
    if held:
        await hold(ticking, user, GONE)
    for version in (2, 3):
        await notify(ticking, GONE, "compute-s", version, gone=True)
        if held:
            await ticking.apply([Release(consumer=user)])
        assert await ticking.remove_retired_trees(100, keep_given_s=LONG_S) == []
        assert await given(ticking, GONE) == ((AGGREGATE,), (TRAIT,))
        assert await hold(ticking, user.replace("c", "d"), GONE) == "no_capacity"
    assert await notify(ticking, HOST, "compute-s", 1, name=f"h-{GONE}") == "applied", "made anew"
    await notify(ticking, HOST, "compute-s", 2, gone=True)
    assert await notify(ticking, GONE, "compute-other", 1) == "applied", "another service may have it"
    assert await given(ticking, GONE) == ((AGGREGATE,), (TRAIT,))
    await notify(ticking, GONE, "compute-other", 2, gone=True)
    assert await ticking.remove_retired_trees(100, keep_given_s=0.0) == [GONE], "gone for long"
    assert await given(ticking, GONE) is None


async def test_few_retired_trees_go_at_once_and_one_in_use_holds_none_up(ticking: PlacementService) -> None:
    in_use = KEPT.replace("1", "0")
    for root in (in_use, KEPT, GONE):
        await notify(ticking, root, "s", 1)
        await hold(ticking, root.replace("0", "c"), root)
        await notify(ticking, root, "s", 2, gone=True)
    await ticking.apply([Release(consumer=root.replace("0", "c")) for root in (KEPT, GONE)])
    assert [await ticking.remove_retired_trees(1, keep_given_s=LONG_S) for _ in range(3)] == [[KEPT], [GONE], []]


# --- A snapshot that took longer than the feed reaches back is read again, and not answered from.


FIRST, BUSY, LAST = HOSTS[0], HOSTS[2], HOSTS[4]
KEPT_CHANGES = 20  # changes; 1,000, the least of the setting `feed_retention`, take the processor four seconds to write


class Slow:
    """A store whose snapshot has one provider a page, and where something happens after the first page."""

    def __init__(self, store: PlacementService, meanwhile: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._meanwhile = meanwhile
        self._done = False

    async def head(self) -> FeedHead:
        return await self._store.head()

    async def changes(self, after: int, limit: int, incarnation: str = "") -> ChangesPage:
        return await self._store.changes(after, limit, incarnation)

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        page = await self._store.snapshot(after, 1)
        if not self._done:
            self._done = True
            await self._meanwhile()
        return page


async def report_total(store: PlacementService, uuid: str, version: int, total: int) -> None:
    inventory = {"VCPU": Inventory(total=total), "DISK_GB": Inventory(total=100)}
    root = ProviderReport(uuid=uuid, name=f"host-{uuid[0]}", inventories=inventory)
    await store.apply_reports([InventoryUpdate(reporter="s", version=version, root_uuid=uuid, providers=(root,))])


async def trimmed(store: PlacementService) -> None:
    async def send(changes: FeedChanges) -> None:
        del changes

    while (await store.publish(send, 1000)).more:
        pass
    while await store.trim(
        keep_changes=KEPT_CHANGES, keep_ended_attempts_s=3600.0, keep_reporters_s=3600.0, limit=1000
    ):
        pass


def capacity(current: Replica, uuid: str) -> int:
    row = current.row_of(uuid)
    assert row is not None
    return current.inventory_of(row)["VCPU"][0].capacity


@pytest.mark.parametrize("is_trimmed", [False, True], ids=["feed reaches back", "feed does not"])
async def test_a_placement_is_of_one_number_however_long_its_snapshot_took(
    store: PlacementService, is_trimmed: bool
) -> None:
    """At each moment the first host or the last one has 100 VCPUs, and the other one has 1; never both have 100."""
    await report_total(store, LAST, 2, 1)

    async def meanwhile() -> None:
        await report_total(store, FIRST, 2, 1)
        if is_trimmed:
            for version in range(2, KEPT_CHANGES + 3):
                await report_total(store, BUSY, version, 50 + version % 2)
        await report_total(store, LAST, 3, 100)
        if is_trimmed:
            await trimmed(store)

    replica = LocalReplica(Slow(store, meanwhile))
    current = await replica.fresh()
    assert (capacity(current, FIRST), capacity(current, LAST)) in {(100, 1), (1, 1), (1, 100)}, "a state that never was"


async def test_a_writer_reads_its_own_write(store: PlacementService) -> None:
    """The other half of the claim: it wrote while another's read loaded placement, and its own read comes then."""
    own = asyncio.Event()

    async def meanwhile() -> None:
        await report_total(store, FIRST, 2, 7)
        for version in range(2, KEPT_CHANGES + 3):
            await report_total(store, BUSY, version, 50 + version % 2)
        await trimmed(store)
        own.set()

    replica = LocalReplica(Slow(store, meanwhile))
    other = asyncio.create_task(replica.fresh())
    await own.wait()
    current = await replica.fresh()
    await other
    assert capacity(current, FIRST) == 7
