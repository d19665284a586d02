"""What the commands say of a node, by all of its fields as Ironic answers them."""

from __future__ import annotations

from typing import Any

import pytest

from berth.bus_client.baremetal import node_record, unserved

CLASSES = {"CUSTOM_GOLD": ("bm.gold", "bm.gold.raid"), "CUSTOM_NONE": ("bm.none",), "VCPU": ("small",)}
NODE = {
    "uuid": "10000000-0000-4000-8000-000000000001", "name": "n1", "resource_class": "gold", "power_state": "power off",
    "provision_state": "available",
}  # fmt: skip
GOLD = CLASSES["CUSTOM_GOLD"]


@pytest.mark.parametrize(
    ("fields", "serves", "problems"),
    [
        ({}, GOLD, 0),
        ({"health": "OK"}, GOLD, 0),
        ({"health": "Critical"}, GOLD, 1),
        ({"resource_class": None}, (), 1),
        ({"resource_class": "silver"}, (), 1),
        ({"maintenance": True}, GOLD, 1),
        ({"fault": "power failure"}, GOLD, 1),
        ({"retired": True, "health": "Critical"}, GOLD, 2),
        ({"provision_state": "clean failed"}, GOLD, 1),
        ({"instance_uuid": "20000000-0000-4000-8000-000000000001"}, GOLD, 1),
    ],
)
def test_why_no_build_can_go_to_a_node(fields: dict[str, Any], serves: tuple[str, ...], problems: int) -> None:
    found = node_record(NODE | fields, CLASSES)
    assert (found.serves, len(found.problems)) == (serves, problems), found.problems


def test_flavors_that_no_node_serves_are_named() -> None:
    nodes = [node_record(NODE | {"resource_class": one}, CLASSES) for one in ("gold", None)]
    assert unserved(CLASSES, nodes) == ("bm.none",)
