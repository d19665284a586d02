"""What Nova's pre-filters add to a request before the query (Nova 34, `nova/scheduler/request_filter.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import os_traits
from msgspec import Struct

from bus.contracts.objects import ZONE_KEY
from nova_scheduler.config import PrefilterSettings
from nova_scheduler.request.hardware import chosen, flag, tpm_traits
from nova_scheduler.request.releases import NEWEST, SINCE
from nova_scheduler.request.request_spec import NotDecided, NovaRequest
from nova_scheduler.wire.versioned import is_true
from scheduler_worker.config import Aggregate
from scheduler_worker.selection.flavor_query import TENANT_KEY, TRAIT_KEY
from scheduler_worker.selection.request_spec import Unsatisfiable

OWNER_TRAIT: Final = "OWNER_NOVA"
DISABLED_TRAIT: Final = "COMPUTE_STATUS_DISABLED"
REMOTE_MANAGED_TAG: Final = "remote_managed"  # of a PCI request for a port of such a kind

SOUND_TRAIT: Final = "COMPUTE_SOUND_MODEL_VIRTIO"
SECRET_TRAITS: Final = "COMPUTE_SECURITY_TPM_SECRET_SECURITY_"

_SOUND_MODELS = ("sb16", "es1370", "pcspk", "ac97", "ich6", "ich9", "usb", "virtio")
_ENCRYPTION_FORMATS = ("plain", "luks", "luksv2")
_TPM_SECRETS = ("user", "host", "deployment")

# The image properties that name a model which the host's driver must have, and the prefixes of their traits.
_TRAITS_OF_PROPERTIES: Final = {
    "hw_cdrom_bus": "COMPUTE_STORAGE_BUS",
    "hw_disk_bus": "COMPUTE_STORAGE_BUS",
    "hw_video_model": "COMPUTE_GRAPHICS_MODEL",
    "hw_vif_model": "COMPUTE_NET_VIF_MODEL",
    "hw_architecture": "HW_ARCH",
    "hw_emulation_architecture": "COMPUTE_ARCH",
    "hw_viommu_model": "COMPUTE_VIOMMU",
}


class Additions(Struct, frozen=True, kw_only=True):
    """What the pre-filters add."""

    root_required: frozenset[str]
    root_forbidden: frozenset[str]
    member_of: tuple[tuple[str, ...], ...]  # of each tuple of aggregates one must hold
    forbidden_aggregates: frozenset[str]
    of_pci: frozenset[str]  # traits that the groups of PCI requests must have


def prefilter(
    request: NovaRequest,
    settings: PrefilterSettings,
    aggregates: Sequence[Aggregate],
    *,
    tenant: tuple[str, ...],
    required_traits: frozenset[str],
    requires_owner: bool,
    release: int,
) -> Additions:
    """All additions of the pre-filters. tenant: the project's aggregates. required_traits: of the request's groups.
    release: Nova's. Raises NotDecided.
    """
    _check_networks(request, settings)
    needs_owner = requires_owner and OWNER_TRAIT not in request.request_level_params.root_required
    owner = frozenset({OWNER_TRAIT} if needs_owner else ())
    return Additions(
        root_required=owner.union(
            _image_type(request, settings), _image_metadata(request, settings), device_traits(request, release)
        ),
        root_forbidden=frozenset({DISABLED_TRAIT}),
        member_of=tuple(one for one in (tenant, _zone_aggregates(request, aggregates)) if one),
        forbidden_aggregates=_isolated(settings, aggregates, required_traits),
        of_pci=owner,
    )


def tenant_aggregates(
    request: NovaRequest, settings: PrefilterSettings, aggregates: Sequence[Aggregate]
) -> tuple[str, ...] | Unsatisfiable:
    """The project's aggregates, if it is bound to them. Unlike the filter of the same metadata, Nova's pre-filter
    compares the whole value.
    """
    if not settings.limit_tenants_to_placement_aggregate:
        return ()
    mine = _uuids(
        one
        for one in aggregates
        if any(key.startswith(TENANT_KEY) and value == request.project_id for key, value in one.metadata.items())
    )
    if not mine and settings.placement_aggregate_required_for_tenants:
        return Unsatisfiable("tenant.no_aggregate", f"no aggregate belongs to project {request.project_id}", "tenant")
    return mine


def _zone_aggregates(request: NovaRequest, aggregates: Sequence[Aggregate]) -> tuple[str, ...]:
    """The aggregates of the zone. A zone of no aggregate, as the default one, rules nothing out: the API has refused
    names that are no zone.
    """
    zone = request.availability_zone
    return _uuids(one for one in aggregates if zone and one.metadata.get(ZONE_KEY) == zone)


def _isolated(
    settings: PrefilterSettings, aggregates: Sequence[Aggregate], required_traits: frozenset[str]
) -> frozenset[str]:
    """The aggregates that are kept for traits of which the request does not require one."""
    if not settings.enable_isolated_aggregate_filtering:
        return frozenset()
    return frozenset(
        one.uuid
        for one in aggregates
        if any(
            key.startswith(TRAIT_KEY) and value == "required" and key.removeprefix(TRAIT_KEY) not in required_traits
            for key, value in one.metadata.items()
        )
    )


def _image_type(request: NovaRequest, settings: PrefilterSettings) -> list[str]:
    """The trait of the image's disk format. A server that boots from a volume has none."""
    if not settings.query_placement_for_image_type_support or request.is_bfv:
        return []
    disk_format = request.image_or_none.disk_format
    if disk_format is None:
        raise NotDecided("image", "the image has no disk format")
    return _known([f"COMPUTE_IMAGE_TYPE_{disk_format.upper()}"])


def _image_metadata(request: NovaRequest, settings: PrefilterSettings) -> list[str]:
    """The traits of the models that the image's properties name; none of them if one of them is no trait."""
    if not settings.image_metadata_prefilter:
        return []
    image = request.image_or_none
    named = ((prefix, image.text(key)) for key, prefix in _TRAITS_OF_PROPERTIES.items())
    return _known([f"{prefix}_{value.replace('-', '_').upper()}" for prefix, value in named if value is not None])


def device_traits(request: NovaRequest, release: int = NEWEST) -> list[str]:
    """The traits of the root for what the flavor and the image ask of a host's devices. Raises NotDecided."""
    specs = request.flavor.extra_specs
    traits: list[str] = []
    if specs.get("accel:device_profile"):
        traits.append("COMPUTE_ACCELERATORS")
    if flag(request, "virtio_packed_ring"):
        traits.append("COMPUTE_NET_VIRTIO_PACKED")
    if any(is_true(spec.get(REMOTE_MANAGED_TAG)) for one in request.pci for spec in one.spec):
        traits.append("COMPUTE_REMOTE_MANAGED_PORTS")
    if flag(request, "ephemeral_encryption"):
        traits.append("COMPUTE_EPHEMERAL_ENCRYPTION")
        if name := chosen(request, "ephemeral_encryption_format", _ENCRYPTION_FORMATS):
            traits.append(f"COMPUTE_EPHEMERAL_ENCRYPTION_{name.upper()}")
    if release >= SINCE[SOUND_TRAIT] and chosen(request, "sound_model", _SOUND_MODELS) == "virtio":
        traits.append(SOUND_TRAIT)
    if release >= SINCE[f"{SECRET_TRAITS}USER"] and tpm_traits(request):
        secret = specs.get("hw:tpm_secret_security") or "user"
        if secret not in _TPM_SECRETS:
            raise NotDecided("tpm_secret_security", "the security of the TPM's secret is unknown")
        traits.append(f"{SECRET_TRAITS}{secret.upper()}")
    return traits


def _check_networks(request: NovaRequest, settings: PrefilterSettings) -> None:
    """Raises NotDecided where Nova asks Neutron for the segments of the networks."""
    networks = request.requested_networks
    if settings.query_placement_for_routed_network_aggregates and networks is not None and networks.objects:
        raise NotDecided("routed_networks", "only Neutron knows the segments of the networks")


def _known(traits: list[str]) -> list[str]:
    """These traits if all of them are standard ones; an older os-traits may not have one yet."""
    return traits if all(hasattr(os_traits, name) for name in traits) else []


def _uuids(aggregates: Iterable[Aggregate]) -> tuple[str, ...]:
    return tuple(sorted({one.uuid for one in aggregates}))
