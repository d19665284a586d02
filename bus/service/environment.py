"""The resources that a worker's `app.py` receives: its identity, the clock, the random generator, buses and databases.
The worker chooses none of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from bus.bus import API, Bus
from bus.clock import Clock, SystemClock
from bus.consuming.stall_watch import StallWatch
from bus.contracts.objects import CellBus
from bus.faults import Fault
from bus.tracing.tracer import Tracer
from bus.transport import Transport

if TYPE_CHECKING:
    from bus.persistence.database import Database

DEFAULT_POOL_SIZE = 8


class NotConfigured(Fault):
    """This process has no settings for the bus or database that its worker needs."""

    code = "environment.not_configured"


class CellAddressInvalid(Fault):
    """This process finds no URL of a bus where an added cell's is to be."""

    code = "cell.address"


class Environment:
    """The surroundings of one process (or of one worker among several in a process)."""

    def __init__(
        self,
        process: str,
        *,
        transports: Callable[[str], Transport],  # makes a fresh transport for a bus by name ("api" or a cell's)
        cell_transports: Callable[[str, CellBus], Transport] | None = None,  # of cells added at run time; None: none is
        database_url: str | None = None,  # one PostgreSQL for all roles, a schema each; None: not needed
        cells: tuple[str, ...] = (),
        clock: Clock | None = None,
        rng: random.Random | None = None,
        pool_size: int = DEFAULT_POOL_SIZE,
        heartbeat_s: float | None = None,  # how often the worker publishes a heartbeat; None: never
        tracer: Tracer | None = None,  # None: no traces
    ) -> None:
        self.process = process
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.rng = rng if rng is not None else random.Random()
        self.cells = cells
        self.heartbeat_s = heartbeat_s
        self.tracer = tracer
        self._stall_watch = StallWatch()
        self._transports = transports
        self._cell_transports = cell_transports
        self.database_url = database_url
        self._pool_size = pool_size

    def bus(self, name: str = API) -> Bus:
        """A fresh bus with its own connection: "api", or a cell's name."""
        return self._bus(name, self.transport(name))

    @property
    def takes_cells(self) -> bool:
        """Whether cells can be added while this process runs."""
        return self._cell_transports is not None

    def cell_bus(self, name: str, where: CellBus | None) -> Bus:
        """A fresh bus of a cell that is taken into use at run time; where None: as in the settings.

        Raises CellAddressInvalid.
        """
        if where is None:
            return self.bus(name)
        assert self._cell_transports is not None, name
        return self._bus(name, self._cell_transports(name, where))

    def _bus(self, name: str, transport: Transport) -> Bus:
        rng = random.Random(self.rng.getrandbits(64))  # so that buses do not change each other's ids
        return Bus(
            name,
            transport,
            process=self.process,
            clock=self.clock,
            rng=rng,
            tracer=self.tracer,
            stall_watch=self._stall_watch,
        )

    def transport(self, name: str) -> Transport:
        """Return a separate connection to a bus, for traffic that belongs to no worker."""
        return self._transports(name)

    def database(self, role: str, *, pool_size: int | None = None) -> Database:
        """The schema of one role: "placement", "scheduler", "cell_<name>", "ironic_sync". Raises NotConfigured."""
        if self.database_url is None:
            raise NotConfigured(f"{self.process} has no database URL, and {role} needs one")
        # SQLAlchemy takes a third of a start, and neither a compute service nor most commands have a database.
        from bus.persistence.database import Database  # noqa: PLC0415

        return Database(
            self.database_url, role, pool_size=pool_size or self._pool_size, application_name=f"berth {self.process}"
        )
