"""The side task that lets deadlines pass. Conductors share the work: each takes what no other has locked."""

from __future__ import annotations

import structlog

from bus.clock import Clock
from bus.faults import Transient
from bus.port import BusError

from .config import ConductorConfig
from .engine import Engine

log = structlog.get_logger(__name__)

AWAY_PAUSE_S = 2.0  # what we depend on is away: the next look may wait


async def sweep_forever(engine: Engine, clock: Clock, config: ConductorConfig) -> None:
    """Look for passed deadlines every `sweep_every_s`; a full batch is followed by the next at once."""
    while True:
        try:
            swept = await engine.sweep()
        except (Transient, BusError) as fault:
            log.warning("sweep.waiting", code=fault.code, reason=str(fault))
            await clock.sleep(AWAY_PAUSE_S)
            continue
        if swept < config.sweep_batch:
            await clock.sleep(config.sweep_every_s)
