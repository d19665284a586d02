"""Volumes of a node: a small port with its adapters. Ironic attaches, or boots from, a volume target."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec import Struct

from bus.contracts.base import GivenAttempt, Uuid
from bus.contracts.cell import InstanceSpec
from bus.contracts.deploy import VolumeRequest
from compute_agent.driver import BuildAbort
from compute_agent.drivers.ironic.node import OwnerTag

# With these a node attaches none; Ironic's others (`cinder`, `external`) read the node's volume targets.
WITHOUT_VOLUMES = frozenset({None, "noop"})


class Volumes(Protocol):
    """Prepares the volumes of an instance and lets go of them. Both are idempotent: they are repeated after a crash."""

    async def prepare(self, node: str, spec: InstanceSpec) -> tuple[VolumeRequest, ...]:
        """The volumes for this instance on this node. Raises BuildAbort, or DriverUnavailable."""

    async def release(self, node: str, instance: str) -> None:
        """Undo what `prepare` made for this instance on this node, and nothing else. Raises DriverUnavailable."""

    async def close(self) -> None:
        """Let go of connections."""


class NoVolumes:
    """`volumes = "none"`: a request that names volumes is turned down."""

    async def prepare(self, node: str, spec: InstanceSpec) -> tuple[VolumeRequest, ...]:
        """Nothing to attach. Raises BuildAbort: volumes are requested."""
        if spec.volumes:
            raise BuildAbort("volume.none", 'volumes are requested, and compute.ironic.volumes is "none"')
        return ()

    async def release(self, node: str, instance: str) -> None:
        """Nothing was made."""

    async def close(self) -> None:
        """Nothing is open."""


class StaticVolumes:
    """`volumes = "static"`: the volumes that the request names, which are made and exported elsewhere."""

    async def prepare(self, node: str, spec: InstanceSpec) -> tuple[VolumeRequest, ...]:
        """The volumes as they are named."""
        return spec.volumes

    async def release(self, node: str, instance: str) -> None:
        """They are not berth's to remove."""

    async def close(self) -> None:
        """Nothing is open."""


def boots_from_volume(spec: InstanceSpec) -> bool:
    """Whether the machine boots from a volume. Raises BuildAbort: it is to have an image as well."""
    if not any(volume.is_root for volume in spec.volumes):
        return False
    if spec.image or spec.image_source is not None:
        raise BuildAbort("volume.and_image", "the machine is to boot from a volume and from an image")
    return True


class TargetOwnerTag(Struct, frozen=True):
    """The proof that a volume target is berth's, in its `extra`: for which attempt of which instance it was made."""

    database_id: Uuid
    instance: Uuid
    attempt: GivenAttempt


class TargetExtra(Struct, frozen=True):
    """Our entry of a target's `extra`."""

    berth: TargetOwnerTag | None = None


class VolumeTarget(Struct, frozen=True):
    """A volume target as Ironic's REST API has it, as far as it is needed here."""

    uuid: str
    volume_id: str = ""
    extra: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def owner_tag(self) -> TargetOwnerTag | None:
        """Our tag; a target without it is another's."""
        try:
            return msgspec.json.decode(self.extra, type=TargetExtra).berth
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


class Targets(Struct, frozen=True):
    """Ironic's answer to a list of targets."""

    targets: list[VolumeTarget] = []


def target_body(node: str, volume: VolumeRequest, tag: OwnerTag) -> dict[str, Any]:
    """The body that makes a volume a target of the node."""
    owner_tag = TargetOwnerTag(tag.database_id, tag.instance, tag.attempt)
    return {
        "node_uuid": node,
        "volume_type": volume.type,
        "volume_id": volume.volume_id,
        "boot_index": volume.boot_index,
        "properties": volume.properties,
        "extra": {"berth": msgspec.to_builtins(owner_tag)},
    }
