"""A result sender with planned faults: results that are sent twice, and successes that are sent long after their
deadline.
"""

from __future__ import annotations

import asyncio
from functools import partial

from bus.clock import Clock
from bus.contracts.actions import MachineChanged
from bus.contracts.cell import ComputeOutcome, ComputeResult
from compute_agent.driver_plugin import SendResult
from compute_sim.faults import NO_FAULTS, Faults, plan_attempt
from compute_sim.fleet import Fleet

MAX_LATE = 10_000  # false results waiting to be sent; beyond this the true ones are sent


class FaultyResultSender:
    """Stands before the announcer. With no faults planned it adds nothing."""

    def __init__(self, fleet: Fleet, faults: Faults, *, seed: int, clock: Clock) -> None:
        self._fleet = fleet
        self._faults = faults
        self._seed = seed
        self._clock = clock
        self._late: set[asyncio.Task[None]] = set()

    def before(self, forward: SendResult) -> SendResult:
        """What stands before this sender of results."""
        return partial(self._send, forward)

    def _send(self, forward: SendResult, result: ComputeResult | MachineChanged) -> None:
        """Pass a result on as the plan of the attempt determines."""
        host = self._fleet.host(result.host_uuid)
        if host is None or self._faults == NO_FAULTS or isinstance(result, MachineChanged):
            forward(result)
            return
        plan = plan_attempt(self._faults, self._seed, host.plan.name, result.instance_uuid, result.attempt)
        if plan.late_s and result.outcome is ComputeOutcome.ACTIVE and len(self._late) < MAX_LATE:
            # Whatever happens to the machine meanwhile, destruction included, this result will be sent: that is the
            # fault.
            task = asyncio.get_running_loop().create_task(self._send_late(forward, result, plan.late_s))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
            return
        for _ in range(plan.copies):
            forward(result)

    async def _send_late(self, forward: SendResult, result: ComputeResult, late_s: float) -> None:
        await self._clock.sleep(late_s)
        forward(result)

    def stop(self) -> None:
        """Drop the false results that are not sent yet. The next start reports the attempts, which are unreported."""
        for task in self._late:
            task.cancel()
