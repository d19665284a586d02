"""Ironic's answers in the shapes of the recordings: REST representations and oslo.messaging notifications."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

TOPIC = "ironic_versioned_notifications"

# Fields of a node as its REST representation has them and no notification does.
REST_ONLY: Mapping[str, Any] = {
    "allocation_uuid": None,
    "automated_clean": None,
    "chassis_uuid": None,
    "conductor": "stand-in",
    "driver_info": {},
    "driver_internal_info": {},
    "firmware_interface": "fake",
    "health": None,
    "instance_info": {},
    "instance_name": None,
    "network_data": {},
    "parent_node": None,
    "raid_config": {},
    "reservation": None,
    "service_step": {},
    "shard": None,
    "target_raid_config": {},
}

# The 47 fields of NodePayload; every notification about a node has all of them.
NODE: Mapping[str, Any] = {
    "clean_step": {},
    "conductor_group": "",
    "console_enabled": False,
    "created_at": None,
    "deploy_step": {},
    "description": None,
    "disable_power_off": False,
    "driver": "fake-hardware",
    "extra": {},
    "boot_mode": None,
    "secure_boot": None,
    "inspection_finished_at": None,
    "inspection_started_at": None,
    "instance_uuid": None,
    "last_error": None,
    "maintenance": False,
    "maintenance_reason": None,
    "fault": None,
    "bios_interface": "fake",
    "boot_interface": "fake",
    "console_interface": "fake",
    "deploy_interface": "fake",
    "inspect_interface": "fake",
    "management_interface": "fake",
    "network_interface": "noop",
    "power_interface": "fake",
    "raid_interface": "fake",
    "rescue_interface": "fake",
    "storage_interface": "noop",
    "vendor_interface": "fake",
    "name": None,
    "owner": None,
    "lessee": None,
    "power_state": None,
    "properties": {},
    "protected": False,
    "protected_reason": None,
    "provision_state": "enroll",
    "provision_updated_at": None,
    "resource_class": None,
    "retired": False,
    "retired_reason": None,
    "target_power_state": None,
    "target_provision_state": None,
    "traits": [],
    "updated_at": None,
    "uuid": "",
}

# {action: (payload object, its version, its publisher, fields beside NODE's)}
_CRUD = ("NodeCRUDPayload", "1.15", "ironic-api", ("chassis_uuid", "instance_info", "driver_info"))
_SET = ("NodePayload", "1.17", "ironic-api", ())
PAYLOADS: Mapping[str, tuple[str, str, str, tuple[str, ...]]] = {
    "create": _CRUD,
    "update": _CRUD,
    "delete": _CRUD,
    "maintenance_set": _SET,
    "provision_set": (
        "NodeSetProvisionStatePayload",
        "1.18",
        "ironic-conductor",
        (
            "instance_info",
            "driver_internal_info",
            "event",
            "previous_provision_state",
            "previous_target_provision_state",
        ),
    ),
    "power_set": ("NodeSetPowerStatePayload", "1.17", "ironic-conductor", ("to_power",)),
    "power_state_corrected": ("NodeCorrectedPowerStatePayload", "1.17", "ironic-conductor", ("from_power",)),
}

CONTEXT: Mapping[str, Any] = {
    "_context_user": None,
    "_context_project_id": None,
    "_context_system_scope": None,
    "_context_project": None,
    "_context_domain": None,
    "_context_user_domain": None,
    "_context_project_domain": None,
    "_context_is_admin": False,
    "_context_read_only": False,
    "_context_show_deleted": False,
    "_context_auth_token": None,
    "_context_request_id": None,
    "_context_global_request_id": None,
    "_context_resource_uuid": None,
    "_context_roles": [],
    "_context_user_identity": "- - - - -",
    "_context_is_admin_project": True,
    "_context_auth_token_info": None,
}


def new_node(**fields: Any) -> dict[str, Any]:
    """A node with every field of its REST representation but the links."""
    return {**NODE, **REST_ONLY, **fields}


def represent(node: Mapping[str, Any], base_url: str, fields: tuple[str, ...] = ()) -> dict[str, Any]:
    """A node as the REST API answers it, all of it or some fields."""
    shown = {name: node[name] for name in fields if name in node} if fields else dict(node)
    if not fields or "links" in fields:
        shown["links"] = [{"href": f"{base_url}/v1/nodes/{node['uuid']}", "rel": "self"}]
    return shown


def notification(
    node: Mapping[str, Any],
    action: str,
    status: str,
    *,
    request_id: str,
    now: float,
    rng: random.Random,
    **extra: Any,
) -> tuple[str, bytes]:
    """Routing key and body of a notification about a node, just as Ironic makes it."""
    name, version, publisher, beside = PAYLOADS[action]
    values = {field: _whole_seconds(field, node[field]) for field in NODE}
    values.update({field: node.get(field) for field in beside})
    values.update(extra)
    inner = {
        "message_id": str(uuid.UUID(int=rng.getrandbits(128), version=4)),
        "publisher_id": f"{publisher}.stand-in",
        "event_type": f"baremetal.node.{action}.{status}",
        "priority": "ERROR" if status == "error" else "INFO",
        "payload": {
            "ironic_object.name": name,
            "ironic_object.namespace": "ironic",
            "ironic_object.version": version,
            "ironic_object.data": values,
        },
        "timestamp": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M:%S.%f"),
        "_unique_id": f"{rng.getrandbits(128):032x}",
        **CONTEXT,
        "_context_request_id": request_id,
    }
    body = json.dumps({"oslo.version": "2.0", "oslo.message": json.dumps(inner)}).encode()
    return f"{TOPIC}.{'error' if status == 'error' else 'info'}", body


def timestamp(now: float) -> str:
    """A time as the REST API writes it."""
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="microseconds")


def _whole_seconds(field: str, value: Any) -> Any:
    """Notifications carry whole seconds where the REST API has microseconds."""
    return f"{value[:19]}Z" if field.endswith("_at") and isinstance(value, str) else value
