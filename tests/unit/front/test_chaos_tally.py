"""The counts of lost, doubled, leaked, overcommitted; and how stalls and recoveries are measured."""

from __future__ import annotations

import msgspec

from berth.audit.invariants import Facts, InstanceFact, InventoryFact, MoveFact, RunningFact, SourceFact
from bus.contracts.build import BuildEvent, BuildState
from lab.chaos.churn import Ended
from lab.chaos.faults import Injected
from lab.chaos.plan import FaultKind, PlannedFault
from lab.chaos.report import Tally, counts, doubled_moves, longest_stall, lost_moves, rates, recoveries, tally

A, B, HOST = "a" * 8, "b" * 8, "h" * 8
NOTHING = Tally(lost=(), doubled=(), leaked=(), overcommitted=0)


def announced(uuid: str, state: BuildState, sequence: int) -> BuildEvent:
    return BuildEvent(
        instance_uuid=uuid, project_id="p", state=state, sequence=sequence, terminal=state is not BuildState.BUILDING
    )


SOUND = Facts(
    inventories=[InventoryFact(HOST, "VCPU", 4, 0, 1.0, 4, 4)],
    allocations={A: {HOST: {"VCPU": 4}}},
    roots={HOST: HOST},
    requests={A: "active", B: "failed"},
    cells={A: "cell1"},
    instances=[InstanceFact(A, "cell1", "active", HOST, 1)],
    running=[RunningFact(A, 1, HOST)],
    feed=(1, 3, 3),
    accepted=[A, B],
    events=[announced(A, BuildState.ACTIVE, 5), announced(B, BuildState.FAILED, 5), announced(B, BuildState.FAILED, 5)],
)


def but(**changes: object) -> Tally:
    return tally(msgspec.structs.replace(SOUND, **changes))


def test_nothing_is_counted_of_a_sound_system_and_an_event_may_repeat() -> None:
    assert tally(SOUND) == NOTHING


def test_lost() -> None:
    assert but(requests={A: "active"}).lost == (B,), "not on record"
    assert but(requests={A: "active", B: "scheduled"}).lost == (B,), "not ended"
    assert but(events=[announced(A, BuildState.ACTIVE, 5)]).lost == (B,), "its end was never announced"
    assert but(instances=[]).lost == (A,), "active by the record, and in no cell"


def test_doubled() -> None:
    assert but(running=[RunningFact(A, 1, HOST), RunningFact(A, 2, "other")]).doubled == (A,)
    twice = [InstanceFact(A, "cell1", "active", HOST, 1), InstanceFact(A, "cell2", "active", HOST, 1)]
    assert but(instances=twice).doubled == (A,)
    ends = [*(SOUND.events or ()), announced(A, BuildState.FAILED, 6)]
    assert but(events=ends).doubled == (A,), "two different ends"
    given_up = [*(SOUND.events or ()), announced(A, BuildState.REFUSED, 0)]
    assert but(events=given_up).doubled == (), "of a delete that was given up"
    deleted = [*(SOUND.events or ()), announced(A, BuildState.DELETED, 7)]
    assert but(events=deleted).doubled == (), "a delete is a request of its own"


def test_leaked() -> None:
    assert but(allocations={**SOUND.allocations, B: {HOST: {"VCPU": 1}}}).leaked == (B,)
    assert but(running=[RunningFact(A, 1, HOST), RunningFact(B, 1, HOST)]).leaked == (B,)


def test_a_move_that_awaits_its_confirm_is_neither_lost_nor_doubled_nor_leaked() -> None:
    awaiting = msgspec.structs.replace(
        SOUND,
        allocations={**SOUND.allocations, "move": {"other": {"VCPU": 4}}},
        instances=[InstanceFact(A, "cell1", "resized", HOST, 2, source=SourceFact("move", "other", 1))],
        running=[RunningFact(A, 2, HOST), RunningFact(A, 1, "other", is_stopped=True)],
    )
    assert tally(awaiting) == NOTHING
    both = [RunningFact(A, 2, HOST), RunningFact(A, 1, "other")]
    assert tally(msgspec.structs.replace(awaiting, running=both)).doubled == (A,)


def test_overcommitted() -> None:
    assert but(inventories=[InventoryFact(HOST, "VCPU", 4, 0, 1.0, 4, 5)]).overcommitted == 1


def fault(began_at: float, over_at: float | None, kind: FaultKind = FaultKind.KILL) -> Injected:
    what = PlannedFault(kind=kind, role="broker", target="broker", lasts_s=0.0)
    return Injected(fault=what, began_at=began_at, over_at=over_at)


def test_the_longest_stall_names_the_faults_of_its_time() -> None:
    ended = [Ended(0.0, at) for at in (1.0, 2.0, 9.0, 9.5)]
    faults = [fault(0.1, 0.2, FaultKind.CUT), fault(2.5, 6.0), fault(9.2, None, FaultKind.STALL)]
    stall = longest_stall(ended, faults)
    assert (stall.seconds, stall.faults) == (7.0, ("kill_broker",))
    assert longest_stall([], faults).seconds == 0.0


def test_recovered_means_that_something_requested_afterwards_has_ended() -> None:
    ended = [Ended(1.0, 6.5), Ended(6.1, 9.0), Ended(6.2, 7.0), Ended(8.0, 8.5)]
    assert recoveries(ended, [fault(5.0, 6.0), fault(7.5, 20.0)]) == {"kill_broker": [1.0]}


def test_faults_are_counted_by_sort_and_ends_by_stretch() -> None:
    assert counts([fault(0, 1), fault(2, 3), fault(4, 5, FaultKind.CUT)]) == {"cut_broker": 1, "kill_broker": 2}
    assert rates([Ended(0.0, at) for at in (0.0, 1.0, 10.5, 25.0)], 10.0) == [2, 1, 1]
    assert rates([], 10.0) == []


def test_a_move_is_lost_without_a_record_or_an_end_and_doubled_with_two_different_ends() -> None:
    moves = [
        MoveFact("m1", A, "migrate", "done", terminal=True),
        MoveFact("m2", A, "resize", "claiming", terminal=False),
    ]
    facts = msgspec.structs.replace(SOUND, moves=moves)
    assert lost_moves(facts, ["m1", "m2", "m3"]) == ("m2", "m3")
    assert lost_moves(facts, ["m1"]) == ()
    assert doubled_moves({"m1": {("done", "")}, "m2": {("done", ""), ("failed", "x")}}) == ("m2",)
