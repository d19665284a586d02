"""Which providers a list of the REST API has, and the links that each is shown with."""

from __future__ import annotations

from typing import Any

import pytest

from placement_worker.rest.providers import shown
from placement_worker.store.memory_reads import _is_listed
from placement_worker.store.port import Listing
from tests.unit.placement_rest.test_decisions import inventory, provider

ONE: Any = provider("a", traits=("T1", "T2"), aggregates=("g1", "g2"), inventories={"VCPU": inventory(4)})


@pytest.mark.parametrize(
    ("listing", "listed"),
    [
        ({}, True),
        ({"uuid": "a"}, True),
        ({"uuid": "b"}, False),
        ({"name": "b"}, False),
        ({"required": (("T1",), ("T3", "T2"))}, True),
        ({"required": (("T1",), ("T3",))}, False),
        ({"forbidden": ("T3",)}, True),
        ({"forbidden": ("T3", "T1")}, False),
        ({"member_of": (("g1",), ("g3", "g2"))}, True),
        ({"member_of": (("g1",), ("g3",))}, False),
        ({"forbidden_aggregates": ("g3",)}, True),
        ({"forbidden_aggregates": ("g1",)}, False),
        ({"member_of": (("g1",),), "forbidden_aggregates": ("g2",)}, False),
        ({"member_of": (("g3",),), "forbidden_aggregates": ("g4",)}, False),
        ({"member_of": (("g1",),), "uuid": "b"}, False),
        ({"resources": (("VCPU", 4),)}, True),
        ({"resources": (("VCPU", 5),)}, False),
        ({"resources": (("DISK_GB", 1),), "member_of": (("g1",),)}, False),
    ],
)
def test_each_condition_of_a_list_holds(listing: dict[str, Any], listed: bool) -> None:
    assert _is_listed(ONE, Listing(**listing)) is listed


@pytest.mark.parametrize(
    ("version", "links"),
    [
        (0, ["self", "inventories", "usages"]),
        (1, ["self", "inventories", "usages", "aggregates"]),
        (10, ["self", "inventories", "usages", "aggregates", "traits"]),
        (39, ["self", "inventories", "usages", "aggregates", "traits", "allocations"]),
    ],
)
def test_the_links_of_a_provider_by_version(version: int, links: list[str]) -> None:
    assert [one["rel"] for one in shown(ONE, version)["links"]] == links
