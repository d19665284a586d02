"""A serialised RequestSpec as hostile input."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_worker.nova.request_spec import (
    INVALID,
    MAX_FIELDS,
    MAX_OBJECTS,
    VERSION,
    NovaRequest,
    SpecRefused,
    parse_request_spec,
)


def versioned(name: str, version: str = "1.0", /, **data: Any) -> dict[str, Any]:
    return {
        "nova_object.name": name,
        "nova_object.namespace": "nova",
        "nova_object.version": version,
        "nova_object.data": data,
    }


def flavor(**data: Any) -> dict[str, Any]:
    return versioned("Flavor", **{"name": "small", "vcpus": 1, "memory_mb": 512, **data})


def spec(**data: Any) -> dict[str, Any]:
    return versioned("RequestSpec", "1.14", **{"flavor": flavor(), **data})


def test_the_fields_of_nested_objects_are_read() -> None:
    request = parse_request_spec(
        spec(
            flavor=flavor(extra_specs={"hw:cpu_policy": "shared"}, swap=512, created_at="2026-01-01T00:00:00Z"),
            image=versioned(
                "ImageMeta",
                disk_format="qcow2",
                properties=versioned("ImageMetaProps", hw_disk_bus="virtio", traits_required=["HW_CPU_X86_AVX"]),
            ),
            instance_group=versioned("InstanceGroup", policy="anti-affinity", _rules={"max_server_per_host": "2"}),
            requested_destination=versioned("Destination", cell=versioned("CellMapping", uuid="c", name="one")),
            requested_resources=[versioned("RequestGroup", requester_id="port", resources={"CUSTOM_A": 1})],
            request_level_params=versioned("RequestLevelParams", root_required=["A"], same_subtree=[["a", "b"]]),
            retry=versioned(
                "SchedulerRetries", hosts=versioned("ComputeNodeList", objects=[versioned("ComputeNode", host="h")])
            ),
            pci_requests=versioned("InstancePCIRequests", requests=[versioned("InstancePCIRequest", count=2)]),
            scheduler_hints={"_nova_check_type": ["rebuild"]},
            security_groups=versioned("SecurityGroupList", "9.0"),
            a_field_of_tomorrow=object(),
        )
    )
    assert request.flavor.extra_specs == {"hw:cpu_policy": "shared"}
    assert (request.flavor.swap, request.flavor.root_gb) == (512, 0)
    assert request.image is not None
    assert request.image.traits_required == ("HW_CPU_X86_AVX",)
    assert request.image.text("hw_disk_bus") == "virtio"
    assert request.instance_group is not None
    assert request.instance_group.rules == {"max_server_per_host": "2"}
    assert request.requested_destination is not None
    assert request.requested_destination.cell is not None
    assert request.requested_destination.cell.name == "one"
    assert request.requested_resources is not None
    assert request.requested_resources[0].resources == {"CUSTOM_A": 1}
    assert request.request_level_params.same_subtree == (("a", "b"),)
    assert request.retry is not None
    assert request.retry.hosts.objects[0].host == "h"
    assert request.pci[0].count == 2
    assert request.is_rebuild


def test_what_is_not_set_and_what_is_null_is_a_default() -> None:
    nothing = ("image", "instance_group", "retry", "requested_destination", "requested_resources", "pci_requests")
    assert parse_request_spec(spec(**dict.fromkeys(nothing))) == parse_request_spec(spec())


REFUSED: dict[str, tuple[object, str]] = {
    "nothing": (None, INVALID),
    "a text": ("RequestSpec", INVALID),
    "a list": ([spec()], INVALID),
    "no wrapping": ({"flavor": flavor()}, INVALID),
    "another class": (flavor(), INVALID),
    "another namespace": (spec() | {"nova_object.namespace": "ironic"}, INVALID),
    "no data": (spec() | {"nova_object.data": None}, INVALID),
    "version 2": (spec() | {"nova_object.version": "2.0"}, VERSION),
    "no version": (spec() | {"nova_object.version": None}, VERSION),
    "an endless version": (spec() | {"nova_object.version": "2" * 10_000}, VERSION),
    "flavor of version 2": (spec(flavor=flavor() | {"nova_object.version": "2.1"}), VERSION),
    "no flavor": (versioned("RequestSpec"), INVALID),
    "a null flavor": (spec(flavor=None), INVALID),
    "a bare flavor": (spec(flavor={"name": "small", "vcpus": 1, "memory_mb": 1}), INVALID),
    "a flavor without sizes": (spec(flavor=versioned("Flavor", name="small")), INVALID),
    "a negative size": (spec(flavor=flavor(vcpus=-1)), INVALID),
    "a huge size": (spec(flavor=flavor(memory_mb=2**63)), INVALID),
    "a size that is a text": (spec(flavor=flavor(vcpus="many")), INVALID),
    "an extra spec that is no text": (spec(flavor=flavor(extra_specs={"a": {}})), INVALID),
    "extra specs that are a list": (spec(flavor=flavor(extra_specs=["a"])), INVALID),
    "an image that is a flavor": (spec(image=flavor()), INVALID),
    "properties that are bare": (spec(image=versioned("ImageMeta", properties={"hw_disk_bus": "ide"})), INVALID),
    "a property that is an object": (
        spec(image=versioned("ImageMeta", properties=versioned("ImageMetaProps", a={"b": 1}))),
        INVALID,
    ),
    "traits that are no texts": (
        spec(image=versioned("ImageMeta", properties=versioned("ImageMetaProps", traits_required=[1]))),
        INVALID,
    ),
    "hints that are no lists": (spec(scheduler_hints={"group": "a"}), INVALID),
    "a list for an object": (spec(requested_destination=[versioned("Destination")]), INVALID),
    "a group in a group": (spec(requested_resources=[[versioned("RequestGroup")]]), INVALID),
    "too many groups": (spec(requested_resources=[versioned("RequestGroup")] * (MAX_OBJECTS + 1)), INVALID),
    "too many fields": (spec(**{f"field_{number}": 1 for number in range(MAX_FIELDS)}), INVALID),
    "an amount that is no number": (
        spec(requested_resources=[versioned("RequestGroup", resources={"VCPU": 1.5})]),
        INVALID,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused(case: str) -> None:
    primitive, code = REFUSED[case]
    with pytest.raises(SpecRefused) as caught:
        parse_request_spec(primitive)
    assert caught.value.code == code
    assert len(caught.value.reason) < 500


def test_a_spec_that_refers_to_itself_is_refused() -> None:
    image = versioned("ImageMeta")
    image["nova_object.data"]["properties"] = image
    with pytest.raises(SpecRefused):
        parse_request_spec(spec(image=image))


def test_the_policy_of_an_old_group_is_the_only_one_of_its_policies() -> None:
    old = parse_request_spec(spec(instance_group=versioned("InstanceGroup", "1.10", policies=["affinity"])))
    assert old.instance_group is not None
    assert old.instance_group.group_policy == "affinity"
    assert NovaRequest(flavor=old.flavor).instance_group is None
