"""Moves a second: live migrations of instances that a benchmark has booted, all at once or at a rate."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from berth.client import BuildClient
from berth.client.moves import MoveClient
from bus.clock import new_uuid
from bus.contracts.moves import MoveEvent, MoveKind, MoveRequest, MoveState

SLICE = 500  # requests published in one go
AGAIN_S = 0.25  # the queue of requests is full: what was refused is published again after so long
WAIT_S = 600.0


class MoveFigures(Struct, frozen=True, kw_only=True):
    """The results of the moves. latency_ms: from their publication to their end. codes: of those that were not done."""

    kind: str
    moves: int
    done: int
    moves_per_s: float
    latency_ms: dict[str, float]
    codes: dict[str, int] = {}


async def migrate_all(client: BuildClient, count: int, rng: random.Random, *, rate_per_s: float = 0.0) -> MoveFigures:
    """Live-migrate so many of the client's active builds, at this rate or (0) all at once."""
    active = [track for track in client.tracks.values() if track.state == "active"][:count]
    slice_ = max(1, round(rate_per_s * AGAIN_S)) if rate_per_s else SLICE
    following = MoveClient(client.bus, clock=client.clock, process=client.process)
    ended_s: dict[str, float] = {}
    requested_s: dict[str, float] = {}

    def receive(event: MoveEvent) -> None:
        if event.terminal:
            ended_s.setdefault(event.request_id, client.clock.monotonic())

    following.on_event(receive)
    await following.open()
    try:
        began_s = client.clock.monotonic()
        waiting = [
            MoveRequest(
                request_id=new_uuid(rng),
                instance_uuid=track.instance_uuid,
                project_id=track.project_id,
                kind=MoveKind.LIVE_MIGRATE,
            )
            for track in active
        ]
        while waiting:
            part = waiting[:slice_]
            now_s = client.clock.monotonic()
            for one in part:
                requested_s.setdefault(one.request_id, now_s)
            errors = await following.offer(part)
            refused = [one for one, error in zip(part, errors, strict=True) if error is not None]
            waiting = refused + waiting[slice_:]
            if refused or rate_per_s:
                await client.clock.sleep(AGAIN_S)
        await following.wait(WAIT_S)
    finally:
        await following.close()
    took_s = max(ended_s.values(), default=client.clock.monotonic()) - began_s
    ends = list(following.ended.values())
    latencies = sorted(1000 * (at - requested_s[one]) for one, at in ended_s.items())
    codes = Counter(end.code or end.state.value for end in ends if end.state is not MoveState.DONE)
    if following.unfinished:
        codes["not ended"] = following.unfinished
    return MoveFigures(
        kind=MoveKind.LIVE_MIGRATE.value,
        moves=len(active),
        done=sum(end.state is MoveState.DONE for end in ends),
        moves_per_s=round(len(ends) / took_s, 1) if took_s > 0 else 0.0,
        latency_ms=spread_of(latencies),
        codes=dict(codes),
    )


def spread_of(sorted_ms: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th hundredth and the longest; {} of nothing."""
    if not sorted_ms:
        return {}
    at = {"p95": 0.95, "p99": 0.99}
    found = {name: sorted_ms[min(len(sorted_ms) - 1, int(share * len(sorted_ms)))] for name, share in at.items()}
    return {
        "p50": round(statistics.median(sorted_ms), 1),
        **{name: round(value, 1) for name, value in found.items()},
        "max": round(sorted_ms[-1], 1),
    }
