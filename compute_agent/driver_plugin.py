"""Drivers as plug-ins: an entry point of the group names a `DriverPlugin`, which makes the driver of a service."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from msgspec import Struct

from bus.clock import Clock
from bus.contracts.actions import MachineChanged
from bus.contracts.cell import ComputeResult, Spawn
from bus.service.settings import SettingsError
from compute_agent.driver import Driver
from compute_agent.hosts.hash_ring import Ring
from compute_agent.records.records import Records

GROUP = "berth.drivers"
INVALID = "compute.driver"

Config = TypeVar("Config", bound=Struct)
SendResult = Callable[[ComputeResult | MachineChanged], None]


class DriverContext(Struct, Generic[Config], frozen=True, kw_only=True):
    """The parts of a service that its driver gets. records: opened before the driver; state_dir: for files of its own.

    state: as `compute_agent.app.build` was given it: the machines of a driver whose machines are in memory. die: as
    `build` was given it.
    """

    config: Config
    cell: str
    service: str
    clock: Clock
    records: Records
    state_dir: str | None = None
    state: object | None = None
    die: Callable[[], None] | None = None


class DriverParts(Struct, frozen=True, kw_only=True):
    """A driver and what else it adds to its service. ring: with which services it shares its free hosts.

    tasks: side tasks by name, from the start to the end. wrap_sender: what stands before the sender of results.
    on_accepted: a build was accepted. open, close: called once, before the driver opens and after it has closed.
    """

    driver: Driver
    ring: Ring | None = None
    tasks: tuple[tuple[str, Callable[[], Coroutine[Any, Any, None]]], ...] = ()
    wrap_sender: Callable[[SendResult], SendResult] = lambda send: send
    on_accepted: Callable[[Spawn], None] = lambda _: None
    open: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


class DriverPlugin(Struct, Generic[Config], frozen=True, kw_only=True):
    """One kind of driver. config_type: its settings, `compute.<name>` or `compute.options`.

    synced: whether the service's records are to survive a power cut, as machines do that are real.
    """

    config_type: type[Config]
    make: Callable[[DriverContext[Config]], DriverParts]
    synced: bool = True


def load(name: str) -> DriverPlugin[Any]:
    """The plug-in of this name. Raises SettingsError."""
    there_are = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in there_are:
        raise SettingsError(INVALID, f"there is no driver {name} (there are: {', '.join(sorted(there_are))})")
    try:
        plugin = there_are[name].load()
    except Exception as error:  # an operator's own code
        raise SettingsError(INVALID, f"{name}: {type(error).__name__}: {error}") from error
    if not isinstance(plugin, DriverPlugin):
        raise SettingsError(INVALID, f"{name}: not a DriverPlugin but {type(plugin).__name__}")
    return plugin
