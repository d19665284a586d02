"""Nova's rules, against what Nova's own code answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ironic_sync.domain.node import Node, Unreadable, parse_node
from ironic_sync.domain.rules import NO_CLASS, class_name, is_transient, offers_more, place, reserve_all
from tests.unit.ironic.world import RECORDINGS

RULES: dict[str, Any] = json.loads((RECORDINGS / "nova-rules.json").read_text())
UUID = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
INSTANCE = "11111111-2222-4333-8444-555555555555"


def node(**fields: Any) -> Node:
    free = {"provision_state": "available", "power_state": "power off", "maintenance": False, "resource_class": "x"}
    parsed = parse_node({"uuid": UUID, **free, **fields})
    assert isinstance(parsed, Node)
    return parsed


@pytest.mark.parametrize("state", RULES["by provision_state"])
def test_reserved_as_in_nova(state: str) -> None:
    for maintenance, power, used, total, reserved in RULES["by provision_state"][state]:
        given = node(
            provision_state=None if state == "None" else state,
            maintenance=maintenance,
            power_state=power,
            instance_uuid=INSTANCE if used else None,
        )
        (inventory,) = place(given, None).report.inventories.values()
        assert (inventory.total, inventory.reserved) == (total, reserved), given


# Deviations from Nova on purpose, with the reason: see ironic_sync/README.md.
DEVIATIONS = {"CUSTOM_GOLD": "CUSTOM_GOLD"}


@pytest.mark.parametrize("given", RULES["resource class names"])
def test_class_names_as_nova_makes_them(given: str) -> None:
    assert class_name(given) == DEVIATIONS.get(given, RULES["resource class names"][given])


def test_the_deviation_is_one() -> None:
    assert RULES["resource class names"]["CUSTOM_GOLD"] == "CUSTOM_CUSTOM_GOLD"
    assert class_name("custom-gold") == "CUSTOM_GOLD"
    assert class_name("CUSTOM_") == "CUSTOM_CUSTOM_"


@pytest.mark.parametrize("given", ["", "---", "x" * 250])
def test_what_is_no_class_is_reported(given: str) -> None:
    placed = place(node(resource_class=given), None)
    assert (placed.problem, placed.report.inventories) == (NO_CLASS, {})


def test_without_class_the_provider_stays_as_it_was_but_never_on_offer_while_unusable() -> None:
    before = place(node(traits=["CUSTOM_A"]), None).report
    assert place(node(resource_class=None), before).report is before
    held = place(node(resource_class=None, maintenance=True), before).report
    assert [inventory.reserved for inventory in held.inventories.values()] == [1]
    assert place(node(resource_class=None), held).report is held, "nothing gives back what has no class"


def test_withdraws_and_offers_again() -> None:
    free = place(node(), None).report
    held = reserve_all(free)
    assert reserve_all(held) is held
    assert offers_more(free, held) and offers_more(free, None)
    assert not offers_more(held, free) and not offers_more(free, free)


def test_unknown_states_are_transient_and_unavailable() -> None:
    assert is_transient("clean hold") and is_transient("a state of tomorrow") and is_transient("wait call-back")
    assert not is_transient("available") and not is_transient(None)


@pytest.mark.parametrize(
    "raw",
    [
        None,
        [],
        {},
        {"uuid": 1},
        {"uuid": "not a uuid"},
        {"uuid": UUID, "maintenance": "yes"},
        {"uuid": UUID, "traits": "CUSTOM_A"},
        {"uuid": UUID, "traits": ["lower"]},
        {"uuid": UUID, "provision_state": {}},
        {"uuid": UUID, "resource_class": "x" * 10_000},
    ],
)
def test_a_node_that_is_none_is_a_value(raw: object) -> None:
    assert isinstance(parse_node(raw), Unreadable)
