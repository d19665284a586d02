"""Nodes that have failed, and must prove themselves on a canary build before customers get them again."""

# A failure that a look finds is written on the node (`extra`), where it outlives this service and the repair. Until a
# build of the canary project has become active there, the node takes builds of that project only.

from __future__ import annotations

from collections.abc import Iterable

import structlog
from msgspec import to_builtins

from bus.clock import Clock
from compute_agent.drivers.ironic.api import IronicApi
from compute_agent.drivers.ironic.node import UNPROVEN, IronicNode, Unproven

log = structlog.get_logger(__name__)

MAX_WRITTEN = 50  # in one look; the rest with the next one
# Of hardware, or of an operator's own steps. A failed deployment or rescue is none: a customer's image can cause it,
# and any customer could have every node put aside.
FAILED_STATES = frozenset({"clean failed", "inspect failed", "adopt failed", "service failed", "error"})
CRITICAL, WARNING = "Critical", "Warning"  # Ironic's words


def failure_of(node: IronicNode) -> str:
    """The fault of the node whose repair is on trial, in Ironic's words; empty: nothing."""
    if node.health == CRITICAL:
        return "health is Critical"
    if node.fault:
        return f"fault: {node.fault}"
    return f"the node was {node.condition}" if node.provision_state in FAILED_STATES else ""


class CanaryGate:
    """Writes failures on nodes, and takes them away. project: the canary's; empty: nothing is written."""

    def __init__(self, api: IronicApi, *, project: str, clock: Clock) -> None:
        self._api = api
        self._project = project
        self._clock = clock

    async def note(self, nodes: Iterable[IronicNode]) -> None:
        """Write on those that carry no instance that they have failed, where they have."""
        # A node that is locked is tried at the next look.
        if not self._project:
            return
        free = (node for node in nodes if node.instance is None and node.owner_tag is None and node.unproven is None)
        failed = [(node, reason) for node in free if (reason := failure_of(node))]
        for node, reason in failed[:MAX_WRITTEN]:
            entry = to_builtins(Unproven(since=self._clock.time(), reason=reason[:500]))
            refused = await self._api.patch(node.uuid, [{"op": "add", "path": UNPROVEN, "value": entry}])
            log.warning("ironic.node_unproven", node=node.uuid, reason=reason, refused=str(refused or ""))

    async def proved(self, uuid: str, project: str) -> None:
        """A build of this project has become active on the node."""
        if not self._project or project != self._project:
            return
        node = await self._api.node(uuid)
        if node is None or node.unproven is None or failure_of(node):
            return
        refused = await self._api.patch(uuid, [{"op": "remove", "path": UNPROVEN}])
        log.info("ironic.node_proved", node=uuid, refused=str(refused or ""))
