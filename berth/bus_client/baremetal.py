"""An operator's view of bare metal: which nodes there are, which serve nothing, and why. Plain functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from bus.contracts.objects import Flavor, StoredObject
from compute_agent.drivers.ironic.canary import CRITICAL
from compute_agent.drivers.ironic.node import NodeExtra, OwnerTag, Unproven
from ironic_sync.domain.node import Node, Unreadable, parse_node
from ironic_sync.domain.rules import DEAD_POWER, FREE_STATES, class_name

RESOURCE = "resources:"
# Maintenance that berth sets begins its reason so: only that is taken away again.
QUARANTINE = "berth quarantine: "


class NodeRecord(Struct, frozen=True, kw_only=True):
    """A node of Ironic's as commands show it. serves: flavors that request its class. ironic_reason: Ironic's text."""

    uuid: str
    name: str
    resource_class: str
    state: str
    power: str
    instance: str
    own: bool
    serves: tuple[str, ...]
    problems: tuple[str, ...]
    ironic_reason: str


def flavor_classes(flavors: Iterable[StoredObject]) -> dict[str, tuple[str, ...]]:
    """{custom resource class: names of the flavors on record that request it}."""
    found: dict[str, list[str]] = {}
    for stored in flavors:
        for key, amount in msgspec.convert(stored.body, Flavor).extra_specs.items():
            if key.startswith(RESOURCE) and amount != "0":
                found.setdefault(key[len(RESOURCE) :], []).append(stored.name)
    return {resource_class: tuple(names) for resource_class, names in found.items()}


def unserved(classes: Mapping[str, tuple[str, ...]], nodes: Iterable[NodeRecord]) -> tuple[str, ...]:
    """Flavors that request a custom class that no node has."""
    there = {class_name(node.resource_class) for node in nodes if node.resource_class}
    missing = {name for custom, names in classes.items() if custom.startswith("CUSTOM_") for name in names}
    served = {name for custom, names in classes.items() if custom in there for name in names}
    return tuple(sorted(missing - served))


def node_record(raw: Mapping[str, Any], classes: Mapping[str, tuple[str, ...]]) -> NodeRecord:
    """The known state of a node, by all of its fields as Ironic answers them."""
    node = parse_node(dict(raw))
    custom = class_name(str(raw.get("resource_class") or "")) or ""
    return NodeRecord(
        uuid=str(raw.get("uuid") or ""),
        name=str(raw.get("name") or ""),
        resource_class=str(raw.get("resource_class") or ""),
        state=str(raw.get("provision_state") or "unknown"),
        power=str(raw.get("power_state") or "unknown"),
        instance=str(raw.get("instance_uuid") or ""),
        own=_has_owner_tag(raw.get("instance_info")),
        serves=classes.get(custom, ()),
        problems=tuple(_problems(raw, node, custom, classes)),
        ironic_reason=" ".join(str(raw.get("last_error") or raw.get("maintenance_reason") or "").split()),
    )


def _problems(
    raw: Mapping[str, Any], node: Node | Unreadable, custom: str, classes: Mapping[str, tuple[str, ...]]
) -> Iterable[str]:
    """Why no build can go there, each a sentence; none for a node that is free, or in use as it should be."""
    if isinstance(node, Unreadable):
        yield f"Ironic's answer about it is not understood: {node.reason}"
        return
    if not custom:
        yield "it has no resource class"
    elif custom not in classes:
        yield f"no flavor requests {custom}"
    if node.maintenance:
        reason = str(raw.get("maintenance_reason") or "no reason given")
        yield f"it is in maintenance: {reason}"
    if raw.get("fault"):
        yield f"Ironic found a fault: {raw['fault']}"
    if raw.get("health") == CRITICAL:
        yield "Ironic reports its health as Critical"
    if (unproven := _unproven(raw.get("extra"))) is not None:
        yield f"it takes only a canary's build, until one is active: {unproven.reason}"
    if raw.get("retired"):
        yield f"it is retired: {raw.get('retired_reason') or 'no reason given'}"
    if node.instance_uuid is None and node.power_state in DEAD_POWER:
        yield "its power state is not known"
    if node.provision_state not in FREE_STATES and str(node.provision_state).endswith(("failed", "error")):
        yield f"it is in {node.provision_state}"
    if node.instance_uuid is not None and node.provision_state == "available":
        yield "it carries an instance and is not deployed"


def _unproven(extra: object) -> Unproven | None:
    try:
        return msgspec.convert(extra, NodeExtra).berth_unproven
    except msgspec.ValidationError:
        return None


def _has_owner_tag(info: object) -> bool:
    try:
        msgspec.convert(info.get("berth") if isinstance(info, dict) else None, OwnerTag)
    except msgspec.ValidationError:
        return False
    return True
