"""One suite for both stores: writes, an operator's reads, purges, and replicas of a placement in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial

import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts import placement_queries as queries
from bus.contracts.feed import Change, FeedChanges
from bus.contracts.placement import (
    INSTANCES,
    Claim,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    GroupPolicy,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    LocateRequest,
    ProviderReport,
    Release,
    ServerGroup,
)
from bus.contracts.placement_queries import GroupMembersQuery, HostTreeQuery, ProjectUsageQuery
from bus.faults import DatabaseUnavailable
from bus.persistence.database import Database
from placement_worker import service as placement_service
from placement_worker.domain.claims import ClaimItem
from placement_worker.domain.reports import ReportRefusal
from placement_worker.service import PlacementService, Published
from placement_worker.store.postgres_rows import PostgresPlacementRows
from tests.contract.books import APART, HOSTS, MOVE, VMS, Placements, roomy_host
from tests.contract.random_client import MOVES, ROOTS, RandomClient

# --- One suite for both stores; and whatever one answers to a random history, the other answers too.


PATIENCE_S = 60.0
CHILD = "a0000000-0000-4000-8000-000000000000"
FOUR = HOSTS[:4]
CONSUMERS = [f"c000000{n}-0000-4000-8000-000000000000" for n in range(6)]
STEPS = 300
OUTCOMES = {
    *(f"ClaimResult {one}" for one in ClaimOutcome),
    *(f"ReleaseResult {one}" for one in ("released", "absent", "consumer_conflict")),
    *(f"RevertResult {one}" for one in ("reverted", "consumer_conflict")),
    *(f"RestateResult {one}" for one in ("restated", "consumer_conflict")),
    *(f"SwapResult {one}" for one in ("claimed", "no_capacity", "consumer_conflict")),
    "InventoryResult applied",
}


@pytest.fixture
async def store(make: Placements) -> PlacementService:
    made = make()
    await made.open()
    return made


def report(host: str, version: int, *, child: bool = False, reporter: str = "s", **amounts: int) -> InventoryUpdate:
    root = ProviderReport(uuid=host, name=f"host-{host[0]}", inventories=_inventories(amounts), traits=("CUSTOM_X",))
    children = [ProviderReport(uuid=CHILD, name="child", parent_uuid=host, inventories=_inventories({"VGPU": 2}))]
    return InventoryUpdate(
        reporter=reporter, version=version, root_uuid=host, providers=(root, *(children if child else ()))
    )


def _inventories(amounts: dict[str, int]) -> dict[str, Inventory]:
    return {name: Inventory(total=amount) for name, amount in amounts.items()}


def claim(consumer: str, *hosts: str, attempt: int = 1, vcpus: int = 1, **fields: object) -> Claim:
    options = tuple(ClaimOption(allocations={host: {"VCPU": vcpus}}) for host in hosts)
    return Claim(consumer=consumer, attempt=attempt, options=options, project_id="p", **fields)  # type: ignore[arg-type]


async def outcomes(store: PlacementService, *items: ClaimItem) -> list[str]:
    return [str(reply.outcome) for reply in await store.apply(items)]


async def feed(store: PlacementService) -> list[Change]:
    return list((await store.changes(0, 1000)).changes)


async def test_a_release_by_a_run_fences_no_run_after_it(store: PlacementService) -> None:
    """The Release of a run whose record was lost was on its way; the build of the record after it failed."""
    await store.apply_reports([report(FOUR[0], 1, VCPU=2)])
    lost, later = (partial(claim, CONSUMERS[0], FOUR[0], owner=claim_owner) for claim_owner in ("lost", "later"))
    release = Release(consumer=CONSUMERS[0], attempt=1, project_id="p", owner="lost")
    assert await outcomes(store, lost(), release, lost(), later()) == [
        "claimed",
        "released",
        "consumer_conflict",
        "claimed",
    ]
    assert await outcomes(store, release, lost()) == ["consumer_conflict"] * 2, "by now it is the later one's"
    other = Release(consumer=CONSUMERS[0], attempt=1, project_id="p", owner="later")
    assert await outcomes(store, other, release, later(), lost(), claim(CONSUMERS[0], FOUR[0])) == [
        "released",
        "absent",
        *["consumer_conflict"] * 3,
    ]
    unclaimed = replace(release, consumer=CONSUMERS[1])
    of_unclaimed = [claim(CONSUMERS[1], FOUR[0], owner=claim_owner) for claim_owner in ("lost", "later")]
    assert await outcomes(store, unclaimed, *of_unclaimed) == ["absent", "consumer_conflict", "claimed"]


async def test_an_older_report_loses_whichever_source_sends_it(make: Placements, store: PlacementService) -> None:
    other = make()
    await other.open()
    await store.apply_reports([report(FOUR[0], 5, VCPU=2)])
    (stale,) = await other.apply_reports([report(FOUR[0], 4, VCPU=9)])
    (repeat,) = await other.apply_reports([report(FOUR[0], 5, VCPU=2)])
    (same,) = await other.apply_reports([report(FOUR[0], 6, VCPU=2)])
    assert [getattr(one, "outcome", one) for one in (stale, repeat, same)] == ["stale", "unchanged", "unchanged"]


async def test_a_flawed_report_is_refused_and_its_neighbours_are_not(store: PlacementService) -> None:
    flawed = replace(report(FOUR[0], 1, VCPU=1), root_uuid=FOUR[1])
    refused, applied = await store.apply_reports([flawed, report(FOUR[2], 1, VCPU=1)])
    assert isinstance(refused, ReportRefusal)
    assert isinstance(applied, InventoryResult)


async def test_the_feed_replays_to_the_snapshot(store: PlacementService) -> None:
    await store.apply_reports([report(FOUR[0], 1, child=True, VCPU=4), report(FOUR[1], 1, VCPU=4)])
    await store.apply([claim(CONSUMERS[0], FOUR[0]), claim(CONSUMERS[1], FOUR[1])])
    await store.apply_reports([report(FOUR[0], 2, VCPU=3)])
    changes = await feed(store)
    assert [change.sequence for change in changes] == list(range(1, (await store.head()).sequence + 1))
    assert changes[-1].removed
    page = await store.snapshot(None, 1)
    assert (page.more, page.sequence) == (True, (await store.head()).sequence)
    rest = await store.snapshot(page.providers[-1].uuid, 10)
    used = {state.uuid: state.used for state in (*page.providers, *rest.providers)}
    assert used == {FOUR[0]: {"VCPU": 1}, FOUR[1]: {"VCPU": 1}}


async def test_publishing_repeats_what_failed_and_skips_nothing(store: PlacementService) -> None:
    await store.apply_reports([report(host, 1, VCPU=1) for host in FOUR])
    sent: list[int] = []

    async def send(published: FeedChanges) -> None:
        changes = published.changes
        sent.extend(change.sequence for change in changes)
        if len(sent) == 2:
            raise DatabaseUnavailable("unavailable")

    with pytest.raises(DatabaseUnavailable):
        await store.publish(send, 2)
    while (await store.publish(send, 2)).more:
        pass
    assert sent == [1, 2, 1, 2, 3, 4]


class Sends:
    """Sends of a publisher that take until they are let go."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.sending = asyncio.Event()
        self.confirmed = asyncio.Event()

    async def __call__(self, published: FeedChanges) -> None:
        changes = published.changes
        self.sent.extend(change.sequence for change in changes)
        self.sending.set()
        await self.confirmed.wait()


async def publish_when_free(store: PlacementService, limit: int) -> list[int]:
    """A store's messages once no other worker publishes."""
    sends = Sends()
    sends.confirmed.set()
    async with asyncio.timeout(PATIENCE_S):
        while (await store.publish(sends, limit)).taken:  # each look is a turn of the loop, or a round trip
            pass
    return sends.sent


async def test_while_one_publishes_the_others_find_it_taken(
    make: Placements, store: PlacementService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_service, "LEASE_S", 10 * PATIENCE_S)
    other, sends = make(), Sends()
    await other.open()
    await store.apply_reports([report(host, 1, VCPU=1) for host in FOUR])
    first = asyncio.create_task(store.publish(sends, 2))
    await sends.sending.wait()
    assert (await other.publish(sends, 2)) == Published(0, True, taken=True)
    sends.confirmed.set()
    assert (await first).more
    assert (await other.publish(sends, 2)).count == 2
    assert sends.sent == [1, 2, 3, 4]
    assert (await store.publish(sends, 2)) == (await other.publish(sends, 2)) == Published(0, False)


async def test_a_turn_that_is_cut_short_is_begun_anew_at_once_by_its_own_process(
    store: PlacementService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_service, "LEASE_S", 10 * PATIENCE_S)
    sends = Sends()
    await store.apply_reports([report(host, 1, VCPU=1) for host in FOUR])
    cut = asyncio.create_task(store.publish(sends, 10))
    await sends.sending.wait()
    cut.cancel()
    await asyncio.wait([cut])
    assert await publish_when_free(store, 10) == [1, 2, 3, 4]
    assert (await store.publish(sends, 10)) == Published(0, False)


async def test_one_that_hangs_is_not_waited_for_and_moves_nothing_back_when_it_comes_to(
    make: Placements, store: PlacementService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_service, "LEASE_S", 0.001)
    other, sends = make(), Sends()
    await other.open()
    await store.apply_reports([report(host, 1, VCPU=1) for host in FOUR])
    hung = asyncio.create_task(store.publish(sends, 2))
    await sends.sending.wait()
    assert await publish_when_free(other, 10) == [1, 2, 3, 4]
    sends.confirmed.set()
    await hung
    await store.apply_reports([report(FOUR[0], 2, VCPU=2)])
    assert await publish_when_free(other, 10) == [5]


async def test_one_that_comes_to_does_not_end_the_turn_of_who_took_over(
    make: Placements, store: PlacementService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_service, "LEASE_S", 0.001)
    other, third, late, now = make(), make(), Sends(), Sends()
    await other.open()
    await third.open()
    await store.apply_reports([report(host, 1, VCPU=1) for host in FOUR])
    hung = asyncio.create_task(store.publish(late, 2))
    await late.sending.wait()
    monkeypatch.setattr(placement_service, "LEASE_S", 10 * PATIENCE_S)

    async def take_over() -> None:
        while (await other.publish(now, 3)).taken:
            pass

    over = asyncio.create_task(take_over())
    async with asyncio.timeout(PATIENCE_S):
        await now.sending.wait()
    late.confirmed.set()
    await hung
    assert (await third.publish(late, 10)).taken
    now.confirmed.set()
    await over
    assert (late.sent, now.sent) == ([1, 2], [1, 2, 3])
    assert await publish_when_free(third, 10) == [4]


async def test_trimming_leaves_what_was_not_published(store: PlacementService) -> None:
    async def send(published: FeedChanges) -> None:
        del published

    for host in FOUR:
        await store.apply_reports([report(host, 1, VCPU=1)])
    await store.publish(send, 2)
    await store.trim(keep_changes=0, keep_ended_attempts_s=3600.0, keep_reporters_s=3600.0, limit=1000)
    assert (await store.changes(0, 10)).too_old
    left = (await store.changes(2, 10)).changes
    assert left[-1].sequence == 4


async def test_many_writers_meet_no_deadlock_and_no_overcommitment(make: Placements, store: PlacementService) -> None:
    await store.apply_reports([report(host, 1, VCPU=5) for host in FOUR])
    stores = [store, make(), make()]
    for one in stores[1:]:
        await one.open()
    rng = random.Random(3)
    wanted = [claim(new_uuid(rng), *rng.sample(FOUR, 2)) for _ in range(60)]

    async def work(mine: PlacementService, items: Sequence[Claim]) -> list[str]:
        published: list[str] = []
        for at in range(0, len(items), 5):
            published += await outcomes(mine, *items[at : at + 5])
        return published

    parts = await asyncio.gather(*(work(one, wanted[n::3]) for n, one in enumerate(stores)))
    page = await store.snapshot(None, 10)
    assert sum(part.count("claimed") for part in parts) == sum(state.used["VCPU"] for state in page.providers)
    assert all(state.used["VCPU"] <= 5 for state in page.providers)


@pytest.mark.postgres
@pytest.mark.parametrize("seed", range(4))
async def test_both_stores_answer_alike(postgres_url: str, seed: int) -> None:
    """To claims, gangs, moves, groups and limits of every kind, each with each outcome."""
    client = RandomClient(seed)
    stores = [PlacementService(PostgresPlacementRows(Database(postgres_url, "placement"))), client.store]
    first = [client.report(uuid) for uuid in ROOTS]
    for store in stores:
        await store.open()
        await store.apply_reports(first)
    met: set[str] = set()
    for _ in range(STEPS):
        group = client.group()
        answers = [
            await store.apply_reports(group) if isinstance(group[0], InventoryUpdate) else await store.apply(group)  # type: ignore[arg-type]
            for store in stores
        ]
        assert answers[0] == answers[1], group
        replies = [one for reply in answers[0] for one in getattr(reply, "results", (reply,))]
        met.update(f"{type(one).__name__} {one.outcome}" for one in replies if not isinstance(one, ReportRefusal))
    assert met >= OUTCOMES
    feeds = [[replace(change, sequence=0) for change in await feed(store)] for store in stores]
    of_postgres, of_memory = (sorted(one, key=lambda change: change.provider) for one in feeds)
    assert of_postgres == of_memory
    pages = [await store.snapshot(None, 100) for store in stores]
    assert replace(pages[0], incarnation=pages[1].incarnation) == pages[1], "each has a history of its own"
    asked = [LocateRequest(project_id="p", server_group=one, consumers=tuple(VMS[:6])) for one in (APART.uuid, MOVE)]
    for read in (
        lambda store: store.reads.locate(asked),
        lambda store: store.reads.usage(ProjectUsageQuery()),
        lambda store: store.reads.allocations([*VMS[:6], *MOVES]),
    ):
        answers = [await read(store) for store in stores]
        assert answers[0] == answers[1]
    await stores[0].close()


# --- An operator's reads of placement, on both stores: a host's tree with its holders, and what projects hold.


@pytest.fixture
async def nested(store: PlacementService) -> PlacementService:
    root = ProviderReport(uuid=HOSTS[0], name="nested", inventories={"VCPU": Inventory(total=10, reserved=2)})
    child = ProviderReport(
        uuid=CHILD, name="nested-numa", parent_uuid=HOSTS[0], inventories={"MEMORY_MB": Inventory(total=100)}
    )
    tree = InventoryUpdate(reporter="s", version=1, root_uuid=HOSTS[0], providers=(root, child))
    await store.apply_reports([tree, roomy_host(HOSTS[1])])
    return store


async def hold(nested: PlacementService, vm: int, project: str, allocations: dict[str, dict[str, int]]) -> None:
    claim = Claim(consumer=VMS[vm], options=(ClaimOption(allocations=allocations),), project_id=project)
    (reply,) = await nested.apply([claim])
    assert isinstance(reply, ClaimResult) and reply.outcome == "claimed"


async def test_a_tree_has_its_providers_and_who_holds_what_of_it(nested: PlacementService) -> None:
    await hold(nested, 1, "p", {HOSTS[0]: {"VCPU": 2}, CHILD: {"MEMORY_MB": 30}})
    await hold(nested, 0, "q", {HOSTS[0]: {"VCPU": 1}})
    await hold(nested, 2, "q", {HOSTS[1]: {"VCPU": 5}})
    for looked_up in (HOSTS[0], CHILD):
        tree = await nested.reads.tree(HostTreeQuery(provider=looked_up))
        assert [(one.uuid, one.parent_uuid) for one in tree.providers] == [(HOSTS[0], None), (CHILD, HOSTS[0])]
        assert tree.providers[0].inventories["VCPU"][0] == 8 and tree.providers[0].used == {"VCPU": 3}
        assert [(one.consumer, one.project_id, one.allocations) for one in tree.consumers] == [
            (VMS[0], "q", {HOSTS[0]: {"VCPU": 1}}),
            (VMS[1], "p", {HOSTS[0]: {"VCPU": 2}, CHILD: {"MEMORY_MB": 30}}),
        ]
        assert tree.consumers[0].consumer_type == "INSTANCE" and not tree.more
    cut = await nested.reads.tree(HostTreeQuery(provider=HOSTS[0], limit=1))
    assert [one.consumer for one in cut.consumers] == [VMS[0]] and cut.more
    rest = await nested.reads.tree(HostTreeQuery(provider=HOSTS[0], limit=1, after=VMS[0]))
    assert [one.consumer for one in rest.consumers] == [VMS[1]] and not rest.more
    assert (await nested.reads.tree(HostTreeQuery(provider=HOSTS[0], after=VMS[1]))).consumers == ()
    unknown = await nested.reads.tree(HostTreeQuery(provider=VMS[0]))
    assert unknown.providers == unknown.consumers == () and not unknown.more


async def test_who_holds_something_of_a_large_tree_is_listed_with_all_of_it(
    nested: PlacementService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_TREE", 1)
    await hold(nested, 1, "p", {CHILD: {"MEMORY_MB": 30}})
    tree = await nested.reads.tree(HostTreeQuery(provider=HOSTS[0]))
    assert [one.uuid for one in tree.providers] == [HOSTS[0]] and tree.more
    assert [(one.consumer, one.allocations) for one in tree.consumers] == [(VMS[1], {CHILD: {"MEMORY_MB": 30}})]


async def test_who_has_released_holds_nothing_of_a_tree(nested: PlacementService) -> None:
    await hold(nested, 0, "p", {HOSTS[0]: {"VCPU": 2}})
    await nested.apply([Release(consumer=VMS[0])])
    assert (await nested.reads.tree(HostTreeQuery(provider=HOSTS[0]))).consumers == ()


async def test_what_projects_hold_is_returned_in_order_and_in_pages(nested: PlacementService) -> None:
    for vm, project in enumerate(("q", "B", "a", "q")):
        await hold(nested, vm, project, {HOSTS[1]: {"VCPU": vm + 1, "DISK_GB": 1}})
    page = await nested.reads.usage(ProjectUsageQuery())
    assert list(page.usage) == ["B", "a", "q"] and not page.more
    assert page.usage["q"] == {"DISK_GB": 2, INSTANCES: 2, "VCPU": 5}
    assert list((await nested.reads.usage(ProjectUsageQuery(projects=("q", "none", "a")))).usage) == ["a", "q"]
    first = await nested.reads.usage(ProjectUsageQuery(limit=2))
    assert list(first.usage) == ["B", "a"] and first.more
    rest = await nested.reads.usage(ProjectUsageQuery(after="a", limit=2))
    assert list(rest.usage) == ["q"] and not rest.more
    await nested.apply([Release(consumer=VMS[2])])
    assert list((await nested.reads.usage(ProjectUsageQuery(projects=("a",)))).usage) == []


async def test_members_of_a_group_are_those_that_hold_something_with_their_hosts(nested: PlacementService) -> None:
    group = ServerGroup(uuid=CHILD, policy=GroupPolicy.SOFT_AFFINITY)
    for vm, host in ((0, HOSTS[1]), (1, HOSTS[0]), (2, HOSTS[1])):
        option = ClaimOption(allocations={host: {"VCPU": 1}}, host=host)
        await nested.apply([Claim(consumer=VMS[vm], options=(option,), project_id="p", server_group=group)])
    await nested.apply([Release(consumer=VMS[2])])
    page = await nested.reads.members(GroupMembersQuery(project_id="p", server_group=CHILD))
    names = {state.uuid: state.name for state in (await nested.snapshot(None, 10)).providers}
    assert page.members == {VMS[0]: (names[HOSTS[1]],), VMS[1]: ("nested",)} and not page.more
    first = await nested.reads.members(GroupMembersQuery(project_id="p", server_group=CHILD, limit=1))
    assert list(first.members) == [VMS[0]] and first.more
    rest = await nested.reads.members(GroupMembersQuery(project_id="p", server_group=CHILD, after=VMS[0]))
    assert list(rest.members) == [VMS[1]] and not rest.more
    assert (await nested.reads.members(GroupMembersQuery(project_id="q", server_group=CHILD))).members == {}
