"""The content of a request to Ironic about an instance: `instance_info` as in Nova, and the config drive. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bus.contracts.cell import InstanceSpec
from bus.contracts.deploy import ImageSource
from compute_agent.driver import BuildAbort
from compute_agent.drivers.ironic.node import OWNER_TAG, OwnerTag
from compute_agent.drivers.ironic.volume import boots_from_volume

MAX_HOSTNAME = 63
GLANCE = "glance://"  # an image's uuid may stand alone
# The entries of `instance_info` that name the image on a node: a rebuild from another one replaces all of them.
IMAGE_ENTRIES = frozenset(
    {
        *("image_source", "image_checksum", "image_os_hash_algo", "image_os_hash_value", "image_disk_format"),
        *("image_type", "kernel", "ramdisk"),
    }
)


# What InvalidImage of ironic.common.exception and of the agent, and those below it, say: of the instance's image alone.
_INVALID = (
    "instance_info",
    "InvalidImage",
    "requested image is not valid",
    "provided image is not valid",
    "image checksum is invalid or does not match",
    "Image failed to verify against checksum",
    "image checksum algorithm cannot be loaded",
    "remote checksum files is not supported",
    "requested image lacks the required attributes",
)
# What others say of an image that they name: ImageRefValidationFailed, InvalidImageRef, ImageUnacceptable,
# ImageNotFound, OciImageTagNotFound, ImageNotAuthorized, ImageDownloadFailed, OciImageNotSpecific,
# ImageServiceAuthenticationRequired.
_NAMING = (
    "image href {} failed",
    "image href {}.",
    "mage {} is unacceptable",
    "mage {} could not be found",
    "mage tag {} could not be found",
    "Not authorized for image {}.",
    "download image {}, reason",
    "requested image ({}) was not specific",
    "requested image {} requires authentication",
)


def image_of(spec: InstanceSpec, images: Mapping[str, ImageSource]) -> ImageSource | None:
    """The image: as the request has it, else the settings' of that name; None: it boots from a volume, or has none.
    Raises BuildAbort: no such name, or an image and a volume to boot from.
    """
    if boots_from_volume(spec):
        return None
    if spec.image_source is not None or not spec.image:
        return spec.image_source
    if spec.image not in images:
        known = ", ".join(sorted(images)) or "none"
        raise BuildAbort("image.unknown", f"compute.ironic.images has no {spec.image!r}; it has {known}")
    return images[spec.image]


def is_of_request(words: str, image: ImageSource | None) -> bool:
    """Whether Ironic refuses what the request gives it, which it would refuse for every node."""
    # Ironic has no codes. Its words name the field that was written, `instance_info`, or an image of the request; the
    # deploy ramdisk, which is the node's, has an image too.
    if any(one in words for one in _INVALID):
        return True
    sources = () if image is None else (image.source, image.checksum, image.kernel, image.ramdisk)
    names = {name for one in sources if one is not None for name in (one, one.removeprefix(GLANCE), f"{GLANCE}{one}")}
    return any(form.format(name) in words for form in _NAMING for name in names)


def take_patch(spec: InstanceSpec, tag: OwnerTag, image: ImageSource | None) -> list[dict[str, Any]]:
    """The PATCH that takes a node for an instance: uuid, owner tag, and what its deployment goes by, at once."""
    return [
        {"op": "add", "path": "/instance_uuid", "value": spec.instance_uuid},
        {"op": "add", "path": OWNER_TAG, "value": msgspec.to_builtins(tag)},
        *(
            {"op": "add", "path": f"/instance_info/{name}", "value": value}
            for name, value in instance_info(spec, image).items()
        ),
    ]


def free_patch() -> list[dict[str, Any]]:
    """The PATCH that gives a node back that was taken and not deployed."""
    # It fails as a whole when the node has no tag any more; whose tag it is, its caller has read just before.
    return [{"op": "remove", "path": path} for path in (OWNER_TAG, "/instance_info", "/instance_uuid")]


def instance_info(spec: InstanceSpec, image: ImageSource | None) -> dict[str, Any]:
    """The entries besides the owner tag. Ironic makes `project_id` the node's lessee, until it is undeployed."""
    info: dict[str, Any] = {"project_id": spec.project_id}
    if spec.name:
        info["display_name"] = spec.name
    if spec.root_gb:
        info["root_gb"] = spec.root_gb
    if spec.traits:
        info["traits"] = list(spec.traits)  # deploy templates match by them
    if spec.capabilities:
        info["capabilities"] = dict(spec.capabilities)
    if image is not None:
        named = {
            "image_source": image.source,
            "image_checksum": image.checksum,
            "image_os_hash_algo": image.hash_algorithm,
            "image_os_hash_value": image.hash_value,
            "image_disk_format": image.disk_format,
            "image_type": image.type,
            "kernel": image.kernel,
            "ramdisk": image.ramdisk,
        }
        info.update((name, value) for name, value in named.items() if value is not None)
    return info


def config_drive(spec: InstanceSpec, network_data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config drive as Ironic takes it and makes an image of it; None when nothing is to be on it."""
    drive_spec = spec.config_drive
    if drive_spec is None and not network_data:
        return None
    hostname = (drive_spec.hostname if drive_spec is not None else "") or _hostname(spec)
    meta: dict[str, Any] = {"uuid": spec.instance_uuid, "name": spec.name or hostname, "hostname": hostname}
    meta["project_id"] = spec.project_id
    drive: dict[str, Any] = {"meta_data": meta}
    if drive_spec is not None and drive_spec.public_keys:
        meta["public_keys"] = {f"key{number}": key for number, key in enumerate(drive_spec.public_keys)}
    if drive_spec is not None and drive_spec.user_data:
        drive["user_data"] = drive_spec.user_data
    data = (drive_spec.network_data if drive_spec is not None else None) or network_data
    if data:
        drive["network_data"] = dict(data)
    return drive


def _hostname(spec: InstanceSpec) -> str:
    """The part of the name that a host name may hold, else the uuid."""
    plain = "".join(one if one.isascii() and one.isalnum() else "-" for one in spec.name).strip("-")
    return plain[:MAX_HOSTNAME].strip("-").lower() or f"host-{spec.instance_uuid}"
