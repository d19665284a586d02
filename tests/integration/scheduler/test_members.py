"""Server groups and the hosts of aggregates as objects: in effect everywhere, refused where they harm."""

from __future__ import annotations

from typing import Any

import pytest

from bus.contracts.base import Refusal
from bus.contracts.book import GroupMembersPage, GroupMembersQuery
from bus.contracts.build import BuildState
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.objects import GroupDefinition, ObjectChange, ObjectKind, ObjectsChange, ObjectsChanged, group_named
from bus.contracts.placement import AggregateMembers, AggregateMembersSet
from bus.faults import RequestRefused
from tests.integration.scheduler.world import World

pytestmark = pytest.mark.postgres

A, G = ObjectKind.AGGREGATE, ObjectKind.GROUP
ZONE = "e0000000-0000-4000-8000-000000000000"
WEST = "e0000000-0000-4000-8000-000000000001"
WEB = ObjectChange(kind=G, name="demo/web", body={"policy": "anti-affinity"})


async def change(world: World, *changes: ObjectChange, **more: Any) -> ObjectsChanged:
    requested = ObjectsChange(who="operator", why="a test", changes=changes, **more)
    return await world.buses["api"].request(requested, ObjectsChanged, timeout_s=60.0)


async def refused(world: World, *changes: ObjectChange) -> Refusal:
    with pytest.raises(RequestRefused) as why:
        await change(world, *changes)
    return Refusal(code=why.value.code, reason=why.value.reason)


async def end(world: World, **request: Any) -> tuple[str, str | None]:
    """(code, host) of a request once it is scheduled or has ended."""
    build = world.request(**request)
    await world.ask(build)
    states = (BuildState.SCHEDULED, BuildState.REFUSED, BuildState.FAILED)
    event = await world.ended(build.instance_uuid, *states)
    return event.code, event.host


def zone(**body: Any) -> ObjectChange:
    aggregate = {"uuid": ZONE, "name": "east", "metadata": {"availability_zone": "east"}, **body}
    return ObjectChange(kind=A, name="east", body=aggregate)


async def test_a_request_names_a_group_on_record_and_is_held_to_its_rule(world: World) -> None:
    await world.scheduler("s1")
    await world.add_hosts("c1", 2)
    assert (await end(world, group="web"))[0] == "group.unknown"
    await change(world, WEB)
    hosts = [await end(world, group="web") for _ in range(2)]
    assert sorted(hosts) == [("", "c1-0"), ("", "c1-1")]
    assert (await end(world, group="web"))[0] == "no_valid_host"
    assert (await end(world, group="web", project_id="other"))[0] == "group.unknown", "a group is of its project"
    group = group_named("demo/web", GroupDefinition(policy=GroupPolicy.ANTI_AFFINITY))
    assert {build.server_group for _, build in world.builds} == {group}
    query = GroupMembersQuery(project_id="demo", server_group=group.uuid)
    page = await world.buses["api"].request(query, GroupMembersPage, timeout_s=60.0)
    assert sorted(page.members.values()) == [("c1-0",), ("c1-1",)]


async def test_a_group_on_record_has_one_rule_also_for_requests_that_state_one(world: World) -> None:
    await world.scheduler("s1")
    await world.add_hosts("c1", 1)
    await change(world, WEB)
    group = group_named("demo/web", GroupDefinition(policy=GroupPolicy.ANTI_AFFINITY))
    assert (await end(world, server_group=group)) == ("", "c1-0")
    other = ServerGroup(uuid=group.uuid, policy=GroupPolicy.SOFT_AFFINITY)
    assert (await end(world, server_group=other))[0] == "group.invalid"
    assert (await end(world, server_group=group, group="web"))[0] == "group.invalid"


async def test_a_group_with_members_is_neither_changed_nor_deleted_unless_forced(world: World) -> None:
    await world.scheduler("s1")
    await world.add_hosts("c1", 1)
    await change(world, WEB)
    await end(world, group="web")
    looser = ObjectChange(kind=G, name="demo/web", body={"policy": "anti-affinity", "max_per_host": 2})
    for wanted in (looser, ObjectChange(kind=G, name="demo/web")):
        why = await refused(world, wanted)
        assert (why.code, "'demo/web' has 1 member:" in why.reason) == ("object.in_use", True), why
    await change(world, looser, force=True)
    assert (await end(world, group="web")) == ("", "c1-0"), "as the new rule has it"
    for name in ("web", "de mo/web", "demo/"):
        assert (await refused(world, ObjectChange(kind=G, name=name, body=WEB.body))).code == "object.invalid"


async def test_hosts_that_an_aggregate_names_join_and_leave_it(world: World) -> None:
    await world.scheduler("s1")
    await world.scheduler("s2")
    named, other = await world.add_hosts("c1", 2)
    unknown = await refused(world, zone(hosts=["c1-0", "c1-7"]))
    assert (unknown.code, unknown.reason) == ("object.unknown", "aggregate 'east': there is no host c1-7")
    await change(world, zone(hosts=["c1-0"]))

    def members(name: str) -> set[str]:
        book = world.replicas[name]
        rows = {uuid: book.row_of(uuid) for uuid in (named, other)}
        return {uuid for uuid, row in rows.items() if row is not None and ZONE in book.aggregates_of(row)}

    await world.eventually(lambda: members("s1") == members("s2") == {named})
    assert (await end(world, availability_zone="east")) == ("", "c1-0")
    why = await refused(world, zone(hosts=["c1-1"]))
    (moved, _, what_to_do) = why.reason.partition("; ")
    assert moved == "1 host with instances would be in another availability zone: c1-0 (east to nova)"
    assert what_to_do == "drain them first, or force the change"
    await change(world, zone(hosts=[other]), force=True)
    await world.eventually(lambda: members("s1") == members("s2") == {other})
    assert (await end(world, availability_zone="east")) == ("", "c1-1")


async def test_a_host_in_two_zones_leaves_neither_with_an_instance_that_requested_it(world: World) -> None:
    await world.scheduler("s1")
    (host,) = await world.add_hosts("c1", 1)
    book = world.replicas["s1"]
    second = {"uuid": WEST, "name": "west", "metadata": {"availability_zone": "west"}}
    await change(world, zone(hosts=["c1-0"]), ObjectChange(kind=A, name="west", body=second))
    joined = AggregateMembers(aggregate=WEST, joins=(host,))  # as Placement's API can, which knows no zones
    await world.buses["api"].request(joined, AggregateMembersSet, timeout_s=60.0)
    await world.eventually(lambda: WEST in book.aggregates_of(book.row_of(host) or 0))
    assert (await end(world, availability_zone="west")) == ("", "c1-0")
    why = await refused(world, ObjectChange(kind=A, name="west", body={**second, "hosts": []}))
    assert why.code == "object.in_use" and "c1-0 (east and west to east)" in why.reason


async def test_a_change_puts_no_host_into_a_second_zone(world: World) -> None:
    await world.scheduler("s1")
    (host, _) = await world.add_hosts("c1", 2)
    book = world.replicas["s1"]
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
    await world.eventually(lambda: WEST in book.aggregates_of(book.row_of(host) or 0))
    for zoned in (west, {**west, "hosts": ["c1-0"]}):
        assert (await refused(world, ObjectChange(kind=A, name="west", body=zoned))).code == "aggregate.zone_conflict"
    east = {**west, "metadata": {"availability_zone": "east"}}
    await change(world, ObjectChange(kind=A, name="west", body=east))


async def test_members_that_are_set_otherwise_are_set_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_worker.keepers.LOOK_S", 0.05)
    await world.scheduler("s1")
    (host,) = await world.add_hosts("c1", 1)
    await change(world, zone(hosts=["c1-0"]))
    book = world.replicas["s1"]

    def is_member() -> bool:
        return ZONE in book.aggregates_of(book.row_of(host) or 0)

    await world.eventually(is_member)
    was = book.shape_of(book.row_of(host) or 0)
    await world.report(host, "c1-0", {"VCPU": 16, "MEMORY_MB": 32768, "DISK_GB": 500}, aggregates=())
    await world.eventually(lambda: is_member() and book.shape_of(book.row_of(host) or 0) > was)
    assert set(book.aggregates_of(book.row_of(host) or 0)) == {ZONE}, "and in no other"
