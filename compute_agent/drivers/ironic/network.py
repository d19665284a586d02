"""Networks of a node: a small port with its adapters. Ironic attaches a VIF: the id of a network port."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct

from bus.contracts.cell import InstanceSpec
from compute_agent.driver import BuildAbort

OTHER_PROJECT = "network.other_project"


class Attachments(Struct, frozen=True):
    """What is attached to a node."""

    vifs: tuple[str, ...] = ()  # the ports to attach, in order
    network_data: Mapping[str, Any] = {}  # for the config drive, as OpenStack has it


class Network(Protocol):
    """Makes the ports of an instance and removes them. Both are idempotent, as they are repeated after a crash."""

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
    """`network = "static"`: the ports that the request names are attached; they are made and removed elsewhere. ports:
    {port: its project}, because there is nobody to ask.
    """

    def __init__(self, ports: Mapping[str, str]) -> None:
        self._ports = ports

    async def prepare(self, node: str, spec: InstanceSpec) -> Attachments:
        """The ports as they are named. Raises BuildAbort: a network is requested, or a port of another project."""
        ports = tuple(wanted.port for wanted in spec.networks if wanted.port is not None)
        if len(ports) < len(spec.networks):
            raise BuildAbort("network.static", 'a network is requested, and with "static" only ports can be')
        foreign = [port for port in ports if self._ports.get(port) != spec.project_id]
        if foreign:
            raise BuildAbort(OTHER_PROJECT, f"compute.ironic.ports has no {foreign[0]} of project {spec.project_id}")
        return Attachments(ports)

    async def release(self, node: str, instance: str) -> None:
        """They are not berth's to remove."""

    async def close(self) -> None:
        """Nothing is open."""
