"""An audit's findings in gathered facts: each kind once, nothing while something is under way, nothing foreign."""

from __future__ import annotations

from typing import Any

import pytest

from berth.audit.findings import AuditFacts, AuditFinding, Confirmed, FindingKind, findings
from berth.audit.invariants import (
    Facts,
    InstanceFact,
    InventoryFact,
    QuarantineFact,
    RunningFact,
    ServiceDownFact,
    SourceFact,
)
from berth.audit.repairing import MAX_AT_ONCE, chosen
from berth.settings import AuditSettings, Settings

A, B, HOST, OTHER, MOVE = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab12d")
K = FindingKind
ACTIVE = InstanceFact(A, "cell1", "active", HOST, 1, "s")
HELD = {A: {HOST: {"VCPU": 1}}}
RUNS = RunningFact(A, 1, HOST)


def look(**more: Any) -> AuditFacts:
    """One instance that is as it should be, and what differs."""
    held_by_bus = more.pop("held_by_bus", {A, B, MOVE})
    busy, migrations = more.pop("busy", frozenset()), more.pop("migrations", {})
    zones, in_doubt = more.pop("zones", {}), more.pop("in_doubt", frozenset())
    facts: dict[str, Any] = {
        "inventories": (),
        "allocations": HELD,
        "roots": {HOST: HOST, OTHER: OTHER},
        "requests": {A: "active"},
        "cells": {A: "cell1"},
        "instances": (ACTIVE,),
        "running": (RUNS,),
        "feed": (0, 0, 0),
        "down": (),
    }
    gathered = Facts(**{**facts, **more})
    return AuditFacts(
        facts=gathered, held_by_bus=held_by_bus, busy=busy, migrations=migrations, zones=zones, in_doubt=in_doubt
    )


FULL = InventoryFact(HOST, "VCPU", 4, 0, 1.0, 4.0, 5)
RESIZED = InstanceFact(A, "cell1", "resized", HOST, 2, "s", SourceFact(MOVE, OTHER, 1, "s"))
AWAITING = {
    "instances": (RESIZED,),
    "allocations": {**HELD, MOVE: {OTHER: {"VCPU": 1}}},
    "migrations": {MOVE: A},
    "running": (RunningFact(A, 2, HOST), RunningFact(A, 1, OTHER, is_stopped=True)),
}
ENDED: dict[str, Any] = {
    "allocations": {**HELD, B: {HOST: {"VCPU": 1}}},
    "requests": {A: "active", B: "deleted"},
    "instances": (ACTIVE, InstanceFact(B, "cell1", "deleted", HOST, 1, "s")),
}
CASES: list[tuple[dict[str, Any], list[tuple[FindingKind, str]]]] = [
    ({}, []),
    ({"allocations": {**HELD, B: {HOST: {"VCPU": 1}}}}, [(K.ORPHANED, B)]),
    ({"allocations": {**HELD, B: {HOST: {"VCPU": 1}}}, "held_by_bus": {A}}, []),
    ({"allocations": {**HELD, B: {HOST: {"VCPU": 1}}}, "busy": {B}}, []),
    ({"allocations": {**HELD, B: {HOST: {"VCPU": 1}}}, "in_doubt": {A, B}}, [(K.IN_DOUBT, B)]),
    ({"allocations": {**HELD, B: {HOST: {"VCPU": 1}}}, "in_doubt": {B}, "busy": {B}}, []),
    ({"in_doubt": {A, B}}, []),
    # A move that is over holds its source no longer; one that is under way, or awaits its confirm, does.
    ({"allocations": {**HELD, MOVE: {OTHER: {"VCPU": 1}}}, "migrations": {MOVE: A}}, [(K.ORPHANED, MOVE)]),
    ({"allocations": {**HELD, MOVE: {OTHER: {"VCPU": 1}}}, "migrations": {MOVE: A}, "busy": {A}}, []),
    (AWAITING, []),
    ({**AWAITING, "running": (RunningFact(A, 2, HOST), RunningFact(A, 1, OTHER))}, [(K.DOUBLED, A)]),
    ({**AWAITING, "allocations": {**HELD, B: {OTHER: {"VCPU": 1}}}}, [(K.ORPHANED, B)]),
    ({"allocations": {}}, [(K.MISSING, A)]),
    ({"allocations": {A: {OTHER: {"VCPU": 1}}}}, [(K.MISSING, A)]),
    ({"allocations": {A: {HOST: {"VCPU": 1}, OTHER: {"VCPU": 1}}}}, [(K.DOUBLED, A)]),
    ({"allocations": {}, "busy": {A}}, []),
    ({"running": ()}, [(K.INSTANCE_WITHOUT_MACHINE, A)]),
    ({"running": (), "down": (ServiceDownFact(cell="cell1", service="s", why="silent"),)}, []),
    ({"running": None}, []),
    ({"zones": {A: ("west", "east")}}, [(K.OUTSIDE_ZONE, A)]),
    ({"zones": {A: ("west", "east")}, "busy": {A}}, []),
    ({"running": (RUNS, RunningFact(A, 2, OTHER))}, [(K.DOUBLED, A)]),
    ({"running": (RUNS, RunningFact(B, 1, OTHER))}, [(K.MACHINE_WITHOUT_INSTANCE, B)]),
    ({"running": (RUNS, RunningFact(B, 1, OTHER)), "busy": {B}}, []),
    ({"instances": (ACTIVE, InstanceFact(A, "cell2", "failed", None, 1))}, [(K.DOUBLED, A)]),
    ({"requests": {}}, [(K.UNREQUESTED, A)]),
    ({"requests": {A: "deleted"}}, [(K.UNREQUESTED, A)]),
    ({"requests": {A: "failed"}}, [(K.UNREQUESTED, A)]),
    ({"requests": {A: "deleted"}, "busy": {A}}, []),
    ({"inventories": (FULL,)}, [(K.OVER_CAPACITY, f"{HOST} VCPU")]),
    ({"audit": (f"{HOST} VCPU: the book has 2, its allocations 1",)}, [(K.MISCOUNTED, f"{HOST} VCPU")]),
]


@pytest.mark.parametrize(("more", "wanted"), CASES)
def test_what_is_found(more: dict[str, Any], wanted: list[tuple[FindingKind, str]]) -> None:
    found = findings(look(**more))
    assert [(one.kind, one.subject) for one in found] == wanted
    assert all(one.reason and one.repair for one in found)


def test_the_repair_of_a_machine_is_its_owners_or_an_operators() -> None:
    foreign = findings(look(running=(RUNS, RunningFact(B, 1, OTHER, has_mark=False))))
    assert [one.repair for one in foreign] == ["left alone: it is not of this deployment"]
    kept = QuarantineFact("cell1", "s", OTHER, B, "no record")
    (quarantined,) = findings(look(running=(RUNS, RunningFact(B, 1, OTHER)), quarantine=(kept,)))
    assert quarantined.repair == f"decide: berth quarantine release {B}" and "no record" in quarantined.reason


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
        {"requests": {A: "active", B: "active"}, "instances": (ACTIVE,)},
        {"instances": (ACTIVE, InstanceFact(B, "cell1", "failed", HOST, 1, "s"))},
        {"instances": (*ENDED["instances"], InstanceFact(B, "cell2", "departed", None, 1))},
        {"running": (RUNS, RunningFact(B, 1, OTHER, has_mark=False))},
        {"running": None},
        {"down": None},
        {"down": (ServiceDownFact(cell="cell1", service="s2", why="silent"),)},
    ],
)
def test_an_orphan_that_may_have_a_machine_has_none(more: dict[str, Any]) -> None:
    assert proof(**more) == ""


def test_an_orphan_that_is_in_quarantine_has_no_proof() -> None:
    kept = QuarantineFact(cell="cell1", service="s", host_uuid=HOST, instance_uuid=B, why="unknown")
    assert proof(quarantine=(kept,)) == ""


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
