"""The parts of one compute service, made in the order in which they need each other.

Changes on a host meet in `PendingHostReports`, so that none of these parts calls one that is made after it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from bus.contracts.base import reason_of
from bus.retrying import Retrying, RetryPolicy
from bus.service.settings import SettingsError
from compute_agent.attempts.agent import Agent, Limits
from compute_agent.attempts.destroys import Destroys
from compute_agent.attempts.jobs import Jobs
from compute_agent.attempts.result_publisher import ResultSender
from compute_agent.attempts.results import Results
from compute_agent.config import ComputeConfig
from compute_agent.driver import DriverUnavailable, MeasuringDriver, WaitingDriver
from compute_agent.driver_guard import isolate_driver
from compute_agent.driver_plugin import INVALID, DriverContext, DriverParts, DriverPlugin, load
from compute_agent.handlers import ComputeHandlers
from compute_agent.hosts.heartbeats import Reporter
from compute_agent.hosts.host_conflicts import HostConflicts
from compute_agent.hosts.host_metrics import Measuring
from compute_agent.hosts.inventory_reporter import InventoryReporter
from compute_agent.hosts.machine_listing import MachineLister
from compute_agent.hosts.machine_lookup import MachineLookup
from compute_agent.hosts.pending_reports import PendingHostReports
from compute_agent.hosts.quarantine import Quarantine
from compute_agent.hosts.scan import MachineScanner
from compute_agent.hosts.service_name import ServiceName
from compute_agent.hosts.startup_gate import StartupGate
from compute_agent.hosts.waiting_builds import WaitingReporter
from compute_agent.records.records import Records

if TYPE_CHECKING:
    from bus.service.environment import Environment

log = structlog.get_logger()

STOP_GRACE_S = 3.0  # builds may end within this time; later ones are resumed by the next start
FLUSH_S = 3.0  # results that the broker has not confirmed within this are published by the next start
DRIVER = RetryPolicy(first_s=0.2, longest_s=10.0, least=0.0)  # for the driver at the start, until it is available


class ComputeServiceParts:
    """One service's parts, and how they open, drain and close together. Its arguments are those of
    `compute_agent.app.build`.
    """

    def __init__(
        self,
        env: Environment,
        config: ComputeConfig,
        *,
        cell: str,
        service: str,
        records: Records | None,
        driver: DriverParts | None,
        driver_state: object | None,
        die: Callable[[], None] | None,
    ) -> None:
        self._env = env
        self._config = config
        self._cell = cell
        self._service = service
        self.bus = env.bus(cell)
        self.clock = env.clock
        self.records, self._driver_parts = self._records_and_driver(records, driver, driver_state, die)
        self._driver = self._driver_parts.driver
        self.driver = isolate_driver(self._driver)
        self.ring = self._driver_parts.ring
        self.tasks = self._driver_parts.tasks
        self.name = self._name()
        self.results_sender = self._new_results_sender()
        self.changes = PendingHostReports(env.clock)
        self.host_conflicts = HostConflicts(service=service, changes=self.changes, clock=env.clock)
        self.startup_gate = self._startup_gate()
        self.quarantine = Quarantine(
            service=service, driver=self.driver, records=self.records, on_changed=self.changes.on_host_changed
        )
        self.scanner = MachineScanner(self.driver, self.records, on_listed=self.quarantine.drop_absent)
        self.lookup = MachineLookup(service=service, driver=self.driver, records=self.records, scanner=self.scanner)
        self.jobs = Jobs()
        self._send = self._driver_parts.wrap_sender(self.results_sender.send)
        self._results = Results(service, self._send, self.clock, self.records)
        self.destroys = self._destroys()
        self.agent = self._agent()
        self.reporter = self._reporter()
        self.inventory = self._inventory()
        self.handlers = self._handlers()

    # --- construction

    def _records_and_driver(
        self, records: Records | None, driver: DriverParts | None, state: object | None, die: Callable[[], None] | None
    ) -> tuple[Records, DriverParts]:
        if driver is not None:
            return records or self._new_records(synced=True), driver
        plugin = load(self._config.driver)
        records = records or self._new_records(synced=plugin.synced)
        context = DriverContext(
            config=_settings_of(plugin, self._config),
            cell=self._cell,
            service=self._service,
            clock=self.clock,
            records=records,
            state_dir=self._config.state_dir,
            state=state,
            die=die,
        )
        return records, plugin.make(context)

    def _new_records(self, *, synced: bool) -> Records:
        return Records.of_service(self._config.state_dir, self._cell, self._service, synced=synced)

    def _name(self) -> ServiceName:
        return ServiceName(
            self.bus,
            service=self._service,
            cell=self._cell,
            records=self.records,
            clock=self.clock,
            wait_s=self._config.name_wait_s,
        )

    def _new_results_sender(self) -> ResultSender:
        return ResultSender(
            self.bus,
            clock=self.clock,
            rng=self._env.rng,
            on_reported=self.records.reported,
            sync=self.records.sync,
            service=self._service,
        )

    def _startup_gate(self) -> StartupGate:
        return StartupGate(
            self.bus,
            service=self._service,
            records=self.records,
            clock=self.clock,
            on_ready=self.changes.on_host_changed,
        )

    def _destroys(self) -> Destroys:
        return Destroys(
            service=self._service,
            driver=self.driver,
            records=self.records,
            results=self._results,
            jobs=self.jobs,
            clock=self.clock,
            rng=self._env.rng,
            max_calls=self._config.destroy_tries,
            on_done=self.startup_gate.on_destroys_done,
        )

    def _agent(self) -> Agent:
        config = self._config
        return Agent(
            service=self._service,
            driver=self.driver,
            records=self.records,
            scanner=self.scanner,
            jobs=self.jobs,
            results=self._results,
            destroys=self.destroys,
            send=self._send,
            clock=self.clock,
            limits=Limits(
                per_host=config.max_builds_per_host,
                builds=config.max_builds,
                accepted=config.max_accepted,
                build_s=config.max_build_s,
            ),
            on_failures=self.changes.on_failures_changed,
            on_accepted=self._driver_parts.on_accepted,
            started=self.startup_gate.opened,
            owner_of=self.host_conflicts.owner_of,
        )

    def _lister(self) -> MachineLister:
        return MachineLister(
            service=self._service,
            driver=self.driver,
            records=self.records,
            scanner=self.scanner,
            is_busy=self.destroys.is_busy,
            pending_destroys=self.destroys.pending,
        )

    def _reporter(self) -> Reporter:
        return Reporter(
            self.bus,
            service=self._service,
            cell=self._cell,
            scanner=self.scanner,
            records=self.records,
            changes=self.changes,
            startup_gate=self.startup_gate,
            clock=self.clock,
            rng=self._env.rng,
            heartbeat_interval_s=self._config.heartbeat_interval_s,
            report_interval_s=self._config.report_interval_s,
            ring=self.ring,
            host_conflicts=self.host_conflicts,
        )

    def _inventory(self) -> InventoryReporter:
        return InventoryReporter(
            self.bus,
            service=self._service,
            driver=self.driver,
            records=self.records,
            changes=self.changes,
            startup_gate=self.startup_gate,
            clock=self.clock,
            rng=self._env.rng,
            report_interval_s=self._config.report_interval_s,
            take_over=self.host_conflicts.pop_former_reporter,
        )

    def _handlers(self) -> ComputeHandlers:
        return ComputeHandlers(
            self.agent,
            service=self._service,
            wait_for_capacity=self.results_sender.wait_for_capacity,
            on_report_requested=self.changes.on_request,
            on_heartbeat=self.name.on_heartbeat,
            superseded=self.reporter.on_superseded,
            on_barrier=self.startup_gate.on_barrier,
            pending_destroys=self.destroys.pending,
            reserve=self.quarantine.reserve,
            on_rescan=self.changes.on_rescan,
            look_up=self.lookup.look_up,
            list_machines=self._lister().list,
            sync=self.records.sync,
            may_predate_restore=self.records.may_predate_restore,
            ring=self.ring,
            host_conflicts=self.host_conflicts,
        )

    def measuring(self) -> Measuring | None:
        """The task that publishes measurements of the hosts; None where the driver measures nothing, or it is switched
        off.
        """
        if not self._config.metrics_interval_s or not isinstance(self._driver, MeasuringDriver):
            return None
        return Measuring(
            self.bus,
            isolate_driver(self._driver),
            service=self._service,
            clock=self.clock,
            rng=random.Random(f"measuring {self._service}"),
            interval_s=self._config.metrics_interval_s,
        )

    def waiting(self) -> WaitingReporter | None:
        """The task that publishes which builds wait; None where the driver's builds wait for nothing."""
        if not isinstance(self._driver, WaitingDriver):
            return None
        return WaitingReporter(
            self.bus,
            isolate_driver(self._driver),
            service=self._service,
            cell=self._cell,
            clock=self.clock,
            interval_s=self._config.heartbeat_interval_s,
        )

    # --- life

    async def connect(self) -> None:
        """Connect and take the service's name, before the machines are looked at. Raises ServiceNameInUse."""
        self.bus.publishes_as("compute_agent")
        await self.bus.open()
        await self.name.hold()

    async def open(self) -> None:
        """Read the records, find the machines, continue unfinished work."""
        self.records.open()
        self._driver_parts.open()
        await Retrying(DRIVER, self.clock, self.bus.rng).call(
            self._ready,
            lambda error: isinstance(error, DriverUnavailable),
            on_failure=lambda _error, _failures: log.warning("driver.unavailable"),
        )
        self.records.start(self.clock.time())
        self.driver.on_change(self.changes.on_host_changed)
        self.bus.transport.on_reconnect(self.changes.on_reconnected)

    async def _ready(self) -> None:
        await self.driver.open()
        await self.agent.resume()

    async def drain(self, grace_s: float) -> None:
        """Let builds end within the grace time (seconds), publish all results and the departure. Unfinished builds stay
        on record.
        """
        await self.jobs.stop(min(STOP_GRACE_S, grace_s / 2))
        await self.results_sender.flush(min(FLUSH_S, grace_s / 2))
        await self.reporter.leave()

    async def close(self) -> None:
        """Stop at once."""
        await self.jobs.stop(0)
        await self.driver.close()
        self._driver_parts.close()
        self.records.close()


def _settings_of(plugin: DriverPlugin[Any], config: ComputeConfig) -> Any:
    """The driver's own settings: the table of its name, else `compute.options`. Raises SettingsError."""
    table = getattr(config, config.driver, None)
    if isinstance(table, plugin.config_type):
        return table
    try:
        return msgspec.convert(config.options, plugin.config_type, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(INVALID, f"compute.options of {config.driver}: {reason_of(error)}") from error
