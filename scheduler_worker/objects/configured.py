"""What a scheduler runs with: a configuration, its flavors parsed, its filters and weighers loaded."""

from __future__ import annotations

from collections.abc import Sequence

from bus.contracts.base import Refusal
from bus.contracts.objects import ObjectsChange
from bus.service.settings import SettingsError
from scheduler_worker import plugins
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.objects import cell_consequences, zone_consequences
from scheduler_worker.objects.change_plan import plan
from scheduler_worker.objects.consistency import broken_rule
from scheduler_worker.objects.effective_config import configuration_bodies, effective_config, seeds, unknown_class
from scheduler_worker.records.object_records import (
    INVALID,
    UNKNOWN,
    ZONE_CONFLICT,
    ChangeActor,
    ChangePlan,
    RecordedObjects,
    applied,
)
from scheduler_worker.selection.flavor import parse
from scheduler_worker.selection.selector_config import SelectorConfig

SEEDED_BY = "settings"


def configured(settings: SchedulerConfig) -> SelectorConfig:
    """Parse flavors, load filters and weighers. Raises FlavorInvalid or SettingsError."""
    return SelectorConfig(
        settings,
        flavors={name: parse(name, flavor) for name, flavor in settings.flavors.items()},
        filters=plugins.filters(settings),
        weighings=plugins.weighings(settings),
    )


def check_objects(
    settings: SchedulerConfig, changes: ObjectsChange | None = None, cells: Sequence[str] = ()
) -> SelectorConfig:
    """The configuration that the settings' own objects make with these changes, as a scheduler would use it. cells: of
    the settings; with them names are looked up, too. Raises SettingsError, whose reason names the object.
    """
    try:
        seeded = seeds(settings)
        first = applied(RecordedObjects(0, {}), seeded, ChangeActor(SEEDED_BY, "", 0.0)).objects
        if (problem := broken_rule(seeded, configuration_bodies(first))) is not None:
            raise SettingsError(INVALID, problem)
        planned = ChangePlan(()) if changes is None else plan(changes, first)
        if isinstance(planned, Refusal):
            raise SettingsError(planned.code, planned.reason)
        if cells and (refused := cell_consequences.unknown_cell(cells, planned.cells_decided)) is not None:
            raise SettingsError(refused.code, refused.reason)
        if cells and (problem := unknown_class((*seeded, *planned.changed))) is not None:
            raise SettingsError(UNKNOWN, problem)
        made = effective_config(settings, configuration_bodies(first, planned.changed))
        if (problem := zone_consequences.zone_conflict({}, zone_consequences.zones_named(made.aggregates))) is not None:
            raise SettingsError(ZONE_CONFLICT, problem)
        return configured(made)
    except ValueError as error:
        raise SettingsError(getattr(error, "code", INVALID), str(error)) from error
