"""The load of a chaos run: a number of builds in flight, some deleted while they are built, the rest when there are
many.

A publish that was not confirmed is repeated until it is, as any careful client would; only confirmed requests count
as accepted. Everything is known from the event stream of a durable queue alone.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from berth.bus_client import BuildClient, RequestWatch, instances_of
from bus.clock import Clock
from bus.contracts.build import BuildEvent, BuildRecord, BuildRequest, BuildState
from lab.chaos.plan import GANG, GANG_MIN, ChaosPlan
from lab.load import LoadPlan, draw_requests

PROJECT = "chaos"
MAX_AT_ONCE = 100
# Events of a build before it ends: accepted, scheduled, building.
STAGES = 3
# No event for this long with everything in flight: look again (faults may stop, time may run out).
LOOK_AGAIN_S = 1.0
# A load without any progress for this long has failed.
STUCK_S = 240.0


class Ended(Struct, frozen=True):
    """One build or delete that ended: when it was confirmed, when the event of its end came."""

    requested_at: float
    ended_at: float


class Churn:
    """Boots and deletes until the plan's number of boots is accepted."""

    def __init__(self, client: BuildClient, plan: ChaosPlan, *, clock: Clock, rng: random.Random) -> None:
        self.accepted: list[str] = []
        self.wanted = plan.boots  # instances: a gang is several
        self.deletes = 0
        self.ended: list[Ended] = []
        self.stopped = ""
        self._client = client
        self._plan = plan
        self._clock = clock
        self._rng = rng
        self._alive: list[str] = []
        self._once_alive: set[str] = set()  # an instance may be announced as active again: it is deleted once
        self._early: list[str] = []
        self._last = False
        self._young: deque[tuple[float, str]] = deque()  # (when it was accepted, instance): not yet called stuck
        self._began = 0.0
        self._flavors: dict[str, str] = {}
        client.on_event(self._on_event)

    async def run(self) -> None:
        """Fire the plan's load; returns when the last request is accepted, not when it has ended."""
        plan = self._plan
        self._began = self._clock.monotonic()
        load = LoadPlan(boots=plan.boots, mix=plan.mix, project_id=PROJECT, name_prefix="chaos")
        requests = [self._maybe_gang(request) for request in draw_requests(load, self._rng)]
        self._flavors = {uuid: request.flavor for request in requests for uuid in instances_of(request)}
        self.wanted = len(self._flavors)
        sent = 0
        while (sent < len(requests) or self._early) and not self._must_stop():
            await self._delete(self._early)
            await self._delete(self._excess())
            room = self._free_slots()
            if room <= 0 and not self._last:
                await self._wait_for_slots()
                continue
            part = requests[sent : sent + min(max(room, 0), MAX_AT_ONCE)]
            await self._client.boot(part, retry_for_s=plan.retry_for_s)
            members = [uuid for request in part for uuid in instances_of(request)]
            self.accepted += members
            self._track_requested(members)
            sent += len(part)
            self._last = sent == len(requests)  # before any further event: a build marked later would never be deleted

    def pick(self, count: int) -> list[str]:
        """This many running machines, at random, or all of them. They may be deleted at any moment."""
        return self._rng.sample(self._alive, min(count, len(self._alive)))

    def _maybe_gang(self, request: BuildRequest) -> BuildRequest:
        if not self._plan.gangs or self._rng.random() >= self._plan.gangs:
            return request
        return replace(request, count=GANG, min_count=GANG_MIN)

    def _free_slots(self) -> int:
        """How many more may be published: stuck ones do not count, up to a bound."""
        now, watches = self._clock.monotonic(), self._client.watches
        while self._young and self._young[0][0] < now - self._plan.stuck_after_s:
            self._young.popleft()
        young = sum(watches[uuid].ended_at is None for _, uuid in self._young)
        return min(self._plan.in_flight - young, self._plan.in_flight_most - self._client.unfinished)

    async def _wait_for_slots(self) -> None:
        before = len(self.ended)
        await self._client.until(lambda: len(self.ended) > before or bool(self._early), LOOK_AGAIN_S)

    def _must_stop(self) -> bool:
        """Whether the load ends early: it takes too long, or nothing has ended for too long."""
        now = self._clock.monotonic()
        if now - self._began > self._plan.longest_s:
            self.stopped = f"after {self._plan.longest_s:g} s"
        elif now - max(self._began, self._last_end()) > STUCK_S:
            self.stopped = f"nothing has ended for {STUCK_S:g} s"
        return bool(self.stopped)

    def _track_requested(self, uuids: Sequence[str]) -> None:
        now = self._clock.monotonic()
        self._young.extend((now, uuid) for uuid in uuids)

    def _last_end(self) -> float:
        return self.ended[-1].ended_at if self.ended else 0.0

    def _excess(self) -> list[str]:
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
        watches = await self._client.delete(records, retry_for_s=self._plan.retry_for_s)
        now = self._clock.monotonic()
        for watch in watches:
            watch.published_at = now
        self.deletes += len(part)
        self._track_requested(part)

    def _on_event(self, event: BuildEvent) -> None:
        watch: RequestWatch = self._client.watches[event.instance_uuid]
        if watch.ended_at is None:
            if not (watch.deleting or self._last) and self._rng.random() < self._plan.early_deletes / STAGES:
                watch.deleting = True  # from here on only the delete's end is an end
                self._early.append(event.instance_uuid)
            return
        self.ended.append(Ended(watch.published_at or watch.ended_at, watch.ended_at))
        if event.state is BuildState.ACTIVE and not watch.deleting and event.instance_uuid not in self._once_alive:
            self._once_alive.add(event.instance_uuid)
            self._alive.append(event.instance_uuid)
