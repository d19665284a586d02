"""Settings that a running process reads again when it is told to (SIGHUP). The others need a restart, and are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.service.settings import SettingsError
from nova_scheduler.config import NovaConfig
from scheduler_worker.config import SchedulerConfig

log = structlog.get_logger("nova")

LOG_LEVEL: Final = "telemetry.log_level"
OF_NOVA: Final = ("enabled_filters",)
OF_SCHEDULER: Final = (
    "available_filters",
    "enabled_weighers",
    "multipliers",
    "max_io_ops_per_host",
    "max_instances_per_host",
    "isolated_hosts",
    "isolated_images",
    "restrict_isolated_hosts_to_isolated_images",
)
RELOADED: Final = frozenset(
    {LOG_LEVEL, *(".".join(("nova", one)) for one in OF_NOVA), *(".".join(("scheduler", one)) for one in OF_SCHEDULER)}
)


class Telemetry(Protocol):
    """What is read of `[telemetry]`."""

    @property
    def log_level(self) -> str:
        """The least severe level that is logged."""


class ProcessSettings(Protocol):
    """All settings of a process."""

    @property
    def nova(self) -> NovaConfig:
        """`[nova]`."""

    @property
    def scheduler(self) -> SchedulerConfig:
        """`[scheduler]`."""

    @property
    def telemetry(self) -> Telemetry:
        """`[telemetry]`."""


class SettingsReload:
    """Reads the settings again, and applies what a running process can. All of it, or nothing."""

    def __init__(
        self,
        running: ProcessSettings,
        read: Callable[[], ProcessSettings],  # raises SettingsError
        set_log_level: Callable[[str], None],
    ) -> None:
        self._running = running
        self._values = dict(values_of(running))
        self._read = read
        self._set_log_level = set_log_level

    def run(self, apply: Callable[[NovaConfig, SchedulerConfig], None]) -> None:
        """Do it now. apply: decides by these from now on; raises SettingsError, and has changed nothing then."""
        try:
            found = self._read()
            nova = replace(self._running.nova, **{name: getattr(found.nova, name) for name in OF_NOVA})
            changed = {name: getattr(found.scheduler, name) for name in OF_SCHEDULER}
            apply(nova, replace(self._running.scheduler, **changed))
        except SettingsError as fault:
            log.error("nova.settings_refused", code=fault.code, reason=str(fault))
            return
        self._set_log_level(found.telemetry.log_level)
        values = dict(values_of(found))
        differing = {path for path in self._values.keys() | values if self._values.get(path) != values.get(path)}
        applied = differing & RELOADED
        self._values |= {path: values[path] for path in applied}
        log.info("nova.settings_reloaded", settings=sorted(applied))
        if waiting := sorted(differing - RELOADED):
            log.warning("nova.restart_needed", settings=waiting)


def values_of(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting by its dotted path."""
    for name in settings.__struct_fields__:
        value, full = getattr(settings, name), f"{path}{name}"
        if isinstance(value, Struct):
            yield from values_of(value, f"{full}.")
        else:
            yield full, value
