"""The invariants over facts, and an audit's findings in them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from berth.audit.findings import AuditFacts, AuditFinding, Confirmed, FindingKind, findings
from berth.audit.invariants import (
    ALIVE,
    AT_REST,
    ActionFact,
    BreakerFact,
    Facts,
    GangFact,
    InstanceFact,
    InventoryFact,
    QuarantineFact,
    ReporterFact,
    RunningFact,
    ServiceDownFact,
    check_invariants,
)
from berth.audit.repair import MAX_AT_ONCE, chosen
from berth.config.settings import AuditSettings, Settings
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.feed import Change
from bus.contracts.placement import ProviderState

# --- each invariant, seen to hold on sound facts and to break on facts with one thing wrong


ONE, TWO, GONE = "one", "two", "gone"
HOST, NESTED, OTHER = "host", "host.gpu", "other"


def ended(uuid: str, sequence: int, state: BuildState = BuildState.ACTIVE) -> BuildEvent:
    return BuildEvent(instance_uuid=uuid, project_id="p", state=state, sequence=sequence, terminal=True)


# `one` is active on `host`, `two` failed, `gone` was built and deleted.
SOUND = Facts(
    inventories=[InventoryFact(HOST, "VCPU", 4, 0, 2.0, 8.0, 2), InventoryFact(NESTED, "VGPU", 8, 0, 1.0, 8.0, 1)],
    allocations={ONE: {HOST: {"VCPU": 2}, NESTED: {"VGPU": 1}}},
    roots={HOST: HOST, NESTED: HOST, OTHER: OTHER},
    requests={ONE: "active", TWO: "failed", GONE: "deleted"},
    cells={ONE: "cell1", GONE: "cell1"},
    instances=[InstanceFact(ONE, "cell1", "active", HOST, 2), InstanceFact(GONE, "cell1", "deleted", HOST, 1)],
    running=[RunningFact(ONE, 2, HOST)],
    feed=(3, 7, 5),
    accepted=[ONE, TWO, GONE],
    events=[
        ended(ONE, 12),
        ended(TWO, 3, BuildState.FAILED),
        ended(GONE, 11),
        ended(GONE, 13, BuildState.DELETED),
        ended(ONE, 12),  # published twice: at least once is what was promised
    ],
    changes=[Change(sequence=3, provider=HOST, generation=1), Change(sequence=4, provider=HOST, generation=2)],
    connections=[("scheduler1", "api", False), ("conductor-cell1", "cell1", True)],
    breakers=[BreakerFact(cell="cell1", service="s", is_open=False, tripped_at=1.0, lost=6)],
    quarantine=[QuarantineFact("cell1", "s", OTHER, "lost", "no record", "protect", is_protected=True)],
    services={("cell1", "s"), ("cell1", "idle")},
    actions=[ActionFact("move", ONE, "migrate", "done", terminal=True)],
    gangs=[GangFact(uuid=ONE, members=3, min_count=2, sent=2, withdrawn=0)],
)


def broken(facts: Facts) -> set[str]:
    return {verdict.name for verdict in check_invariants(facts) if not verdict.holds}


def test_sound_facts_break_nothing_and_every_invariant_is_judged() -> None:
    verdicts = check_invariants(SOUND)
    assert [verdict for verdict in verdicts if not verdict.holds] == []
    assert len(verdicts) == 14
    assert all(verdict.checked for verdict in verdicts)


def test_what_has_no_mark_of_ours_is_no_breach() -> None:
    foreign = RunningFact("theirs", 0, OTHER, has_owner_tag=False)
    kept = RunningFact("lost", 3, OTHER)
    assert SOUND.running is not None
    assert broken(replace(SOUND, running=[*SOUND.running, foreign, kept])) == set()
    # A machine whose mark was removed is still the one on record; another's of the same name is not.
    unmarked = RunningFact(ONE, 2, HOST, has_owner_tag=False)
    assert broken(replace(SOUND, running=[unmarked])) == set()
    assert broken(replace(SOUND, running=[*SOUND.running, RunningFact(ONE, 0, OTHER, has_owner_tag=False)])) == set()


def test_a_delete_of_an_instance_that_was_never_built_is_no_effect() -> None:
    """A foreign message on a cell's bus left one, and a sound system was BROKEN for as long as it was remembered."""
    forgotten = InstanceFact("never", "cell1", "tombstone", None, 0)
    assert broken(replace(SOUND, instances=[*SOUND.instances, forgotten])) == set()
    assert broken(replace(SOUND, instances=[*SOUND.instances, replace(forgotten, state="failed")])) == {CAUSE}


def test_what_a_silent_service_does_not_report_is_not_checked_and_is_listed() -> None:
    """746 healthy instances were BROKEN, or it was reported that bus or database did not answer."""
    building = InstanceFact(TWO, "cell1", "building", OTHER, 1, "s")
    there = InstanceFact(ONE, "cell1", "active", HOST, 2, "s")
    facts = replace(
        SOUND,
        requests={**SOUND.requests, TWO: "building"},
        cells={**SOUND.cells, TWO: "cell1"},
        accepted=[ONE, GONE],
        instances=[there, building, SOUND.instances[1]],
        running=[],
    )
    assert broken(facts) >= {"hosts_instances_allocations_agree", "one_terminal_state"}
    down = ServiceDownFact(cell="cell1", service="s", reason="silent since then")
    judged = {verdict.name: verdict for verdict in check_invariants(replace(facts, down=[down]))}
    assert {name for name, verdict in judged.items() if not verdict.holds} == {"services_there"}
    assert judged["services_there"].examples == ("cell1: s: silent since then",)
    assert judged["services_there"].checked == 2, "those without an instance were left out"
    for name in ("hosts_instances_allocations_agree", "built_once"):
        assert judged[name].not_judged == ("what s of cell1 runs, 1 active instances among it (silent since then)",)
    assert judged["one_terminal_state"].not_judged == (
        "1 instances that are under way at s of cell1 (silent since then)",
    )
    expected = replace(down, is_expected=True)
    assert broken(replace(facts, down=[expected])) == set(), "it was stopped on purpose"
    elsewhere = replace(down, cell="cell2")
    assert broken(replace(facts, down=[elsewhere])) > {"services_there"}, "another cell has a service of that name"
    moved = replace(facts, down=[down], running=[RunningFact(ONE, 2, OTHER)])
    assert "hosts_instances_allocations_agree" in broken(moved), "what is reported is judged"


AGREE, ONCE, CAUSE, TERMINAL = (
    "hosts_instances_allocations_agree",
    "built_once",
    "effects_have_a_cause",
    "one_terminal_state",
)
HERE = SOUND.instances[0]

BREACHES: list[tuple[str, str, dict[str, Any]]] = [
    ("more used than fits", "capacity", {"inventories": [InventoryFact(HOST, "VCPU", 4, 0, 2.0, 8.0, 9)]}),
    ("used without a holder", "placement_adds_up", {"audit": ["host VCPU: placement has 3, its allocations 2"]}),
    ("lost by the schedulers", TERMINAL, {"requests": {ONE: "active", GONE: "deleted"}}),
    ("still under way", TERMINAL, {"requests": {**SOUND.requests, TWO: "building"}}),
    ("never announced to have ended", TERMINAL, {"events": [*SOUND.events[:1], *SOUND.events[2:]]}),
    ("announced to have ended twice", TERMINAL, {"events": [*SOUND.events, ended(ONE, 14, BuildState.FAILED)]}),
    ("in two cells", ONCE, {"instances": [*SOUND.instances, replace(SOUND.instances[1], cell="cell2")]}),
    ("runs twice", ONCE, {"running": [RunningFact(ONE, 2, HOST), RunningFact(ONE, 1, OTHER)]}),
    (
        "a breaker is open",
        "breakers_closed",
        {"breakers": [BreakerFact(cell="cell1", service="s", is_open=True, tripped_at=1.0, lost=6)]},
    ),
    ("reinstalled under its name", "hosts_in_placement", {"duplicate_names": [(OTHER, "rack1-07", HOST)]}),
    (
        "in quarantine, undecided",
        "quarantine_decided",
        {"quarantine": [QuarantineFact("cell1", "s", OTHER, "lost", "no record")]},
    ),
    (
        "released, and still there",
        "quarantine_decided",
        {"quarantine": [QuarantineFact("cell1", "s", OTHER, "lost", "no record", "destroy")]},
    ),
    ("not at rest", AGREE, {"instances": [replace(HERE, state="building")]}),
    ("active on nothing", AGREE, {"allocations": {}}),
    ("active here, allocated there", AGREE, {"allocations": {ONE: {OTHER: {"VCPU": 2}}}}),
    ("allocated without an instance", AGREE, {"allocations": {**SOUND.allocations, GONE: {HOST: {"VCPU": 1}}}}),
    ("active, but runs nowhere", AGREE, {"running": []}),
    ("runs elsewhere", AGREE, {"running": [RunningFact(ONE, 2, OTHER)]}),
    ("an older attempt runs", AGREE, {"running": [RunningFact(ONE, 1, HOST)]}),
    ("a deleted one runs", AGREE, {"running": [*SOUND.running, RunningFact(GONE, 1, HOST)]}),  # type: ignore[misc]
    ("a hole in the feed", "feed_has_no_hole", {"feed": (3, 7, 4)}),
    ("an allocation without a request", CAUSE, {"requests": {TWO: "failed", GONE: "deleted"}, "accepted": [TWO, GONE]}),
    ("active, and its request has ended as deleted", CAUSE, {"requests": {**SOUND.requests, ONE: "deleted"}}),
    ("active, and its request has failed", CAUSE, {"requests": {**SOUND.requests, ONE: "failed"}}),
    ("mapped to another cell", CAUSE, {"cells": {ONE: "cell2"}}),
    ("a generation again", "generations_rise", {"changes": [SOUND.changes[1], SOUND.changes[1]]}),  # type: ignore[index]
    ("a cell that looks up", "no_upcall", {"connections": [("conductor-cell1", "api", True)]}),
]


@pytest.mark.parametrize(("name", "wrong"), [row[1:] for row in BREACHES], ids=[row[0] for row in BREACHES])
def test_one_wrong_thing_breaks_its_invariant(name: str, wrong: dict[str, Any]) -> None:
    verdicts = {verdict.name: verdict for verdict in check_invariants(replace(SOUND, **wrong))}
    assert not verdicts[name].holds
    assert verdicts[name].breaches >= len(verdicts[name].examples) > 0


def test_an_inventory_that_shrank_under_its_use_is_no_breach() -> None:
    """A node taken out of service while something runs on it is wholly reserved (microversion 1.26)."""
    shrunk = [InventoryFact(HOST, "CUSTOM_GOLD", 1, 1, 1.0, 0.0, 1)]
    assert "capacity" not in broken(replace(SOUND, inventories=shrunk))


# The move of `one` from `other` awaits its confirm: its source is stopped, and the migration holds its allocation.
MOVE = "move"
SOURCE = ReporterFact(MOVE, OTHER, 1)
STOPPED = RunningFact(ONE, 1, OTHER, is_stopped=True)
AWAITING = replace(
    SOUND,
    allocations={**SOUND.allocations, MOVE: {OTHER: {"VCPU": 2}}},
    instances=[replace(SOUND.instances[0], state="resized", source=SOURCE), SOUND.instances[1]],
    running=[RunningFact(ONE, 2, HOST), STOPPED],
)


def test_a_move_that_awaits_its_confirm_is_at_rest_with_its_two_machines_and_its_migrations_allocation() -> None:
    assert broken(AWAITING) == set()
    assert broken(replace(AWAITING, actions=[])) == set(), "its request was purged: the record names it"
    assert broken(replace(AWAITING, running=[RunningFact(ONE, 2, HOST)])) == set(), "its source has burnt down"
    in_place = replace(SOUND.instances[0], state="resized", source=ReporterFact(MOVE, HOST, 1))
    assert broken(replace(SOUND, instances=[in_place, SOUND.instances[1]])) == set(), "a larger size shares all"


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        ({ONCE, AGREE}, {"running": [RunningFact(ONE, 2, HOST), RunningFact(ONE, 1, OTHER)]}),
        ({ONCE, AGREE}, {"running": [RunningFact(ONE, 2, HOST), replace(STOPPED, attempt=3)]}),
        ({AGREE}, {"running": [STOPPED]}),
        ({AGREE}, {"allocations": SOUND.allocations}),
        ({AGREE}, {"allocations": {**SOUND.allocations, MOVE: {HOST: {"VCPU": 1}}}}),
        ({AGREE}, {"allocations": {MOVE: {OTHER: {"VCPU": 2}}}}),
        ({AGREE, CAUSE}, {"allocations": {**AWAITING.allocations, "stray": {OTHER: {"VCPU": 2}}}}),
        ({AGREE}, {"instances": SOUND.instances, "running": SOUND.running}),
        ({ONCE, AGREE}, {"instances": SOUND.instances, "allocations": SOUND.allocations}),
    ],
    ids=[
        "its source runs",
        "another attempt there",
        "its destination is gone",
        "its migration holds nothing",
        "its migration holds something elsewhere",
        "it holds nothing",
        "another consumer as well",
        "its move is over, and its migration holds something",
        "its move is over, and its source is there",
    ],
)
def test_nothing_else_is_allowed_to_a_move_that_awaits_its_confirm(names: set[str], wrong: dict[str, Any]) -> None:
    assert broken(replace(AWAITING, **wrong)) == names


def test_a_machine_that_an_operator_keeps_in_quarantine_is_no_second_one_of_its_instance() -> None:
    """A restored host had an older machine of an instance that runs: kept, it broke `built_once` for ever."""
    assert SOUND.running is not None
    older = [RunningFact(ONE, 1, OTHER), *SOUND.running]
    kept = QuarantineFact("cell1", "s", OTHER, ONE, "an older attempt", "protect", is_protected=True)
    assert broken(replace(SOUND, running=older, quarantine=[kept])) == set()
    undecided = replace(kept, decision="", is_protected=False)
    assert broken(replace(SOUND, running=older, quarantine=[undecided])) >= {ONCE, "quarantine_decided"}


def test_a_provider_that_was_removed_may_begin_again() -> None:
    changes = [
        Change(sequence=3, provider=HOST, generation=5),
        Change(sequence=4, provider=HOST, generation=6, removed=True),
        Change(sequence=5, provider=HOST, generation=1),
    ]
    assert broken(replace(SOUND, changes=changes)) == set()


@pytest.mark.parametrize(("used", "holds"), [({"VCPU": 1}, True), ({"VCPU": 3}, False), (None, False)])
def test_a_generation_stays_when_an_http_client_deletes_allocations_and_only_then(
    used: dict[str, int] | None, holds: bool
) -> None:
    changes = [
        Change(sequence=3, provider=HOST, generation=5, used={"VCPU": 2}),
        Change(sequence=4, provider=HOST, generation=5, used=used),
    ]
    assert broken(replace(SOUND, changes=changes)) == (set() if holds else {"generations_rise"})


NAMED = ProviderState(
    uuid=HOST,
    name="a",
    root_uuid=HOST,
    generation=5,
    spec_generation=7,
    inventories={"CUSTOM_A": (8.0, 1, 8, 1, 8, 0, 1.0)},
)


@pytest.mark.parametrize(
    ("after", "holds"),
    [
        (replace(NAMED, name="b", spec_generation=8), True),
        (replace(NAMED, inventories={"CUSTOM_B": NAMED.inventories["CUSTOM_A"]}, spec_generation=8), True),
        (replace(NAMED, aggregates=("00000000-0000-4000-d000-000000000001",), spec_generation=8), True),
        (replace(NAMED, traits=("HW_CPU_X86_SGX",), spec_generation=8), False),
        (replace(NAMED, inventories={"CUSTOM_A": (9.0, 1, 8, 1, 9, 0, 1.0)}, spec_generation=8), False),
    ],
)
def test_a_generation_stays_when_a_name_changes_and_not_when_an_amount_does(after: ProviderState, holds: bool) -> None:
    changes = [
        Change(sequence=number, provider=HOST, generation=5, state=state)
        for number, state in enumerate((NAMED, after), 3)
    ]
    assert broken(replace(SOUND, changes=changes)) == (set() if holds else {"generations_rise"})


def test_what_a_whole_state_says_is_used_may_fall_at_its_generation() -> None:
    """A report may raise it: the amounts of changes before the state said less (seed 4980067)."""
    changes = [
        Change(sequence=3, provider=HOST, generation=4, used={"CUSTOM_A": 1}),
        Change(sequence=4, provider=HOST, generation=5, state=replace(NAMED, used={"CUSTOM_A": 5})),
        Change(sequence=5, provider=HOST, generation=5, used={"CUSTOM_A": 4}),
    ]
    assert broken(replace(SOUND, changes=changes)) == set()


NOT_ALWAYS = ("events", "changes", "connections", "breakers", "quarantine")


def test_what_was_not_listened_to_is_not_checked() -> None:
    names = {verdict.name for verdict in check_invariants(replace(SOUND, **dict.fromkeys(NOT_ALWAYS)))}
    assert names.isdisjoint({"generations_rise", "no_upcall"}) and len(names) == 10


def test_a_request_about_an_instance_that_has_not_ended_is_a_breach_unless_its_service_is_down() -> None:
    waits = ActionFact("move", ONE, "migrate", "finishing", terminal=False)
    assert broken(replace(SOUND, actions=[waits])) == {"actions_end"}
    at_s = [replace(SOUND.instances[0], service="s"), *SOUND.instances[1:]]
    down = [ServiceDownFact(cell="cell1", service="s", reason="stopped", is_expected=True)]
    assert "actions_end" not in broken(replace(SOUND, actions=[waits], instances=at_s, down=down))


@pytest.mark.parametrize("state", ["building", "deleting"])
def test_what_is_under_way_is_a_breach_only_when_its_time_has_passed(state: str) -> None:
    changing = replace(
        SOUND,
        requests={**SOUND.requests, ONE: state},
        instances=[replace(SOUND.instances[0], state="building"), *SOUND.instances[1:]],
        actions=[ActionFact("move", ONE, "migrate", "finishing", terminal=False)],
    )
    assert {"one_terminal_state", "actions_end", AGREE} <= broken(changing)
    assert broken(replace(changing, under_way={ONE})) == set()
    assert {"one_terminal_state", "actions_end", AGREE} <= broken(replace(changing, under_way={TWO}))


@pytest.mark.parametrize(
    ("sent", "withdrawn", "whole"),
    [(0, 0, True), (1, 0, False), (2, 0, True), (3, 0, True), (1, 1, False), (1, 2, True)],
)
def test_a_gang_of_which_a_part_was_started_is_a_breach(sent: int, withdrawn: int, whole: bool) -> None:
    gang = GangFact(uuid=ONE, members=3, min_count=2, sent=sent, withdrawn=withdrawn)
    assert broken(replace(SOUND, gangs=[gang])) == (set() if whole else {"gangs_whole"})


def test_a_delete_that_was_given_up_is_no_second_end_of_its_build() -> None:
    """A chaos run in which 380 deletes were given up was judged as 380 builds that had ended twice."""
    assert SOUND.events is not None
    assert broken(replace(SOUND, events=[*SOUND.events, ended(ONE, 0, BuildState.REFUSED)])) == set()
    assert broken(replace(SOUND, events=[*SOUND.events, ended(ONE, 13, BuildState.FAILED)])) == {"one_terminal_state"}


# --- an audit's findings in gathered facts: each kind once, nothing while something is under way, nothing foreign


A, B, FINDINGS_HOST, FINDINGS_OTHER, FINDINGS_MOVE = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab12d")
K = FindingKind
ACTIVE = InstanceFact(A, "cell1", "active", FINDINGS_HOST, 1, "s")
HELD = {A: {FINDINGS_HOST: {"VCPU": 1}}}
RUNS = RunningFact(A, 1, FINDINGS_HOST)


SETS = ("in_doubt", "with_machine", "moving")


def look(**more: Any) -> AuditFacts:
    """One instance that is as it should be, and what differs."""
    held_by_bus = more.pop("held_by_bus", {A, B, FINDINGS_MOVE})
    busy, migrations = more.pop("busy", frozenset()), more.pop("migrations", {})
    zones, sets = more.pop("zones", {}), {name: more.pop(name, frozenset()) for name in SETS}
    facts: dict[str, Any] = {
        "inventories": (),
        "allocations": HELD,
        "roots": {FINDINGS_HOST: FINDINGS_HOST, FINDINGS_OTHER: FINDINGS_OTHER},
        "requests": {A: "active"},
        "cells": {A: "cell1"},
        "instances": (ACTIVE,),
        "running": (RUNS,),
        "feed": (0, 0, 0),
        "down": (),
        "unheard": (),
    }
    gathered = Facts(**{**facts, **more})
    return AuditFacts(facts=gathered, held_by_bus=held_by_bus, busy=busy, migrations=migrations, zones=zones, **sets)


FULL = InventoryFact(FINDINGS_HOST, "VCPU", 4, 0, 1.0, 4.0, 5)
RESIZED = InstanceFact(
    A, "cell1", "resized", FINDINGS_HOST, 2, "s", ReporterFact(FINDINGS_MOVE, FINDINGS_OTHER, 1, "s")
)
FINDINGS_AWAITING = {
    "instances": (RESIZED,),
    "allocations": {**HELD, FINDINGS_MOVE: {FINDINGS_OTHER: {"VCPU": 1}}},
    "migrations": {FINDINGS_MOVE: A},
    "running": (RunningFact(A, 2, FINDINGS_HOST), RunningFact(A, 1, FINDINGS_OTHER, is_stopped=True)),
}
ENDED: dict[str, Any] = {
    "allocations": {**HELD, B: {FINDINGS_HOST: {"VCPU": 1}}},
    "requests": {A: "active", B: "deleted"},
    "instances": (ACTIVE, InstanceFact(B, "cell1", "deleted", FINDINGS_HOST, 1, "s")),
}
OFFLOADED: dict[str, Any] = {
    **ENDED,
    "requests": {A: "active", B: "active"},
    "instances": (ACTIVE, InstanceFact(B, "cell1", "offloaded", None, 1, "s")),
}
KEPT = QuarantineFact(cell="cell1", service="s", host_uuid=FINDINGS_HOST, instance_uuid=B, reason="unknown")
CASES: list[tuple[dict[str, Any], list[tuple[FindingKind, str]]]] = [
    ({}, []),
    ({"allocations": {**HELD, B: {FINDINGS_HOST: {"VCPU": 1}}}}, [(K.ORPHANED, B)]),
    ({"allocations": {**HELD, B: {FINDINGS_HOST: {"VCPU": 1}}}, "held_by_bus": {A}}, []),
    ({"allocations": {**HELD, B: {FINDINGS_HOST: {"VCPU": 1}}}, "busy": {B}}, []),
    ({"allocations": {**HELD, B: {FINDINGS_HOST: {"VCPU": 1}}}, "in_doubt": {A, B}}, [(K.IN_DOUBT, B)]),
    ({"allocations": {**HELD, B: {FINDINGS_HOST: {"VCPU": 1}}}, "in_doubt": {B}, "busy": {B}}, []),
    ({"in_doubt": {A, B}}, []),
    # Its cell was set back to before it, and its machine runs, in quarantine or on a host that does not answer.
    ({**ENDED, "requests": {A: "active", B: "active"}, "instances": (ACTIVE,)}, [(K.IN_DOUBT, B)]),
    ({**ENDED, "requests": {A: "active", B: "deleting"}, "instances": (ACTIVE,)}, [(K.IN_DOUBT, B)]),
    ({**ENDED, "requests": {A: "active", B: "active"}}, [(K.ORPHANED, B)]),
    ({**OFFLOADED, "with_machine": {B}}, [(K.IN_DOUBT, B)]),
    (OFFLOADED, [(K.ORPHANED, B)]),
    ({**ENDED, "quarantine": (KEPT,)}, [(K.IN_DOUBT, B)]),
    # A move that is over holds its source no longer; one that is under way, or awaits its confirm, does.
    (
        {"allocations": {**HELD, FINDINGS_MOVE: {FINDINGS_OTHER: {"VCPU": 1}}}, "migrations": {FINDINGS_MOVE: A}},
        [(K.ORPHANED, FINDINGS_MOVE)],
    ),
    (
        {
            "allocations": {**HELD, FINDINGS_MOVE: {FINDINGS_OTHER: {"VCPU": 1}}},
            "migrations": {FINDINGS_MOVE: A},
            "busy": {A},
        },
        [],
    ),
    (FINDINGS_AWAITING, []),
    (
        {**FINDINGS_AWAITING, "running": (RunningFact(A, 2, FINDINGS_HOST), RunningFact(A, 1, FINDINGS_OTHER))},
        [(K.DOUBLED, A)],
    ),
    (
        {**FINDINGS_AWAITING, "allocations": {**HELD, B: {FINDINGS_OTHER: {"VCPU": 1}}}},
        [(K.MISSING, FINDINGS_MOVE), (K.ORPHANED, B)],
    ),
    ({**FINDINGS_AWAITING, "allocations": HELD}, [(K.MISSING, FINDINGS_MOVE)]),
    ({**FINDINGS_AWAITING, "allocations": {**HELD, FINDINGS_MOVE: HELD[A]}}, [(K.MISSING, FINDINGS_MOVE)]),
    ({**FINDINGS_AWAITING, "allocations": HELD, "busy": {A}}, []),
    ({"allocations": {}}, [(K.MISSING, A)]),
    ({"allocations": {A: {FINDINGS_OTHER: {"VCPU": 1}}}}, [(K.MISSING, A)]),
    ({"allocations": {A: {FINDINGS_HOST: {"VCPU": 1}, FINDINGS_OTHER: {"VCPU": 1}}}}, [(K.DOUBLED, A)]),
    ({"allocations": {A: {FINDINGS_HOST: {"VCPU": 1}, "a pool": {"DISK_GB": 1}}}}, []),  # it shares: of no host
    ({"allocations": {A: {"a pool": {"DISK_GB": 1}}}}, [(K.MISSING, A)]),
    ({"allocations": {}, "busy": {A}}, []),
    ({"running": ()}, [(K.INSTANCE_WITHOUT_MACHINE, A)]),
    ({"running": (), "down": (ServiceDownFact(cell="cell1", service="s", reason="silent"),)}, []),
    ({"running": None}, []),
    ({"zones": {A: ("west", "east")}}, [(K.OUTSIDE_ZONE, A)]),
    ({"moving": {A}, "busy": {A}}, [(K.MOVING_UNREQUESTED, A)]),
    ({"moving": {A}, "busy": {A}, "unread": {"cell1"}}, []),
    ({"zones": {A: ("west", "east")}, "busy": {A}}, []),
    ({"running": (RUNS, RunningFact(A, 2, FINDINGS_OTHER))}, [(K.DOUBLED, A)]),
    ({"running": (RUNS, RunningFact(B, 1, FINDINGS_OTHER))}, [(K.MACHINE_WITHOUT_INSTANCE, B)]),
    ({"running": (RUNS, RunningFact(B, 1, FINDINGS_OTHER)), "busy": {B}}, []),
    ({"instances": (ACTIVE, InstanceFact(A, "cell2", "failed", None, 1))}, [(K.DOUBLED, A)]),
    ({"requests": {}}, [(K.UNREQUESTED, A)]),
    ({"requests": {A: "deleted"}}, [(K.UNREQUESTED, A)]),
    ({"requests": {A: "failed"}}, [(K.UNREQUESTED, A)]),
    ({"requests": {A: "deleted"}, "busy": {A}}, []),
    ({"inventories": (FULL,)}, [(K.OVER_CAPACITY, f"{FINDINGS_HOST} VCPU")]),
    (
        {"audit": (f"{FINDINGS_HOST} VCPU: placement has 2, its allocations 1",)},
        [(K.MISCOUNTED, f"{FINDINGS_HOST} VCPU")],
    ),
]


@pytest.mark.parametrize(("more", "wanted"), CASES)
def test_what_is_found(more: dict[str, Any], wanted: list[tuple[FindingKind, str]]) -> None:
    found = findings(look(**more))
    assert [(one.kind, one.subject) for one in found] == wanted
    assert all(one.reason and one.repair for one in found)


@pytest.mark.parametrize("others", [(), (FINDINGS_HOST, FINDINGS_OTHER), (FINDINGS_OTHER,)])
def test_of_what_awaits_its_confirm_no_repair_is_proposed_that_leaves_it_alone(others: tuple[str, ...]) -> None:
    """`berth placement audit --repair` judges no instance with an unconfirmed move: it said that placement is sound."""
    held = {A: {host: {"VCPU": 1} for host in others}} if others else {}
    kept = {FINDINGS_MOVE: {FINDINGS_OTHER: {"VCPU": 1}}}
    (unconfirmed,) = findings(look(**{**FINDINGS_AWAITING, "allocations": {**held, **kept}}))
    (settled,) = findings(look(allocations=held))
    assert unconfirmed.key == settled.key
    assert unconfirmed.repair == f"berth instance confirm, and then: {settled.repair.partition(': ')[2]}"


def test_the_repair_of_a_machine_is_its_owners_or_an_operators() -> None:
    foreign = findings(look(running=(RUNS, RunningFact(B, 1, FINDINGS_OTHER, has_owner_tag=False))))
    assert [one.repair for one in foreign] == ["left alone: it is not of this database"]
    kept = QuarantineFact("cell1", "s", FINDINGS_OTHER, B, "no record")
    (quarantined,) = findings(look(running=(RUNS, RunningFact(B, 1, FINDINGS_OTHER)), quarantine=(kept,)))
    assert (
        quarantined.repair == f"decide: berth quarantine destroy|protect|adopt {B}"
        and "no record" in quarantined.reason
    )


def test_a_finding_counts_from_its_second_look_on_and_is_gone_with_the_first_without_it() -> None:
    confirmed = Confirmed()
    (one,) = findings(look(allocations={}))
    assert confirmed.apply([one], 1.0) == ([], [])
    assert confirmed.apply([], 2.0) == ([], [])
    assert confirmed.apply([one], 3.0) == ([], [])
    assert not confirmed.lasting({K.MISSING}, 0.0, 9.0)
    assert confirmed.apply([one], 4.0) == ([one], [])
    assert confirmed.apply([one], 5.0) == ([], [])
    assert confirmed.lasting({K.MISSING}, 2.0, 5.0) and not confirmed.lasting({K.MISSING}, 2.1, 5.0)
    assert not confirmed.lasting({K.ORPHANED}, 0.0, 5.0)
    assert confirmed.apply([], 6.0) == ([], [one])


def proof(**more: Any) -> str:
    (found,) = (one for one in findings(look(**{**ENDED, **more})) if (one.kind, one.subject) == (K.ORPHANED, B))
    return found.proof


def test_an_orphan_whose_instance_is_deleted_everywhere_has_a_proof() -> None:
    assert proof() == "deleted by the schedulers' record and in cell1, and no host runs it"
    assert proof(instances=(ACTIVE,)) == "deleted by the schedulers' record, and no host runs it"
    assert proof(instances=(ACTIVE, InstanceFact(B, "cell2", "tombstone", None, 1)))


@pytest.mark.parametrize(
    "more",
    [
        {"requests": {A: "active"}},  # no record: they may have been set back to before its request
        {"requests": {A: "active", B: "failed"}},
        {"requests": {A: "active", B: "active"}},
        {"instances": (ACTIVE, InstanceFact(B, "cell1", "failed", FINDINGS_HOST, 1, "s"))},
        {"instances": (*ENDED["instances"], InstanceFact(B, "cell2", "transferred", None, 1))},
        {"running": (RUNS, RunningFact(B, 1, FINDINGS_OTHER, has_owner_tag=False))},
        {"running": None},
        {"down": None},
        {"unheard": None},
        {"unheard": (("cell1", "s2"),)},  # it is up and slow: what it runs was not waited for
        {"down": (ServiceDownFact(cell="cell1", service="s2", reason="silent"),)},
    ],
)
def test_an_orphan_that_may_have_a_machine_has_none(more: dict[str, Any]) -> None:
    assert proof(**more) == ""


def test_a_repair_needs_the_proof_in_two_passes_in_a_row() -> None:
    confirmed = Confirmed()
    proved, bare = findings(look(**ENDED)), findings(look(**{**ENDED, "requests": {A: "active"}}))
    confirmed.apply(bare, 1.0)
    confirmed.apply(proved, 2.0)
    assert [one.subject for one in confirmed.found.values()] == [B] and confirmed.proven == []
    confirmed.apply(proved, 3.0)
    assert [one.subject for one in confirmed.proven] == [B]
    confirmed.apply([], 4.0)
    assert confirmed.proven == []


def test_nothing_is_repaired_by_itself_unless_the_site_has_decided_so() -> None:
    proven = findings(look(**ENDED))
    assert chosen(Settings().audit, proven) == []
    assert chosen(AuditSettings(orphaned="repair"), proven) == proven
    many = [AuditFinding(K.ORPHANED, str(n), "r", "release it", "proof") for n in range(MAX_AT_ONCE + 1)]
    assert chosen(AuditSettings(orphaned="repair"), many) == [] and chosen(AuditSettings(orphaned="repair"), many[1:])
    other = AuditFinding(K.MISSING, A, "r", "claim it", "proof")
    assert chosen(AuditSettings(orphaned="repair"), [other]) == []


def test_the_states_at_rest_follow_from_the_cells_table() -> None:
    assert sorted(AT_REST - ALIVE) == [
        "deleted",
        "failed",
        "offloaded",
        "tombstone",
        "transferred",
        "transferred/absent",
    ]
    assert sorted(AT_REST & ALIVE) == sorted(ALIVE) == ["active", "resized"]
