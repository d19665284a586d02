"""Actions in the load of a chaos run: active instances are moved, resized, rebuilt, confirmed and reverted.

As in `churn`: a publish that was not confirmed is repeated until it is, and only confirmed requests count.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from berth.bus_client import BuildClient
from berth.bus_client.actions import ActionClient
from bus.clock import Clock, new_uuid
from bus.contracts.actions import ActionEvent, ActionKind, ActionRequest, Condition
from lab.chaos.churn import LOOK_AGAIN_S, PROJECT, STUCK_S
from lab.chaos.plan import ChaosPlan

KINDS = (
    *(ActionKind.LIVE_MIGRATE,) * 4,
    *(ActionKind.MIGRATE,) * 3,
    *(ActionKind.RESIZE,) * 2,
    ActionKind.REBUILD,
)
FLAVORS = ("m1.tiny", "m1.small")
AUTO_CONFIRM_S = (0.0, 1.0, 20.0)  # the last leaves time for a confirm or a revert of the client's
ENDED_BY_CLIENT = 0.7  # of those that await one
MAX_AT_ONCE = 20


class ActionLoad:
    """Actions on active instances until the plan's number of them is accepted.

    pick: this many running instances, at random. ends: how each request ended, by its events: {id: {(state, code)}}.
    """

    def __init__(
        self,
        client: BuildClient,
        plan: ChaosPlan,
        pick: Callable[[int], list[str]],
        *,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.requested: list[str] = []
        self.ends: dict[str, set[tuple[str, str]]] = {}
        self.stopped = ""
        self._plan = plan
        self._pick = pick
        self._clock = clock
        self._rng = rng
        self._actions = ActionClient(client.bus, clock=clock, process=client.process)
        self._young: deque[tuple[float, str]] = deque()
        self._follow_ups: list[ActionRequest] = []
        self._last_end = 0.0
        self._actions.on_event(self._on_event)

    async def open(self) -> None:
        """Listen for the ends of actions."""
        await self._actions.open()

    async def close(self) -> None:
        """Stop listening."""
        await self._actions.close()

    async def run(self) -> None:
        """Request the plan's actions; returns when the last is accepted, not when it has ended."""
        began = self._last_end = self._clock.monotonic()
        waiting: list[ActionRequest] = []
        while len(self.requested) < self._plan.actions and not self._must_stop(began):
            room = min(self._free_slots(), MAX_AT_ONCE, self._plan.actions - len(self.requested))
            if room > len(waiting):
                waiting += self._next(room - len(waiting))
            if not waiting:
                await self._clock.sleep(LOOK_AGAIN_S / 10)
                continue
            waiting = await self._publish(waiting)

    async def settle(self, timeout_s: float) -> bool:
        """Wait until every accepted one has ended."""
        return await self._actions.wait(timeout_s)

    @property
    def results(self) -> Mapping[str, int]:
        """How many have ended so: by state, and by code where there is one."""
        ended = self._actions.ended.values()
        return dict(Counter(f"{end.state.value} {end.code}".strip() for end in ended).most_common())

    def _next(self, count: int) -> list[ActionRequest]:
        due, self._follow_ups = self._follow_ups[:count], self._follow_ups[count:]
        return [*due, *(self._action_of(uuid) for uuid in self._pick(count - len(due)))]

    def _action_of(self, uuid: str) -> ActionRequest:
        kind = self._rng.choice(KINDS)
        return ActionRequest(
            request_id=new_uuid(self._rng),
            instance_uuid=uuid,
            project_id=PROJECT,
            kind=kind,
            flavor=self._rng.choice(FLAVORS) if kind is ActionKind.RESIZE else None,
            image="rebuilt" if kind is ActionKind.REBUILD else None,
            auto_confirm_s=self._rng.choice(AUTO_CONFIRM_S)
            if kind in (ActionKind.MIGRATE, ActionKind.RESIZE)
            else None,
        )

    async def _publish(self, requests: Sequence[ActionRequest]) -> list[ActionRequest]:
        """The actions that were not confirmed: they may have arrived all the same, so the very same
        are published again.
        """
        errors = await self._actions.submit(requests)
        now = self._clock.monotonic()
        confirmed = [one.request_id for one, error in zip(requests, errors, strict=True) if error is None]
        self.requested += confirmed
        self._young.extend((now, one) for one in confirmed)
        if left := [one for one, error in zip(requests, errors, strict=True) if error is not None]:
            await self._clock.sleep(LOOK_AGAIN_S / 4)
        return left

    def _free_slots(self) -> int:
        """As of builds: stuck ones do not count, up to a bound."""
        now, ended = self._clock.monotonic(), self._actions.ended
        while self._young and self._young[0][0] < now - self._plan.stuck_after_s:
            self._young.popleft()
        young = sum(one not in ended for _, one in self._young)
        return min(
            self._plan.actions_in_flight - young,
            self._plan.actions_in_flight * (self._plan.in_flight_most // self._plan.in_flight)
            - self._actions.unfinished,
        )

    def _must_stop(self, began: float) -> bool:
        now = self._clock.monotonic()
        if now - began > self._plan.longest_s:
            self.stopped = f"after {self._plan.longest_s:g} s"
        elif now - self._last_end > STUCK_S:
            self.stopped = f"no action has ended for {STUCK_S:g} s"
        return bool(self.stopped)

    def _on_event(self, event: ActionEvent) -> None:
        if not event.terminal or event.sequence == 0:
            return
        self._last_end = self._clock.monotonic()
        self.ends.setdefault(event.request_id, set()).add((event.state.value, event.code))
        if event.condition is Condition.RESIZED and self._rng.random() < ENDED_BY_CLIENT:
            self._follow_ups.append(
                ActionRequest(
                    request_id=new_uuid(self._rng),
                    instance_uuid=event.instance_uuid,
                    project_id=PROJECT,
                    kind=self._rng.choice((ActionKind.CONFIRM, ActionKind.REVERT)),
                    migration=event.request_id,
                )
            )
