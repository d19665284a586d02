"""How many messages wait in which queue of each bus, and how many were given up: asked of the broker, now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import structlog
from msgspec import Struct

from bus.bus import API
from bus.contracts.catalogue import DEAD_LETTERS, QUEUES
from bus.contracts.catalogue.rows import Where
from bus.depths import waiting_in
from bus.faults import Fault
from bus.port import BusError, QueueMissing, Transport
from bus.service.environment import Environment

log = structlog.get_logger("web")

# Depths are read anew at most so often, however many pages show them: it is a request a queue, 72 with four cells. A
# broker that does not answer holds up no page.
AGE_S = 5.0
READ_TIMEOUT_S = 3.0


class QueueDepth(Struct, frozen=True):
    """How many messages wait in a queue of a bus, those that a worker has in hand not counted."""

    bus: str
    queue: str
    waiting: int


class Depths(Struct, frozen=True):
    """Queues in which something waits, longest first; dead letters of all buses. silent: buses without an answer."""

    queues: tuple[QueueDepth, ...] = ()
    dead_letters: int = 0
    silent: tuple[str, ...] = ()


class QueueReader:
    """Keeps a connection to each bus, from the first page that shows them."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._transports: dict[str, Transport] = {}
        self._known = Depths()
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def depths(self, services: Sequence[tuple[str, str]] = ()) -> Depths:
        """At most AGE_S old. services: (cell, compute service), for the queues that are theirs."""
        async with self._reading:
            if self._env.clock.monotonic() - self._read_at > AGE_S:
                self._known = await self._read(services)
                self._read_at = self._env.clock.monotonic()
        return self._known

    async def close(self) -> None:
        """Close the connections."""
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            await transport.close()

    async def _read(self, services: Sequence[tuple[str, str]]) -> Depths:
        buses = (API, *self._env.cells)
        every = await asyncio.gather(*(self._read_bus(bus, services) for bus in buses))
        found = [one for depths in every if depths is not None for one in depths[0] if one.waiting]
        return Depths(
            tuple(sorted(found, key=lambda one: (-one.waiting, one.bus, one.queue))),
            sum(depths[1] for depths in every if depths is not None),
            tuple(bus for bus, depths in zip(buses, every, strict=True) if depths is None),
        )

    async def _read_bus(self, bus: str, services: Sequence[tuple[str, str]]) -> tuple[Sequence[QueueDepth], int] | None:
        """The depth of each queue of a bus and its dead letters; None: its broker does not answer."""
        here = Where.API if bus == API else Where.CELL
        rows = [row for row in QUEUES if row.where in (here, Where.BOTH) and "{" not in row.name]
        names = [f"compute.{service}" for cell, service in services if cell == bus]
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                transport = await self._transport(bus)
                found = [QueueDepth(bus, row.name, await _depth(waiting_in(transport, row))) for row in rows]
                found += [QueueDepth(bus, name, await _depth(transport.depth(name))) for name in names]
                return found, await _depth(transport.depth(DEAD_LETTERS))
        except (TimeoutError, BusError, Fault) as error:
            log.info("web.depths_unread", bus=bus, error=type(error).__name__)
            return None

    async def _transport(self, bus: str) -> Transport:
        transport = self._transports.get(bus)
        if transport is None:
            transport = self._env.transport(bus)
            await transport.open()
            self._transports[bus] = transport
        return transport


async def _depth(reading: Awaitable[int]) -> int:
    try:
        return await reading
    except QueueMissing:  # no worker of its role has been there yet
        return 0
