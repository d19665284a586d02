"""A worker's links to the cells below it. Cells are taken into use and out of use while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import structlog

from bus.bus import Bus
from bus.clock import Clock, event_or_time
from bus.consuming.consumer import Consumer
from bus.contracts.objects import CellBus, LinkState
from bus.faults import first_fault
from bus.metrics import CELLS_NOT_ENTERED
from bus.retrying import CELL_UNAVAILABLE, Retrying
from bus.service.environment import CellAddressInvalid
from bus.transport import BusError, BusUnavailable

log = structlog.get_logger(__name__)

REOPEN_S = 5.0  # the interval at which a cell's bus is tried again after it could not be entered or found
DRAIN_S = 5.0  # the grace time for batches in progress when a cell is taken out of use
MAX_ADDED = 200  # the bound of cells beyond those of the settings; each has a connection

# Opens the bus of a cell: by the settings (None), or at the address that an operator has defined.
Reach = Callable[[str, CellBus | None], Bus]


class CellLink:
    """Opens the bus of one cell and consumes there, as a side task of the service."""

    def __init__(
        self,
        bus: Bus,
        consumers: Sequence[Consumer],
        tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),  # further tasks, which run while the link is up
    ) -> None:
        self.name = bus.name
        self._bus = bus
        self._consumers = consumers
        self._tasks = tasks
        self.up = asyncio.Event()

    async def run(self) -> None:
        """Connect, however long that takes, and consume until drained. Raises the fault that ended a consumer."""
        await self._bus.transport.open()
        await Retrying(CELL_UNAVAILABLE, self._bus.clock).call(
            self._start,
            lambda error: isinstance(error, BusUnavailable),
            on_failure=lambda error, _: log.warning("cell.unavailable", cell=self.name, reason=str(error)),
        )
        self.up.set()
        async with asyncio.TaskGroup() as running:
            for body in self._tasks:
                running.create_task(body())
            for consumer in self._consumers:
                running.create_task(consumer.run())

    async def _start(self) -> None:
        await self._bus.declare_shared()
        for consumer in self._consumers:
            if not consumer.started:
                await consumer.start()

    async def drain(self, grace_s: float) -> None:
        """Take no further messages, and finish the batches in progress within the grace time (seconds)."""
        await asyncio.gather(*(consumer.drain(grace_s) for consumer in self._consumers))

    async def close(self) -> None:
        """Close the connection."""
        await self._bus.close()


class _CellSlot:
    """One cell."""

    def __init__(self, name: str, where: CellBus | None, link: CellLink | None) -> None:
        self.name = name
        self.where = where
        self.configured = link is not None  # the settings name it
        self.link = link
        self.served = False  # by a task of `run`
        self.desired = True
        self.problem = ""  # why it could not be entered; "": it is, or is tried
        self.changed = asyncio.Event()


class CellLinks:
    """The links of one worker."""

    def __init__(
        self,
        make: Callable[[Bus], CellLink],  # a function that makes the link of a bus, with its consumers
        *,
        clock: Clock,
        reach: Reach,  # opens buses while the worker runs
        # opened, closed: called with a bus when the worker connects to it or disconnects
        opened: Callable[[Bus], None] = lambda _: None,
        closed: Callable[[Bus], object] = lambda _: None,
    ) -> None:
        self.buses: dict[str, Bus] = {}  # the buses of the cells that are in use, by name
        self._make = make
        self._clock = clock
        self._reach = reach
        self._opened = opened
        self._closed = closed
        self._slots: dict[str, _CellSlot] = {}
        self._added = asyncio.Event()
        self._stopping = False

    @property
    def configured(self) -> frozenset[str]:
        """The cells of the settings."""
        return frozenset(name for name, slot in self._slots.items() if slot.configured)

    def configure(self, bus: Bus) -> None:
        """Add a cell of the settings, before the start."""
        self._slots[bus.name] = _CellSlot(bus.name, None, self._make(bus))
        self.buses[bus.name] = bus

    async def entered(self, wait_s: float) -> None:
        """Wait a bounded time (seconds) for the cells of the settings, so that in a system whose processes start
        together all cells are served when it is ready.
        """
        links = [slot.link for slot in self._slots.values() if slot.configured and slot.link is not None]
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.gather(*(link.up.wait() for link in links))
        except TimeoutError:
            log.warning("cells.unavailable", cells=[link.name for link in links if not link.up.is_set()])

    def state_of(self, name: str) -> tuple[LinkState, str]:
        """Return the state of the link to one cell, and why the link is not up."""
        slot = self._slots.get(name)
        if slot is None or not slot.desired:
            return LinkState.CLOSED, ""
        if slot.link is not None and slot.link.up.is_set():
            return LinkState.UP, ""
        return LinkState.CONNECTING, slot.problem

    def unavailable_reason(self, name: str) -> str:
        """The reason why nothing can be published to a cell of the settings; "" when it can, or when the cell is not in
        use.
        """
        slot, bus = self._slots[name], self.buses.get(name)
        if not slot.desired:
            return ""
        return slot.problem or "not connected" if bus is None else bus.unavailable_reason

    def set_cells(self, cells: Mapping[str, CellBus | None]) -> None:
        """Set the cells that are to be in use, with the addresses of their buses; None: the address in the settings."""
        if self._stopping:
            return
        for name, slot in self._slots.items():
            wanted = name in cells
            where = None if slot.configured else cells.get(name, slot.where)
            if (wanted, where) != (slot.desired, slot.where):
                slot.desired, slot.where = wanted, where
                slot.changed.set()
        added = sorted(name for name, where in cells.items() if where is not None and name not in self._slots)
        room = max(0, MAX_ADDED - sum(not slot.configured for slot in self._slots.values()))
        for name in added[:room]:
            self._slots[name] = _CellSlot(name, cells[name], None)
            self._added.set()
        if added[room:]:
            log.error("cells.too_many", most=MAX_ADDED, left_out=added[room : room + 10])

    async def run(self) -> None:
        """Keep the links to all cells, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for slot in [slot for slot in self._slots.values() if not slot.served]:
                    slot.served = True
                    group.create_task(self._hold(slot), name=f"cell {slot.name}")
                self._added.clear()
                await self._added.wait()

    async def _hold(self, slot: _CellSlot) -> None:
        """Serve one cell while it is in use."""
        while not self._stopping:
            if slot.desired:
                await self._serve(slot)
            elif slot.configured:
                await slot.changed.wait()
                slot.changed.clear()
            else:
                del self._slots[slot.name]
                return

    async def _serve(self, slot: _CellSlot) -> None:
        """Serve a cell until it is out of use, its address changes, or it cannot be entered, which keeps no other
        cell waiting.
        """
        slot.changed.clear()
        try:
            link = slot.link or self._open(slot)
            await self._until_changed(slot, link)
            slot.problem = ""
        except Exception as error:  # the worst fault of a group decides
            first = first_fault(error)
            if not isinstance(first, BusError | CellAddressInvalid):
                raise
            slot.problem = str(first)
            CELLS_NOT_ENTERED.labels(slot.name).inc()
            log.error("cell.not_entered", cell=slot.name, code=first.code, reason=slot.problem)
        if self._stopping:
            return
        await self._close(slot)
        if slot.problem:
            await event_or_time(slot.changed, self._clock, REOPEN_S)

    async def _until_changed(self, slot: _CellSlot, link: CellLink) -> None:
        running = asyncio.create_task(link.run(), name=f"link of {slot.name}")
        changed = asyncio.create_task(slot.changed.wait())
        try:
            await asyncio.wait((running, changed), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                log.info("cell.left", cell=slot.name)
                await link.drain(DRAIN_S)
        finally:
            for task in (running, changed):
                task.cancel()
            await asyncio.wait((running, changed))
        if not running.cancelled():
            running.result()  # raises what has ended a consumer, also while the cell was left

    def _open(self, slot: _CellSlot) -> CellLink:
        bus = self._reach(slot.name, slot.where)
        slot.link = self._make(bus)
        self.buses[slot.name] = bus
        self._opened(bus)
        return slot.link

    async def _close(self, slot: _CellSlot) -> None:
        link, slot.link = slot.link, None
        bus = self.buses.pop(slot.name, None)
        if bus is not None:
            self._closed(bus)
        if link is not None:
            await link.close()

    async def drain(self, grace_s: float) -> None:
        """Take no further messages from any cell, and finish the batches in progress within the grace time
        (seconds).
        """
        self._stopping = True
        links = [slot.link for slot in self._slots.values() if slot.link is not None]
        await asyncio.gather(*(link.drain(grace_s) for link in links))

    async def close(self) -> None:
        """Close the connections to all cells."""
        self._stopping = True
        await asyncio.gather(*(slot.link.close() for slot in self._slots.values() if slot.link is not None))
