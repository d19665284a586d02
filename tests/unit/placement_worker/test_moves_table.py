"""What a move's source still has, what a migration keeps of it, and what comes back, as tables."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.placement import ConsumerAllocations, Migration, Release, Revert, Swap
from placement_worker.domain.migration import allocations_at_source, is_migration, kept_alongside, whole_source
from placement_worker.domain.values import ConsumerState, ProviderAllocations
from tests.unit.placement_worker.test_claims import HELD, MIGRATION, NOWHERE, OTHER, VM, A, B, Hold, claim
from tests.unit.placement_worker.test_claims_table import (
    CELL,
    ONE,
    OTHERS,
    THERE,
    Consumers,
    Rows,
    Verdict,
    changed,
    kept,
    row,
    run,
    taken,
    verdict,
    verdicts,
)

# --- What a move's source still has, what of it a migration keeps, and what comes back, as tables.


ROOTS = {"a": "a", "a.cell": "a", "a.other": "a", "b": "b"}


def vcpus(**amounts: int) -> ProviderAllocations:
    """By provider; `_` is a dot."""
    return {uuid.replace("_", "."): {"VCPU": amount} for uuid, amount in amounts.items()}


@pytest.mark.parametrize(
    ("requested", "held", "kept", "left"),
    [
        (vcpus(a=2), vcpus(b=2), vcpus(a=2), vcpus(a=2)),
        (vcpus(a=2), vcpus(a=9), vcpus(a=2), vcpus(a=2)),
        (vcpus(a=2), vcpus(a=4), {}, vcpus(a=2)),
        (vcpus(a=2), vcpus(a=1), vcpus(a=1), vcpus(a=2)),
        (vcpus(a=2), vcpus(a=1), {}, vcpus(a=1)),
        (vcpus(a=2), vcpus(b=2), {}, {}),
        (vcpus(a=2), {}, vcpus(a=3), vcpus(a=3)),
        (vcpus(a=2), {}, vcpus(a_cell=2), vcpus(a_cell=2)),
        (vcpus(a=2), vcpus(a_cell=2), {}, vcpus(a_cell=2)),
        (vcpus(gone=2), vcpus(a_cell=2), vcpus(a_other=1), vcpus(a_cell=1, a_other=1)),
        (vcpus(gone=2), vcpus(gone=2), {}, {}),
        (vcpus(a=2), vcpus(a=2, a_cell=2), {}, vcpus(a=2)),
        (vcpus(a=2, a_other=2), vcpus(a_cell=4, a_other=1), {}, vcpus(a_other=1, a_cell=3)),
        ({"a": {"VCPU": 2, "DISK_GB": 5}}, vcpus(a=2), {"a": {"DISK_GB": 4}}, {"a": {"VCPU": 2, "DISK_GB": 4}}),
    ],
    ids=[
        "kept",
        "kept, and more taken there",
        "taken whole by the destination",
        "taken in part by the destination",
        "given up in part by another client",
        "given up by another client",
        "more than the move was told",
        "kept within its tree",
        "taken within its tree",
        "taken in the tree of what is kept",
        "a provider that is no more",
        "no more than was requested",
        "first where it was, then in its tree",
        "each class by itself",
    ],
)
def test_the_source_of_a_move(
    requested: ProviderAllocations, held: ProviderAllocations, kept: ProviderAllocations, left: ProviderAllocations
) -> None:
    assert allocations_at_source(requested, held, kept, ROOTS) == left


@pytest.mark.parametrize(
    ("requested", "source", "whole"),
    [
        (vcpus(a=4), vcpus(a=4), vcpus(a=4)),
        (vcpus(a=4), vcpus(a=1), vcpus(a=4)),
        (vcpus(a=4), vcpus(a=5), vcpus(a=5)),
        (vcpus(a=4), {}, {}),
        (vcpus(a=2, b=2), vcpus(b=1), vcpus(b=2)),
        (vcpus(a=2, b=2), vcpus(a=1, b=1), vcpus(a=2, b=2)),
        (vcpus(a=2, b=2), vcpus(a_cell=1, b=1), vcpus(a_cell=1, b=2)),
    ],
)
def test_the_whole_source_has_what_another_client_gave_up_where_the_rest_is(
    requested: ProviderAllocations, source: ProviderAllocations, whole: ProviderAllocations
) -> None:
    assert whole_source(requested, source) == whole


@pytest.mark.parametrize(
    ("taken", "kept"),
    [
        ({}, {"a": {"VCPU": 4, "DISK_GB": 2}, "b": {"VCPU": 1}}),
        ({"a": {"VCPU": 1}}, {"a": {"VCPU": 3, "DISK_GB": 2}, "b": {"VCPU": 1}}),
        ({"a": {"VCPU": 4}, "b": {"VCPU": 2}}, {"a": {"DISK_GB": 2}}),
        ({"a": {"VCPU": 3, "DISK_GB": 1}, "b": {"VCPU": 1}}, {"a": {"VCPU": 1, "DISK_GB": 1}}),
    ],
)
def test_a_migration_keeps_what_the_destination_does_not_take(
    taken: ProviderAllocations, kept: ProviderAllocations
) -> None:
    assert kept_alongside({"a": {"VCPU": 4, "DISK_GB": 2}, "b": {"VCPU": 1}}, taken) == kept


@pytest.mark.parametrize(
    ("kind", "expected"), [("INSTANCE", False), ("", False), ("MIGRATION", True), ("MIGRATION_COUNTED", True)]
)
def test_a_migration_is_known_by_its_type(kind: str, expected: bool) -> None:
    assert is_migration(ConsumerState(1, 1, "p", "u", kind)) is expected
    assert not is_migration(None)


# --- Moves, releases, reverts and swaps: whole results, and the rows that they write, as tables.


MOVE = Migration(uuid=MIGRATION, source=HELD)
COUNTED = "MIGRATION_COUNTED"
IN_USE = changed(reason="claim.migration_in_use")


# --- the claim of a move


@pytest.mark.parametrize(
    ("wanted", "known", "expected", "after"),
    [
        (THERE, {VM: row(HELD)}, taken(2, B), {VM: row(THERE, 2, 2), MIGRATION: kept(HELD, attempt=2)}),
        (ONE, {VM: row(HELD)}, taken(2, generations={A: 12}), {VM: row(ONE, 2, 2), MIGRATION: kept(ONE, attempt=2)}),
        (HELD, {VM: row(HELD)}, taken(2), {VM: row(HELD, 2, 2)}),
        (
            THERE,
            {VM: row(HELD), MIGRATION: kept({}, 4)},
            taken(2, B),
            {VM: row(THERE, 2, 2), MIGRATION: kept(HELD, 5, 2)},
        ),
        (THERE, {VM: row(HELD), MIGRATION: kept(ONE)}, IN_USE, {}),
        (THERE, {VM: row({})}, changed(reason="claim.nothing_to_move"), {}),
        (THERE, {VM: row(HELD), MIGRATION: kept({CELL: {"VCPU": 1}})}, replace(IN_USE, reason=OTHERS), {}),
    ],
    ids=["away", "in place", "all in place", "under a free row", "under a used row", "nothing", "another cell's"],
)
def test_a_claim_moves_its_consumer(wanted: Hold, known: Consumers, expected: Verdict, after: Rows) -> None:
    generation = 1 if known[VM].allocations else None
    asked = claim(wanted, attempt=2, consumer_generation=generation, user_id="u", migration=MOVE)
    decision = run(asked, consumers=known, foreign={CELL})
    assert (verdicts(decision), decision.consumers) == ([expected], after)


def test_an_instance_is_not_its_own_migration() -> None:
    (said,) = verdicts(run(claim(THERE, migration=Migration(uuid=VM, source=HELD))))
    assert said == verdict("invalid", reason="claim.migration")


FAILED = row(THERE, 2, 2)
LEFT = verdict("no_capacity", outcomes=("no_capacity",), changed=True)
BOTH = taken(3, generations={A: 12})  # of the instance and its migration
NO_ROOM: Hold = {B: {"VCPU": 99}}


@pytest.mark.parametrize(
    ("wanted", "known", "expected", "after"),
    [
        (ONE, {VM: FAILED, MIGRATION: kept(HELD)}, BOTH, {VM: row(ONE, 3, 3), MIGRATION: kept(ONE, 2, 3)}),
        (HELD, {VM: FAILED, MIGRATION: kept(HELD)}, BOTH, {VM: row(HELD, 3, 3), MIGRATION: None}),
        (THERE, {VM: FAILED, MIGRATION: kept(HELD)}, taken(3, B), {VM: row(THERE, 3, 3)}),
        (
            THERE,
            {VM: row({}), MIGRATION: kept(HELD, consumer_type=COUNTED)},
            taken(2, B),
            {VM: row(THERE, 2, 3), MIGRATION: kept(HELD, 2, 3)},
        ),
        (THERE, {VM: row({}), MIGRATION: kept({}, consumer_type=COUNTED)}, taken(2, B), {VM: row(THERE, 2, 3)}),
        (THERE, {VM: row({})}, taken(2, B), {VM: row(THERE, 2, 3)}),
        (THERE, {VM: row({}), MIGRATION: kept({}, project_id="q")}, taken(2, B), {VM: row(THERE, 2, 3)}),
        (THERE, {VM: row({}), MIGRATION: kept(HELD, project_id="q")}, IN_USE, {}),
        (THERE, {VM: row({}), MIGRATION: row(HELD)}, IN_USE, {}),
        (
            NO_ROOM,
            {VM: FAILED, MIGRATION: kept(HELD)},
            replace(LEFT, generations={B: 11}),
            {VM: row({}, 2, 2), MIGRATION: kept(HELD, 2, 3, consumer_type=COUNTED)},
        ),
        (
            NO_ROOM,
            {VM: row(ONE, 2, 2), MIGRATION: kept(ONE)},
            replace(LEFT, generations={A: 12}),
            {VM: row({}, 2, 2), MIGRATION: kept(HELD, 2, 3, consumer_type=COUNTED)},
        ),
        (
            NO_ROOM,
            {VM: row({}), MIGRATION: kept(HELD, consumer_type=COUNTED)},
            verdict("no_capacity", outcomes=("no_capacity",), lacking=((B, "VCPU"),)),
            {},
        ),
    ],
    ids=[
        "to the source in part",
        "to the source",
        "where it was",
        "again, after it was left alone",
        "again, beside a free row",
        "again, without a row",
        "again, beside a free row of another project",
        "again, beside another project's",
        "again, beside an instance",
        "nowhere",
        "nowhere, from a resize in place",
        "nowhere again",
    ],
)
def test_the_claim_of_an_alternate_releases_what_failed(
    wanted: Hold, known: Consumers, expected: Verdict, after: Rows
) -> None:
    asked = claim(
        wanted, attempt=3, consumer_generation=known[VM].generation, user_id="u", release_first=True, migration=MOVE
    )
    decision = run(asked, consumers=known)
    assert (verdicts(decision), decision.consumers) == ([expected], after)


def test_a_migration_that_only_counts_no_more_moves_no_generation() -> None:
    known = {VM: row({}), MIGRATION: kept(HELD, consumer_type=COUNTED)}
    asked = claim(THERE, attempt=3, release_first=True, migration=MOVE)
    assert run(asked, consumers=known).generations == {B: 11}


def test_a_source_that_names_a_provider_that_is_no_more_is_what_is_kept() -> None:
    known = {VM: row({}), MIGRATION: kept(HELD)}
    source = Migration(uuid=MIGRATION, source={NOWHERE: {"VCPU": 2}})
    decision = run(claim(THERE, attempt=3, release_first=True, user_id="u", migration=source), consumers=known)
    assert decision.consumers == {VM: row(THERE, 2, 3)}


def test_a_build_without_an_alternate_leaves_its_ended_attempts() -> None:
    asked = claim(NO_ROOM, attempt=3, consumer_generation=2, release_first=True)
    decision = run(asked, consumers={VM: replace(FAILED, claim_owner="r")})
    assert verdicts(decision) == [replace(LEFT, generations={B: 11})]
    assert decision.consumers == {VM: row({}, 2, 2)}
    (again,) = verdicts(run(asked))
    assert again == replace(LEFT, changed=False, lacking=((B, "VCPU"),)), "nothing of it is left"


# --- a release

FREE = verdict("absent")
RELEASED = verdict("released", changed=True, generations={A: 11})
HOLDS = row(HELD, 3, 2, "r")
REFUSED = changed()
UNKNOWN = ConsumerState(0, 0, "", "", "")


@pytest.mark.parametrize(
    ("known", "fields", "expected", "after"),
    [
        (None, {}, FREE, "same"),
        (None, {"attempt": 1}, FREE, replace(UNKNOWN, attempt=1)),
        (None, {"attempt": 1, "owner": "r"}, FREE, replace(UNKNOWN, attempt=1, claim_owner="r")),
        (row({}, 3, 2, "r"), {"attempt": 2, "owner": "r"}, FREE, "same"),
        (row({}, 3, 2, "r"), {"attempt": 2, "owner": "s"}, FREE, row({}, 3, 2)),
        (row({}, 3, 2, "r"), {"attempt": 2}, FREE, row({}, 3, 2)),
        (row({}, 3, 2, "r"), {"attempt": 1, "owner": "s"}, FREE, "same"),
        (row({}, 3, 2, "r"), {"attempt": 3, "owner": "s"}, FREE, row({}, 3, 3, "s")),
        (row({}, 3, 2, "r"), {"owner": "s"}, FREE, "same"),
        (row({}, 3, 2), {"attempt": 2, "owner": "s"}, FREE, "same"),
        (HOLDS, {}, RELEASED, None),
        (HOLDS, {"attempt": 2}, RELEASED, row({}, 3, 2)),
        (HOLDS, {"attempt": 3, "owner": "r"}, RELEASED, row({}, 3, 3, "r")),
        (HOLDS, {"attempt": 1}, REFUSED, "same"),
        (HOLDS, {"owner": "s"}, REFUSED, "same"),
        (HOLDS, {"project_id": "p"}, RELEASED, None),
        (HOLDS, {"project_id": "q"}, REFUSED, "same"),
        (HOLDS, {"of_migration": True}, REFUSED, "same"),
        (HOLDS, {"of_migration": True, "project_id": "p"}, REFUSED, "same"),
        (kept(HELD), {"of_migration": True}, RELEASED, None),
        (kept(HELD), {}, RELEASED, None),
    ],
)
def test_a_release(known: ConsumerState | None, fields: dict[str, Any], expected: Verdict, after: Any) -> None:
    decision = run(Release(consumer=VM, **fields), consumers={VM: known} if known else {})
    assert (verdicts(decision), decision.consumers) == ([expected], {} if after == "same" else {VM: after})


# --- a revert


def back(generation: int, hold: Hold = HELD, *, new: bool = True, **generations: int) -> Verdict:
    moved = {{"a": A, "b": B}[name]: number for name, number in generations.items()}
    return verdict("reverted", consumer_generation=generation, allocations=hold, generations=moved, changed=new)


HALF: Hold = {A: {"VCPU": 1}, B: {"VCPU": 2}}


@pytest.mark.parametrize(
    ("known", "expected", "after"),
    [
        ({VM: FAILED, MIGRATION: kept(HELD)}, back(3, a=12), {VM: row(HELD, 3, 4), MIGRATION: None}),
        ({VM: row(ONE, 2, 2), MIGRATION: kept(ONE)}, back(3, a=12), {VM: row(HELD, 3, 4), MIGRATION: None}),
        ({VM: row(HELD, 2, 2)}, back(3, a=11), {VM: row(HELD, 3, 4)}),
        ({VM: row({}, 2, 2), MIGRATION: kept(HELD)}, back(3, a=12), {VM: row(HELD, 3, 4), MIGRATION: None}),
        ({MIGRATION: kept(HELD)}, back(1, a=12), {VM: row(HELD, 1, 4), MIGRATION: None}),
        ({VM: row(HELD)}, back(2, a=10), {VM: row(HELD, 2, 4)}),
        ({VM: row(HELD), MIGRATION: kept({})}, back(2, a=10), {VM: row(HELD, 2, 4)}),
        ({VM: row(HELD, 3, 4)}, back(3, new=False), {}),
        ({VM: row(HELD, 3, 4), MIGRATION: kept({})}, back(3, new=False), {}),
        ({VM: row(THERE, 3, 4), MIGRATION: kept(HELD)}, back(4, a=12), {VM: row(HELD, 4, 4), MIGRATION: None}),
        ({VM: row(THERE, 3, 5), MIGRATION: kept(HELD)}, changed(consumer_generation=3), {}),
        ({VM: FAILED, MIGRATION: kept(HELD, project_id="q")}, changed(), {}),
        ({VM: FAILED, MIGRATION: kept({}, project_id="q")}, back(3, {}), {VM: row({}, 3, 4), MIGRATION: None}),
        ({VM: FAILED}, back(3, {}), {VM: row({}, 3, 4)}),
        ({}, changed(), {}),
        ({MIGRATION: kept({})}, changed(), {}),
        ({MIGRATION: row(THERE)}, changed(), {}),
        ({MIGRATION: row(HELD)}, back(1, a=12), {VM: row(HELD, 1, 4), MIGRATION: None}),
        ({VM: FAILED, MIGRATION: row(HELD)}, back(3, a=12), {VM: row(HELD, 3, 4), MIGRATION: None}),
        ({VM: row(HALF, 2, 2), MIGRATION: row(HELD)}, back(3, HELD, a=11), {VM: row(HELD, 3, 4)}),
        ({VM: row({CELL: {"VCPU": 1}}, 2, 2), MIGRATION: kept(HELD)}, changed(reason=OTHERS), {}),
        ({VM: FAILED, MIGRATION: kept({CELL: {"VCPU": 1}})}, changed(reason=OTHERS), {}),
    ],
    ids=[
        "a move",
        "a resize in place",
        "a move within what it had",
        "left alone",
        "left alone for long",
        "never claimed",
        "never claimed, beside a free row",
        "reverted",
        "reverted, beside a free row",
        "claimed by this attempt",
        "claimed since",
        "another project's migration",
        "another project's free row",
        "whose migration was released",
        "nothing known",
        "nothing held",
        "an instance of the migration's uuid",
        "a source that was written anew",
        "a source that was written anew, of a moved instance",
        "an instance beside what is the source's",
        "another cell's",
        "beside another cell's",
    ],
)
def test_a_revert(known: Consumers, expected: Verdict, after: Rows) -> None:
    revert = Revert(consumer=VM, migration=MOVE, source_attempt=1, attempt=4)
    decision = run(revert, consumers=known, foreign={CELL})
    assert (verdicts(decision), decision.consumers) == ([expected], after)


@pytest.mark.parametrize(
    ("source", "outcome"),
    [({A: {"VCPU": 8}}, "reverted"), ({A: {"VCPU": 9}}, "no_capacity")],
    ids=["its room", "no room"],
)
def test_what_another_client_gave_up_of_a_source_needs_room(source: Hold, outcome: str) -> None:
    revert = Revert(consumer=VM, migration=Migration(uuid=MIGRATION, source=source), source_attempt=1, attempt=4)
    decision = run(revert, consumers={VM: FAILED, MIGRATION: kept(HELD)})
    (said,) = verdicts(decision)
    assert (said.outcome, said.reason) == (outcome, "revert.no_room" if outcome == "no_capacity" else "")
    assert bool(decision.consumers) is bool(decision.used) is (outcome == "reverted")


def test_a_revert_names_two_consumers() -> None:
    revert = Revert(consumer=VM, migration=Migration(uuid=VM, source=HELD), source_attempt=1, attempt=4)
    assert verdicts(run(revert, consumers={VM: row(HELD)})) == [changed(reason="revert.migration")]


# --- a swap


def entry(consumer: str, hold: Hold, generation: int | None, **fields: Any) -> ConsumerAllocations:
    made = {"project_id": "p", "user_id": "u", "consumer_type": "KIND", "consumer_generation": generation, **fields}
    return ConsumerAllocations(consumer=consumer, allocations={uuid: dict(held) for uuid, held in hold.items()}, **made)


TWICE = verdict("invalid", reason="a consumer is named twice")
DONE = {A: 11, B: 11}


@pytest.mark.parametrize(
    ("entries", "known", "expected", "after"),
    [
        (
            [entry(VM, THERE, 3), entry(MIGRATION, HELD, None, consumer_type="MIGRATION")],
            {VM: HOLDS},
            verdict("claimed", changed=True, generations=DONE),
            {VM: row(THERE, 4, 2, "r", consumer_type="KIND"), MIGRATION: kept(HELD, attempt=0)},
        ),
        (
            [entry(VM, {}, 3), entry(OTHER, THERE, None, attempt=7)],
            {VM: HOLDS},
            verdict("claimed", changed=True, generations=DONE),
            {VM: row({}, 3, 2, "r"), OTHER: row(THERE, attempt=7, consumer_type="KIND")},
        ),
        (
            [entry(VM, {}, 3)],
            {VM: replace(HOLDS, attempt=0)},
            verdict("claimed", changed=True, generations={A: 11}),
            {VM: None},
        ),
        (
            [entry(VM, THERE, 3)],
            {VM: HOLDS},
            verdict("claimed", changed=True, generations=DONE),
            {VM: row(THERE, 4, 2, "r", consumer_type="KIND")},
        ),
        ([entry(VM, HELD, 9)], {VM: HOLDS}, verdict("claimed", generations={A: 10}), {}),
        ([entry(VM, HELD, 3), entry(OTHER, {}, None)], {VM: HOLDS}, verdict("claimed", generations={A: 10}), {}),
        (
            [entry(OTHER, {}, None), entry(VM, ONE, 3)],
            {VM: HOLDS},
            verdict("claimed", changed=True, generations={A: 11}),
            {VM: row(ONE, 4, 2, "r", consumer_type="KIND")},
        ),
        ([entry(VM, THERE, 2)], {VM: HOLDS}, changed(consumer=VM), {}),
        ([entry(VM, THERE, 3), entry(VM, THERE, 3)], {VM: HOLDS}, TWICE, {}),
        ([entry(VM, {B: {"VCPU": 7}}, 3)], {VM: HOLDS}, verdict("no_capacity", consumer=VM), {}),
        (
            [entry(VM, THERE, 3), entry(OTHER, {A: {"VCPU": 9}}, None)],
            {VM: HOLDS},
            verdict("no_capacity", consumer=OTHER),
            {},
        ),
    ],
    ids=[
        "a move",
        "ended attempts, and a new one",
        "emptied",
        "to another provider",
        "done",
        "done, one of them nothing",
        "smaller",
        "of another generation",
        "twice the same",
        "no room",
        "no room for the other",
    ],
)
def test_a_swap(entries: list[ConsumerAllocations], known: Consumers, expected: Verdict, after: Rows) -> None:
    decision = run(Swap(consumers=tuple(entries)), consumers=known)
    assert (verdicts(decision), decision.consumers) == ([expected], after)
