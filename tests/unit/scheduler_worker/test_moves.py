"""Requests about instances, a row for each condition: which may be carried out, which need hosts, and which hosts."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from msgspec.structs import replace

from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Retry
from bus.contracts.actions import (
    CHOOSES_HOSTS,
    ActionAccepted,
    ActionEvent,
    ActionKind,
    ActionQuery,
    ActionRequest,
    ActionState,
    Condition,
    ResizePolicy,
)
from bus.contracts.base import Refusal, encode
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.catalogue import routing_key
from bus.contracts.deploy import ImageSource
from bus.contracts.queues import COMMANDS, REQUEST_QUEUES
from bus.faults import DatabaseUnavailable, RequestTimeout
from bus.memory import MemoryBroker, MemoryTransport
from bus.transport import Outgoing
from lab.simulation.loop import SimClock
from scheduler_worker.action import action_checks as moves
from scheduler_worker.action import destination_request
from scheduler_worker.action.action_checks import (
    CELL_DRAIN_USER,
    CHANGED,
    DRAIN_USER,
    accepted,
    check_action,
    superseded_refusal,
)
from scheduler_worker.action.action_engine import ActionEngine
from scheduler_worker.action.destination import DestinationChooser
from scheduler_worker.action.pending_action import PendingAction
from scheduler_worker.build.pending_build import Answered
from scheduler_worker.build.placer import ReplicaFollower
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.fleet.host_listener import Warmup
from scheduler_worker.records.action_record import ActionContext, RecordedAction
from scheduler_worker.records.build_record import BuildUpdate, NewBuild, RecordedBuild, SinceBuild, flavors_in_use
from scheduler_worker.request_handler import RequestHandler
from scheduler_worker.requests.request_delivery import LAST, MAX_RETRIES, OVERTAKES, RequestDelivery
from scheduler_worker.selection.request_spec import RequestSpec
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from scheduler_worker.store.port import OperationUnit
from tests.kit.claims import PlacementClaims
from tests.kit.sent import Sent
from tests.kit.virtual_time import on_virtual_time
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts

UUID, MOVE, OTHER = (f"{n}0000000-0000-4000-8000-000000000001" for n in "0db")
IMAGE = {"hw_arch": "x"}
BUILT = BuildRequest(
    instance_uuid=UUID, project_id="p", flavor="m1.small", image="old", image_properties=IMAGE, max_attempts=2, host="h"
)
BUILD = RecordedBuild(instance_uuid=UUID, project_id="p", state=BuildState.ACTIVE, sequence=9, terminal=True, cell="c")
KNOWN = ActionContext(build=BUILD, build_request=BUILT)
LATE = RequestDelivery(retries=OVERTAKES)
SELECTOR = Hosts([]).selector
HERE_TOO = Hosts([], config=SchedulerConfig(allow_resize_to_same_host=True)).selector


def requested(kind: ActionKind = ActionKind.STOP, **more: Any) -> ActionRequest:
    return ActionRequest(**{"request_id": MOVE, "instance_uuid": UUID, "project_id": "p", "kind": kind, **more})


def instance(**more: Any) -> ActionContext:
    return replace(KNOWN, build=replace(BUILD, instance=SinceBuild(**more)))


def word(result: Answered | Refusal | None) -> str:
    match result:
        case None:
            return "may"
        case Refusal(code=code):
            return code
        case Answered(outcome=Done(reply=ActionAccepted(request_id=request_id, instance_uuid=uuid))):
            assert (request_id, uuid) == (MOVE, UUID)
            return "accepted"
        case Answered(outcome=Done(reply=Refusal(code=code)), messages=event):
            return f"answered {code}" + (" with an event" if event else "")
        case Answered(outcome=Done(reply=None)):
            return "left"
        case Answered(outcome=Retry(code=code)):
            return f"again {code}"
    raise AssertionError(result)


def checked(
    request: ActionRequest,
    known: ActionContext = KNOWN,
    delivery: RequestDelivery = LATE,
    *,
    selector: Selector = HERE_TOO,
) -> str:
    pending = PendingAction(batch_index=4, request=request, delivery=delivery, taken_at=1000.0)
    if known.action is not None and known.action.digest == b"its own":
        known = replace(known, action=replace(known.action, digest=pending.digest))
    return word(check_action(pending, known, selector.config))


# --- by what is on record


def on_record(**more: Any) -> ActionContext:
    fields = {"project_id": "p", "digest": b"its own", "state": ActionState.SCHEDULED, "sequence": 2, **more}
    return replace(KNOWN, action=RecordedAction(request_id=MOVE, instance_uuid=UUID, kind=ActionKind.STOP, **fields))


GONE = RequestDelivery(retries=OVERTAKES, has_requester=True, is_late=lambda: True)
OVER = RequestDelivery(retries=OVERTAKES, is_late=lambda: True)
OLD = RequestDelivery(retries=OVERTAKES, is_old=True)
EARLY = RequestDelivery(retries=OVERTAKES - 1)
ENDS = RequestDelivery(retries=OVERTAKES, refusal=Refusal(code="given.up", reason=""))
CLASH = "answered request.duplicate with an event"


@pytest.mark.parametrize(
    ("known", "delivery", "answer"),
    [
        (on_record(), LATE, "accepted"),
        (on_record(digest=b"another"), LATE, CLASH),
        (on_record(project_id="q"), LATE, CLASH),
        (on_record(state=ActionState.REFUSED, terminal=True, code="x"), LATE, "answered x"),
        (on_record(state=ActionState.FAILED, terminal=True, code="x"), LATE, "accepted"),
        (on_record(), GONE, "accepted"),
        (KNOWN, LATE, "may"),
        (KNOWN, GONE, "left"),
        (KNOWN, OVER, "broker.expired"),
        (KNOWN, ENDS, "given.up"),
        (KNOWN, OLD, "request.too_old"),
        (KNOWN, EARLY, "may"),
        (replace(KNOWN, names_instance=True), LATE, CLASH),
        (replace(KNOWN, names_instance=True), GONE, "left"),
        (ActionContext(), LATE, "instance.unknown"),
        (ActionContext(), EARLY, "again instance.unknown"),
        (replace(KNOWN, build=replace(BUILD, project_id="q")), LATE, "instance.unknown"),
        (replace(KNOWN, build=replace(BUILD, project_id="q")), EARLY, "instance.unknown"),
    ],
)
def test_a_request_by_what_is_on_record(known: ActionContext, delivery: RequestDelivery, answer: str) -> None:
    assert checked(requested(), known, delivery) == answer


def test_a_request_named_as_its_instance_clashes_by_an_event_of_its_own() -> None:
    request = requested(request_id=UUID)
    assert checked(request) == CLASH
    pending = PendingAction(batch_index=0, request=request, delivery=LATE, taken_at=1000.0)
    answer = check_action(pending, KNOWN, SELECTOR.config)
    assert isinstance(answer, Answered)
    event = answer.messages[0].message
    assert isinstance(event, ActionEvent)
    assert (event.request_id, event.instance_uuid, event.project_id, event.kind, event.at, event.code) == (
        UUID, UUID, "p", ActionKind.STOP, 1000.0, "request.duplicate",
    )  # fmt: skip


@pytest.mark.parametrize(("last", "answer"), [(False, "again request.concurrent"), (True, "request.concurrent")])
def test_a_request_that_others_overtake_is_refused_by_its_last_delivery(last: bool, answer: str) -> None:
    delivery = RequestDelivery(last=last)
    pending = PendingAction(batch_index=0, request=requested(), delivery=delivery, taken_at=1000.0)
    assert word(superseded_refusal(pending)) == answer


# --- by the instance's state

RESIZE, REBUILD, RESCUE, UNSHELVE = ActionKind.RESIZE, ActionKind.REBUILD, ActionKind.RESCUE, ActionKind.UNSHELVE
HERE, ELSEWHERE = ResizePolicy.SAME_HOST, ResizePolicy.OTHER_HOST


@pytest.mark.parametrize(
    ("request_", "known", "answer"),
    [
        *((requested(), replace(KNOWN, build=replace(BUILD, state=state)), "instance.not_active")
          for state in BuildState if state is not BuildState.ACTIVE),
        (requested(), instance(condition=Condition.DELETED), "instance.not_active"),
        (requested(), instance(condition=Condition.FAILED), "instance.not_active"),
        (requested(), instance(condition=Condition.STOPPED), "may"),
        (requested(), KNOWN, "may"),
        (requested(), instance(under_way=OTHER), "instance.busy"),
        (requested(ActionKind.ABORT), instance(under_way=OTHER), "may"),
        (requested(RESIZE), KNOWN, "request.incomplete"),
        (requested(RESIZE, flavor="no.such"), KNOWN, "flavor.unknown"),
        (requested(RESIZE, flavor="m1.small"), KNOWN, "flavor.same"),
        (requested(RESIZE, flavor="m1.large"), instance(flavor="m1.large"), "flavor.same"),
        (requested(RESIZE, flavor="m1.small"), instance(flavor="m1.large"), "may"),
        (requested(REBUILD), KNOWN, "request.incomplete"),
        (requested(REBUILD, image=""), KNOWN, "request.incomplete"),
        (requested(REBUILD, image="new"), KNOWN, "may"),
        (requested(RESCUE), KNOWN, "request.incomplete"),
        (requested(RESCUE, rescue_password="secret"), KNOWN, "may"),
        (requested(UNSHELVE, host="h"), instance(condition=Condition.SHELVED), "instance.not_offloaded"),
        (requested(UNSHELVE), instance(condition=Condition.SHELVED), "may"),
        (requested(UNSHELVE, host="h"), instance(condition=Condition.OFFLOADED), "may"),
        (requested(ActionKind.MIGRATE, host="h"), instance(condition=Condition.SHELVED), "may"),
    ],
)  # fmt: skip
def test_a_request_by_the_state_of_its_instance(request_: ActionRequest, known: ActionContext, answer: str) -> None:
    assert checked(request_, known) == answer


@pytest.mark.parametrize(
    ("policy", "same_host", "answer"),
    [(HERE, False, "resize.same_host"), (HERE, True, "may"), (ResizePolicy.ANY, False, "may")],
)
def test_a_resize_in_place_is_for_sites_that_do_so(policy: ResizePolicy, same_host: bool, answer: str) -> None:
    request = requested(RESIZE, flavor="m1.large", policy=policy)
    assert checked(request, selector=HERE_TOO if same_host else SELECTOR) == answer


# --- its image


@pytest.mark.parametrize(
    ("request_", "known", "properties", "changes"),
    [
        (requested(REBUILD, image="old"), KNOWN, IMAGE, False),
        (requested(REBUILD, image="old", image_properties=IMAGE), KNOWN, IMAGE, False),
        (requested(REBUILD, image="old", image_properties={"a": "b"}), KNOWN, {"a": "b"}, True),
        (requested(REBUILD, image="old", image_properties={}), KNOWN, {}, True),
        (requested(REBUILD, image="new"), KNOWN, {}, True),
        (requested(REBUILD, image="new", image_properties=IMAGE), KNOWN, IMAGE, True),
        (requested(REBUILD, image="now"), instance(image="now", image_properties={"now": {"c": "d"}}), {"c": "d"},
         False),
        (requested(image="new"), KNOWN, {}, False),
    ],
)  # fmt: skip
def test_a_rebuild_changes_the_image_or_its_properties(
    request_: ActionRequest, known: ActionContext, properties: dict[str, str], changes: bool
) -> None:
    assert (moves.rebuild_image(request_, known), moves.changes_image(request_, known)) == (properties, changes)
    looks = changes or request_.kind in CHOOSES_HOSTS
    assert moves.needs_hosts(request_, known) is looks
    after = moves.in_progress(request_, known)
    both = {moves.image_of(known): moves.image_properties_of(known), request_.image: properties}
    assert after.image_properties == (both if changes else known.current.image_properties)
    assert after.under_way == MOVE


def test_an_abort_leaves_the_request_under_way_that_it_is_to_end() -> None:
    known = instance(under_way=OTHER)
    assert moves.in_progress(requested(ActionKind.ABORT), known) == known.current


@pytest.mark.parametrize(
    ("now", "in_use"),
    [
        ({}, ("m1.small", "m1.large", "m1.small")),
        ({"flavor": "m1.tiny"}, ("m1.tiny", "m1.large", "m1.tiny")),
        ({"flavor": "m1.tiny", "condition": Condition.RESIZED, "new_flavor": "m1.tiny", "old_flavor": "m1.small"},
         ("m1.tiny", "m1.large", "m1.small")),
    ],
)  # fmt: skip
def test_a_resize_under_way_uses_both_flavors(now: dict[str, Any], in_use: tuple[str, ...]) -> None:
    begun = moves.in_progress(requested(RESIZE, flavor="m1.large"), instance(**now))
    assert flavors_in_use("m1.small", begun) == in_use


# --- its hosts


@pytest.mark.parametrize("kind", ActionKind)
def test_the_kinds_that_choose_hosts_leave_theirs_and_may_leave_their_cell(kind: ActionKind) -> None:
    request, chooses = requested(kind), kind in CHOOSES_HOSTS
    assert [moves.selects_host(request, instance(condition=one)) for one in (Condition.OFFLOADED, Condition.SHELVED)] \
        == [chooses, chooses and kind is not UNSHELVE]  # fmt: skip
    assert moves.needs_hosts(request, instance(condition=Condition.OFFLOADED)) is (chooses or kind is REBUILD)
    assert moves.releases_source(request, same_host=True) is (kind not in (RESIZE, UNSHELVE))
    leaves = kind in (ActionKind.MIGRATE, RESIZE, UNSHELVE)
    assert moves.may_leave_cell(request) is leaves
    assert moves.may_leave_cell(requested(kind, policy=HERE)) is (leaves and kind is not RESIZE)
    assert not moves.may_leave_cell(requested(kind, user_id=DRAIN_USER))
    assert moves.may_leave_cell(requested(kind, user_id=CELL_DRAIN_USER)) is leaves


@pytest.mark.parametrize(
    ("flavor", "code"), [("bm.gold", "action.across_cells"), ("gpu.small", None), ("m1.tiny", None)]
)
def test_bare_metal_stays_in_its_cell(flavor: str, code: str | None) -> None:
    """Its cell alone refused that, when the other one had been chosen."""
    spec = SELECTOR.request_spec(replace(BUILT, flavor=flavor, host=None))
    assert isinstance(spec, RequestSpec)
    found = moves.stays_in_cell(KNOWN, spec)
    assert (found.code if found else None) == code


@pytest.mark.parametrize(
    ("policy", "same_host", "leaves"),
    [
        (ResizePolicy.ANY, True, False),
        (ResizePolicy.ANY, False, True),
        (HERE, True, False),
        (HERE, False, False),
        (ELSEWHERE, True, True),
        (ELSEWHERE, False, True),
    ],
)
def test_a_resize_leaves_its_host_by_its_policy_and_the_sites(
    policy: ResizePolicy, same_host: bool, leaves: bool
) -> None:
    assert moves.releases_source(requested(RESIZE, policy=policy), same_host=same_host) is leaves


SOURCE = ImageSource(source="https://images/1")


@pytest.mark.parametrize(
    ("request_", "known", "flavor", "image", "properties"),
    [
        (requested(ActionKind.MIGRATE), KNOWN, "m1.small", "old", IMAGE),
        (requested(ActionKind.MIGRATE, flavor="f", image="new", image_properties={"a": "b"}), KNOWN, "m1.small", "old",
         IMAGE),
        (requested(ActionKind.MIGRATE), instance(flavor="f", image="now"), "f", "now", IMAGE),
        (requested(RESIZE, flavor="m1.large"), KNOWN, "m1.large", "old", IMAGE),
        (requested(REBUILD, image="new", image_source=SOURCE), KNOWN, "m1.small", "new", {}),
        (requested(REBUILD, image="new", image_properties={"a": "b"}), KNOWN, "m1.small", "new", {"a": "b"}),
    ],
)  # fmt: skip
def test_hosts_are_chosen_for_the_instance_as_it_will_be(
    request_: ActionRequest, known: ActionContext, flavor: str, image: str, properties: dict[str, str]
) -> None:
    placed = destination_request.build_request_for(request_, known)
    assert (placed.flavor, placed.image, placed.image_properties) == (flavor, image, properties)
    assert (placed.image_source, placed.host, placed.max_attempts) == (request_.image_source, None, None)


def test_hosts_are_chosen_as_the_request_says_and_not_as_its_build_did() -> None:
    more: dict[str, Any] = {"host": "x", "forced": True, "ignore_hosts": ("y",), "max_attempts": 3}
    placed = destination_request.build_request_for(requested(ActionKind.MIGRATE, **more), KNOWN)
    assert {name: getattr(placed, name) for name in more} == more and placed.instance_uuid == UUID


# --- A move that is tried again is not dropped as late while its requester waits, and is never begun after that.


STOP = ActionRequest(
    request_id="d0000000-0000-4000-8000-000000000000",
    instance_uuid="a0000000-0000-4000-8000-000000000000",
    project_id="p",
    kind=ActionKind.STOP,
)
UNLOCATED = Retry("instance.unlocated", "placement does not know where the instance is (yet)")


class NoBuilds:
    """Stands for SchedulingEngine."""


class Moves:
    """Stands for ActionEngine: its database is away until a time; then placement does not know the instance, once."""

    def __init__(self, clock: SimClock, back_at_s: float) -> None:
        self._clock = clock
        self._back_at_s = back_at_s
        self.begun_at_s: list[float] = []
        self.ended: list[str] = []  # the codes of events

    async def process(self, actions: Sequence[PendingAction]) -> dict[int, Outcome]:
        if actions and self._clock.monotonic() < self._back_at_s:
            raise DatabaseUnavailable("away")
        return {one.batch_index: self._outcome(one) for one in actions}

    def _outcome(self, one: PendingAction) -> Outcome:
        refusal = one.delivery.ending_refusal()
        if refusal is not None and not one.delivery.is_abandoned:
            self.ended.append(refusal.code)
        if refusal is not None:
            return Done()
        if one.delivery.retries == 0:
            return UNLOCATED
        self.begun_at_s.append(self._clock.monotonic())
        return accepted(one.request)


async def wait_for_backlog() -> None:
    pass


@pytest.mark.parametrize(
    ("patience_s", "away_s"), [(10.0, 3.0), (120.0, 20.0), (120.0, 70.0), (120.0, 80.0), (60.0, 50.0), (600.0, 330.0)]
)
def test_a_move_is_answered_while_its_requester_waits(patience_s: float, away_s: float) -> None:
    actions, answer = requested_late(patience_s, away_s)
    assert isinstance(answer, ActionAccepted), f"no answer; begun: {actions.begun_at_s}"


@pytest.mark.parametrize(("patience_s", "away_s"), [(10.0, 11.0), (60.0, 100.0)])
def test_a_move_is_not_begun_when_its_requester_has_stopped_waiting(patience_s: float, away_s: float) -> None:
    actions, answer = requested_late(patience_s, away_s)
    assert (answer, actions.begun_at_s, actions.ended) == (None, [], [])


def test_a_move_ends_with_an_event_when_its_expiration_is_over_and_nobody_waits_for_an_answer() -> None:
    actions, _ = requested_late(10.0, 11.0, waits=False)
    assert (actions.begun_at_s, actions.ended) == ([], ["broker.expired"])


def test_an_expiration_counts_while_a_scheduler_has_the_move() -> None:
    actions, _ = requested_late(60.0, 20.0, waits=False)
    assert len(actions.begun_at_s) == 1 and not actions.ended


def requested_late(patience_s: float, away_s: float, *, waits: bool = True) -> tuple[Moves, ActionAccepted | None]:
    """A client requests a move of a scheduler whose database is away for some seconds. Its answer, if there is one.

    waits: for the answer; otherwise it publishes the move with an expiration of `patience_s`.
    """
    ended: list[tuple[Moves, ActionAccepted | None]] = []

    @on_virtual_time
    async def run() -> None:
        clock = SimClock()
        broker = MemoryBroker(clock)
        client, scheduler = await opened(broker, "client"), await opened(broker, "s1")
        selector = Hosts([]).selector
        actions = Moves(clock, clock.monotonic() + away_s)
        handler = RequestHandler(
            NoBuilds(),  # type: ignore[arg-type]
            actions,  # type: ignore[arg-type]
            selector,
            clock=clock,
            config=SchedulerConfig(),
            warmup=Warmup(selector, clock=clock),
            wait_for_backlog=wait_for_backlog,
        )
        consumers = [Consumer(scheduler, queue, handler, concurrency=2) for queue in REQUEST_QUEUES]
        for consumer in consumers:
            await consumer.start()
        answer = None
        if waits:
            with suppress(RequestTimeout):
                answer = await client.request(STOP, ActionAccepted, timeout_s=patience_s)
        else:
            key, body = routing_key(STOP), encode(STOP)
            expiring = Outgoing(exchange=COMMANDS, routing_key=key, body=body, expiration_s=patience_s)
            await client.transport.publish(expiring)
        if answer is None:
            await clock.sleep(away_s + 60.0)
        ended.append((actions, answer))
        for consumer in consumers:
            await consumer.drain(1.0)
        for one in (client, scheduler):
            await one.close()

    run()
    return ended[0]


async def opened(broker: MemoryBroker, process: str) -> Bus:
    transport = MemoryTransport(broker, process)
    made = Bus(API, transport, process=process, clock=broker.clock, rng=random.Random(process))
    await made.open()
    return made


# --- A request whose instance changes between the choice and the write: tried again, and in the end refused.


INSTANCE = "a0000000-0000-4000-8000-000000000000"
OVERTAKEN = "d0000000-0000-4000-8000-000000000000"
ANOTHER = "b0000000-0000-4000-8000-000000000000"  # another request about it, which ends meanwhile


class Contended(MemoryBuilds):
    """A store in which the other request ends after the engine has read the records, and before it locks them."""

    def __init__(self) -> None:
        super().__init__(MemoryBuildTable(SystemClock()).session())
        self.sent = Sent()
        self.publish_through(self.sent)  # type: ignore[arg-type]
        self.operations = 0

    def operation(self) -> Any:
        return self._after_another(super().operation())

    @asynccontextmanager
    async def _after_another(self, mine: Any) -> AsyncIterator[Any]:
        self.operations += 1
        if self.operations == 2:
            await self.put(SinceBuild())
        async with mine as unit:
            yield unit

    async def put(self, instance: SinceBuild) -> None:
        async with super().operation() as unit:
            build = (await unit.lock([INSTANCE]))[INSTANCE]
            await unit.update([BuildUpdate(build=replace(build, instance=instance))], 1.0)


class Follower:
    """A replica that is as new as it gets."""

    async def refresh(self, *, timeout_s: float) -> bool:
        return True


class Stepping(SystemClock):
    """A clock of a day that is set."""

    at = 1.0

    def time(self) -> float:
        return self.at


@pytest.fixture
async def store() -> Contended:
    made = Contended()
    request = BuildRequest(instance_uuid=INSTANCE, flavor="m1.small", project_id="p")
    build = RecordedBuild(
        instance_uuid=INSTANCE, project_id="p", state=BuildState.ACTIVE, sequence=9, terminal=True, cell="c1", host="h0"
    )
    async with made.unit() as unit:
        await unit.insert([NewBuild(request=request, build=build)], 1.0)
    await made.put(SinceBuild(under_way=ANOTHER))
    return made


async def reload() -> None:
    """No newer objects are on record."""


def choosing(hosts: Hosts, follower: ReplicaFollower | None = None) -> DestinationChooser:
    clock, rng = SystemClock(), random.Random(5)
    return DestinationChooser(
        PlacementClaims(), hosts.selector, follower or Follower(), clock=clock, rng=rng, reload=reload
    )


async def outcome_of(store: Contended, delivery: int) -> Outcome:
    hosts, clock = Hosts([PLENTY] * 2), SystemClock()
    engine = ActionEngine(store, hosts.selector, choosing(hosts), clock=clock)
    action = ActionRequest(request_id=OVERTAKEN, instance_uuid=INSTANCE, project_id="p", kind=ActionKind.STOP)
    pending = PendingAction(
        batch_index=0,
        request=action,
        taken_at=clock.time(),
        delivery=RequestDelivery(retries=delivery, last=delivery >= MAX_RETRIES),
    )
    return (await engine.process([pending]))[0]


async def test_a_request_is_made_when_all_that_it_needs_is_locked() -> None:
    """A drain with a rate waits from then on; with a long wait for the lock two of its moves began at once."""
    store, clock, hosts = MemoryBuilds(MemoryBuildTable(SystemClock()).session()), Stepping(), Hosts([PLENTY])
    store.publish_through(Sent())
    engine = ActionEngine(store, hosts.selector, choosing(hosts), clock=clock)

    async def admit(_: OperationUnit, ready: Sequence[PendingAction]) -> Sequence[PendingAction]:
        clock.at += 100.0
        return ready

    await engine.process([PendingAction(batch_index=0, request=requested(), taken_at=1.0, delivery=LAST)], admit)
    (made,) = await store.actions(ActionQuery(request_id=MOVE))
    assert made.created_at == 101.0


async def test_a_request_whose_instance_changed_meanwhile_is_tried_again_and_nothing_is_written(
    store: Contended,
) -> None:
    for delivery in range(MAX_RETRIES):
        store.operations = 0
        await store.put(SinceBuild(under_way=ANOTHER))
        assert await outcome_of(store, delivery) == CHANGED
    assert store.sent.rows == []


async def test_the_last_delivery_of_a_request_whose_instance_changed_is_refused_and_no_dead_letter(
    store: Contended,
) -> None:
    """Seed 1795360297: it was found busy, and the other request ended before the records were locked."""
    refusal = Refusal(code=CHANGED.code, reason=CHANGED.reason)
    assert await outcome_of(store, MAX_RETRIES) == Done(reply=refusal)
    ((_, (row,)),) = store.sent.rows
    assert isinstance(row.message, ActionEvent)
    assert (row.message.state, row.message.terminal, row.message.code) == (ActionState.REFUSED, True, CHANGED.code)
    async with MemoryBuilds.operation(store) as unit:
        ((_, known),) = (await unit.known([(OVERTAKEN, INSTANCE)])).items()
    assert known.action is not None and known.action.state is ActionState.REFUSED and known.current.under_way is None
    assert await outcome_of(store, 0) == Done(reply=refusal), "a repeat is answered from the record"
