"""Decisions: made once for many, in parts that let others run, and their cost in function calls."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Meta
from bus.contracts.build import HostsQuery
from bus.contracts.feed import Change
from bus.contracts.placement import ClaimAll, ClaimAllResult, GroupPolicy, ProviderState, ServerGroup
from bus.faults import Fault
from placement_worker.domain.values import SHARING
from placement_worker.replica.replica import Replica
from scheduler_worker import request_handler as handlers
from scheduler_worker.build import build_engine as engine_module
from scheduler_worker.build import decision_round, dispatcher, placer
from scheduler_worker.build.build_engine import SchedulingEngine
from scheduler_worker.build.decision_round import DecisionRound
from scheduler_worker.build.dispatcher import BUILDS_AT_ONCE
from scheduler_worker.build.host_search import (
    GangIncomplete,
    HostClaimed,
    HostSearch,
    HostSearchRequest,
    new_host_search,
)
from scheduler_worker.build.pending_build import PendingBuild
from scheduler_worker.build.placer import ANSWERS_AT_ONCE
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.fleet.host_listener import Warmup
from scheduler_worker.queries import status_queries
from scheduler_worker.records.build_record import Actor, BuildUpdate, Gang
from scheduler_worker.selection.choice import CellBatching
from scheduler_worker.selection.explain import NoValidHost
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.request_spec import RelatedInstances, RequestSpec, member_capacity
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store import tables
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent
from tests.kit.turns import Turns
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts
from tests.unit.scheduler_worker.test_placing import Cluster

# --- Decisions that are made once for many: a gang that has to be on one host, requests of differing images.


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


def gang_of(cluster: Cluster, policy: GroupPolicy, *, size: int = GANG, least: int = GANG) -> list[HostSearchRequest]:
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
    assert not list(cluster.hosts.replica.assumptions.keys())


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
    assert calls.total("rank") == 2, "the hosts with room, and the one host for all other members"


@pytest.mark.parametrize(
    ("processors", "found"),
    [
        (3, {"m1.small": 3}),
        (13, {"m1.large": 3, "m1.small": 1}),
        (14, {"m1.large": 3, "m1.small": 2}),
        (21, {"m1.large": 4, "m1.small": 5}),
    ],
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
    assert member_capacity([query] * 9, hosts.view()).tolist() == [1, 1]
    uuid = new_uuid(hosts.rng)
    shares = ProviderState(
        uuid=uuid,
        name="nfs",
        root_uuid=uuid,
        generation=1,
        spec_generation=1,
        inventories={"DISK_GB": (9000, 0, 1, 9000, 1, 0, 1.0)},
        traits=(SHARING,),
        aggregates=("shared",),
    )
    assert isinstance(hosts.replica, Replica)
    hosts.replica.load([*hosts.states, shares], 0)
    assert member_capacity([query] * 9, hosts.view()).tolist() == [8, 8]


# --- A long pass of decisions lets others run: bounds by count, and what may change between two parts of it.


BATCH = 512
# In one turn of the loop.
MOST_CHOICES = 32
MOST_RANKINGS = 11
MOST_EXPLAINED = 7  # each after a ranking


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    return Turns(monkeypatch, (DecisionRound, "choose"), (Selector, "rank"), (Selector, "explain"))


async def test_item_16_a_turn_of_the_loop_has_so_many_choices(turns: Turns) -> None:
    cluster = cluster_of([WIDE] * 8)
    async with turns.counting():
        placed = await cluster.place(*(cluster.hosts.request() for _ in range(BATCH)))
    assert all(isinstance(one, HostClaimed) for one in placed)
    assert turns.total("choose") == BATCH and turns.most("choose") == MOST_CHOICES
    assert turns.total("rank") == 1, "nothing but usage has changed between the parts"


async def test_item_16_a_part_of_a_pass_and_one_of_a_list_of_hosts_are_not_in_one_turn(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_queries, "HOSTS_AT_ONCE", 1)
    monkeypatch.setattr(status_queries, "RECORDS_AT_ONCE", 1)
    monkeypatch.setattr(status_queries, "_records", turns.counted("_records", status_queries._records))
    cluster = cluster_of([WIDE] * 8)
    async with turns.counting():
        await asyncio.gather(
            cluster.place(*(cluster.hosts.request() for _ in range(BATCH))),
            status_queries.hosts_page(HostsQuery(), cluster.hosts.selector, {}),
        )
    assert turns.total("_records") == 8 and turns.total("choose") == BATCH
    assert not set(turns.calls["choose"]) & set(turns.calls["_records"])


async def test_item_16_a_turn_of_the_loop_has_so_many_rankings(turns: Turns) -> None:
    """Each request is of an image with properties of its own that a filter reads; and no host has the last ones."""
    config = SchedulerConfig(enabled_filters=(*SchedulerConfig().enabled_filters, IMAGE_FILTER))
    reports = {at: {"attributes": {"supported_instances": "x/y/z"}} for at in range(4)}
    cluster = cluster_of([WIDE] * 4, config=config, reports=reports)
    images = [{"hw_architecture": "x", "img_hv_type": "y", "hw_vm_mode": str(at)} for at in range(64)]
    async with turns.counting():
        placed = await cluster.place(*(cluster.hosts.request(image_properties=image) for image in images))
    assert all(isinstance(one, NoValidHost) for one in placed)
    assert turns.total("rank") == 2 * len(images), "a second time on the newest state"
    assert turns.most("rank") == MOST_RANKINGS
    assert turns.total("explain") == len(images) and turns.most("explain") == MOST_EXPLAINED


async def test_item_16_a_part_ends_between_the_hosts_that_are_tried_for_a_gang(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the bound does not show that a host is too small, as many are tried as before."""

    def unbounded(members: Sequence[object], view: HostsView) -> Any:
        return np.full(len(view), len(members), dtype=np.intp)

    monkeypatch.setattr(decision_round, "member_capacity", unbounded)
    cluster = cluster_of([{"VCPU": 60, "MEMORY_MB": 4_000_000, "DISK_GB": 100_000}] * 20)
    async with turns.counting():
        placed = await cluster.placer.place(gang_of(cluster, GroupPolicy.AFFINITY, least=60))
    assert len({one.selections[0].host for one in placed if isinstance(one, HostClaimed)}) == 1
    assert sum(isinstance(one, HostClaimed) for one in placed) == 60
    assert turns.total("choose") > 20 * 60 and turns.most("choose") <= GANG


@pytest.mark.parametrize("policy", [GroupPolicy.SOFT_AFFINITY, GroupPolicy.SOFT_ANTI_AFFINITY])
async def test_item_16_a_gang_whose_members_are_ranked_apart_is_decided_in_parts(
    turns: Turns, policy: GroupPolicy
) -> None:
    cluster = cluster_of([WIDE] * 4)
    async with turns.counting():
        placed = await cluster.placer.place(gang_of(cluster, policy))
    assert all(isinstance(one, HostClaimed) for one in placed)
    hosts = Counter(one.selections[0].host for one in placed if isinstance(one, HostClaimed))
    assert sorted(hosts.values()) == ([GANG] if policy is GroupPolicy.SOFT_AFFINITY else [GANG // 4] * 4)
    assert turns.total("rank") == GANG and turns.most("rank") <= MOST_RANKINGS


async def test_a_host_that_leaves_between_two_parts_is_not_chosen_any_more() -> None:
    """One leaves placement, then one is closed by its service."""
    cluster = cluster_of([WIDE] * 3)
    hosts = cluster.hosts
    states = [
        new_host_search(HostSearchRequest(request=hosts.request(), spec=hosts.spec()), hosts.selector)
        for _ in range(300)
    ]
    round_, decided, seen = DecisionRound(hosts.selector, hosts.rng, subset=1), [], list[int]()
    for part, _ in enumerate(round_.in_parts(states, decided)):
        seen.append(len(decided))
        if part == 0:
            hosts.replica.apply([Change(sequence=1, provider=hosts.uuids[0], generation=2, removed=True)])
        if part == 1:
            hosts.announce(["c0", "c1", "c2"], {1: {"enabled": False}}, sequence=2)
    uuids = [one.choice.selected.uuid for one in decided if one.choice is not None]
    assert len(uuids) == len(states)
    first, second, third = set(uuids[: seen[0]]), set(uuids[seen[0] : seen[1]]), set(uuids[seen[1] :])
    assert (first, second, third) == (set(hosts.uuids), set(hosts.uuids[1:]), {hosts.uuids[2]})
    assert len(round_.candidates) == 3, "one ranking for each state of the hosts"


async def test_a_pass_that_is_cancelled_between_two_parts_leaves_nothing_assumed() -> None:
    cluster = cluster_of([WIDE] * 8)
    requests = [cluster.hosts.request() for _ in range(BATCH)]
    placing = asyncio.ensure_future(cluster.place(*requests))
    assumed = 0
    while not assumed:
        await asyncio.sleep(0)
        assumed = len(list(cluster.hosts.replica.assumptions.keys()))
    assert 0 < assumed <= MOST_CHOICES
    placing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await placing
    assert not list(cluster.hosts.replica.assumptions.keys()) and not cluster.claims
    (placed,) = await cluster.place(cluster.hosts.request())
    assert isinstance(placed, HostClaimed), "the next pass is not kept waiting"


async def test_a_pass_sees_all_choices_of_the_pass_before_it(turns: Turns) -> None:
    """Two batches of one process: room for one of them and a half."""
    room = 3 * BATCH // 2
    cluster = cluster_of([{"VCPU": room // 4, "MEMORY_MB": 4_000_000, "DISK_GB": 100_000}] * 4)
    batches = [[cluster.hosts.request() for _ in range(BATCH)] for _ in range(2)]
    both = await asyncio.gather(*(cluster.place(*batch) for batch in batches))
    claimed = [sum(isinstance(one, HostClaimed) for one in placed) for placed in both]
    assert claimed == [BATCH, BATCH // 2]


async def test_item_16_the_steps_around_the_claims_have_so_many_builds_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """512 builds were one turn of some 40 ms after their claims, another one after they were written, and one of up to
    28 ms when they were put on record.
    """
    cluster = cluster_of([WIDE] * 8)
    counted = ("first_record", "effects", "conclude", "outbox_messages")
    owners = (PendingBuild, engine_module, dispatcher, dispatcher)
    steps = Turns(monkeypatch, *zip(owners, counted, strict=True), (engine_module, "admit"))
    monkeypatch.setattr(placer, "apply_answer", steps.counted("step", placer.apply_answer))
    store = MemoryBuilds(MemoryBuildTable(cluster.clock).session())
    store.publish_through(Sent())  # type: ignore[arg-type]
    engine = SchedulingEngine(
        store,
        cluster.port,
        cluster.hosts.selector,
        cluster,
        clock=cluster.clock,
        rng=random.Random(7),
        config=cluster.hosts.config,
    )
    builds = [replace(cluster.pending(cluster.hosts.request()), batch_index=at) for at in range(BATCH)]
    async with steps.counting():
        outcomes, _ = await engine.process(builds, [])
    assert len(outcomes) == BATCH and all(isinstance(one, Done) for one in outcomes.values())
    for name in counted:
        assert steps.total(name) == BATCH and steps.most(name) <= BUILDS_AT_ONCE, name
    assert steps.total("step") >= BATCH and steps.most("step") <= ANSWERS_AT_ONCE
    async with steps.counting():
        repeated, _ = await engine.process(builds, [])
    assert repeated == outcomes
    assert steps.total("admit") == BATCH and steps.most("admit") <= BUILDS_AT_ONCE


async def test_item_16_requests_that_arrive_together_are_read_so_many_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one's digest, flavor and server group."""

    class Engine:
        async def process(
            self, builds: Sequence[PendingBuild], _deletes: object
        ) -> tuple[dict[int, Outcome], dict[int, Outcome]]:
            return {one.batch_index: Done() for one in builds}, {}

    class NoMoves:
        async def process(self, _moves: object) -> dict[int, Outcome]:
            return {}

    async def no_wait() -> None:
        pass

    cluster = cluster_of([WIDE])
    steps = Turns(monkeypatch, (handlers, "pending_build"))
    handler = handlers.RequestHandler(
        Engine(),  # type: ignore[arg-type]
        NoMoves(),  # type: ignore[arg-type]
        cluster.hosts.selector,
        clock=cluster.clock,
        config=cluster.hosts.config,
        warmup=Warmup(cluster.hosts.selector, clock=cluster.clock),
        wait_for_backlog=no_wait,
    )
    batch = [
        Received(message=cluster.hosts.request(), meta=Meta(id=str(at), cause="", sent_at=1.0), bus="api", queue="q")
        for at in range(BATCH)
    ]
    async with steps.counting():
        assert await handler(batch) == [Done()] * BATCH
    assert steps.total("pending_build") == BATCH and steps.most("pending_build") <= BUILDS_AT_ONCE


async def test_item_16_rows_are_made_so_many_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The statements of 512 requests or decisions: their values were made in one turn of up to 19 ms."""
    cluster = cluster_of([WIDE])
    actor = Actor("scheduler", 1.0)
    builds = [cluster.pending(cluster.hosts.request()).first_record(actor) for _ in range(BATCH)]
    decided = [BuildUpdate(build=one.build, timeline=one.timeline) for one in builds]
    steps = Turns(monkeypatch, (tables, "timeline_text"))
    async with steps.counting():
        inserted = await tables.insert_columns(builds)
        await asyncio.sleep(0)
        written = await tables.decide_columns(decided)
    assert [len(column) for column in inserted] == [BATCH] * 15 and len(written[0]) == BATCH
    assert list(inserted[0]) == list(written[0]) == [one.build.instance_uuid for one in builds]
    assert steps.total("timeline_text") == 2 * BATCH and steps.most("timeline_text") <= tables.ROWS_AT_ONCE


# --- The cost of a decision in function calls, which no other program on the machine can change.


HOSTS = 2_000  # so many that no cell's hosts are one chunk
# As it is, and a tenth more. Below full load a process's code has left the caches, and a call costs microseconds.
MOST_CALLS = 900
COUNTED = 100
MOST_CALLS_OF_BATCH = 1_200  # for each request of a batch, whatever the size of its group


class CountedCalls:
    """Counts calls of Python and C functions while it is the profiler."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _frame: FrameType, event: str, _argument: object) -> None:
        self.count += event in {"call", "c_call"}


def decide(hosts: Hosts, batching: CellBatching) -> None:
    """One request in a round of its own, as it comes at a low rate."""
    request = hosts.request()
    spec = hosts.selector.request_spec(request)
    assert isinstance(spec, RequestSpec)
    round_ = DecisionRound(hosts.selector, hosts.rng, subset=1, batching=batching)
    state = new_host_search(HostSearchRequest(request=request, spec=spec), hosts.selector)
    assert round_.decide(state).choice is not None


def test_one_request_alone_is_decided_within_so_many_calls() -> None:
    hosts, batching = Hosts([PLENTY] * HOSTS, cells=["c1", "c2", "c3", "c4"] * (HOSTS // 4)), CellBatching(64)
    for _ in range(len(hosts.table.cells) + 1):  # what is kept from decision to decision is there
        decide(hosts, batching)
    calls = CountedCalls()
    sys.setprofile(calls)
    try:
        decide(hosts, batching)
    finally:
        sys.setprofile(None)
    assert calls.count <= MOST_CALLS, calls.count


def of_group(hosts: Hosts, members: int) -> list[HostSearch]:
    """A batch of members of one anti-affinity group that has so many others, on hosts that are as good as any."""
    group = ServerGroup(uuid=new_uuid(hosts.rng), policy=GroupPolicy.ANTI_AFFINITY)
    related = RelatedInstances(server_group=group, members=dict.fromkeys(hosts.uuids[:members], 1))
    states: list[HostSearch] = []
    for _ in range(COUNTED):
        request = hosts.request(server_group=group)
        spec = hosts.selector.request_spec(request)
        assert isinstance(spec, RequestSpec)
        spec = spec.with_related(related, request.instance_uuid)
        states.append(new_host_search(HostSearchRequest(request=request, spec=spec), hosts.selector))
    return states


@pytest.mark.parametrize("members", [0, 100, HOSTS - COUNTED])
def test_a_member_of_a_large_group_is_decided_within_as_many_calls(members: int) -> None:
    hosts = Hosts([PLENTY] * HOSTS, cells=["c1", "c2", "c3", "c4"] * (HOSTS // 4))
    states = of_group(hosts, members)
    round_ = DecisionRound(hosts.selector, hosts.rng, subset=1, batching=CellBatching(64))
    calls = CountedCalls()
    sys.setprofile(calls)
    try:
        decided = [round_.decide(state) for state in states]
    finally:
        sys.setprofile(None)
    chosen = {one.choice.selected.uuid for one in decided if one.choice is not None}
    assert len(chosen) == COUNTED and not chosen & set(hosts.uuids[:members])
    assert calls.count <= MOST_CALLS_OF_BATCH * COUNTED, calls.count / COUNTED


def test_hosts_that_are_full_for_one_group_are_there_for_all_others() -> None:
    """In one round, and with one ranking: members of a large group, of another one, and requests without a group."""
    hosts = Hosts([PLENTY] * 6)
    by_group = [of_group(hosts, 4)[:2], of_group(hosts, 0)[:6]]
    round_ = DecisionRound(hosts.selector, hosts.rng, subset=1)
    first, second = ([round_.decide(state) for state in states] for states in by_group)
    assert {one.choice.selected.uuid for one in first if one.choice} == set(hosts.uuids[4:])
    assert {one.choice.selected.uuid for one in second if one.choice} == set(hosts.uuids)
    spec = hosts.spec()
    plain = [new_host_search(HostSearchRequest(request=hosts.request(), spec=spec), hosts.selector) for _ in range(40)]
    assert {one.choice.selected.uuid for one in map(round_.decide, plain) if one.choice} == set(hosts.uuids)
    assert len(round_.rankings) == 1
