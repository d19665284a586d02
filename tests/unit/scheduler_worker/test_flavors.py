"""Flavors by tables: what each extra spec asks for, and what a request adds to its flavor's query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.build import BuildRequest
from placement_worker.replica.request import Group, Query
from scheduler_worker.config import Aggregate, Flavor, SchedulerConfig
from scheduler_worker.selection.flavor import (
    DISABLED_TRAIT,
    MAX_GROUPS,
    MAX_REQUIRED,
    FlavorInvalid,
    matches,
    parse,
)
from scheduler_worker.selection.flavor_query import request_spec
from scheduler_worker.selection.host_view import Membership
from scheduler_worker.selection.request_spec import RequestSpec, Unsatisfiable
from tests.unit.scheduler_worker.hosts import aggregate

VM, PROVIDER = (f"{n}0000000-0000-4000-8000-000000000001" for n in "a5")
PLAIN = Query(resources={"VCPU": 1}, root_forbidden=(DISABLED_TRAIT,))
GROUPS = {"resources1:VGPU": "1", "resources2:VGPU": "1"}
GPU = Group(suffix="1", resources={"VGPU": 1})


@pytest.mark.parametrize(
    ("specs", "query"),
    [
        ({}, {}),
        ({"resources:VCPU": "0", "resources:DISK_GB": "7"}, {"resources": {"DISK_GB": 7}}),
        ({"resources:VCPU": "3"}, {"resources": {"VCPU": 3}}),
        ({"resources:CUSTOM_A": "1"}, {"resources": {"VCPU": 1, "CUSTOM_A": 1}}),
        ({"trait:A": "required", "trait:B": "forbidden"}, {"required": (("A",),), "forbidden": ("B",)}),
        ({"trait:in:A,B": "required", "trait:A": "forbidden"}, {"required": (("A", "B"),), "forbidden": ("A",)}),
        ({"in_tree": PROVIDER}, {"in_tree": PROVIDER}),
        ({"root_required": " A , !B,, "}, {"root_required": (("A",),), "root_forbidden": (DISABLED_TRAIT, "B")}),
        ({"resources1:VGPU": "1"}, {"groups": (GPU,)}),
        ({"resources1:VGPU": "1", "group_policy": "none"}, {"groups": (GPU,), "group_policy": "none"}),
        (
            GROUPS | {"group_policy": "isolate"},
            {"groups": (GPU, replace(GPU, suffix="2")), "group_policy": "isolate"},
        ),
        (
            {"resources1:VGPU": "1", "trait1:A": "required", "trait1:B": "forbidden", "in_tree1": PROVIDER},
            {"groups": (replace(GPU, required=(("A",),), forbidden=("B",), in_tree=PROVIDER),)},
        ),
        (
            {"resources1:VGPU": "1", "resources_X:VGPU": "0", "same_subtree": " 1 , _X ; ;1", "group_policy": "none"},
            {"groups": (GPU, Group(suffix="_X")), "same_subtree": (("1", "_X"), ("1",)), "group_policy": "none"},
        ),
        ({"resources:VCPU": "0", "resources1:VGPU": "1"}, {"resources": {}, "groups": (GPU,)}),
    ],
)
def test_what_a_flavor_asks_for(specs: dict[str, str], query: dict[str, Any]) -> None:
    parsed = parse("f", Flavor(vcpus=1, extra_specs=specs))
    assert parsed.query == replace(PLAIN, **query)
    assert parsed.extra_specs == {} and parsed.preferred_traits == parsed.preferred_classes == ()


def required(count: int, group: str = "") -> dict[str, str]:
    return {f"trait{group}:T{number}": "required" for number in range(count)}


def numbered(count: int) -> dict[str, str]:
    return {"group_policy": "none", **{f"resources{number}:VGPU": "1" for number in range(1, count + 1)}}


NO_OWN = {"resources:VCPU": "0", "resources1:VGPU": "1"}


@pytest.mark.parametrize(
    ("specs", "wrong"),
    [
        ({"resources:CUSTOM_A": "preferred"}, None),
        ({"resources1:CUSTOM_A": "preferred"}, "resources1:CUSTOM_A"),
        ({"resources:CUSTOM_A": str(2**31)}, "resources:CUSTOM_A"),
        ({"resources:CUSTOM_A": str(2**31 - 1)}, None),
        ({"resources:CUSTOM_A": "-1"}, "resources:CUSTOM_A"),
        ({"resources:a": "1"}, "resources:a"),
        ({"trait:a": "required"}, "trait:a"),
        ({"trait:in:A,b": "required"}, "trait:in:A,b"),
        ({"trait:in:A": "forbidden"}, "trait:in:A"),
        ({"trait:A": "perhaps"}, "trait:A"),
        ({"resources1:VGPU": "1", "trait1:A": "preferred"}, "trait1:A"),
        ({"in_tree": "h1"}, "in_tree"),
        ({"resources1:VGPU": "1", "in_tree1": "h1"}, "in_tree1"),
        ({"berth:on_host_failure": "again"}, "berth:on_host_failure"),
        ({"resources01:VGPU": "1"}, "resources01:VGPU"),
        ({"trait_:A": "required"}, "trait_:A"),
        ({"root_required": "a"}, "root_required"),
        ({"root_required": "!a"}, "root_required"),
        ({"resources:VCPU": "0"}, ""),
        ({"resources:VCPU": "0", "resources1:VGPU": "0", "same_subtree": "1"}, ""),
        (NO_OWN, None),
        (NO_OWN | {"trait:A": "required"}, ""),
        (NO_OWN | {"trait:A": "forbidden"}, ""),
        (NO_OWN | {"in_tree": PROVIDER}, ""),
        (numbered(MAX_GROUPS), None),
        (numbered(MAX_GROUPS + 1), ""),
        (numbered(2) | {"group_policy": "perhaps"}, "group_policy"),
        (GROUPS, "group_policy"),
        (required(MAX_REQUIRED), None),
        (required(MAX_REQUIRED + 1), "trait"),
        ({"resources1:VGPU": "1"} | required(MAX_REQUIRED, "1"), None),
        ({"resources1:VGPU": "1"} | required(MAX_REQUIRED + 1, "1"), "trait1"),
        ({"trait:in:A,B": "required", "trait:A": "forbidden"}, None),
        ({"trait:in:A,B": "required", "trait:A": "forbidden", "trait:B": "forbidden"}, "trait"),
        ({"resources1:VGPU": "1", "trait1:in:A": "required", "trait1:A": "forbidden"}, "trait1"),
        ({"resources1:VGPU": "1", "same_subtree": "1,2"}, "same_subtree"),
        ({"resources1:VGPU": "1", "trait2:A": "required", "group_policy": "none"}, "same_subtree"),
        ({"resources1:VGPU": "1", "trait2:A": "required", "group_policy": "none", "same_subtree": "1,2"}, None),
    ],
)
def test_a_flavor_that_can_never_be_requested_is_refused(specs: dict[str, str], wrong: str | None) -> None:
    """wrong: the extra spec that the refusal names; "": the flavor alone."""
    flavor = Flavor(vcpus=1, extra_specs=specs)
    if wrong is None:
        parse("f", flavor)
    else:
        with pytest.raises(FlavorInvalid) as raised:
            parse("f", flavor)
        assert str(raised.value).startswith(f"flavor f: {wrong}: " if wrong else "flavor f")
        assert bool(wrong) is (str(raised.value).count(": ") > 1)


# --- what a request adds

EAST, EAST_TOO, WEST = (
    aggregate(n, availability_zone=zone) for n, zone in (("e", "east"), ("f", "east"), ("w", "west"))
)
MINE, MINE_TOO, THEIRS = (aggregate(n, filter_tenant_id=p) for n, p in (("m", "demo"), ("n", "x,demo"), ("t", "x")))
ZONES = (EAST, WEST, EAST_TOO)
TENANTS = {"limit_tenants_to_placement_aggregate": True}
OF_TENANTS = {"placement_aggregate_required_for_tenants": True}
ISOLATED = {"enable_isolated_aggregate_filtering": True}
LICENSED = aggregate("l", **{"trait:A": "required", "trait:B": "forbidden", "pool": "required"})
FAST = aggregate("s", **{"trait:C": "required"})
ALL_ZONES = tuple(one.uuid for one in ZONES)
A, B = {"trait:A": "required"}, {"trait:B": "forbidden"}


def shaped(
    request: dict[str, Any],
    *,
    specs: dict[str, str] | None = None,
    hosts: tuple[str, ...] | None = None,
    aggregates: Sequence[Aggregate] = (),
    **config: Any,
) -> tuple[Query, RequestSpec | Unsatisfiable]:
    """The query of the flavor alone, and what becomes of it."""
    requested = parse("f", Flavor(vcpus=1, extra_specs=specs or {}))
    built = BuildRequest(**{"instance_uuid": VM, "flavor": "f", "project_id": "demo", **request})
    settings = SchedulerConfig(aggregates=tuple(aggregates), **config)
    return requested.query, request_spec(built, requested, hosts, Membership(aggregates), settings)


@pytest.mark.parametrize(
    ("request_", "more", "found"),
    [
        ({}, {}, {}),
        ({}, {"aggregates": (*ZONES, MINE, LICENSED)}, {}),
        ({}, {"hosts": ("u1", "u2")}, {"only_roots": ("u1", "u2")}),
        ({}, {"hosts": ()}, "host.unknown"),
        ({"forced": True}, {"force_host_projects": ("demo",)}, "host.not_forced host"),
        ({"forced": True}, {"hosts": ("u1",)}, "host.not_forced demo"),
        ({"forced": True}, {"hosts": (), "force_host_projects": ("demo",)}, "host.unknown"),
        ({"forced": True}, {"hosts": ("u1",), "force_host_projects": ("demo",)}, {"only_roots": ("u1",)}),
        ({"availability_zone": "west"}, {"aggregates": ZONES}, {"root_member_of": ((WEST.uuid,),)}),
        ({"availability_zone": "east"}, {"aggregates": ZONES}, {"root_member_of": ((EAST.uuid, EAST_TOO.uuid),)}),
        ({"availability_zone": "nova"}, {"aggregates": (*ZONES, MINE)}, {"root_forbidden_aggregates": ALL_ZONES}),
        ({"availability_zone": "moon"}, {"aggregates": ZONES}, "zone.unknown"),
        ({}, TENANTS | {"aggregates": (MINE, THEIRS, MINE_TOO)}, {"root_member_of": ((MINE.uuid, MINE_TOO.uuid),)}),
        ({}, TENANTS | {"aggregates": (THEIRS,)}, {}),
        ({}, TENANTS | OF_TENANTS | {"aggregates": (THEIRS,)}, "tenant.no_aggregate"),
        ({}, OF_TENANTS | {"aggregates": (THEIRS,)}, {}),
        (
            {"availability_zone": "west"}, TENANTS | {"aggregates": (*ZONES, MINE)},
            {"root_member_of": ((MINE.uuid,), (WEST.uuid,))},
        ),
        ({}, ISOLATED | {"aggregates": (FAST, LICENSED)}, {"root_forbidden_aggregates": (FAST.uuid, LICENSED.uuid)}),
        ({}, ISOLATED | {"aggregates": (FAST, LICENSED), "specs": A}, {"root_forbidden_aggregates": (FAST.uuid,)}),
        ({}, ISOLATED | {"aggregates": (LICENSED,), "specs": A}, {}),
        ({}, ISOLATED | {"aggregates": (LICENSED,), "specs": {"root_required": "A"}}, {}),
        ({}, ISOLATED | {"aggregates": (LICENSED,), "specs": {"resources1:VGPU": "1", "trait1:A": "required"}}, {}),
        (
            {}, ISOLATED | {"aggregates": (LICENSED,), "specs": {"trait:in:A,D": "required"}},
            {"root_forbidden_aggregates": (LICENSED.uuid,)},
        ),
        (
            {"availability_zone": "nova"}, ISOLATED | {"aggregates": (FAST, WEST)},
            {"root_forbidden_aggregates": (WEST.uuid, FAST.uuid)},
        ),
        ({"image_properties": {"os": "x"}}, {"specs": {"root_required": "A,!A", **NO_OWN}}, {}),
        ({"image_properties": A | B}, {}, {"required": (("A",),), "forbidden": ("B",)}),
        (
            {"image_properties": A | B}, {"specs": {"trait:A": "required", "trait:D": "forbidden"}},
            {"required": (("A",),), "forbidden": ("D", "B")},
        ),
        ({"image_properties": A | B}, {"specs": B}, {"required": (("A",),), "forbidden": ("B",)}),
        (
            {"image_properties": A | B}, {"specs": NO_OWN},
            {"root_required": (("A",),), "root_forbidden": (DISABLED_TRAIT, "B")},
        ),
        ({"image_properties": A}, {"specs": {"trait:A": "forbidden"}}, "image.traits A"),
        ({"image_properties": A}, {"specs": NO_OWN | {"root_required": "!A"}}, "image.traits A"),
        ({"image_properties": A}, {"specs": {"root_required": "!A"}}, {"required": (("A",),)}),
        ({"image_properties": A | {"trait:B": "perhaps"}}, {}, "image.traits `required`"),
        ({"image_properties": {"trait:B": "perhaps"}}, {}, "image.traits `required`"),
    ],
)  # fmt: skip
def test_what_a_request_adds_to_the_query_of_its_flavor(
    request_: dict[str, Any], more: dict[str, Any], found: dict[str, Any] | str
) -> None:
    """A code is of a request that no host can take, with a word of the reason where one code has several."""
    query, spec = shaped(request_, **more)
    if isinstance(found, str):
        code, _, word = found.partition(" ")
        assert isinstance(spec, Unsatisfiable) and spec.code == code and word in spec.reason
    else:
        assert isinstance(spec, RequestSpec) and spec.query == replace(query, **found)


@pytest.mark.parametrize(
    ("value", "wanted", "passes"),
    [
        ("2", "= 1", True),  # `=` means at least
        ("1", "= 2", False),
        ("123", "= 123", True),
        ("124", "== 123", False),
        ("123", "== 123.0", True),
        ("11", "!= 10", True),
        ("3", ">= 2", True),
        ("2", "<= 3", True),
        ("word", ">= 2", False),
        ("2", "s== 2", True),
        ("2.0", "s== 2", False),
        ("abc", "s!= abd", True),
        ("2", "s< 3", True),
        ("10", "s< 3", True),  # as text
        ("3", "s<= 3", True),
        ("4", "s> 3", True),
        ("3", "s>= 3", True),
        ("12311321", "<in> 11", True),
        ("12311321", "<in> 33", False),
        ("aes mmx sse", "<all-in> aes mmx", True),
        ("aes mmx", "<all-in> aes sse", False),
        ("12", "<or> 11 <or> 12", True),
        ("13", "<or> 11 <or> 12", False),
        ("12", "<or> 12", True),
        ("kvm", "kvm", True),
        ("kvm2", "kvm", False),
        ("1", "=", False),
        (None, "kvm", False),
        ("", "", True),
        ("two words", "two words", True),
        (None, "<in> a", False),
        ("b", "a b", False),
        ("x", "", False),
        (" ", " ", True),
        (None, "", False),
        ("2", "= 1 5", True),
        ("2", "=", False),
        ("2", "== x", False),
        ("a", "s== a b", True),
        ("", "s==", False),
        ("ab", "<in> a z", True),
        ("ab", "<in>", False),
        ("ab", "<all-in>", False),
        ("ab", "<all-in> a b", True),
        ("ab", "<all-in> a z", False),
        ("13", "<or> 11 <or> 12 <or> 13", True),
        ("<or>", "<or> 11 <or> 12", False),
        ("a", "a b", False),
    ],
)
def test_whether_a_hosts_value_meets_an_extra_spec(value: str | None, wanted: str, passes: bool) -> None:
    assert matches(value, wanted) is passes
