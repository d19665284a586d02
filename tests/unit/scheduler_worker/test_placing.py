"""The rounds of decide and claim against a scripted placement: each outcome and what it requires."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from msgspec import structs

from bus.clock import SystemClock, new_uuid
from bus.contracts.build import BuildRequest
from bus.contracts.feed import Change
from bus.contracts.placement import Claim, ClaimOutcome, ClaimResult, GroupPolicy, ProviderState, ServerGroup
from bus.contracts.placement_queries import ConsumerRecord
from placement_worker.replica.request import Group, Query
from scheduler_worker.build import decision_round
from scheduler_worker.build import placer as placing
from scheduler_worker.build.claim_ownership import ClaimOwnership
from scheduler_worker.build.host_search import (
    ClaimsContended,
    HostClaimed,
    HostSearchRefused,
    HostSearchRequest,
    HostSearchResult,
)
from scheduler_worker.build.pending_build import PendingBuild
from scheduler_worker.build.placer import Placer
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.placement_client import PlacementUnavailable
from scheduler_worker.records.build_record import Gang
from scheduler_worker.selection.explain import NoValidHost
from scheduler_worker.selection.request_spec import RequestSpec
from tests.kit.claims import Answer, PlacementClaims
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts


class Cluster:
    """A placer beside hosts made by hand; `answer` answers claims, and `refreshed` is called for news."""

    def __init__(self, hosts: Hosts, config: SchedulerConfig) -> None:
        self.hosts = hosts
        self.clock = SystemClock()
        self.port = PlacementClaims()
        self.port.answer = self.claimed
        self.on_record: dict[str, str] = {}  # runs of other records than this process's
        self.refreshed: Callable[[], None] = lambda: None
        self.refreshes, self.is_newest = 0, True
        self.placer = self.make_placer(config)

    def make_placer(self, config: SchedulerConfig) -> Placer:
        held = ClaimOwnership(self.port, self.hosts.table.last_cell_of, self.recorded_owners)
        return Placer(self.port, held, self.hosts.selector, self, clock=self.clock, rng=random.Random(5), config=config)

    async def recorded_owners(self, instances: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(instances, RUN) | self.on_record

    @property
    def claims(self) -> list[Claim]:
        return self.port.submitted

    @property
    def answer(self) -> Answer | None:
        return self.port.answer

    @answer.setter
    def answer(self, answer: Answer) -> None:
        self.port.answer = answer

    async def refresh(self, *, timeout_s: float) -> bool:
        self.refreshes += 1
        self.refreshed()
        return self.is_newest

    def claimed(self, claim: Claim, option: int = 0) -> ClaimResult:
        providers = claim.options[option].allocations
        return ClaimResult(
            outcome=ClaimOutcome.CLAIMED, option=option, consumer_generation=1, generations=dict.fromkeys(providers, 2)
        )

    def holds(self, holding: dict[str, dict[str, int]]) -> BuildRequest:
        """A request whose first run, which was lost, holds this."""
        request = self.hosts.request()
        self.answer = lambda _: ClaimResult(outcome=ClaimOutcome.CLAIMED, consumer_generation=1, allocations=holding)
        self.port.held[request.instance_uuid] = ConsumerRecord(
            consumer=request.instance_uuid,
            project_id=request.project_id,
            claim_owner=RUN,
            attempt=1,
            consumer_generation=1,
            allocations=holding,
            hosts=tuple(holding)[:1],
            cell=None,
        )
        return request

    def host_of(self, claim: Claim) -> str:
        return self.hosts.name(self.hosts.replica.row_of(next(iter(claim.options[0].allocations))) or 0)

    def asking(self, request: BuildRequest) -> HostSearchRequest:
        spec = self.hosts.selector.request_spec(request)
        assert isinstance(spec, RequestSpec)
        return HostSearchRequest(request=request, spec=spec, claim_owner=RUN)

    async def place(self, *requests: BuildRequest) -> list[HostSearchResult]:
        return await self.placer.place([self.asking(request) for request in requests])

    def pending(self, request: BuildRequest) -> PendingBuild:
        return PendingBuild(batch_index=0, request=request, digest=b"", requested_at=0.0, taken_at=0.0)


# Hosts were reported at 0, and the loop has its own time.
RUN = "run-1"
APART = GroupPolicy.ANTI_AFFINITY
CONFIG = SchedulerConfig(claim_timeout_s=0.2, retry_jitter_s=0.001)


def result(outcome: ClaimOutcome) -> ClaimResult:
    return ClaimResult(outcome=outcome, outcomes=(outcome,))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(Hosts([PLENTY] * 6, cells=["c1", "c1", "c1", "c2", "c2", "c2"], config=CONFIG), CONFIG)


async def test_claimed_as_attempt_one_and_assumed_until_the_feed_has_it(cluster: Cluster) -> None:
    request = cluster.hosts.request()
    (placed,) = await cluster.place(request)
    assert isinstance(placed, HostClaimed)
    (claim,) = cluster.claims
    assert (claim.consumer, claim.attempt, claim.consumer_generation) == (request.instance_uuid, 1, None)
    assert placed.selections[0].allocations == claim.options[0].allocations
    assert (
        placed.selections[0].spec_generations
        == claim.options[0].spec_generations
        == {placed.selections[0].host_uuid: 1}
    )
    assert len(placed.selections) == 3 and placed.consumer_generation == 1
    assert {selection.host[1] in "012" for selection in placed.selections} == {placed.cell == "c1"}
    replica, host = cluster.hosts.replica, placed.selections[0].host_uuid
    assert list(replica.assumptions.keys()) == [request.instance_uuid]
    replica.apply([Change(sequence=1, provider=host, generation=2, used={"VCPU": 1, "MEMORY_MB": 2048, "DISK_GB": 20})])
    assert list(replica.assumptions.keys()) == []


@pytest.mark.parametrize("outcome", [ClaimOutcome.NO_CAPACITY, ClaimOutcome.PROVIDER_REMOVED])
async def test_full_or_gone_walks_the_whole_list_and_never_claims_a_host_twice(
    cluster: Cluster, outcome: ClaimOutcome
) -> None:
    cluster.answer = lambda _: result(outcome)
    (ended,) = await cluster.place(cluster.hosts.request())
    assert isinstance(ended, NoValidHost)
    assert sorted(cluster.host_of(claim) for claim in cluster.claims) == ["h0", "h1", "h2", "h3", "h4", "h5"]
    assert ended.funnel[-1].step == "claim" and ended.funnel[-1].rejected == {f"claim.{outcome}": 6}
    assert list(cluster.hosts.replica.assumptions.keys()) == []
    assert cluster.refreshes >= 1  # "none" is only answered on the newest state


@pytest.mark.parametrize("outcome", [ClaimOutcome.NO_CAPACITY, ClaimOutcome.CONFLICT])
@pytest.mark.parametrize("gang", [None, Gang(uuid=RUN, size=2, min_count=1)])
async def test_without_the_newest_state_a_search_that_needs_it_is_tried_again(
    cluster: Cluster, outcome: ClaimOutcome, gang: Gang | None
) -> None:
    """While placement took longer than a refresh waits, builds ended as if no host had room."""
    cluster.is_newest = False
    first, other = cluster.hosts.request(), cluster.hosts.request()
    cluster.answer = lambda one: cluster.claimed(one) if one.consumer == other.instance_uuid else result(outcome)
    asked = [structs.replace(cluster.asking(one), gang=gang) for one in (first, other)]
    ended, beside = await cluster.placer.place(asked)
    assert isinstance(ended, PlacementUnavailable)
    assert isinstance(beside, HostClaimed if gang is None else PlacementUnavailable)
    assert {*cluster.hosts.replica.assumptions.keys()} == ({other.instance_uuid} if gang is None else set())


@pytest.mark.parametrize("gang", [None, Gang(uuid=RUN, size=2, min_count=2)], ids=["each alone", "a gang"])
async def test_a_move_that_is_chosen_while_builds_are_decided_never_proves_that_no_host_is_left(
    cluster: Cluster, gang: Gang | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of builds alone it did not; a gang's members were told that no host has room."""
    monkeypatch.setattr(decision_round, "PART_COST", 0)  # each choice lets others run
    assumed, room = cluster.hosts.selector.assumed, dict.fromkeys(cluster.hosts.uuids, PLENTY)

    def move() -> None:
        assumed.add("move", room, cluster.clock.monotonic() + 60.0)

    def move_once_more() -> None:
        cluster.refreshed = lambda: None
        asyncio.get_running_loop().call_soon(move)

    move()
    cluster.refreshed = move_once_more
    asked = [structs.replace(cluster.asking(cluster.hosts.request()), gang=gang) for _ in range(2)]
    await cluster.placer.place(asked)
    assert {one.consumer for one in cluster.claims} == {one.request.instance_uuid for one in asked}


async def test_what_is_claimed_is_not_decided_again_while_another_is_tried_once_more() -> None:
    room = {"VCPU": 1, "MEMORY_MB": 2048, "DISK_GB": 20}  # of one instance
    cluster = Cluster(Hosts([room] * 3, config=CONFIG), CONFIG)
    first, second = cluster.hosts.request(), cluster.hosts.request()
    outcomes = iter([None, ClaimOutcome.NO_CAPACITY])
    cluster.answer = lambda claim: result(kind) if (kind := next(outcomes, None)) else cluster.claimed(claim)
    await cluster.place(first, second)
    assert [one.consumer for one in cluster.claims] == [one.instance_uuid for one in (first, second, second)]
    replica = cluster.hosts.replica
    rows = [replica.row_of(uuid) for claim in cluster.claims for uuid in claim.options[0].allocations]
    assert replica.free("VCPU", np.array(rows)).tolist() == [0, 1, 0]


async def test_a_conflict_folds_the_newer_shape_in_and_claims_the_same_host(cluster: Cluster) -> None:
    def conflict_once(claim: Claim) -> ClaimResult:
        if len(cluster.claims) > 1:
            return cluster.claimed(claim)
        (uuid,) = claim.options[0].allocations
        at = cluster.hosts.uuids.index(uuid)
        newer = type(cluster.hosts.states[at])(
            uuid=uuid,
            name=f"h{at}",
            root_uuid=uuid,
            generation=2,
            spec_generation=2,
            inventories=cluster.hosts.states[at].inventories,
        )
        cluster.refreshed = lambda: cluster.hosts.replica.apply(
            [Change(sequence=1, provider=uuid, generation=2, state=newer)]
        )
        return result(ClaimOutcome.CONFLICT)

    cluster.answer = conflict_once
    (placed,) = await cluster.place(cluster.hosts.request())
    assert isinstance(placed, HostClaimed) and placed.claims == 2
    first, second = cluster.claims
    assert cluster.host_of(first) == cluster.host_of(second)
    assert list(first.options[0].spec_generations.values()) == [1] and list(
        second.options[0].spec_generations.values()
    ) == [2]


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(ClaimOutcome.CONSUMER_CONFLICT, "claim.consumer_conflict"), (ClaimOutcome.INVALID, "claim.invalid")],
)
async def test_a_foreign_consumer_and_the_impossible_stop_at_once(
    cluster: Cluster, outcome: ClaimOutcome, code: str
) -> None:
    cluster.answer = lambda _: result(outcome)
    (stopped,) = await cluster.place(cluster.hosts.request())
    assert isinstance(stopped, HostSearchRefused) and stopped.code == code
    assert len(cluster.claims) == 1 and list(cluster.hosts.replica.assumptions.keys()) == []


async def test_the_bound_on_rounds_is_not_no_host_either(cluster: Cluster) -> None:
    cluster.answer = lambda _: result(ClaimOutcome.NO_CAPACITY)
    config = SchedulerConfig(claim_rounds=3, retry_jitter_s=0.001)
    placer = cluster.make_placer(config)
    request = cluster.hosts.request()
    (ended,) = await placer.place([HostSearchRequest(request=request, spec=cluster.hosts.spec())])
    assert isinstance(ended, ClaimsContended)
    assert ended.claims == len(ended.lost) == len(cluster.claims) == 3


def nowhere(cluster: Cluster) -> BuildRequest:
    """A request that no host can take."""
    hosts = cluster.hosts
    return hosts.request(ignore_hosts=tuple(hosts.selector.name_of(uuid) for uuid in hosts.uuids))


async def test_an_earlier_claim_that_is_released_before_it_is_taken_over_is_built_nowhere(cluster: Cluster) -> None:
    """The release of the run that was lost had waited for placement, as the claim of this run had."""
    request = cluster.holds({cluster.hosts.uuids[4]: {"VCPU": 1}})
    del cluster.port.held[request.instance_uuid]
    (placed,) = await cluster.place(request)
    assert isinstance(placed, PlacementUnavailable)


async def test_an_earlier_claim_carries_itself_what_it_holds(cluster: Cluster) -> None:
    """Two children of one host that have the same classes, and a pool elsewhere: only placement knows who gave what."""
    hosts = cluster.hosts
    cells, pool = [new_uuid(cluster.hosts.rng) for _ in range(2)], new_uuid(cluster.hosts.rng)
    for uuid in (*cells, pool):
        root = pool if uuid == pool else hosts.uuids[1]
        parent = None if uuid == pool else root
        state = ProviderState(
            uuid=uuid,
            name=uuid,
            root_uuid=root,
            parent_uuid=parent,
            generation=1,
            spec_generation=4,
            inventories={"VCPU": (8.0, 1, 8, 1, 8, 0, 1.0), "DISK_GB": (8.0, 1, 8, 1, 8, 0, 1.0)},
        )
        hosts.replica.apply([Change(sequence=hosts.replica.sequence + 1, provider=uuid, generation=1, state=state)])
    holding = {cells[1]: {"VCPU": 1}, cells[0]: {"VCPU": 2}, pool: {"DISK_GB": 3}}
    request = cluster.holds(holding)
    (placed,) = await cluster.place(request)
    assert isinstance(placed, HostClaimed)
    main = placed.selections[0]
    assert (main.host_uuid, main.allocations) == (hosts.uuids[1], holding)
    assert main.spec_generations == dict.fromkeys(holding, 4)


async def test_a_host_that_leaves_while_a_claim_is_under_way_is_no_alternate(cluster: Cluster) -> None:
    """Its row of placement was looked up after the answer, named no host, and the request ended as a dead letter."""
    hosts = cluster.hosts

    def meanwhile(claim: Claim) -> ClaimResult:
        for uuid in hosts.uuids:
            if uuid not in claim.options[0].allocations:
                hosts.replica.apply(
                    [Change(sequence=hosts.replica.sequence + 1, provider=uuid, generation=2, removed=True)]
                )
        return cluster.claimed(claim)

    cluster.answer = meanwhile
    (placed,) = await cluster.place(hosts.request())
    assert isinstance(placed, HostClaimed)
    (claim,) = cluster.claims
    assert [selection.host for selection in placed.selections] == [cluster.host_of(claim)]


async def test_a_host_that_takes_over_the_row_of_one_that_left_is_not_taken_for_it(cluster: Cluster) -> None:
    """A row names another host once its own has left: nothing that was decided for the old one is the new one's."""
    hosts = cluster.hosts
    others = [f"late{at}" for at in range(len(hosts.uuids))]

    def meanwhile(claim: Claim) -> ClaimResult:
        for uuid, name in zip(hosts.uuids, others, strict=True):
            if uuid not in claim.options[0].allocations:
                left = Change(sequence=hosts.replica.sequence + 1, provider=uuid, generation=2, removed=True)
                hosts.replica.apply([left])
                came = structs.replace(hosts.states[0], uuid=(new := new_uuid(hosts.rng)), name=name, root_uuid=new)
                hosts.replica.apply(
                    [Change(sequence=hosts.replica.sequence + 1, provider=new, generation=1, state=came)]
                )
                hosts.uuids[hosts.uuids.index(uuid)] = new
        hosts.announce(["c1"] * len(hosts.uuids), {}, sequence=2)
        return cluster.claimed(claim)

    cluster.answer = meanwhile
    (placed,) = await cluster.place(hosts.request())
    assert isinstance(placed, HostClaimed)
    assert all(set(selection.allocations) == {selection.host_uuid} for selection in placed.selections)


async def test_a_host_in_the_row_of_a_full_host_that_left_is_claimed(cluster: Cluster) -> None:
    """A request may not use a host any more; the row that the host once had does not count."""
    hosts = cluster.hosts
    late = new_uuid(hosts.rng)

    def full(claim: Claim) -> ClaimResult:
        if late in claim.options[0].allocations:
            return cluster.claimed(claim)
        if len(cluster.claims) == len(hosts.uuids):  # all were asked: one leaves, and another host comes in its row
            row = hosts.replica.row_of(hosts.uuids[0])
            left = Change(sequence=hosts.replica.sequence + 1, provider=hosts.uuids[0], generation=2, removed=True)
            hosts.replica.apply([left])
            came = structs.replace(hosts.states[0], uuid=late, name="late", root_uuid=late)
            hosts.replica.apply([Change(sequence=hosts.replica.sequence + 1, provider=late, generation=1, state=came)])
            assert hosts.replica.row_of(late) == row
            hosts.uuids[0] = late
            hosts.announce(["c1"] * len(hosts.uuids), {}, sequence=2)
        return result(ClaimOutcome.NO_CAPACITY)

    cluster.answer = full
    (placed,) = await cluster.place(hosts.request())
    assert isinstance(placed, HostClaimed) and placed.selections[0].host_uuid == late


async def test_a_flavor_too_wide_to_search_is_refused_and_its_neighbours_are_not(cluster: Cluster) -> None:
    hosts = cluster.hosts
    wide = Query(resources={"VCPU": 1}, groups=tuple(Group(suffix=f"_{n}", resources={"VGPU": 1}) for n in range(999)))
    spec = hosts.spec()
    requested = [
        HostSearchRequest(request=hosts.request(), spec=spec),
        HostSearchRequest(request=hosts.request(), spec=structs.replace(spec, query=wide, key=("wide",))),
    ]
    placed, stopped = await cluster.placer.place(requested)
    assert isinstance(placed, HostClaimed)
    assert isinstance(stopped, HostSearchRefused) and stopped.code == "search.too_wide"


async def test_ignored_hosts_are_never_claimed(cluster: Cluster) -> None:
    cluster.answer = lambda _: result(ClaimOutcome.NO_CAPACITY)
    ignore = ("h0", cluster.hosts.uuids[1], "h5", "unheard-of")
    (ended,) = await cluster.place(cluster.hosts.request(ignore_hosts=ignore))
    assert sorted(cluster.host_of(claim) for claim in cluster.claims) == ["h2", "h3", "h4"]
    assert isinstance(ended, NoValidHost) and ended.funnel[-1].rejected == {"host.ignored": 3, "claim.no_capacity": 3}


async def test_a_request_is_tried_on_as_many_hosts_as_it_allows(cluster: Cluster) -> None:
    """Found by nothing before: one alternate more than `max_attempts` leaves room for."""
    most = [None, 1, 2, 3]
    endings = await cluster.place(*(cluster.hosts.request(max_attempts=attempts) for attempts in most))
    hosts = [len(ending.selections) for ending in endings if isinstance(ending, HostClaimed)]
    assert hosts == [attempts or CONFIG.max_attempts for attempts in most]


async def test_a_full_child_does_not_make_its_host_full(cluster: Cluster) -> None:
    hosts, root = cluster.hosts, cluster.hosts.uuids[0]
    cards = [new_uuid(hosts.rng) for _ in range(2)]
    for sequence, card in enumerate(cards, 1):
        state = ProviderState(
            uuid=card,
            name=card,
            root_uuid=root,
            parent_uuid=root,
            generation=1,
            spec_generation=1,
            inventories={"VGPU": (2.0, 1, 2, 1, 2, 0, 1.0)},
        )
        hosts.replica.apply([Change(sequence=sequence, provider=card, generation=1, state=state)])
    taken: set[str] = set()  # by another scheduler, which our replica does not hold yet

    def full_at_first(claim: Claim) -> ClaimResult:
        if not taken:
            taken.update(uuid for uuid in claim.options[0].allocations if uuid in cards)
            return result(ClaimOutcome.NO_CAPACITY)
        assert not taken & claim.options[0].allocations.keys()
        return cluster.claimed(claim)

    def change() -> None:
        used = [Change(sequence=3, provider=card, generation=2, used={"VGPU": 2}) for card in sorted(taken)]
        hosts.replica.apply(used)

    cluster.answer, cluster.refreshed = full_at_first, change
    spec = structs.replace(hosts.spec(), query=Query(resources={"VCPU": 1, "VGPU": 1}), key=("vgpu",))
    (placed,) = await cluster.placer.place([HostSearchRequest(request=hosts.request(), spec=spec)])
    assert isinstance(placed, HostClaimed), placed
    assert (placed.selections[0].host_uuid, len(cluster.claims)) == (root, 2)


async def test_who_is_ruled_out_goes_where_its_server_group_is(cluster: Cluster) -> None:
    """Another member was faster: the answer names where it is, and no other host is asked for in between."""
    for there in cluster.hosts.uuids:

        def answer(claim: Claim, there: str = there) -> ClaimResult:
            if claim.options[0].host == there:
                return cluster.claimed(claim)
            return structs.replace(result(ClaimOutcome.POLICY_VIOLATED), members={there: 1})

        cluster.answer = answer
        cluster.claims.clear()
        together = ServerGroup(uuid=new_uuid(cluster.hosts.rng), policy=GroupPolicy.AFFINITY)
        (placed,) = await cluster.place(cluster.hosts.request(server_group=together))
        assert isinstance(placed, HostClaimed)
        *before, last = cluster.claims
        assert placed.selections[0].host_uuid == last.options[0].host == there
        assert len(before) <= 1
        assert last.server_group == together
        assert [loss.what for loss in placed.lost] == [f"{cluster.host_of(claim)}: policy_violated" for claim in before]


async def test_the_members_of_a_group_are_located_once_for_all_of_them_again_after_a_fault(
    cluster: Cluster,
) -> None:
    """A query for each member, after one fault, made a batch of n members read n times the group: no batch ended."""
    group = ServerGroup(uuid=new_uuid(cluster.hosts.rng), policy=APART)
    requests = [cluster.hosts.request(server_group=group) for _ in range(4)]
    placed = await cluster.place(*requests)
    assert all(isinstance(one, HostClaimed) for one in placed)
    assert len(cluster.port.located) == 1


async def test_item_16_the_claims_of_a_gang_are_submitted_within_the_bounds_of_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        placing, "within_bounds", lambda claims: tuple(structs.replace(one, user_id="bounded") for one in claims)
    )
    cluster = Cluster(Hosts([PLENTY] * 2), SchedulerConfig())
    first, second = cluster.hosts.request(), cluster.hosts.request()
    gang = Gang(uuid=first.instance_uuid, size=2, min_count=2)
    cluster.port.unavailable = True
    found = await cluster.placer.place([structs.replace(cluster.asking(one), gang=gang) for one in (first, second)])
    assert {type(one) for one in found} == {PlacementUnavailable}
    assert [one.user_id for one in cluster.claims] == ["bounded"] * 2
