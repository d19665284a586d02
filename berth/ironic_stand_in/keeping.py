"""Keeps the stand-in's nodes in a file, so that they outlive its process as real nodes would."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from berth.ironic_stand_in import shapes
from berth.ironic_stand_in.farm import Farm
from bus.clock import Clock

log = structlog.get_logger(__name__)

# What a killed process may forget of its last moments.
SAVE_EVERY_S = 0.2

# Whoever held a node is gone: what it was on its way to is given up, or done, as a restarted Ironic conductor would.
SETTLED: Mapping[str, str] = {
    "verifying": "enroll",
    "deploying": "deploy failed",
    "wait call-back": "deploy failed",
    "deleting": "available",
    "cleaning": "available",
}


def load(farm: Farm, path: Path) -> bool:
    """Put the nodes of a file into an empty farm, each at rest. False: there is no such file, or it is not one."""
    try:
        nodes = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        for node in nodes:
            farm.add(**settled(node))
    except FileNotFoundError:
        return False
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        log.warning("ironic.nodes_unreadable", path=str(path), reason=str(error))
        farm.nodes.clear()
        return False
    return True


def settled(node: Mapping[str, Any]) -> dict[str, Any]:
    """A node as it is found after its Ironic was gone."""
    state = node["provision_state"]
    rested = {**node, "reservation": None, "provision_state": SETTLED.get(state, state)}
    if rested["provision_state"] != state:
        rested["target_provision_state"] = None
    if state in {"deleting", "cleaning"}:
        rested |= {"instance_uuid": None, "instance_info": {}, "power_state": "power off", "last_error": None}
    return {name: value for name, value in rested.items() if name in shapes.NODE or name in shapes.REST_ONLY}


async def keep(farm: Farm, path: Path, clock: Clock) -> None:
    """Save whenever something has changed, until cancelled; a write that is under way then ends first."""
    saved, told = -1, False
    while True:
        if farm.version != saved:
            version = farm.version
            writing = asyncio.ensure_future(asyncio.to_thread(_write, path, msgspec.json.encode(_nodes(farm))))
            try:
                await asyncio.shield(writing)
                saved, told = version, False
            except asyncio.CancelledError:
                await asyncio.wait({writing})  # another one beside it would lose to it
                raise
            except OSError as error:  # a full disk may have room again
                if not told:
                    _tell(path, error)
                told = True
        await clock.sleep(SAVE_EVERY_S)


def save(farm: Farm, path: Path) -> None:
    """Save now, if that can be."""
    try:
        _write(path, msgspec.json.encode(_nodes(farm)))
    except OSError as error:
        _tell(path, error)


def _nodes(farm: Farm) -> list[dict[str, Any]]:
    return list(farm.nodes.values())


def _tell(path: Path, error: OSError) -> None:
    log.error("ironic.nodes_not_kept", path=str(path), reason=str(error))


def _write(path: Path, body: bytes) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_bytes(body)
    os.replace(beside, path)
