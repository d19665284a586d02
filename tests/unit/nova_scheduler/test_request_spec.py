"""A serialised RequestSpec as hostile input, and the resources that it asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import pytest
from msgspec.structs import replace

from bus.contracts.placement import MAX_LOCATED_HOSTS
from nova_scheduler.config import DEVICE_FILTERS, NOT_OWNED, NOVA_FILTERS
from nova_scheduler.fit.pci import PciRequest
from nova_scheduler.request.request_spec import (
    INVALID,
    MAX_OBJECTS,
    VERSION,
    NotDecided,
    NovaCell,
    NovaDestination,
    NovaFlavor,
    NovaGroup,
    NovaImage,
    NovaNetwork,
    NovaNetworks,
    NovaPciRequests,
    NovaRequest,
    NovaRequestGroup,
    NovaRequestLevel,
    SpecRefused,
    parse_request_spec,
)
from nova_scheduler.request.resource_request import (
    MAX_FORCED,
    MAX_NAMES,
    MAX_SPECS,
    MAX_TEXT,
    REFUSED,
    PrefilterSettings,
    ResourceRequest,
    querystring,
    resource_request,
    specs_of_query,
    undecided,
)
from nova_scheduler.wire.versioned import MAX_FIELDS
from scheduler_worker.config import Aggregate
from scheduler_worker.selection.flavor_query import HOST_UNKNOWN
from scheduler_worker.selection.request_spec import Unsatisfiable

# --- A serialised RequestSpec as hostile input.


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
            retry={"what placing does not read": "is not looked into"},
            pci_requests=versioned("InstancePCIRequests", requests=[versioned("InstancePCIRequest", alias_name="gpu")]),
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
    assert request.requested_destination.cell.uuid == "c"
    assert request.requested_resources is not None
    assert request.requested_resources[0].resources == {"CUSTOM_A": 1}
    assert request.request_level_params.same_subtree == (("a", "b"),)
    assert not request.pci[0].is_of_port
    assert request.is_rebuild


def test_what_is_not_set_and_what_is_null_is_a_default() -> None:
    nothing = ("image", "instance_group", "retry", "requested_destination", "requested_resources", "pci_requests")
    assert parse_request_spec(spec(**dict.fromkeys(nothing))) == parse_request_spec(spec())


REFUSED_SPECS: dict[str, tuple[object, str]] = {
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


@pytest.mark.parametrize("case", REFUSED_SPECS)
def test_what_cannot_be_read_is_refused(case: str) -> None:
    primitive, code = REFUSED_SPECS[case]
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


# --- A request as a query, by hand-written cases; `tests/nova/test_queries.py` compares with Nova itself.


NODE, TWIN, OTHER = (f"5e9a4b5c-0d9e-4b5f-8f8e-6d1f6c2b7a0{at}" for at in range(3))
ZONE, PROJECT, ISOLATED = (f"a99de9a1-0d9e-4b5f-8f8e-6d1f6c2b7a0{at}" for at in range(3))
SIZES = "resources=DISK_GB:10,MEMORY_MB:512,VCPU:2"
TAIL = "root_required=!COMPUTE_STATUS_DISABLED"
PLAIN = f"limit=1000&{SIZES}&{TAIL}"


class Facts:
    """Three nodes, two of them of one host; an aggregate of a zone, of a project, and one kept for a trait."""

    def aggregates(self) -> list[Aggregate]:
        return [
            Aggregate(uuid=ZONE, name="zone", metadata={"availability_zone": "north"}),
            Aggregate(uuid=PROJECT, name="project", metadata={"filter_tenant_id_1": "mine"}),
            Aggregate(uuid=ISOLATED, name="isolated", metadata={"trait:CUSTOM_LICENSED": "required"}),
        ]

    def nodes_named(self, host: str | None, nodename: str | None = None) -> list[str]:
        known = {NODE: ("one", "one"), TWIN: ("metal", "a"), OTHER: ("metal", "b")}
        return [uuid for uuid, (its, name) in known.items() if host in {None, its} and nodename in {None, name}]

    def cell_of(self, uuid: str) -> str | None:
        return "cell"


def request(extra_specs: dict[str, str] | None = None, **fields: Any) -> NovaRequest:
    flavor = NovaFlavor(name="small", vcpus=2, memory_mb=512, root_gb=10, extra_specs=extra_specs or {})
    return NovaRequest(**{"flavor": flavor, "project_id": "mine", "is_bfv": False, **fields})


def image(**properties: Any) -> NovaImage:
    return NovaImage(disk_format="qcow2", properties=properties)


def asked(one: NovaRequest, *, owner: bool = False, pinning: bool = True, **settings: Any) -> str:
    found = resource_request(one, PrefilterSettings(**settings), Facts(), requires_owner=owner, pinning=pinning)
    assert isinstance(found, ResourceRequest), found
    return unquote(querystring(found))


def pinned(pcpus: int) -> str:
    return f"limit=1000&resources=DISK_GB:10,MEMORY_MB:512,PCPU:{pcpus}&{TAIL}"


def rooted(*traits: str) -> str:
    return f"limit=1000&{SIZES}&root_required={','.join(traits)},!COMPUTE_STATUS_DISABLED"


def requiring(*traits: str) -> str:
    return f"limit=1000&required={','.join(traits)}&{SIZES}&{TAIL}"


GROUP = NovaRequestGroup(requester_id="port", resources={"CUSTOM_A": 1}, required_traits=frozenset({"CUSTOM_B"}))
SEV = "limit=1000&required=HW_CPU_X86_AMD_SEV&resources=DISK_GB:10,MEMORY_MB:512,MEM_ENCRYPTION_CONTEXT:1,VCPU:2"
QUERIES: dict[str, tuple[NovaRequest, str]] = {
    "plain": (request(), PLAIN),
    "from a volume": (request(is_bfv=True), PLAIN.replace("DISK_GB:10,", "")),
    "an amount of the extra specs": (request({"resources:VCPU": "3"}), PLAIN.replace("VCPU:2", "VCPU:3")),
    "a class taken away": (request({"resources:VCPU": "0"}), PLAIN.replace(",VCPU:2", "")),
    "the largest amount": (
        request({"resources:VCPU": "2147483647"}),
        PLAIN.replace("VCPU:2", "VCPU:2147483647"),
    ),
    "what is no amount": (request({"resources:VCPU": "many", "resources:NONE": "1"}), PLAIN),
    "traits": (request({"trait:A": "required", "trait:B": "forbidden", "trait:C": "preferred"}), requiring("A", "!B")),
    "a trait of the image": (request(image=NovaImage(traits_required=("A",))), requiring("A")),
    "numbered groups": (
        request({"resources1:CUSTOM_A": "1", "resources_B:CUSTOM_B": "2", "group_policy": "isolate"}),
        f"group_policy=isolate&limit=1000&{SIZES}&resources1=CUSTOM_A:1&resources_B=CUSTOM_B:2&{TAIL}",
    ),
    "groups of ports need no policy": (
        request(requested_resources=(GROUP, replace(GROUP, requester_id="q"))),
        "group_policy=none&limit=1000&requiredport=CUSTOM_B&requiredq=CUSTOM_B"
        f"&{SIZES}&resourcesport=CUSTOM_A:1&resourcesq=CUSTOM_A:1&{TAIL}",
    ),
    "request level": (
        request(
            requested_resources=(GROUP,),
            request_level_params=NovaRequestLevel(root_required=frozenset("A"), same_subtree=(("port",),)),
        ),
        f"limit=1000&requiredport=CUSTOM_B&{SIZES}&resourcesport=CUSTOM_A:1"
        "&root_required=A,!COMPUTE_STATUS_DISABLED&same_subtree=port",
    ),
    "dedicated CPUs": (request({"hw:cpu_policy": "dedicated"}), pinned(2)),
    "an emulator thread": (
        request({"hw:cpu_policy": "dedicated", "hw:emulator_threads_policy": "isolate"}),
        pinned(3),
    ),
    "mixed CPUs": (
        request({"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "^1"}),
        pinned(1).replace("PCPU:1", "PCPU:1,VCPU:1"),
    ),
    "hyperthreads": (request({"hw:cpu_thread_policy": "isolate"}), requiring("!HW_CPU_HYPERTHREADING")),
    "memory encryption": (request({"hw:mem_encryption": "yes"}, image=image(hw_firmware_type="uefi")), f"{SEV}&{TAIL}"),
    "persistent memory": (
        request({"hw:pmem": "a-b, a-b"}),
        f"limit=1000&resources=CUSTOM_PMEM_NAMESPACE_A_B:2,DISK_GB:10,MEMORY_MB:512,VCPU:2&{TAIL}",
    ),
    "a TPM": (
        request(image=image(hw_tpm_version="2.0", hw_tpm_model="tpm-crb")),
        f"limit=1000&required=COMPUTE_SECURITY_TPM_2_0,COMPUTE_SECURITY_TPM_CRB&{SIZES}"
        "&root_required=COMPUTE_SECURITY_TPM_SECRET_SECURITY_USER,!COMPUTE_STATUS_DISABLED",
    ),
    "secure boot": (request({"os:secure_boot": "required"}), requiring("COMPUTE_SECURITY_UEFI_SECURE_BOOT")),
    "affinity of PCI": (
        request(image=image(hw_pci_numa_affinity_policy="socket")),
        requiring("COMPUTE_SOCKET_PCI_NUMA_AFFINITY"),
    ),
    "accelerators": (request({"accel:device_profile": "gpu"}), rooted("COMPUTE_ACCELERATORS")),
    "packed queues": (request(image=image(hw_virtio_packed_ring=True)), rooted("COMPUTE_NET_VIRTIO_PACKED")),
    "ephemeral encryption": (
        request({"hw:ephemeral_encryption": "1", "hw:ephemeral_encryption_format": "luks"}),
        rooted("COMPUTE_EPHEMERAL_ENCRYPTION", "COMPUTE_EPHEMERAL_ENCRYPTION_LUKS"),
    ),
    "sound": (request({"hw:sound_model": "virtio"}), rooted("COMPUTE_SOUND_MODEL_VIRTIO")),
    "a zone": (request(availability_zone="north"), f"limit=1000&member_of=in:{ZONE}&{SIZES}&{TAIL}"),
    "the default zone": (request(availability_zone="nova"), PLAIN),
    "a forced host": (request(force_hosts=("one",)), f"in_tree={NODE}&{PLAIN}"),
    "a host of two nodes": (request(force_hosts=("metal",)), PLAIN.removeprefix("limit=1000&")),
    "a node": (request(requested_destination=NovaDestination(node="b")), f"in_tree={OTHER}&{PLAIN}"),
    "a group's hint": (request(scheduler_hints={"group": ("g",)}), PLAIN.removeprefix("limit=1000&")),
}


@pytest.mark.parametrize("case", QUERIES)
def test_a_request_is_translated(case: str) -> None:
    one, expected = QUERIES[case]
    assert asked(one) == expected


SETTINGS: dict[str, tuple[NovaRequest, dict[str, Any], str]] = {
    "image type": (
        request(image=image()),
        {"query_placement_for_image_type_support": True},
        rooted("COMPUTE_IMAGE_TYPE_QCOW2"),
    ),
    "image type of a volume": (
        request(image=image(), is_bfv=True),
        {"query_placement_for_image_type_support": True},
        PLAIN.replace("DISK_GB:10,", ""),
    ),
    "image metadata": (
        request(image=image(hw_disk_bus="virtio", hw_architecture="x86_64")),
        {"image_metadata_prefilter": True},
        rooted("COMPUTE_STORAGE_BUS_VIRTIO", "HW_ARCH_X86_64"),
    ),
    "image metadata of no trait": (
        request(image=image(hw_disk_bus="virtio", hw_video_model="abacus")),
        {"image_metadata_prefilter": True},
        PLAIN,
    ),
    "tenant": (
        request(),
        {"limit_tenants_to_placement_aggregate": True},
        f"limit=1000&member_of=in:{PROJECT}&{SIZES}&{TAIL}",
    ),
    "isolated": (
        request(),
        {"enable_isolated_aggregate_filtering": True},
        f"limit=1000&member_of=!in:{ISOLATED}&{SIZES}&{TAIL}",
    ),
    "isolated, and the trait is required": (
        request({"trait:CUSTOM_LICENSED": "required"}),
        {"enable_isolated_aggregate_filtering": True},
        requiring("CUSTOM_LICENSED"),
    ),
    "limit": (request(), {"max_placement_results": 7}, PLAIN.replace("1000", "7")),
    "owner": (request(), {"owner": True}, rooted("OWNER_NOVA")),
    "the fallback's query": (request({"hw:cpu_policy": "dedicated"}), {"pinning": False}, PLAIN),
}


class OfHyperthreads(Facts):
    """An aggregate that is kept for a trait which the CPU policy requires."""

    def aggregates(self) -> list[Aggregate]:
        return [Aggregate(uuid=ISOLATED, name="isolated", metadata={"trait:HW_CPU_HYPERTHREADING": "required"})]


@pytest.mark.parametrize("pinning", [True, False])
def test_the_fallbacks_query_may_go_where_the_first_may(pinning: bool) -> None:
    """Nova runs its pre-filters once, for both."""
    one = request({"hw:cpu_policy": "dedicated", "hw:cpu_thread_policy": "require"})
    settings = PrefilterSettings(enable_isolated_aggregate_filtering=True)
    found = resource_request(one, settings, OfHyperthreads(), requires_owner=False, pinning=pinning)
    assert isinstance(found, ResourceRequest) and not found.query.forbidden_aggregates


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_shape_the_query(case: str) -> None:
    one, settings, expected = SETTINGS[case]
    assert asked(one, **settings) == expected


def test_the_groups_of_pci_devices_are_novas_own() -> None:
    devices = NovaPciRequests(requests=(PciRequest(request_id="r", alias_name="gpu"),))
    group = NovaRequestGroup(requester_id="r-0", resources={"CUSTOM_PCI_1": 1})
    assert "requiredr-0=OWNER_NOVA" in asked(request(pci_requests=devices, requested_resources=(group,)), owner=True)


def test_dedicated_cpus_are_asked_for_twice() -> None:
    one = request({"hw:cpu_policy": "dedicated"})
    found = resource_request(one, PrefilterSettings(), Facts(), requires_owner=False)
    assert isinstance(found, ResourceRequest)
    assert found.cpu_pinning_requested


UNSATISFIABLE: dict[str, tuple[NovaRequest, dict[str, Any], str]] = {
    "no such host": (request(force_hosts=("none",)), {}, HOST_UNKNOWN),
    "another cell": (
        request(requested_destination=NovaDestination(host="one", cell=NovaCell(uuid="far"))),
        {},
        HOST_UNKNOWN,
    ),
    "no aggregate of the project": (
        request(project_id="yours"),
        {"limit_tenants_to_placement_aggregate": True, "placement_aggregate_required_for_tenants": True},
        "tenant.no_aggregate",
    ),
    "no policy": (request({"resources1:CUSTOM_A": "1", "resources2:CUSTOM_A": "1"}), {}, REFUSED),
    "traits without resources": (request({"trait1:A": "required"}), {}, REFUSED),
    "nothing": (request({f"resources:{name}": "0" for name in ("VCPU", "MEMORY_MB", "DISK_GB")}), {}, REFUSED),
    "a huge amount": (request({"resources:VCPU": "2147483648"}), {}, REFUSED),
    "a trait both ways": (
        request(requested_resources=(replace(GROUP, forbidden_traits=GROUP.required_traits),)),
        {},
        REFUSED,
    ),
    "an unknown subtree": (request(request_level_params=NovaRequestLevel(same_subtree=(("no",),))), {}, REFUSED),
    "a wrong suffix": (request(requested_resources=(replace(GROUP, requester_id="a b"),)), {}, REFUSED),
    "an aggregate that is none": (request(requested_destination=NovaDestination(aggregates=("a",))), {}, REFUSED),
}


@pytest.mark.parametrize("case", UNSATISFIABLE)
def test_where_nova_finds_no_host_there_is_none(case: str) -> None:
    one, settings, code = UNSATISFIABLE[case]
    found = resource_request(one, PrefilterSettings(**settings), Facts(), requires_owner=False)
    assert isinstance(found, Unsatisfiable)
    assert found.code == code


NOT_DECIDED: dict[str, tuple[NovaRequest, dict[str, Any], str]] = {
    "flavor and image differ": (
        request({"hw:mem_encryption": "true"}, image=image(hw_mem_encryption=False)),
        {},
        "contradiction",
    ),
    "encryption without UEFI": (request({"hw:mem_encryption": "true"}), {}, "contradiction"),
    "an unknown CPU policy": (request({"hw:cpu_policy": "lucky"}), {}, "contradiction"),
    "an endless mask": (
        request({"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "0-99999999999"}),
        {},
        "contradiction",
    ),
    "a long mask": (
        request({"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "0-8191," * 40}),
        {},
        "contradiction",
    ),
    "a group of no one": (request(requested_resources=(replace(GROUP, requester_id=None),)), {}, "request_groups"),
    "a group twice": (request(requested_resources=(GROUP, GROUP)), {}, "request_groups"),
    "too many groups": (
        request(requested_resources=tuple(replace(GROUP, requester_id=f"p{at}") for at in range(70))),
        {},
        "groups",
    ),
    "routed networks": (
        request(requested_networks=NovaNetworks(objects=(NovaNetwork(),))),
        {"query_placement_for_routed_network_aggregates": True},
        "routed_networks",
    ),
}


@pytest.mark.parametrize("case", NOT_DECIDED)
def test_what_nova_fails_on_or_asks_neutron_for_is_not_decided(case: str) -> None:
    one, settings, reason = NOT_DECIDED[case]
    with pytest.raises(NotDecided) as caught:
        resource_request(one, PrefilterSettings(**settings), Facts(), requires_owner=False)
    assert caught.value.reason == reason


def test_what_a_filter_reads_that_berth_does_not_have_is_decided_by_nova() -> None:
    of_port, of_flavor = (NovaPciRequests(requests=(PciRequest(alias_name=name),)) for name in (None, "gpu"))
    table = [
        (request(), False, None),
        (request(numa_topology={}), False, "numa_topology"),
        (request(pci_requests=of_port), True, "pci_ports"),
        (request(pci_requests=of_flavor), False, "pci"),
        (request(pci_requests=of_flavor), True, None),
        (request(pci_requests=NovaPciRequests()), False, None),
        (request(scheduler_hints={"query": ("[]",)}), False, "hint"),
        (request(scheduler_hints={"build_near_host_ip": ("192.0.2.1",), "cidr": ("/24",)}), False, "hint"),
        (request(scheduler_hints={"cidr": ("/24",), "target_cell": ("c",)}), False, None),
    ]
    for one, in_placement, reason in table:
        settings = PrefilterSettings(pci_in_placement=in_placement)
        why = undecided(one, settings, (*NOT_OWNED, *DEVICE_FILTERS))
        assert (why and why.reason) == reason
        assert undecided(one, settings, NOVA_FILTERS) is None, "Nova does not enable them of itself"


def named(count: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(count))


OVERSIZED: dict[str, Callable[[int], NovaRequest]] = {
    "extra specs": lambda more: request(dict.fromkeys(named(MAX_SPECS + more), "")),
    "a long extra spec": lambda more: request({"a": "x" * (MAX_TEXT + more)}),
    "a long name of an extra spec": lambda more: request({"a" * (MAX_TEXT + more): ""}),
    "ignored hosts": lambda more: request(ignore_hosts=named(MAX_NAMES + more)),
    "forced hosts": lambda more: request(force_hosts=named(MAX_FORCED + more)),
    "forced nodes": lambda more: request(force_nodes=named(MAX_FORCED + more)),
    "a hint": lambda more: request(scheduler_hints={"same_host": named(MAX_NAMES + more)}),
    "members": lambda more: request(instance_group=NovaGroup(members=named(MAX_LOCATED_HOSTS + more))),
    "traits of the image": lambda more: request(image=NovaImage(traits_required=named(MAX_SPECS + more))),
    "traits of a group": lambda more: request(
        requested_resources=(replace(GROUP, required_traits=frozenset(named(MAX_SPECS + more))),)
    ),
    "classes of a group": lambda more: request(
        requested_resources=(replace(GROUP, resources=dict.fromkeys(named(MAX_SPECS + more), 1)),)
    ),
    "aggregates of a group": lambda more: request(
        requested_resources=(replace(GROUP, aggregates=(named(MAX_NAMES + more),)),)
    ),
    "aggregates of the destination": lambda more: request(
        requested_destination=NovaDestination(aggregates=(",".join(named(MAX_NAMES + more)),))
    ),
    "empty aggregates of a group": lambda more: request(
        requested_resources=(replace(GROUP, aggregates=((),) * (MAX_NAMES + more)),)
    ),
    "empty subtrees": lambda more: request(
        request_level_params=NovaRequestLevel(same_subtree=((),) * (MAX_NAMES + more))
    ),
    "specs of PCI requests": lambda more: request(
        pci_requests=NovaPciRequests(requests=(PciRequest(spec=({},) * (MAX_SPECS + more)),))
    ),
    "a subtree": lambda more: request(request_level_params=NovaRequestLevel(same_subtree=(named(MAX_NAMES + more),))),
}


@pytest.mark.parametrize("case", OVERSIZED)
def test_what_names_too_much_is_left_to_the_fallback(case: str) -> None:
    """Looked at here, it would hold up all other calls."""
    made = OVERSIZED[case]
    assert undecided(made(0), PrefilterSettings(), ()) is None
    why = undecided(made(1), PrefilterSettings(), ())
    assert why is not None and why.reason == "size"


@pytest.mark.parametrize(
    ("extra_specs", "said"),
    [
        ({}, {}),
        ({"hw:cpu_policy": "dedicated"}, {"resources:PCPU": "2", "resources:VCPU": "0"}),
        (
            {"hw:cpu_policy": "dedicated", "hw:cpu_thread_policy": "require"},
            {"resources:PCPU": "2", "resources:VCPU": "0", "trait:HW_CPU_HYPERTHREADING": "required"},
        ),
        (
            {"hw:cpu_policy": "dedicated", "hw:cpu_thread_policy": "isolate"},
            {"resources:PCPU": "2", "resources:VCPU": "0", "trait:HW_CPU_HYPERTHREADING": "forbidden"},
        ),
    ],
)
def test_what_a_flavors_words_say_to_any_scheduler(extra_specs: dict[str, str], said: dict[str, str]) -> None:
    flavor_ = request(extra_specs).flavor
    assert flavor_ is not None
    assert specs_of_query(flavor_) == said
