"""Deletes: the end that each comes to, alone and in batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs
from msgspec.structs import replace

from bus.clock import SystemClock, new_uuid
from bus.consuming.outcome import Done, Wait
from bus.contracts.book import HeldAllocation
from bus.contracts.build import BuildRequest, BuildState, DeleteRequest
from bus.contracts.cell import CellDelete
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import ClaimOutcome, ClaimResult, LocatePage, LocateRequest
from bus.faults import Fault
from scheduler_worker.claims import HeldClaims
from scheduler_worker.deletes import Deletes
from scheduler_worker.domain.builds import Gang, NewBuild, RecordedBuild
from scheduler_worker.domain.deletes import PendingDelete
from scheduler_worker.domain.placement import (
    CONSUMER_CHANGED,
    ClaimStranded,
    HostClaimed,
    PlacementRefused,
    PlacementUnavailable,
)
from scheduler_worker.domain.requests import OVERTAKES, RequestDelivery
from scheduler_worker.domain.selector import NoValidHost
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.claims import BookClaims
from tests.kit.sent import Sent
from tests.unit.scheduler.hosts import PLENTY, Hosts
from tests.unit.scheduler.test_placing import CONFIG, RUN, Cluster, cluster, nowhere

# --- The effect of a delete, by the state of its build.


UUID = "00000000-0000-4000-8000-000000000001"


def recorded(state: BuildState, cell: str | None = None) -> RecordedBuild:
    return RecordedBuild(instance_uuid=UUID, project_id="p", state=state, sequence=2, cell=cell, run="mine")


# --- What the instance of a request that found no host holds already: it is asked, and the build goes there.


__all__ = ["cluster"]  # a fixture


def hold(
    cluster: Cluster,
    *requests: BuildRequest,
    on: int = 4,
    attempt: int = 1,
    run: str = "another",
    cell: str | None = None,
) -> None:
    """Their instances hold something on this host."""
    uuid = cluster.hosts.uuids[on] if on >= 0 else "gone"
    for one in requests:
        cluster.port.held[one.instance_uuid] = HeldAllocation(
            consumer=one.instance_uuid,
            project_id=one.project_id,
            run=run,
            attempt=attempt,
            consumer_generation=2,
            holding={uuid: {"VCPU": 1}},
            hosts=(uuid,),
            cell=cell,
        )


@pytest.mark.parametrize("min_count", [1, 2])
async def test_members_of_a_gang_that_no_host_can_take_are_looked_up_before_they_fail(
    cluster: Cluster, min_count: int
) -> None:
    first = nowhere(cluster)
    second = structs.replace(cluster.hosts.request(), instance_uuid=new_uuid(cluster.hosts.rng))
    gang = Gang(uuid=first.instance_uuid, size=2, min_count=min_count)
    hold(cluster, first, second, attempt=2)
    placed = await cluster.placer.place([structs.replace(cluster.asking(one), gang=gang) for one in (first, second)])
    found = [isinstance(one, HostClaimed) and one.attempt > 1 for one in placed]
    if min_count == 2:
        assert found == [True, True], "the member that has room fails with its gang, and is looked for, too"
    assert found[0] and cluster.port.asked[0] == first.instance_uuid


@pytest.mark.parametrize("is_announced", [True, False])
async def test_what_no_host_can_take_is_looked_up_before_it_fails(cluster: Cluster, *, is_announced: bool) -> None:
    """A restore in a full cloud: what ran failed with `no_valid_host`, and its delete did not reach its cell."""
    ruled_out = nowhere(cluster)
    (failed,) = await cluster.place(ruled_out)
    assert isinstance(failed, NoValidHost) and cluster.claims == []
    assert cluster.port.asked == [ruled_out.instance_uuid]
    hold(cluster, ruled_out, on=4 if is_announced else -1)
    (found,) = await cluster.place(ruled_out)
    assert isinstance(found, HostClaimed if is_announced else ClaimStranded)
    taken = [(one.by, one.takes_over, one.attempt, one.options[0].allocations) for one in cluster.claims]
    holding = cluster.port.held[ruled_out.instance_uuid].holding
    assert taken == [(RUN, "another", 1, holding)], "a late Release of the other run releases nothing"
    hold(cluster, ruled_out, attempt=0)
    (foreign,) = await cluster.place(ruled_out)
    assert isinstance(foreign, PlacementRefused) and foreign.code == CONSUMER_CHANGED
    cluster.port.unavailable = True
    (unanswered,) = await cluster.place(ruled_out)
    assert isinstance(unanswered, PlacementUnavailable), "no answer is not no host"


async def test_a_boot_is_one_round_trip_and_what_found_no_host_is_looked_up_in_one_more(cluster: Cluster) -> None:
    requests = [cluster.hosts.request() for _ in range(3)]
    await cluster.place(*requests)
    assert [(claim.consumer, claim.by) for claim in cluster.claims] == [(one.instance_uuid, RUN) for one in requests]
    assert cluster.port.asked == []
    await cluster.place(nowhere(cluster), nowhere(cluster))
    assert len(cluster.port.asked) == 2 and len(cluster.claims) == 3


async def test_a_redelivered_request_without_a_host_queries_whether_it_holds_one(cluster: Cluster) -> None:
    hosts = cluster.hosts
    for at, uuid in enumerate(hosts.uuids):
        hosts.book.assume(f"full {at}", {uuid: {"VCPU": 16}})
    (nothing,) = await cluster.place(hosts.request())
    assert isinstance(nothing, NoValidHost) and cluster.claims == []
    request = hosts.request()
    hold(cluster, request, on=2, run=RUN)
    (placed,) = await cluster.place(request)
    assert isinstance(placed, HostClaimed) and placed.selections[0].host_uuid == hosts.uuids[2]
    assert cluster.claims == []


@pytest.mark.parametrize("policy", [GroupPolicy.ANTI_AFFINITY, GroupPolicy.AFFINITY])
async def test_a_member_whose_earlier_claim_has_the_last_host_is_recovered(policy: GroupPolicy) -> None:
    """It is counted among the others, so its own host may look full of them: its claim is asked for."""
    hosts = Hosts([{**PLENTY, "VCPU": 1}], config=CONFIG)
    cluster = Cluster(hosts, CONFIG)
    request = hosts.request(flavor="m1.tiny", server_group=ServerGroup(uuid=new_uuid(hosts.rng), policy=policy))
    hold(cluster, request, on=0, run=RUN)
    holding = {hosts.uuids[0]: {"VCPU": 1}}
    cluster.answer = lambda _: ClaimResult(outcome=ClaimOutcome.CLAIMED, consumer_generation=1, holding=holding)

    async def on_its_host(requests: Sequence[LocateRequest]) -> list[LocatePage | Fault]:
        return [LocatePage(members={hosts.uuids[0]: 1}) for _ in requests]

    cluster.port.locate = on_its_host  # type: ignore[method-assign]
    (placed,) = await cluster.place(request)
    assert isinstance(placed, HostClaimed) and placed.selections[0].host == "h0"
    assert placed.selections[0].allocations == holding


@pytest.mark.parametrize("attempt", [1, 2])
async def test_whoever_has_claimed_and_ends_without_a_host_is_looked_up_too(cluster: Cluster, attempt: int) -> None:
    """Another scheduler has claimed for it meanwhile. Only an end without any claim was looked up."""
    request = cluster.hosts.request()
    over = ClaimResult(outcome=ClaimOutcome.OVER_LIMIT, reason="VCPU")
    hold(cluster, request, run=RUN, attempt=attempt)
    cluster.answer = lambda _: over
    (placed,) = await cluster.place(request)
    assert isinstance(placed, HostClaimed) and placed.attempt == attempt


async def test_what_is_held_on_a_host_that_nothing_announces_is_left_to_the_cell_that_the_book_knows(
    cluster: Cluster,
) -> None:
    request = nowhere(cluster)
    hold(cluster, request, on=-1, run=RUN, cell="c7")
    (placed,) = await cluster.place(request)
    assert isinstance(placed, ClaimStranded)
    assert (placed.cell, placed.host_uuid, placed.attempt) == ("c7", "gone", 1) and cluster.claims == []


async def test_what_cannot_be_taken_over_is_tried_again(cluster: Cluster) -> None:
    request = nowhere(cluster)
    hold(cluster, request)
    cluster.answer = lambda _: ClaimResult(outcome=ClaimOutcome.CONSUMER_CHANGED)
    (placed,) = await cluster.place(request)
    assert isinstance(placed, PlacementUnavailable)


async def test_a_run_whose_record_was_made_anew_takes_nothing_from_the_run_after_it(cluster: Cluster) -> None:
    request = nowhere(cluster)
    hold(cluster, request, run="newer")
    cluster.on_record[request.instance_uuid] = "newer"
    (placed,) = await cluster.place(request)
    assert isinstance(placed, PlacementUnavailable) and cluster.claims == []


# --- what one delete of a batch waits for keeps no other delete from being carried out


UNKNOWN = "00000000-0000-4000-8000-000000000002"


async def test_a_delete_of_a_built_instance_goes_to_its_cell_while_placement_does_not_answer_for_another() -> None:
    store, sent, port = MemoryBuilds(MemoryBuildTable(SystemClock()).session()), Sent(), BookClaims()
    store.publish_through(sent)  # type: ignore[arg-type]
    build = replace(recorded(BuildState.ACTIVE, "c1"), sequence=12)
    request = BuildRequest(instance_uuid=UUID, project_id="p", flavor="f")
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, digest=b"1", build=build)], 1.0)
        await unit.lock([UUID])

    async def runs_on_record(_: object) -> dict[str, str]:
        return {}

    port.unavailable = True
    held = HeldClaims(port, lambda _: None, runs_on_record)
    deletes = [
        PendingDelete(
            position=at,
            request=DeleteRequest(instance_uuid=uuid, project_id="p"),
            delivery=RequestDelivery(attempt=OVERTAKES),
        )
        for at, uuid in enumerate((UUID, UNKNOWN))
    ]
    carry_out = Deletes(store, held, clock=SystemClock(), process="s1")
    for _ in range(2):
        outcomes, _ = await carry_out.delete(deletes)
        assert isinstance(outcomes[0], Done) and isinstance(outcomes[1], Wait)
    assert [type(one.message) for _, batch in sent.rows for one in batch] == [CellDelete]
    async with store.unit() as unit:
        assert (await unit.lock([UUID]))[UUID].state is BuildState.DELETING
