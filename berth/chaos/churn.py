"""The load of a chaos run: so many builds in flight, some deleted while they are built, the rest when there are many.

A publish that was not confirmed is repeated until it is, as any careful client would; only confirmed requests count
as accepted. Everything is known from the event stream of a durable queue alone.
"""

from __future__ import annotations

import random

from msgspec import Struct

from berth.chaos.plan import ChaosPlan
from berth.client import BuildClient, Track
from berth.load import LoadPlan, draw_requests
from bus.clock import Clock
from bus.contracts.build import BuildEvent, BuildRecord, BuildState

PROJECT = "chaos"
MAX_AT_ONCE = 100
# Events that a build is heard of before it ends: accepted, scheduled, building.
STAGES = 3
# Nothing heard for so long with everything in flight: look again (faults may stop, time may run out).
LOOK_AGAIN_S = 1.0
# A load that gets nothing through for so long has failed.
STUCK_S = 240.0


class Ended(Struct, frozen=True):
    """One build or delete that ended: when it was confirmed, when its end was heard."""

    asked_at: float
    ended_at: float


class Churn:
    """Boots and deletes until the plan's number of boots is accepted."""

    def __init__(self, client: BuildClient, plan: ChaosPlan, *, clock: Clock, rng: random.Random) -> None:
        self.accepted: list[str] = []
        self.deletes = 0
        self.ended: list[Ended] = []
        self.stuck = False
        self._client = client
        self._plan = plan
        self._clock = clock
        self._rng = rng
        self._alive: list[str] = []
        self._early: list[str] = []
        self._last = False
        self._flavors: dict[str, str] = {}
        client.on_event(self._heard)

    async def run(self) -> None:
        """Fire the plan's load; returns when the last request is accepted, not when it has ended."""
        plan = self._plan
        load = LoadPlan(boots=plan.boots, mix=plan.mix, project_id=PROJECT, name_prefix="chaos")
        requests = draw_requests(load, self._rng)
        self._flavors = {request.instance_uuid: request.flavor for request in requests}
        sent = 0
        while (sent < len(requests) or self._early) and not self.stuck:
            self._last = sent == len(requests)
            await self._delete(self._early)
            await self._delete(self._surplus())
            room = plan.in_flight - self._client.unfinished
            if room <= 0 and not self._last:
                await self._room()
                continue
            part = requests[sent : sent + min(max(room, 0), MAX_AT_ONCE)]
            await self._client.boot(part, patience_s=plan.patience_s)
            self.accepted += [request.instance_uuid for request in part]
            sent += len(part)

    async def _room(self) -> None:
        since = self._clock.monotonic()
        while self._client.unfinished >= self._plan.in_flight and not self._early:
            await self._client.until(
                lambda: self._client.unfinished < self._plan.in_flight or bool(self._early), LOOK_AGAIN_S
            )
            self.stuck = self._clock.monotonic() - max(since, self._last_end()) > STUCK_S
            if self.stuck:
                return

    def _last_end(self) -> float:
        return self.ended[-1].ended_at if self.ended else 0.0

    def _surplus(self) -> list[str]:
        """Some machines at random, once there are more than the population."""
        alive = self._alive
        count = min(max(len(alive) - self._plan.population, 0), MAX_AT_ONCE)
        gone: list[str] = []
        for _ in range(count):
            at = self._rng.randrange(len(alive))
            alive[at], alive[-1] = alive[-1], alive[at]
            gone.append(alive.pop())
        return gone

    async def _delete(self, uuids: list[str]) -> None:
        part, uuids[:] = uuids[:MAX_AT_ONCE], uuids[MAX_AT_ONCE:]
        if not part:
            return
        records = [
            BuildRecord(instance_uuid=uuid, project_id=PROJECT, flavor=self._flavors[uuid], state=BuildState.ACTIVE)
            for uuid in part
        ]
        tracks = await self._client.delete(records, patience_s=self._plan.patience_s)
        now = self._clock.monotonic()
        for track in tracks:
            track.published_at = now
        self.deletes += len(part)

    def _heard(self, event: BuildEvent) -> None:
        track: Track = self._client.tracks[event.instance_uuid]
        if track.ended_at is None:
            if not (track.deleting or self._last) and self._rng.random() < self._plan.early_deletes / STAGES:
                track.deleting = True  # from here on only the delete's end is an end
                self._early.append(event.instance_uuid)
            return
        self.ended.append(Ended(track.published_at or track.ended_at, track.ended_at))
        if event.state is BuildState.ACTIVE and not track.deleting:
            self._alive.append(event.instance_uuid)
