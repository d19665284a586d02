"""What a group of claims names before it is decided, and the reply to each item, as tables."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts import placement as messages
from bus.contracts.placement import (
    ClaimAll,
    ClaimHolder,
    ClaimOption,
    ClaimOutcome,
    GroupPolicy,
    Migration,
    Release,
    Revert,
    ServerGroup,
    Swap,
)
from placement_worker.domain.claim_group import ClaimGroup, numbered
from placement_worker.domain.claim_ledger import CHANGED
from placement_worker.domain.claims import ClaimItem, decide
from placement_worker.domain.values import ConsumerState
from tests.unit.placement.test_claims import CLASSES, MIGRATION, OTHER, VM, A, B, claim, provider, room

GROUP = "99999999-0000-4000-8000-000000000000"
SOURCE = {B: {"DISK_GB": 2}}
MOVE = Migration(uuid=MIGRATION, source=SOURCE)
TAKEN = claim({A: {"VCPU": 1}}, attempt=3, user_id="u", consumer_type="KIND", by="run")
MOVED = claim({A: {"VCPU": 1}}, attempt=3, user_id="u", migration=MOVE)
REVERT = Revert(consumer=VM, migration=MOVE, source_attempt=1, attempt=4)
UNKNOWNS = ConsumerState(1, 1, "p", "unknown", "INSTANCE")
ENTRY = messages.ConsumerAllocations(
    consumer=VM, allocations=SOURCE, project_id="p", user_id="u", consumer_type="KIND", attempt=2
)


def member(consumer: str, policy: str, *hosts: str | None, group: str = GROUP, **fields: Any) -> messages.Claim:
    options = tuple(ClaimOption(allocations={A: {"VCPU": 1}}, host=host) for host in hosts)
    server_group = ServerGroup(uuid=group, policy=GroupPolicy(policy))
    return messages.Claim(consumer=consumer, options=options, project_id="p", server_group=server_group, **fields)


@pytest.mark.parametrize(
    ("item", "consumers", "providers", "classes"),
    [
        (TAKEN, {VM: ConsumerState(1, 3, "p", "u", "KIND", run="run")}, {A}, {"VCPU"}),
        (claim(SOURCE, {A: {"VCPU": 1}}), {VM: UNKNOWNS}, {A, B}, {"VCPU", "DISK_GB"}),
        (
            MOVED,
            {VM: ConsumerState(1, 3, "p", "u", "INSTANCE"), MIGRATION: ConsumerState(1, 3, "p", "u", "MIGRATION")},
            {A, B},
            {"VCPU", "DISK_GB"},
        ),
        (
            ClaimAll(claims=(TAKEN, claim(SOURCE, consumer=OTHER))),
            {
                VM: ConsumerState(1, 3, "p", "u", "KIND", run="run"),
                OTHER: UNKNOWNS,
            },
            {A, B},
            {"VCPU", "DISK_GB"},
        ),
        (Release(consumer=VM, attempt=5), {VM: ConsumerState(0, 5, "", "", "")}, set(), set()),
        (Release(consumer=VM), {VM: ConsumerState(0, 0, "", "", "")}, set(), set()),
        (REVERT, dict.fromkeys((VM, MIGRATION), ConsumerState(0, 4, "", "", "")), {B}, {"DISK_GB"}),
        (Swap(consumers=(ENTRY,)), {VM: ConsumerState(1, 0, "p", "u", "KIND")}, {B}, {"DISK_GB"}),
    ],
    ids=["claim", "claim of options", "move", "gang", "release of an attempt", "release", "revert", "swap"],
)
def test_the_rows_that_an_item_names(
    item: ClaimItem, consumers: dict[str, ConsumerState], providers: set[str], classes: set[str]
) -> None:
    group = ClaimGroup([item])
    assert (group.consumers, group.providers, group.classes) == (consumers, providers, classes)
    first = Release(consumer=VM, attempt=9), Release(consumer=MIGRATION, attempt=9)
    both = ClaimGroup([*first, item]).consumers
    assert [both[one].attempt for one in (VM, MIGRATION)] == [9, 9], "the first item of a consumer gives its new row"


TOGETHER = member(VM, "affinity", B, A)
HARD_HOSTS = [("p", GROUP, A), ("p", GROUP, B)]


@pytest.mark.parametrize(
    ("items", "keys", "hosts", "moved", "most"),
    [
        ([claim({A: {"VCPU": 1}})], [], [], [], 101),
        ([MOVED, REVERT], [], [], [], 102),
        ([member(VM, "anti-affinity", B, None, A)], [GROUP], HARD_HOSTS, [VM], 101),
        ([TOGETHER], [GROUP], HARD_HOSTS, [VM], 101),
        ([member(VM, "soft-affinity", A)], [GROUP], [], [VM], 101),
        ([member(VM, "soft-anti-affinity", A, migration=MOVE)], [GROUP], [], [VM, MIGRATION], 102),
        ([member(VM, "soft-affinity", A), claim(SOURCE, consumer=OTHER)], [GROUP], [], [VM, OTHER], 102),
        ([member(OTHER, "soft-affinity", A), MOVED], [GROUP], [], [VM, OTHER, MIGRATION], 103),
        ([REVERT, member(OTHER, "soft-affinity", A)], [GROUP], [], [VM, OTHER, MIGRATION], 103),
        ([Swap(consumers=(ENTRY,)), member(OTHER, "soft-affinity", A)], [GROUP], [], [VM, OTHER], 102),
        ([Release(consumer=VM), member(OTHER, "soft-affinity", A)], [GROUP], [], [OTHER], 102),
    ],
    ids=[
        "no group",
        "moves without a group",
        "apart",
        "together",
        "rather together",
        "rather apart, and it moves",
        "beside a claim without a group",
        "beside a move without a group",
        "beside a revert",
        "beside a swap",
        "beside a release",
    ],
)
def test_the_members_that_decide(
    items: list[ClaimItem], keys: list[str], hosts: list[Any], moved: list[str], most: int
) -> None:
    group = ClaimGroup(items)
    wanted = group.members()
    assert group.keys == [("p", key) for key in keys]
    assert (wanted.hosts, wanted.most) == (hosts, most)
    assert wanted.together == [key for key in group.keys if items[0] is TOGETHER]
    assert wanted.moved == [("p", GROUP, one) for one in moved]
    assert group.members(set()).moved == []
    assert group.members({VM, B}).moved == [("p", GROUP, VM)] * (VM in moved)


def test_members_of_other_groups_are_not_paired_and_groups_are_locked_in_order() -> None:
    first, second = member(VM, "affinity", A, group=GROUP), member(OTHER, "affinity", A, group=B)
    group = ClaimGroup([first, second])
    assert group.keys == [("p", GROUP), ("p", B)]
    assert group.members().moved == [("p", GROUP, VM), ("p", B, OTHER)]


def test_the_lowest_limit_of_each_project_counts() -> None:
    of_b = messages.Claim(consumer=VM, options=(), project_id="b", limits={"VCPU": 7})
    items = [claim({}, limits={"VCPU": limit, "DISK_GB": 5}) for limit in (9, 3, 6)]
    group = ClaimGroup([*items, of_b])
    assert group.limits == {("p", "VCPU"): 3, ("p", "DISK_GB"): 5, ("b", "VCPU"): 7}
    assert group.projects == ["b", "p"]


FULL = messages.ClaimResult(outcome=ClaimOutcome.FULL)


def lost(*items: ClaimItem) -> dict[int, Any]:
    """Of claims of more than a provider has."""
    return decide(items, {}, {A: provider(VCPU=room(8))}, CLASSES).lost


def test_the_claims_that_found_a_provider_full_are_numbered_through() -> None:
    much, little, lacking = {A: {"VCPU": 9}}, {A: {"VCPU": 1}}, ((A, "VCPU"),)
    gang = ClaimAll(claims=(claim(little, consumer=OTHER), claim(much, consumer=B)))
    invalid = ClaimAll(claims=(claim(much), claim(much)))
    items = [claim(much), Release(consumer=VM), gang, claim(much, consumer=A)]
    assert lost(*items) == {0: (VM, lacking), 2: (B, lacking), 3: (A, lacking)}
    assert lost(invalid, claim(much)) == {2: (VM, lacking)}
    holders = {place: (ClaimHolder(consumer=str(place), project_id="p"),) for place in range(4)}
    replies = [FULL, messages.ReleaseResult(outcome="absent"), messages.ClaimAllResult(results=(FULL, FULL)), FULL]
    first, _, second, third = numbered(replies, 7, "api", holders)
    assert isinstance(first, messages.ClaimResult) and isinstance(third, messages.ClaimResult)
    assert isinstance(second, messages.ClaimAllResult)
    assert [one.holders for one in (first, *second.results, third)] == list(holders.values())


def test_no_more_lost_claims_are_named_than_are_looked_up() -> None:
    items = [claim({A: {"VCPU": 9}}, consumer=f"{n}") for n in range(messages.MAX_LOST_NAMED + 1)]
    assert list(lost(*items)) == list(range(messages.MAX_LOST_NAMED))


RESULTS = [
    messages.ClaimResult(
        outcome=ClaimOutcome.CLAIMED,
        option=1,
        outcomes=(ClaimOutcome.FULL, ClaimOutcome.CLAIMED),
        consumer_generation=4,
        generations={A: 11},
        reason="why",
        holding={A: {"VCPU": 1}},
        members={A: 2},
        attempt=3,
    ),
    messages.ReleaseResult(outcome="released"),
    messages.RevertResult(outcome="reverted", consumer_generation=4, holding={A: {"VCPU": 1}}, reason="why"),
    messages.SwapResult(outcome=ClaimOutcome.CLAIMED, consumer=VM, generations={A: 11}, reason="why"),
]


@pytest.mark.parametrize("changed", [True, False])
@pytest.mark.parametrize("result", RESULTS, ids=["claim", "release", "revert", "swap"])
def test_the_reply_to_an_item(result: Any, changed: bool) -> None:
    """It carries the number in the feed of what it has changed."""
    (reply,) = numbered([replace(result, sequence=CHANGED if changed else 0)], 7, "api")
    assert reply == replace(result, sequence=7 if changed else 0)


@pytest.mark.parametrize(("bus", "members"), [("api", {A: 2}), ("c1", {})])
def test_a_cell_learns_nothing_of_other_hosts(bus: str, members: dict[str, int]) -> None:
    decided = messages.ClaimResult(outcome=ClaimOutcome.RULED_OUT, members={A: 2})
    (reply,) = numbered([decided], 7, bus)
    assert reply == replace(decided, members=members)
