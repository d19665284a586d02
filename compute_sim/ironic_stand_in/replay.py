"""A recorded run of a real Ironic, replayed: its notifications in order, its nodes as they were at each step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from compute_sim.ironic_stand_in.announcer import NotificationAnnouncer
from compute_sim.ironic_stand_in.node_pool import NodePool

UNCHANGED = "unchanged"


async def replay(recording: Path, pool: NodePool, announcer: NotificationAnnouncer) -> AsyncIterator[str]:
    """Go through `<name>.jsonl` and its `<name>.nodes.json`; yields each step's name once it was published.

    The pool answers with the recorded nodes beside its own. Times between messages are not kept: a consumer that
    is right at full speed is right at any.
    """
    lines, steps = await asyncio.to_thread(_load, recording)
    for step in steps:
        _show(pool, step["nodes"])
        at = datetime.fromisoformat(step["at"]).timestamp()
        while lines and lines[0]["received"] <= at:
            line = lines.pop(0)
            await announcer.publish(line["routing_key"], json.dumps(line["body"]).encode())
        yield step["step"]


def _load(recording: Path) -> tuple[list[Any], list[Any]]:
    lines = [json.loads(line) for line in recording.read_bytes().splitlines()]
    return lines, msgspec.json.decode(recording.with_suffix(".nodes.json").read_bytes())


def _show(pool: NodePool, nodes: dict[str, Any]) -> None:
    for uuid, node in nodes.items():
        if node is None:
            pool.nodes.pop(uuid, None)
        elif node != UNCHANGED:
            pool.nodes[uuid] = node
