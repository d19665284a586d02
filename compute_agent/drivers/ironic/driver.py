"""Bare metal through Ironic's REST API. This driver reports no inventory: ironic_sync does so for all nodes, by
Ironic's own state. The driver reads a node again before each action, because placement may be out of date.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import hashlib
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import httpx

from bus.clock import Clock
from bus.contracts.waiting_builds import WaitingBuild
from bus.openstack.rest import api_root
from compute_agent.driver import (
    Build,
    ChangeOrder,
    ChangeResult,
    DriverHost,
    DriverUnavailable,
    Machine,
    MachineProtected,
    NotOwned,
    Reschedule,
    Tree,
)
from compute_agent.driver_guard import isolate_driver
from compute_agent.drivers.ironic.api import IronicApi, Refused
from compute_agent.drivers.ironic.canary import WARNING, CanaryGate
from compute_agent.drivers.ironic.config import IronicConfig
from compute_agent.drivers.ironic.deployment import NodeDeployment
from compute_agent.drivers.ironic.machine_change import NodeChange
from compute_agent.drivers.ironic.network import Network, NoNetwork, StaticNetwork
from compute_agent.drivers.ironic.neutron import NeutronNetwork
from compute_agent.drivers.ironic.node import DELETABLE, IronicNode, OwnerTag, machines_of
from compute_agent.drivers.ironic.request import free_patch
from compute_agent.drivers.ironic.volume import WITHOUT_VOLUMES, NoVolumes, StaticVolumes, Volumes
from compute_agent.hosts.hash_ring import Ring
from compute_agent.records.records import Records

# The search for new nodes takes at most one part in this many of the service's time, however many nodes there are.
LOOK_SHARE = 20
OUTAGE_RETRY_S = 1.0  # after a look that Ironic has not answered: a node is offered soon after an outage
ATTRIBUTES = {"hypervisor_type": "ironic"}
PROJECT = "project_id"  # an attribute: builds of this project only
HEALTH = "health"  # an attribute: `warning`, or there is none


class MachineRecords(Protocol):
    """The part of the service's own records that is needed here."""

    def is_live(self, host: str, instance: str) -> bool:
        """Whether a machine of this instance may be on this host."""

    def holding_hosts(self) -> Collection[str]:
        """Hosts with a machine on record that the cell has not ended."""

    def undeploying(self, host: str) -> Mapping[str, tuple[int, str]]:
        """{instance: (attempt, database_id)} of the tags that were seen before the node was undeployed."""

    def record_teardown(self, host: str, instance: str, tag: tuple[int, str] | None) -> None:
        """The node is about to be undeployed; None: it is."""

    async def sync(self) -> None:
        """Return when what was noted survives a power cut."""


class IronicDriver:
    """The driver of one service's nodes: the nodes with its tag, and its share of the nodes without a tag."""

    def __init__(
        self,
        config: IronicConfig,
        *,
        cell: str,
        service: str,
        clock: Clock,
        records: MachineRecords | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        network: Network | None = None,
        volumes: Volumes | None = None,
        ring: Ring | None = None,
    ) -> None:
        """records: the service's own; None: others, which end with the driver. ring: with which services it shares the
        free nodes; None: with none.
        """
        self.ring = ring
        self._config = config
        self._cell = cell
        self._service = service
        self._services = frozenset((service, *config.takes_over))
        self._records: MachineRecords = Records() if records is None else records
        self._clock = clock
        self._deployments: set[NodeDeployment] = set()  # under way
        self._api = IronicApi(config, clock=clock, transport=transport)
        self._network = network if network is not None else make_network(config, clock)
        self._volumes = volumes if volumes is not None else make_volumes(config)
        self._canary_gate = CanaryGate(self._api, project=config.canary_project or "", clock=clock)
        # The nodes that are offered: as the first report has them, and then as `watch` has reported them.
        self._reported: dict[str, DriverHost] | None = None
        self._changed: Callable[[Sequence[str]], None] | None = None

    async def open(self) -> None:
        """Make the HTTP client; no request is sent yet."""
        self._api.open()

    async def close(self) -> None:
        """Close the clients."""
        await self._api.close()
        await self._network.close()
        await self._volumes.close()

    async def hosts(self) -> Sequence[DriverHost]:
        """One host a node, named by its uuid as Nova does; one that is retired or in maintenance is not enabled. Free
        nodes that other services of the ring offer are among them.
        """
        hosts = await self._hosts()
        if self._reported is None:
            self._reported = {host.uuid: host for host in hosts if host.reported}
        return hosts

    async def inventory(self, hosts: Sequence[str] | None = None) -> Sequence[Tree]:
        """None: ironic_sync reports them."""
        return ()

    async def spawn(self, build: Build) -> str:
        """Take the node, deploy it, wait until it is active. The warning names what Ironic was waited for."""
        deployment = self._deployment(build)
        self._deployments.add(deployment)
        try:
            warning = await deployment.run()
        finally:
            self._deployments.discard(deployment)
        with contextlib.suppress(DriverUnavailable):  # it runs; a node that stays unproven is tried again
            await self._canary_gate.proved(build.host_uuid, build.spec.project_id)
        return warning

    def waiting(self) -> Sequence[WaitingBuild]:
        """The builds that wait for Ironic now, the longest first."""
        found = [waiting for deployment in self._deployments if (waiting := deployment.waiting()) is not None]
        return sorted(found, key=lambda one: (one.since, one.instance_uuid))

    async def destroy(self, host_uuid: str, instance_uuid: str, attempt: int, database_id: str | None) -> None:
        """Undeploy the node when it has our tag; return when it is not deployed any more (cleaning continues). Raises
        NotOwned (another tag), MachineProtected, or DriverUnavailable: try again later.
        """
        # When undeploying fails (as its power does), Ironic drops instance and tag, and the machine may run on: it is
        # undeployed again then, if the records have the tag that was seen. Without it another service may have seen it,
        # or it is another's: that service, or an operator, ends it.
        started_at = self._clock.monotonic()
        refused: Refused | None = None
        while (node := await self._api.node(host_uuid)) is not None:
            if node.instance == instance_uuid:
                if not _may_undeploy(node, attempt, database_id):
                    return
            elif not node.is_partly_torn_down:
                break
            took = self._clock.monotonic() - started_at
            if took > self._config.clean_timeout_s:
                reason = f"; {refused}" if refused is not None else ""
                left = "still carries the instance" if node.instance else "is not undeployed"
                raise DriverUnavailable(f"node {host_uuid} {left} and is {node.condition}{reason}")
            if node.owner_tag is not None:
                tag = (node.owner_tag.attempt, node.owner_tag.database_id)
                self._records.record_teardown(host_uuid, instance_uuid, tag)
                await self._records.sync()
            if node.instance is not None or instance_uuid in self._records.undeploying(host_uuid):
                refused = await self._undeploy_step(node)
            await self._clock.sleep(max(self._config.poll_interval_s, min(self._config.max_poll_interval_s, took)))
        if node is None:
            await self._check_removed(host_uuid)
        self._records.record_teardown(host_uuid, instance_uuid, None)
        if node is not None and node.storage_interface not in WITHOUT_VOLUMES:
            await self._detach_volumes(host_uuid, instance_uuid, attempt, database_id, started_at)
        await self._network.release(host_uuid, instance_uuid)
        await self._volumes.release(host_uuid, instance_uuid)

    async def _check_removed(self, host_uuid: str) -> None:
        """Raises DriverUnavailable: Ironic's 404 does not prove a node removed while its list hides others, too."""
        listed = {node.uuid for node in await self._api.nodes()}
        if not listed or not listed.issuperset(uuid for uuid in self._holding() if uuid != host_uuid):
            raise DriverUnavailable(f"node {host_uuid} is not shown, and neither are others with machines on record")

    async def _detach_volumes(
        self, node: str, instance: str, attempt: int, database_id: str | None, started_at: float
    ) -> None:
        """Remove the targets that were made for these attempts. Ironic takes that when the node is switched off, so
        perhaps after its cleaning; until then the node is not offered.
        """
        while True:
            targets = [
                target
                for target in await self._api.volume_targets(node)
                if (tag := target.owner_tag) is not None
                and (tag.instance, tag.database_id) == (instance, database_id)
                and tag.attempt <= attempt
            ]
            refusals = [refused for one in targets if (refused := await self._api.remove_volume_target(one.uuid))]
            if not refusals:
                return
            took = self._clock.monotonic() - started_at
            if took > self._config.clean_timeout_s:
                raise DriverUnavailable(f"node {node} keeps a volume target: {refusals[0]}")
            await self._clock.sleep(max(self._config.poll_interval_s, min(self._config.max_poll_interval_s, took)))

    async def _undeploy_step(self, node: IronicNode) -> Refused | None:
        """Undo the next step. A refusal decides nothing, because the node may be locked now; the next read shows its
        state.
        """
        if node.provision_state == "available":  # taken, and not deployed
            for vif in await self._api.vifs(node.uuid):
                await self._api.detach_vif(node.uuid, vif)
            return await self._api.patch(node.uuid, free_patch())
        if node.provision_state in DELETABLE:
            return await self._api.provision(node.uuid, "deleted")
        return None

    async def check(self, build: Build) -> None:
        """Raises Reschedule: moves of bare metal are not supported, because a node's disks are its own."""
        raise Reschedule("change.unsupported", "a bare-metal node takes over no machine of another one")

    async def change(self, change: ChangeOrder) -> ChangeResult:
        """Power, rebuild, rescue and back; of others the node is left as it is."""
        return await NodeChange(change, api=self._api, config=self._config, clock=self._clock).run()

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        """The instances on all nodes, in any provision state; the tag names its database and its attempt. A node on
        which a machine may run that neither Ironic nor a record names is left out.
        """
        wanted = None if hosts is None else frozenset(hosts)
        found = {
            node.uuid: self._machines_on(node) for node in await self._nodes() if wanted is None or node.uuid in wanted
        }
        return {uuid: machines for uuid, machines in found.items() if machines is not None}

    def _machines_on(self, node: IronicNode) -> Sequence[Machine] | None:
        if not node.is_partly_torn_down:
            return machines_of(node)
        tags = self._records.undeploying(node.uuid)
        return [Machine(node.uuid, instance, *tag, False, runs=node.runs) for instance, tag in tags.items()] or None

    def on_change(self, callback: Callable[[Sequence[str]], None]) -> None:
        """Nodes that came, or whose maintenance changed, as `watch` finds them."""
        self._changed = callback

    async def watch(self) -> None:
        """Look for nodes that have not been reported, until cancelled."""
        # ironic_sync reports a node to placement at once; no build goes there before its compute service has reported
        # it. A node that went is missing from the next whole report: ironic_sync has held it back, or removed it.
        while True:
            started_at, pause_s = self._clock.monotonic(), min(OUTAGE_RETRY_S, self._config.watch_interval_s)
            with contextlib.suppress(DriverUnavailable):  # the call that needs Ironic logs it
                await isolate_driver(self).look()
                pause_s = max(self._config.watch_interval_s, LOOK_SHARE * (self._clock.monotonic() - started_at))
            await self._pause(pause_s)

    async def look(self) -> None:
        """Report the nodes that came or changed since the last look. Raises DriverUnavailable."""
        nodes, recorded = await self._all_nodes(), self._holding()
        owned = [node for node in nodes if self._is_owned(node, recorded)]
        await self._canary_gate.note(node for node in owned if self._is_reported(node, recorded))
        offered = {host.uuid: host for node in owned if (host := self._host(node, recorded)).reported}
        known = self._reported or {}
        changed_nodes = [uuid for uuid, host in offered.items() if known.get(uuid) != host]
        self._reported = offered
        if changed_nodes and self._changed is not None:
            self._changed(changed_nodes)

    async def _pause(self, seconds: float) -> None:
        """Until then, or until the ring has moved nodes here."""
        if self.ring is None:
            await self._clock.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ring.changed.wait()
        self.ring.changed.clear()

    def _deployment(self, build: Build) -> NodeDeployment:
        if build.database_id is None:
            raise Reschedule("spawn.untagged", "the command names no database, so the node could not be given back")
        instance = build.spec.instance_uuid
        tag = OwnerTag(build.database_id, self._cell, self._service, instance, build.attempt)
        return NodeDeployment(
            build,
            tag,
            api=self._api,
            network=self._network,
            volumes=self._volumes,
            config=self._config,
            clock=self._clock,
        )

    async def _nodes(self) -> builtins.list[IronicNode]:
        """The nodes that this service reports, by uuid."""
        nodes, recorded = await self._all_nodes(), self._holding()
        return [node for node in nodes if self._is_owned(node, recorded) and self._is_reported(node, recorded)]

    async def _hosts(self) -> builtins.list[DriverHost]:
        nodes, recorded = await self._all_nodes(), self._holding()
        return [self._host(node, recorded) for node in nodes if self._is_owned(node, recorded)]

    def _holding(self) -> Collection[str]:
        return self._records.holding_hosts()

    def _host(self, node: IronicNode, recorded: Collection[str]) -> DriverHost:
        attributes = dict(ATTRIBUTES)
        if project := node.serves(self._config):
            attributes[PROJECT] = project
        if node.health == WARNING:
            attributes[HEALTH] = "warning"
        return DriverHost(
            uuid=node.uuid,
            name=node.uuid,
            enabled=not node.disabled_reason,
            disabled_reason=node.disabled_reason,
            attributes=attributes,
            reported=self._is_reported(node, recorded),
        )

    async def _all_nodes(self) -> builtins.list[IronicNode]:
        return sorted(await self._api.nodes(), key=lambda node: node.uuid)

    def _is_owned(self, node: IronicNode, recorded: Collection[str]) -> bool:
        """Whether this service, or one of its ring, reports the node. Shares decide about those without a tag.
        recorded: of nodes without a tag, those whose machine the cell has not ended.
        """
        # No other service's report that it is gone counts for certain: its reads are distinguished from the build by
        # clocks only.
        tag = node.owner_tag
        if tag is not None:
            return tag.cell == self._cell and tag.service in self._services
        if self._has_recorded_machine(node, recorded):
            return True
        config = self._config
        if config.conductor_group is not None and node.conductor_group.lower() != config.conductor_group.lower():
            return False
        if config.shards and node.shard not in config.shards:
            return False
        return zlib.crc32(node.uuid.encode()) % config.shares == config.share

    def _is_reported(self, node: IronicNode, recorded: Collection[str]) -> bool:
        """Of a node of this service, whether it reports it: the ring decides about nodes without a tag only."""
        if self.ring is None or node.owner_tag is not None or self._has_recorded_machine(node, recorded):
            return True
        return self.ring.owns(node.uuid)

    def _has_recorded_machine(self, node: IronicNode, recorded: Collection[str]) -> bool:
        if node.uuid in recorded:
            return True
        return node.instance is not None and self._records.is_live(node.uuid, node.instance)


def _may_undeploy(node: IronicNode, attempt: int, database_id: str | None) -> bool:
    """Whether this attempt or an earlier one has put the node's instance there. Raises NotOwned, MachineProtected."""
    tag = node.owner_tag
    if tag is None or tag.database_id != database_id:
        named = "no tag of berth" if tag is None else f"the tag of database {tag.database_id}"
        raise NotOwned(f"node {node.uuid} carries instance {node.instance} with {named}")
    if tag.attempt > attempt:
        return False
    if node.protected:
        reason = f" ({node.protected_reason})" if node.protected_reason else ""
        raise MachineProtected(f"node {node.uuid} is protected in Ironic{reason}: it is kept until that is unset")
    return True


def ring_name(config: IronicConfig) -> str:
    """The ring of all services that share these nodes: those of one cell whose settings mean the same ones."""
    if config.ring:
        return config.ring
    group = "any" if config.conductor_group is None else f"group {config.conductor_group.lower()}"
    nodes = f"{api_root(config.url)} {group} {sorted(config.shards)} {config.share}/{config.shares}"
    return f"ironic-{hashlib.sha256(nodes.encode()).hexdigest()[:16]}"


def make_network(config: IronicConfig, clock: Clock) -> Network:
    """The network that the settings name. Raises SettingsError: Neutron's login cannot be used."""
    if config.network == "neutron":
        return NeutronNetwork(config, clock=clock)
    return StaticNetwork(config.ports) if config.network == "static" else NoNetwork()


def make_volumes(config: IronicConfig) -> Volumes:
    """The volumes that the settings name."""
    return StaticVolumes() if config.volumes == "static" else NoVolumes()
