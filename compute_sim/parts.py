"""The parts of one compute service, made in the order in which they need each other.

Changes on a host meet in `HostChanges`, so that none of these parts calls one that is made after it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from bus.clock import Clock
from bus.retrying import Retrying, RetryPolicy
from compute_sim.agent import Agent, Limits
from compute_sim.announcer import ResultSender
from compute_sim.config import ComputeConfig
from compute_sim.contested import ContestedHosts
from compute_sim.crash_plan import CrashPlan
from compute_sim.driver import Driver, DriverUnavailable, MeasuringDriver, WaitingDriver
from compute_sim.drivers.hypervisor import Hypervisors
from compute_sim.drivers.ironic.driver import BareMetal, ring_name
from compute_sim.finding import Finder
from compute_sim.fleet import Fleet
from compute_sim.guarded import guarded
from compute_sim.handlers import ComputeHandlers
from compute_sim.host_changes import HostChanges
from compute_sim.inventory import InventoryReporter
from compute_sim.listing import MachineLister
from compute_sim.measuring import Measuring
from compute_sim.name import ServiceName
from compute_sim.offering import Offering
from compute_sim.quarantine import Quarantine
from compute_sim.reporter import Reporter
from compute_sim.ring import Ring
from compute_sim.survey import Survey
from compute_sim.unreliable import FaultyResultSender
from compute_sim.waiting import WaitingReporter

if TYPE_CHECKING:
    from bus.service.environment import Environment

log = structlog.get_logger()

STOP_GRACE_S = 3.0  # builds may end within this time; later ones are resumed by the next start
FLUSH_S = 3.0  # results that the broker has not confirmed within this are published by the next start
DRIVER = RetryPolicy(first_s=0.2, longest_s=10.0, least=0.0)  # for the driver at the start, until it is available


class Parts:
    """One service's parts, and how they open, drain and close together. Arguments: see `compute_sim.app.build`."""

    def __init__(
        self,
        env: Environment,
        config: ComputeConfig,
        *,
        cell: str,
        service: str,
        fleet: Fleet | None,
        driver: Driver | None,
        die: Callable[[], None] | None,
    ) -> None:
        self._env = env
        self._config = config
        self._cell = cell
        self._service = service
        self.bus = env.bus(cell)
        self.clock = env.clock
        self.fleet = fleet or Fleet.planned(config, cell, service)
        self.records = self.fleet.records
        self.crash_plan = CrashPlan(config, self.fleet, die)
        self._driver = driver or make_driver(config, self.fleet, env.clock, cell=cell, service=service)
        self.driver = guarded(self._driver)
        self.metal = self._driver if isinstance(self._driver, BareMetal) else None
        self.name = self._name()
        self.announcer = self._announcer()
        self.result_sender = FaultyResultSender(
            self.announcer.send, self.fleet, config.faults, seed=config.seed, clock=env.clock
        )
        self.changes = HostChanges(env.clock)
        self.contested = ContestedHosts(service=service, changes=self.changes, clock=env.clock)
        self.offering = self._offering()
        self.quarantine = Quarantine(
            service=service, driver=self.driver, records=self.records, on_changed=self.changes.on_host_changed
        )
        self.survey = Survey(self.driver, self.records, on_listed=self.quarantine.drop_gone)
        self.finder = Finder(service=service, driver=self.driver, records=self.records, survey=self.survey)
        self.agent = self._agent()
        self.reporter = self._reporter()
        self.inventory = self._inventory()
        self.handlers = self._handlers()

    @property
    def ring(self) -> Ring | None:
        """The services that share the nodes of one Ironic; None where the hosts are this service's own."""
        return None if self.metal is None else self.metal.ring

    # --- construction

    def _name(self) -> ServiceName:
        return ServiceName(
            self.bus,
            service=self._service,
            cell=self._cell,
            records=self.records,
            clock=self.clock,
            wait_s=self._config.name_wait_s,
        )

    def _announcer(self) -> ResultSender:
        return ResultSender(
            self.bus,
            clock=self.clock,
            rng=self._env.rng,
            on_reported=self.records.reported,
            sync=self.records.sync,
            service=self._service,
        )

    def _offering(self) -> Offering:
        return Offering(
            self.bus,
            service=self._service,
            records=self.records,
            clock=self.clock,
            on_offered=self.changes.on_host_changed,
        )

    def _agent(self) -> Agent:
        config = self._config
        return Agent(
            service=self._service,
            driver=self.driver,
            records=self.records,
            survey=self.survey,
            send=self.result_sender.send,
            clock=self.clock,
            rng=self._env.rng,
            limits=Limits(
                per_host=config.max_builds_per_host,
                builds=config.max_builds,
                accepted=config.max_accepted,
                build_s=config.max_build_s,
                destroy_attempts=config.destroy_attempts,
            ),
            on_failures=self.changes.on_failures_changed,
            on_accepted=self.crash_plan.accepted,
            on_settled=self.offering.on_settled,
            begun=self.offering.begun,
            owner_of=self.contested.owner_of,
        )

    def _lister(self) -> MachineLister:
        return MachineLister(
            service=self._service,
            driver=self.driver,
            records=self.records,
            survey=self.survey,
            is_busy=self.agent.is_busy,
            owed=self.agent.owed,
        )

    def _reporter(self) -> Reporter:
        return Reporter(
            self.bus,
            service=self._service,
            cell=self._cell,
            survey=self.survey,
            records=self.records,
            changes=self.changes,
            offering=self.offering,
            clock=self.clock,
            rng=self._env.rng,
            heartbeat_interval_s=self._config.heartbeat_interval_s,
            report_interval_s=self._config.report_interval_s,
            ring=self.ring,
            contested=self.contested,
        )

    def _inventory(self) -> InventoryReporter:
        return InventoryReporter(
            self.bus,
            service=self._service,
            driver=self.driver,
            records=self.records,
            changes=self.changes,
            offering=self.offering,
            clock=self.clock,
            rng=self._env.rng,
            report_interval_s=self._config.report_interval_s,
            take_over=self.contested.take_over,
        )

    def _handlers(self) -> ComputeHandlers:
        return ComputeHandlers(
            self.agent,
            service=self._service,
            wait_for_capacity=self.announcer.wait_for_capacity,
            on_report_requested=self.changes.on_request,
            on_heartbeat=self.name.on_heartbeat,
            outdated=self.reporter.outdated,
            on_marker=self.offering.on_marker,
            reserve=self.quarantine.reserve,
            on_rescan=self.changes.on_rescan,
            find=self.finder.find,
            list_machines=self._lister().list,
            sync=self.records.sync,
            is_outdated=self.records.is_outdated,
            ring=self.ring,
            contested=self.contested,
        )

    def measuring(self) -> Measuring | None:
        """The task that publishes measurements of the hosts; None where the driver measures nothing, or it is switched
        off.
        """
        if not self._config.metrics_interval_s or not isinstance(self._driver, MeasuringDriver):
            return None
        return Measuring(
            self.bus,
            guarded(self._driver),
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
            guarded(self._driver),
            service=self._service,
            cell=self._cell,
            clock=self.clock,
            interval_s=self._config.heartbeat_interval_s,
        )

    # --- life

    async def connect(self) -> None:
        """Connect and take the service's name, before anything of the machines is looked at. Raises NameTaken."""
        self.bus.publishes_as("compute_sim")
        await self.bus.open()
        await self.name.hold()

    async def open(self) -> None:
        """Read the records, find the machines, continue unfinished work."""
        self.fleet.open()
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
        await self.agent.stop(min(STOP_GRACE_S, grace_s / 2))
        await self.announcer.flush(min(FLUSH_S, grace_s / 2))
        await self.reporter.leave()

    async def close(self) -> None:
        """Stop at once."""
        await self.agent.stop(0)
        self.result_sender.stop()
        await self.driver.close()
        self.fleet.close()


def make_driver(config: ComputeConfig, fleet: Fleet, clock: Clock, *, cell: str, service: str) -> Driver:
    """The driver that the configuration names."""
    if config.driver == "ironic":
        ring = Ring(ring_name(config.ironic), service)
        return BareMetal(config.ironic, cell=cell, service=service, clock=clock, records=fleet.records, ring=ring)
    return Hypervisors(fleet, config.faults, seed=config.seed, clock=clock, nested=config.nested)
