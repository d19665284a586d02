"""What a fresh reader of the scheduler found: decisions of which a second place knows less. Each fails."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.consuming.outcome import GIVEN_UP, Done, Received, Wait
from bus.contracts.base import Meta
from bus.contracts.build import BuildEvent, BuildRequest, BuildState
from bus.contracts.cell import CellBuildQuery
from bus.contracts.moves import CellMove, MoveKind, MoveRequest
from bus.contracts.placement import ReleaseRun
from scheduler_worker.domain.admission import pending_build
from scheduler_worker.domain.builds import Gang, NewBuild, RecordedBuild
from scheduler_worker.domain.recorded_moves import PendingMove
from scheduler_worker.domain.requests import LETTERS, RETRIES, RequestDelivery, delivery_of
from tests.unit.scheduler.test_deletes import hold, nowhere
from tests.unit.scheduler.test_placing import Cluster, cluster
from tests.unit.scheduler.test_without_an_answer import Site, accepted, site, taken

__all__ = ["cluster", "site"]  # fixtures


# --- Two moves of one batch with one request_id: the records of a batch are read by that alone.


async def test_two_moves_of_one_id_in_a_batch_are_each_judged_by_their_own_instance(site: Site) -> None:
    """The first was written with the records of the second's instance: its cell, its spec, its state. The second's
    instance stays busy with a request about another one, which never ends for it.
    """
    first, second = await site.runs("c1"), await site.runs("c2")
    request_id = new_uuid(site.cluster.hosts.rng)
    moves = [
        PendingMove(
            position=at,
            request=MoveRequest(request_id=request_id, instance_uuid=uuid, project_id="p", kind=MoveKind.STOP),
            taken_at=0.0,
            delivery=RequestDelivery(),
        )
        for at, uuid in enumerate((first, second))
    ]
    outcomes = await site.moves.process(moves)
    assert all(isinstance(one, Done) for one in outcomes.values())
    (command,) = [one for one in site.emitted(CellMove) if isinstance(one, CellMove)]
    async with site.store.operation() as unit:
        known = (await unit.known({request_id: first}))[request_id]
    assert known.move is not None
    assert (command.instance_uuid, known.move.instance_uuid, known.move.cell) == (first, first, "c1")
    assert (await site.build_of(first)).now.under_way == request_id
    assert (await site.build_of(second)).now.under_way is None, "and nothing would ever end it there"


# --- Members of a gang that are taken up from their records: how often is counted of the first one alone.


async def gang_of_two(site: Site, first_state: BuildState | None) -> tuple[BuildRequest, BuildRequest]:
    """first_state: None: the record of the first member has been purged."""
    first, second = (nowhere(site.cluster) for _ in range(2))
    gang = Gang(uuid=first.instance_uuid, size=2, min_count=1)
    record = RecordedBuild(
        instance_uuid=second.instance_uuid, project_id=second.project_id, state=BuildState.ACCEPTED, sequence=1,
        digest=b"1", run="mine",
    )  # fmt: skip
    news = [NewBuild(request=second, build=record, gang=gang)]
    if first_state is not None:
        ended = replace(record, instance_uuid=first.instance_uuid, state=first_state, sequence=4, terminal=True)
        news.append(NewBuild(request=first, build=ended, gang=gang))
    async with site.store.unit() as unit:
        await unit.insert(news, 0.0)
    hold(site.cluster, second, on=-1, run="mine")  # on a host of no known cell
    return first, second


async def test_a_later_member_of_a_gang_whose_first_has_ended_ends_when_it_was_tried_often_enough(site: Site) -> None:
    _, second = await gang_of_two(site, BuildState.DELETED)
    for tries in range(3 * RETRIES):
        assert await site.handler.resume({second.instance_uuid: tries}) == set()
    build = await site.build_of(second.instance_uuid)
    assert (build.state, build.code) == (BuildState.FAILED, "claim.stranded")


async def test_a_later_member_of_a_gang_whose_first_was_purged_is_taken_up_again(site: Site) -> None:
    _, second = await gang_of_two(site, None)
    for tries in range(3 * RETRIES):
        assert await site.handler.resume({second.instance_uuid: tries}) == set()
    build = await site.build_of(second.instance_uuid)
    assert (build.state, build.code) == (BuildState.FAILED, "claim.stranded")


# --- A build that is refused at once: it ends without a look at what its instance holds.


@pytest.mark.parametrize("why", ["its flavor was deleted", "it is old"])
async def test_a_build_that_is_refused_while_its_instance_holds_a_claim_is_left_to_the_cell_of_that(
    site: Site, why: str
) -> None:
    """Its record is lost, and its claim or its machine is not. A letter, an expired one, and one that no host can take
    look at that; a refusal did not: no query, no release, and the claim stays for good.
    """
    request = site.cluster.hosts.request(flavor="deleted.since" if why == "its flavor was deleted" else "m1.small")
    hold(site.cluster, request, cell="c2")
    sent_at = 1.0 if why == "it is old" else site.cluster.clock.time()
    came = Received(request, Meta(id="m", attempt=1, sent_at=sent_at), "api", "scheduler.requests", redelivered=True)
    (outcome,) = await site.handler([came])
    assert isinstance(outcome, Done)
    build = await site.build_of(request.instance_uuid)
    assert (build.state, build.cell) == (BuildState.SCHEDULED, "c2")
    assert len(site.emitted(CellBuildQuery)) == 1


async def test_a_redelivered_build_that_is_refused_has_what_its_first_delivery_may_have_claimed_released(
    site: Site,
) -> None:
    """The record of the first delivery was lost, and its claim is on its way. Every other end of a redelivered build
    has the claims of its run released, or fenced.
    """
    request = site.cluster.hosts.request(flavor="deleted.since")
    came = Received(request, Meta(id="m", attempt=1), "api", "scheduler.requests", redelivered=True)
    (outcome,) = await site.handler([came])
    assert isinstance(outcome, Done)
    assert (await site.build_of(request.instance_uuid)).terminal
    assert len(site.emitted(ReleaseRun)) == 1


# --- Builds that are taken up from their records while hosts may not be announced yet.


async def test_a_build_that_is_taken_up_from_its_record_waits_for_hosts_while_a_scheduler_warms_up(site: Site) -> None:
    """`awaits_hosts` is of a delivery; one from the record has none, so that "no host" was a guess."""
    request = await accepted(site)
    site.cluster.hosts.give_up("c1")
    site.cluster.hosts.give_up("c2")
    assert site.handler._warmup.is_on()
    await site.handler.resume({request.instance_uuid: 0})
    build = await site.build_of(request.instance_uuid)
    assert build.state is BuildState.ACCEPTED, build.code


# --- A request that several processes could not handle, and whose time is over too.


async def test_an_exhausted_build_ends_also_where_its_time_is_over(site: Site) -> None:
    """On record, and late: what had ended its schedulers was forgotten, and it was handled once more."""
    request = await accepted(site)
    came = Received(
        request, Meta(id="m"), "api", "scheduler.requests", redelivered=True, exhausted=True, left_s=lambda: -1.0
    )
    pending = pending_build(came, delivery_of(came), now=0.0, flavors=site.cluster.hosts.selector)
    going_on = (await site.engine.not_left({0: pending}))[0]
    assert not isinstance(going_on, Done)
    assert pending.delivery.why is not None
    assert going_on.delivery.why == pending.delivery.why  # type: ignore[union-attr]


# --- A message that has waited is no first delivery any more.


async def test_a_build_that_waited_for_placement_and_whose_record_is_lost_has_its_claim_released(site: Site) -> None:
    """The handler is called with it once more after a `Wait`, as if for the first time. Placement, whose database was
    away, carries the claim of the first call out after the end.
    """
    request = site.cluster.hosts.request()
    came = Received(request, Meta(id="m"), "api", "scheduler.requests")
    site.cluster.port.unavailable = True
    (outcome,) = await site.handler([came])
    assert isinstance(outcome, Wait) and site.cluster.claims
    table = site.store._table
    for rows in (table.records, table.recorded, table.requested):
        rows.pop(request.instance_uuid)  # the database crashed before its commit was on disk
    site.cluster.port.unavailable = False
    for at in range(6):
        site.cluster.hosts.book.apply([])
    site.cluster.hosts.give_up("c1")
    site.cluster.hosts.give_up("c2")
    site.handler._warmup._since_s = -1000.0
    (outcome,) = await site.handler([came])
    assert isinstance(outcome, Done)
    build = await site.build_of(request.instance_uuid)
    assert (build.state, build.code) == (BuildState.FAILED, "no_valid_host")
    assert len(site.emitted(ReleaseRun)) == 1, "the claim that is on its way is granted, and held for good"
