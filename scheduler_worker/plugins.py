"""Loads filters and weighers by class path; an unknown or invalid one fails the start."""

from __future__ import annotations

import importlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bus.service.settings import SettingsError
from scheduler_worker.config import DEFAULT_FILTERS, DEFAULT_WEIGHERS, MORE_FILTERS, NOVA_WEIGHERS, SchedulerConfig
from scheduler_worker.filters.host_state import MetricsFilter
from scheduler_worker.selection.plugin import Filter, Weigher, Weighing


class PluginInvalid(SettingsError):
    """A configured filter or weigher cannot be used."""

    def __init__(self, reason: str) -> None:
        super().__init__("plugin.invalid", reason)


def filters(config: SchedulerConfig, made_already: Mapping[str, Filter] = {}) -> list[Filter]:
    """The enabled filters in order, from berth's own and `available_filters`. made_already: by name. Raises
    PluginInvalid.
    """
    available = _available(config)
    if missing := lacking(config, made=made_already):
        names = sorted({path.rpartition(".")[2] for path in available.values()})
        raise PluginInvalid(f"filter {missing[0]!r} is not available (available: {', '.join(names)})")
    made: list[Filter] = [
        made_already[enabled] if enabled in made_already else _instance(available[enabled], "filter", config)
        for enabled in config.enabled_filters
    ]
    if config.metrics.required and config.metrics.weights and not any(isinstance(one, MetricsFilter) for one in made):
        raise PluginInvalid("metrics.required: enable MetricsFilter, which keeps hosts without those metrics away")
    return made


def lacking(config: SchedulerConfig, *, made: Collection[str] = ()) -> tuple[str, ...]:
    """The enabled filters that are neither berth's own nor among `available_filters`. made: names of others."""
    available = {*_available(config), *made}
    return tuple(one for one in config.enabled_filters if one not in available)


def _available(config: SchedulerConfig) -> dict[str, str]:
    return _by_name((*DEFAULT_FILTERS, *MORE_FILTERS, *config.available_filters))


def _by_name(paths: Sequence[str]) -> dict[str, str]:
    """Each class path, by itself and by the name of its class."""
    return {path.rpartition(".")[2]: path for path in paths} | {path: path for path in paths}


def weighings(config: SchedulerConfig) -> list[Weighing]:
    """The enabled weighers with their multipliers, without those whose multiplier is 0. Raises PluginInvalid."""
    own = _by_name((*DEFAULT_WEIGHERS, *NOVA_WEIGHERS))
    made: list[Weigher] = [_instance(own.get(one, one), "weigh", config) for one in config.enabled_weighers]
    unknown = config.multipliers.keys() - {weigher.name for weigher in made}
    if unknown and (unknown := unknown - {_instance(path, "weigh", config).name for path in NOVA_WEIGHERS}):
        raise PluginInvalid(f"multipliers for weighers that are not enabled: {', '.join(sorted(unknown))}")
    if endless := sorted(name for name, value in config.multipliers.items() if not math.isfinite(value)):
        raise PluginInvalid(f"multipliers that are no finite number: {', '.join(endless)}")
    chosen = [Weighing(weigher, config.multipliers.get(weigher.name, weigher.multiplier)) for weigher in made]
    return [weighing for weighing in chosen if weighing.multiplier or _has_metadata(config, weighing)]


def _has_metadata(config: SchedulerConfig, weighing: Weighing) -> bool:
    key = f"{weighing.weigher.name}_weight_multiplier"
    return any(key in aggregate.metadata for aggregate in config.aggregates)


def _instance(path: str, method: str, config: SchedulerConfig) -> Any:
    """A plug-in is made by its `from_config(config)`, if it has one, else without arguments."""
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
        made = kind.from_config(config) if hasattr(kind, "from_config") else kind()
    except ModuleNotFoundError as error:
        raise PluginInvalid(f"{path}: {error}: is it installed, or its directory in PYTHONPATH?") from error
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise PluginInvalid(f"{path}: {error}") from error
    if not callable(getattr(made, method, None)) or not isinstance(getattr(made, "name", None), str):
        raise PluginInvalid(f"{path} has no {method}() or no name")
    return made
