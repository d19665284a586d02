"""Where buses and the database are, by the settings: the one place that chooses adapters."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import asyncpg
import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from berth.config.settings import EMBEDDED, MEMORY, CellSettings, Settings
from berth.config.tracing import make_tracer
from bus.bus import API, Bus
from bus.clock import Clock, SystemClock
from bus.contracts.base import Word
from bus.contracts.objects import CellBus, CellDecision, CellState, ObjectKind
from bus.contracts.queues import is_project_bus
from bus.faults import DatabaseUnavailable, DatabaseUnprepared, Fault
from bus.local import LocalTransport
from bus.memory import MemoryBroker, MemoryTransport
from bus.rabbitmq.address import BadBusUrl, parse_bus_url, with_vhost
from bus.rabbitmq.transport import RabbitTransport
from bus.service.environment import CellAddressInvalid, Environment
from bus.service.settings import SettingsError
from bus.tracing.tracer import Tracer
from bus.transport import Transport
from compute_agent.drivers.ironic.config import IronicConfig

log = structlog.get_logger("site")

IRONIC = "ironic"  # the driver of bare metal
RUNTIME_FILE = "runtime.json"
MAX_URL_BYTES = 4096  # of a file with the URL of a cell's bus
HEARTBEAT_S = 5.0  # how often a worker publishes its heartbeat (`berth worker list`)


class Runtime(Struct, frozen=True, kw_only=True):
    """The file that a running `berth up` leaves for other commands of this computer: how to reach what it embeds.

    buses: {"api" or a cell: URL} of a broker that it started; empty: its memory buses, at its socket.
    """

    pid: int
    database_url: str
    ironic_url: str = ""
    buses: dict[str, str] = {}


class Brokers:
    """The memory brokers of one process, one a bus, made when first needed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.by_bus: dict[str, MemoryBroker] = {}

    def transport(self, name: str, prefix: str = "") -> Transport:
        """A connection of its own to one bus."""
        return MemoryTransport(self.broker(name), name, prefix=prefix)

    def broker(self, name: str) -> MemoryBroker:
        """The broker that holds one bus."""
        if name not in self.by_bus:
            self.by_bus[name] = MemoryBroker(self._clock)
        return self.by_bus[name]


class Site:
    """Makes environments for workers and buses for clients.

    brokers: set in the process that holds the memory buses; elsewhere `memory://` means its socket.
    database_url: overrides the settings (an embedded server's, once it runs).
    """

    def __init__(
        self,
        settings: Settings,
        *,
        brokers: Brokers | None = None,
        database_url: str | None = None,
        clock: Clock | None = None,
        seed: int | None = None,
    ) -> None:
        self.settings = settings
        self.brokers = brokers
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.rng = random.Random(seed)
        self._database_url = database_url
        self._tracers: dict[str, Tracer] = {}
        self.connections: list[tuple[str, str]] = []  # (process, bus): who holds a connection to what

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells' names, in the settings' order."""
        return tuple(self.settings.cells)

    @property
    def database_url(self) -> str | None:
        """Where PostgreSQL is, or None when it is unknown (an embedded one that does not run)."""
        if self._database_url is not None:
            return self._database_url
        if self.settings.database.url != EMBEDDED:
            return self.settings.database.url
        runtime = read_runtime(self.settings.state)
        return runtime.database_url if runtime is not None else None

    def transport(self, name: str, *, process: str) -> Transport:
        """A fresh connection to "api" or a cell's bus."""
        return self._transport(name, *self.place_of(name), process)

    def added_cell(self, name: str, where: CellBus, *, process: str) -> Transport:
        """A fresh connection to the bus of an added cell. Raises CellAddressInvalid.

        A cell that the settings name is as they have it.
        """
        if name in self.settings.cells:
            return self.transport(name, process=process)
        url = url_of(where, self.settings.cells_dir, os.environ)
        return self._transport(name, *self._place_of_cell(name, url, where.prefix), process)

    def _transport(self, name: str, url: str, prefix: str, process: str) -> Transport:
        self.connections.append((process, name))
        if url == MEMORY:
            if self.brokers is not None:
                return self.brokers.transport(name, prefix)
            return LocalTransport(self.settings.socket, name=name, prefix=prefix)
        return RabbitTransport(url, name=name, prefix=prefix, connection_name=f"berth {process}")

    def tracer(self, process: str, role: str = "") -> Tracer | None:
        """The tracer of one process; None: the settings have no traces. role: the process's name begins with it."""
        if not self.settings.traces.endpoint:
            return None
        found = self._tracers.get(process)
        if found is None:
            found = self._tracers[process] = make_tracer(self.settings.traces, process, role)
        return found

    async def close(self) -> None:
        """Export the spans that are left."""
        for tracer in self._tracers.values():
            await tracer.close()

    def environment(self, process: str, role: str = "", *, takes_cells: bool = True) -> Environment:
        """The arguments of one worker's app. role: as its traces name it; "": as the process's name begins.

        takes_cells: it takes cells into use that operators add, which it learns from schedulers.
        """
        return Environment(
            process,
            transports=lambda name: self.transport(name, process=process),
            cell_transports=(lambda name, where: self.added_cell(name, where, process=process))
            if takes_cells
            else None,
            database_url=self.database_url,
            cells=self.cells,
            clock=self.clock,
            rng=random.Random(self.rng.getrandbits(64)),
            pool_size=self.settings.database.pool_size,
            heartbeat_s=HEARTBEAT_S,
            tracer=self.tracer(process, role),
        )

    def bus(self, process: str, name: str = API) -> Bus:
        """A bus for a client or an instrument."""
        return self.environment(process).bus(name)

    def check_cell(self, name: str) -> str:
        """The cell's name when the settings know it. Raises SettingsError."""
        if name not in self.settings.cells:
            known = ", ".join(self.settings.cells)
            raise SettingsError("cell.unknown", f"there is no cell {name!r}; the settings know {known}")
        return name

    def place_of(self, name: str) -> tuple[str, str]:
        """URL (its password included) and prefix of the API bus, or of the bus of a cell of the settings."""
        bus = self.settings.bus
        if bus.url == MEMORY and self.brokers is None:
            runtime = read_runtime(self.settings.state)
            if runtime is not None and name in runtime.buses:
                return runtime.buses[name], ""
        if name == API:
            return bus.url, bus.prefix
        if is_project_bus(name):  # its virtual host has no other system's names
            return clients_url(self.settings, name), ""
        cell = self.settings.cells[name]
        return self._place_of_cell(name, cell.url, cell.prefix)

    def _place_of_cell(self, name: str, url: str, prefix: str) -> tuple[str, str]:
        bus = self.settings.bus
        if url:
            return url, prefix
        if bus.url == MEMORY:
            return bus.url, prefix  # a memory broker of its own
        return bus.url, prefix or f"{bus.prefix}{name}."


def clients_url(settings: Settings, bus: str) -> str:
    """The URL of a project's bus, its virtual host on the clients' broker."""
    url = settings.gateway.url or settings.bus.url
    return url if url == MEMORY else with_vhost(url, bus)


def url_of(where: CellBus, directory: str, variables: Mapping[str, str]) -> str:
    """The URL of an added cell's bus; "": that of the API bus. Raises CellAddressInvalid, which shows no part of it."""
    if where.url_variable:
        what, text = f"variable {where.url_variable}", variables.get(where.url_variable, "")
    elif where.url_file:
        what = f"file {where.url_file} in cells_dir"
        if not directory:
            raise CellAddressInvalid(f"{what}: the setting cells_dir is empty")
        try:
            with (Path(directory) / where.url_file).open("rb") as file:
                text = file.read(MAX_URL_BYTES + 1).decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise CellAddressInvalid(f"{what}: {reason}") from None
    else:
        return ""
    text = text.strip()
    try:
        if text != MEMORY:
            parse_bus_url(text)
    except BadBusUrl as error:
        raise CellAddressInvalid(f"{what}: {error}") from None
    return text


def process_name(role: str, extra: str = "") -> str:
    """A name for this process that no other has at the same time: safe as part of a queue's name."""
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:20]
    word = "-".join(part for part in (role, extra, host, str(os.getpid())) if part)
    return msgspec.convert(word[:64], Word)


def read_runtime(state: Path) -> Runtime | None:
    """The content of that file, if the `berth up` that wrote it still runs."""
    try:
        runtime = msgspec.json.decode((state / RUNTIME_FILE).read_bytes(), type=Runtime)
        os.kill(runtime.pid, 0)
    except (OSError, msgspec.DecodeError):
        return None
    return runtime


def ironic_of(settings: Settings) -> IronicConfig | None:
    """Ironic as a running `berth up` has one, or as the compute service's settings name it; None: there is none."""
    config, runtime = settings.compute.ironic, read_runtime(settings.state)
    if runtime is not None and runtime.ironic_url:
        return replace(config, url=runtime.ironic_url)
    return config if settings.compute.driver == IRONIC or config != IronicConfig() else None


def write_runtime(state: Path, runtime: Runtime) -> Callable[[], None]:
    """Write the runtime file for other commands; returns a function that removes it."""
    state.mkdir(parents=True, exist_ok=True)
    path = state / RUNTIME_FILE
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(runtime))
    return lambda: path.unlink(missing_ok=True)


# A worker waits for a database without end; who only asks which cells there are does not.
DECISIONS_TIMEOUT_S = 5.0
_DECISIONS = "SELECT name, body FROM objects WHERE kind = $1 ORDER BY name"


async def with_added_cells(site: Site, but: Collection[str] = ()) -> Site:
    """The same place, with every cell that an operator has added and not removed. but: cells that are left out.

    Raises CellAddressInvalid: this process finds no URL where a cell's is to be.
    """
    added = {
        name: CellSettings(url=url_of(where, site.settings.cells_dir, os.environ), prefix=where.prefix)
        for name, where in (await added_cells(site)).items()
        if name not in but
    }
    left = {name: cell for name, cell in site.settings.cells.items() if name not in but}
    if not added and len(left) == len(site.settings.cells):
        return site
    settings = replace(site.settings, cells={**left, **added})
    return Site(settings, brokers=site.brokers, database_url=site.database_url, clock=site.clock)


async def added_cells(site: Site) -> dict[str, CellBus]:
    """The cells that an operator has added and not removed, beside those of the settings: where the bus of each is."""
    return _added(await _decisions(site.environment("cells")), site.settings.cells)


async def cells_in_use(env: Environment) -> dict[str, CellBus | None]:
    """The cells of the settings (None: their buses are there), and those that an operator has added and not removed.

    Raises DatabaseUnavailable, NotConfigured.
    """
    return {**dict.fromkeys(env.cells), **_added(await _decisions(env), env.cells)}


async def bus_transports(env: Environment) -> Mapping[str, Callable[[], Transport]]:
    """{bus: makes a fresh connection to it}: the API bus, and each cell in use. While the database cannot be read only
    those of the settings. Of an added cell whose URL this process does not find, it raises CellAddressInvalid.
    """
    cells: dict[str, CellBus | None] = dict.fromkeys(env.cells)
    try:
        cells = await cells_in_use(env)
    except Fault as fault:
        log.warning("cells.not_known", code=fault.code, reason=fault.reason)
    return {API: partial(env.transport, API)} | {
        name: partial(env.transport, name) if where is None else partial(_cell_transport, env, name, where)
        for name, where in cells.items()
    }


def _cell_transport(env: Environment, name: str, where: CellBus) -> Transport:
    return env.cell_bus(name, where).transport


def _added(decisions: Mapping[str, CellDecision], known: Collection[str]) -> dict[str, CellBus]:
    return {
        name: decision.bus
        for name, decision in decisions.items()
        if name not in known and decision.bus is not None and decision.state is not CellState.REMOVED
    }


async def _decisions(env: Environment) -> dict[str, CellDecision]:
    database = env.database("scheduler", pool_size=1)
    try:
        async with asyncio.timeout(DECISIONS_TIMEOUT_S), database.raw() as connection:
            rows = await connection.fetch(_DECISIONS, ObjectKind.CELL.value)
    except (asyncpg.UndefinedTableError, DatabaseUnprepared):  # no scheduler was ever started: no operator added one
        return {}
    except TimeoutError:
        raise DatabaseUnavailable(f"no answer from the database within {DECISIONS_TIMEOUT_S:g} s") from None
    finally:
        await database.close()
    return {name: msgspec.json.decode(body, type=CellDecision) for name, body in rows}
