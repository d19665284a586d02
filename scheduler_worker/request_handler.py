"""Build, delete and action requests: a batch in, an outcome for each message out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import structlog
from msgspec.structs import replace

from bus.clock import Clock
from bus.consuming.outcome import Outcome, Received, RetryWhenAvailable
from bus.contracts.actions import ActionRequest
from bus.contracts.build import BuildRequest, DeleteRequest
from bus.faults import BrokenInvariant, Forbidden, Transient
from bus.transport import BusError
from bus.yielding import YieldingParts
from scheduler_worker.action.action_engine import ActionEngine
from scheduler_worker.action.pending_action import PendingAction
from scheduler_worker.build.build_engine import SchedulingEngine
from scheduler_worker.build.delete_rules import PendingDelete
from scheduler_worker.build.dispatcher import BUILDS_AT_ONCE
from scheduler_worker.build.gang import outcome_of_gang
from scheduler_worker.build.pending_build import PendingBuild, expand_gang, in_batches, pending_build
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.fleet.host_listener import Warmup
from scheduler_worker.requests.request_delivery import RequestDelivery, classify_delivery, resumed_delivery
from scheduler_worker.selection.selector import Selector
from scheduler_worker.upkeep.purge import max_request_age_s

T = TypeVar("T")
log = structlog.get_logger(__name__)


class RequestHandler:
    """Handles the three queues of requests (`REQUEST_QUEUES`), and their dead letters."""

    def __init__(
        self,
        engine: SchedulingEngine,
        actions: ActionEngine,
        selector: Selector,
        *,
        clock: Clock,
        config: SchedulerConfig,
        warmup: Warmup,
        wait_for_backlog: Callable[[], Awaitable[None]],
    ) -> None:
        """wait_for_backlog: waits while the events of earlier batches are not published."""
        self._engine = engine
        self._actions = actions
        self._selector = selector
        self._clock = clock
        self._max_age_s = max_request_age_s(config)
        self._warmup = warmup
        self._keep_up = wait_for_backlog

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Process a batch; one outcome for each message, in order. What placement does not answer about waits. What is
        on record goes on; a dead letter otherwise ends its request. Raises Transient when the database does not answer.
        """
        await self._keep_up()
        is_warming_up = self._warmup.is_on()
        recorded_since = self._clock.time() - self._max_age_s
        deliveries = [
            classify_delivery(received, is_warming_up=is_warming_up, recorded_since=recorded_since)
            for received in batch
        ]
        if len(batch) > 1:  # after a crash each is handled again, alone
            return await self._process(batch, deliveries)
        return await self._or_end(lambda one: self._process(batch, [one]), deliveries[0], batch[0].meta.cause)

    async def resume(self, instances: Mapping[str, int]) -> set[str]:
        """Schedule accepted builds on record that no message carries on, a gang with all its members. instances:
        {instance: how often this was done before}. Returns those that wait for a database or placement, which was no
        try.
        """
        # Such a build's message was acknowledged by a record that the database has lost. One whose end crashes as well
        # is tried again later.

        async def process(members: Sequence[PendingBuild], delivery: RequestDelivery) -> bool:
            outcomes, _ = await self._engine.process([replace(one, delivery=delivery) for one in members], ())
            return any(isinstance(one, RetryWhenAvailable) for one in outcomes.values())

        async def waits(members: Sequence[PendingBuild]) -> bool:
            tries = max(instances.get(one.instance_uuid, 0) for one in members)
            delivery = resumed_delivery(tries, is_warming_up=self._warmup.is_on())
            try:
                return await self._or_end(partial(process, members), delivery, members[0].instance_uuid)
            except Transient as fault:
                log.warning("requests.not_looked_at", code=fault.code, reason=str(fault))
                return True
            except (BrokenInvariant, Forbidden, BusError):
                raise
            except Exception:  # no message is given up here: the process would end, and every other after it
                log.exception("scheduler.dead_letter_crashed", cause=members[0].instance_uuid)
                return False

        waiting: set[str] = set()
        try:
            requests = await self._engine.unfinished_builds(instances)
        except Transient as fault:
            log.warning("requests.not_looked_at", code=fault.code, reason=str(fault))
            return set(instances)
        async for part in YieldingParts(
            requests, BUILDS_AT_ONCE
        ):  # while placement is silent each waits as long as one
            for members, is_waiting in zip(part, await asyncio.gather(*map(waits, part)), strict=True):
                waiting.update(one.instance_uuid for one in members if is_waiting)
        return waiting

    async def _or_end(
        self, process: Callable[[RequestDelivery], Awaitable[T]], delivery: RequestDelivery, cause: str
    ) -> T:
        """Process a request. One without a dead letter ends when that crashes: it would stay on record without an end,
        or be taken up again and again.
        """
        try:
            return await process(delivery)
        except (Transient, Forbidden, BusError):
            raise
        except Exception as error:  # any other: without a dead letter it would stay on record without an end
            if delivery.has_dead_letter:
                raise
            log.exception("scheduler.dead_letter_crashed", cause=cause)
            ended = await process(delivery.crashed())
            if isinstance(error, BrokenInvariant):
                raise
            return ended

    async def _process(self, batch: Sequence[Received], deliveries: Sequence[RequestDelivery]) -> list[Outcome]:
        now = self._clock.time()
        accepted = list(zip(batch, deliveries, strict=True))
        requests = await self._builds(accepted, now)
        deletes = [
            PendingDelete(batch_index=batch_index, request=received.message, delivery=delivery)
            for batch_index, (received, delivery) in enumerate(accepted)
            if isinstance(received.message, DeleteRequest)
        ]
        actions = [
            PendingAction(batch_index=batch_index, request=received.message, taken_at=now, delivery=delivery)
            for batch_index, (received, delivery) in enumerate(accepted)
            if isinstance(received.message, ActionRequest)
        ]
        outcomes: dict[int, Outcome] = {}
        unwanted = {batch_index: one for batch_index, one in requests.items() if one.is_expired}
        for batch_index, request in (await self._engine.drop_abandoned(unwanted) if unwanted else {}).items():
            if isinstance(request, PendingBuild):
                requests[batch_index] = request
            else:
                outcomes[batch_index] = request
                del requests[batch_index]
        for number, part in enumerate(in_batches(requests) if requests else [{}]):
            builds: list[PendingBuild] = []
            members: dict[int, list[PendingBuild]] = {}
            for batch_index, request in part.items():
                members[batch_index] = expand_gang(request, start=len(builds))
                builds += members[batch_index]
            these = () if number else deletes
            if builds or these:
                of_builds, of_deletes = await self._engine.process(builds, these)
                outcomes |= of_deletes
                for batch_index, many in members.items():
                    first = of_builds[many[0].batch_index]
                    outcomes[batch_index] = first if len(many) == 1 else outcome_of_gang(many, of_builds)
        if actions:
            outcomes |= await self._actions.process(actions)
        return [outcomes[batch_index] for batch_index in range(len(batch))]

    async def _builds(
        self, accepted: Sequence[tuple[Received, RequestDelivery]], now: float
    ) -> dict[int, PendingBuild]:
        """The build requests of a batch, by batch index."""
        return {
            batch_index: pending_build(received, delivery, now=now, config=self._selector.config)
            async for part in YieldingParts(enumerate(accepted), BUILDS_AT_ONCE)
            for batch_index, (received, delivery) in part
            if isinstance(received.message, BuildRequest)
        }
