"""The hosts as filters and weighers see them, and the instances that a request is placed beside, by rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
from msgspec.structs import replace

from bus.contracts.cell import ServiceDown, ServicesDigest
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.operations import AdminState, HostAdminState
from bus.contracts.placement import LocatePage
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.plugins import HostFilter
from scheduler_worker.domain.view import (
    HostView,
    Peers,
    RequestSpec,
    has_peers,
    locate_request,
    peers_of,
    room_for,
)
from tests.unit.scheduler.hosts import PLENTY, Hosts, aggregate

UUID, ABSENT = (f"{n}0000000-0000-4000-8000-000000000001" for n in "ab")
OPEN, MASKED, FENCED, DISABLED = AdminState.ENABLED, AdminState.MAINTENANCE, AdminState.FENCED, AdminState.DISABLED
GROUP = ServerGroup(uuid=UUID, policy=GroupPolicy.ANTI_AFFINITY)


def decide_about(hosts: Hosts, decisions: Mapping[int, AdminState]) -> None:
    hosts.table.adopt_decisions(
        {hosts.uuids[at]: HostAdminState(host_uuid=hosts.uuids[at], host=f"d{at}", state=state)
         for at, state in decisions.items()}
    )  # fmt: skip


def test_the_columns_of_a_view() -> None:
    rack = aggregate("r", rack="1")
    hosts = Hosts(
        [PLENTY, {**PLENTY, "VCPU": 4}, PLENTY], cells=["c1", "c2", "c1"], members={rack.uuid: [1]},
        config=SchedulerConfig(aggregates=(rack,)),
        reports={0: {"enabled": False, "failed_builds": 2}, 1: {"attributes": {"k": "v", "project_id": "p"}}},
    )  # fmt: skip
    decide_about(hosts, {1: MASKED})
    view, first, second = hosts.view(), *hosts.uuids[:2]
    columns = {
        "enabled": view.enabled, "masked": view.is_in(MASKED), "either": view.is_in(MASKED, FENCED),
        "none": view.is_in(FENCED), "cell": view.cell, "in": view.in_cells({"c2", "c9"}), "up": view.up,
        "k": np.array([one is not None for one in view.attribute("k")]), "member": view.member_of(rack.uuid),
        "among": view.among([second, ABSENT]), "counted": view.counted({second: 3, ABSENT: 9}),
        "free": view.free("VCPU"), "known": view.known, "q": view.open_to("q"), "p": view.open_to("p"),
    }  # fmt: skip
    assert {name: [int(one) for one in column] for name, column in columns.items()} == {
        "enabled": [0, 0, 1], "masked": [0, 1, 0], "either": [0, 1, 0], "none": [0, 0, 0], "cell": [0, 1, 0],
        "in": [0, 1, 0], "up": [1, 1, 1], "k": [0, 1, 0], "member": [0, 1, 0], "among": [0, 1, 0],
        "counted": [0, 3, 0], "free": [16, 4, 16], "known": [1, 1, 1], "q": [1, 0, 1], "p": [1, 1, 1],
    }  # fmt: skip
    assert view.subset(np.array([2, 1])).counted({first: 1, second: 2}).tolist() == [0.0, 2.0]
    view.membership.named = {rack.uuid: [first]}
    assert view.member_of(rack.uuid).tolist() == [True, False, False]
    assert Hosts([]).view().counted({}).tolist() == []


def test_a_filter_that_looks_at_one_host_at_a_time() -> None:
    seen: list[HostView] = []

    class One(HostFilter):
        name: ClassVar[str] = "One"

        def rejection_reason(self, host: HostView, spec: RequestSpec) -> str | None:
            seen.append(host)
            return None if host.up and host.enabled else "off"

    hosts = Hosts([PLENTY] * 3, cells=["c1", "c2", "c1"], reports={0: {"enabled": False, "failed_builds": 2}})
    down = (ServiceDown(service="compute-c2", epoch=1, code="x"),)
    hosts.table.apply(ServicesDigest(cell="c2", term=1, number=1, down=down), 0.0)
    verdict = One().filter(hosts.view(), hosts.spec())
    assert (verdict.passed.tolist(), verdict.rejected) == ([False, False, True], {"off": 2})
    assert [(one.name, one.cell, one.enabled, one.up, one.failed_builds, one.free("VCPU")) for one in seen] == [
        ("h0", "c1", False, True, 2, 16.0), ("h1", "c2", True, False, 0, 16.0), ("h2", "c1", True, True, 0, 16.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("needs", "room"),
    [([1], 1), ([1, 1, 1], 3), ([5, 1, 4], 3), ([5, 1, 5], 2), ([11], 0), ([10], 1), ([0, 11], 1)],
)
def test_a_host_has_room_for_so_many_of_a_gangs_members(needs: list[int], room: int) -> None:
    hosts = Hosts([{"VCPU": 10, "DISK_GB": 99}])
    query = hosts.spec("m1.small").query
    some = [replace(query, resources={"VCPU": many, "DISK_GB": 1}) for many in needs]
    assert room_for(some, hosts.view()).tolist() == [room]
    one, other = replace(query, resources={"VCPU": 1}), replace(query, resources={"DISK_GB": 99})
    assert room_for([one, other, other, one], hosts.view()).tolist() == [3]


@pytest.mark.parametrize(
    ("hints", "group", "peers", "found", "asked"),
    [
        ({}, None, False, (None, None), ()),
        ({"different_host": (UUID,)}, None, True, (("x", "y"), None), (UUID,)),
        ({"same_host": (UUID, ABSENT)}, None, True, (None, ("x", "y")), (UUID, ABSENT)),
        ({"same_host": (UUID,), "different_host": (UUID,)}, GROUP, True, (("x", "y"), ("x", "y")), (UUID,)),
        ({"same_host": (ABSENT,)}, None, True, (None, ()), (ABSENT,)),
    ],
)
def test_the_instances_that_a_request_is_placed_relative_to(
    hints: Any, group: ServerGroup | None, peers: bool, found: Any, asked: tuple[str, ...]
) -> None:
    request = Hosts([]).request(server_group=group, **hints)
    assert has_peers(request) is peers
    located = locate_request(request)
    assert (located.consumers, located.server_group) == (asked, group and group.uuid)
    page = LocatePage(members={"x": 2}, hosts={UUID: ("x", "y")})
    assert peers_of(request, page) == Peers(
        server_group=group, members={"x": 2}, different_hosts=found[0], same_hosts=found[1]
    )


def test_a_spec_has_peers_in_its_key_and_newer_members_replace_older_ones() -> None:
    plain = Hosts([]).spec()
    spec = plain.with_peers(Peers(server_group=GROUP, members={"x": 1, "y": 1}), UUID)
    assert spec.key == (*plain.key, UUID) and spec.without_peers() == plain
    assert plain.without_peers() is plain and plain.with_members({"x": 1}) is plain
    after = spec.with_members({"x": 3}).peers
    assert after is not None and after.members == {"x": 3, "y": 1}
    policies = (GroupPolicy.ANTI_AFFINITY, GroupPolicy.AFFINITY)
    assert [[one.has_policy(policy) for policy in policies] for one in (spec, plain)] == [[True, False], [False, False]]
    assert not spec.with_peers(Peers(), UUID).has_policy(GroupPolicy.ANTI_AFFINITY)
