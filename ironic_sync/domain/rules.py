"""Nova's rules for the inventory of a node (virt/ironic/driver.py of Nova 34), and berth's rules where they differ.

The differences, each on purpose, are listed in docs/operate/bare-metal.md.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.placement import Inventory, ProviderReport
from ironic_sync.domain.node import Node

CUSTOM: Final = "CUSTOM_"
MAX_CLASS: Final = 255

# States a node can stay in for ever. In any other one something is under way whose end may never be announced.
STABLE_STATES: Final = frozenset(
    {
        "enroll",
        "manageable",
        "available",
        "active",
        "error",
        "rescue",
        "clean failed",
        "deploy failed",
        "inspect failed",
        "adopt failed",
        "rescue failed",
        "unrescue failed",
        "service failed",
    }
)

FREE_STATES: Final = ("available", None)
DEAD_POWER: Final = ("error", None)

_NOT_A_CLASS_CHARACTER = re.compile(r"[^0-9A-Za-z]+")


class Placed(Struct, frozen=True, kw_only=True):
    """The inventory that placement should hold for a node, and the node's fault, if any (a stable code)."""

    report: ProviderReport
    problem: str = ""


NO_CLASS: Final = "node.no_resource_class"
ABSENT: Final = "node.absent"


def is_unavailable(node: Node) -> bool:
    """Whether the node takes no instance, whatever its use (unknown states count as unavailable). A child node (a DPU
    in its parent) takes none: Ironic lists none, so no compute service has it.
    """
    is_broken = bool(node.maintenance) or node.power_state in DEAD_POWER
    return is_broken or node.parent_node is not None or node.provision_state not in FREE_STATES


def is_reserved(node: Node) -> bool:
    """Whether the node's one unit is held back: unavailable, or in use until it is *seen* free again."""
    return is_unavailable(node) or node.instance_uuid is not None


def is_transient(provision_state: str | None) -> bool:
    """Whether the node is on its way to another state, so that it must be read again."""
    return provision_state is not None and provision_state not in STABLE_STATES


def class_name(resource_class: str) -> str | None:
    """The custom class for a node's resource_class, or None when no name is left of it.

    As Nova does, except that a name which already carries the prefix keeps it once: the flavor of an operator who
    calls a node's class CUSTOM_GOLD means CUSTOM_GOLD, not for CUSTOM_CUSTOM_GOLD.
    """
    name = _NOT_A_CLASS_CHARACTER.sub("_", resource_class).upper()
    if not name.strip("_"):
        return None
    name = name if name.startswith(CUSTOM) and name != CUSTOM else CUSTOM + name
    return name if len(name) <= MAX_CLASS else None


def place(node: Node, last: ProviderReport | None) -> Placed:
    """The inventory that placement should hold for this node, given the last report (None: never)."""
    name = class_name(node.resource_class) if node.resource_class else None
    if name is None:
        return Placed(report=_without_class(node, last), problem=NO_CLASS)
    unit = Inventory(
        total=1, reserved=int(is_reserved(node)), min_unit=1, max_unit=1, step_size=1, allocation_ratio=1.0
    )
    return Placed(report=ProviderReport(uuid=node.uuid, name=node.uuid, inventories={name: unit}, traits=_traits(node)))


def reserve_all(last: ProviderReport) -> ProviderReport:
    """Return the same provider with all of its inventory reserved; the same object when nothing was offered."""
    if all(inventory.reserved >= inventory.total for inventory in last.inventories.values()):
        return last
    held = {name: replace(inventory, reserved=inventory.total) for name, inventory in last.inventories.items()}
    return replace(last, inventories=held)


def frees_more(new: ProviderReport, last: ProviderReport | None) -> bool:
    """Whether the new report offers something that the last one did not offer."""
    offered = {name for name, inventory in new.inventories.items() if inventory.reserved < inventory.total}
    if last is None:
        return bool(offered)
    return any(
        name not in last.inventories or last.inventories[name].reserved >= last.inventories[name].total
        for name in offered
    )


def _without_class(node: Node, last: ProviderReport | None) -> ProviderReport:
    """As Nova leaves it: the provider as it was, or made empty. But what cannot be used is never left on offer."""
    if last is None:
        return ProviderReport(uuid=node.uuid, name=node.uuid, traits=_traits(node))
    return reserve_all(last) if is_reserved(node) else last


def _traits(node: Node) -> tuple[str, ...]:
    """The node's own traits in one order, so that equal sets are equal reports."""
    return tuple(sorted(set(node.traits)))
