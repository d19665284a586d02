"""Filters and weighers about where others are, against Nova's rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bus.clock import new_uuid
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import LocatePage
from scheduler_worker.domain.plugins import Filter, applies_to
from scheduler_worker.domain.request_spec import Peers, RequestSpec, has_peers, peers_of
from scheduler_worker.filters.group import ServerGroupAffinityFilter, ServerGroupAntiAffinityFilter
from scheduler_worker.filters.hinted_hosts import DifferentHostFilter, SameHostFilter
from scheduler_worker.weighers.group_members import ServerGroupSoftAffinityWeigher, ServerGroupSoftAntiAffinityWeigher
from tests.unit.scheduler.hosts import PLENTY, Hosts

OURS = (ServerGroupAntiAffinityFilter, ServerGroupAffinityFilter, DifferentHostFilter, SameHostFilter)


def in_group(hosts: Hosts, policy: GroupPolicy, members: Mapping[int, int], **fields: Any) -> RequestSpec:
    group = ServerGroup(uuid=new_uuid(hosts.rng), policy=policy, **fields)
    by_uuid = {hosts.uuids[at]: count for at, count in members.items()}
    return hosts.spec().with_peers(Peers(server_group=group, members=by_uuid), "me")


@pytest.mark.parametrize(
    ("policy", "members", "fields", "passes"),
    [
        (GroupPolicy.ANTI_AFFINITY, {}, {}, [True, True, True]),
        (GroupPolicy.ANTI_AFFINITY, {0: 1}, {}, [False, True, True]),
        (GroupPolicy.ANTI_AFFINITY, {0: 1, 2: 2}, {"max_per_host": 2}, [True, True, False]),
        (GroupPolicy.AFFINITY, {}, {}, [True, True, True]),  # the claim keeps two first members apart
        (GroupPolicy.AFFINITY, {1: 3}, {}, [False, True, False]),
        (GroupPolicy.AFFINITY, {0: 1, 1: 1}, {}, [False, False, False]),  # a member moves: it may end on either
        (GroupPolicy.SOFT_AFFINITY, {1: 3}, {}, [True, True, True]),
        (GroupPolicy.SOFT_ANTI_AFFINITY, {1: 3}, {}, [True, True, True]),
    ],
)
def test_hard_rules(
    policy: GroupPolicy, members: Mapping[int, int], fields: dict[str, int], passes: list[bool]
) -> None:
    hosts = Hosts([PLENTY] * 3)
    spec = in_group(hosts, policy, members, **fields)
    ranking = hosts.selector.rank(spec, hosts.rng)
    passed = {hosts.name(row) for row in ranking.view.rows.tolist()}
    assert [f"h{at}" in passed for at in range(3)] == passes


@pytest.mark.parametrize("host_filter", [ServerGroupAntiAffinityFilter(), ServerGroupAffinityFilter()])
def test_members_on_hosts_that_the_book_lost_exclude_no_host(host_filter: Filter) -> None:
    hosts = Hosts([PLENTY] * 2)
    group = ServerGroup(uuid=new_uuid(hosts.rng), policy=GroupPolicy.ANTI_AFFINITY)
    spec = hosts.spec().with_peers(Peers(server_group=group, members={new_uuid(hosts.rng): 1}), "me")
    if applies_to(host_filter, spec):
        assert host_filter.filter(hosts.view(), spec).passed.all()


def test_wishes_are_weights_of_the_others() -> None:
    hosts = Hosts([PLENTY] * 3)
    together = in_group(hosts, GroupPolicy.SOFT_AFFINITY, {0: 1, 2: 4})
    apart = in_group(hosts, GroupPolicy.SOFT_ANTI_AFFINITY, {0: 1, 2: 4})
    assert ServerGroupSoftAffinityWeigher().weigh(hosts.view(), together).tolist() == [1, 0, 4]
    assert ServerGroupSoftAntiAffinityWeigher().weigh(hosts.view(), apart).tolist() == [1, 0, 4]

    def best(spec: RequestSpec) -> str:
        choice = hosts.selector.rank(spec, hosts.rng).pick({}, subset=1, alternates=0)
        assert choice is not None
        return hosts.name(choice.selected.row)

    assert (best(together), best(apart)) == ("h2", "h1")


def test_hints() -> None:
    hosts = Hosts([PLENTY] * 3)
    here, there, nowhere = (new_uuid(hosts.rng) for _ in range(3))
    page = LocatePage(hosts={here: (hosts.uuids[0],), there: (hosts.uuids[2], "a foreign pool")})

    def passing(host_filter: Filter, **hints: tuple[str, ...]) -> list[bool]:
        request = hosts.request(**hints)
        assert has_peers(request)
        spec = hosts.spec().with_peers(peers_of(request, page), "me")
        assert applies_to(host_filter, spec)
        return [bool(passed) for passed in host_filter.filter(hosts.view(), spec).passed]

    assert passing(DifferentHostFilter(), different_host=(here, there)) == [False, True, False]
    assert passing(DifferentHostFilter(), different_host=(nowhere,)) == [True, True, True]
    assert passing(SameHostFilter(), same_host=(here, nowhere)) == [True, False, False]
    assert passing(SameHostFilter(), same_host=(nowhere,)) == [False, False, False]


def test_a_request_without_a_group_is_not_looked_up_and_pays_for_no_filter() -> None:
    hosts = Hosts([PLENTY] * 2)
    assert not has_peers(hosts.request())
    spec = hosts.spec()
    assert not any(applies_to(one(), spec) for one in OURS)
    steps = [step.step for step in hosts.selector.explain(spec, {}).funnel]
    assert not {one.name for one in OURS} & set(steps)


def test_requests_with_peers_share_no_ranking() -> None:
    """Two members of one group see each other's hosts differently as soon as one of them is placed."""
    hosts = Hosts([PLENTY])
    spec = hosts.spec()
    others = Peers(server_group=ServerGroup(uuid=new_uuid(hosts.rng), policy=GroupPolicy.AFFINITY))
    assert spec.with_peers(others, "a").key != spec.with_peers(others, "b").key != spec.key
