"""Hosts whose provider trees change: flat to nested, deleted, made anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimResult,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    ProviderReport,
    Release,
)
from bus.persistence.database import Database
from placement_worker.domain.refusal import RefusalCode, WriteRefusal
from placement_worker.domain.report_group import split_by_root
from placement_worker.domain.reports import ReportRefusal
from placement_worker.domain.trees import CreateProvider, DeleteTree, SetTraits
from placement_worker.domain.values import Provider
from placement_worker.replica.replica import Replica
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.memory_table import MemoryPlacementTable
from placement_worker.store.port import Leaving, PlacementTransaction
from placement_worker.store.postgres_rows import PostgresPlacementRows
from tests.contract.books import HOSTS, VMS, Placements
from tests.kit.waiting import PATIENCE_S
from tests.unit.replica.worlds import dump

# --- A flat host turns nested while it is in use: both stores move inventory and allocations in one transaction.


ROOT, LEFT, RIGHT, POOL = (f"{letter * 8}-0000-4000-8000-000000000000" for letter in "abcd")
CONSUMERS = [f"c000000{n}-0000-4000-8000-000000000000" for n in range(8)]


@pytest.fixture
async def store(make: Placements) -> PlacementService:
    made = make()
    await made.open()
    return made


def node(uuid: str, parent: str | None = None, *, receives_from: str | None = None, **amounts: int) -> ProviderReport:
    inventories = {name: Inventory(total=amount) for name, amount in amounts.items()}
    return ProviderReport(
        uuid=uuid, name=uuid, parent_uuid=parent, inventories=inventories, receives_from=receives_from
    )


def report(*nodes: ProviderReport, version: int) -> InventoryUpdate:
    return InventoryUpdate(reporter="s", version=version, root_uuid=nodes[0].uuid, providers=nodes)


FLAT = report(node(ROOT, VCPU=8, VGPU=4), version=1)
NESTED = report(
    node(ROOT, VCPU=8),
    node(LEFT, ROOT, receives_from=ROOT, VGPU=2),
    node(RIGHT, ROOT, receives_from=ROOT, VGPU=2),
    version=2,
)


def claim(consumer: str, spec_generation: int | None = None, attempt: int = 1, **amounts: int) -> Claim:
    option = ClaimOption(
        allocations={ROOT: amounts}, spec_generations={} if spec_generation is None else {ROOT: spec_generation}
    )
    return Claim(consumer=consumer, attempt=attempt, options=(option,), project_id="p")


async def used(store: PlacementService) -> dict[str, dict[str, int]]:
    page = await store.snapshot(None, 100)
    return {state.uuid: dict(state.used) for state in page.providers}


async def reported(store: PlacementService, update: InventoryUpdate) -> InventoryResult:
    (result,) = await store.apply_reports([update])
    assert isinstance(result, InventoryResult), result
    return result


async def test_inventory_and_allocations_move_together(store: PlacementService) -> None:
    await reported(store, FLAT)
    await reported(store, report(node(POOL, DISK_GB=10), version=1))
    three = Claim(
        consumer=CONSUMERS[2],
        options=(ClaimOption(allocations={ROOT: {"VCPU": 1, "VGPU": 2}, POOL: {"DISK_GB": 5}}),),
        project_id="p",
    )
    await store.apply([claim(CONSUMERS[0], VCPU=1, VGPU=1), claim(CONSUMERS[1], VCPU=3), three])
    head = (await store.head()).sequence
    result = await reported(store, NESTED)
    assert (result.outcome, result.orphaned) == ("applied", ())
    assert await used(store) == {ROOT: {"VCPU": 5}, LEFT: {"VGPU": 2}, RIGHT: {"VGPU": 1}, POOL: {"DISK_GB": 5}}
    changes = (await store.changes(head, 100)).changes
    assert [(change.provider, change.state is not None) for change in changes] == [
        (ROOT, True), (LEFT, True), (RIGHT, True)
    ]  # fmt: skip
    # Each consumer that holds something has its attempt and generation; giving back reaches the children and the pool.
    (again,) = await store.apply([claim(CONSUMERS[0], VCPU=1, VGPU=1)])
    assert isinstance(again, ClaimResult)
    assert (again.outcome, again.consumer_generation, again.option) == ("claimed", 1, None)
    assert again.allocations == {ROOT: {"VCPU": 1}, RIGHT: {"VGPU": 1}}
    await store.apply([Release(consumer=consumer) for consumer in CONSUMERS[:3]])
    assert await used(store) == {ROOT: {}, LEFT: {}, RIGHT: {}, POOL: {}}
    assert (await reported(store, report(*NESTED.providers, version=3))).outcome == "unchanged"


async def test_a_conductors_next_claim_goes_on_as_if_nothing_had_moved(store: PlacementService) -> None:
    await reported(store, FLAT)
    await reported(store, report(node(POOL, VCPU=1), version=1))
    await store.apply([claim(CONSUMERS[0], VCPU=1, VGPU=1)])
    await reported(store, NESTED)
    elsewhere = ClaimOption(allocations={POOL: {"VCPU": 1}})
    again = Claim(
        consumer=CONSUMERS[0],
        attempt=2,
        consumer_generation=1,
        release_first=True,
        options=(elsewhere,),
        project_id="p",
    )
    (result,) = await store.apply([again])
    assert result.outcome == "claimed"
    assert await used(store) == {ROOT: {}, LEFT: {}, RIGHT: {}, POOL: {"VCPU": 1}}


async def test_a_claim_chosen_for_the_flat_host_conflicts_and_is_not_over_capacity(store: PlacementService) -> None:
    await reported(store, FLAT)
    spec_generation = (await store.snapshot(None, 1)).providers[0].spec_generation
    await reported(store, NESTED)
    (late,) = await store.apply([claim(CONSUMERS[0], spec_generation, VCPU=1, VGPU=1)])
    assert late.outcome == "conflict"
    (never,) = await store.apply([claim(CONSUMERS[0], VCPU=1, VGPU=1)])
    assert never.outcome == "no_capacity"


async def test_what_finds_no_room_goes_later(store: PlacementService) -> None:
    await reported(store, FLAT)
    await store.apply([claim(CONSUMERS[0], VGPU=3), claim(CONSUMERS[1], VGPU=1)])
    half = report(node(ROOT, VCPU=8), node(LEFT, ROOT, receives_from=ROOT, VGPU=3), version=2)
    assert (await reported(store, half)).orphaned == (f"{ROOT}/VGPU",)
    assert await used(store) == {ROOT: {"VGPU": 1}, LEFT: {"VGPU": 3}}
    await store.apply([Release(consumer=CONSUMERS[0])])
    again = await reported(store, report(*half.providers, version=3))
    assert (again.outcome, again.orphaned) == ("applied", ())
    assert await used(store) == {ROOT: {}, LEFT: {"VGPU": 1}}


async def test_boots_and_deletes_go_on_beside_it(make: Placements, store: PlacementService) -> None:
    others = [make() for _ in range(3)]
    for other in others:
        await other.open()
    flat = report(node(ROOT, VCPU=80, VGPU=40), version=1)
    nested = report(
        node(ROOT, VCPU=80),
        node(LEFT, ROOT, receives_from=ROOT, VGPU=20),
        node(RIGHT, ROOT, receives_from=ROOT, VGPU=20),
        version=2,
    )  # fmt: skip
    await reported(store, flat)
    held = asyncio.Event()
    done = asyncio.Event()

    async def live(other: PlacementService, number: int) -> None:
        """Claims and releases the same two consumers over and over, wherever there is something."""
        attempt = 0
        while not done.is_set():
            attempt += 1
            mine = CONSUMERS[2 * number : 2 * number + 2]
            await other.apply([claim(consumer, attempt=attempt, VCPU=1, VGPU=1) for consumer in mine])
            held.set()
            if attempt % 2 or not done.is_set():
                await other.apply([Release(consumer=mine[0])])

    async def upgrade() -> None:
        await held.wait()
        for _ in range(200):  # busy holders: the consumer of the queue would call again, too
            (result,) = await store.apply_reports([nested])
            if isinstance(result, InventoryResult):
                break
            assert result.code == "inventory.consumers_busy"
        done.set()

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(upgrade(), *(live(other, number) for number, other in enumerate(others)))
    assert done.is_set()
    now = await used(store)
    assert "VGPU" not in now[ROOT]
    await store.apply([Release(consumer=consumer) for consumer in CONSUMERS])
    assert await used(store) == {ROOT: {}, LEFT: {}, RIGHT: {}}


async def test_a_report_whose_holders_change_beside_it_holds_up_no_other_of_its_batch(
    store: PlacementService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them were repeated for as long as claims came to that host."""
    await reported(store, FLAT)
    await store.apply([claim(CONSUMERS[0], VCPU=1, VGPU=1)])
    other = InventoryUpdate(reporter="t", version=1, root_uuid=POOL, providers=(node(POOL, VCPU=8),))
    transaction, calls = store.rows.transaction, count()

    @asynccontextmanager
    async def beside() -> AsyncIterator[PlacementTransaction]:
        async with transaction() as made:
            holders = made.consumers_of

            async def late(leaving: Sequence[Leaving]) -> list[str]:
                return [] if next(calls) == 0 else await holders(leaving)

            monkeypatch.setattr(made, "consumers_of", late)
            yield made

    monkeypatch.setattr(store.rows, "transaction", beside)
    busy, done = await store.apply_reports([NESTED, other])
    assert isinstance(busy, ReportRefusal) and busy.code == "inventory.consumers_busy"
    assert isinstance(done, InventoryResult) and done.outcome == "applied"
    assert (await reported(store, NESTED)).outcome == "applied"
    assert await used(store) == {ROOT: {"VCPU": 1}, LEFT: {"VGPU": 1}, RIGHT: {}, POOL: {}}


# --- A host whose tree is deleted: all of it or nothing, and the service that reports it next has it.


HOST, NEIGHBOUR, DEVICE, THEIRS = HOSTS[:4]


def tree(version: int, *, reporter: str = "compute-c1", root: str = HOST) -> InventoryUpdate:
    host = ProviderReport(uuid=root, name=f"host-{root[0]}", inventories={"VCPU": Inventory(total=8)})
    device = ProviderReport(uuid=DEVICE, name="gpu", parent_uuid=root, inventories={"VGPU": Inventory(total=2)})
    providers = (host, device) if root == HOST else (host,)
    return InventoryUpdate(reporter=reporter, version=version, root_uuid=root, providers=providers)


async def outcomes(store: PlacementService, *updates: InventoryUpdate) -> list[str]:
    results = await store.apply_reports(updates)
    return [result.outcome if isinstance(result, InventoryResult) else result.code for result in results]


async def providers(store: PlacementService) -> list[str]:
    return [one.uuid for one in (await store.snapshot(None, 100)).providers]


async def test_a_tree_is_deleted_with_what_other_sources_have_below_it(store: PlacementService) -> None:
    await outcomes(store, tree(1))
    await outcomes(store, tree(1, root=NEIGHBOUR))
    await store.write_trees([CreateProvider(THEIRS, "agent", DEVICE)])
    (done,) = await store.write_trees([DeleteTree(HOST)])
    assert isinstance(done, Provider) and done.uuid == HOST
    assert await providers(store) == [NEIGHBOUR]
    removed = [one.provider for one in (await store.changes(0, 100)).changes if one.removed]
    assert sorted(removed) == sorted([HOST, DEVICE, THEIRS])
    (again,) = await store.write_trees([DeleteTree(HOST)])
    assert isinstance(again, WriteRefusal) and again.code is RefusalCode.NO_PROVIDER


async def test_a_tree_stays_whole_while_a_consumer_holds_something_of_it(store: PlacementService) -> None:
    await outcomes(store, tree(1))
    option = ClaimOption(allocations={DEVICE: {"VGPU": 2}})
    await store.apply([Claim(consumer=VMS[0], options=(option,), project_id="p")])
    (refused,) = await store.write_trees([DeleteTree(HOST)])
    assert refused == WriteRefusal(RefusalCode.PROVIDER_IN_USE, "consumers hold VGPU 2 of it", HOST)
    assert sorted(await providers(store)) == sorted([HOST, DEVICE])
    await store.apply([Release(consumer=VMS[0])])
    (done,) = await store.write_trees([DeleteTree(HOST)])
    assert isinstance(done, Provider)


async def test_a_deleted_host_has_no_owner_and_no_late_report_brings_it_back(store: PlacementService) -> None:
    await outcomes(store, tree(5))
    assert await outcomes(store, tree(1, reporter="compute-c2")) == ["host.other_service"]
    await store.write_trees([DeleteTree(HOST)])
    assert await outcomes(store, tree(5)) == ["stale"]  # delivered once more
    assert await providers(store) == []
    assert await outcomes(store, tree(2, reporter="compute-c2")) == ["applied"]
    assert await outcomes(store, tree(6)) == ["host.other_service"]
    assert sorted(await providers(store)) == sorted([HOST, DEVICE])


async def test_a_host_that_is_reported_once_more_by_its_service_is_there_again(store: PlacementService) -> None:
    """The same content under a later version: what was deleted is not taken for what placement still holds."""
    await outcomes(store, tree(1))
    await store.write_trees([DeleteTree(HOST)])
    assert await outcomes(store, tree(2)) == ["applied"]
    assert sorted(await providers(store)) == sorted([HOST, DEVICE])


# --- Providers that go and come back, within one transaction or later: replicas and claims distinguish them.


A, B = HOSTS[:2]
DEVICES = [f"d00000{n:02d}-0000-4000-8000-000000000000" for n in range(20)]


def device(uuid: str, parent: str, total: int = 8) -> ProviderReport:
    return ProviderReport(uuid=uuid, name=uuid, parent_uuid=parent, inventories={"VGPU": Inventory(total=total)})


def host(
    root: str, version: int, *children: ProviderReport, reporter: str = "s", traits: tuple[str, ...] = ()
) -> InventoryUpdate:
    host = ProviderReport(uuid=root, name=f"host-{root[0]}", inventories={"VCPU": Inventory(total=100)}, traits=traits)
    return InventoryUpdate(reporter=reporter, version=version, root_uuid=root, providers=(host, *children))


def taken_out(root: str, version: int, reporter: str = "s") -> InventoryUpdate:
    return InventoryUpdate(reporter=reporter, version=version, root_uuid=root)


async def follow(store: PlacementService, replica: Replica) -> None:
    """Fold in what the feed carries, and see that placement then equals the store."""
    page = await store.changes(replica.sequence, 10_000)
    assert replica.apply(page.changes) is None
    assert replica.sequence == page.head
    whole = Replica()
    snapshot = await store.snapshot(None, 1000)
    whole.load(snapshot.providers, snapshot.sequence)
    assert dump(replica) == dump(whole)
    assert len(replica) == len(whole)


async def spec_generation(store: PlacementService, uuid: str) -> int:
    return next(state.spec_generation for state in (await store.snapshot(None, 1000)).providers if state.uuid == uuid)


async def claimed(store: PlacementService, vm: str, provider: str, **amounts: int) -> str:
    """Claim for the spec generation that the provider has now."""
    option = ClaimOption(
        allocations={provider: amounts}, spec_generations={provider: await spec_generation(store, provider)}
    )
    (reply,) = await store.apply([Claim(consumer=vm, options=(option,), project_id="p")])
    return str(reply.outcome)


async def test_children_that_move_between_two_reports_of_one_transaction_are_followed(store: PlacementService) -> None:
    """Removed and made again in one transaction, their generations went back and replicas kept the old ones."""
    replica = Replica()
    await outcomes(store, host(A, 2, *(device(uuid, A) for uuid in DEVICES)), host(B, 2))
    for _ in range(5):  # usage moves the generations on
        assert await claimed(store, VMS[0], DEVICES[0], VGPU=1) == "claimed"
        await store.apply([Release(consumer=VMS[0])])
    await follow(store, replica)
    assert await outcomes(store, host(A, 3), host(B, 3, *(device(uuid, B, 6) for uuid in DEVICES))) == ["applied"] * 2
    await follow(store, replica)
    rows = [replica.row_of(uuid) for uuid in DEVICES]
    assert {replica.uuid_of(replica.root_of(row)) for row in rows if row is not None} == {B}
    for uuid, vm in zip(DEVICES, VMS, strict=False):
        assert await claimed(store, vm, uuid, VGPU=6) == "claimed"
    await follow(store, replica)
    root = replica.row_of(B)
    assert root is not None
    assert replica.inventory_of(rows[0] or 0)["VGPU"][2] == 0, "nothing of it is left"


async def test_a_root_taken_out_by_one_source_and_reported_by_another_is_followed(store: PlacementService) -> None:
    replica = Replica()
    for version in range(2, 6):
        await outcomes(store, host(A, version, traits=(f"CUSTOM_{version}",)))
    await follow(store, replica)
    assert (
        await outcomes(store, taken_out(A, 6), host(A, 1, reporter="heir", traits=("CUSTOM_HEIR",))) == ["applied"] * 2
    )
    await follow(store, replica)
    row = replica.row_of(A)
    assert row is not None
    assert replica.traits_of(row) == ("CUSTOM_HEIR",)


@pytest.mark.parametrize("at_once", [True, False], ids=["in one transaction", "later"])
async def test_a_device_is_its_former_hosts_again_when_another_one_has_had_it(
    store: PlacementService, at_once: bool
) -> None:
    """Of one transaction the former host's report passed for what placement holds, and was not read when repeated."""
    ours, theirs = host(A, 2, device(DEVICES[0], A)), host(B, 2, device(DEVICES[0], B))
    for updates in [[ours, theirs]] if at_once else [[ours], [theirs]]:
        assert await outcomes(store, *updates) == ["applied"] * len(updates)
    assert await outcomes(store, host(B, 3)) == ["applied"], "it is nobody's"
    assert await outcomes(store, host(A, 3, device(DEVICES[0], A))) == ["applied"]
    assert DEVICES[0] in {state.uuid for state in (await store.snapshot(None, 1000)).providers}


@pytest.mark.parametrize("at_once", [True, False], ids=["in one transaction", "later"])
async def test_a_trait_that_a_client_has_set_ends_with_its_provider(store: PlacementService, at_once: bool) -> None:
    """Of one transaction its mark stayed, and no report of the provider that followed took the trait away. A provider
    that its source has taken out waits for it to come back: it ends by an operator's delete.
    """
    assert await outcomes(store, host(A, 2, traits=("CUSTOM_OWN",))) == ["applied"]
    for traits in ((), ("CUSTOM_OWN",)):
        (written,) = await store.write_trees([SetTraits(A, traits)])
        assert isinstance(written, Provider) and written.own_traits == traits
    gone, back = DeleteTree(A), CreateProvider(A, "again")
    for writes in [[gone, back]] if at_once else [[gone], [back]]:
        assert all(isinstance(one, Provider) for one in await store.write_trees(writes))
    for version, traits in ((1, ("CUSTOM_OWN",)), (2, ())):
        assert await outcomes(store, host(A, version, reporter="heir", traits=traits)) == ["applied"]
    (state,) = (await store.snapshot(None, 1000)).providers
    assert state.traits == ()


@pytest.mark.parametrize("at_once", [True, False], ids=["in one call", "later"])
async def test_what_moves_to_a_device_that_is_taken_out_then_is_stranded_there(
    store: PlacementService, at_once: bool
) -> None:
    """Of one transaction this broke an invariant, which ends the worker: usage past the capacity of the device."""
    flat = report(node(A, VGPU=2), version=2)
    assert await outcomes(store, flat, replace(flat, reporter="other")) == ["applied", "unchanged"]
    assert await claimed(store, VMS[0], A, VGPU=2) == "claimed"
    moves = report(node(A, VCPU=8), node(DEVICES[0], A, receives_from=A, VGPU=2), version=3)
    ends = taken_out(A, 4)
    for updates in [[moves, ends]] if at_once else [[moves], [ends]]:
        assert await outcomes(store, *updates) == ["applied"] * len(updates)
    states = {state.uuid: state for state in (await store.snapshot(None, 1000)).providers}
    assert states[DEVICES[0]].used == {"VGPU": 2} and states[DEVICES[0]].inventories["VGPU"][0] == 0
    assert (await store.apply([Release(consumer=VMS[0])]))[0].outcome == "released"  # type: ignore[union-attr]


@pytest.mark.parametrize("at_once", [True, False], ids=["in one transaction", "later"])
async def test_a_claim_chosen_for_a_provider_that_was_made_anew_conflicts(
    store: PlacementService, at_once: bool
) -> None:
    """It had SGX, it went, it came back without: the claim was chosen for another host."""
    sgx, new = DEVICES[0], VMS[0]
    assert await outcomes(store, host(sgx, 1, traits=("HW_CPU_X86_SGX",))) == ["applied"]
    option = ClaimOption(allocations={sgx: {"VCPU": 1}}, spec_generations={sgx: await spec_generation(store, sgx)})
    gone, back = taken_out(sgx, 2), host(sgx, 1, reporter="heir")
    for updates in [[gone, back]] if at_once else [[gone], [back]]:
        assert await outcomes(store, *updates) == ["applied"] * len(updates)
    (reply,) = await store.apply([Claim(consumer=VMS[0], options=(option,), project_id="p")])
    assert reply.outcome == "conflict"
    await outcomes(store, host(new, 1))
    assert await spec_generation(store, new) != await spec_generation(store, sgx), "no two are ever given the same"


# --- whatever is reported in one transaction
TREE = (A, B, *DEVICES[:3])


@st.composite
def updates(draw: st.DrawFn) -> tuple[str, str, tuple[tuple[str, int, int], ...]]:
    """(source, root, (provider, place of its parent, total) ...): what is left out of it is taken out."""
    root, *others = draw(st.permutations(TREE))
    size = draw(st.integers(0, len(TREE)))
    nodes = [
        (uuid, draw(st.integers(0, at)), draw(st.integers(1, 3))) for at, uuid in enumerate([root, *others][:size])
    ]
    return draw(st.sampled_from(("s", "t"))), root, tuple(nodes)


HOLDS = st.dictionaries(st.sampled_from(VMS[:3]), st.sampled_from([None, *TREE]), max_size=2)
STEPS = st.lists(st.tuples(st.lists(updates(), min_size=1, max_size=5), HOLDS), min_size=1, max_size=5)
Steps = list[tuple[list[tuple[str, str, tuple[tuple[str, int, int], ...]]], dict[str, str | None]]]


def update_of(reporter: str, root: str, nodes: tuple[tuple[str, int, int], ...], version: int) -> InventoryUpdate:
    reports = [
        ProviderReport(
            uuid=uuid,
            name=uuid,
            parent_uuid=nodes[place - 1][0] if at and place else (root if at else None),
            inventories={"VGPU": Inventory(total=total)},
        )
        for at, (uuid, place, total) in enumerate(nodes)
    ]
    return InventoryUpdate(reporter=reporter, version=version, root_uuid=root, providers=tuple(reports))


async def check(store: PlacementService, steps: Steps, versions: Iterator[int]) -> None:
    """After each transaction the feed has carried what the snapshot holds, and nothing has gone back."""
    replica = Replica()
    await store.open()
    snapshot = await store.snapshot(None, 1000)
    replica.load(snapshot.providers, snapshot.sequence)
    spec_generations: dict[str, set[int]] = {}
    for reports, holds in steps:
        for part in split_by_root([update_of(*one, next(versions)) for one in reports]):
            before = {state.uuid: state for state in (await store.snapshot(None, 1000)).providers}
            await store.apply_reports(part)
            after = {state.uuid: state for state in (await store.snapshot(None, 1000)).providers}
            for uuid in before.keys() & after.keys():
                assert (after[uuid].generation > before[uuid].generation) is (after[uuid] != before[uuid])
                assert after[uuid].spec_generation >= before[uuid].spec_generation
            for uuid, state in after.items():
                if uuid not in before or state.spec_generation != before[uuid].spec_generation:
                    assert state.spec_generation not in spec_generations.get(uuid, ()), "a spec generation came back"
                    spec_generations.setdefault(uuid, set()).add(state.spec_generation)
        for vm, provider in holds.items():
            option = ClaimOption(allocations={provider or A: {"VGPU": 1}})
            write = Release(consumer=vm) if provider is None else Claim(consumer=vm, options=(option,), project_id="p")
            await store.apply([write])
        await follow(store, replica)


@pytest.fixture(scope="module")
def versions() -> Iterator[int]:
    return count(1)


@given(steps=STEPS)
def test_the_feed_agrees_with_the_snapshot_in_memory(steps: Steps, versions: Iterator[int]) -> None:
    asyncio.run(
        check(PlacementService(MemoryPlacementRows(MemoryPlacementTable(SystemClock()).session())), steps, versions)
    )


@pytest.mark.postgres
def test_the_feed_agrees_with_the_snapshot_in_postgresql(postgres_url: str, versions: Iterator[int]) -> None:
    with asyncio.Runner() as runner:
        store = PlacementService(PostgresPlacementRows(Database(postgres_url, "placement")))
        runner.run(store.open())
        try:
            replay(runner.run, store, versions)
        finally:
            runner.run(store.close())


def replay(
    claim_owner: Callable[[Coroutine[None, None, None]], None], store: PlacementService, versions: Iterator[int]
) -> None:
    @given(steps=STEPS)
    @settings(max_examples=25, deadline=None)
    def each(steps: Steps) -> None:
        claim_owner(emptied(store))
        claim_owner(check(store, steps, versions))

    each()


async def emptied(store: PlacementService) -> None:
    async with store.rows.database.raw() as connection:
        await connection.execute("TRUNCATE providers, reporters, consumers, allocations, changes CASCADE")
        await connection.execute("UPDATE feed_head SET number = 0")
