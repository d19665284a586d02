"""Deletes: the end that each comes to, alone and in batches."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from bus.bus import API
from bus.clock import SystemClock, new_uuid
from bus.consuming.outcome import Done, Outcome, Retry, RetryWhenAvailable
from bus.contracts.base import Refusal
from bus.contracts.build import BuildAccepted, BuildEvent, BuildRequest, BuildState, DeleteRequest
from bus.contracts.cell import CellDelete
from bus.contracts.placement import (
    Claim,
    ClaimOutcome,
    ClaimResult,
    GroupPolicy,
    LocatePage,
    LocateRequest,
    ReleaseByOwner,
    ServerGroup,
)
from bus.contracts.placement_queries import ConsumerRecord
from bus.faults import Fault
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.build.build_engine import SchedulingEngine
from scheduler_worker.build.claim_answer import CONSUMER_CONFLICT
from scheduler_worker.build.claim_ownership import ClaimOwnership
from scheduler_worker.build.delete_rules import DeletePlan, PendingDelete, answer_unknown, plan_deletes, tombstones
from scheduler_worker.build.dispatcher import Dispatcher
from scheduler_worker.build.host_search import ClaimUnlocatable, HostClaimed, HostSearchRefused
from scheduler_worker.build.pending_build import PendingBuild
from scheduler_worker.placement_client import PlacementUnavailable
from scheduler_worker.records.build_record import Actor, Gang, NewBuild, ProjectsBuild, RecordedBuild
from scheduler_worker.requests.request_delivery import LAST, OVERTAKES, RequestDelivery
from scheduler_worker.selection.explain import NoValidHost
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from scheduler_worker.upkeep.silence_rules import open_build
from tests.kit.claims import PlacementClaims
from tests.kit.sent import Sent
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts
from tests.unit.scheduler_worker.test_placing import CONFIG, RUN, Cluster, cluster, nowhere

# --- The effect of a delete, by the state of its build.


UUID = "00000000-0000-4000-8000-000000000001"


def recorded(state: BuildState, cell: str | None = None) -> RecordedBuild:
    return RecordedBuild(instance_uuid=UUID, project_id="p", state=state, sequence=2, cell=cell, claim_owner="mine")


# --- What the instance of a request that found no host holds already: it is asked, and the build goes there.


__all__ = ["cluster"]  # a fixture


def hold(
    cluster: Cluster,
    *requests: BuildRequest,
    on: int = 4,
    attempt: int = 1,
    claim_owner: str = "another",
    cell: str | None = None,
) -> None:
    """Their instances hold something on this host."""
    uuid = cluster.hosts.uuids[on] if on >= 0 else "gone"
    for one in requests:
        cluster.port.held[one.instance_uuid] = ConsumerRecord(
            consumer=one.instance_uuid,
            project_id=one.project_id,
            claim_owner=claim_owner,
            attempt=attempt,
            consumer_generation=2,
            allocations={uuid: {"VCPU": 1}},
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


@pytest.mark.parametrize("is_reported", [True, False])
async def test_what_no_host_can_take_is_looked_up_before_it_fails(cluster: Cluster, *, is_reported: bool) -> None:
    """A restore in a full cloud: what ran failed with `no_valid_host`, and its delete did not reach its cell."""
    policy_violated = nowhere(cluster)
    (failed,) = await cluster.place(policy_violated)
    assert isinstance(failed, NoValidHost) and cluster.claims == []
    assert cluster.port.asked == [policy_violated.instance_uuid]
    hold(cluster, policy_violated, on=4 if is_reported else -1)
    (found,) = await cluster.place(policy_violated)
    assert isinstance(found, HostClaimed if is_reported else ClaimUnlocatable)
    taken = [(one.owner, one.transfers_from, one.attempt, one.options[0].allocations) for one in cluster.claims]
    holding = cluster.port.held[policy_violated.instance_uuid].allocations
    assert taken == [(RUN, "another", 1, holding)], "a late Release of the other run releases nothing"
    hold(cluster, policy_violated, attempt=0)
    (foreign,) = await cluster.place(policy_violated)
    assert isinstance(foreign, HostSearchRefused) and foreign.code == CONSUMER_CONFLICT
    cluster.port.unavailable = True
    (unanswered,) = await cluster.place(policy_violated)
    assert isinstance(unanswered, PlacementUnavailable), "no answer is not no host"


async def test_a_boot_is_one_round_trip_and_what_found_no_host_is_looked_up_in_one_more(cluster: Cluster) -> None:
    requests = [cluster.hosts.request() for _ in range(3)]
    await cluster.place(*requests)
    assert [(claim.consumer, claim.owner) for claim in cluster.claims] == [(one.instance_uuid, RUN) for one in requests]
    assert cluster.port.asked == []
    await cluster.place(nowhere(cluster), nowhere(cluster))
    assert len(cluster.port.asked) == 2 and len(cluster.claims) == 3


async def test_a_redelivered_request_without_a_host_queries_whether_it_holds_one(cluster: Cluster) -> None:
    hosts = cluster.hosts
    for at, uuid in enumerate(hosts.uuids):
        hosts.replica.assume(f"full {at}", {uuid: {"VCPU": 16}})
    (nothing,) = await cluster.place(hosts.request())
    assert isinstance(nothing, NoValidHost) and cluster.claims == []
    request = hosts.request()
    hold(cluster, request, on=2, claim_owner=RUN)
    (placed,) = await cluster.place(request)
    assert isinstance(placed, HostClaimed) and placed.selections[0].host_uuid == hosts.uuids[2]
    assert cluster.claims == []


@pytest.mark.parametrize("policy", [GroupPolicy.ANTI_AFFINITY, GroupPolicy.AFFINITY])
async def test_a_member_whose_earlier_claim_has_the_last_host_is_recovered(policy: GroupPolicy) -> None:
    """It is counted among the others, so its own host may look full of them: its claim is asked for."""
    hosts = Hosts([{**PLENTY, "VCPU": 1}], config=CONFIG)
    cluster = Cluster(hosts, CONFIG)
    request = hosts.request(flavor="m1.tiny", server_group=ServerGroup(uuid=new_uuid(hosts.rng), policy=policy))
    hold(cluster, request, on=0, claim_owner=RUN)
    holding = {hosts.uuids[0]: {"VCPU": 1}}
    cluster.answer = lambda _: ClaimResult(outcome=ClaimOutcome.CLAIMED, consumer_generation=1, allocations=holding)

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
    over = ClaimResult(outcome=ClaimOutcome.OVER_QUOTA, reason="VCPU")
    hold(cluster, request, claim_owner=RUN, attempt=attempt)
    cluster.answer = lambda _: over
    (placed,) = await cluster.place(request)
    assert isinstance(placed, HostClaimed) and placed.attempt == attempt


async def test_what_is_held_on_a_host_that_nothing_reports_is_left_to_the_cell_that_placement_knows(
    cluster: Cluster,
) -> None:
    request = nowhere(cluster)
    hold(cluster, request, on=-1, claim_owner=RUN, cell="c7")
    (placed,) = await cluster.place(request)
    assert isinstance(placed, ClaimUnlocatable)
    assert (placed.cell, placed.host_uuid, placed.attempt) == ("c7", "gone", 1) and cluster.claims == []


async def test_what_cannot_be_taken_over_is_tried_again(cluster: Cluster) -> None:
    request = nowhere(cluster)
    hold(cluster, request)
    cluster.answer = lambda _: ClaimResult(outcome=ClaimOutcome.CONSUMER_CONFLICT)
    (placed,) = await cluster.place(request)
    assert isinstance(placed, PlacementUnavailable)


async def test_a_run_whose_record_was_made_anew_takes_nothing_from_the_run_after_it(cluster: Cluster) -> None:
    request = nowhere(cluster)
    hold(cluster, request, claim_owner="newer")
    cluster.on_record[request.instance_uuid] = "newer"
    (placed,) = await cluster.place(request)
    assert isinstance(placed, PlacementUnavailable) and cluster.claims == []


async def test_a_claim_of_a_run_whose_record_was_made_anew_is_given_to_that_record(cluster: Cluster) -> None:
    """The later run had read that the instance holds nothing, and ended without a host: nobody released that claim."""
    store, request = MemoryBuilds(MemoryBuildTable(SystemClock()).session()), cluster.hosts.request()
    store.publish_through(Sent())  # type: ignore[arg-type]
    uuid, project = request.instance_uuid, request.project_id
    anew = RecordedBuild(
        instance_uuid=uuid, project_id=project, state=BuildState.ACCEPTED, sequence=1, claim_owner="newer"
    )
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, build=anew)], 1.0)
    cluster.on_record[request.instance_uuid] = "newer"

    def claimed(claim: Claim) -> ClaimResult:
        hold(cluster, request, on=0, claim_owner=RUN)
        return cluster.claimed(claim)

    cluster.answer = claimed
    held = ClaimOwnership(cluster.port, cluster.hosts.table.last_cell_of, cluster.recorded_owners)
    dispatcher = Dispatcher(
        store, held, cluster.placer, cluster.hosts.selector, clock=SystemClock(), process="scheduler s0"
    )
    pending = PendingBuild(batch_index=0, request=request, digest=b"1", requested_at=1.0, taken_at=1.0, claim_owner=RUN)
    await dispatcher.dispatch([pending])
    assert [(one.owner, one.transfers_from) for one in cluster.claims] == [(RUN, None), ("newer", RUN)]


# --- what one delete of a batch waits for keeps no other delete from being carried out


ABSENT = "00000000-0000-4000-8000-000000000002"


async def test_a_delete_of_a_built_instance_goes_to_its_cell_while_placement_does_not_answer_for_another() -> None:
    store, sent, port = MemoryBuilds(MemoryBuildTable(SystemClock()).session()), Sent(), PlacementClaims()
    store.publish_through(sent)  # type: ignore[arg-type]
    build = replace(recorded(BuildState.ACTIVE, "c1"), sequence=12)
    request = BuildRequest(instance_uuid=UUID, project_id="p", flavor="f")
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, build=build)], 1.0)
        await unit.lock([UUID])

    port.unavailable = True
    deletes = [
        PendingDelete(
            batch_index=at,
            request=DeleteRequest(instance_uuid=uuid, project_id="p"),
            delivery=RequestDelivery(retries=OVERTAKES),
        )
        for at, uuid in enumerate((UUID, ABSENT))
    ]
    hosts = Hosts([PLENTY])
    engine = SchedulingEngine(
        store,
        port,
        hosts.selector,
        Cluster(hosts, CONFIG),
        clock=SystemClock(),
        rng=random.Random(7),
        config=hosts.config,
    )
    for _ in range(2):
        _, outcomes = await engine.process([], deletes)
        assert isinstance(outcomes[0], Done) and isinstance(outcomes[1], RetryWhenAvailable)
    assert [type(one.message) for _, batch in sent.rows for one in batch] == [CellDelete]
    async with store.unit() as unit:
        assert (await unit.lock([UUID]))[UUID].state is BuildState.DELETING


# --- deletes, a row for each condition: the outcome, the record and the messages


BUILD, OTHER, HOST = (f"{n}0000000-0000-4000-8000-000000000001" for n in "abc")
AUTHOR = Actor("me", 7.0)
ACCEPTED, SCHEDULED, ACTIVE = BuildState.ACCEPTED, BuildState.SCHEDULED, BuildState.ACTIVE
FAILED, REFUSED, DELETING, DELETED = BuildState.FAILED, BuildState.REFUSED, BuildState.DELETING, BuildState.DELETED
UNKNOWN, STRANDED = "instance.unknown", "claim.unlocatable"
RECORD = RecordedBuild(
    instance_uuid=BUILD, project_id="p", state=ACTIVE, sequence=9, attempt=2, code="x", reason="why", claim_owner="mine"
)
EARLY, LATE = RequestDelivery(retries=OVERTAKES - 1), RequestDelivery(retries=OVERTAKES)
STARTING = replace(LATE, awaits_hosts=True)
OVER = replace(LATE, is_late=lambda: True)
GONE = replace(OVER, has_requester=True)


def deleted(position: int = 4, delivery: RequestDelivery = LATE, **more: str) -> PendingDelete:
    request = DeleteRequest(**{"instance_uuid": BUILD, "project_id": "p", **more})
    return PendingDelete(batch_index=position, request=request, delivery=delivery)


def record(state: BuildState, cell: str | None = None, **more: Any) -> RecordedBuild:
    return replace(RECORD, state=state, cell=cell, **more)


def held(cell: str | None, project: str = "p", attempt: int = 1) -> dict[ProjectsBuild, ConsumerRecord]:
    one = ConsumerRecord(
        consumer=BUILD, project_id=project, attempt=attempt, consumer_generation=1, allocations={}, hosts=(), cell=cell
    )
    return {(BUILD, project): one}


def word(outcome: Outcome | None) -> str:
    match outcome:
        case None:
            return "none"
        case Done(reply=BuildAccepted(instance_uuid=uuid)):
            assert uuid == BUILD
            return "accepted"
        case Done(reply=Refusal(code=code)):
            return f"answered {code}"
        case Done(reply=None):
            return "done"
        case Retry(code=code):
            return f"again {code}"
    raise AssertionError(outcome)


def words(messages: Iterable[OutboxMessage]) -> list[str]:
    """Of each, its state and number, or that it is a delete for a cell, or a release."""
    found = []
    for one in messages:
        match one.message:
            case BuildEvent(instance_uuid=uuid, project_id="p", state=state, sequence=number, code=code):
                assert (one.bus, uuid) == (API, BUILD)
                found.append(f"{state.value} {number} {code}".strip())
            case CellDelete(instance_uuid=uuid, project_id="p", may_have_started=begun):
                assert uuid == BUILD
                found.append(f"{one.bus} deletes" + (" what was begun" if begun else ""))
            case ReleaseByOwner(owner="mine"):
                found.append("release")
            case other:
                raise AssertionError(other)
    return found


def attempts(messages: Iterable[OutboxMessage]) -> list[int]:
    """Of the deletes of what was begun: cells without its record release what these have claimed."""
    deletes = (one.message for one in messages if isinstance(one.message, CellDelete))
    return [one.attempt for one in deletes if one.may_have_started]


# --- of what is on record

Row = tuple[RecordedBuild, dict[ProjectsBuild, ConsumerRecord], str, RecordedBuild | None, list[str]]
C1, NOWHERE = held("c1"), held(None)
TAKEN = ["c1 deletes what was begun"]
ROWS: list[Row] = [
    (record(SCHEDULED, "c1"), {}, "accepted", record(DELETING, "c1"), ["c1 deletes"]),
    (record(ACTIVE, "c1"), {}, "accepted", record(DELETING, "c1"), TAKEN),
    (record(ACTIVE, "c1"), held("c2"), "accepted", record(DELETING, "c1"), TAKEN),
    (record(ACTIVE, "c1"), NOWHERE, "accepted", record(DELETING, "c1"), TAKEN),
    (record(DELETING, "c1"), {}, "accepted", None, []),
    (record(DELETED), {}, "accepted", None, []),
    (record(DELETED), C1, "accepted", None, []),
    (record(ACCEPTED), C1, "accepted", record(DELETING, "c1"), TAKEN),
    (record(FAILED), C1, "accepted", record(DELETING, "c1"), TAKEN),
    (record(FAILED), held("c1", attempt=3), "accepted", record(DELETING, "c1", attempt=3), TAKEN),
    (record(ACCEPTED), held("c1", "q"), "accepted", record(DELETED, sequence=4, terminal=True, attempt=1),
     ["deleted 4", "release"]),
    (record(ACCEPTED, attempt=0), {}, "accepted", record(DELETED, sequence=4, terminal=True, attempt=1),
     ["deleted 4", "release"]),
    (record(FAILED), {}, "accepted", record(DELETED, sequence=4, terminal=True), ["deleted 4"]),
    (record(REFUSED, attempt=0), {}, "accepted", record(DELETED, sequence=4, terminal=True, attempt=0), ["deleted 4"]),
    (record(FAILED, code=STRANDED), {}, "accepted", record(DELETED, sequence=4, terminal=True, code=STRANDED),
     ["deleted 4", "release"]),
    (record(FAILED), NOWHERE, f"answered {STRANDED}", record(FAILED), [f"refused 0 {STRANDED}"]),
    (record(ACCEPTED, attempt=0), NOWHERE, f"answered {STRANDED}",
     record(FAILED, sequence=3, terminal=True, attempt=1, code=STRANDED),
     [f"refused 0 {STRANDED}", f"failed 3 {STRANDED}"]),
]  # fmt: skip


@pytest.mark.parametrize(("build", "kept", "outcome", "after", "sent"), ROWS)
def test_a_delete_by_its_record_and_by_what_its_instance_holds(
    build: RecordedBuild,
    kept: dict[ProjectsBuild, ConsumerRecord],
    outcome: str,
    after: RecordedBuild | None,
    sent: list[str],
) -> None:
    planned = plan_deletes([deleted(4, LAST), deleted(5, LAST)], {BUILD: build}, AUTHOR, kept)
    assert {at: word(one) for at, one in planned.outcomes.items()} == {4: outcome, 5: outcome}
    assert (planned.accepted, planned.without_cell, planned.unknown) == ({BUILD}, [], [])
    assert [one.build for one in planned.updates] == (
        [] if after is None else [replace(after, reason=planned.updates[0].build.reason)]
    )
    assert [(line.at, line.actor) for one in planned.updates for line in one.timeline] == [(7.0, "me")] * (
        after is not None
    )
    assert words(planned.messages) == sent
    assert attempts(planned.messages) == [one.build.attempt for one in planned.updates if sent == TAKEN]
    unasked = plan_deletes([deleted(4, LAST), deleted(5, LAST)], {BUILD: build}, AUTHOR)
    if build.cell is None and build.state is not DELETED:
        assert [one.batch_index for one in unasked.without_cell] == [4, 5]
        assert (unasked.outcomes, unasked.updates, unasked.messages, unasked.accepted) == ({}, [], [], set())
    else:
        assert (unasked.without_cell, unasked.updates, unasked.messages) == ([], planned.updates, planned.messages)


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (record(ACTIVE, "c1"), "delete_requested"),
        (record(ACCEPTED), "deleted"),
        (record(FAILED), "deleted"),
        (record(FAILED, code=STRANDED), "delete_refused"),
        (record(ACCEPTED, code=STRANDED), "failed"),
    ],
)
def test_a_delete_has_its_line_in_the_timeline(build: RecordedBuild, line: str) -> None:
    kept = NOWHERE if build.code == STRANDED else {}
    (update,) = plan_deletes([deleted(delivery=LAST, by="alice")], {BUILD: build}, AUTHOR, kept).updates
    assert [(one.what, one.by) for one in update.timeline] == [(line, "alice")]


# --- of what is not on record, or of a project's own that is not


@pytest.mark.parametrize("build", [None, record(DELETED, code=UNKNOWN), record(ACTIVE, "c1", project_id="q")])
@pytest.mark.parametrize(
    ("delivery", "kept", "outcome", "left"),
    [
        (EARLY, {}, f"again {UNKNOWN}", ""),
        (EARLY, None, f"again {UNKNOWN}", ""),
        (LATE, None, f"again {UNKNOWN}", "unbuilt"),
        (LATE, {}, f"again {UNKNOWN}", "unknown"),
        (LATE, C1, f"again {UNKNOWN}", "unknown"),
        (LATE, held(None, "q"), f"again {UNKNOWN}", "unknown"),
        (LAST, NOWHERE, f"answered {STRANDED}", ""),
        (LATE, NOWHERE, f"again {STRANDED}", ""),
        (STARTING, C1, f"again {UNKNOWN}", "unknown"),
        (STARTING, held(None, "q"), f"again {UNKNOWN}", "unknown"),
        (STARTING, None, f"again {UNKNOWN}", "unbuilt"),
    ],
)
def test_a_delete_without_a_record(
    build: RecordedBuild | None,
    delivery: RequestDelivery,
    kept: dict[ProjectsBuild, ConsumerRecord] | None,
    outcome: str,
    left: str,
) -> None:
    pending = deleted(delivery=delivery)
    planned = plan_deletes([pending], {} if build is None else {BUILD: build}, AUTHOR, kept)
    assert word(planned.outcomes[4]) == outcome
    assert (planned.without_cell, planned.unknown) == ([pending] * (left == "unbuilt"), [pending] * (left == "unknown"))
    assert (planned.accepted, planned.updates) == (set(), [])
    assert words(planned.messages) == ([f"refused 0 {STRANDED}"] if outcome == f"answered {STRANDED}" else [])


@pytest.mark.parametrize("build", [record(FAILED), record(ACTIVE, "c1"), None])
def test_a_delete_waits_while_no_cell_is_known_of_what_is_held(build: RecordedBuild | None) -> None:
    """Seed 4830457: another scheduler, which knew the host already, was claiming for the build."""
    builds = {} if build is None else {BUILD: build}
    planned = plan_deletes([deleted()], builds, AUTHOR, NOWHERE)
    assert (word(planned.outcomes[4]), planned.updates, planned.messages) == (f"again {STRANDED}", [], [])


@pytest.mark.parametrize(
    ("build", "delivery", "sent"),
    [
        (None, OVER, ["refused 0 broker.expired"]),
        (record(ACTIVE, "c1"), OVER, ["refused 0 broker.expired"]),
        (record(ACTIVE, "c1"), GONE, []),
        (record(ACTIVE, "c1", project_id="q"), OVER, []),
        (record(ACTIVE, "c1", project_id="q", code=UNKNOWN), OVER, ["refused 0 broker.expired"]),
        (record(DELETING, "c1"), OVER, []),
        (record(DELETED), OVER, []),
    ],
)
def test_a_delete_whose_time_is_over_ends(
    build: RecordedBuild | None, delivery: RequestDelivery, sent: list[str]
) -> None:
    planned = plan_deletes([deleted(delivery=delivery)], {} if build is None else {BUILD: build}, AUTHOR, C1)
    assert (word(planned.outcomes[4]), words(planned.messages)) == ("done", sent)
    assert (planned.accepted, planned.updates, planned.unknown, planned.without_cell) == (set(), [], [], [])


# --- tombstones


def test_a_tombstone_is_the_record_of_a_build_that_was_deleted_before_it_came() -> None:
    first, other = deleted(), deleted(5, instance_uuid=OTHER)
    (grave,) = tombstones([first, first, other], [OTHER], AUTHOR)
    assert (grave.request.instance_uuid, grave.request.project_id, grave.build.digest) == (BUILD, "p", b"")
    assert grave.build == RecordedBuild(
        instance_uuid=BUILD, project_id="p", state=DELETED, sequence=4, terminal=True, code=UNKNOWN,
        reason=grave.build.reason,
    )  # fmt: skip
    assert [(line.at, line.what) for line in grave.timeline] == [(7.0, "refused")]


@pytest.mark.parametrize(
    ("build", "kept", "outcome", "sent"),
    [
        (record(DELETED, code=UNKNOWN), {}, f"answered {UNKNOWN}", [f"refused 4 {UNKNOWN}"]),
        (record(DELETED, code=UNKNOWN, attempt=0), C1, "accepted", TAKEN),
        (record(DELETED, code=UNKNOWN, attempt=0), held("c1", attempt=3), "accepted", TAKEN),
        (record(ACTIVE, project_id="q"), held("c1", attempt=3), f"answered {UNKNOWN}", TAKEN),
        (record(DELETED, code=UNKNOWN), held("c1", "q"), f"answered {UNKNOWN}", [f"refused 4 {UNKNOWN}"]),
        (record(DELETED, code=UNKNOWN), NOWHERE, f"answered {UNKNOWN}", [f"refused 4 {UNKNOWN}"]),
        (record(DELETED, project_id="q", code=UNKNOWN), C1, "accepted", TAKEN),
        (record(ACTIVE, project_id="q"), {}, f"answered {UNKNOWN}", []),
        (record(ACTIVE, project_id="q"), C1, f"answered {UNKNOWN}", TAKEN),
        (None, C1, "none", []),
    ],
)
def test_a_delete_of_an_unknown_instance_is_refused_unless_it_holds_something_which_its_cell_deletes(
    build: RecordedBuild | None, kept: dict[ProjectsBuild, ConsumerRecord], outcome: str, sent: list[str]
) -> None:
    """Nothing watched the delete of what an instance without a record holds: lost by its cell, it had no end."""
    answered = DeletePlan(outcomes={}, accepted=set(), updates=[], messages=[], unknown=[deleted()], without_cell=[])
    answer_unknown(answered, {} if build is None else {BUILD: build}, AUTHOR, kept)
    assert (word(answered.outcomes.get(4)), words(answered.messages)) == (outcome, sent)
    held_attempt = max((one.attempt for one in kept.values()), default=0)
    assert all(one >= held_attempt for one in attempts(answered.messages))
    assert {update.build.project_id for update in answered.updates} <= {"p"}
    awaited = [one for update in answered.updates if (one := open_build(update.build)) is not None]
    assert [(one.kind, one.cell) for one in awaited] == ([("delete", "c1")] if outcome == "accepted" else [])
    assert (BUILD in answered.accepted) == (outcome == "accepted")
