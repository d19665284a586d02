"""One change of a deployed node where it is: power, a rebuild from another image, its rescue system and back."""

# A loop as a deployment is: look at the node, do the next thing, look again. A request that a node gets twice is
# carried out once, except a rebuild whose service died between request and answer, and a reboot that it had begun: they
# are done again.

from __future__ import annotations

from msgspec import to_builtins
from msgspec.structs import replace

from bus.clock import Clock
from bus.contracts.actions import MACHINE_ABSENT, RESCUE_FAILED, UNSUPPORTED, ChangeKind
from compute_agent.driver import BuildAbort, ChangeFault, ChangeOrder, ChangeResult, DriverUnavailable, NotOwned
from compute_agent.drivers.ironic.api import IronicApi, Refused
from compute_agent.drivers.ironic.config import IronicConfig
from compute_agent.drivers.ironic.deployment import VALIDATED
from compute_agent.drivers.ironic.node import BUILT, DEPLOYING, OWNER_TAG, IronicNode, OwnerTag
from compute_agent.drivers.ironic.request import IMAGE_ENTRIES, config_drive, image_of, instance_info

POWER = {ChangeKind.START: "power on", ChangeKind.STOP: "power off"}
REBOOTS = {ChangeKind.REBOOT: "rebooting", ChangeKind.REBOOT_SOFT: "soft rebooting"}
RESCUES = frozenset({ChangeKind.RESCUE, ChangeKind.UNRESCUE})
CHANGES = frozenset({*POWER, *REBOOTS, *RESCUES, ChangeKind.REBUILD})
FAILED_RESCUE = frozenset({"rescue failed", "unrescue failed"})  # from these Ironic takes both
POLL_SHARE = 0.05  # of the time taken: a rebuild takes minutes


class NodeChange:
    """One change. `run` returns when the node is in the requested state."""

    def __init__(self, change: ChangeOrder, *, api: IronicApi, config: IronicConfig, clock: Clock) -> None:
        self._change = change
        self._api = api
        self._config = config
        self._clock = clock
        self._requested = False  # this run has requested it of the node, and Ironic has not refused

    async def run(self) -> ChangeResult:
        """Change it. Raises ChangeFault, NotOwned, or DriverUnavailable (only before anything was requested)."""
        if self._change.kind not in CHANGES:
            raise ChangeFault(UNSUPPORTED, f"bare metal has no {self._change.kind.value} here")
        started_at = self._clock.monotonic()
        while not await self._pass():
            took = self._clock.monotonic() - started_at
            pause = max(self._config.poll_interval_s, min(self._config.max_poll_interval_s, POLL_SHARE * took))
            await self._clock.sleep(pause)  # the change's own time bounds this
        return ChangeResult(runs=self._change.kind is not ChangeKind.STOP)

    async def _pass(self) -> bool:
        try:
            node = await self._api.node(self._change.host_uuid)
            tag = self._checked(node)
            assert node is not None
            if self._change.kind is ChangeKind.REBUILD:
                return await self._rebuild(node, tag)
            if self._change.kind in RESCUES:
                return await self._rescue(node)
            if (target := REBOOTS.get(self._change.kind)) is not None:
                return await self._power(node, "power on", target)
            return await self._power(node, POWER[self._change.kind])
        except DriverUnavailable:
            if not self._requested:
                raise
            return False

    def _checked(self, node: IronicNode | None) -> OwnerTag:
        """The tag of the machine that the change means."""
        if node is None or node.instance != self._change.spec.instance_uuid:
            raise ChangeFault(MACHINE_ABSENT, "the node does not carry this instance", runs=False)
        tag = node.owner_tag
        if tag is None or tag.database_id != self._change.database_id:
            named = "no tag of berth" if tag is None else f"the tag of database {tag.database_id}"
            raise NotOwned(f"node {node.uuid} carries instance {node.instance} with {named}")
        if tag.attempt != self._change.attempt:
            raise ChangeFault("machine.other", "another attempt's machine is here", runs=False)
        return tag

    async def _power(self, node: IronicNode, wanted: str, reboot: str | None = None) -> bool:
        """reboot: what is requested also of a node in the wanted state, once."""
        if node.provision_state not in BUILT:
            raise ChangeFault("node.not_active", f"the node is {node.condition}")
        if node.target_power_state is not None or (self._requested and node.reservation is not None):
            # On its way. Ironic holds the node's lock from its acceptance of an action to the end, and clears the error
            # of an earlier one only when it takes the action up. A reboot on its way is this one: the time of its
            # earlier command was over.
            self._requested |= reboot is not None and node.target_power_state == wanted
            return False
        has_failed = self._requested and bool(node.last_error)
        if node.power_state == wanted and (reboot is None or (self._requested and not has_failed)):
            return True
        if has_failed:
            raise ChangeFault("node.power_failed", f"the node is {node.condition}", runs=node.runs)
        target = reboot or wanted
        self._check_answer(await self._api.power(node.uuid, target), f"to {target}")
        return False

    async def _rescue(self, node: IronicNode) -> bool:
        """Into the rescue system, or out of it. Changes that an operator requested of Ironic count as well."""
        rescues = self._change.kind is ChangeKind.RESCUE
        state = node.provision_state
        if state == ("rescue" if rescues else "active"):
            return True
        if state in ({"rescuing", "rescue wait"} if rescues else {"unrescuing"}):
            self._requested = True
            return False
        if self._requested and state in {"rescue failed", "unrescue failed"}:
            raise ChangeFault(RESCUE_FAILED, f"the node is {node.condition}", runs=node.runs)
        if state not in ({"active", *FAILED_RESCUE} if rescues else {"rescue", *FAILED_RESCUE}):
            raise ChangeFault("node.not_active", f"the node is {node.condition}", runs=node.runs)
        more = {"rescue_password": self._change.rescue_password} if rescues else {}
        refused = await self._api.provision(node.uuid, self._change.kind.value, **more)
        if refused is not None and not refused.is_conflict:
            raise ChangeFault("node.refused", f"{refused} (to {self._change.kind.value})", runs=node.runs)
        self._requested = refused is None
        return False

    async def _rebuild(self, node: IronicNode, tag: OwnerTag) -> bool:
        started = tag.change_number == self._change.change_number
        if node.provision_state in DEPLOYING and started:
            self._requested = True
            return False
        if node.provision_state == "active" and started and self._requested:
            return True
        if node.provision_state not in {"active", "deploy failed", "error"}:
            raise ChangeFault("node.not_active", f"the node is {node.condition}")
        if self._requested and started:
            raise ChangeFault("node.rebuild_failed", f"the node is {node.condition}", runs=False)
        if not started:
            self._check_answer(await self._api.patch(node.uuid, self._image_patch(node, tag)), "to the new image")
            return False
        if self._config.validate and (refusals := await self._api.refusals(node.uuid, VALIDATED)):
            raise ChangeFault("node.invalid", "; ".join(refusals))
        drive = config_drive(self._change.spec, {})
        more = {} if drive is None else {"configdrive": drive}
        refused = await self._api.provision(node.uuid, "rebuild", **more)
        self._check_answer(refused, "to being rebuilt")
        self._requested = refused is None
        return False

    def _image_patch(self, node: IronicNode, tag: OwnerTag) -> list[dict[str, object]]:
        """The new image instead of the old one, and the change's number in the owner tag, all or none."""
        try:
            image = image_of(self._change.spec, self._config.images)
        except BuildAbort as fault:
            raise ChangeFault(fault.code, fault.reason) from fault
        wanted = {
            name: value for name, value in instance_info(self._change.spec, image).items() if name in IMAGE_ENTRIES
        }
        gone = [name for name in node.info_entries if name in IMAGE_ENTRIES and name not in wanted]
        return [
            # The tag first: when the node is not the instance's any more, this fails, and with it all of it.
            {
                "op": "replace",
                "path": OWNER_TAG,
                "value": to_builtins(replace(tag, change_number=self._change.change_number)),
            },
            *({"op": "remove", "path": f"/instance_info/{name}"} for name in gone),
            *({"op": "add", "path": f"/instance_info/{name}", "value": value} for name, value in wanted.items()),
        ]

    def _check_answer(self, refused: Refused | None, what: str) -> None:
        """A conflict (the node is locked) is seen at the next look."""
        if refused is None:
            self._requested = self._change.kind is not ChangeKind.REBUILD
        elif not refused.is_conflict:
            raise ChangeFault("node.refused", f"{refused} ({what})")
