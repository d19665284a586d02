"""Hosts that are emptied: what is requested next, what waits and why, and when a drain is over."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from bus.clock import CLOCKS_APART_S, SystemClock
from bus.contracts.actions import ActionKind, ActionRequest, ActionState, Condition
from bus.contracts.base import MAX_REASON, Message, Refusal
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.cell import HostReport, HostStates, ServiceDown, ServiceStates
from bus.contracts.drains import DrainAction, DrainCommand, DrainQuery, DrainRecord, DrainState, DrainTarget
from bus.contracts.objects import HostDecision
from bus.contracts.operations import AdminState, HostAdminState
from bus.contracts.placement import GroupPolicy, LocatePage, LocateRequest, ServerGroup
from bus.contracts.placement_queries import ConsumerRecord, ServiceHostsPage, ServiceHostsQuery, TreeConsumer
from bus.faults import Fault, RequestRefused, RequestTimeout
from scheduler_worker.action.destination import DestinationChooser
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.drain.drain_inventory import PAGE_HOSTS, PAGES, DrainInventory
from scheduler_worker.drain.drain_planner import DrainPlanner, MadePlan
from scheduler_worker.drain.drain_steps import (
    MAX_REFUSALS,
    WaitingInstance,
    commanded,
    drained,
    end_of,
    evacuating,
    instances_on,
    is_down,
    is_migration,
    level_of,
    next_moves,
    request_id,
)
from scheduler_worker.fleet.host_listener import Warmup
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.placement_client import PlacementUnavailable
from scheduler_worker.records.action_record import ActionContext, RecordedAction
from scheduler_worker.records.build_record import RecordedBuild, SinceBuild
from scheduler_worker.records.drain_record import BegunMoves, DrainedHost, EndedRequest, InstanceOnHost
from scheduler_worker.selection.selector import Selector
from scheduler_worker.selection.selector_config import SelectorConfig
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.claims import PlacementClaims
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts
from tests.unit.scheduler_worker.test_placing import cluster
from tests.unit.scheduler_worker.test_without_an_answer import Site, site

__all__ = ["cluster", "site"]  # fixtures

A, DRAIN, HOST, H2, H9 = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ad129")
B, R = (f"{n}0000000-0000-4000-8000-000000000000" for n in "be")
NOW = 1000.0
DRAINED = DrainedHost(HOST, "h1", drain=DRAIN)
DOWN = replace(DRAINED, code="service.down")
RECORD = DrainRecord(name="rack", target=DrainTarget.AGGREGATE, kind=ActionKind.LIVE_MIGRATE, by="ann")
LEVEL, IDLE = level_of(RECORD, NOW), BegunMoves()
EVACUATING = evacuating(100)


def context(
    state: BuildState = BuildState.ACTIVE,
    host: str | None = "h1",
    condition: Condition = Condition.ACTIVE,
    under_way: str | None = None,
    host_uuid: str | None = None,
) -> ActionContext:
    uuid = host_uuid or {"h1": HOST, "h2": H2}.get(host or "")
    build = RecordedBuild(instance_uuid=A, project_id="p", state=state, sequence=1, cell="c", host=host, host_uuid=uuid)
    return ActionContext(build=replace(build, instance=SinceBuild(condition=condition, under_way=under_way)))


ACTIVE = InstanceOnHost(instance_uuid=A, project_id="p", source=DRAINED, known=context())
HELD = replace(ACTIVE, code="instance.building", reason="its build", known=ActionContext())
BUSY = replace(ACTIVE, known=context(under_way=R))
ON_DOWN = replace(ACTIVE, source=DOWN)
KEPT = replace(HELD, code="instance.unconfirmed")


def request(**more: Any) -> RecordedAction:
    fields = {
        "kind": ActionKind.MIGRATE,
        "state": ActionState.DONE,
        "terminal": True,
        "cell": "c",
        "host": "h1",
        "host_uuid": HOST,
        **more,
    }
    return RecordedAction(request_id=R, instance_uuid=A, project_id="p", digest=b"", sequence=9, **fields)


def ended(ago_s: float, code: str = "no_valid_host", **more: Any) -> EndedRequest:
    """A request of the drain that has ended so long ago."""
    fields = {"state": ActionState.FAILED if code else ActionState.DONE, "drain": DRAIN, "reason": "why", **more}
    number = int(ago_s * 100)
    return EndedRequest(request_id=f"{number:08}{A[8:]}", instance_uuid=A, code=code, updated_at=NOW - ago_s, **fields)


def tries(*ago_s: float, **more: Any) -> list[EndedRequest]:
    return [ended(one, **more) for one in ago_s]


def decided(
    one: InstanceOnHost, requests: Sequence[EndedRequest] = (), level: Any = LEVEL
) -> ActionRequest | WaitingInstance:
    """What is next of one instance."""
    found = next_moves(level, [one], {A: requests}, IDLE, NOW)
    assert len(found.moves) + len(found.waiting) == 1
    return found.moves[0].request if found.moves else found.waiting[0]


def test_the_request_of_a_move() -> None:
    """The same from every scheduler; a cold one is confirmed at once, and those of a cell may leave it."""
    live, again = decided(ACTIVE), decided(ACTIVE)
    assert isinstance(live, ActionRequest) and live == again
    assert (live.kind, live.host, live.user_id, live.auto_confirm_s) == (ActionKind.LIVE_MIGRATE, None, "drain", None)
    assert (live.project_id, live.instance_uuid, live.request_id) == ("p", A, request_id(DRAIN, A))
    cold = decided(ACTIVE, level=level_of(replace(RECORD, kind=ActionKind.MIGRATE), NOW))
    assert isinstance(cold, ActionRequest) and (cold.kind, cold.auto_confirm_s) == (ActionKind.MIGRATE, 0.0)
    of_cell = decided(ACTIVE, level=level_of(replace(RECORD, target=DrainTarget.CELL), NOW))
    assert isinstance(of_cell, ActionRequest)
    assert (of_cell.kind, of_cell.user_id) == (ActionKind.MIGRATE, "cell-drain")
    evacuated = decided(ACTIVE, level=EVACUATING)
    assert evacuated == ActionRequest(
        request_id=live.request_id, instance_uuid=A, project_id="p", user_id="evacuation", by="evacuation",
        kind=ActionKind.EVACUATE,
    )  # fmt: skip


@pytest.mark.parametrize("target", DrainTarget)
def test_its_requests_can_be_read(target: DrainTarget) -> None:
    """The user of those of a cell was no word."""
    made = decided(ACTIVE, level=level_of(replace(RECORD, target=target), NOW))
    assert msgspec.json.decode(msgspec.json.encode(made), type=ActionRequest) == made


def test_the_id_of_a_try_follows_from_the_newest_request_that_has_ended() -> None:
    """Also a client's: a request that is on record is never made again."""
    ids = [
        cast("ActionRequest", decided(ACTIVE, requests)).request_id
        for requests in ([], tries(99), tries(98, 99), [ended(9, "", drain=None), *tries(99)])
    ]
    assert len({*ids, request_id(H9, A), request_id(DRAIN, B)}) == 6
    assert ids[1] == request_id(DRAIN, A, ended(99).request_id)


@pytest.mark.parametrize("code", ["instance.not_running", "no_valid_host", ""])
def test_a_request_that_a_late_clock_has_made_is_newer_than_that_which_it_follows(code: str) -> None:
    """Its id was made again for ever, as that of the next one: it is on record, and moved nothing."""
    client = ended(5, drain=None)  # made by a scheduler whose clock is ahead of the others'
    first = replace(ended(6, code), request_id=request_id(DRAIN, A, client.request_id))
    second = replace(ended(7, "no_valid_host"), request_id=request_id(DRAIN, A, first.request_id))
    for requests in ([client, first], [client, first, second]):
        found = decided(ACTIVE, requests)
        assert isinstance(found, ActionRequest)
        assert found.request_id == request_id(DRAIN, A, requests[-1].request_id)
        is_cold = requests[-1].code == "instance.not_running"
        assert found.kind is (ActionKind.MIGRATE if is_cold else ActionKind.LIVE_MIGRATE)


STILL, STUCK = {"is_stuck": False}, {"is_stuck": True}
REFUSED = {"code": "no_valid_host", "reason": "why"}
TOLD = {"code": "instance.building", "reason": "its build"}
IS_BUSY = {"code": "instance.busy", "reason": "another request about it is under way"}
UNTIL_DONE = ended(0.5, "")  # it was moved, and is there again
NOT_LIVE = ended(0.1, "instance.not_running")


@pytest.mark.parametrize(
    ("one", "requests", "after"),
    [
        pytest.param(ACTIVE, [], ActionKind.LIVE_MIGRATE, id="it is active"),
        pytest.param(ACTIVE, tries(1.9), REFUSED | STILL, id="refused a moment ago"),
        pytest.param(ACTIVE, tries(2.0), ActionKind.LIVE_MIGRATE, id="the first pause is over"),
        pytest.param(ACTIVE, tries(3.9, 99), REFUSED | STILL, id="refused twice"),
        pytest.param(ACTIVE, tries(4.0, 99), ActionKind.LIVE_MIGRATE, id="the second pause is over"),
        pytest.param(ACTIVE, tries(7.9, 98, 99), REFUSED | STUCK, id="refused three times"),
        pytest.param(ACTIVE, tries(8.0, 98, 99), ActionKind.LIVE_MIGRATE, id="it is tried again all the same"),
        pytest.param(ACTIVE, tries(59.9, *range(90, 99)), REFUSED | STUCK, id="the longest pause"),
        pytest.param(ACTIVE, tries(60.0, *range(90, 99)), ActionKind.LIVE_MIGRATE, id="and for ever"),
        pytest.param(ACTIVE, tries(899.9, *range(901, 930)), REFUSED | STUCK, id="but rarely after many"),
        pytest.param(ACTIVE, tries(900.0, *range(901, 930)), ActionKind.LIVE_MIGRATE, id="four times an hour"),
        pytest.param(
            ACTIVE, tries(60.0, *range(90, 99), *range(901, 920)), ActionKind.LIVE_MIGRATE, id="not yet rarely"
        ),
        pytest.param(ACTIVE, tries(-CLOCKS_APART_S), REFUSED | STILL, id="by another scheduler's clock"),
        pytest.param(ACTIVE, tries(-9999.0), ActionKind.LIVE_MIGRATE, id="before the clock was set back"),
        pytest.param(ACTIVE, [UNTIL_DONE, *tries(97, 98, 99)], ActionKind.LIVE_MIGRATE, id="it has come back"),
        pytest.param(ACTIVE, tries(0.1, drain=None), ActionKind.LIVE_MIGRATE, id="a client was refused"),
        pytest.param(ACTIVE, tries(0.1, drain=H9), ActionKind.LIVE_MIGRATE, id="another drain was"),
        pytest.param(ACTIVE, tries(1.0, 98, 99, code="instance.busy"), {"code": "instance.busy"} | STILL, id="busy"),
        pytest.param(ACTIVE, [NOT_LIVE], ActionKind.MIGRATE, id="it does not run, so it moves cold, at once"),
        pytest.param(ACTIVE, [ended(0.1), NOT_LIVE], REFUSED | STILL, id="the cold move was refused, too"),
        pytest.param(ACTIVE, [ended(9), NOT_LIVE], ActionKind.LIVE_MIGRATE, id="it may run by now"),
        pytest.param(BUSY, [], IS_BUSY | STILL, id="a client's request is under way"),
        pytest.param(BUSY, tries(97, 98, 99), IS_BUSY | STILL, id="whatever was before"),
        pytest.param(HELD, [], TOLD | STILL, id="it is being built"),
        pytest.param(replace(HELD, code="instance.arriving"), [], {"code": "instance.arriving"} | STILL, id="it comes"),
        pytest.param(replace(HELD, code="instance.releasing"), [], {"code": "instance.releasing"} | STILL, id="goes"),
        pytest.param(replace(HELD, code="instance.unreleased"), [], {"code": "instance.unreleased"} | STILL, id="gone"),
        pytest.param(KEPT, [], {"code": "instance.unconfirmed"} | STUCK, id="kept"),
        pytest.param(replace(HELD, code="instance.misplaced"), [], {"code": "instance.misplaced"} | STUCK, id="lost"),
        pytest.param(ON_DOWN, [], {"code": "service.down", "reason": DOWN.reason} | STUCK, id="its service is down"),
        pytest.param(
            replace(HELD, source=DOWN),
            [],
            TOLD | {"reason": "its build; h1: service.down"} | STUCK,
            id="and down",
        ),
        pytest.param(replace(BUSY, source=DOWN), [], IS_BUSY | STUCK, id="its service is down while it is busy"),
        *(
            pytest.param(replace(ACTIVE, known=context(condition=one)), [], {"code": f"instance.{one}"} | STUCK, id=one)
            for one in (Condition.SHELVED, Condition.RESCUED, Condition.RESIZED)
        ),
    ],
)
def test_what_is_next_of_an_instance(one: InstanceOnHost, requests: list[EndedRequest], after: Any) -> None:
    found = decided(one, requests)
    if isinstance(after, ActionKind):
        assert isinstance(found, ActionRequest) and found.kind is after
    else:
        assert isinstance(found, WaitingInstance) and found.instance == one
        assert {name: getattr(found, name) for name in after} == after


def test_what_is_long_is_cut() -> None:
    found = decided(replace(HELD, reason="w" * MAX_REASON, source=DOWN))
    assert isinstance(found, WaitingInstance) and len(found.reason) == MAX_REASON


def test_an_evacuation_moves_what_is_shelved_and_is_given_up_after_many_refusals() -> None:
    """One that was refused because another request is under way uses up no try: of one whose former source was silent
    24 were refused, and then none was made any more.
    """
    shelved = replace(ACTIVE, known=context(condition=Condition.SHELVED))
    assert isinstance(decided(shelved, level=EVACUATING), ActionRequest)
    most = [*range(1000, 1000 + MAX_REFUSALS)]
    found = decided(ACTIVE, tries(*most), EVACUATING)
    assert isinstance(found, WaitingInstance) and found.is_last and found.is_stuck
    assert isinstance(decided(ACTIVE, tries(*most[1:]), EVACUATING), ActionRequest)
    busy = [*tries(*most, code="instance.busy"), *tries(2000)]
    assert isinstance(decided(ACTIVE, busy, EVACUATING), ActionRequest)
    paused = [decided(ACTIVE, tries(pause_s - 0.1, *most[: count - 1]), EVACUATING) for count, pause_s in
              ((1, 2), (2, 4), (8, 256), (10, 600), (23, 600))]  # fmt: skip
    assert all(isinstance(one, WaitingInstance) and not one.is_last for one in paused)


@pytest.mark.parametrize("record", [{"kind": ActionKind.MIGRATE}, {"target": DrainTarget.CELL}], ids=["cold", "a cell"])
@pytest.mark.parametrize(
    ("state", "code", "count", "is_last"),
    [
        (ActionState.FAILED, "image.broken", 2, False),
        (ActionState.FAILED, "image.broken", 3, True),
        (ActionState.FAILED, "no_valid_host", 29, False),
        (ActionState.REFUSED, "image.broken", 29, False),
    ],
)
def test_a_cold_move_that_began_and_failed_is_tried_three_times(
    record: dict[str, Any], state: ActionState, code: str, count: int, is_last: bool
) -> None:
    """Each stopped the instance; that of a cell took it down and built it again, every minute for ever."""
    requests = tries(*range(700, 700 + count), state=state, code=code)
    found = decided(ACTIVE, requests, level_of(replace(RECORD, **record), NOW))
    assert isinstance(found, WaitingInstance) is is_last
    assert not isinstance(found, WaitingInstance) or (found.is_last and found.is_stuck)


def test_no_story_moves_an_instance_that_has_to_wait() -> None:
    """Each host, hold, condition, request under way and history of two requests, of drains and evacuations."""
    sources = (DRAINED, DOWN, replace(DRAINED, code="host.fenced"))
    holds = ("", "instance.building", "instance.unconfirmed")
    codes, agos = ("no_valid_host", "instance.busy", "instance.not_running", ""), (0.1, 3.0, 700.0)
    histories = [[], *([ended(ago, code)] for code in codes for ago in agos)]
    histories += [[ended(ago, one), ended(999, two)] for one, two in product(codes, codes) for ago in agos]
    seen = 0
    for source, hold, condition, under_way, requests, level in product(
        sources, holds, Condition, (None, R), histories, (LEVEL, EVACUATING, replace(LEVEL, begins=False))
    ):
        known = context(condition=condition, under_way=under_way)
        one = replace(ACTIVE, source=source, code=hold, known=known)
        found = decided(one, requests, level)
        seen += 1
        if not isinstance(found, ActionRequest):
            assert found.code or not level.begins, "whoever waits has a reason, unless nothing begins"
            continue
        assert not (source.code or hold or under_way) and level.begins
        assert found.request_id not in {request.request_id for request in requests}
        newest = next(iter(requests), None)
        is_free = newest is None or not newest.code or newest.code == "instance.not_running"
        assert is_free or NOW - (newest.updated_at if newest else 0.0) >= 2.0
        assert condition not in (Condition.SHELVED, Condition.RESCUED, Condition.RESIZED) or level is EVACUATING
        with_older = [*requests, ended(5000, drain=None)]
        assert decided(one, with_older, level) == found or not requests, "a client's older one changes nothing"
    assert seen > 10_000


@pytest.mark.parametrize(
    ("fields", "last_at", "under_way", "begun"),
    [
        ({"at_once": 20}, 0.0, 0, 20),
        ({"at_once": 3}, NOW - 1.0, 2, 1),
        ({"at_once": 3}, NOW - 1.0, 3, 0),
        ({"at_once": 3}, NOW - 1.0, 4, 0),
        ({"at_once": 20, "per_minute": 600}, 0.0, 0, 1),
        ({"at_once": 20, "per_minute": 600}, NOW - 3600.0, 0, 10),
        ({"at_once": 2, "per_minute": 600}, NOW - 3600.0, 0, 2),
        ({"at_once": 20, "per_minute": 240}, NOW - 0.5, 0, 2),
        ({"at_once": 20, "per_minute": 10}, NOW - 3600.0, 0, 1),
        ({"at_once": 20, "per_minute": 10}, NOW - 6.0, 0, 1),
        ({"at_once": 20, "per_minute": 10}, NOW - 5.9, 0, 0),
        ({"at_once": 20, "deadline_at": NOW + 0.1}, 0.0, 0, 20),
        ({"at_once": 20, "deadline_at": NOW}, 0.0, 0, 0),
        ({"at_once": 20, "state": DrainState.PAUSED}, 0.0, 0, 0),
        ({"at_once": 20, "state": DrainState.STOPPING}, 0.0, 0, 0),
    ],
)
def test_how_many_moves_begin_at_once(fields: dict[str, Any], last_at: float, under_way: int, begun: int) -> None:
    """With a rate also after a pause, and after moves that took long. What cannot move takes no place of the others."""
    held = [replace(ACTIVE, instance_uuid=f"{at:08d}{A[8:]}") for at in range(30)]
    stuck = replace(ON_DOWN, instance_uuid=B)
    level = level_of(replace(RECORD, **fields), NOW)
    found = next_moves(level, [stuck, *held], {}, BegunMoves(under_way, last_at), NOW)
    assert [one.request.instance_uuid for one in found.moves] == [one.instance_uuid for one in held[:begun]]
    waiting = [(one.instance.instance_uuid, one.code) for one in found.waiting]
    assert waiting == [(B, "service.down"), *((one.instance_uuid, "") for one in held[begun:])]


@pytest.mark.parametrize(("fields", "began"), [({"per_minute": 1}, 60.0), ({"at_once": 1}, 0.1)])
def test_what_is_refused_for_ever_keeps_no_other_from_its_turn(fields: dict[str, Any], began: float) -> None:
    """The first was due again with each slot of a minute, and nothing else moved while the drain went on."""
    level, uuids = level_of(replace(RECORD, **fields), NOW), (A, B, H2)
    held = [replace(ACTIVE, instance_uuid=uuid) for uuid in uuids]
    requests = {A: tries(60.0, *range(90, 99)), B: tries(61.0, *range(90, 99))}
    for left, first in ((held, H2), (held[:2], B), (held[:1], A)):
        found = next_moves(level, left, requests, BegunMoves(0, NOW - began), NOW)
        assert [one.request.instance_uuid for one in found.moves] == [first]
        assert len(found.waiting) == len(left) - 1


def test_what_was_refused_keeps_its_reason_where_it_could_be_tried_again_and_no_move_begins() -> None:
    """It was shown as one that waits for its turn, once a minute for a moment."""
    for count in (1, 2, 3, 4):
        requests = {A: tries(*range(100, 100 + count))}
        (one,) = next_moves(replace(LEVEL, begins=False), [ACTIVE], requests, IDLE, NOW).waiting
        assert (one.code, one.reason, one.is_stuck) == ("no_valid_host", "why", count >= 3)
        assert len(next_moves(LEVEL, [ACTIVE], requests, IDLE, NOW).moves) == 1


def test_of_two_hosts_that_hold_an_instance_the_one_where_it_is_active_counts() -> None:
    kept = replace(ACTIVE, code="instance.unconfirmed", source=replace(DRAINED, uuid=H2, name="h2"))
    for held in ([ACTIVE, kept], [kept, ACTIVE], [ACTIVE, ACTIVE]):
        found = next_moves(LEVEL, held, {}, IDLE, NOW)
        assert [one.instance for one in found.moves] == [ACTIVE] and not found.waiting
    (first,) = next_moves(LEVEL, [HELD, kept], {}, IDLE, NOW).waiting
    assert first.instance == HELD


def test_when_a_drain_is_over() -> None:
    late, stopping = replace(RECORD, deadline_at=NOW), replace(RECORD, state=DrainState.STOPPING)
    paused, over = replace(RECORD, state=DrainState.PAUSED), replace(RECORD, state=DrainState.ENDED)
    cases: list[tuple[DrainRecord, int, bool, str | None]] = [
        (RECORD, 0, True, "drain.done"),
        (RECORD, 0, False, None),
        (RECORD, 1, True, None),
        (late, 0, False, "drain.deadline"),
        (replace(late, deadline_at=NOW + 0.1), 0, False, None),
        (late, 0, True, "drain.done"),
        (late, 1, False, None),
        (stopping, 1, False, None),
        (stopping, 0, False, "drain.stopped"),
        (stopping, 0, True, "drain.stopped"),
        (replace(late, state=DrainState.PAUSED), 0, False, "drain.deadline"),
        (paused, 0, True, None),
        (over, 0, False, None),
        (over, 0, True, None),
    ]
    for record, under_way, is_empty, code in cases:
        found = end_of(record, BegunMoves(under_way), NOW, is_empty=is_empty)
        assert found == code, (record, under_way, is_empty)


def test_commands_and_what_a_host_is_in_a_drain() -> None:
    def after(record: DrainRecord, action: DrainAction, **more: Any) -> DrainRecord | Refusal:
        return commanded(record, DrainCommand(drain=DRAIN, action=action, by="bob", **more), NOW)

    ended = replace(RECORD, state=DrainState.ENDED, code="drain.left", deadline_at=NOW - 1)
    assert after(ended, DrainAction.RESUME) == RECORD
    assert after(ended, DrainAction.RESUME, deadline_s=5.0) == replace(RECORD, deadline_at=NOW + 5.0)
    stopping = after(RECORD, DrainAction.STOP)
    assert stopping == replace(RECORD, state=DrainState.STOPPING) and after(stopping, DrainAction.RESUME) == RECORD
    for record, code in ((ended, "drain.ended"), (stopping, "drain.stopping")):
        refused = after(record, DrainAction.PAUSE)
        assert isinstance(refused, Refusal) and refused.code == code
    assert after(ended, DrainAction.STOP) == ended
    assert after(RECORD, DrainAction.PAUSE) == replace(RECORD, state=DrainState.PAUSED)
    for deadline_at in (NOW - 1, NOW, NOW + 1):
        kept = deadline_at if deadline_at > NOW else None
        paused = replace(RECORD, state=DrainState.PAUSED, deadline_at=deadline_at)
        assert after(paused, DrainAction.RESUME) == replace(RECORD, deadline_at=kept)
        assert after(paused, DrainAction.RESUME, deadline_s=9.0) == replace(RECORD, deadline_at=NOW + 9.0)
    assert drained(None, DRAIN, "h1", "rack") == HostDecision(
        host="h1", state=AdminState.DISABLED, reason="rack", drain=DRAIN
    )
    for before in (AdminState.ENABLED, AdminState.DISABLED, AdminState.MAINTENANCE):
        decision = HostDecision(host="h1", state=before, reason="fan")
        taken = drained(decision, DRAIN, "h1", "rack")
        assert taken.drain == DRAIN and taken.state is not AdminState.ENABLED
        assert before is AdminState.ENABLED or replace(taken, drain=None) == decision
        assert drained(taken, "another", "h1", "again") == replace(taken, drain="another")


class Refusing:
    """Placement refuses, or does not answer, every query."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    async def refresh(self, *, timeout_s: float) -> bool:
        return True

    async def request_all(self, messages: Sequence[object], *_: object, **__: object) -> list[Fault]:
        return [self._fault for _ in messages]


async def planned(fault: Fault) -> MadePlan | Refusal:
    """A host in use is to be drained."""
    (uuid,), selector = (hosts := Hosts([{"VCPU": 4}])).uuids, hosts.selector
    hosts.replica.assume("held", {uuid: {"VCPU": 1}})
    placement, clock = cast("Any", Refusing(fault)), SystemClock()
    store = MemoryBuilds(MemoryBuildTable(clock).session())
    warmup = Warmup(selector, clock=clock)
    holders = DrainInventory(store, selector, placement, placement, warmup=warmup, clock=clock)
    planner = DrainPlanner(selector, cast("Any", None), holders, clock=clock)
    return await planner.plan(DrainQuery(host=uuid, target=DrainTarget.HOST))


async def test_a_query_that_placement_refuses_for_good_refuses_the_plan() -> None:
    """It was taken for an answer that did not come, and requested again until it was given up."""
    with pytest.raises(RequestRefused, match="too long"):
        await planned(RequestRefused("too long", code="message.invalid"))
    with pytest.raises(PlacementUnavailable):
        await planned(RequestTimeout("no answer"))


# --- a plan whose moves depend on each other

POOL, RACK = (f"{n}0000000-0000-4000-8000-000000000001" for n in "fe")
THREE = [f"{n}0000000-0000-4000-8000-000000000001" for n in "123"]


class OnOneHost:
    """A host that holds these instances, for a planner."""

    def __init__(self, host: DrainedHost, builds: Sequence[BuildRequest]) -> None:
        self._host, self._builds = host, builds

    async def hosts_of(self, *_: object) -> tuple[DrainTarget, tuple[DrainedHost, ...]]:
        return DrainTarget.HOST, (self._host,)

    async def instances_on(self, *_: object, **__: object) -> list[InstanceOnHost]:
        found = []
        for one in self._builds:
            known = replace(context(host_uuid=self._host.uuid), build_request=one)
            build = replace(known.build, instance_uuid=one.instance_uuid, project_id=one.project_id)
            fields = {"instance_uuid": one.instance_uuid, "project_id": one.project_id}
            found.append(InstanceOnHost(source=self._host, known=replace(known, build=build), **fields))
        return found


async def destinations_of(
    hosts: Hosts, holding: dict[str, dict[str, int]], builds: Sequence[BuildRequest]
) -> list[Any]:
    """By the plan of a drain of the first host, where each of these instances is and holds so much."""
    clock, host = SystemClock(), DrainedHost(hosts.uuids[0], "h0", drain=DRAIN)

    class Where(PlacementClaims):
        async def locate(self, requests: Sequence[LocateRequest]) -> list[LocatePage | Fault]:
            return [LocatePage(members={host.uuid: 1}, hosts={one.consumers[0]: (host.uuid,)}) for one in requests]

    claims = Where()
    claims.held = {
        one.instance_uuid: ConsumerRecord(
            consumer=one.instance_uuid, project_id=one.project_id, consumer_generation=1, allocations=holding,
            hosts=(host.uuid,),
        )
        for one in builds
    }  # fmt: skip
    chooser = DestinationChooser(
        claims, hosts.selector, cast("Any", None), clock=clock, rng=hosts.rng, reload=cast("Any", None)
    )
    holders = cast("Any", OnOneHost(host, builds))
    made = await DrainPlanner(hosts.selector, chooser, holders, clock=clock).plan(DrainQuery(host=host.uuid))
    assert isinstance(made, MadePlan)
    return [one.hosts or one.code for one in made.plan.moves]


async def test_a_plan_counts_what_moves_within_a_shared_pool_once() -> None:
    """Of a pool with room for half of one more, each move but the first was planned to have no host."""
    flavor = Flavor(vcpus=1, memory_mb=0, disk_gb=20)
    hosts = Hosts([{"VCPU": 8}] * 2, config=SchedulerConfig(flavors={"f": flavor}), cells=["c", "c"])
    both = [replace(one, aggregates=(RACK,)) for one in hosts.states]
    pool = replace(both[0], uuid=POOL, name="pool", root_uuid=POOL, traits=("MISC_SHARES_VIA_AGGREGATE",))
    pool = replace(pool, inventories={"DISK_GB": (70, 1, 70, 1, 70, 0, 1.0)}, used={"DISK_GB": 60})
    hosts.replica.load([replace(both[0], used={"VCPU": 3}), both[1], pool], 0)
    builds = [BuildRequest(instance_uuid=uuid, flavor="f", project_id="p") for uuid in THREE]
    holding = {hosts.uuids[0]: {"VCPU": 1}, POOL: {"DISK_GB": 20}}
    assert await destinations_of(hosts, holding, builds) == [("h1",)] * 3


async def test_a_plan_counts_the_members_of_a_group_by_its_project() -> None:
    """Two projects may call their groups alike: the member of one kept that of the other from its host."""
    hosts = Hosts([PLENTY] * 2, cells=["c", "c"])
    group = ServerGroup(uuid=RACK, policy=GroupPolicy.ANTI_AFFINITY)
    builds = [
        BuildRequest(instance_uuid=uuid, flavor="m1.small", project_id=project, server_group=group)
        for uuid, project in zip(THREE, "pqq", strict=True)
    ]
    found = await destinations_of(hosts, {hosts.uuids[0]: {"VCPU": 1}}, builds)
    assert found == [("h1",), ("h1",), "no_valid_host"]


# --- what a drained host still holds of instances


@pytest.mark.parametrize(
    ("known", "code"),
    [
        pytest.param(context(), "", id="it is active there"),
        pytest.param(context(BuildState.ACCEPTED, None), "instance.building", id="it has been claimed"),
        pytest.param(context(BuildState.SCHEDULED), "instance.building", id="its build is dispatched"),
        pytest.param(context(BuildState.BUILDING), "instance.building", id="its build is in progress"),
        pytest.param(context(BuildState.DELETING), "instance.releasing", id="it is being deleted"),
        pytest.param(context(BuildState.FAILED), "instance.unreleased", id="its build has failed"),
        pytest.param(context(BuildState.DELETED), "instance.unreleased", id="it has been deleted"),
        pytest.param(context(host="h2", under_way=R), "instance.arriving", id="a move brings it"),
        pytest.param(context(host="h2"), "instance.misplaced", id="the record has it elsewhere"),
        pytest.param(context(host_uuid=H2), "instance.misplaced", id="the record has it on a namesake"),
    ],
)
def test_why_an_instance_whose_allocation_is_there_cannot_be_moved(known: ActionContext, code: str) -> None:
    found = instances_on(DRAINED, known)
    assert found is not None and (found.instance_uuid, found.code, found.source) == (A, code, DRAINED)


@pytest.mark.parametrize(
    ("action", "known", "found"),
    [
        (request(), context(host="h2", condition=Condition.RESIZED), (A, "instance.unconfirmed")),
        (request(), context(host="h2"), (A, "instance.unreleased")),
        (request(), context(host="h2", condition=Condition.RESIZED, under_way=B), (A, "instance.arriving")),
        (request(), context(BuildState.DELETED, "h2"), (A, "instance.unreleased")),
        (request(), context(BuildState.DELETING, "h2"), (A, "instance.releasing")),
        (request(), context(under_way=R), (A, "")),
        (request(), ActionContext(), (A, "instance.unconfirmed")),
        (None, None, (R, "instance.unconfirmed")),
    ],
)
def test_an_instance_whose_source_a_migration_keeps_is_named(
    action: RecordedAction | None, known: ActionContext | None, found: tuple[str, str]
) -> None:
    holder = TreeConsumer(consumer=R, project_id="p", user_id="u", consumer_type="MIGRATION", attempt=1)
    assert is_migration(holder)
    held = instances_on(DRAINED, known or ActionContext(), action, holder)
    assert held is not None and (held.instance_uuid, held.code) == found


@pytest.mark.parametrize(("consumer_type", "attempt"), [("MIGRATION", 0), ("INSTANCE", 2), ("INSTANCE", 0)])
def test_what_a_client_of_placements_api_wrote_is_no_migration_of_berth(consumer_type: str, attempt: int) -> None:
    holder = TreeConsumer(consumer=R, project_id="p", user_id="u", consumer_type=consumer_type, attempt=attempt)
    assert not is_migration(holder)
    held = instances_on(DRAINED, ActionContext(), None, holder)
    if not attempt:
        assert held is None
    else:  # a claim whose record was lost: the drain ended as done while its machine may run there
        assert held is not None and (held.instance_uuid, held.project_id, held.code) == (R, "p", "instance.misplaced")


def test_a_request_under_way_brings_an_instance_to_the_host_unless_it_is_there() -> None:
    going = request(state=ActionState.SCHEDULED, terminal=False)
    found = instances_on(DRAINED, context(host="h2"), going)
    assert found is not None and (found.code, found.instance_uuid) == ("instance.arriving", A)
    there = instances_on(DRAINED, context(), going)
    assert there is not None and there.code == ""  # it is being stopped
    assert instances_on(DRAINED, ActionContext(), going) is None


# --- which hosts a pass looks at


def test_of_many_hosts_the_first_and_some_others_by_turns_are_looked_at() -> None:
    """Instances that only wait, on however many hosts, keep no others from their turn; and a pass has its bound."""
    hosts = Hosts([{"VCPU": 4}] * (PAGE_HOSTS * PAGES * 2 + 5))
    there = {uuid: DrainedHost(uuid, f"h{at:03}") for at, uuid in enumerate(hosts.uuids)}
    for at, uuid in enumerate(hosts.uuids[1:]):  # the first one is empty
        hosts.replica.assume(f"held {at}", {uuid: {"VCPU": 1}})
    holders = DrainInventory(
        *cast("Any", (None, hosts.selector, None, None)), warmup=cast("Any", None), clock=SystemClock()
    )
    names = [[host.name for page in holders.pages(there, float(at)) for host in page] for at in range(40)]
    assert all(PAGE_HOSTS * (PAGES - 1) < len(one) <= PAGE_HOSTS * PAGES for one in names)
    assert all(one[0] == "h001" and len(set(one)) == len(one) for one in names)
    assert {name for one in names for name in one} == {host.name for host in there.values()} - {"h000"}
    few = dict(list(there.items())[:5])
    assert [host.name for page in holders.pages(few, 7.0) for host in page] == ["h001", "h002", "h003", "h004"]
    down = {uuid: replace(host, code="service.down" if host.name < "h003" else "") for uuid, host in few.items()}
    assert [host.name for page in holders.pages(down, 7.0) for host in page] == ["h003", "h004", "h001", "h002"]


@pytest.mark.parametrize(("pending", "code"), [(None, None), (AdminState.DISABLED, "host.fenced")])
def test_a_drain_waits_for_a_host_whose_fence_is_being_lifted(pending: AdminState | None, code: str | None) -> None:
    """It ended as done at once, while all instances of the host were still there (seed 840)."""
    hosts = Hosts([PLENTY])
    decision = HostAdminState(
        host_uuid=hosts.uuids[0], host="h0", state=AdminState.FENCED, pending=pending, fence=1, drain=DRAIN
    )
    hosts.table.apply_decisions({hosts.uuids[0]: decision})
    holders = DrainInventory(
        *cast("Any", (None, hosts.selector, None, None)), warmup=cast("Any", None), clock=SystemClock()
    )
    assert [one.code for one in holders.of_drain(DRAIN).values()] == ([] if code is None else [code])


# --- Which hosts a cell, or a service, has: what is reported here is not all of them.


class BookOf:
    """A bus to placement, whose replica has these hosts of service s2."""

    def __init__(self, hosts: dict[str, str]) -> None:
        self._hosts = hosts

    async def request_all(self, queries: Sequence[ServiceHostsQuery], *_: object, **__: object) -> list[Message]:
        return [ServiceHostsPage(hosts=self._hosts if one.service == "s2" else {}) for one in queries]


@pytest.mark.parametrize("second", ["is up and not announced here yet", "died before this scheduler started"])
async def test_a_cell_is_not_drained_of_those_hosts_alone_that_are_reported_here(site: Site, second: str) -> None:
    """The drain of the cell began with one of its two hosts, and ended as `drain.done` while the other one was full: an
    operator switches it off. To forget a service, or a host, placement and the cell's digest are asked.
    """
    hosts, clock = Hosts([PLENTY] * 2), site.cluster.clock
    table, now_s = HostTable(), clock.monotonic()
    selector = Selector(
        hosts.replica,
        table,
        SelectorConfig(
            hosts.config,
            flavors=hosts.selector.config.flavors,
            filters=hosts.selector.config.filters,
            weighings=[],
        ),
    )
    there = (HostReport(uuid=hosts.uuids[0], name="h0"),)
    table.apply(HostStates(service="s1", cell="c1", epoch=1, sequence=1, hosts=there, complete=True), now_s)
    is_up = second.startswith("is up")
    down = () if is_up else (ServiceDown(service="s2", epoch=1, code="service.dead", reason="no heartbeat"),)
    table.apply(ServiceStates(cell="c1", term=1, number=1, up=1 + is_up, down=down), now_s)
    warmup, replica = Warmup(selector, clock=clock), cast("Any", BookOf({hosts.uuids[1]: "h1"}))
    holders = DrainInventory(site.store, selector, cast("Any", site.cluster), replica, warmup=warmup, clock=clock)
    found = await holders.hosts_of("c1", DrainTarget.CELL, None)
    if is_up:
        assert isinstance(found, Refusal) and found.code == "host.cell_silent"
        return
    assert not isinstance(found, Refusal) and {one.uuid for one in found[1]} == set(hosts.uuids)
    of_service = await holders.hosts_of("s2", DrainTarget.SERVICE, "c1")
    assert not isinstance(of_service, Refusal) and [one.uuid for one in of_service[1]] == hosts.uuids[1:]


@pytest.mark.parametrize(
    ("state", "condition", "down"),
    [
        (BuildState.ACTIVE, Condition.OFFLOADED, True),
        (BuildState.ACTIVE, Condition.STOPPED, False),
        (BuildState.DELETED, Condition.OFFLOADED, False),
        (None, Condition.OFFLOADED, False),
    ],
)
def test_an_instance_is_down_that_no_host_has_and_nobody_deleted(
    state: BuildState | None, condition: Condition, down: bool
) -> None:
    build = RecordedBuild(
        instance_uuid=A, project_id="p", state=state or BuildState.ACTIVE, sequence=1,
        instance=SinceBuild(condition=condition),
    )  # fmt: skip
    assert is_down(ActionContext(build=None if state is None else build)) is down
