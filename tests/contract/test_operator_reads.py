"""An operator's reads of the book, on both books: a host's tree with its holders, and what projects hold."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bus.contracts.book import GroupMembersQuery, HostTreeQuery, ProjectUsageQuery
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import (
    INSTANCES,
    Claim,
    ClaimOption,
    ClaimResult,
    Inventory,
    InventoryUpdate,
    ProviderReport,
    Release,
)
from placement_worker.book import ResourceBook
from placement_worker.store import memory_reads, postgres_reads
from tests.contract.books import HOSTS, KINDS, VMS, books, roomy_host

CHILD = "f0000000-0000-4000-8000-000000000000"


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[ResourceBook]:
    async with books(request) as make:
        made = make()
        await made.open()
        root = ProviderReport(uuid=HOSTS[0], name="nested", inventories={"VCPU": Inventory(total=10, reserved=2)})
        child = ProviderReport(
            uuid=CHILD, name="nested-numa", parent_uuid=HOSTS[0], inventories={"MEMORY_MB": Inventory(total=100)}
        )
        tree = InventoryUpdate(source="s", version=1, root_uuid=HOSTS[0], providers=(root, child))
        await made.report([tree, roomy_host(HOSTS[1])])
        yield made


async def hold(store: ResourceBook, vm: int, project: str, allocations: dict[str, dict[str, int]]) -> None:
    claim = Claim(consumer=VMS[vm], options=(ClaimOption(allocations=allocations),), project_id=project)
    (reply,) = await store.apply([claim])
    assert isinstance(reply, ClaimResult) and reply.outcome == "claimed"


async def test_a_tree_has_its_providers_and_who_holds_what_of_it(store: ResourceBook) -> None:
    await hold(store, 1, "p", {HOSTS[0]: {"VCPU": 2}, CHILD: {"MEMORY_MB": 30}})
    await hold(store, 0, "q", {HOSTS[0]: {"VCPU": 1}})
    await hold(store, 2, "q", {HOSTS[1]: {"VCPU": 5}})
    for looked_up in (HOSTS[0], CHILD):
        tree = await store.reads.tree(HostTreeQuery(provider=looked_up))
        assert [(one.uuid, one.parent_uuid) for one in tree.providers] == [(HOSTS[0], None), (CHILD, HOSTS[0])]
        assert tree.providers[0].inventories["VCPU"][0] == 8 and tree.providers[0].used == {"VCPU": 3}
        assert [(one.consumer, one.project_id, one.holding) for one in tree.holders] == [
            (VMS[0], "q", {HOSTS[0]: {"VCPU": 1}}),
            (VMS[1], "p", {HOSTS[0]: {"VCPU": 2}, CHILD: {"MEMORY_MB": 30}}),
        ]
        assert tree.holders[0].consumer_type == "INSTANCE" and not tree.more
    cut = await store.reads.tree(HostTreeQuery(provider=HOSTS[0], limit=1))
    assert [one.consumer for one in cut.holders] == [VMS[0]] and cut.more
    rest = await store.reads.tree(HostTreeQuery(provider=HOSTS[0], limit=1, after=VMS[0]))
    assert [one.consumer for one in rest.holders] == [VMS[1]] and not rest.more
    assert (await store.reads.tree(HostTreeQuery(provider=HOSTS[0], after=VMS[1]))).holders == ()
    unknown = await store.reads.tree(HostTreeQuery(provider=VMS[0]))
    assert unknown.providers == unknown.holders == () and not unknown.more


async def test_who_holds_something_of_a_large_tree_is_listed_with_all_of_it(
    store: ResourceBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (memory_reads, postgres_reads):
        monkeypatch.setattr(module, "MAX_TREE", 1)
    await hold(store, 1, "p", {CHILD: {"MEMORY_MB": 30}})
    tree = await store.reads.tree(HostTreeQuery(provider=HOSTS[0]))
    assert [one.uuid for one in tree.providers] == [HOSTS[0]] and tree.more
    assert [(one.consumer, one.holding) for one in tree.holders] == [(VMS[1], {CHILD: {"MEMORY_MB": 30}})]


async def test_who_has_released_holds_nothing_of_a_tree(store: ResourceBook) -> None:
    await hold(store, 0, "p", {HOSTS[0]: {"VCPU": 2}})
    await store.apply([Release(consumer=VMS[0])])
    assert (await store.reads.tree(HostTreeQuery(provider=HOSTS[0]))).holders == ()


async def test_what_projects_hold_is_returned_in_order_and_in_pages(store: ResourceBook) -> None:
    for vm, project in enumerate(("q", "B", "a", "q")):
        await hold(store, vm, project, {HOSTS[1]: {"VCPU": vm + 1, "DISK_GB": 1}})
    page = await store.reads.usage(ProjectUsageQuery())
    assert list(page.usage) == ["B", "a", "q"] and not page.more
    assert page.usage["q"] == {"DISK_GB": 2, INSTANCES: 2, "VCPU": 5}
    assert list((await store.reads.usage(ProjectUsageQuery(projects=("q", "none", "a")))).usage) == ["a", "q"]
    first = await store.reads.usage(ProjectUsageQuery(limit=2))
    assert list(first.usage) == ["B", "a"] and first.more
    rest = await store.reads.usage(ProjectUsageQuery(after="a", limit=2))
    assert list(rest.usage) == ["q"] and not rest.more
    await store.apply([Release(consumer=VMS[2])])
    assert list((await store.reads.usage(ProjectUsageQuery(projects=("a",)))).usage) == []


async def test_members_of_a_group_are_those_that_hold_something_with_their_hosts(store: ResourceBook) -> None:
    group = ServerGroup(uuid=CHILD, policy=GroupPolicy.SOFT_AFFINITY)
    for vm, host in ((0, HOSTS[1]), (1, HOSTS[0]), (2, HOSTS[1])):
        option = ClaimOption(allocations={host: {"VCPU": 1}}, host=host)
        await store.apply([Claim(consumer=VMS[vm], options=(option,), project_id="p", server_group=group)])
    await store.apply([Release(consumer=VMS[2])])
    page = await store.reads.members(GroupMembersQuery(project_id="p", server_group=CHILD))
    names = {state.uuid: state.name for state in (await store.snapshot(None, 10)).providers}
    assert page.members == {VMS[0]: (names[HOSTS[1]],), VMS[1]: ("nested",)} and not page.more
    first = await store.reads.members(GroupMembersQuery(project_id="p", server_group=CHILD, limit=1))
    assert list(first.members) == [VMS[0]] and first.more
    rest = await store.reads.members(GroupMembersQuery(project_id="p", server_group=CHILD, after=VMS[0]))
    assert list(rest.members) == [VMS[1]] and not rest.more
    assert (await store.reads.members(GroupMembersQuery(project_id="q", server_group=CHILD))).members == {}
