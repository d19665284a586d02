"""Keeps the stand-in's nodes in a file, so that they outlive its process as real nodes would."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from bus.clock import Clock
from bus.contracts.base import reason_of
from compute_sim.ironic_stand_in import shapes
from compute_sim.ironic_stand_in.node_pool import NodePool

log = structlog.get_logger(__name__)

# The last moments of a killed process that may be lost.
SAVE_EVERY_S = 0.2

# The conductor that held a node is gone: the action under way is given up, or done, as a restarted Ironic conductor
# would.
SETTLED: Mapping[str, str] = {
    "verifying": "enroll",
    "deploying": "deploy failed",
    "wait call-back": "deploy failed",
    "deleting": "available",
    "cleaning": "available",
}


def load(pool: NodePool, path: Path) -> bool:
    """Put the nodes of a file into an empty pool, each at rest. False: there is no such file, or it is not one."""
    try:
        nodes = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        for node in nodes:
            pool.add(**settled(node))
    except FileNotFoundError:
        return False
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        log.warning("ironic.nodes_unreadable", path=str(path), reason=reason_of(error))
        pool.nodes.clear()
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


async def save_changes(pool: NodePool, path: Path, clock: Clock) -> None:
    """Save whenever something has changed, until cancelled; a write that is under way then ends first."""
    saved, is_logged = -1, False
    while True:
        if pool.version != saved:
            version = pool.version
            writing = asyncio.ensure_future(asyncio.to_thread(_write, path, msgspec.json.encode(_nodes(pool))))
            try:
                await asyncio.shield(writing)
                saved, is_logged = version, False
            except asyncio.CancelledError:
                await asyncio.wait({writing})  # another one beside it would lose to it
                raise
            except OSError as error:  # a full disk may have room again
                if not is_logged:
                    _log_damage(path, error)
                is_logged = True
        await clock.sleep(SAVE_EVERY_S)


def save(pool: NodePool, path: Path) -> None:
    """Save now, if that can be."""
    try:
        _write(path, msgspec.json.encode(_nodes(pool)))
    except OSError as error:
        _log_damage(path, error)


def _nodes(pool: NodePool) -> list[dict[str, Any]]:
    return list(pool.nodes.values())


def _log_damage(path: Path, error: OSError) -> None:
    log.error("ironic.nodes_not_saved", path=str(path), reason=str(error))


def _write(path: Path, body: bytes) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_bytes(body)
    os.replace(beside, path)
