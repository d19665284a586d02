"""Requests without an answer, and the way of each request through a scheduler."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.consuming.outcome import DEAD_LETTERED, EXPIRED, Done, Outcome, Received, RetryWhenAvailable
from bus.contracts.actions import ActionEvent, ActionKind, ActionRequest, ActionState, CellAction
from bus.contracts.base import Meta, Refusal
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.cell import CellBuild, CellBuildQuery
from bus.contracts.objects import FenceRecord, HostDecision, ObjectKind
from bus.contracts.operations import AdminState
from bus.contracts.placement import Claim, ClaimOutcome, ClaimResult, LocatePage, LocateRequest, ReleaseByOwner
from bus.faults import Fault, RequestTimeout
from scheduler_worker.action.action_engine import ActionEngine
from scheduler_worker.action.destination import DestinationChooser
from scheduler_worker.action.pending_action import PendingAction
from scheduler_worker.build.build_engine import SchedulingEngine
from scheduler_worker.build.host_search import HostClaimed, HostSearchRequest, HostSearchResult
from scheduler_worker.build.pending_build import PendingBuild, pending_build
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.fleet.host_listener import Warmup
from scheduler_worker.objects.consistency import changed_object
from scheduler_worker.objects.object_registry import ObjectRegistry
from scheduler_worker.records.build_record import BuildUpdate, NewBuild, RecordedBuild
from scheduler_worker.records.object_records import ChangeActor
from scheduler_worker.request_handler import RequestHandler
from scheduler_worker.requests.request_delivery import DEAD_LETTERS, LAST, RequestDelivery
from scheduler_worker.selection.flavor import parse
from scheduler_worker.selection.selector import Selector
from scheduler_worker.selection.selector_config import SelectorConfig
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent
from tests.kit.turns import Turns
from tests.kit.virtual_time import on_virtual_time
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts
from tests.unit.scheduler_worker.test_deletes import hold, nowhere
from tests.unit.scheduler_worker.test_moves import wait_for_backlog
from tests.unit.scheduler_worker.test_placing import Cluster, cluster

# --- what placement does not answer about waits, alone; what it refuses for good ends. Neither holds up its batch


__all__ = ["cluster"]  # a fixture

REFUSED = "request.invalid"
FIRST = RequestDelivery()


class Site:
    """A scheduler's engines on one memory store, beside the hosts and the placement of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.sent = cluster, Sent()
        self.store = MemoryBuilds(MemoryBuildTable(cluster.clock).session())
        self.store.publish_through(self.sent)  # type: ignore[arg-type]
        selector = cluster.hosts.selector
        more = {"clock": cluster.clock, "rng": random.Random(7)}
        self.engine = SchedulingEngine(
            self.store,
            cluster.port,
            selector,
            cluster,
            config=cluster.hosts.config,
            **more,  # type: ignore[arg-type]
        )
        config = cluster.hosts.config
        self.registry = ObjectRegistry(self.store, selector, config, clock=cluster.clock, cells=("c1", "c2"))
        more["reload"] = self.registry.reload
        destinations = DestinationChooser(cluster.port, selector, cluster, **more)  # type: ignore[arg-type]
        self.moves = ActionEngine(self.store, selector, destinations, clock=cluster.clock)
        self.handler = RequestHandler(
            self.engine,
            self.moves,
            selector,
            clock=cluster.clock,
            config=cluster.hosts.config,
            warmup=Warmup(selector, clock=cluster.clock),
            wait_for_backlog=wait_for_backlog,
        )

    async def process(self, *builds: PendingBuild) -> list[Outcome]:
        placed = [replace(one, batch_index=at) for at, one in enumerate(builds)]
        outcomes, _ = await self.engine.process(placed, ())
        return [outcomes[at] for at in range(len(builds))]

    async def build_of(self, uuid: str) -> RecordedBuild:
        async with self.store.unit() as unit:
            return (await unit.read([uuid]))[uuid]

    async def runs(self, cell: str = "c1") -> str:
        """An instance that is active."""
        request = self.cluster.hosts.request()
        build = RecordedBuild(
            instance_uuid=request.instance_uuid,
            project_id="p",
            state=BuildState.ACTIVE,
            sequence=9,
            terminal=True,
            cell=cell,
            host="h0",
        )
        async with self.store.unit() as unit:
            await unit.insert([NewBuild(request=replace(request, project_id="p"), build=build)], 1.0)
        return request.instance_uuid

    def emitted(self, kind: type) -> list[object]:
        return [one.message for _, rows in self.sent.rows for one in rows if isinstance(one.message, kind)]


@pytest.fixture
def site(cluster: Cluster) -> Site:
    return Site(cluster)


def taken(request: BuildRequest, delivery: RequestDelivery = FIRST) -> PendingBuild:
    return PendingBuild(
        batch_index=0,
        request=request,
        digest=b"1",
        requested_at=0.0,
        taken_at=0.0,
        delivery=delivery,
        claim_owner="mine",
    )


# --- Builds. It was a fault of the whole batch, and one that placement refuses for good was one without end.


async def test_a_build_that_placement_does_not_answer_about_waits_and_the_others_end(site: Site) -> None:
    policy_violated, fits = nowhere(site.cluster), site.cluster.hosts.request()
    site.cluster.port.unavailable = True
    waiting, _ = await site.process(taken(policy_violated), taken(fits))
    assert isinstance(waiting, RetryWhenAvailable)
    site.cluster.port.unavailable = False
    for _ in range(2):
        ended, done = await site.process(taken(policy_violated), taken(fits))
        assert isinstance(ended, Done) and isinstance(done, Done)
    assert (await site.build_of(policy_violated.instance_uuid)).code == "no_valid_host"


async def test_a_build_whose_host_is_reported_after_the_last_retry_goes_to_its_cell(site: Site) -> None:
    """It failed 26 s after it was sent, and its machine ran on: the claim was left to a delete or the audit."""
    request = site.cluster.hosts.request()
    site.cluster.answer = lambda _: ClaimResult(outcome=ClaimOutcome.CONSUMER_CONFLICT)
    hold(site.cluster, request, on=-1, claim_owner="mine")
    (left,) = await site.process(taken(request, LAST))
    assert isinstance(left, Done) and (await site.build_of(request.instance_uuid)).state is BuildState.ACCEPTED
    hold(site.cluster, request, claim_owner="mine")
    assert await site.handler.resume({request.instance_uuid: 0}) == set()
    build = await site.build_of(request.instance_uuid)
    assert (build.state, build.host_uuid) == (BuildState.SCHEDULED, site.cluster.hosts.uuids[4])
    assert len(site.emitted(CellBuild)) == 1


async def test_a_claim_that_changes_while_it_is_taken_over_holds_up_no_other_build(site: Site) -> None:
    site.cluster.answer = lambda claim: (
        ClaimResult(outcome=ClaimOutcome.CONSUMER_CONFLICT) if claim.transfers_from else site.cluster.claimed(claim)
    )
    changing, steady = nowhere(site.cluster), nowhere(site.cluster)
    hold(site.cluster, changing)
    waiting, ended = await site.process(taken(changing), taken(steady))
    assert isinstance(waiting, RetryWhenAvailable) and isinstance(ended, Done)
    assert (await site.build_of(steady.instance_uuid)).code == "no_valid_host"


@pytest.mark.parametrize("dead_letter_code", [DEAD_LETTERED, EXPIRED])
async def test_a_dead_letter_whose_record_is_lost_is_left_to_the_cell_of_what_its_instance_holds(
    site: Site, dead_letter_code: str
) -> None:
    """One that a worker had given up ended as failed, and its machine ran."""
    request = nowhere(site.cluster)
    hold(site.cluster, request, cell="c2")
    dead_letter = Received(request, Meta(id="m"), "api", DEAD_LETTERS, dead_letter_code=dead_letter_code)
    (outcome,) = await site.handler([dead_letter])
    build = await site.build_of(request.instance_uuid)
    assert isinstance(outcome, Done) and (build.state, build.cell) == (BuildState.SCHEDULED, "c2")


async def test_a_dead_letter_whose_instance_holds_nothing_ends(site: Site) -> None:
    request = site.cluster.hosts.request()
    (outcome,) = await site.handler(
        [Received(request, Meta(id="m"), "api", DEAD_LETTERS, dead_letter_code=DEAD_LETTERED)]
    )
    build = await site.build_of(request.instance_uuid)
    assert isinstance(outcome, Done) and (build.state, build.code) == (BuildState.FAILED, DEAD_LETTERED)
    assert site.emitted(CellBuildQuery) == []


async def accepted(site: Site) -> BuildRequest:
    """One that is on record, and that no message carries on."""
    request, selector = site.cluster.hosts.request(), site.cluster.hosts.selector
    received = Received(request, Meta(id="m"), "api", "q")
    pending = pending_build(received, RequestDelivery(), now=0.0, config=selector.config)
    build = RecordedBuild(
        instance_uuid=request.instance_uuid, project_id="p", state=BuildState.ACCEPTED, sequence=1, claim_owner="r"
    )
    async with site.store.unit() as unit:
        await unit.insert([NewBuild(request=request, build=replace(build, digest=pending.digest))], 0.0)
    return request


@pytest.mark.parametrize("ended", [False, True], ids=["it ends it", "another scheduler ends it meanwhile"])
async def test_a_message_that_goes_on_with_the_record_of_another_has_its_own_run_released_with_it(
    site: Site, *, ended: bool
) -> None:
    """The record of its run was lost, and a client's repeat had made another, which was open when the message came
    again. The claim of the lost one was carried out after the end, and held its host for good.
    """
    request = nowhere(site.cluster)
    pending = taken(request)
    build = RecordedBuild(
        instance_uuid=request.instance_uuid,
        project_id="p",
        state=BuildState.ACCEPTED,
        sequence=1,
        claim_owner="another",
    )
    async with site.store.unit() as unit:
        await unit.insert([NewBuild(request=request, build=replace(build, digest=pending.digest))], 0.0)
    if ended:
        placed = site.engine._dispatcher._placer.place

        async def place(requests: Sequence[HostSearchRequest]) -> list[HostSearchResult]:
            results = await placed(requests)
            async with site.store.unit() as unit:
                await unit.lock([request.instance_uuid])
                over = replace(build, state=BuildState.FAILED, sequence=3, terminal=True)
                await unit.update([BuildUpdate(build=over)], 1.0)
            return results

        site.engine._dispatcher._placer.place = place  # type: ignore[method-assign]
    (outcome,) = await site.process(pending)
    assert isinstance(outcome, Done)
    released = site.emitted(ReleaseByOwner)
    assert {one.owner for one in released if isinstance(one, ReleaseByOwner)} == {"another", "mine"}


@on_virtual_time
async def test_builds_that_are_taken_up_again_wait_for_placement_together() -> None:
    """What has had no event from a cell was not queried about before all of them had waited, one after the other."""
    site, silent_s, loop = with_hosts(*[PLENTY] * 3), 5.0, asyncio.get_running_loop()

    async def silent(claims: Sequence[Claim]) -> list[ClaimResult | Fault]:
        await asyncio.sleep(silent_s)
        return [RequestTimeout("silent") for _ in claims]

    site.cluster.port.submit = silent  # type: ignore[method-assign]
    uuids = {(await accepted(site)).instance_uuid for _ in range(20)}
    began = loop.time()
    assert await site.handler.resume(dict.fromkeys(uuids, 0)) == uuids
    assert loop.time() - began == pytest.approx(silent_s, abs=0.1)


async def test_a_build_whose_end_crashes_too_is_tried_again_later_and_ends_no_process(site: Site) -> None:
    request, other = [await accepted(site) for _ in range(2)]
    process = site.engine.process

    async def crashing(builds: Sequence[PendingBuild], _: object) -> tuple[dict[int, Outcome], dict[int, Outcome]]:
        if any(one.instance_uuid == request.instance_uuid for one in builds):
            raise ZeroDivisionError
        return await process(builds, ())

    site.engine.process = crashing  # type: ignore[method-assign,assignment]
    assert await site.handler.resume({request.instance_uuid: 0, other.instance_uuid: 0}) == set()
    assert (await site.build_of(other.instance_uuid)).state is BuildState.SCHEDULED


@pytest.mark.parametrize(
    "now", [{"project_id": "another"}, {"attempt": 2}, {"allocations": {"gone": {"VCPU": 1}}, "hosts": ("gone",)}]
)
async def test_a_build_goes_where_its_claim_is_when_its_cell_gets_it(site: Site, now: dict[str, object]) -> None:
    """Between its own claim, which named what it holds, and the look at it that has changed."""
    holding = {site.cluster.hosts.uuids[1]: {"VCPU": 1}}
    request = site.cluster.holds(holding)
    (placed,) = await site.cluster.place(request)
    assert isinstance(placed, HostClaimed) and placed.selections[0].allocations == holding
    held = site.cluster.port.held
    held[request.instance_uuid] = replace(held[request.instance_uuid], **now)
    (placed,) = await site.cluster.place(request)
    assert not isinstance(placed, HostClaimed) or placed.attempt == 2


# --- Moves.


def move_of(uuid: str, kind: ActionKind, at: int, rng: random.Random) -> PendingAction:
    request = ActionRequest(request_id=new_uuid(rng), instance_uuid=uuid, project_id="p", kind=kind)
    return PendingAction(batch_index=at, request=request, taken_at=0.0, delivery=RequestDelivery())


async def both(site: Site) -> Mapping[int, Outcome]:
    """A stop, and a migration, which needs placement."""
    kinds = (ActionKind.STOP, ActionKind.MIGRATE)
    actions = [move_of(await site.runs(), kind, at, site.cluster.hosts.rng) for at, kind in enumerate(kinds)]
    return await site.moves.process(actions)


async def test_a_move_that_placement_does_not_answer_about_waits_and_the_others_begin(site: Site) -> None:
    site.cluster.port.unavailable = True
    outcomes = await both(site)
    assert isinstance(outcomes[0], Done) and isinstance(outcomes[1], RetryWhenAvailable)


async def test_a_move_that_placement_refuses_for_good_is_refused(site: Site) -> None:
    site.cluster.port.refused = REFUSED
    outcomes = await both(site)
    assert isinstance(outcomes[0], Done)
    assert outcomes[1] == Done(reply=Refusal(code=REFUSED, reason="refused"))
    states = [one.state for one in site.emitted(ActionEvent) if isinstance(one, ActionEvent) and one.code == REFUSED]
    assert states == [ActionState.REFUSED]


async def test_a_move_begins_while_a_build_of_its_batch_waits_for_placement(site: Site) -> None:
    site.cluster.port.unavailable = True
    stop = ActionRequest(
        request_id=new_uuid(site.cluster.hosts.rng),
        instance_uuid=await site.runs(),
        project_id="p",
        kind=ActionKind.STOP,
    )
    build = nowhere(site.cluster)
    batch = [Received(one, Meta(id=f"m{at}"), "api", "scheduler.requests") for at, one in enumerate((build, stop))]
    waiting, begun = await site.handler(batch)
    assert isinstance(waiting, RetryWhenAvailable) and isinstance(begun, Done)


# Hosts are chosen for one move after the other, and those beside them, of other projects, are not held up.


MIGRATIONS = 20


async def migrations(site: Site) -> list[PendingAction]:
    """Of instances on one host."""
    hosts = site.cluster.hosts
    uuids = [await site.runs() for _ in range(MIGRATIONS)]

    async def on_their_host(requests: Sequence[LocateRequest]) -> list[LocatePage | Fault]:
        return [LocatePage(hosts={one.consumers[0]: (hosts.uuids[0],)}) for one in requests]

    site.cluster.port.locate = on_their_host  # type: ignore[method-assign]
    return [move_of(uuid, ActionKind.MIGRATE, at, hosts.rng) for at, uuid in enumerate(uuids)]


def with_hosts(*free: dict[str, int]) -> Site:
    config = SchedulerConfig()
    return Site(Cluster(Hosts(list(free), config=config), config))


ANSWER_S = SchedulerConfig().claim_timeout_s


@on_virtual_time
@pytest.mark.parametrize(("after_s", "ends"), [(0.9 * ANSWER_S, True), (1.1 * ANSWER_S, False)])
async def test_what_fits_nowhere_waits_for_the_newest_state_as_for_any_answer_of_placement(
    after_s: float, ends: bool
) -> None:
    """By an older state no host is refused; a placement that needed more than 0.25 s kept each request for ever."""
    site, loop = with_hosts(PLENTY), asyncio.get_running_loop()

    async def slow(*, timeout_s: float) -> bool:
        await asyncio.sleep(min(after_s, timeout_s))
        return after_s <= timeout_s

    site.cluster.refresh = slow  # type: ignore[method-assign]
    actions, build, began = await migrations(site), nowhere(site.cluster), loop.time()
    outcomes = await site.moves.process(actions)
    assert loop.time() - began == pytest.approx(min(after_s, ANSWER_S)), "all of them together"
    of_build = await site.process(taken(build))
    assert {type(one) for one in (*outcomes.values(), *of_build)} == {Done if ends else RetryWhenAvailable}
    ended = [one.code for one in site.emitted(ActionEvent) if isinstance(one, ActionEvent)]
    assert ended == ["no_valid_host"] * (MIGRATIONS if ends else 0)


@pytest.mark.parametrize("count", [1, 3])
async def test_a_turn_of_the_loop_looks_at_the_hosts_of_one_move(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    site = with_hosts(*[PLENTY] * count)
    actions, turns = await migrations(site), Turns(monkeypatch, (Selector, "rank"))
    async with turns.counting():
        await site.moves.process(actions)
    assert turns.total("rank") == MIGRATIONS * (2 if count == 1 else 1) and turns.most("rank") == 1


# --- Two requests of one id; what is decided on an older state, and what a client requests in vain.


async def test_two_moves_of_one_id_in_a_batch_are_each_judged_by_their_own_instance(site: Site) -> None:
    """The first was written with the records of the second's instance: its cell, its spec, its state. The second's
    instance stays busy with a request about another one, which never ends for it.
    """
    first, second = await site.runs("c1"), await site.runs("c2")
    request_id = new_uuid(site.cluster.hosts.rng)
    actions = [
        PendingAction(
            batch_index=at,
            request=ActionRequest(request_id=request_id, instance_uuid=uuid, project_id="p", kind=ActionKind.STOP),
            taken_at=0.0,
            delivery=RequestDelivery(),
        )
        for at, uuid in enumerate((first, second))
    ]
    outcomes = await site.moves.process(actions)
    assert all(isinstance(one, Done) for one in outcomes.values())
    (command,) = [one for one in site.emitted(CellAction) if isinstance(one, CellAction)]
    async with site.store.operation() as unit:
        known = (await unit.known([(request_id, first)]))[request_id, first]
    assert known.action is not None
    assert (command.instance_uuid, known.action.instance_uuid, known.action.cell) == (first, first, "c1")
    assert (await site.build_of(first)).current.under_way == request_id
    assert (await site.build_of(second)).current.under_way is None, "and nothing would ever end it there"


async def test_an_evacuation_is_not_refused_by_a_scheduler_that_has_not_loaded_the_fence(site: Site) -> None:
    """The fence is on record, and acknowledged by its cell: another scheduler has answered the operator. "No host" is
    decided on the newest state; "not fenced" was decided on an older one, for good.
    """
    await site.registry.open()
    uuid = await site.runs("c1")
    host = site.cluster.hosts.uuids[0]
    fence = FenceRecord(host="h0", cell="c1", version=1, acknowledged=1)
    decision = HostDecision(host="h0", state=AdminState.FENCED, reason="off")

    async def locate(requests: Sequence[LocateRequest]) -> list[LocatePage | Fault]:
        return [LocatePage(members={}, hosts={uuid: (host,)}) for _ in requests]

    site.cluster.port.locate = locate  # type: ignore[method-assign]
    evacuate = move_of(uuid, ActionKind.EVACUATE, 0, site.cluster.hosts.rng)
    (outcome,) = (await site.moves.process([evacuate])).values()
    assert isinstance(outcome, Done) and isinstance(outcome.reply, Refusal) and outcome.reply.code == "host.not_fenced"
    async with site.store.operation() as unit:
        await unit.lock_objects()
        await unit.write_objects(
            [
                changed_object(ObjectKind.HOST, host, None, decision),
                changed_object(ObjectKind.FENCE, host, None, fence),
            ],
            ChangeActor("ann", "off", 1.0),
        )
    evacuate = move_of(uuid, ActionKind.EVACUATE, 0, site.cluster.hosts.rng)
    (outcome,) = (await site.moves.process([evacuate])).values()
    (command,) = site.emitted(CellAction)
    assert isinstance(command, CellAction) and command.kind is ActionKind.EVACUATE and command.selections


async def test_the_timeline_of_an_instance_is_bounded_whatever_its_client_requests(site: Site) -> None:
    """Each refused request is a line of up to a reason's length, in the row that every report rewrites and every
    page of builds reads whole: some ten thousand of them are more than a message may have, and no page with it is read.
    """
    uuid, rng, times = await site.runs("c1"), site.cluster.hosts.rng, 2000
    for _ in range(0, times, 200):
        actions = [
            PendingAction(
                batch_index=at,
                request=ActionRequest(
                    request_id=new_uuid(rng),
                    instance_uuid=uuid,
                    project_id="p",
                    kind=ActionKind.RESIZE,
                    flavor="no.such",
                ),
                taken_at=0.0,
                delivery=RequestDelivery(),
            )
            for at in range(200)
        ]
        outcomes = await site.moves.process(actions)
        assert {one.reply.code for one in outcomes.values() if isinstance(one, Done)} == {"flavor.unknown"}  # type: ignore[union-attr]
    found = await site.store.builds_named([uuid])
    assert len(found[uuid].timeline) < times


async def test_a_resize_whose_flavor_is_made_while_its_records_are_locked_is_not_dispatched_without_hosts(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the lock it was refused, so no hosts were chosen; under the lock it may be carried out, and its instance
    has not changed: its cell was commanded to resize it on none.
    """
    uuid, selector = await site.runs("c1"), site.cluster.hosts.selector
    operation, began = site.store.operation, 0

    def with_new_flavor() -> object:
        nonlocal began
        began += 1
        if began == 2:
            flavors = {**selector.config.settings.flavors, "new": selector.config.settings.flavors["m1.large"]}
            selector.config = SelectorConfig(
                replace(selector.config.settings, flavors=flavors),
                flavors={name: parse(name, one) for name, one in flavors.items()},
                filters=selector.config.filters,
                weighings=[],
                revision=2,
            )
        return operation()

    monkeypatch.setattr(site.store, "operation", with_new_flavor)
    resize = ActionRequest(
        request_id=new_uuid(site.cluster.hosts.rng),
        instance_uuid=uuid,
        project_id="p",
        kind=ActionKind.RESIZE,
        flavor="new",
    )
    await site.moves.process([PendingAction(batch_index=0, request=resize, taken_at=0.0, delivery=RequestDelivery())])
    assert [one for one in site.emitted(CellAction) if isinstance(one, CellAction) and not one.selections] == []
