"""Server groups, members, gangs, flavors with groups, and quotas, from the request to placement."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest
from msgspec import structs
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.actions import ActionAccepted, ActionKind, ActionState, Condition, ResizePolicy
from bus.contracts.build import BuildAccepted, BuildEvent, BuildPage, BuildQuery, BuildRequest, BuildState, member_uuids
from bus.contracts.cell import HostReport
from bus.contracts.objects import ObjectChange, ObjectKind
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    GroupPolicy,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    Migration,
    ProviderReport,
    Release,
    ReleaseResult,
    ServerGroup,
)
from bus.faults import RequestRefused
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.placement_client import BusClaims
from tests.integration.scheduler_worker.steps import (
    DONE,
    WARM,
    Gate,
    change,
    cut_request_consumer,
    fill,
    one_active,
    refused_change,
)
from tests.integration.scheduler_worker.test_moves import departing, departure_of
from tests.integration.scheduler_worker.world import World
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres


def group(world: World, policy: GroupPolicy, **fields: int) -> ServerGroup:
    return ServerGroup(uuid=new_uuid(world.rng), policy=policy, **fields)


# --- Server groups and the hosts of aggregates as objects: in effect everywhere, refused where they harm.


A, G = ObjectKind.AGGREGATE, ObjectKind.GROUP
ZONE = "e0000000-0000-4000-8000-000000000000"
WEST = "e0000000-0000-4000-8000-000000000001"
WEB = ObjectChange(kind=G, name="demo/web", body={"policy": "anti-affinity"})


async def end(world: World, **request: Any) -> tuple[str, str | None]:
    """(code, host) of a request once it is scheduled or has ended."""
    build = await world.requested(**request)
    states = (BuildState.SCHEDULED, BuildState.REFUSED, BuildState.FAILED)
    event = await world.ended(build.instance_uuid, *states)
    return event.code, event.host


def zone(**body: Any) -> ObjectChange:
    aggregate = {"uuid": ZONE, "name": "east", "metadata": {"availability_zone": "east"}, **body}
    return ObjectChange(kind=A, name="east", body=aggregate)


async def test_a_group_with_members_is_neither_changed_nor_deleted_unless_forced(world: World) -> None:
    await world.scheduler_and_hosts(1)
    await change(world, WEB)
    await end(world, group="web")
    looser = ObjectChange(kind=G, name="demo/web", body={"policy": "anti-affinity", "max_per_host": 2})
    for wanted in (looser, ObjectChange(kind=G, name="demo/web")):
        why = await refused_change(world, wanted)
        assert (why.code, "'demo/web' has 1 member:" in why.reason) == ("object.in_use", True), why
    await change(world, looser, force=True)
    assert (await end(world, group="web")) == ("", "c1-0"), "as the new rule has it"
    for name in ("web", "de mo/web", "demo/"):
        assert (await refused_change(world, ObjectChange(kind=G, name=name, body=WEB.body))).code == "object.invalid"


async def test_hosts_that_an_aggregate_names_join_and_leave_it(world: World) -> None:
    await world.scheduler("s1")
    await world.scheduler("s2")
    named, other = await world.add_hosts("c1", 2)
    unknown = await refused_change(world, zone(hosts=["c1-0", "c1-7"]))
    assert (unknown.code, unknown.reason) == ("object.unknown", "aggregate 'east': there is no host c1-7")
    await change(world, zone(hosts=["c1-0"]))

    def members(name: str) -> set[str]:
        replica = world.replicas[name]
        rows = {uuid: replica.row_of(uuid) for uuid in (named, other)}
        return {uuid for uuid, row in rows.items() if row is not None and ZONE in replica.aggregates_of(row)}

    await until(lambda: members("s1") == members("s2") == {named})
    assert (await end(world, availability_zone="east")) == ("", "c1-0")
    why = await refused_change(world, zone(hosts=["c1-1"]))
    (moved, _, what_to_do) = why.reason.partition("; ")
    assert moved == "1 host with instances would be in another availability zone: c1-0 (east to nova)"
    assert what_to_do == "drain them first, or force the change"
    await change(world, zone(hosts=[other]), force=True)
    await until(lambda: members("s1") == members("s2") == {other})
    assert (await end(world, availability_zone="east")) == ("", "c1-1")


async def test_a_change_puts_no_host_into_a_second_zone(world: World) -> None:
    (host, _) = await world.scheduler_and_hosts(2)
    replica = world.replicas["s1"]
    await change(world, zone(hosts=["c1-0"]))
    west = {"uuid": WEST, "name": "west", "metadata": {"availability_zone": "west"}}
    both = "'east' by aggregate 'east' and in 'west' by aggregate 'west': a host is in one availability zone"
    for named in ("c1-0", host):
        with pytest.raises(RequestRefused) as why:
            body = {**west, "hosts": ["c1-1", named]}
            await change(world, ObjectChange(kind=A, name="west", body=body), force=True)
        assert (why.value.code, why.value.reason) == ("aggregate.zone_conflict", f"host c1-0 would be in zone {both}")
    plain = {"uuid": WEST, "name": "west"}
    await change(world, ObjectChange(kind=A, name="west", body={**plain, "hosts": ["c1-0"]}))
    await until(lambda: WEST in replica.aggregates_of(replica.row_of(host) or 0))
    for zoned in (west, {**west, "hosts": ["c1-0"]}):
        assert (
            await refused_change(world, ObjectChange(kind=A, name="west", body=zoned))
        ).code == "aggregate.zone_conflict"
    east = {**west, "metadata": {"availability_zone": "east"}}
    await change(world, ObjectChange(kind=A, name="west", body=east))


async def test_members_that_are_set_otherwise_are_set_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_worker.fleet.aggregate_sync.LOOK_S", 0.05)
    (host,) = await world.scheduler_and_hosts(1)
    await change(world, zone(hosts=["c1-0"]))
    replica = world.replicas["s1"]

    def is_member() -> bool:
        return ZONE in replica.aggregates_of(replica.row_of(host) or 0)

    await until(is_member)
    was = replica.spec_generation_of(replica.row_of(host) or 0)
    await world.report(host, "c1-0", {"VCPU": 16, "MEMORY_MB": 32768, "DISK_GB": 500}, aggregates=())
    await until(lambda: is_member() and replica.spec_generation_of(replica.row_of(host) or 0) > was)
    assert set(replica.aggregates_of(replica.row_of(host) or 0)) == {ZONE}, "and in no other"


# --- Flavors with numbered groups and shared pools, from the request to what is used in placement.


FLAVOR = Flavor(
    disk_gb=10,
    extra_specs={
        "resources_CPU:VCPU": "2",
        "resources_CPU:MEMORY_MB": "1024",
        "resources_NIC:SRIOV_NET_VF": "1",
        "trait_NIC:CUSTOM_PHYSNET_A": "required",
        "same_subtree": "_CPU,_NIC",
        "group_policy": "none",
    },
)


def inventory(**amounts: int) -> dict[str, Inventory]:
    return {name: Inventory(total=total, max_unit=total) for name, total in amounts.items()}


async def add_tree(world: World, rack: str) -> dict[str, str]:
    """A host of two NUMA cells with a device each, without disk of its own. Returns {provider: its part}."""
    root = new_uuid(world.rng)
    name = f"c1-{len(world.hosts['c1'])}"
    parts = {root: "root"}
    providers = [ProviderReport(uuid=root, name=name, traits=("COMPUTE_NODE",), aggregates=(rack,))]
    for cell in (0, 1):
        numa, device = new_uuid(world.rng), new_uuid(world.rng)
        parts |= {numa: f"numa{cell}", device: f"nic{cell}"}
        providers += [
            ProviderReport(
                uuid=numa, name=f"{name}-numa{cell}", parent_uuid=root, inventories=inventory(VCPU=4, MEMORY_MB=4096)
            ),
            ProviderReport(
                uuid=device,
                name=f"{name}-nic{cell}",
                parent_uuid=numa,
                inventories=inventory(SRIOV_NET_VF=3),
                traits=("CUSTOM_PHYSNET_A",),
            ),
        ]
    await report(world, root, tuple(providers))
    world.hosts["c1"][root] = HostReport(uuid=root, name=name)
    return parts


async def add_pool(world: World, rack: str, disk_gb: int) -> str:
    pool = new_uuid(world.rng)
    provider = ProviderReport(
        uuid=pool,
        name=f"pool-{rack[:8]}",
        inventories=inventory(DISK_GB=disk_gb),
        traits=("MISC_SHARES_VIA_AGGREGATE",),
        aggregates=(rack,),
    )
    await report(world, pool, (provider,))
    return pool


async def report(world: World, root: str, providers: tuple[ProviderReport, ...]) -> None:
    update = InventoryUpdate(reporter="world", version=1, root_uuid=root, providers=providers)
    answer = await world.answer(update, InventoryResult)
    assert answer.outcome == "applied", answer


async def test_numa_affinity_and_a_shared_pool_hold_while_two_schedulers_race(world: World) -> None:
    """Three hosts take four each (two a cell); the pool of the third's rack has disk for one alone."""
    racks = [new_uuid(world.rng) for _ in range(2)]
    trees = [await add_tree(world, rack) for rack in (racks[0], racks[0], racks[1])]
    pools = {await add_pool(world, racks[0], 1000): racks[0], await add_pool(world, racks[1], 15): racks[1]}
    part = {provider: what for tree in trees for provider, what in tree.items()}
    config = SchedulerConfig(flavors={"numa": FLAVOR})
    await world.scheduler("s1", config)
    await world.scheduler("s2", config)
    await world.announce("c1")
    requests = [world.request("numa") for _ in range(12)]
    await world.ask(*requests)
    ended = [await world.ended(request.instance_uuid, BuildState.SCHEDULED, BuildState.FAILED) for request in requests]
    # 2 hosts x 2 cells x 2, and one on the third host: then its pool is empty.
    assert Counter(event.state for event in ended) == {BuildState.SCHEDULED: 9, BuildState.FAILED: 3}
    totals: Counter[tuple[str, str]] = Counter()
    await until(lambda: len(world.builds) == 9)
    for _, build in world.builds:
        chosen = build.selections[0]
        (disk,) = [uuid for uuid, given in chosen.allocations.items() if "DISK_GB" in given]
        numa, nic = (
            next(part[uuid] for uuid, given in chosen.allocations.items() if name in given)
            for name in ("VCPU", "SRIOV_NET_VF")
        )
        assert (numa, nic) in {("numa0", "nic0"), ("numa1", "nic1")}
        tree = next(tree for tree in trees if chosen.host_uuid in tree)
        assert all(uuid in tree or uuid == disk for uuid in chosen.allocations)
        assert pools[disk] == racks[1 if tree is trees[2] else 0]
        totals.update({(u, name): n for u, given in chosen.allocations.items() for name, n in given.items()})
    used = {(uuid, name): n for uuid, given in (await world.used()).items() for name, n in given.items()}
    assert used == dict(totals)
    failed = next(event for event in ended if event.state is BuildState.FAILED)
    assert "group CPU" in failed.reason or "DISK_GB" in failed.reason


def sized(vcpus: int, devices: int, disk_gb: int) -> Flavor:
    specs = {"resources_CPU:VCPU": str(vcpus), "resources_NIC:SRIOV_NET_VF": str(devices), "same_subtree": "_CPU,_NIC"}
    return Flavor(disk_gb=disk_gb, extra_specs={**specs, "group_policy": "none"})


@pytest.mark.parametrize(("then", "fits"), [("large", True), ("small", True), ("wide", False)])
async def test_a_resize_on_its_own_tree_takes_what_the_larger_size_takes(world: World, then: str, fits: bool) -> None:
    """The other NUMA cell is full, and so are its own, its device and the pool, with the instance's own size."""
    sizes = {"small": sized(3, 2, 20), "medium": sized(4, 3, 30), "large": sized(4, 3, 31), "wide": sized(4, 3, 32)}
    config = SchedulerConfig(flavors={**sizes, "other": sized(4, 3, 0)}, allow_resize_to_same_host=True)
    rack = new_uuid(world.rng)
    tree, pool = await add_tree(world, rack), await add_pool(world, rack, 31)
    await world.scheduler("s1", config)
    await world.announce("c1")
    for built in (world.request("other"), world.request("medium")):
        await world.active(built)
    action = world.action(built, ActionKind.RESIZE, flavor=then, policy=ResizePolicy.SAME_HOST)
    if not fits:
        await world.answer(action, ActionAccepted)
        assert (await world.moved(action)).state is ActionState.FAILED
        return
    command = await world.commanded(action)
    (chosen,) = command.selections
    assert chosen.host_uuid in tree
    build = next(one for _, one in world.builds if one.spec.instance_uuid == built.instance_uuid)
    claim = Claim(
        consumer=built.instance_uuid,
        attempt=2,
        consumer_generation=build.consumer_generation,
        options=(ClaimOption(allocations=chosen.allocations),),
        project_id=built.project_id,
        migration=Migration(uuid=action.request_id, source=build.selections[0].allocations),
    )
    assert (await world.answer(claim, ClaimResult)).outcome is ClaimOutcome.CLAIMED
    used = await world.used()
    larger = max(sizes[then].disk_gb, sizes["medium"].disk_gb)
    assert used[pool] == {"DISK_GB": larger}
    assert sum(amounts.get("VCPU", 0) for amounts in used.values()) == 8, "all of both NUMA cells"


# --- A project's quota, from the request to placement, while two schedulers race.


CONFIG = SchedulerConfig(default_quota={"VCPU": 5}, quotas={"small": {"INSTANCES": 1}, "unbound": {}})


async def test_two_schedulers_together_never_give_a_project_more_than_its_quota(world: World) -> None:
    await world.scheduler("s1", CONFIG)
    await world.scheduler("s2", CONFIG)
    await world.add_hosts("c1", 4)
    await world.add_hosts("c2", 4)
    requests = [world.request() for _ in range(12)]
    requests += [world.request(project_id="small") for _ in range(2)]
    requests += [world.request(project_id="unbound") for _ in range(7)]
    await world.ask(*requests)
    ended = [await world.ended(r.instance_uuid, BuildState.SCHEDULED, BuildState.FAILED) for r in requests]
    counted = Counter((event.project_id, event.code) for event in ended)
    assert counted == {
        ("demo", ""): 5,
        ("demo", "quota.exceeded"): 7,
        ("small", ""): 1,
        ("small", "quota.exceeded"): 1,
        ("unbound", ""): 7,
    }
    refused = next(event for event in ended if event.code == "quota.exceeded" and event.project_id == "demo")
    assert refused.reason == "project demo, VCPU: 5 of 5 held, 1 more requested"
    assert sum(amounts["VCPU"] for amounts in (await world.used()).values()) == 13, "what was refused holds nothing"
    assert {tuple(build.limits.items()) for _, build in world.builds} == {(("VCPU", 5),), (("INSTANCES", 1),), ()}


async def test_an_offloaded_instance_is_an_instance_of_its_projects_quota(world: World) -> None:
    built = await one_active(world, config=replace(WARM, quotas={"demo": {"INSTANCES": 2, "VCPU": 2}}))
    shelve = world.action(built, ActionKind.SHELVE, offload=True)
    assert not (await world.commanded(shelve)).limits
    await world.answer(Release(consumer=built.instance_uuid), ReleaseResult)
    done = DONE | {"condition": Condition.OFFLOADED}
    await world.action_announced("c1", shelve, ActionState.DONE, 20, **done)
    await world.moved(shelve)
    ended = []
    for other in (world.request(), world.request()):
        await world.ask(other)
        ended.append(await world.ended(other.instance_uuid, BuildState.SCHEDULED, BuildState.FAILED))
    assert [(one.state, one.code) for one in ended] == [
        (BuildState.SCHEDULED, ""),
        (BuildState.FAILED, "quota.exceeded"),
    ]
    assert world.builds[-1][1].limits == {"INSTANCES": 1, "VCPU": 2}, "of its alternates, too"
    unshelve = world.action(built, ActionKind.UNSHELVE)
    assert (await world.commanded(unshelve)).limits == {"VCPU": 2}, "it is no other instance"


async def test_what_is_between_two_cells_is_of_its_projects_quota_with_all_that_it_had(world: World) -> None:
    quotas = {"demo": {"INSTANCES": 2, "VCPU": 3}}
    built = await one_active(world, config=replace(WARM, quotas=quotas, actions_across_cells=True))
    action = world.action(built, ActionKind.MIGRATE, host="c2-0")
    departure = departure_of(await departing(world, action))
    await world.answer(Release(consumer=built.instance_uuid), ReleaseResult)
    await world.action_announced("c1", action, ActionState.MIGRATING, 16, transfer=departure)
    await until(lambda: [one for cell, one in world.actions if cell == "c2"])
    limits = []
    for (state, number), other in zip(
        ((None, 0), (ActionState.FINISHING, 20)), (world.request(), world.request()), strict=True
    ):
        if state is not None:
            await world.action_announced("c2", action, state, number, host="c2-0", condition=Condition.MOVING)
            await world.moved(action, state)
        await world.ask(other)
        await world.ended(other.instance_uuid, BuildState.SCHEDULED, BuildState.FAILED)
        limits.append(world.builds[-1][1].limits)
    assert limits == [{"INSTANCES": 1, "VCPU": 2}, quotas["demo"]], "from its claim on that is what counts"


# --- Requests for several machines that start together or not at all, from the message to placement.


ENDS = (BuildState.SCHEDULED, BuildState.FAILED, BuildState.REFUSED, BuildState.DELETED)
ROOM_FOR = {"VCPU": 1, "MEMORY_MB": 2048, "DISK_GB": 20}  # of one m1.small


def room_for(machines: int) -> dict[str, int]:
    return {name: machines * amount for name, amount in ROOM_FOR.items()}


async def ends(world: World, request: BuildRequest) -> list[BuildEvent]:
    """Of each member whether it was scheduled, or how it ended."""
    return [await world.ended(uuid, *ENDS) for uuid in member_uuids(request)]


def codes(events: Sequence[BuildEvent]) -> dict[str, int]:
    return dict(Counter(event.code or event.state.value for event in events))


async def test_each_member_is_an_instance_of_its_own(world: World) -> None:
    await world.scheduler_and_hosts(2, **room_for(2))
    await world.add_hosts("c2", 1, **room_for(2))
    request = world.request(count=5, name="web")
    reply = await world.answer(request, BuildAccepted)
    assert reply.instance_uuid == request.instance_uuid and reply.members == member_uuids(request)
    assert codes(await ends(world, request)) == {"scheduled": 5}
    built = {command.spec.instance_uuid: command for _, command in world.builds}
    assert built.keys() == set(reply.members) and len(built) == 5
    assert {command.spec.name for command in built.values()} == {f"web-{number}" for number in range(1, 6)}
    assert sum(len(used) > 0 for used in (await world.used()).values()) == 3
    assert len({cell for cell, _ in world.builds}) == 2, "one gang, two cells"
    page = await world.answer(BuildQuery(gang=request.instance_uuid), BuildPage)
    assert {(one.instance_uuid, one.gang, one.gang_min_count) for one in page.builds} == {
        (uuid, request.instance_uuid, 5) for uuid in reply.members
    }


async def test_a_member_that_was_deleted_is_not_waited_for(world: World) -> None:
    await world.scheduler_and_hosts(1, **room_for(2))
    request = world.request(count=3)
    third = structs.replace(request, instance_uuid=member_uuids(request)[2], count=1)
    await world.delete(third)
    await world.ended(third.instance_uuid, BuildState.DELETED, BuildState.REFUSED)
    await world.ask(request)
    states = [await world.ended(uuid, *ENDS) for uuid in member_uuids(request)[:2]]
    assert codes(states) == {"scheduled": 2}


async def test_a_gangs_claim_that_lands_after_the_other_copy_has_failed_holds_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    claiming = Gate(monkeypatch, BusClaims, "submit_gangs")
    (host,) = await world.scheduler_and_hosts(1, SchedulerConfig(hosts_warmup_s=0.001), **room_for(2))
    request = await world.requested(count=2)
    await claiming.wait()
    cut_request_consumer(world)
    other = await fill(world, host)
    await world.scheduler("s2", SchedulerConfig(hosts_warmup_s=0.001))
    assert codes(await ends(world, request)) == {"no_valid_host": 1, "gang.incomplete": 1}
    await world.answer(Release(consumer=other), ReleaseResult)
    claiming.open.set()
    await until(lambda: not list(world.replicas["s1"].assumptions.keys()))
    assert await world.used() == {} and world.builds == []


class Watch:
    """Looks at placement again and again: every look is one snapshot. partial: gangs that were seen in part."""

    def __init__(self, url: str, gangs: Sequence[BuildRequest]) -> None:
        self.looks, self.partial = 0, list[tuple[str, int]]()
        self._url = url
        self._gang_of = {uuid: gang for gang in gangs for uuid in member_uuids(gang)}
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        connection = await asyncpg.connect(self._url)
        try:
            while True:
                await self._look(connection)
        finally:
            await connection.close()

    async def _look(self, connection: asyncpg.Connection) -> None:
        rows = await connection.fetch("SELECT DISTINCT consumer::text FROM placement.allocations")
        held = Counter(self._gang_of[row[0]].instance_uuid for row in rows if row[0] in self._gang_of)
        least = {gang.instance_uuid: gang.min_count or gang.members for gang in self._gang_of.values()}
        self.partial += [(gang, count) for gang, count in held.items() if count < least[gang]]
        self.looks += 1

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_eight_schedulers_on_full_hosts_leave_no_partial_gang(world: World) -> None:
    """Room for 12 more machines on hosts that are 95 % full, and gangs of two to five that want 84."""
    for number in range(8):
        await world.scheduler(f"s{number}")
    for cell in ("c1", "c2"):
        await world.add_hosts(cell, 6, **room_for(20))
    fillers = [world.request() for _ in range(228)]
    await world.ask(*fillers)
    for filler in fillers:
        assert (await world.ended(filler.instance_uuid, *ENDS)).state is BuildState.SCHEDULED
    gangs = [world.request(count=2 + at % 4, min_count=2 if at % 4 == 3 else None) for at in range(24)]
    watch = Watch(world.url, gangs)
    await world.ask(*gangs)
    started = [codes(await ends(world, gang)).get("scheduled", 0) for gang in gangs]
    await watch.end()
    assert watch.looks > 0 and watch.partial == []
    assert all(
        count == 0 or count >= (gang.min_count or gang.members) for gang, count in zip(gangs, started, strict=True)
    )
    assert 11 <= sum(started) <= 12, "the smallest gang is of two, so at most one place is left"
    assert len(world.builds) == 228 + sum(started)
