"""Networks of a node: a small port with its adapters. Ironic attaches a VIF: the id of a network port."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct

from bus.contracts.cell import InstanceSpec
from compute_sim.driver import BuildAbort


class Attachments(Struct, frozen=True):
    """vifs: the ports to attach to the node, in order. network_data: for the config drive, as OpenStack has it."""

    vifs: tuple[str, ...] = ()
    network_data: Mapping[str, Any] = {}


class Network(Protocol):
    """Makes the ports of an instance and removes them. Idempotent: both are repeated after a crash."""

    async def prepare(self, node: str, spec: InstanceSpec) -> Attachments:
        """The ports for this instance on this node. Raises BuildAbort, or DriverUnavailable."""

    async def release(self, node: str, instance: str) -> None:
        """Remove what `prepare` made for this instance on this node, and nothing else. Raises DriverUnavailable."""

    async def close(self) -> None:
        """Let go of connections."""


class NoNetwork:
    """`network = "none"`: the node's network is wired by hand. A request that names networks is turned down."""

    async def prepare(self, node: str, spec: InstanceSpec) -> Attachments:
        """Attach nothing. Raises BuildAbort when networks are requested."""
        if spec.networks:
            raise BuildAbort("network.none", 'networks are requested, and compute.ironic.network is "none"')
        return Attachments()

    async def release(self, node: str, instance: str) -> None:
        """Nothing was made."""

    async def close(self) -> None:
        """Nothing is open."""


class StaticNetwork:
    """`network = "static"`: the ports that the request names are attached; they are made and removed elsewhere."""

    async def prepare(self, node: str, spec: InstanceSpec) -> Attachments:
        """The ports as they are named. Raises BuildAbort when a network is requested instead."""
        if any(attachment.port is None for attachment in spec.networks):
            raise BuildAbort("network.static", 'a network is requested, and with "static" only ports can be')
        return Attachments(tuple(attachment.port for attachment in spec.networks if attachment.port is not None))

    async def release(self, node: str, instance: str) -> None:
        """They are not ours to remove."""

    async def close(self) -> None:
        """Nothing is open."""
