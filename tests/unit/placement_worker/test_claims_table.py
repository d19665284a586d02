"""Verdicts on claims, gangs, releases, reverts and swaps, whole and with the rows that they write, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.placement import (
    Claim,
    ClaimAll,
    ClaimOption,
    GroupPolicy,
    Migration,
    Release,
    ServerGroup,
)
from placement_worker.domain.claim_ledger import CHANGED, Decision
from placement_worker.domain.claims import ClaimItem, decide
from placement_worker.domain.values import ConsumerState
from tests.unit.placement_worker.test_claims import (
    CLASSES,
    HELD,
    MIGRATION,
    NOWHERE,
    OTHER,
    VM,
    A,
    B,
    Hold,
    claim,
    holder,
    provider,
    room,
    swap,
)

CELL = "cccccccc-0000-4000-8000-000000000000"  # below A
GROUP = "99999999-0000-4000-8000-000000000000"
HOSTS = {
    A: provider(VCPU=room(8, 2), DISK_GB=room(9, 1)),
    B: replace(provider(VCPU=room(8, 2)), root=B),
    CELL: provider(VCPU=room(8)),
}
THERE: Hold = {B: {"VCPU": 2}}
ONE: Hold = {A: {"VCPU": 1}}


def run(*items: ClaimItem, consumers: Mapping[str, ConsumerState] | None = None, **fields: Any) -> Decision:
    return decide(items, consumers or {}, HOSTS, CLASSES, **fields)


class Verdict(Struct, frozen=True, kw_only=True):
    """What a decision says of one item: its reply, and the generations of the providers that it has changed."""

    outcome: str
    option: int | None = None
    outcomes: tuple[str, ...] = ()
    consumer: str | None = None
    consumer_generation: int | None = None
    generations: dict[str, int] = {}
    changed: bool = False
    reason: str = ""
    allocations: Hold = {}
    members: dict[str, int] = {}
    lacking: tuple[tuple[str, str], ...] = ()
    attempt: int = 0


def verdicts(decision: Decision) -> list[Verdict]:
    """Of items none of which is a gang. Reasons are cut to their codes."""
    return [_verdict(decision, place, reply) for place, reply in enumerate(decision.replies)]


def _verdict(decision: Decision, place: int, reply: Any) -> Verdict:
    said = {name: getattr(reply, name) for name in reply.__struct_fields__ if name in Verdict.__struct_fields__}
    if "generations" not in said and reply.sequence:
        of = getattr(reply, "allocations", decision.generations)
        said["generations"] = {uuid: decision.generations.get(uuid, HOSTS[uuid].generation) for uuid in of}
    said["reason"] = said.get("reason", "").partition(":")[0]
    _, lacking = decision.lost.get(place, ("", ()))
    return Verdict(**said, changed=bool(reply.sequence), lacking=lacking)


def verdict(said: str, **fields: Any) -> Verdict:
    return Verdict(outcome=said, **fields)


def changed(**fields: Any) -> Verdict:
    return verdict("consumer_conflict", **fields)


def taken(generation: int = 1, *where: str, **fields: Any) -> Verdict:
    made = {"option": 0, "outcomes": ("claimed",), "generations": dict.fromkeys(where or (A,), 11), "changed": True}
    return verdict("claimed", consumer_generation=generation, **{**made, **fields})


def row(hold: Hold, generation: int = 1, attempt: int = 1, claim_owner: str = "", **fields: str) -> ConsumerState:
    owner = {"project_id": "p", "user_id": "u", "consumer_type": "INSTANCE", **fields}
    return ConsumerState(generation, attempt, allocations=hold, claim_owner=claim_owner, **owner)


def kept(hold: Hold, generation: int = 1, attempt: int = 1, **fields: str) -> ConsumerState:
    return row(hold, generation, attempt, **{"consumer_type": "MIGRATION", **fields})


Consumers = dict[str, ConsumerState]
Rows = dict[str, ConsumerState | None]
OTHERS = "claim.foreign_cell"


# --- whose claim it is


@pytest.mark.parametrize(
    ("known", "fields", "expected", "after"),
    [
        (None, {"owner": "r"}, taken(), row(ONE, claim_owner="r")),
        (None, {}, taken(), row(ONE)),
        (row(HELD, claim_owner="r"), {"attempt": 2, "consumer_generation": 1}, taken(2), row(ONE, 2, 2, "r")),
        (
            row(HELD, claim_owner="r"),
            {"attempt": 2, "consumer_generation": 1, "owner": "s"},
            taken(2),
            row(ONE, 2, 2, "s"),
        ),
        (row(ONE, claim_owner="r"), {}, taken(changed=False, outcomes=(), generations={A: 10}), None),
        (row(ONE, claim_owner="r"), {"owner": "r"}, taken(changed=False, outcomes=(), generations={A: 10}), None),
        (
            row(ONE, claim_owner="r"),
            {"owner": "s", "transfers_from": "r"},
            taken(changed=False, outcomes=(), generations={A: 10}),
            row(ONE, claim_owner="s"),
        ),
        (row(ONE, claim_owner="r"), {"owner": "s"}, changed(consumer_generation=1, allocations=ONE, attempt=1), None),
        (
            row(ONE, claim_owner="r"),
            {"owner": "s", "transfers_from": "t"},
            changed(consumer_generation=1, allocations=ONE, attempt=1),
            None,
        ),
        (row(ONE, claim_owner="r", project_id="q"), {"owner": "r"}, changed(consumer_generation=1), None),
        (row({}, claim_owner="r"), {"owner": "s"}, taken(2), row(ONE, 2, claim_owner="s")),
        (row({}, claim_owner="r"), {"owner": "r"}, changed(), None),
        (row({}, claim_owner="r"), {}, changed(), None),
        (row({}, attempt=2, claim_owner="r"), {"owner": "s"}, changed(), None),
        (row({}), {"owner": "s"}, changed(), None),
        (
            row(HELD, claim_owner="r"),
            {"owner": "s", "consumer_generation": 1},
            changed(consumer_generation=1, allocations=HELD, attempt=1),
            None,
        ),
    ],
)
def test_whose_allocation_it_is(
    known: ConsumerState | None, fields: dict[str, Any], expected: Verdict, after: ConsumerState | None
) -> None:
    decision = run(claim(ONE, user_id="u", **fields), consumers={VM: known} if known else {})
    assert verdicts(decision) == [expected]
    assert decision.consumers == ({VM: after} if after else {})


BOTH: Hold = {A: {"VCPU": 1}, B: {"VCPU": 2}}
AGAIN = taken(changed=False, outcomes=(), generations={A: 10})


@pytest.mark.parametrize(
    ("known", "wanted", "fields", "expected", "after"),
    [
        (None, ONE, {}, taken(), row(ONE, attempt=0, claim_owner="r")),
        (row(ONE, attempt=0, claim_owner="r"), ONE, {}, AGAIN, None),
        (
            row(BOTH, attempt=0, claim_owner="r"), ONE, {},
            taken(changed=False, outcomes=(), option=None, generations={A: 10, B: 10}, allocations=BOTH), None,
        ),
        (row(ONE, attempt=0, claim_owner="s"), THERE, {}, changed(consumer_generation=1, allocations=ONE), None),
        (row(ONE, attempt=0), THERE, {}, changed(consumer_generation=1, allocations=ONE), None),
        (row(ONE, attempt=0, claim_owner="r", project_id="q"), THERE, {}, changed(consumer_generation=1), None),
        (
            row(ONE, attempt=0, claim_owner="s"), THERE, {"consumer_generation": 1},
            taken(2, A, B), row(BOTH, 2, 0, "r"),
        ),
        (
            row(ONE, attempt=0, claim_owner="s"), THERE, {"consumer_generation": 2},
            changed(consumer_generation=1, allocations=ONE), None,
        ),
        (row(ONE, attempt=0, claim_owner="r"), THERE, {"consumer_generation": 1}, taken(
            changed=False, outcomes=(), option=None, generations={A: 10}, allocations=ONE), None),
        (row(ONE, attempt=0), {A: {"VCPU": 3}}, {"consumer_generation": 1}, taken(2), row({A: {"VCPU": 3}}, 2, 0, "r")),
        (row(HELD, attempt=0), ONE, {"consumer_generation": 1}, taken(2), row(HELD, 2, 0, "r")),
        (None, ONE, {"consumer_generation": 1}, changed(), None),
        (row({}, 3, attempt=7, claim_owner="r"), ONE, {}, taken(4), row(ONE, 4, 0, "r")),
        (row(ONE, attempt=7), THERE, {"consumer_generation": 1}, taken(2, A, B), row(BOTH, 2, 0, "r")),
        (None, ONE, {"release_first": True}, verdict("invalid", reason="claim.foreign"), None),
        (
            None, ONE, {"migration": Migration(uuid=MIGRATION, source=ONE)},
            verdict("invalid", reason="claim.foreign"), None,
        ),
        (
            row(ONE, attempt=0), {B: {"VCPU": 9}}, {"consumer_generation": 1},
            verdict("no_capacity", outcomes=("no_capacity",), consumer_generation=1, lacking=((B, "VCPU"),)), None,
        ),
    ],
)  # fmt: skip
def test_a_foreign_claim_adds_and_knows_no_attempts(
    known: ConsumerState | None,
    wanted: Hold,
    fields: dict[str, Any],
    expected: Verdict,
    after: ConsumerState | None,
) -> None:
    asked = claim(wanted, user_id="u", owner="r", external=True, **fields)
    decision = run(asked, consumers={VM: known} if known else {})
    assert verdicts(decision) == [expected]
    assert decision.consumers == ({VM: after} if after else {})


@pytest.mark.parametrize(("most", "outcome"), [(2, "over_quota"), (3, "claimed")])
def test_what_a_foreign_claim_adds_counts_beside_what_is_held(most: int, outcome: str) -> None:
    asked = claim(THERE, owner="r", external=True, consumer_generation=1, limits={"VCPU": most})
    loaded = {"projects": {"p": {"VCPU": 1, "INSTANCES": 1}}, "consumers": {VM: row(ONE, attempt=0)}}
    assert run(asked, **loaded).replies[0].outcome == outcome


@pytest.mark.parametrize(
    ("wanted", "spec_generations", "expected"),
    [
        ([], {}, verdict("invalid", reason="claim.options")),
        ([{A: {"VCPU": 6}}], {}, taken()),
        ([{A: {"VCPU": 7}}], {}, verdict("no_capacity", outcomes=("no_capacity",), lacking=((A, "VCPU"),))),
        (
            [{A: {"VCPU": 1, "DISK_GB": 9}}],
            {},
            verdict("no_capacity", outcomes=("no_capacity",), lacking=((A, "DISK_GB"),)),
        ),
        ([{A: {"VGPU": 1}}], {}, verdict("no_capacity", outcomes=("no_capacity",))),
        ([{A: {"VGPU": 1}}], {A: 1}, verdict("no_capacity", outcomes=("no_capacity",))),
        ([{A: {"VGPU": 1}}], {A: 2}, verdict("conflict", outcomes=("conflict",))),
        ([{A: {"NONE": 1}}], {A: 2}, verdict("conflict", outcomes=("conflict",))),
        ([{A: {"NONE": 1}}], {A: 1}, verdict("invalid", outcomes=("invalid",))),
        ([{A: {"NONE": 1, "VCPU": 1}}], {}, verdict("invalid", outcomes=("invalid",))),
        ([{A: {"NONE": 1, "VCPU": 9}}], {}, verdict("no_capacity", outcomes=("no_capacity",), lacking=((A, "VCPU"),))),
        ([{A: {}, B: {"VCPU": 1}}], {}, verdict("invalid", outcomes=("invalid",))),
        ([{A: {"VCPU": 1}, B: {"VCPU": 1}}], {B: 2}, verdict("conflict", outcomes=("conflict",))),
        (
            [{A: {"VCPU": 1}, B: {"VCPU": 9}}],
            {A: 2},
            verdict("no_capacity", outcomes=("no_capacity",), lacking=((B, "VCPU"),)),
        ),
        ([{A: {"VCPU": 9}, NOWHERE: {"VCPU": 1}}], {}, verdict("provider_removed", outcomes=("provider_removed",))),
        ([{CELL: {"VCPU": 1}}], {}, verdict("provider_removed", outcomes=("provider_removed",), reason=OTHERS)),
        (
            [{NOWHERE: {"VCPU": 1}}, {CELL: {"VCPU": 9}}, {B: {"VCPU": 9}}],
            {},
            verdict(
                "no_capacity",
                outcomes=("provider_removed", "provider_removed", "no_capacity"),
                lacking=((B, "VCPU"),),
                reason=OTHERS,
            ),
        ),
    ],
)
def test_what_a_claim_finds(wanted: list[Hold], spec_generations: dict[str, int], expected: Verdict) -> None:
    asked = replace(
        claim(*wanted or [{}], spec_generations=spec_generations),
        options=claim(*wanted, spec_generations=spec_generations).options if wanted else (),
    )
    decision = run(asked, foreign={CELL})
    assert verdicts(decision) == [expected]
    assert bool(decision.consumers) is (expected.outcome == "claimed")


def test_what_is_lacking_is_counted_beside_what_the_consumer_holds() -> None:
    asked = claim({A: {"VCPU": 8, "DISK_GB": 99}}, attempt=2, consumer_generation=1)
    (full,) = verdicts(run(asked, consumers={VM: holder(HELD)}))
    assert (full.lacking, full.consumer_generation) == (((A, "DISK_GB"),), 1)


@pytest.mark.parametrize("mine", [False, True])
def test_a_consumer_of_another_cell_is_left_alone(mine: bool) -> None:
    foreign = frozenset() if mine else {A}
    items = claim(THERE, attempt=2, consumer_generation=1), Release(consumer=VM), swap((VM, 1, THERE))
    said = [run(item, consumers={VM: holder(HELD)}, foreign=foreign) for item in items]
    assert all(bool(decision.consumers) is mine for decision in said)
    if not mine:
        assert [verdicts(decision) for decision in said] == [
            [changed(reason=OTHERS)], [changed()], [changed(consumer=VM, reason=OTHERS)]
        ]  # fmt: skip


# --- groups and limits


def member(consumer: str, host: str = A, policy: str = "anti-affinity", **fields: Any) -> Claim:
    option = ClaimOption(allocations={host: {"VCPU": 1}}, host=host)
    group = ServerGroup(uuid=GROUP, policy=GroupPolicy(policy))
    return Claim(consumer=consumer, options=(option,), project_id="p", server_group=group, **fields)


MOVE = Migration(uuid=MIGRATION, source={A: {"VCPU": 1}})
TO_B = member(VM, B, attempt=2, consumer_generation=1, migration=MOVE)
LOADED: dict[str, Any] = {"groups": {("p", GROUP): {VM: (A,)}}, "consumers": {VM: holder(ONE)}}
BESIDE = ClaimOption(allocations={A: {"VCPU": 1}, B: {"VCPU": 1}}, host=A)
GANG = ClaimAll(claims=(member(OTHER), member(NOWHERE, B)))


@pytest.mark.parametrize(
    ("loaded", "items", "expected"),
    [
        (LOADED, [], {A: "policy_violated", B: "claimed"}),
        ({}, [member(VM)], {A: "policy_violated", B: "claimed"}),
        ({}, [claim(ONE)], {A: "claimed", B: "claimed"}),
        ({}, [replace(member(VM), options=(BESIDE,))], {A: "policy_violated", B: "policy_violated"}),
        (
            LOADED,
            [replace(member(VM, B), external=True, consumer_generation=1)],
            {A: "policy_violated", B: "policy_violated"},
        ),
        (LOADED, [Release(consumer=VM)], {A: "claimed", B: "claimed"}),
        (LOADED, [swap((VM, 1, THERE))], {A: "claimed", B: "policy_violated"}),
        (LOADED, [member(VM, B, attempt=2, consumer_generation=1)], {A: "claimed", B: "policy_violated"}),
        (LOADED, [TO_B], {A: "policy_violated", B: "policy_violated"}),
        ({}, [member(VM), TO_B], {A: "policy_violated", B: "policy_violated"}),
        ({}, [member(VM), swap((VM, 1, {B: {"VCPU": 1}}))], {A: "claimed", B: "policy_violated"}),
        (LOADED, [TO_B, Release(consumer=MIGRATION)], {A: "claimed", B: "policy_violated"}),
        (LOADED, [TO_B, Release(consumer=VM)], {A: "policy_violated", B: "claimed"}),
        ({}, [ClaimAll(claims=(member(NOWHERE, B),))], {A: "claimed", B: "policy_violated"}),
        ({}, [ClaimAll(claims=(member(NOWHERE, B), member(VM, B)))], {A: "claimed", B: "claimed"}),
        (
            {},
            [member(VM), ClaimAll(claims=(member(NOWHERE, B), member(OTHER, B)))],
            {A: "policy_violated", B: "claimed"},
        ),
        (LOADED, [member(OTHER), Release(consumer=VM)], {A: "claimed", B: "claimed"}),
    ],
    ids=[
        "loaded",
        "claimed before",
        "claimed without a group",
        "claimed with something beside its host",
        "evacuated, and its source is not released yet",
        "released",
        "swapped",
        "moved",
        "moved with a migration",
        "claimed and moved with a migration",
        "claimed and swapped",
        "its migration released",
        "released beside its migration",
        "claimed in a gang",
        "not claimed in a gang",
        "claimed beside a gang",
        "released after it was counted",
    ],
)
def test_where_the_next_member_may_be(loaded: dict[str, Any], items: list[ClaimItem], expected: dict[str, str]) -> None:
    for host, outcome in expected.items():
        *_, last = run(*items, member(OTHER, host), **loaded).replies
        assert (last.outcome, last.members) == (outcome, {host: 1} if outcome == "policy_violated" else {})


def test_the_members_that_a_group_of_claims_has_made() -> None:
    assert run(member(VM), TO_B).joined == {("p", GROUP): {VM: None, MIGRATION: None}}
    assert run(TO_B, **LOADED).joined == {("p", GROUP): {VM: None, MIGRATION: None}}
    moved = run(replace(TO_B, server_group=None), consumers={VM: holder(ONE)})
    assert (moved.replies[0].outcome, moved.joined) == ("claimed", {})
    newly = run(TO_B, consumers={VM: holder(ONE)})
    assert newly.joined == {("p", GROUP): {VM: None}}, "it was no member where it was"


def test_a_member_is_never_in_its_own_way() -> None:
    here = member(VM, attempt=2, consumer_generation=1)
    assert run(here, **LOADED).replies[0].outcome == "claimed"
    back = replace(here, attempt=3, consumer_generation=2, migration=MOVE, release_first=True)
    assert [one.outcome for one in run(TO_B, back, **LOADED).replies] == ["claimed", "claimed"]


def test_a_move_is_shown_no_migration_of_its_own() -> None:
    loaded = {"groups": {("p", GROUP): {VM: (B,), MIGRATION: (A,), OTHER: (A,)}}}
    known = {VM: holder(THERE), MIGRATION: kept(ONE), OTHER: holder(ONE)}
    asked = member(VM, B, "affinity", attempt=2, consumer_generation=1, release_first=True, migration=MOVE)
    (refused,) = run(replace(asked, release_first=False, migration=None), consumers=known, **loaded).replies
    assert (refused.outcome, refused.members) == ("policy_violated", {A: 2})
    known[VM] = row({})
    (refused,) = run(asked, consumers=known, **loaded).replies
    assert (refused.outcome, refused.members) == ("policy_violated", {A: 1})


@pytest.mark.parametrize(
    ("others", "fenced_hosts", "outcome"),
    [
        ({OTHER: (A,)}, (), "policy_violated"),
        ({OTHER: (A,)}, (A,), "claimed"),
        ({OTHER: (A,), MIGRATION: (A,)}, (A,), "claimed"),
        ({OTHER: (B,), MIGRATION: (A,)}, (A,), "claimed"),
        ({OTHER: (CELL,), MIGRATION: (A,)}, (A,), "policy_violated"),
        ({OTHER: (CELL,), MIGRATION: (A,)}, (A, CELL), "claimed"),
    ],
)
def test_members_on_fenced_hosts_do_not_keep_an_affinity_group_there(
    others: dict[str, tuple[str, ...]], fenced_hosts: tuple[str, ...], outcome: str
) -> None:
    asked = replace(member(VM, B, "affinity"), fenced_hosts=fenced_hosts)
    (reply,) = run(asked, groups={("p", GROUP): others}).replies
    assert reply.outcome == outcome


def test_a_rule_comes_after_room_and_shows_members_whatever_comes_first() -> None:
    two = ServerGroup(uuid=GROUP, policy=GroupPolicy.ANTI_AFFINITY)
    options = [
        ClaimOption(allocations={host: {"VCPU": amount}}, host=host) for host, amount in ((A, 1), (B, 9), (A, 9))
    ]
    asked = Claim(consumer=OTHER, options=tuple(options), project_id="p", server_group=two)
    (full,) = run(asked, **LOADED).replies
    assert (full.outcome, full.outcomes, full.members) == (
        "no_capacity",
        ("policy_violated", "no_capacity", "no_capacity"),
        {A: 1},
    )
    (roomless,) = run(replace(asked, options=(options[2],)), **LOADED).replies
    assert (roomless.outcome, roomless.members) == ("no_capacity", {}), "the rule was not asked"
    (second,) = run(replace(asked, options=(options[0], replace(options[1], allocations=THERE))), **LOADED).replies
    assert (second.outcome, second.option) == ("claimed", 1)
    (hostless,) = run(replace(asked, options=(replace(options[0], host=None),)), **LOADED).replies
    assert hostless.outcome == "invalid"


def test_a_gang_shows_the_members_that_are_there_without_it() -> None:
    gang = ClaimAll(claims=(member(OTHER), member(NOWHERE), member(MIGRATION, B)))
    (refused,) = run(gang, groups={("p", GROUP): {VM: (B,)}}, consumers={VM: holder(THERE)}).replies
    first, second, third = refused.results
    assert (first.outcome, second.outcome, third.outcome) == ("incomplete", "policy_violated", "policy_violated")
    assert (first.members, second.members, third.members) == ({}, {}, {B: 1})


def test_the_gang_of_an_earlier_item_is_there() -> None:
    (_, refused) = run(GANG, member(VM)).replies
    assert refused.members == {A: 1}


QUOTA: dict[str, Any] = {"projects": {"p": {"VCPU": 3, "INSTANCES": 1}}, "consumers": {OTHER: holder({A: {"VCPU": 3}})}}
LIMITED = {"limits": {"VCPU": 4}}


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([claim(ONE, **LIMITED)], "claimed"),
        ([claim(HELD, **LIMITED)], "over_quota"),
        ([claim({A: {"VCPU": 9}}, **LIMITED)], "no_capacity"),
        ([claim(HELD, ONE, **LIMITED)], "claimed"),
        ([claim(HELD, limits={"DISK_GB": 0})], "claimed"),
        ([claim({A: {"VCPU": 3}}, consumer=OTHER, attempt=2, consumer_generation=1, limits={"VCPU": 2})], "claimed"),
        ([Release(consumer=OTHER), claim({A: {"VCPU": 5}}, **LIMITED)], "over_quota"),
        ([claim(ONE, limits={"INSTANCES": 1})], "over_quota"),
        ([claim({A: {"DISK_GB": 1}}), claim({A: {"DISK_GB": 1}}, consumer=B, limits={"DISK_GB": 2})], "claimed"),
        ([claim(ONE, limits={"INSTANCES": 2})], "claimed"),
        ([claim({A: {"DISK_GB": 1}}, limits={"DISK_GB": 1})], "claimed"),
        ([claim(ONE), claim(ONE, consumer=MIGRATION, **LIMITED)], "over_quota"),
        ([replace(claim(ONE), project_id="q"), claim(ONE, consumer=MIGRATION, **LIMITED)], "claimed"),
        ([replace(claim(HELD, **LIMITED), project_id="q")], "claimed"),
        ([replace(claim(HELD, limits={"VCPU": 1}), project_id="q")], "over_quota"),
        ([Release(consumer=OTHER), claim(HELD, **LIMITED)], "claimed"),
        ([claim(HELD, consumer=OTHER, attempt=2, consumer_generation=1), claim(HELD, **LIMITED)], "claimed"),
        ([claim(ONE, consumer=OTHER, attempt=2, consumer_generation=1, limits={"VCPU": 0})], "claimed"),
        (
            [
                claim(
                    HELD, consumer=OTHER, attempt=2, consumer_generation=1,
                    migration=Migration(uuid=MIGRATION, source={A: {"VCPU": 3}}),
                ),
                claim(HELD, **LIMITED),
            ],
            "over_quota",
        ),
        (
            [
                claim(
                    HELD, consumer=OTHER, attempt=2, consumer_generation=1,
                    migration=Migration(uuid=MIGRATION, source={A: {"VCPU": 3}}),
                ),
                Release(consumer=MIGRATION, of_migration=True),
                claim(HELD, **LIMITED),
            ],
            "claimed",
        ),
        ([ClaimAll(claims=(claim(ONE),)), claim(ONE, consumer=MIGRATION, **LIMITED)], "over_quota"),
        (
            [ClaimAll(claims=(claim(ONE), claim({A: {"VCPU": 99}}, consumer=NOWHERE))), claim(ONE, **LIMITED)],
            "claimed",
        ),
    ],
)  # fmt: skip
def test_a_project_stays_within_its_limits(items: list[ClaimItem], expected: str) -> None:
    *_, last = run(*items, **QUOTA).replies
    assert last.outcome == expected
    assert last.reason.partition(":")[0] == {"over_quota": next(iter(getattr(items[-1], "limits", {})), "")}.get(
        expected, ""
    )


def test_a_move_of_what_a_migration_counts_in_its_instances_place_stays_within_the_limit() -> None:
    counted = kept({A: {"VCPU": 3}}, consumer_type="MIGRATION_COUNTED")
    loaded = {"projects": {"p": {"VCPU": 3}}, "consumers": {VM: row({}), MIGRATION: counted}}
    move = Migration(uuid=MIGRATION, source={A: {"VCPU": 3}})
    for amount, outcome in ((3, "claimed"), (4, "claimed"), (5, "over_quota")):
        asked = claim({B: {"VCPU": amount}}, attempt=2, release_first=True, migration=move, limits={"VCPU": 4})
        assert run(asked, **loaded).replies[0].outcome == outcome


# --- gangs


@pytest.mark.parametrize(
    ("claims", "each"),
    [
        ([claim(ONE), claim(THERE, consumer=OTHER)], ["claimed", "claimed"]),
        ([claim(ONE), claim(ONE)], ["invalid", "invalid"]),
        ([claim(ONE), claim(ONE, consumer=OTHER, release_first=True)], ["invalid", "invalid"]),
        ([claim(ONE), claim(ONE, consumer=OTHER, migration=MOVE)], ["invalid", "invalid"]),
        ([claim(ONE), claim({A: {"VCPU": 6}}, consumer=OTHER)], ["incomplete", "no_capacity"]),
        ([claim({A: {"VCPU": 9}}), claim(ONE, consumer=OTHER)], ["no_capacity", "incomplete"]),
        ([claim(HELD, consumer=MIGRATION), claim(ONE)], ["claimed", "claimed"]),
        ([claim(HELD, consumer=MIGRATION), claim({A: {"VCPU": 9}})], ["claimed", "no_capacity"]),
        ([claim(HELD, consumer=MIGRATION)], ["claimed"]),
    ],
)
def test_a_gang_is_taken_whole_or_not_at_all(claims: list[Claim], each: list[str]) -> None:
    decision = run(ClaimAll(claims=tuple(claims)), consumers={MIGRATION: holder(HELD)})
    (said,) = decision.replies
    assert [one.outcome for one in said.results] == each
    new = [one.consumer for one in claims if {*each} == {"claimed"} and one.consumer != MIGRATION]
    assert sorted(decision.consumers) == sorted(new)
    assert sum(one.sequence for one in said.results) == len(new) * CHANGED
    assert bool(decision.generations) is bool(decision.used) is bool(new)


def test_a_gang_adds_to_what_was_decided_before_it() -> None:
    decision = run(claim(ONE), ClaimAll(claims=(claim(ONE, consumer=OTHER),)), claim(ONE, consumer=MIGRATION))
    assert (decision.used, decision.generations) == ({A: {"VCPU": 5}}, {A: 13})
    assert set(decision.consumers) == {VM, OTHER, MIGRATION}
