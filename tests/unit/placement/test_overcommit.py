"""Which of a consumer's allocations are there twice, and which only look so."""

from __future__ import annotations

from typing import Any

import pytest

from placement_worker.operations.overcommit import Doubled, doubled

ROOTS = {"own": "own", "own.cell": "own", "other": "other", "other.cell": "other", "pool": "pool"}
SHARING = frozenset({"pool"})


@pytest.mark.parametrize(
    ("holding", "others", "keeps"),
    [
        ({"own": {"VCPU": 1}, "other": {"VCPU": 1}}, ("other",), {"own": {"VCPU": 1}}),
        ({"own.cell": {"VCPU": 1}, "other.cell": {"VCPU": 2}}, ("other",), {"own.cell": {"VCPU": 1}}),
        # A class of the other host alone stays: nothing shows that it is too much.
        (
            {"own": {"VCPU": 1}, "other": {"VCPU": 1, "DISK_GB": 5}},
            ("other",),
            {"own": {"VCPU": 1}, "other": {"DISK_GB": 5}},
        ),
        # A shared pool is no host.
        (
            {"own": {"VCPU": 1, "DISK_GB": 1}, "pool": {"DISK_GB": 9}, "other": {"VCPU": 1}},
            ("other",),
            {"own": {"VCPU": 1, "DISK_GB": 1}, "pool": {"DISK_GB": 9}},
        ),
    ],
)
def test_what_is_held_twice_is_kept_on_the_own_host(
    holding: dict[str, Any], others: tuple[str, ...], keeps: dict[str, Any]
) -> None:
    assert doubled("c", "own", holding, ROOTS, SHARING, 7) == [Doubled("c", "own", others, keeps, 7)]


@pytest.mark.parametrize(
    ("holding", "reported"),
    [
        ({}, []),
        ({"own": {"VCPU": 1}, "own.cell": {"VCPU": 1}}, []),
        ({"own": {"VCPU": 1}, "pool": {"DISK_GB": 1}}, []),
        ({"other": {"VCPU": 1}}, ["c: runs on own, holds other alone"]),
        ({"own": {"VCPU": 1}, "other": {"DISK_GB": 1}}, ["c: runs on own, holds other alone"]),
    ],
)
def test_what_is_held_once_is_left_alone(holding: dict[str, Any], reported: list[str]) -> None:
    assert doubled("c", "own", holding, ROOTS, SHARING, 7) == reported
