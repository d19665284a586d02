"""What a move's source still has, what of it a migration keeps, and what comes back, as tables."""

from __future__ import annotations

import pytest

from placement_worker.domain.moves import is_migration, kept_beside, source_held, whole_source
from placement_worker.domain.values import ConsumerState, Holding

ROOTS = {"a": "a", "a.cell": "a", "a.other": "a", "b": "b"}


def vcpus(**amounts: int) -> Holding:
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
def test_the_source_of_a_move(requested: Holding, held: Holding, kept: Holding, left: Holding) -> None:
    assert source_held(requested, held, kept, ROOTS) == left


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
    requested: Holding, source: Holding, whole: Holding
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
def test_a_migration_keeps_what_the_destination_does_not_take(taken: Holding, kept: Holding) -> None:
    assert kept_beside({"a": {"VCPU": 4, "DISK_GB": 2}, "b": {"VCPU": 1}}, taken) == kept


@pytest.mark.parametrize(
    ("kind", "expected"), [("INSTANCE", False), ("", False), ("MIGRATION", True), ("MIGRATION_COUNTED", True)]
)
def test_a_migration_is_known_by_its_type(kind: str, expected: bool) -> None:
    assert is_migration(ConsumerState(1, 1, "p", "u", kind)) is expected
    assert not is_migration(None)
