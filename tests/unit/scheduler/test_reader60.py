"""What a fresh reader of the scheduler found: decisions of which a second place knows less. Each fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from bus.consuming.outcome import Done, Received, Wait
from bus.contracts.base import Meta
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.cell import (
    CellBuild,
    CellBuildQuery,
    CellDelete,
)
from bus.contracts.placement import (
    ClaimAll,
    ClaimAllResult,
    ClaimOutcome,
    ClaimResult,
    ReleaseRun,
)
from bus.faults import Fault
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.admission import pending_build
from scheduler_worker.domain.builds import Gang, NewBuild, RecordedBuild, SinceBuild, effects
from scheduler_worker.domain.recorded_moves import MoveContext
from scheduler_worker.domain.requests import RETRIES, delivery_of
from scheduler_worker.domain.unanswered import messages_to_cell, open_build
from tests.unit.scheduler.test_deletes import hold, nowhere
from tests.unit.scheduler.test_placing import cluster
from tests.unit.scheduler.test_without_an_answer import Site, accepted, site

__all__ = ["cluster", "site"]  # fixtures


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
    site.cluster.hosts.give_up("c1")
    site.cluster.hosts.give_up("c2")
    site.handler._warmup._since_s = -1000.0
    (outcome,) = await site.handler([came])
    assert isinstance(outcome, Done)
    build = await site.build_of(request.instance_uuid)
    assert (build.state, build.code) == (BuildState.FAILED, "no_valid_host")
    assert len(site.emitted(ReleaseRun)) == 1, "the claim that is on its way is granted, and held for good"


# --- A gang of which enough have started before: only the members of this pass are counted.


async def test_a_member_that_is_placed_after_enough_of_its_gang_have_started_is_built(site: Site) -> None:
    """Two of three were dispatched, and the third was tried again alone, because its claim's host was not announced.
    Now it is: a build without a gang is built there. This one was only queried about, which begins nothing, as if one
    of three had a host; its cell ends it.
    """
    requests = [site.cluster.hosts.request() for _ in range(3)]
    gang = Gang(uuid=requests[0].instance_uuid, size=3, min_count=2)
    third = requests[2]
    record = RecordedBuild(
        instance_uuid=third.instance_uuid, project_id=third.project_id, state=BuildState.ACCEPTED, sequence=1,
        digest=b"1", run="mine",
    )  # fmt: skip
    begun = [
        replace(record, instance_uuid=one.instance_uuid, state=BuildState.SCHEDULED, sequence=2, cell="c1")
        for one in requests[:2]
    ]
    news = [NewBuild(request=one, build=two, gang=gang) for one, two in zip(requests, [*begun, record], strict=True)]
    async with site.store.unit() as unit:
        await unit.insert(news, 0.0)
    hold(site.cluster, third, run="mine")
    site.cluster.answer = lambda _: ClaimResult(outcome=ClaimOutcome.CONSUMER_CHANGED)
    site.cluster.port.submit_gangs = refused_gangs  # type: ignore[method-assign]
    await site.handler.resume({third.instance_uuid: 0})
    assert (await site.build_of(third.instance_uuid)).state is BuildState.SCHEDULED
    assert (len(site.emitted(CellBuild)), len(site.emitted(CellBuildQuery))) == (1, 0)


async def refused_gangs(gangs: Sequence[ClaimAll]) -> list[ClaimAllResult | Fault]:
    changed = ClaimResult(outcome=ClaimOutcome.CONSUMER_CHANGED)
    return [ClaimAllResult(results=(changed,) * len(one.claims)) for one in gangs]


# --- The command to delete: the copy that is sent first knows less than the one that is sent again.


def test_a_delete_names_the_stay_of_the_instance_as_its_repeat_does() -> None:
    """A cell that was set back to where the instance had left it learns by the stay that it has come back. The first
    command had none, so it answered with a departure that is no news, until a scheduler repeated the delete.
    """
    uuid = "00000000-0000-4000-8000-000000000001"
    build = RecordedBuild(
        instance_uuid=uuid, project_id="p", state=BuildState.DELETING, sequence=9, cell="c1",
        instance=SinceBuild(stay=3),
    )  # fmt: skip
    (sent,) = [one.message for one in effects(BuildState.ACTIVE, build, 1.0)]
    asked = open_build(build)
    assert asked is not None
    (again,) = messages_to_cell(asked, MoveContext(build=build), SchedulerConfig(), 1.0)
    assert isinstance(sent, CellDelete) and isinstance(again, CellDelete)
    assert (sent.stay, again.stay) == (3, 3)
