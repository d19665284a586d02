"""Runs a worker as a process: logs, event loop, signals, health, and an exit status for each kind of end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable

import structlog
import uvloop

from bus import metrics
from bus.distribution import version
from bus.faults import BrokenInvariant, Forbidden
from bus.retrying import needs_grant
from bus.service.environment import Environment, NotConfigured
from bus.service.health import Health
from bus.service.service import WorkerRuntime
from bus.service.settings import SettingsError
from bus.service.telemetry import configure_logging
from bus.service.watchdog import show_stacks_on_abort, watchdog_of, watched_loop
from bus.transport import BusForbidden

EXIT_CLEAN = 0
EXIT_FAULT = 1
EXIT_SETTINGS = 2  # wrong settings or credentials: starting again does not help
EXIT_INVARIANT = 70  # an invariant is broken (EX_SOFTWARE)
# SIGHUP of a terminal drains a worker as SIGTERM does. Without a terminal a worker that can read its settings again
# does so.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

STANDARD_STREAMS = (0, 1, 2)

EXIT_SIGNAL = 128  # plus the signal's number: the second signal ends the process at once

# Placement is stored in arrays, and most other values are short-lived and acyclic, so the cyclic garbage collector need
# not run often. The event loop waits meanwhile: 20,000 new objects took a busy scheduler 6 ms in the mean and 22 at
# most, because what they refer to, as a list of all hosts does, is looked at too; 5,000 take 1 and at most 7. The
# objects left are examined once more with the next 5,000: a mean of 2 ms where those of a million new ones took 70 at
# once. Smaller numbers cost little more in all. All objects are examined after 60 million new ones.
GC_THRESHOLD = (5_000, 0, 6_000)

log = structlog.get_logger(__name__)


def run_process(
    build: Callable[[Environment], WorkerRuntime],
    environment: Callable[[], Environment],
    *,
    role: str,
    process: str,
    http: tuple[str, int] | None = None,
    log_level: str = "info",
    log_style: str = "auto",
) -> int:
    """Run one worker until SIGTERM or SIGINT (drain, 0) or until it dies; returns the exit status. `environment` is
    called inside the loop. `http`: where to answer /healthz, /readyz and /metrics (port 0: a free one, named in the
    log).
    """
    show_stacks_on_abort()
    configure_logging(process=process, role=role, level=log_level, style=log_style)
    metrics.WORKER.labels(role, process, version()).set(1)
    try:
        uvloop.run(live(build, environment, http=http))
    except BrokenInvariant as fault:
        log.critical("process.invariant_broken", code=fault.code, reason=fault.reason, exc_info=True)
        return EXIT_INVARIANT
    except (Forbidden, BusForbidden, NotConfigured, SettingsError) as fault:
        log.error("process.cannot_start", code=fault.code, reason=str(fault))
        return EXIT_FAULT if needs_grant(fault) else EXIT_SETTINGS  # its next start waits for the grant
    except Exception as fault:  # the last log line of the process
        log.critical(
            "process.died", code=getattr(fault, "code", type(fault).__name__), reason=str(fault), exc_info=True
        )
        return EXIT_FAULT
    log.info("process.ended")
    return EXIT_CLEAN


async def live(
    build: Callable[[Environment], WorkerRuntime],
    environment: Callable[[], Environment],
    *,
    http: tuple[str, int] | None = None,
) -> None:
    """Run one worker on the running event loop, with signal handling."""
    gc.set_threshold(*GC_THRESHOLD)  # what is loaded is examined as a whole once, when it is frozen
    stop = asyncio.Event()
    _on_signals(stop)
    surroundings = environment()
    service = build(surroundings)
    if service.on_reload is not None and not any(map(os.isatty, STANDARD_STREAMS)):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, service.on_reload)
    health = None
    if http is not None:
        health = Health(service.not_ready, host=http[0], port=http[1], refresh=service.refresh, ages_s=service.ages_s)
        await health.open()  # before the worker opens, so that /readyz shows what it waits for
    freezing = asyncio.create_task(_freeze_when_ready(service))
    try:
        async with watched_loop(watchdog_of(os.environ, pid=os.getpid())):
            await service.run(stop)
    finally:
        freezing.cancel()
        if surroundings.tracer is not None:
            await surroundings.tracer.close()
        if health is not None:
            await health.close()


async def _freeze_when_ready(service: WorkerRuntime) -> None:
    await service.ready.wait()
    freeze_loaded_objects()


def freeze_loaded_objects() -> None:
    """Freeze the objects that were loaded before readiness: they live as long as the process, so the collector need not
    traverse them. Call it once a server process is ready.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)


def _on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def first(number: int) -> None:
        log.info("process.stopping", signal=signal.Signals(number).name)
        stop.set()
        for each in STOP_SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, lambda number, _: os._exit(EXIT_SIGNAL + number))

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: a terminal that hangs up is no reason to stop
            loop.add_signal_handler(number, first, number)
