"""One attempt to deploy one instance on one node, as a loop: read the node, take the next step, and read it again."""

# Every pass starts from Ironic's present state, so that an attempt that was interrupted, or whose request's answer was
# lost, continues from there. Nova's order: take the node, attach its networks, validate, deploy with a config drive.

from __future__ import annotations

import asyncio
import zlib

import structlog

from bus.clock import Clock
from bus.contracts.base import MAX_REASON
from bus.contracts.waiting_builds import WaitingBuild
from bus.retrying import doubled_s
from compute_agent.driver import Build, BuildAbort, BuildFault, DriverBusy, DriverOutage, DriverUnavailable, Reschedule
from compute_agent.drivers.ironic.api import IronicApi, Refused
from compute_agent.drivers.ironic.config import IronicConfig
from compute_agent.drivers.ironic.network import Attachments, Network
from compute_agent.drivers.ironic.node import BUILT, DEPLOYING, IronicNode, OwnerTag
from compute_agent.drivers.ironic.request import config_drive, image_of, is_of_request, take_patch
from compute_agent.drivers.ironic.volume import WITHOUT_VOLUMES, Volumes, target_body

log = structlog.get_logger()

# The service whose answer decides, as in Nova; the others (console, inspect, rescue ...) have nothing to do with a
# deployment.
VALIDATED = ["boot", "deploy", "network", "power", "storage"]
# A poll waits this part of the time that the deployment has taken: a deployment of minutes is not polled twice a
# second.
POLL_SHARE = 0.05
NOT_FOUND = 404
CLOCKS_APART_S = 30.0  # Ironic's clock and this one
# This many refusals in a row are one lock that lasts. Under load two looks are seconds apart, and two short locks, as
# of a power sync, would count as one.
LOCK_TRIES = 8


class NodeDeployment:
    """One attempt. `run` returns when the node is active with this instance."""

    def __init__(
        self,
        build: Build,
        tag: OwnerTag,
        *,
        api: IronicApi,
        network: Network,
        volumes: Volumes,
        config: IronicConfig,
        clock: Clock,
    ):
        self._build = build
        self._owner_tag = tag
        self._api = api
        self._network = network
        self._volumes = volumes
        self._config = config
        self._clock = clock
        self._image = image_of(build.spec, config.images)
        self._began = clock.monotonic()
        self._began_at = clock.time()
        self._taken = False  # we have requested the node: it may be this instance's though no answer confirms it
        self._locked_since: float | None = None
        self._locked_answers = 0  # in a row
        self._busy_since: float | None = None  # Ironic has turned everything down since
        self._fault = ""  # why it was last turned down, or not answered
        self._outage_since: float | None = None  # Ironic has been away since
        self._outage_s = 0.0  # how long it was away before, all in all
        self._outage_reason = ""
        self._busy_answers = 0  # in a row, and failed requests
        self._retry_after_s = 0.0
        self._port_fault_since: float | None = None  # Ironic has failed to attach a port since
        self._validated = False
        self._attachments: Attachments | None = None

    async def run(self) -> str:
        """Deploy; a warning about outages of Ironic that were waited for ("": none). Raises Reschedule, BuildAbort, or
        DriverUnavailable (only before anything was requested).
        """
        # A busy Ironic is waited for, for `lock_timeout_s`, and one that is away for `outage_timeout_s`.
        try:
            async with asyncio.timeout(self._config.deploy_timeout_s):
                while not await self._pass():
                    await self._clock.sleep(self._pause())
        except TimeoutError:
            seconds = f"{self._config.deploy_timeout_s:g} s"
            raise Reschedule("node.deploy_timeout", f"the node is not active after {seconds}") from None
        return self._outage()

    def waiting(self) -> WaitingBuild | None:
        """That it waits for Ironic now, and why; None: the last look was answered."""
        since = self._busy_since if self._outage_since is None else self._outage_since
        if since is None or not self._fault:
            return None
        ago = self._clock.monotonic() - since
        return WaitingBuild(
            instance_uuid=self._owner_tag.instance,
            attempt=self._owner_tag.attempt,
            since=self._clock.time() - ago,
            reason=f"waits for Ironic: {self._fault}"[:MAX_REASON],
        )

    def _pause(self) -> float:
        """Until the next look; after refusals longer and longer, and not in step with other deployments."""
        config = self._config
        took = self._clock.monotonic() - self._began
        pause = max(config.poll_interval_s, min(config.max_poll_interval_s, POLL_SHARE * took))
        if not self._busy_answers:
            return pause
        doubled = doubled_s(pause, config.max_poll_interval_s, self._busy_answers)
        drawn = zlib.crc32(f"{self._owner_tag.instance} {self._busy_answers}".encode()) / 2**32
        return max(doubled * (1 + drawn) / 2, min(self._retry_after_s, config.max_poll_interval_s))

    async def _pass(self) -> bool:
        """Look, and do the next thing; True when the node is active."""
        try:
            node = await self._api.node(self._build.host_uuid)
            if node is None:
                raise Reschedule("host.unknown", "Ironic has no such node")
            answers = self._busy_answers
            is_active = await self._next(node)
            self._end_outage()
            if answers == self._busy_answers:  # nothing was turned down
                self._busy_answers, self._busy_since, self._fault = 0, None, ""
            return is_active
        except DriverUnavailable as fault:
            self._fault = str(fault)
            # A deployment takes minutes. While Ironic is unavailable for a moment the node deploys on.
            if isinstance(fault, DriverBusy):
                self._end_outage()
                self._turned_down(fault.retry_after_s)
            elif isinstance(fault, DriverOutage):
                self._begin_outage(str(fault))
            if not self._taken and not self._waits_for(fault):
                warning = self._outage()
                raise DriverUnavailable(f"{fault}; {warning}" if warning else str(fault)) from fault
            log.warning(
                "ironic.unavailable", instance=self._owner_tag.instance, node=self._build.host_uuid, reason=str(fault)
            )
            return False

    def _turned_down(self, retry_after_s: float = 0.0) -> None:
        self._busy_answers += 1
        self._retry_after_s = retry_after_s
        if self._busy_since is None:
            self._busy_since = self._clock.monotonic()

    def _begin_outage(self, reason: str) -> None:
        self._busy_answers += 1
        self._retry_after_s = 0.0
        self._outage_reason = reason
        if self._outage_since is None:
            self._outage_since = self._clock.monotonic()

    def _end_outage(self) -> None:
        if self._outage_since is not None:
            self._outage_s += self._clock.monotonic() - self._outage_since
            self._outage_since = None

    def _outage(self) -> str:
        """How long Ironic was away while this build waited for it, and by which fault; empty: it was not."""
        since = self._outage_since
        seconds = self._outage_s + (0.0 if since is None else self._clock.monotonic() - since)
        return f"waited {seconds:.1f} s for Ironic ({self._outage_reason})" if self._outage_reason else ""

    def _waits_for(self, fault: DriverUnavailable) -> bool:
        """Whether this build continues to wait: another node would have to be requested of the same Ironic."""
        if isinstance(fault, DriverBusy):
            since, limit_s = self._busy_since, self._config.lock_timeout_s
        else:
            since, limit_s = self._outage_since, self._config.outage_timeout_s
        is_early = since is not None and self._clock.monotonic() - since < limit_s
        return isinstance(fault, DriverBusy | DriverOutage) and is_early

    async def _next(self, node: IronicNode) -> bool:
        if node.instance is None:
            self._check_free(node)
            check_served(node)
            await self._take()
            return False
        if not is_of_attempt(node, self._owner_tag):
            raise Reschedule("node.taken", "the node carries an instance that this build did not put there")
        self._taken = True
        if node.provision_state in BUILT:
            return True
        if node.provision_state == "available":
            self._check_free(node)
            check_served(node)
            await self._deploy(node)
        elif node.provision_state not in DEPLOYING:
            history = await self._api.failures(node.uuid, self._began_at - CLOCKS_APART_S)
            appended = f"; its history: {'; '.join(history)}" if history else ""
            raise self._failed("node.deploy_failed", f"the node is {node.condition}{appended}")
        return False

    def _check_free(self, node: IronicNode) -> None:
        """Whether the node can take this build now: placement may be behind."""
        if node.maintenance:
            raise Reschedule("node.maintenance", "the node is in maintenance")
        if node.retired:
            raise Reschedule("node.retired", "the node is retired")
        serves = node.serves(self._config)
        if serves not in ("", self._build.spec.project_id):
            if node.unproven is not None and serves == self._config.canary_project:
                raise Reschedule("node.unproven", f"the node has failed and is not tried yet: {node.unproven.reason}")
            raise Reschedule("node.other_project", f"the node serves builds of project {serves} alone")
        if node.health == "Critical":
            raise Reschedule("node.unhealthy", "Ironic reports the node's health as Critical")
        if node.provision_state != "available":
            raise Reschedule("node.not_available", f"the node is {node.condition}")

    async def _take(self) -> None:
        """Write the instance and berth's tag on the node. Ironic answers 409 when that is not possible now."""
        self._taken = True
        refused = await self._api.patch(
            self._build.host_uuid, take_patch(self._build.spec, self._owner_tag, self._image)
        )
        if refused is None:
            self._locked_since, self._locked_answers = None, 0
        elif refused.is_conflict:
            await self._conflict(refused)
        else:
            await self._check_served_still()
            raise self._failed("node.refused", f"{refused} (to taking the node)")

    async def _conflict(self, refused: Refused) -> None:
        """The node is another's or locked, or another node carries this instance. Returns when waiting may help."""
        # An earlier attempt that failed has its node until that is undeployed: Ironic lets one node carry an instance.
        if self._locked_since is None:
            self._locked_since = self._clock.monotonic()
        waited = self._clock.monotonic() - self._locked_since
        self._locked_answers += 1
        holder = await self._api.holder(self._owner_tag.instance)
        if holder is not None and holder.uuid != self._build.host_uuid:
            tag = holder.owner_tag
            if tag is None or tag.database_id != self._owner_tag.database_id or tag.attempt >= self._owner_tag.attempt:
                raise BuildAbort(
                    "instance.elsewhere", f"node {holder.uuid} carries this instance, and not as this database's"
                )
            if waited > self._config.release_timeout_s:
                left = f"node {holder.uuid} of attempt {tag.attempt} has not let go of the instance"
                raise BuildAbort("node.not_released", f"{left}: it is {holder.condition}")
        elif holder is None:
            if waited > self._config.lock_timeout_s and self._locked_answers >= LOCK_TRIES:
                raise Reschedule("node.locked", f"{refused} (to taking the node)")
            self._turned_down()

    async def _deploy(self, node: IronicNode) -> None:
        """Attach the networks, call Ironic's validation, and command the deployment. A conflict (the node is locked) is
        found by the next read.
        """
        spec = self._build.spec
        if self._attachments is None:
            self._attachments = await self._network.prepare(node.uuid, spec)
        attached = await self._api.vifs(node.uuid) if self._attachments.vifs else []
        for vif in self._attachments.vifs:
            if vif in attached:
                continue
            refused = await self._attach(node, vif)
            if refused is not None and refused.is_conflict:
                return
            if refused is not None:
                await self._check_served_still()
                reason = f"{refused} (to attaching port {vif})"
                if refused.status == NOT_FOUND:  # the node was there at the last look
                    raise BuildAbort("network.refused", reason)
                raise Reschedule("node.network", reason)
        if not await self._attach_volumes(node):
            return
        if self._config.validate and not self._validated:
            if refusals := await self._api.refusals(node.uuid, VALIDATED):
                raise self._failed("node.invalid", "; ".join(refusals))
            self._validated = True
        drive = config_drive(spec, self._attachments.network_data)
        more = {} if drive is None else {"configdrive": drive}
        refused = await self._api.provision(node.uuid, "active", **more)
        if refused is not None and not refused.is_conflict:
            await self._check_served_still()
            raise self._failed("node.refused", f"{refused} (to deploying the node)")
        if refused is not None:
            self._turned_down()

    async def _attach(self, node: IronicNode, vif: str) -> Refused | None:
        """Attach a port. Of one that Neutron does not have Ironic may report a fault of its own, while it answers all
        else. Raises BuildAbort: so it was for `outage_timeout_s`, and each other node would be asked the same.
        """
        try:
            refused = await self._api.attach_vif(node.uuid, vif)
        except DriverOutage as fault:
            now = self._clock.monotonic()
            if self._port_fault_since is None:
                self._port_fault_since = now
            if now - self._port_fault_since < self._config.outage_timeout_s:
                raise
            raise BuildAbort("network.refused", f"{fault} (to attaching port {vif})") from fault
        self._port_fault_since = None
        return refused

    async def _attach_volumes(self, node: IronicNode) -> bool:
        """Make the instance's volumes targets of the node; False: look again."""
        # The remains of another instance of this database are removed first: it would be attached to this one.
        wanted = await self._volumes.prepare(node.uuid, self._build.spec)
        if node.storage_interface in WITHOUT_VOLUMES:
            if wanted:
                storage = f"the node's storage interface is {node.storage_interface}"
                raise Reschedule("node.no_volumes", f"{storage}: it attaches no volumes")
            return True
        made: set[str] = set()
        for target in await self._api.volume_targets(node.uuid):
            if target.owner_tag is None or target.owner_tag.database_id != self._owner_tag.database_id:
                continue
            if target.owner_tag.instance == self._owner_tag.instance:
                made.add(target.volume_id)
            elif await self._api.remove_volume_target(target.uuid) is not None:
                self._turned_down()
                return False
        for volume in wanted:
            if volume.volume_id in made:
                continue
            refused = await self._api.add_volume_target(target_body(node.uuid, volume, self._owner_tag))
            if refused is not None:
                await self._check_served_still()
                raise Reschedule("node.volume", f"{refused} (to attaching volume {volume.volume_id})")
        return True

    def _failed(self, code: str, words: str) -> BuildFault:
        """The end of the attempt after Ironic's refusal; no other node is tried for one of the request."""
        return (BuildAbort if is_of_request(words, self._image) else Reschedule)(code, words)

    async def _check_served_still(self) -> None:
        """A refusal is not the node's fault when its conductor has just gone. Raises DriverOutage."""
        node = await self._api.node(self._build.host_uuid)
        if node is not None:
            check_served(node)


def check_served(node: IronicNode) -> None:
    """Raises DriverOutage: Ironic has no conductor for the node now, and would refuse whatever is requested of it."""
    if node.is_orphaned:
        raise DriverOutage("no conductor of Ironic serves the node")


def is_of_attempt(node: IronicNode, tag: OwnerTag) -> bool:
    """Whether the node carries this very attempt, by its tag."""
    found = node.owner_tag
    return (
        found is not None
        and node.instance == tag.instance
        and (found.database_id, found.attempt) == (tag.database_id, tag.attempt)
    )
