"""Purges records of builds that ended long ago."""

from __future__ import annotations

import structlog

from bus.clock import Clock
from bus.faults import Transient
from scheduler_worker import metrics as metrics_module
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.store.port import SchedulerStore

log = structlog.get_logger(__name__)

# A request is refused as too old this long before its record may be purged: clients' clocks may be off.
CLOCK_SLACK_S = 3600.0


def max_request_age_s(config: SchedulerConfig) -> float:
    """How old a request without a record may be to be taken for a new one."""
    return max(config.ended_retention_s - CLOCK_SLACK_S, config.ended_retention_s / 2)


async def purge_forever(store: SchedulerStore, clock: Clock, config: SchedulerConfig) -> None:
    """Purge periodically. Schedulers share the work: each deletes rows that no other has locked."""
    while True:
        await clock.sleep(config.purge_interval_s)
        try:
            await purge(store, clock.time() - config.ended_retention_s, config.purge_batch)
        except Transient as fault:
            log.warning("purge.waiting", code=fault.code, reason=str(fault))


async def purge(store: SchedulerStore, before: float, batch: int) -> int:
    """One pass, a bounded statement at a time. Returns how many builds were deleted. Raises Transient."""
    count, start = 0, 0.0
    while True:
        gone = await store.purge(before, batch, start)
        metrics_module.PURGED.inc(gone.builds)
        count, start = count + gone.builds, gone.until
        if max(gone.builds, gone.actions) < batch:
            return count
