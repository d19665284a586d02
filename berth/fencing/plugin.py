"""The interface of a fencing plug-in, and how one is loaded: by its name among the entry points of group"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol

from berth.fencing.ironic import IronicPower
from berth.settings import FencingSettings
from bus.clock import Clock
from bus.contracts.build import HostRecord
from bus.faults import Fault
from bus.service.settings import SettingsError


class FencingFailed(Fault):
    """The host could not be switched off, or it is not certain that it is off. It must not be fenced."""

    code = "fencing.failed"


GROUP = "berth.fencing"


class FencingPlugin(Protocol):
    """Switches hosts off. Made by its class method `from_settings(settings, clock)`, which may raise SettingsError."""

    async def switch_off(self, host: HostRecord) -> str:
        """Return when the host is proved to be off; how that is known, for the log of changes.

        It may be called again for a host that is off. Raises FencingFailed: the host may still run; any other
        exception counts as that, too. It is cancelled after `fencing.timeout_s`.
        """

    async def close(self) -> None:
        """Close connections."""


def load(settings: FencingSettings, *, clock: Clock) -> FencingPlugin:
    """The plug-in that the settings name. Raises SettingsError."""
    if not settings.plugin:
        raise SettingsError("fencing.plugin", "no plug-in is named: set fencing.plugin; `ironic` comes with berth")
    if settings.plugin == "ironic":
        return IronicPower.from_settings(settings, clock)
    there_are = {entry.name: entry for entry in entry_points(group=GROUP)}
    if settings.plugin not in there_are:
        names = ", ".join(sorted({"ironic", *there_are}))
        raise SettingsError("fencing.plugin", f"there is no plug-in {settings.plugin} (there are: {names})")
    try:
        plugin: FencingPlugin = there_are[settings.plugin].load().from_settings(settings, clock)
    except SettingsError:
        raise
    except Exception as error:  # an operator's own code
        raise SettingsError("fencing.plugin", f"{settings.plugin}: {type(error).__name__}: {error}") from error
    return plugin
