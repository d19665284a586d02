"""What a fresh reader of the scheduler found: decisions of which a second place knows less. Each fails."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.consuming.outcome import Done, Received, Wait
from bus.contracts.base import Message, Meta, Refusal
from bus.contracts.book import ServiceHostsPage, ServiceHostsQuery
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.cell import (
    CellBuild,
    CellBuildQuery,
    CellDelete,
    ComputeHosts,
    HostReport,
    ServiceDown,
    ServicesDigest,
)
from bus.contracts.drains import DrainTarget
from bus.contracts.moves import CellMove, MoveKind, MoveRequest
from bus.contracts.objects import (
    CellState,
    FenceRecord,
    HostDecision,
    ObjectChange,
    ObjectKind,
    ObjectsChange,
    ObjectsChanged,
)
from bus.contracts.operations import AdminState, SetAdminState
from bus.contracts.placement import (
    ClaimAll,
    ClaimAllResult,
    ClaimOutcome,
    ClaimResult,
    LocatePage,
    LocateRequest,
    ReleaseRun,
)
from bus.faults import Fault
from lab.simulation.loop import SimClock
from scheduler_worker.changes import ChangeHandler, RefusedCommands
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.admission import pending_build
from scheduler_worker.domain.builds import BuildUpdate, Gang, NewBuild, RecordedBuild, SinceBuild, effects
from scheduler_worker.domain.flavors import parse
from scheduler_worker.domain.hosts import HostTable
from scheduler_worker.domain.object_rules import changed_object
from scheduler_worker.domain.objects import ChangeAuthor
from scheduler_worker.domain.recorded_moves import MoveContext, PendingMove
from scheduler_worker.domain.requests import RETRIES, RequestDelivery, delivery_of
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.unanswered import messages_to_cell, open_build
from scheduler_worker.drain_plan import DrainHolders
from scheduler_worker.fleet import Warmup
from scheduler_worker.keepers import CHECK_S, CellKeeper
from scheduler_worker.objects import ObjectRegistry
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent
from tests.kit.virtual_time import on_virtual_time
from tests.unit.scheduler.hosts import PLENTY, Hosts
from tests.unit.scheduler.test_deletes import hold, nowhere
from tests.unit.scheduler.test_placing import cluster
from tests.unit.scheduler.test_without_an_answer import Site, accepted, move_of, site

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
        known = (await unit.known([(request_id, first)]))[request_id, first]
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


# --- A cell that was removed, and gets a build later than a scheduler looks after it.


class Wanted:
    """Stands for the links to the cells."""

    def __init__(self) -> None:
        self.cells: set[str] = set()

    def want(self, cells: Mapping[str, object]) -> None:
        self.cells = set(cells)


@on_virtual_time
async def test_a_removed_cell_is_linked_again_whenever_a_build_is_given_to_it() -> None:
    """Placement was away for longer than two minutes. When it was back, the claim of a build that had waited was found
    in the cell, which was empty when it was removed: its command stayed in the outbox until a scheduler started again.
    """
    clock, links = SimClock(), Wanted()
    hosts = Hosts([PLENTY] * 2, cells=["c1", "c2"])
    store = MemoryBuilds(MemoryBuildTable(clock).session())
    store.publish_through(Sent())  # type: ignore[arg-type]
    registry = ObjectRegistry(store, hosts.selector, hosts.config, clock=clock, cells=("c1", "c2"))
    await registry.open()
    body = {"state": CellState.REMOVED.value, "reason": "it left"}
    change = ObjectsChange(changes=(ObjectChange(kind=ObjectKind.CELL, name="c2", body=body),), who="ann")
    changed = await registry.change(change, "m1")
    assert isinstance(changed, ObjectsChanged)
    awaited: set[str] = set()
    keeper = CellKeeper(registry, store, cast("Any", links), ("c1", "c2"), awaited=lambda: awaited)
    task = asyncio.create_task(keeper.run())
    await clock.sleep(1000.0)
    assert links.cells == {"c1"}
    request = hosts.request()
    build = RecordedBuild(
        instance_uuid=request.instance_uuid, project_id="p", state=BuildState.SCHEDULED, sequence=2, cell="c2"
    )
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, build=build)], clock.time())
    awaited.add("c2")  # its command is in the outbox
    await clock.sleep(2 * CHECK_S)
    assert links.cells == {"c1", "c2"}
    awaited.clear()
    await clock.sleep(2 * CHECK_S)
    assert links.cells == {"c1", "c2"}, "the build is on record there"
    async with store.unit() as unit:
        await unit.lock([request.instance_uuid])
        await unit.update([BuildUpdate(build=replace(build, state=BuildState.FAILED, terminal=True))], clock.time())
    await clock.sleep(2 * CHECK_S)
    task.cancel()
    await asyncio.wait([task])
    assert links.cells == {"c1"}


async def test_a_build_that_waited_is_given_to_the_removed_cell_of_its_claim(site: Site) -> None:
    """The other half of the one before: it holds on the present code."""
    request = await accepted(site)
    site.cluster.hosts.table.disabled_cells = frozenset({"c2"})
    hold(site.cluster, request, on=4, run="r")
    site.cluster.answer = lambda _: ClaimResult(outcome=ClaimOutcome.CONSUMER_CHANGED)
    await site.handler.resume({request.instance_uuid: 0})
    assert (await site.build_of(request.instance_uuid)).cell == "c2"


# --- An evacuation that comes to a scheduler which has not loaded the fence yet.


async def test_an_evacuation_is_not_refused_by_a_scheduler_that_has_not_loaded_the_fence(site: Site) -> None:
    """The fence is on record, and acknowledged by its cell: another scheduler has answered the operator. "No host" is
    decided on the newest state; "not fenced" was decided on an older one, for good.
    """
    uuid = await site.runs("c1")
    host = site.cluster.hosts.uuids[0]
    fence = FenceRecord(host="h0", cell="c1", version=1, acknowledged=1)
    decision = HostDecision(host="h0", state=AdminState.FENCED, reason="off")
    async with site.store.operation() as unit:
        await unit.lock_objects()
        await unit.write_objects(
            [
                changed_object(ObjectKind.HOST, host, None, decision),
                changed_object(ObjectKind.FENCE, host, None, fence),
            ],
            ChangeAuthor("ann", "off", 1.0),
        )

    async def locate(requests: Sequence[LocateRequest]) -> list[LocatePage | Fault]:
        return [LocatePage(members={}, hosts={uuid: (host,)}) for _ in requests]

    site.cluster.port.locate = locate  # type: ignore[method-assign]
    (outcome,) = (await site.moves.process([move_of(uuid, MoveKind.EVACUATE, 0, site.cluster.hosts.rng)])).values()
    assert not (isinstance(outcome, Done) and isinstance(outcome.reply, Refusal)), outcome


# --- Whether a service that is up may have a host: a host is forgotten only if all services are known here.


async def no_cells(_: Collection[str]) -> None:
    """Placement has no dead service of these hosts."""


async def test_a_host_is_not_fenced_as_long_as_its_service_may_not_have_announced_it_yet(site: Site) -> None:
    """The scheduler that had just started had not heard that the host's service is up, and took the fence, which any
    other one refuses (`host.service_up`): an instance that is evacuated from a running host runs twice. A command to
    forget the host asks whether every service is known here.
    """
    hosts, store = site.cluster.hosts, site.store
    selector = Selector(
        hosts.book,
        HostTable(),
        hosts.config,
        flavors=hosts.selector.flavors,
        filters=hosts.selector.filters,
        weighings=[],
    )
    registry = ObjectRegistry(store, selector, hosts.config, clock=site.cluster.clock, cells=("c1",))
    await registry.open()
    handler = ChangeHandler(
        registry,
        selector,
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        refused=RefusedCommands(store),
        find_cells=no_cells,
        warmup=Warmup(selector, clock=site.cluster.clock),
    )
    fence = SetAdminState(host=hosts.uuids[0], state=AdminState.FENCED, reason="mistyped", by="ann")
    (outcome,) = await handler([Received(fence, Meta(id="m1", reply_to="client.reply.x"), "api", "scheduler.changes")])
    assert not isinstance(outcome, Done), outcome


# --- Which objects are newer: a revision is a number that a database which was set back gives again.


async def test_objects_of_the_same_revision_of_another_history_are_loaded(site: Site) -> None:
    """A standby was promoted without the last change, and the first change after that got its number. A scheduler that
    had loaded the lost one keeps it: a host that is fenced on no record, or one that is fenced and takes builds.
    """
    clock, hosts, store = site.cluster.clock, site.cluster.hosts, site.store
    here, there = (
        ObjectRegistry(store, one.selector, hosts.config, clock=clock, cells=("c1", "c2"))
        for one in (hosts, Hosts([PLENTY] * 6, cells=["c1"] * 3 + ["c2"] * 3, config=hosts.config))
    )
    await here.open()
    await there.open()
    before = store._table.objects

    def decided(host: int) -> ObjectsChange:
        body = {"host": f"h{host}", "state": AdminState.DISABLED.value}
        return ObjectsChange(
            changes=(ObjectChange(kind=ObjectKind.HOST, name=hosts.uuids[host], body=body),), who="ann"
        )

    assert isinstance(await here.change(decided(0), "m1"), ObjectsChanged)
    store._table.objects = before
    assert isinstance(await there.change(decided(1), "m2"), ObjectsChanged)
    await here.reload()
    assert [hosts.table.decision_of(uuid) is not None for uuid in hosts.uuids[:2]] == [False, True]


# --- The timeline of an instance: what a client requests of it in vain is appended for ever.


async def test_the_timeline_of_an_instance_is_bounded_whatever_its_client_requests(site: Site) -> None:
    """Each refused request is a line of up to a reason's length, in the row that every announcement rewrites and every
    page of builds reads whole: some ten thousand of them are more than a message may have, and no page with it is read.
    """
    uuid, rng, times = await site.runs("c1"), site.cluster.hosts.rng, 2000
    for _ in range(0, times, 200):
        moves = [
            PendingMove(
                position=at,
                request=MoveRequest(
                    request_id=new_uuid(rng),
                    instance_uuid=uuid,
                    project_id="p",
                    kind=MoveKind.RESIZE,
                    flavor="no.such",
                ),
                taken_at=0.0,
                delivery=RequestDelivery(),
            )
            for at in range(200)
        ]
        outcomes = await site.moves.process(moves)
        assert {one.reply.code for one in outcomes.values() if isinstance(one, Done)} == {"flavor.unknown"}  # type: ignore[union-attr]
    found = await site.store.builds_named([uuid])
    assert len(found[uuid].timeline) < times


# --- May this move be carried out? It is asked twice, and only the first answer leads to hosts.


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
            flavors = {**selector.config.flavors, "new": selector.config.flavors["m1.large"]}
            selector.configure(
                replace(selector.config, flavors=flavors),
                flavors={name: parse(name, one) for name, one in flavors.items()},
                filters=selector.filters,
                weighings=[],
                revision=2,
            )
        return operation()

    monkeypatch.setattr(site.store, "operation", with_new_flavor)
    resize = MoveRequest(
        request_id=new_uuid(site.cluster.hosts.rng),
        instance_uuid=uuid,
        project_id="p",
        kind=MoveKind.RESIZE,
        flavor="new",
    )
    await site.moves.process([PendingMove(position=0, request=resize, taken_at=0.0, delivery=RequestDelivery())])
    assert [one for one in site.emitted(CellMove) if isinstance(one, CellMove) and not one.selections] == []


# --- Which hosts a cell, or a service, has: what is announced here is not all of them.


@pytest.mark.parametrize("second", ["is up and not announced here yet", "died before this scheduler started"])
async def test_a_cell_is_not_drained_of_those_hosts_alone_that_are_announced_here(site: Site, second: str) -> None:
    """The drain of the cell began with one of its two hosts, and ended as `drain.done` while the other one was full: an
    operator switches it off. To forget a service, or a host, the book and the cell's digest are asked.
    """
    hosts, clock = Hosts([PLENTY] * 2), site.cluster.clock
    table, now_s = HostTable(), clock.monotonic()
    selector = Selector(
        hosts.book, table, hosts.config, flavors=hosts.selector.flavors, filters=hosts.selector.filters, weighings=[]
    )
    there = (HostReport(uuid=hosts.uuids[0], name="h0"),)
    table.apply(ComputeHosts(service="s1", cell="c1", epoch=1, sequence=1, hosts=there, complete=True), now_s)
    is_up = second.startswith("is up")
    down = () if is_up else (ServiceDown(service="s2", epoch=1, code="service.dead", reason="no heartbeat"),)
    table.apply(ServicesDigest(cell="c1", term=1, number=1, up=1 + is_up, down=down), now_s)
    warmup, book = Warmup(selector, clock=clock), cast("Any", BookOf({hosts.uuids[1]: "h1"}))
    holders = DrainHolders(site.store, selector, cast("Any", site.cluster), book, warmup=warmup, clock=clock)
    found = await holders.hosts_of("c1", DrainTarget.CELL, None)
    if is_up:
        assert isinstance(found, Refusal) and found.code == "host.cell_silent"
        return
    assert not isinstance(found, Refusal) and {one.uuid for one in found[1]} == set(hosts.uuids)
    of_service = await holders.hosts_of("s2", DrainTarget.SERVICE, "c1")
    assert not isinstance(of_service, Refusal) and [one.uuid for one in of_service[1]] == hosts.uuids[1:]


class BookOf:
    """A bus to placement, whose book has these hosts of service s2."""

    def __init__(self, hosts: dict[str, str]) -> None:
        self._hosts = hosts

    async def request_all(self, queries: Sequence[ServiceHostsQuery], *_: object, **__: object) -> list[Message]:
        return [ServiceHostsPage(hosts=self._hosts if one.service == "s2" else {}) for one in queries]
