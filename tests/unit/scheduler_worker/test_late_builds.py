"""A build that has no time left is not begun, whatever way it came; one that no queue has ends if it crashes."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from msgspec.structs import replace

from bus.consuming.outcome import DEAD_LETTERED, EXPIRED, Done, Outcome, Received, Retry, RetryWhenAvailable
from bus.contracts.actions import ActionKind, ActionState
from bus.contracts.base import Meta, Refusal
from bus.contracts.build import BuildRequest, BuildState, member_uuids
from bus.contracts.cell import CellBuildQuery
from bus.contracts.placement import ClaimOutcome, ClaimResult, ReleaseByOwner
from bus.faults import BrokenInvariant, Transient
from scheduler_worker.build.build_engine import SchedulingEngine
from scheduler_worker.build.pending_build import PendingBuild, pending_build
from scheduler_worker.fleet.host_listener import Warmup
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.records.action_record import RecordedAction
from scheduler_worker.records.build_record import NewBuild, RecordedBuild
from scheduler_worker.request_handler import RequestHandler
from scheduler_worker.requests.request_delivery import MAX_RETRIES, classify_delivery
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from scheduler_worker.upkeep import silence_rules as domain
from scheduler_worker.upkeep import silent_requests as unanswered
from scheduler_worker.upkeep.silent_requests import SilentRequests
from tests.kit.sent import Sent
from tests.unit.scheduler_worker.test_deletes import hold
from tests.unit.scheduler_worker.test_moves import wait_for_backlog
from tests.unit.scheduler_worker.test_placing import Cluster, cluster
from tests.unit.scheduler_worker.test_without_an_answer import Site, accepted, site

__all__ = ["cluster", "site"]  # fixtures


def engine_of(cluster: Cluster) -> SchedulingEngine:
    store = MemoryBuilds(MemoryBuildTable(cluster.clock).session())
    store.publish_through(Sent())  # type: ignore[arg-type]
    return SchedulingEngine(
        store,
        cluster.port,
        cluster.hosts.selector,
        cluster,
        clock=cluster.clock,
        rng=random.Random(7),
        config=cluster.hosts.config,
    )


def taken(cluster: Cluster, request: BuildRequest, *, remaining_s: float = -1.0, waits: bool = False) -> PendingBuild:
    """A request that its queue has delivered again, and that is no letter."""
    meta = Meta(id="m", retries=1, reply_to="client.reply.x" if waits else None)
    received = Received(request, meta, "api", "scheduler.requests", redelivered=True, remaining_s=lambda: remaining_s)
    return pending_build(received, classify_delivery(received), now=0.0, config=cluster.hosts.selector.config)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_build_whose_time_is_over_ends_as_a_move_does(cluster: Cluster, *, waits: bool) -> None:
    """It was built, as it was no letter; the move of the same batch ended."""
    engine = engine_of(cluster)
    late, in_time = cluster.hosts.request(), cluster.hosts.request()
    came = [taken(cluster, late, waits=waits), taken(cluster, in_time, remaining_s=9.0, waits=waits)]
    assert [one.delivery.is_late() for one in came] == [True, False]
    ended = (await engine.drop_abandoned({0: came[0]}))[0]
    if waits:
        assert ended == Done(), "its requester may request it again"
    else:
        assert isinstance(ended, PendingBuild) and ended.delivery.refusal is not None
        assert ended.delivery.refusal.code == EXPIRED


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_a_build_whose_time_is_over_goes_on_where_it_was_begun(cluster: Cluster, *, is_recorded: bool) -> None:
    engine, request = engine_of(cluster), cluster.hosts.request()
    if is_recorded:
        await engine.process([taken(cluster, request, remaining_s=9.0)], ())
    else:
        hold(cluster, request)
    going_on = (await engine.drop_abandoned({7: taken(cluster, request)}))[7]
    assert isinstance(going_on, PendingBuild) and going_on.delivery.refusal is None and not going_on.delivery.is_late()


class Broken:
    """An engine whose replica has lost its order, or that crashes: it can only end what it is given."""

    def __init__(self, accepted: PendingBuild, fault: Exception) -> None:
        self._accepted, self._fault = accepted, fault
        self.ended: list[str] = []

    async def unfinished_builds(self, instances: Collection[str]) -> list[list[PendingBuild]]:
        return [[self._accepted]]

    async def process(
        self, builds: Sequence[PendingBuild], _deletes: object
    ) -> tuple[dict[int, Outcome], dict[int, Outcome]]:
        if any(one.delivery.refusal is None for one in builds):
            raise self._fault
        self.ended += [one.delivery.refusal.code for one in builds if one.delivery.refusal is not None]
        return dict.fromkeys(range(len(builds)), Done()), {}


@pytest.mark.parametrize("fault", [BrokenInvariant("broken"), RuntimeError("planted")], ids=["broken", "crashed"])
async def test_a_build_that_no_queue_has_ends_and_its_broken_invariant_stops_the_process(
    cluster: Cluster, fault: Exception
) -> None:
    """The rule stood twice; where builds are taken up again, a broken invariant was passed over."""
    engine = Broken(taken(cluster, cluster.hosts.request()), fault)
    handler = RequestHandler(
        engine,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        cluster.hosts.selector,
        clock=cluster.clock,
        config=cluster.hosts.config,
        warmup=Warmup(cluster.hosts.selector, clock=cluster.clock),
        wait_for_backlog=wait_for_backlog,
    )
    with pytest.raises(BrokenInvariant) if isinstance(fault, BrokenInvariant) else nullcontext():
        await handler.resume({"any": 0})
    assert engine.ended == [DEAD_LETTERED]


class Stalling:
    """An engine whose placement does not answer about the first of two builds."""

    def __init__(self, *builds: PendingBuild) -> None:
        self._builds = builds
        self.processed: list[str] = []

    async def unfinished_builds(self, instances: Collection[str]) -> list[list[PendingBuild]]:
        return [[one] for one in self._builds]

    async def process(
        self, builds: Sequence[PendingBuild], _deletes: object
    ) -> tuple[dict[int, Outcome], dict[int, Outcome]]:
        if builds[0].instance_uuid == self._builds[0].instance_uuid:
            return dict.fromkeys(range(len(builds)), RetryWhenAvailable("placement.unavailable")), {}
        self.processed += [one.instance_uuid for one in builds]
        return dict.fromkeys(range(len(builds)), Done()), {}


async def test_a_build_that_waits_for_placement_holds_up_no_other_and_uses_up_no_try(cluster: Cluster) -> None:
    """It ended the pass, and all its builds counted as tried: after an outage the first real try was the last."""
    first, second = (taken(cluster, cluster.hosts.request()) for _ in range(2))
    engine = Stalling(first, second)
    handler = RequestHandler(
        engine,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        cluster.hosts.selector,
        clock=cluster.clock,
        config=cluster.hosts.config,
        warmup=Warmup(cluster.hosts.selector, clock=cluster.clock),
        wait_for_backlog=wait_for_backlog,
    )
    assert await handler.resume({first.instance_uuid: 0, second.instance_uuid: 0}) == {first.instance_uuid}
    assert engine.processed == [second.instance_uuid]


async def test_a_build_that_waited_is_taken_up_again_as_if_it_had_not_been_tried(cluster: Cluster) -> None:
    store = MemoryBuilds(MemoryBuildTable(cluster.clock).session())
    store.publish_through(Sent())  # type: ignore[arg-type]
    request, asked = cluster.hosts.request(), list[dict[str, int]]()
    record = RecordedBuild(instance_uuid=request.instance_uuid, project_id="p", state=BuildState.ACCEPTED, sequence=1)
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, build=record)], 0.0)

    async def resume(instances: Mapping[str, int]) -> set[str]:
        asked.append(dict(instances))
        return set(instances) if len(asked) < 3 else set()

    looks = SilentRequests(
        store, {}, lambda: cluster.hosts.config, clock=cluster.clock, rng=random.Random(1), after_s=0.0, resume=resume
    )
    for _ in range(4):
        await looks.look()
    assert [one[request.instance_uuid] for one in asked if one] == [0, 0, 0, 1]


# --- however many requests are open, each comes to its turn


async def none_is_accepted(instances: Mapping[str, int]) -> set[str]:
    return set()


def uuid_of(n: int) -> str:
    return f"00000000-0000-4000-8000-{n:012d}"


def moved(n: int, cell: str) -> RecordedAction:
    return RecordedAction(
        request_id=uuid_of(n), instance_uuid=uuid_of(n), project_id="p", kind=ActionKind.MIGRATE, digest=b"",
        state=ActionState.SCHEDULED, sequence=2, cell=cell,
    )  # fmt: skip


async def looking_at(cluster: Cluster, actions: Sequence[RecordedAction], **more: Any) -> SilentRequests:
    store = MemoryBuilds(MemoryBuildTable(cluster.clock).session())
    store.publish_through(Sent())  # type: ignore[arg-type]
    async with store.operation() as unit:
        await unit.insert_actions(actions, 0.0)
    known: dict[str, Any] = {"after_s": 0.0, "resume": none_is_accepted, **more}
    return SilentRequests(store, {}, lambda: cluster.hosts.config, clock=cluster.clock, rng=random.Random(1), **known)


async def asked_about(looks: SilentRequests, passes: int) -> set[str]:
    return {one.request_id for _ in range(passes) for one in (await looks.look()).query}


async def test_old_moves_of_a_dead_cell_do_not_starve_those_of_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass began at the first, and 10,000 open ones of a dead cell were all that was looked at."""
    monkeypatch.setattr(unanswered, "MAX_READ", 4)
    monkeypatch.setattr(unanswered, "PAGE", 2)
    monkeypatch.setattr(domain, "MAX_WATCHED", 4)
    monkeypatch.setattr(unanswered, "MAX_WATCHED", 4)
    monkeypatch.setattr(domain, "MAX_QUERIES", 2)
    looks = await looking_at(cluster, [*(moved(n, "dead") for n in range(1, 12)), *(moved(n, "c2") for n in (98, 99))])
    assert await asked_about(looks, 6) > {uuid_of(98), uuid_of(99)}
    assert len(await asked_about(looks, 200)) == 13, "and each of the dead cell comes to its turn"


async def test_what_is_open_no_more_is_watched_no_more(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unanswered, "MAX_READ", 2)
    monkeypatch.setattr(unanswered, "PAGE", 2)
    actions = [moved(n, "c1") for n in range(1, 6)]
    looks = await looking_at(cluster, actions)
    for _ in range(3):
        found = await looks.look()
    assert len(found.watched) == 5
    async with looks._store.operation() as unit:
        await unit.update_actions([replace(one, terminal=True) for one in actions[1:]], 1.0)
    for _ in range(3):
        found = await looks.look()
    assert set(found.watched) == {(actions[0].request_id, actions[0].instance_uuid)} and looks.cells == {"c1"}


async def test_a_page_of_moves_is_read_again_where_that_of_the_builds_failed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unanswered, "MAX_READ", 2)
    monkeypatch.setattr(unanswered, "PAGE", 2)
    looks = await looking_at(cluster, [moved(n, "c1") for n in range(1, 6)])
    builds = looks._open_builds

    async def away() -> list[Any]:
        raise Transient("away")

    monkeypatch.setattr(looks, "_open_builds", away)
    with pytest.raises(Transient):
        await looks.look()
    monkeypatch.setattr(looks, "_open_builds", builds)
    assert {one for _, one in (await looks.look()).watched} == {uuid_of(1), uuid_of(2)}


async def test_builds_that_no_cell_has_come_to_their_turn_however_many_they_are(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(domain, "MAX_WATCHED", 4)
    monkeypatch.setattr(unanswered, "MAX_WATCHED", 4)
    resumed: set[str] = set()

    async def resume(instances: Mapping[str, int]) -> set[str]:
        resumed.update(instances)
        return set()

    looks = await looking_at(cluster, [], resume=resume)
    request = cluster.hosts.request()
    builds = [
        RecordedBuild(instance_uuid=uuid_of(n), project_id="p", state=BuildState.ACCEPTED, sequence=1)
        for n in range(1, 12)
    ]
    async with looks._store.unit() as unit:
        news = [replace(request, instance_uuid=one.instance_uuid) for one in builds]
        await unit.insert([NewBuild(request=new, build=one) for new, one in zip(news, builds, strict=True)], 0.0)
    for _ in range(40):
        await looks.look()
    assert len(resumed) == 11


# --- A build that is refused at once: it ends without a look at what its instance holds.


@pytest.mark.parametrize("refusal", ["its flavor was deleted", "it is old"])
async def test_a_build_that_is_refused_while_its_instance_holds_a_claim_is_left_to_the_cell_of_that(
    site: Site, refusal: str
) -> None:
    """Its record is lost, and its claim or its machine is not. A letter, an expired one, and one that no host can take
    look at that; a refusal did not: no query, no release, and the claim stays for good.
    """
    site.handler._warmup._since_s = -1000.0  # while it is on, it is retried
    request = site.cluster.hosts.request(flavor="deleted.since" if refusal == "its flavor was deleted" else "m1.small")
    hold(site.cluster, request, cell="c2")
    sent_at = 1.0 if refusal == "it is old" else site.cluster.clock.time()
    came = Received(request, Meta(id="m", retries=1, sent_at=sent_at), "api", "scheduler.requests", redelivered=True)
    (outcome,) = await site.handler([came])
    assert isinstance(outcome, Done)
    build = await site.build_of(request.instance_uuid)
    assert (build.state, build.cell) == (BuildState.SCHEDULED, "c2")
    assert len(site.emitted(CellBuildQuery)) == 1


async def test_a_redelivered_build_that_is_refused_has_what_its_first_delivery_may_have_claimed_released(
    site: Site,
) -> None:
    """The record of the first delivery was lost, and its claim is on its way. Every other end of a redelivered build
    has the claims of its run released, or their attempt ended.
    """
    request = site.cluster.hosts.request(flavor="deleted.since")
    came = Received(request, Meta(id="m", retries=1), "api", "scheduler.requests", redelivered=True)
    (outcome,) = await site.handler([came])
    assert isinstance(outcome, Done)
    assert (await site.build_of(request.instance_uuid)).terminal
    assert len(site.emitted(ReleaseByOwner)) == 1


@pytest.mark.parametrize("count", [1, 2])
async def test_a_refused_build_costs_no_question_where_no_delivery_of_it_was_before(site: Site, count: int) -> None:
    """And where one was, it waits for the answer, of all its members."""
    site.cluster.port.unavailable = True
    first, later = (site.cluster.hosts.request(flavor="deleted.since", count=count) for _ in range(2))
    came = [
        Received(first, Meta(id="m1"), "api", "scheduler.requests"),
        Received(later, Meta(id="m2"), "api", "scheduler.requests", redelivered=True),
    ]
    done, waiting = await site.handler(came)
    assert isinstance(done, Done) and isinstance(done.reply, Refusal) and done.reply.code == "flavor.unknown"
    assert isinstance(waiting, RetryWhenAvailable) and site.emitted(ReleaseByOwner) == []
    site.cluster.port.unavailable = False
    (done,) = await site.handler(came[1:])
    assert isinstance(done, Done) and isinstance(done.reply, Refusal) and done.reply.code == "flavor.unknown"
    for one in (first, later):
        build = await site.build_of(one.instance_uuid)
        assert (build.state, build.code) == (BuildState.REFUSED, "flavor.unknown")
    released = [one.consumer for one in site.emitted(ReleaseByOwner) if isinstance(one, ReleaseByOwner)]
    assert sorted(released) == sorted(member_uuids(later))


@pytest.mark.parametrize("refusal", ["it is refused", "its time is over"])
async def test_a_build_of_which_placement_refuses_to_tell_what_it_holds_releases_nothing(
    site: Site, refusal: str
) -> None:
    """Of one whose time was over the handler crashed, and with its dead letter once more: it had no end."""
    site.handler._warmup._since_s = -1000.0
    site.cluster.port.refused = "request.invalid"
    site.cluster.answer = lambda _: ClaimResult(outcome=ClaimOutcome.CONSUMER_CONFLICT)
    is_refused = refusal == "it is refused"
    request = site.cluster.hosts.request(flavor="deleted.since" if is_refused else "m1.small")
    for attempt, code in ((1, "claim.unlocatable"), (MAX_RETRIES, None)):
        meta = Meta(id="m", retries=attempt)
        came = Received(request, meta, "api", "scheduler.requests", remaining_s=lambda: 1.0 if is_refused else -1.0)
        (outcome,) = await site.handler([came])
        assert outcome.code == code if isinstance(outcome, Retry) else code is None
        assert (await site.build_of(request.instance_uuid)).state is BuildState.ACCEPTED
    await site.handler.resume({request.instance_uuid: MAX_RETRIES})
    build = await site.build_of(request.instance_uuid)
    assert (build.state, build.code, site.emitted(ReleaseByOwner)) == (BuildState.FAILED, "claim.unlocatable", [])


# --- A request that several processes could not handle, and whose time is over too.


async def test_an_exhausted_build_ends_also_where_its_time_is_over(site: Site) -> None:
    """On record, and late: what had ended its schedulers was forgotten, and it was handled once more."""
    request = await accepted(site)
    came = Received(
        request,
        Meta(id="m"),
        "api",
        "scheduler.requests",
        redelivered=True,
        at_delivery_limit=True,
        remaining_s=lambda: -1.0,
    )
    pending = pending_build(came, classify_delivery(came), now=0.0, config=site.cluster.hosts.selector.config)
    going_on = (await site.engine.drop_abandoned({0: pending}))[0]
    assert not isinstance(going_on, Done)
    assert pending.delivery.refusal is not None
    assert going_on.delivery.refusal == pending.delivery.refusal  # type: ignore[union-attr]


# --- A message that has waited is no first delivery any more.


async def test_a_build_that_waited_for_placement_and_whose_record_is_lost_has_its_claim_released(site: Site) -> None:
    """The consumer calls the handler with it once more after a `Wait`. Placement, whose database was away, carries the
    claim of the first call out after the end.
    """
    request = site.cluster.hosts.request()
    came = Received(request, Meta(id="m"), "api", "scheduler.requests")
    site.cluster.port.unavailable = True
    (outcome,) = await site.handler([came])
    assert isinstance(outcome, RetryWhenAvailable) and site.cluster.claims
    table = site.store._table
    for rows in (table.records, table.recorded, table.requested):
        rows.pop(request.instance_uuid)  # the database crashed before its commit was on disk
    site.cluster.port.unavailable = False
    site.cluster.hosts.give_up("c1")
    site.cluster.hosts.give_up("c2")
    site.handler._warmup._since_s = -1000.0
    (outcome,) = await site.handler([replace(came, redelivered=True)])
    assert isinstance(outcome, Done)
    build = await site.build_of(request.instance_uuid)
    assert (build.state, build.code) == (BuildState.FAILED, "no_valid_host")
    assert len(site.emitted(ReleaseByOwner)) == 1, "the claim that is on its way is granted, and held for good"


# --- Builds that are taken up from their records while hosts may not be reported yet.


async def test_a_build_that_is_taken_up_from_its_record_waits_for_hosts_while_a_scheduler_warms_up(site: Site) -> None:
    """`awaits_hosts` is of a delivery; one from the record has none, so that "no host" was a guess."""
    request = await accepted(site)
    site.cluster.hosts.selector.table = HostTable()  # nothing is reported yet
    for since_s, state in ((None, BuildState.ACCEPTED), (-1000.0, BuildState.FAILED)):
        site.handler._warmup._since_s = since_s
        await site.handler.resume({request.instance_uuid: 0})
        assert (await site.build_of(request.instance_uuid)).state is state
