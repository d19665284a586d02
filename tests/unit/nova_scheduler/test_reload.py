"""Settings that are read again while a frontend runs: what is applied, what needs a restart, and a wrong file."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from berth.config.settings import Settings, TelemetrySettings
from bus.clock import new_uuid
from bus.service.settings import SettingsError
from nova_scheduler.app import DecisionSettings, filters_of
from nova_scheduler.cloud.state import NovaAggregate
from nova_scheduler.config import NovaConfig
from nova_scheduler.decide.placer_requests import PlacerRequests
from nova_scheduler.reload import SettingsReload
from scheduler_worker.config import SchedulerConfig
from tests.unit.nova_scheduler.world import PLENTY, Cloud

RUNNING = Settings(nova=NovaConfig(enabled_filters=("ComputeFilter",)))
DIFFERENT_HOST = ("ComputeFilter", "DifferentHostFilter")


class Process:
    """What is read, and what comes of it."""

    def __init__(self) -> None:
        self.file: Settings | SettingsError = RUNNING
        self.applied: list[tuple[NovaConfig, SchedulerConfig]] = []
        self.refused: SettingsError | None = None
        self.levels: list[str] = []
        self.reload = SettingsReload(RUNNING, self._read, self.levels.append)

    def _read(self) -> Settings:
        if isinstance(self.file, SettingsError):
            raise self.file
        return self.file

    def _apply(self, nova: NovaConfig, scheduler: SchedulerConfig) -> None:
        if self.refused is not None:
            raise self.refused
        self.applied.append((nova, scheduler))

    def run(self) -> dict[str, Any]:
        """Read it again: {event: its settings}."""
        with capture_logs() as lines:
            self.reload.run(self._apply)
        return {line["event"]: line.get("settings", line.get("code")) for line in lines}


def test_what_a_running_process_takes_is_applied_and_the_rest_is_named() -> None:
    process = Process()
    scheduler = replace(RUNNING.scheduler, multipliers={"ram": -1.0}, max_attempts=5)
    nova = replace(RUNNING.nova, enabled_filters=DIFFERENT_HOST, transport_url="amqp://other")
    telemetry = TelemetrySettings(log_level="debug", http_port=1)
    process.file = replace(RUNNING, nova=nova, scheduler=scheduler, telemetry=telemetry)
    assert process.run() == {
        "nova.settings_reloaded": ["nova.enabled_filters", "scheduler.multipliers", "telemetry.log_level"],
        "nova.restart_needed": ["nova.transport_url", "scheduler.max_attempts", "telemetry.http_port"],
    }
    ((applied, weighed),) = process.applied
    assert applied == replace(RUNNING.nova, enabled_filters=DIFFERENT_HOST)
    assert weighed == replace(RUNNING.scheduler, multipliers={"ram": -1.0})
    assert process.levels == ["debug"]
    again = process.run()
    assert again["nova.settings_reloaded"] == [] and len(again["nova.restart_needed"]) == 3
    process.file = RUNNING
    assert len(process.run()["nova.settings_reloaded"]) == 3
    assert process.applied[-1] == (RUNNING.nova, RUNNING.scheduler)


def test_a_wrong_file_changes_nothing() -> None:
    process = Process()
    process.file = SettingsError("settings.invalid", "a word is no number")
    assert process.run() == {"nova.settings_refused": "settings.invalid"}
    process.file = replace(RUNNING, telemetry=TelemetrySettings(log_level="debug"))
    process.refused = SettingsError("plugin.invalid", "no such filter")
    assert process.run() == {"nova.settings_refused": "plugin.invalid"}
    assert (process.applied, process.levels) == ([], [])
    process.refused = None
    assert process.run() == {"nova.settings_reloaded": ["telemetry.log_level"]}


async def test_a_filter_that_is_enabled_rejects_from_the_next_call_on() -> None:
    here = await Cloud([PLENTY] * 2, nova=NovaConfig(enabled_filters=("ComputeFilter",))).open()
    requests = PlacerRequests(here.selector, here.facts, here.nova)
    settings = DecisionSettings(here.selector, here.facts, requests, here.config, filters_of)
    settings.configure()
    before = here.selector.config
    with pytest.raises(SettingsError):
        settings.apply(NovaConfig(enabled_filters=("NoSuchFilter",)), SchedulerConfig())
    with pytest.raises(SettingsError):
        settings.apply(here.nova, SchedulerConfig(multipliers={"no_such_weigher": 1.0}))
    settings.configure()
    assert here.selector.config is before
    here.facts.put_aggregates([NovaAggregate(uuid=new_uuid(here.rng), name="a")], complete=True)
    settings.configure()
    assert here.selector.config.filters == before.filters and len(here.selector.config.settings.aggregates) == 1
    settings.apply(NovaConfig(enabled_filters=DIFFERENT_HOST), SchedulerConfig(multipliers={"ram": -3.0}))
    now = here.selector.config
    assert [one.name for one in now.filters] == list(DIFFERENT_HOST) and now.revision != before.revision
    assert {one.weigher.name: one.multiplier for one in now.weighings}["ram"] == -3.0
    settings.configure()
    assert here.selector.config is now


async def test_an_option_of_a_filter_is_the_new_one() -> None:
    here = await Cloud([PLENTY]).open()
    requests = PlacerRequests(here.selector, here.facts, here.nova)
    settings = DecisionSettings(here.selector, here.facts, requests, here.config, filters_of)
    config = NovaConfig(enabled_filters=("IsolatedHostsFilter",))
    settings.apply(config, SchedulerConfig(isolated_hosts=("h0",), isolated_images=("i",)))
    (found,) = here.selector.config.filters
    assert found.name == "IsolatedHostsFilter" and here.selector.config.settings.isolated_hosts == ("h0",)
