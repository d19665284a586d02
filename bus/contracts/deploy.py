"""The configuration of a machine, for drivers that deploy real ones: an image, a config drive, networks, volumes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Uuid, matching

MAX_USER_DATA = 65_535  # characters, as Nova's limit for a client's value
MAX_NETWORK_DATA = 65_535  # bytes of JSON
MAX_VOLUME_PROPERTIES = 16_384

# An address or an id: printable ASCII without spaces.
Reference = Annotated[str, matching(r"^[!-~]{1,2048}$(?!\n)", "1 to 2048 printable ASCII characters without spaces")]
PublicKey = Annotated[str, Bound(min_length=1, max_length=16_384)]


class ImageSource(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where a driver gets an image, as in Ironic's `instance_info`."""

    source: Reference
    """`http(s)://`, `file://`, `oci://` or the uuid of a Glance image."""
    checksum: Reference | None = None
    """Of the image, or the URL of a file with it."""
    hash_algorithm: Literal["md5", "sha256", "sha512"] | None = None
    """As Glance's `os_hash_algo`; given together with `hash_value`."""
    hash_value: Annotated[str, matching(r"^[0-9a-fA-F]{32,128}$(?!\n)", "32 to 128 hexadecimal digits")] | None = None
    """As Glance's `os_hash_value`, in hexadecimal."""
    kernel: Reference | None = None
    """Of a partition image: its kernel, as `source`."""
    ramdisk: Reference | None = None
    """Of a partition image: its ramdisk, as `source`."""
    disk_format: Literal["raw", "qcow2"] | None = None
    """Of the image; not set: Ironic determines it."""
    type: Literal["whole-disk", "partition"] | None = None
    """Of the image; not set: a partition image when it has a kernel and a ramdisk."""

    def __post_init__(self) -> None:
        if (self.hash_algorithm is None) != (self.hash_value is None):
            raise ValueError("hash_algorithm and hash_value are given together")


class ConfigDrive(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The content of the machine's config drive at its first boot. It may hold secrets: it is never logged."""

    user_data: Annotated[str, Bound(max_length=MAX_USER_DATA)] = ""  # for cloud-init; at most 65,535 characters
    public_keys: Annotated[tuple[PublicKey, ...], Bound(max_length=16)] = ()  # SSH keys, a line each
    network_data: dict[str, Any] = {}  # OpenStack's `network_data.json`, at most 65,535 bytes
    # "": the instance's name
    hostname: Annotated[str, matching(r"^[A-Za-z0-9.\-]{0,255}$(?!\n)", "at most 255 letters, digits, . and -")] = ""

    def __post_init__(self) -> None:
        if self.network_data and len(msgspec.json.encode(self.network_data)) > MAX_NETWORK_DATA:
            raise ValueError(f"network_data is larger than {MAX_NETWORK_DATA} bytes")

    def __repr__(self) -> str:
        return f"ConfigDrive(user_data of {len(self.user_data)}, {len(self.public_keys)} public keys)"


class NetworkRequest(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One network interface: an existing port, or a network to make a port on. Exactly one of them."""

    port: Uuid | None = None
    network: Uuid | None = None

    def __post_init__(self) -> None:
        if (self.port is None) == (self.network is None):
            raise ValueError("a port or a network is named, and not both")


class VolumeRequest(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A volume to attach to the machine. It may hold secrets: it is never logged."""

    volume_id: Annotated[str, Bound(min_length=1, max_length=36)]  # its id where it is kept
    type: Literal["iscsi", "fibre_channel"] = "iscsi"  # as in Ironic's volume targets
    boot_index: Annotated[int, Bound(ge=0, le=255)] = 0  # 0: the machine boots from it
    # how it is reached (target_portal, target_iqn, target_lun, ...), at most 16,384 bytes of JSON
    properties: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.properties and len(msgspec.json.encode(self.properties)) > MAX_VOLUME_PROPERTIES:
            raise ValueError(f"properties are larger than {MAX_VOLUME_PROPERTIES} bytes")

    @property
    def is_root(self) -> bool:
        """Whether the machine boots from it."""
        return self.boot_index == 0

    def __repr__(self) -> str:
        return f"VolumeRequest({self.volume_id!r}, boot_index={self.boot_index})"


Volumes = Annotated[tuple[VolumeRequest, ...], Bound(max_length=16)]
Networks = Annotated[tuple[NetworkRequest, ...], Bound(max_length=16)]
