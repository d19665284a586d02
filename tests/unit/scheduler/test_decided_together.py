"""Decisions that are made once for many: a gang that has to be on one host, requests of differing images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import ClaimAll, ClaimAllResult, ProviderState
from bus.faults import Fault
from placement_worker.replica.book import Book
from placement_worker.replica.sharing import SHARING_TRAIT
from scheduler_worker.domain.builds import Gang
from scheduler_worker.domain.decision_round import DecisionRound
from scheduler_worker.domain.placement import GangIncomplete, HostClaimed, PlacementRequest
from scheduler_worker.domain.request_spec import room_for
from scheduler_worker.domain.selector import NoValidHost, Selector
from tests.unit.scheduler.hosts import PLENTY, Hosts
from tests.unit.scheduler.test_placing import Cluster

GANG = 100
WIDE = {"VCPU": 1_000, "MEMORY_MB": 4_000_000, "DISK_GB": 100_000}
IMAGE_FILTER = "scheduler_worker.filters.image.ImagePropertiesFilter"


class Calls:
    """Counts calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls: Counter[str] = Counter()
        for owner, name in ((DecisionRound, "choose"), (Selector, "rank")):
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            self._calls[name] += 1
            return method(*args, **more)

        return counted

    def total(self, name: str) -> int:
        return self._calls[name]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def cluster_of(amounts: Sequence[dict[str, int]], **more: Any) -> Cluster:
    hosts = Hosts(amounts, cells=[f"c{at % 4}" for at in range(len(amounts))], **more)
    cluster = Cluster(hosts, hosts.config)

    async def grant(gangs: Sequence[ClaimAll]) -> list[ClaimAllResult | Fault]:
        return [ClaimAllResult(results=tuple(map(cluster.claimed, gang.claims))) for gang in gangs]

    cluster.port.submit_gangs = grant  # type: ignore[method-assign]
    return cluster


def gang_of(cluster: Cluster, policy: GroupPolicy, *, size: int = GANG, least: int = GANG) -> list[PlacementRequest]:
    group = ServerGroup(uuid=new_uuid(cluster.hosts.rng), policy=policy)
    members = [cluster.hosts.request(server_group=group) for _ in range(size)]
    gang = Gang(uuid=members[0].instance_uuid, size=size, min_count=least)
    return [replace(cluster.asking(one), gang=gang) for one in members]


async def test_item_16_images_share_a_ranking_when_no_filter_reads_them(calls: Calls) -> None:
    cluster = cluster_of([WIDE] * 4)
    await cluster.place(*(cluster.hosts.request(image_properties={"os": str(at)}) for at in range(64)))
    assert calls.total("rank") == 1


async def test_item_16_a_gang_that_fits_on_no_host_tries_the_one_with_most_room(calls: Calls) -> None:
    few = [PLENTY] * 300
    few[200] = {**PLENTY, "VCPU": 90}
    few[200]["DISK_GB"] = 20 * 90
    few[200]["MEMORY_MB"] = 2048 * 90
    cluster = cluster_of(few)
    placed = await cluster.placer.place(gang_of(cluster, GroupPolicy.AFFINITY))
    incomplete = [one for one in placed if isinstance(one, GangIncomplete)]
    assert {one.placed for one in incomplete} == {90}
    assert sum(isinstance(one, NoValidHost) for one in placed) == 10
    assert calls.total("choose") <= 2 * (GANG + 1), "one host a round, of two rounds"
    assert not list(cluster.hosts.book.assumed_keys())


async def test_item_16_the_one_host_with_room_for_a_gang_is_found_behind_any_number_of_others(
    calls: Calls,
) -> None:
    """All the others have more of everything except processors."""
    amounts = [{"VCPU": 50, "MEMORY_MB": 9_000_000, "DISK_GB": 900_000} for _ in range(200)]
    amounts[150] = {"VCPU": GANG, "MEMORY_MB": 2048 * GANG, "DISK_GB": 20 * GANG}
    cluster = cluster_of(amounts)
    placed = await cluster.placer.place(gang_of(cluster, GroupPolicy.AFFINITY))
    assert {one.selections[0].host for one in placed if isinstance(one, HostClaimed)} == {"h150"}
    assert all(isinstance(one, HostClaimed) for one in placed)
    assert calls.total("rank") == 3, "all hosts, those with room, and the one host for all other members"


@pytest.mark.parametrize(
    ("processors", "found"),
    [(3, {"m1.small": 3}), (13, {"m1.large": 3, "m1.small": 1}), (21, {"m1.large": 4, "m1.small": 5})],
)
async def test_members_of_several_flavors_are_on_one_host_without_those_that_fit_on_none(
    processors: int, found: dict[str, int]
) -> None:
    """m1.large needs four processors, and m1.small one."""
    cluster = cluster_of([{"VCPU": processors, "MEMORY_MB": 65536, "DISK_GB": 1000}] * 5)
    group = ServerGroup(uuid=new_uuid(cluster.hosts.rng), policy=GroupPolicy.AFFINITY)
    names = ["m1.small"] * 5 + ["m1.large"] * 4
    members = [cluster.hosts.request(name, server_group=group) for name in names]
    gang = Gang(uuid=members[0].instance_uuid, size=len(members), min_count=1)
    placed = await cluster.placer.place([replace(cluster.asking(one), gang=gang) for one in members])
    on = Counter(
        (one.selections[0].host, name) for one, name in zip(placed, names, strict=True) if isinstance(one, HostClaimed)
    )
    assert len({host for host, _ in on}) == 1
    assert {name: count for (_, name), count in on.items()} == found


def test_a_class_that_another_tree_shares_does_not_bound_a_gang() -> None:
    hosts = Hosts([{"VCPU": 8, "MEMORY_MB": 8 * 2048, "DISK_GB": 20}] * 2, members={"shared": [0]})
    query = hosts.spec().query
    assert room_for([query] * 9, hosts.view()).tolist() == [1, 1]
    uuid = new_uuid(hosts.rng)
    shares = ProviderState(
        uuid=uuid,
        name="nfs",
        root_uuid=uuid,
        generation=1,
        shape=1,
        inventories={"DISK_GB": (9000, 0, 1, 9000, 1, 0, 1.0)},
        traits=(SHARING_TRAIT,),
        aggregates=("shared",),
    )
    assert isinstance(hosts.book, Book)
    hosts.book.load([*hosts.states, shares], 0)
    assert room_for([query] * 9, hosts.view()).tolist() == [8, 8]
