"""A compute service's name belongs to one process: two of one name would build and destroy on the same hosts."""

# The name is held by the service's private queue on its cell's bus, which a broker gives to one connection at a time.
# It is taken before the driver is looked at. Where a broker gives it to two (a cluster that was split), the heartbeats
# reveal it: the service with the lower epoch, the one that was started earlier, stops.

from __future__ import annotations

import asyncio

import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.cell import Heartbeat
from bus.contracts.placement import COMPUTE_REPORTER
from bus.faults import Forbidden
from bus.retrying import Retrying, RetryPolicy
from bus.transport import QueueLocked
from compute_agent.records.records import Records

log = structlog.get_logger()

QUEUE = "compute.control.{service}"
AGAIN_S = 1.0


def reporter_name(service: str) -> str:
    """The name under which a service reports inventory."""
    return f"{COMPUTE_REPORTER}{service}"


class ServiceNameInUse(Forbidden):
    """Another process runs a compute service of this name."""

    code = "compute.name_conflict"


class ServiceName:
    """The name of one compute service, held for as long as its connection lives."""

    def __init__(self, bus: Bus, *, service: str, cell: str, records: Records, clock: Clock, wait_s: float) -> None:
        self._bus = bus
        self._service = service
        self._cell = cell
        self._records = records
        self._clock = clock
        self._wait_s = wait_s
        self._locked_at: float | None = None  # since when the connection does not come back, as another has the name
        self._lost = asyncio.Event()
        self._other: tuple[int, int, float] | None = None  # epoch and sequence received of another, and since when

    async def hold(self) -> None:
        """Take the name; waits `wait_s` for a former connection to be noticed as gone. Raises ServiceNameInUse."""
        again_s = min(AGAIN_S, self._wait_s)
        policy = RetryPolicy(first_s=again_s, longest_s=again_s, least=1.0, lasts_s=self._wait_s)

        def log_failure(_error: BaseException, failures: int) -> None:
            if failures == 1:
                log.warning("compute.name_waits", reason=f"{self._message()}; waiting for {self._wait_s:g} s")

        try:
            await Retrying(policy, self._clock).call(
                lambda: self._bus.declare_now(QUEUE, service=self._service, reporter=reporter_name(self._service)),
                lambda error: isinstance(error, QueueLocked),
                on_failure=log_failure,
            )
        except QueueLocked as locked:
            raise self._in_use(f"for {self._wait_s:g} s") from locked
        self._bus.transport.on_locked(self._is_locked)
        self._bus.transport.on_reconnect(self._is_back)

    async def watch(self) -> None:
        """A side task: ends the service when another took the name while disconnected. Raises ServiceNameInUse."""
        await self._lost.wait()
        raise self._in_use("since this one's connection to the bus was lost")

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """A heartbeat under this name. Raises ServiceNameInUse when it is another's."""
        # One heartbeat proves nothing, it may have been on its way since this service's former life: a second one that
        # is newer does. The service of the higher epoch waits for the other one to stop, for `wait_s`.
        own = self._records.epoch
        if (
            heartbeat.service != self._service
            or heartbeat.epoch == own
            or heartbeat.epoch in self._records.former
            or heartbeat.stopping
        ):
            return
        now = self._clock.monotonic()
        if self._other is None or self._other[0] != heartbeat.epoch:
            self._other = (heartbeat.epoch, heartbeat.sequence, now)
            log.warning("compute.name_in_use", reason=self._message(), epoch=heartbeat.epoch, own_epoch=own)
            return
        _, sequence, since = self._other
        if heartbeat.sequence > sequence and (heartbeat.epoch > own or now - since >= self._wait_s):
            raise self._in_use(f"its heartbeats have epoch {heartbeat.epoch}, this one {own}")

    def _is_locked(self) -> None:
        now = self._clock.monotonic()
        if self._locked_at is None:
            self._locked_at = now
            log.warning("compute.name_waits", reason=f"{self._message()}; waiting for {self._wait_s:g} s")
        elif now - self._locked_at >= self._wait_s:
            self._lost.set()

    def _is_back(self) -> None:
        self._locked_at = None

    def _in_use(self, how: str) -> ServiceNameInUse:
        return ServiceNameInUse(
            f"{self._message()} ({how}): stop that one, or give this one a name of its own (--service)"
        )

    def _message(self) -> str:
        return f"another process runs the compute service {self._service!r} of {self._cell}"
