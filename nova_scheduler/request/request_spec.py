"""Nova's RequestSpec as it comes in a call, parsed: objects of oslo.versionedobjects (`nova_object.name`, `.namespace`,
`.version`, `.data`). Hostile until `parse_request_spec` has returned: name and major version of each object are
checked, fields that placing does not read are ignored, absent ones have their default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct, field

from bus.contracts.base import reason_of
from bus.faults import Fault
from nova_scheduler.fit.pci import MAX_REQUESTS as MAX_PCI_REQUESTS
from nova_scheduler.fit.pci import PciRequest
from nova_scheduler.wire.versioned import ObjectOfOtherVersion, ObjectUnreadable, data_of

INVALID: Final = "nova.spec_invalid"
VERSION: Final = "nova.spec_version"

# The bytes of a spec are bounded where its message is taken; these bound what one of its fields makes of them.
MAX_OBJECTS = 1_000

MAX_AMOUNT = 2**31 - 1  # as Placement bounds it
Amount = Annotated[int, Meta(ge=0, le=MAX_AMOUNT)]


class SpecRefused(Fault):
    """A RequestSpec that cannot be read: no answer is possible, and none of a stock nova-scheduler would be better."""

    code = INVALID


class NotDecided(Exception):
    """Berth does not decide this request; a stock nova-scheduler does."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason  # a stable word by which such calls are counted
        self.detail = detail  # for a person


class NovaFlavor(Struct, frozen=True, kw_only=True):
    """`Flavor` 1.x, by value: the flavor may have been deleted since. Sizes as in Nova: root, ephemeral in GB; swap,
    memory in MB.
    """

    name: str
    vcpus: Amount
    memory_mb: Amount
    root_gb: Amount = 0
    ephemeral_gb: Amount = 0
    swap: Amount = 0
    extra_specs: dict[str, str] = {}


class NovaImage(Struct, frozen=True, kw_only=True):
    """`ImageMeta` 1.x."""

    id: str | None = None
    disk_format: str | None = None
    # those of `ImageMetaProps` that are set, as Nova's field types have coerced them
    properties: dict[str, str | int | float | bool | list[Any] | None] = {}
    traits_required: tuple[str, ...] = ()  # of the image's properties `trait:X` = required

    def text(self, name: str) -> str | None:
        """A property that is a text."""
        value = self.properties.get(name)
        return value if isinstance(value, str) else None


class NovaCell(Struct, frozen=True, kw_only=True):
    """`CellMapping`."""

    uuid: str


class NovaDestination(Struct, frozen=True, kw_only=True):
    """`Destination` 1.x: the host, the node (by hypervisor hostname) and the cell that the call asks for."""

    host: str | None = None
    node: str | None = None
    cell: NovaCell | None = None
    # each item is uuids separated by commas, of which one must hold; all items must
    aggregates: tuple[str, ...] | None = None
    forbidden_aggregates: frozenset[str] | None = None
    allow_cross_cell_move: bool = False


class NovaGroup(Struct, frozen=True, kw_only=True):
    """`InstanceGroup` 1.x."""

    uuid: str | None = None
    policy: str | None = None
    policies: tuple[str, ...] = ()
    rules: dict[str, str] = field(name="_rules", default_factory=dict)
    members: tuple[str, ...] | None = None  # uuids of instances

    @property
    def group_policy(self) -> str | None:
        """The policy; before 1.11 the only one of `policies`."""
        return self.policy or next(iter(self.policies), None)


class NovaRequestGroup(Struct, frozen=True, kw_only=True):
    """`RequestGroup` 1.x: what a port, a device profile or a PCI request asks of one provider."""

    resources: dict[str, Amount] = {}
    required_traits: frozenset[str] = frozenset()
    forbidden_traits: frozenset[str] = frozenset()
    aggregates: tuple[tuple[str, ...], ...] = ()  # of each inner tuple one must hold
    forbidden_aggregates: frozenset[str] = frozenset()
    requester_id: str | None = None  # its suffix in the query
    in_tree: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it requests nothing; Nova does not count in_tree."""
        rest = (self.required_traits, self.forbidden_traits, self.aggregates, self.forbidden_aggregates)
        return not (self.resources or any(rest))


class NovaRequestLevel(Struct, frozen=True, kw_only=True):
    """`RequestLevelParams` 1.x: traits of the root, and sets of suffixes that share a subtree."""

    root_required: frozenset[str] = frozenset()
    root_forbidden: frozenset[str] = frozenset()
    same_subtree: tuple[tuple[str, ...], ...] = ()


class NovaPciRequests(Struct, frozen=True, kw_only=True):
    """`InstancePCIRequests` 1.x."""

    requests: Annotated[tuple[PciRequest, ...], Meta(max_length=MAX_PCI_REQUESTS)] = ()


class NovaNetwork(Struct, frozen=True, kw_only=True):
    """`NetworkRequest` 1.x."""


class NovaNetworks(Struct, frozen=True, kw_only=True):
    """`NetworkRequestList`."""

    objects: tuple[NovaNetwork, ...] = ()


class NovaRequest(Struct, frozen=True, kw_only=True):
    """`RequestSpec` 1.x, all that placing reads. Names and units are Nova's; None is null or not set."""

    flavor: NovaFlavor
    image: NovaImage | None = None
    project_id: str | None = None
    user_id: str | None = None
    availability_zone: str | None = None
    is_bfv: bool | None = None
    # ignore_hosts, force_hosts, force_nodes: names
    ignore_hosts: tuple[str, ...] | None = None
    force_hosts: tuple[str, ...] | None = None
    force_nodes: tuple[str, ...] | None = None
    requested_destination: NovaDestination | None = None
    instance_group: NovaGroup | None = None
    scheduler_hints: dict[str, tuple[str, ...]] | None = None
    requested_resources: tuple[NovaRequestGroup, ...] | None = None
    request_level_params: NovaRequestLevel = NovaRequestLevel()
    requested_networks: NovaNetworks | None = None
    # numa_topology, network_metadata: as they came; `numa.numa_request` looks into them
    numa_topology: Any = None
    network_metadata: Any = None
    pci_requests: NovaPciRequests | None = None

    @property
    def hints(self) -> Mapping[str, tuple[str, ...]]:
        """The scheduler hints, each a list of texts."""
        return self.scheduler_hints or {}

    @property
    def named_hosts(self) -> tuple[str, ...]:
        """The hosts that it names: to be ignored, forced, or its destination."""
        asked = self.requested_destination
        destination = (asked.host,) if asked is not None and asked.host else ()
        return (*(self.ignore_hosts or ()), *(self.force_hosts or ()), *destination)

    @property
    def is_rebuild(self) -> bool:
        """Whether the conductor asks about the host that the instance is on: no query, no claim, the filters alone."""
        return self.hints.get("_nova_check_type") == ("rebuild",)

    @property
    def image_or_none(self) -> NovaImage:
        """The image; an empty one where there is none."""
        return self.image or NovaImage()

    @property
    def groups_of_requesters(self) -> tuple[NovaRequestGroup, ...]:
        """The request groups that came from outside the flavor."""
        return self.requested_resources or ()

    @property
    def pci(self) -> tuple[PciRequest, ...]:
        """The PCI requests."""
        return self.pci_requests.requests if self.pci_requests is not None else ()


# The objects that are read, by class: the struct of their fields, and the classes of the objects in those fields.
# Fields of a class that are in neither are skipped, whatever they hold.
_READ: Final[Mapping[str, tuple[type[Struct], Mapping[str, str]]]] = {
    "RequestSpec": (
        NovaRequest,
        {
            "flavor": "Flavor",
            "image": "ImageMeta",
            "instance_group": "InstanceGroup",
            "requested_destination": "Destination",
            "requested_resources": "RequestGroup",
            "request_level_params": "RequestLevelParams",
            "requested_networks": "NetworkRequestList",
            "pci_requests": "InstancePCIRequests",
        },
    ),
    "Flavor": (NovaFlavor, {}),
    "ImageMeta": (NovaImage, {"properties": "ImageMetaProps"}),
    "InstanceGroup": (NovaGroup, {}),
    "Destination": (NovaDestination, {"cell": "CellMapping"}),
    "CellMapping": (NovaCell, {}),
    "RequestGroup": (NovaRequestGroup, {}),
    "RequestLevelParams": (NovaRequestLevel, {}),
    "NetworkRequestList": (NovaNetworks, {"objects": "NetworkRequest"}),
    "NetworkRequest": (NovaNetwork, {}),
    "InstancePCIRequests": (NovaPciRequests, {"requests": "InstancePCIRequest"}),
    "InstancePCIRequest": (PciRequest, {}),
}
_ALL_FIELDS = "ImageMetaProps"  # kept whole: operators' filters read any property
_FIELDS: Final = {name: frozenset(one.__struct_encode_fields__) for name, (one, _) in _READ.items()}


def parse_request_spec(primitive: object) -> NovaRequest:
    """The request in a serialised RequestSpec 1.x. Raises SpecRefused."""
    plain = _fields(primitive, "RequestSpec")
    try:
        return msgspec.convert(plain, NovaRequest)
    except (msgspec.ValidationError, RecursionError) as error:
        raise SpecRefused(f"RequestSpec: {reason_of(error)}") from None


def _fields(value: object, name: str) -> dict[str, object]:
    """The fields of an object of this class that are read, without their wrappings. Depth is that of `_READ`."""
    try:
        data = data_of(value, name)
    except ObjectOfOtherVersion as error:
        raise SpecRefused(str(error), code=VERSION) from None
    except ObjectUnreadable as error:
        raise SpecRefused(str(error)) from None
    if name == _ALL_FIELDS:
        return dict(data)
    nested = _READ[name][1]
    fields = {key: _field(data[key], nested.get(key)) for key in sorted(_FIELDS[name] & data.keys())}
    if isinstance(properties := fields.get("properties"), dict) and "traits_required" in properties:
        fields["traits_required"] = properties["traits_required"]
    return fields


def _field(value: object, name: str | None) -> object:
    """The value of a field. name: the class of its objects."""
    if name is None or value is None:
        return value
    if isinstance(value, (list, tuple)):
        if len(value) > MAX_OBJECTS:
            raise SpecRefused(f"{name}: more than {MAX_OBJECTS} in one list")
        return [_fields(one, name) for one in value]
    return _fields(value, name)
