"""The deck of faults: one seed, one order; nothing is done twice to the same target; never too much at once."""

from __future__ import annotations

import random

from lab.chaos.plan import DECK, MAX_BROKEN, MAX_PAUSED, ChaosPlan, FaultKind, FaultSchedule, FaultSpec, PlannedFault
from lab.chaos.run import chosen

NAMES = {
    "scheduler": ["scheduler1", "scheduler2"],
    "placement": ["placement1"],
    "conductor": ["conductor-cell1-1"],
    "compute": ["compute-cell1-c1"],
    "broker": ["broker"],
    "database": ["database"],
}


def dealt(seed: int, count: int) -> list[PlannedFault]:
    deck = FaultSchedule(DECK, random.Random(seed))
    faults = [deck.deal(NAMES) for _ in range(count)]
    assert all(faults)
    return [fault for fault in faults if fault is not None]


def test_the_same_seed_deals_the_same_faults() -> None:
    assert dealt(7, 200) == dealt(7, 200)
    assert dealt(7, 200) != dealt(8, 200)


def test_one_round_of_the_deck_holds_every_sort_as_often_as_declared() -> None:
    size = sum(card.copies for card in DECK)
    labels = [fault.label for fault in dealt(3, size)]
    for role in NAMES:
        copies = sum(card.copies for card in DECK if card.role == role and card.kind is FaultKind.KILL)
        assert labels.count(f"kill_{role}") == copies > 0


def test_nothing_is_dealt_for_what_is_busy() -> None:
    deck = FaultSchedule(DECK, random.Random(1))
    free = NAMES | {"broker": [], "scheduler": ["scheduler2"]}
    faults = [deck.deal(free) for _ in range(300)]
    targets = {fault.target for fault in faults if fault is not None}
    assert "broker" not in targets and "scheduler1" not in targets and "scheduler2" in targets


def test_enough_is_enough() -> None:
    deck = FaultSchedule(DECK, random.Random(1))
    assert deck.deal(NAMES, broken=MAX_BROKEN) is None
    paused = [deck.deal(NAMES, paused=MAX_PAUSED) for _ in range(100)]
    assert all(fault is not None and fault.kind is not FaultKind.PAUSE for fault in paused)


def test_a_deck_of_pauses_alone_has_nothing_more_when_enough_stand_still() -> None:
    deck = FaultSchedule([FaultSpec(FaultKind.PAUSE, "broker", 1, 1.0, 2.0)], random.Random(1))
    assert deck.deal(NAMES, paused=MAX_PAUSED) is None
    assert deck.deal(NAMES) is not None


def test_faults_are_chosen_by_kind_by_role_or_by_both() -> None:
    cards = ChaosPlan().deck
    kept = [card for card in cards if chosen(card.kind, card.role, ["kill_broker", "stall"])]
    assert {(card.kind, card.role) for card in kept} == {
        (FaultKind.KILL, "broker"), (FaultKind.STALL, "broker"), (FaultKind.STALL, "database")
    }  # fmt: skip
    assert all(chosen(card.kind, card.role, []) for card in cards)
