"""Draining a host: the instances of a plan move away, a few at a time, by a client of the bus as any other."""

from __future__ import annotations

import random
from collections.abc import Callable

from berth.client_moves import MoveClient
from bus.clock import Clock, new_uuid
from bus.contracts.moves import DrainPlan, MoveEvent, MoveKind, MoveRecord, MoveRequest, MoveState, PlannedMove
from bus.faults import RequestRefused

MAX_AT_ONCE = 100
NOT_RUNNING = "instance.not_running"  # a cell's refusal of a live migration


class Drain:
    """Carries out one plan. What it has come to is to be read at any time; `stop` begins nothing more.

    moved: instances that are elsewhere. failed: (instance, code, reason). waiting: (instance, by which move) that is
    not begun. under_way: the same by request.
    """

    def __init__(
        self,
        plan: DrainPlan,
        kind: MoveKind,
        *,
        at_once: int,
        on_end: Callable[[PlannedMove, str, str, str], None] = lambda _moved, _state, _host, _why: None,
    ) -> None:
        self.plan = plan
        self.kind = kind
        self.moved: list[str] = []
        self.failed: list[tuple[str, str, str]] = []
        self.waiting = [(one, kind) for one in plan.moves]
        self.under_way: dict[str, tuple[PlannedMove, MoveKind]] = {}
        self.stopped = False
        self._at_once = at_once
        self._on_end = on_end
        self._rng = random.SystemRandom()

    def stop(self) -> None:
        """Begin nothing more; what is under way ends by itself."""
        self.stopped = True

    @property
    def not_begun(self) -> list[str]:
        """Instances whose move has not been requested."""
        return [one.instance_uuid for one, _ in self.waiting]

    async def run(self, following: MoveClient, *, clock: Clock, timeout_s: float) -> None:
        """Move what can be moved, so many at a time, until time runs out or it is stopped.

        What does not run cannot be moved live; its cell refuses it, and it is moved cold (a stopped one stays stopped).
        """
        give_up_at = clock.monotonic() + timeout_s
        while self.waiting or self.under_way:
            late = clock.monotonic() >= give_up_at
            while self.waiting and len(self.under_way) < self._at_once and not late and not self.stopped:
                await self._begin(following)
            if not self.under_way:
                break
            await following.wait_for_one(give_up_at - clock.monotonic())
            for request_id in [one for one in self.under_way if one in following.ended]:
                self._note(request_id, following.ended.pop(request_id))
            if clock.monotonic() >= give_up_at:
                break
        self.failed += [
            (one.instance_uuid, "timeout", "it had not ended in time") for one, _ in self.under_way.values()
        ]

    async def _begin(self, following: MoveClient) -> None:
        one, how = self.waiting.pop(0)
        request = MoveRequest(
            request_id=new_uuid(self._rng),
            instance_uuid=one.instance_uuid,
            project_id=one.project_id,
            kind=how,
            auto_confirm_s=0.0 if how is MoveKind.MIGRATE else None,
        )
        try:
            await following.ask(request)
        except RequestRefused as fault:
            # Its event may have come first; an end of what is not under way would be waited for no longer.
            following.ended.pop(request.request_id, None)
            self.failed.append((one.instance_uuid, fault.code, fault.reason))
            return
        self.under_way[request.request_id] = (one, how)

    def _note(self, request_id: str, end: MoveEvent | MoveRecord) -> None:
        moved, how = self.under_way.pop(request_id)
        if how is MoveKind.LIVE_MIGRATE and end.code == NOT_RUNNING:
            self.waiting.append((moved, MoveKind.MIGRATE))  # requested at most twice: a cold one has no such end
            return
        if end.state is MoveState.DONE:
            self.moved.append(moved.instance_uuid)
        else:
            self.failed.append((moved.instance_uuid, end.code, end.reason))
        self._on_end(moved, end.state.value, end.host or "", end.reason or end.code)
