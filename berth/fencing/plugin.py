"""The interface of a fencing plug-in, and how one is loaded: by its name among the entry points of group
`berth.fencing`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from berth.config.settings import FencingSettings
from bus.clock import Clock
from bus.contracts.base import reason_of
from bus.contracts.build import HostRecord
from bus.faults import Fault
from bus.service.settings import SettingsError
from compute_agent.driver import DriverUnavailable
from compute_agent.drivers.ironic.api import IronicApi

OFF = "power off"


# Of a node: CELL/UUID of the host that it is. Not of one with an owner, who may change its properties: that one's
# power would be the proof that another host is off.
HOST_PROPERTY = "berth_host"


class NodePower(Struct, frozen=True):
    """The fields of a node's answer that are read here, in Ironic's words."""

    uuid: str
    power_state: str | None = None
    target_power_state: str | None = None
    last_error: str | None = None
    reservation: str | None = None
    instance_uuid: str | None = None
    lessee: str | None = None
    owner: str | None = None
    properties: dict[str, Any] | None = None


# The plug-in `ironic` switches hypervisors off through an Ironic that controls their power (IPMI, Redfish). The node of
# a host is the one that `fencing.nodes` names, else the one whose property names the host. The name that a compute
# service gives its host proves nothing: it may be another computer's.
class IronicPower:
    """One Ironic."""

    def __init__(self, settings: FencingSettings, clock: Clock) -> None:
        """Raises SettingsError: the login or the certificates cannot be used."""
        self._nodes = settings.nodes
        self._poll_s = settings.ironic.poll_interval_s
        self._api = IronicApi(settings.ironic, clock=clock)
        self._clock = clock
        self._api.open()

    @classmethod
    def from_settings(cls, settings: FencingSettings, clock: Clock) -> IronicPower:
        """As the loader makes it. Raises SettingsError."""
        return cls(settings, clock)

    async def switch_off(self, host: HostRecord) -> str:
        """Request the power state, whatever Ironic last knew, and wait until it is reported. Raises FencingFailed."""
        try:
            name = await self._node_of(host)
            node = await self._read(name)
            if node.uuid == host.uuid:
                raise FencingFailed(f"{name} is a bare-metal host: its instance is the machine that would be off")
            if node.instance_uuid or node.lessee:
                raise FencingFailed(f"node {name} has an instance or a lessee: it may be another's machine")
            while (refused := await self._api.power(node.uuid, OFF)) is not None:
                if not refused.is_conflict:  # else another change of the node is under way
                    raise FencingFailed(f"node {name}: {refused}")
                await self._clock.sleep(self._poll_s)
            await self._reported_off(name, node.uuid)
        except DriverUnavailable as fault:
            raise FencingFailed(str(fault)) from fault
        return f"Ironic reports node {name} as {OFF}"

    async def _node_of(self, host: HostRecord) -> str:
        """The one node of this host of this cell."""
        if host.cell is None:
            raise FencingFailed(f"the cell of {host.uuid} is not known")
        if (named := self._nodes.get(host.cell, {}).get(host.uuid)) is not None:
            return named
        which = f"{host.cell}/{host.uuid}"
        nodes = [_parsed(one, "list") for one in await self._api.raw_nodes()]
        found = [one.uuid for one in nodes if not one.owner and (one.properties or {}).get(HOST_PROPERTY) == which]
        if len(found) != 1:
            raise FencingFailed(f"{len(found)} nodes have {HOST_PROPERTY}={which}, and fencing.nodes has none for it")
        return found[0]

    async def _reported_off(self, name: str, uuid: str) -> None:
        """Wait until Ironic is done with the node, which it holds from before it accepts the request.

        Where its BMC does not answer, the power state stays as it was, beside an error. A request for a node that is
        off takes that error away, as does one that is carried out, unless the node is in a failed state.
        """
        while (node := await self._read(uuid)).reservation is not None or node.target_power_state is not None:
            await self._clock.sleep(self._poll_s)
        if node.power_state != OFF or node.last_error:
            raise FencingFailed(f"node {name} is {node.power_state}: {node.last_error}")

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def _read(self, ident: str) -> NodePower:
        found = await self._api.raw_node(ident)
        if found is None:
            raise FencingFailed(f"Ironic has no node {ident}")
        return _parsed(found, ident)


def _parsed(raw: Any, ident: str) -> NodePower:
    try:
        return msgspec.convert(raw, NodePower)
    except msgspec.ValidationError as error:
        raise FencingFailed(f"Ironic's answer about node {ident}: {reason_of(error)}") from error


class FencingFailed(Fault):
    """The host could not be switched off, or it is not certain that it is off. It must not be fenced."""

    code = "fencing.failed"


GROUP = "berth.fencing"


class FencingPlugin(Protocol):
    """Switches hosts off. Made by its class method `from_settings(settings, clock)`, which may raise SettingsError."""

    async def switch_off(self, host: HostRecord) -> str:
        """Return when the host is proved to be off; how that is known, for the log of changes.

        It may be called again for a host that is off. Raises FencingFailed: the host may still run; any other
        exception counts as that, too. It is cancelled after `fencing.timeout_s`.
        """

    async def close(self) -> None:
        """Close connections."""


def load(settings: FencingSettings, *, clock: Clock) -> FencingPlugin:
    """The plug-in that the settings name. Raises SettingsError."""
    if not settings.plugin:
        raise SettingsError("fencing.plugin", "no plug-in is named: set fencing.plugin; `ironic` comes with berth")
    if settings.plugin == "ironic":
        return IronicPower.from_settings(settings, clock)
    there_are = {entry.name: entry for entry in entry_points(group=GROUP)}
    if settings.plugin not in there_are:
        names = ", ".join(sorted({"ironic", *there_are}))
        raise SettingsError("fencing.plugin", f"there is no plug-in {settings.plugin} (there are: {names})")
    try:
        plugin: FencingPlugin = there_are[settings.plugin].load().from_settings(settings, clock)
    except SettingsError:
        raise
    except Exception as error:  # an operator's own code
        raise SettingsError("fencing.plugin", f"{settings.plugin}: {type(error).__name__}: {error}") from error
    return plugin
