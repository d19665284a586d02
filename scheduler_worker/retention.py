"""Drops the records of builds that ended long ago, so that the tables do not grow for ever."""

from __future__ import annotations

import structlog

from bus.clock import Clock
from bus.faults import Transient
from scheduler_worker import metrics
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.store.port import SchedulerStore

log = structlog.get_logger(__name__)

# A request is too old to be new this much before the record of it could be gone: clients' clocks are not ours.
CLOCK_SLACK_S = 3600.0


def max_request_age_s(config: SchedulerConfig) -> float:
    """How long after it was sent a request that is not on record is still taken for a new one."""
    return max(config.ended_keep_s - CLOCK_SLACK_S, config.ended_keep_s / 2)


async def purge_forever(store: SchedulerStore, clock: Clock, config: SchedulerConfig) -> None:
    """A pass now and then; schedulers share the work, each takes what no other has locked."""
    while True:
        await clock.sleep(config.purge_every_s)
        try:
            await purge(store, clock.time() - config.ended_keep_s, config.purge_batch)
        except Transient as fault:
            log.warning("purge.waiting", code=fault.code, reason=str(fault))


async def purge(store: SchedulerStore, before: float, batch: int) -> int:
    """One pass, a bounded statement at a time. Returns how many records went. Raises Transient."""
    count, start = 0, 0.0
    while True:
        gone = await store.purge(before, batch, start)
        metrics.PURGED.inc(gone.count)
        count, start = count + gone.count, gone.until
        if gone.count < batch:
            return count
