"""What a group of claims names and is answered, and whose allocations follow providers that move, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts import placement as messages
from bus.contracts.placement import (
    ClaimAll,
    ClaimOption,
    ClaimOutcome,
    ConflictingConsumer,
    GroupPolicy,
    Inventory,
    Migration,
    ProviderReport,
    Release,
    Revert,
    ServerGroup,
    Swap,
)
from placement_worker.domain.allocation_migration import (
    migrate_allocations,
    migrated,
    migrating_classes,
    old_and_new,
    usage_after,
)
from placement_worker.domain.claim_group import ClaimGroup, numbered
from placement_worker.domain.claim_ledger import CHANGED, Decision
from placement_worker.domain.claims import ClaimItem, decide
from placement_worker.domain.values import ConsumerState, ProviderAllocations, stored_inventory
from tests.unit.placement_rest.test_decisions import inventory
from tests.unit.placement_rest.test_decisions import provider as given
from tests.unit.placement_worker.test_claims import CLASSES, MIGRATION, OTHER, VM, A, B, claim, provider, room

# --- What a group of claims names before it is decided, and the reply to each item, as tables.


GROUP = "99999999-0000-4000-8000-000000000000"
SOURCE = {B: {"DISK_GB": 2}}
MOVE = Migration(uuid=MIGRATION, source=SOURCE)
TAKEN = claim({A: {"VCPU": 1}}, attempt=3, user_id="u", consumer_type="KIND", owner="run")
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
        (TAKEN, {VM: ConsumerState(1, 3, "p", "u", "KIND", claim_owner="run")}, {A}, {"VCPU"}),
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
                VM: ConsumerState(1, 3, "p", "u", "KIND", claim_owner="run"),
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


FULL = messages.ClaimResult(outcome=ClaimOutcome.NO_CAPACITY)


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
    holders = {place: (ConflictingConsumer(consumer=str(place), project_id="p"),) for place in range(4)}
    replies = [FULL, messages.ReleaseResult(outcome="absent"), messages.ClaimAllResult(results=(FULL, FULL)), FULL]
    first, _, second, third = numbered(replies, 7, "api", holders)
    assert isinstance(first, messages.ClaimResult) and isinstance(third, messages.ClaimResult)
    assert isinstance(second, messages.ClaimAllResult)
    assert [one.conflicting_consumers for one in (first, *second.results, third)] == list(holders.values())


def test_no_more_lost_claims_are_named_than_are_looked_up() -> None:
    items = [claim({A: {"VCPU": 9}}, consumer=f"{n}") for n in range(messages.MAX_LOST_NAMED + 1)]
    assert list(lost(*items)) == list(range(messages.MAX_LOST_NAMED))


RESULTS = [
    messages.ClaimResult(
        outcome=ClaimOutcome.CLAIMED,
        option=1,
        outcomes=(ClaimOutcome.NO_CAPACITY, ClaimOutcome.CLAIMED),
        consumer_generation=4,
        generations={A: 11},
        reason="why",
        allocations={A: {"VCPU": 1}},
        members={A: 2},
        attempt=3,
    ),
    messages.ReleaseResult(outcome="released"),
    messages.RevertResult(outcome="reverted", consumer_generation=4, allocations={A: {"VCPU": 1}}, reason="why"),
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
    decided = messages.ClaimResult(outcome=ClaimOutcome.POLICY_VIOLATED, members={A: 2})
    (reply,) = numbered([decided], 7, bus)
    assert reply == replace(decided, members=members)


# --- Which consumer's allocations go where when providers take over from another: a row for each bound and each order.


Holdings = dict[str, ProviderAllocations]


def report(uuid: str, receives_from: str | None = "old", takes: tuple[str, ...] = (), **rooms: Any) -> ProviderReport:
    """Each of `rooms` is a class: its total, or all fields of its inventory."""
    fields = {name: room if isinstance(room, dict) else {"total": room} for name, room in rooms.items()}
    inventories = {name: Inventory(**room) for name, room in fields.items()}
    return ProviderReport(
        uuid=uuid, name=uuid, receives_from=receives_from, known_consumers=takes, inventories=inventories
    )


@pytest.mark.parametrize(
    ("reports", "pairs"),
    [
        ([report("a", None, VCPU=1)], []),
        ([report("old", None, DISK_GB=1), report("a", VCPU=1)], [("old", "VCPU")]),
        ([report("old", None, VCPU=1), report("a", VCPU=1, DISK_GB=1)], [("old", "DISK_GB")]),
        ([report("a", VCPU=1), report("b", VCPU=1)], [("old", "VCPU")]),
        ([report("a", VCPU=1), report("b", "a", VCPU=1)], [("old", "VCPU")]),
    ],
    ids=["nobody takes", "taken", "kept by its source", "by two", "kept by the other source"],
)
def test_the_classes_that_migrate(reports: list[ProviderReport], pairs: list[tuple[str, str]]) -> None:
    assert migrating_classes(reports) == pairs


def old(**amounts: int) -> ProviderAllocations:
    return {"old": amounts}


STEPS = {"total": 8, "step_size": 2}


@pytest.mark.parametrize(
    ("takers", "used", "allocations", "moved"),
    [
        ([report("a", VCPU=4), report("b", VCPU=4)], {}, {"c": old(VCPU=4)}, {"c": {"a": {"VCPU": 4}}}),
        ([report("a", VCPU=4)], {"a": {"VCPU": 1}}, {"c": old(VCPU=3)}, {"c": {"a": {"VCPU": 3}}}),
        (
            [report("a", VCPU=4), report("b", VCPU=9)],
            {"a": {"VCPU": 2}},
            {"c": old(VCPU=3)},
            {"c": {"b": {"VCPU": 3}}},
        ),
        ([report("a", VCPU=4)], {"a": {"VCPU": 4}}, {"c": old(VCPU=1)}, {}),
        ([report("a", VCPU=4)], {"a": {"VCPU": 9}}, {"c": {**old(VCPU=1), "a": {"VCPU": 3}}}, {}),
        (
            [report("a", VCPU=3), report("b", VCPU=1), report("d", VCPU=3), report("e", VCPU=3)],
            {},
            {"c": old(VCPU=6)},
            {"c": {"a": {"VCPU": 3}, "b": {"VCPU": 1}, "d": {"VCPU": 2}}},
        ),
        (
            [report("a", VCPU=3)],
            {"a": {"VCPU": 1}},
            {"c": {**old(VCPU=4, DISK_GB=2), "a": {"DISK_GB": 7}, "b": {"VCPU": 1}}},
            {"c": {"old": {"VCPU": 2, "DISK_GB": 2}, "a": {"DISK_GB": 7, "VCPU": 2}, "b": {"VCPU": 1}}},
        ),
        ([report("a", VCPU={"total": 8, "max_unit": 3})], {}, {"c": old(VCPU=3)}, {"c": {"a": {"VCPU": 3}}}),
        (
            [report("a", VCPU={"total": 8, "max_unit": 3})],
            {},
            {"c": old(VCPU=4)},
            {"c": {"old": {"VCPU": 1}, "a": {"VCPU": 3}}},
        ),
        ([report("a", VCPU={"total": 8, "min_unit": 3})], {}, {"c": old(VCPU=3)}, {"c": {"a": {"VCPU": 3}}}),
        ([report("a", VCPU={"total": 8, "min_unit": 3})], {}, {"c": old(VCPU=2)}, {}),
        ([report("a", VCPU=STEPS)], {}, {"c": old(VCPU=5)}, {"c": {"old": {"VCPU": 1}, "a": {"VCPU": 4}}}),
        ([report("a", VCPU=STEPS)], {}, {"c": old(VCPU=1)}, {}),
        (
            [report("a", VCPU=STEPS)],
            {"a": {"VCPU": 1}},
            {"c": {**old(VCPU=2), "a": {"VCPU": 1}}},
            {"c": {"old": {"VCPU": 1}, "a": {"VCPU": 2}}},
        ),
        (
            [report("a", VCPU={"total": 8, "max_unit": 3})],
            {"a": {"VCPU": 4}},
            {"c": {**old(VCPU=2), "a": {"VCPU": 4}}},
            {},
        ),
        (
            [report("a", VCPU=4)],
            {"a": {"VCPU": 2}},
            {"c": {**old(VCPU=2), "a": {"VCPU": 2}}},
            {"c": {"a": {"VCPU": 4}}},
        ),
    ],
    ids=[
        "to the first with room",
        "exactly its room",
        "to the next with room",
        "no_capacity",
        "over its capacity",
        "split over as many as it takes",
        "what does not fit stays with the rest",
        "its largest amount",
        "one more than its largest amount",
        "its least amount",
        "less than its least amount",
        "in steps",
        "less than a step",
        "in steps with what is there",
        "more there than its largest amount",
        "to what is there",
    ],
)  # fmt: skip
def test_how_much_a_taker_takes(
    takers: list[ProviderReport], used: dict[str, dict[str, int]], allocations: Holdings, moved: Holdings
) -> None:
    assert migrate(takers, used, allocations) == moved


@pytest.mark.parametrize(
    ("takers", "allocations", "moved"),
    [
        ([report("a", VCPU=3)], {"c": old(VCPU=2), "d": old(VCPU=3)}, {"d"}),
        ([report("a", VCPU=3)], {"d": old(VCPU=3), "c": old(VCPU=3)}, {"c"}),
        ([report("a", takes=("d",), VCPU=2)], {"c": old(VCPU=3), "d": old(VCPU=2)}, {"d"}),
        (
            [report("a", MEMORY_MB=1, VCPU=1)],
            {"c": old(VCPU=3), "d": old(VCPU=1, MEMORY_MB=1)},
            {"d"},
        ),
        ([report("a", MEMORY_MB=3), report("b", DISK_GB=3)], {"c": old(MEMORY_MB=3), "d": old(DISK_GB=3)}, {"c", "d"}),
        ([report("a", VCPU=3)], {"c": old(DISK_GB=3), "d": {"a": {"VCPU": 3}}}, set()),
        ([report("old", None, VCPU=3), report("a", VCPU=3)], {"c": old(VCPU=3)}, set()),
        ([report("a", "other", VCPU=3)], {"c": old(VCPU=3)}, set()),
        ([report("a", takes=("c",), VCPU=1), report("b", VCPU=3)], {"c": old(VCPU=2), "d": old(VCPU=3)}, {"c", "d"}),
    ],
    ids=[
        "the largest",
        "of equals by uuid",
        "whose place is known",
        "the largest of the first class by name",
        "each of another class",
        "nothing of the class",
        "kept by its source",
        "taken from another",
        "where it is known, as far as there is room",
    ],
)  # fmt: skip
def test_who_moves_first(takers: list[ProviderReport], allocations: Holdings, moved: set[str]) -> None:
    """There is room for one of them, or each has its own."""
    assert set(migrate(takers, {}, allocations)) == moved


def migrate(
    takers: list[ProviderReport], used: dict[str, dict[str, int]], allocations: Holdings
) -> Mapping[str, ProviderAllocations]:
    inventories = {one.uuid: {name: stored_inventory(room) for name, room in one.inventories.items()} for one in takers}
    return migrate_allocations(takers, "old", inventories, used, allocations)


def test_classes_of_other_takers_move_apart_and_each_known_place_is_kept() -> None:
    takers = [report("a", takes=("c",), VCPU=9, MEMORY_MB=9), report("b", takes=("d",), VCPU=9), report("e", DISK_GB=9)]
    both = migrate(takers, {}, {"c": old(VCPU=2, MEMORY_MB=3, DISK_GB=4), "d": old(VCPU=1, MEMORY_MB=1)})
    assert both == {
        "c": {"a": {"VCPU": 2, "MEMORY_MB": 3}, "e": {"DISK_GB": 4}},
        "d": {"b": {"VCPU": 1}, "a": {"MEMORY_MB": 1}},
    }


@pytest.mark.parametrize(
    ("used", "before", "after", "left"),
    [
        ({"VCPU": 3, "DISK_GB": 1}, [old(VCPU=3)], [{"a": {"VCPU": 3}}], {"DISK_GB": 1}),
        ({"VCPU": 3}, [old(VCPU=3), {"a": {"VCPU": 9}}], [old(VCPU=2), old(DISK_GB=2)], {"VCPU": 2, "DISK_GB": 2}),
        ({}, [], [], {}),
    ],
    ids=["all gone", "some gone and some come", "none"],
)
def test_the_usage_after_a_migration(
    used: dict[str, int], before: list[ProviderAllocations], after: list[ProviderAllocations], left: dict[str, int]
) -> None:
    assert usage_after(used, "old", before, after) == left


def test_between_two_reports_a_provider_has_the_inventories_of_both() -> None:
    one, two = inventory(1), inventory(2)
    before = {"a": given("a", inventories={"VCPU": one, "DISK_GB": one}), "b": given("b"), "d": given("d")}
    before["e"] = given("e", inventories={"VCPU": two})
    after = {
        "a": given("a", inventories={"VCPU": two}),
        "c": given("c", inventories={"VCPU": one}),
        "d": given("d", inventories={"VCPU": one}),
        "e": given("e", inventories={"VCPU": one}),
    }
    both = old_and_new(before, after)
    assert list(both) == ["a", "c", "d", "e", "b"]
    assert both["a"].inventories == {"VCPU": two, "DISK_GB": one}
    assert both["b"] is before["b"]
    assert all(both[uuid] is after[uuid] for uuid in "cde"), "they are written once"


def test_the_rows_of_a_migration() -> None:
    before = {
        "old": given("old", used={"VCPU": 3, "DISK_GB": 1}, generation=5),
        "provider_removed": given("provider_removed", used={"VCPU": 1}, generation=8),
        "same": given("same", used={"VCPU": 2, "DISK_GB": 0}),
    }
    after = {
        "old": given("old", used={"DISK_GB": 1}, generation=6),
        "same": given("same", used={"VCPU": 2, "MEMORY_MB": 0}),
        "new": given("new", used={"VCPU": 4}, generation=1),
    }
    known = ConsumerState(7, 2, "p", "u", "INSTANCE", old(VCPU=3))
    now = {"new": {"VCPU": 3}}
    assert migrated(before, after, {"c": now}, {"c": known, "d": known}) == Decision(
        [],
        {"c": ConsumerState(7, 2, "p", "u", "INSTANCE", now)},
        {"old": {"VCPU": 0}, "provider_removed": {"VCPU": 0}, "new": {"VCPU": 4}},
        {"old": 6, "provider_removed": 8, "new": 1},
    )
