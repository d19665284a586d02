"""Wiring of a compute service: one cell's bus, one driver, one memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from bus.clock import Clock
from bus.contracts.cell import Spawn
from bus.faults import Fault
from bus.retrying import Retrying, RetryPolicy
from bus.service.service import Service
from compute_sim.agent import Agent, Limits
from compute_sim.announcer import ResultSender
from compute_sim.config import ComputeConfig
from compute_sim.domain.faults import plan_attempt
from compute_sim.driver import Driver, DriverUnavailable, MeasuringDriver
from compute_sim.drivers.hypervisor import Hypervisors
from compute_sim.drivers.ironic.driver import BareMetal, ring_name
from compute_sim.fleet import Fleet
from compute_sim.handlers import ComputeHandlers
from compute_sim.measuring import Measuring
from compute_sim.name import QUEUE, ServiceName, source_of
from compute_sim.offering import Offering
from compute_sim.quarantine import Quarantine
from compute_sim.reporter import Reporter
from compute_sim.ring import Ring
from compute_sim.unreliable import FaultyResultSender

if TYPE_CHECKING:
    from bus.service.environment import Environment
from bus.service.presence import announce_presence

log = structlog.get_logger()

BATCH = 256  # commands decided at once; deciding one takes tens of microseconds
PREFETCH = 1024
RING_QUEUE = "compute.ring.{service}"
STOP_GRACE_S = 3.0  # builds may end within this; later ones are taken up by the next start
FLUSH_S = 3.0  # results that the broker has not confirmed within this are published by the next start
DRIVER = RetryPolicy(first_s=0.2, longest_s=10.0, least=0.0)  # at the start: until it is there


class ServiceDied(Fault):
    """A planned fault: the service ends here, in the middle of everything."""

    code = "sim.service_died"


def build(
    env: Environment,
    config: ComputeConfig,
    cell: str,
    service: str,
    *,
    fleet: Fleet | None = None,
    driver: Driver | None = None,
    die: Callable[[], None] | None = None,
) -> Service:
    """One compute service of one cell, over that cell's bus alone.

    fleet: the machines and the service's memory; give the same one again to restart the service in this process.
    driver: instead of the one that the configuration names. die: how a planned death of the service happens;
    the default ends the service with a fault (a process of its own may rather kill itself).
    """
    parts = Parts(env, config, cell=cell, service=service, fleet=fleet, driver=driver, die=die)
    result = Service(f"compute {service}", clock=env.clock, log=log.bind(service=service, cell=cell))
    result.add_resource(parts.connect, parts.bus.close)
    result.add_resource(parts.open, parts.close)
    result.add_drain(parts.drain)
    result.add_task("results", parts.announcer.run)
    announce_presence(result, env, parts.bus, "compute")
    result.add_task("name", parts.name.watch)
    result.add_task("heartbeats", parts.reporter.beat)
    result.add_task("offering", parts.offering.run)
    result.add_task("announcements", parts.reporter.announce)
    result.add_task("inventory", parts.reporter.report)
    result.add_task("jobs", parts.agent.watch)
    result.add_task("destructions", parts.agent.retry_destroys)
    result.add_task("crash plan", parts.crash_plan.wait)
    if config.metrics_interval_s and isinstance(parts.driver, MeasuringDriver):
        measuring = Measuring(
            parts.bus,
            parts.driver,
            service=service,
            clock=env.clock,
            rng=random.Random(f"measuring {service}"),
            interval_s=config.metrics_interval_s,
        )
        result.add_task("measuring", measuring.run)
    if isinstance(parts.driver, BareMetal):
        result.add_task("nodes", parts.driver.watch)
    # Before the first announcement, as the one that holds the name is: a conductor that receives it may send builds at
    # once.
    result.add_declaration(lambda: parts.bus.declare("compute.{service}", service=service))
    # One batch at a time: a Destroy must not overtake the Spawn before it.
    commands = parts.bus.consumer(
        "compute.{service}", parts.handlers.commands, max_batch=BATCH, concurrency=1, prefetch=PREFETCH, service=service
    )
    result.add_consumer(commands)
    consumer = parts.bus.consumer(
        QUEUE, parts.handlers.control, concurrency=1, service=service, source=source_of(service)
    )
    result.add_consumer(consumer)
    if parts.ring is not None:
        members = parts.bus.consumer(
            RING_QUEUE, parts.handlers.ring_members, concurrency=1, service=service, ring=parts.ring.name
        )
        result.add_consumer(members)
    result.add_bus_check("bus", parts.bus)
    return result


class Parts:
    """One service's parts, wired together."""

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
        self.bus = env.bus(cell)
        self.clock = env.clock
        self.fleet = fleet or Fleet.planned(config, cell, service)
        self.driver = driver or make_driver(config, self.fleet, env.clock, cell=cell, service=service)
        records = self.fleet.records
        self.ring = self.driver.ring if isinstance(self.driver, BareMetal) else None
        self.name = ServiceName(
            self.bus, service=service, cell=cell, records=records, clock=env.clock, wait_s=config.name_wait_s
        )
        self.announcer = ResultSender(
            self.bus, clock=env.clock, rng=env.rng, on_reported=records.reported, service=service
        )
        self.result_sender = FaultyResultSender(
            self.announcer.send, self.fleet, config.faults, seed=config.seed, clock=env.clock
        )
        self.crash_plan = CrashPlan(config, self.fleet, die)
        begun = asyncio.Event()
        self.agent = Agent(
            service=service,
            driver=self.driver,
            records=records,
            send=self.result_sender.send,
            clock=env.clock,
            rng=env.rng,
            limits=Limits(
                per_host=config.max_builds_per_host,
                builds=config.max_builds,
                accepted=config.max_accepted,
                build_s=config.max_build_s,
                destroy_attempts=config.destroy_attempts,
            ),
            on_failures=lambda host: self.reporter.on_failures_changed(host),  # noqa: PLW0108  (made below)
            on_accepted=self.crash_plan.accepted,
            on_settled=lambda key: self.offering.on_settled(key),  # noqa: PLW0108  (made below)
            begun=begun,
            on_listed=lambda listed: self.quarantine.drop_gone(listed),  # noqa: PLW0108  (made below)
        )
        self.offering = Offering(
            self.bus,
            begun=begun,
            service=service,
            records=records,
            clock=env.clock,
            owed=self.agent.owed,
            on_offered=lambda hosts: self.reporter.on_host_changed(hosts),  # noqa: PLW0108  (made below)
        )
        self.reporter = Reporter(
            self.bus,
            service=service,
            cell=cell,
            driver=self.driver,
            work=self.agent,
            records=records,
            clock=env.clock,
            rng=env.rng,
            heartbeat_interval_s=config.heartbeat_interval_s,
            report_interval_s=config.report_interval_s,
            ring=self.ring,
            offering=self.offering,
        )
        self.quarantine = Quarantine(
            service=service, driver=self.driver, records=records, on_changed=self.reporter.on_host_changed
        )
        self.handlers = ComputeHandlers(
            self.agent,
            service=service,
            wait_for_capacity=self.announcer.wait_for_capacity,
            on_report_requested=self.reporter.on_request,
            on_heartbeat=self.name.on_heartbeat,
            outdated=self.reporter.outdated,
            on_marker=self.offering.on_marker,
            reserve=self.quarantine.reserve,
            ring=self.ring,
        )

    async def connect(self) -> None:
        """Connect and take the service's name, before anything of the machines is looked at. Raises NameTaken."""
        await self.bus.open()
        await self.name.hold()

    async def open(self) -> None:
        """Remember, find the machines, take up what was unfinished."""
        self.fleet.open()
        await Retrying(DRIVER, self.clock, self.bus.rng).call(
            self._ready,
            lambda error: isinstance(error, DriverUnavailable),
            on_failure=lambda _error, _failures: log.warning("driver.unavailable"),
        )
        self.fleet.records.start(self.clock.time())
        self.driver.on_change(self.reporter.on_host_changed)
        self.bus.transport.on_reconnect(self.reporter.on_reconnected)

    async def _ready(self) -> None:
        await self.driver.open()
        await self.agent.resume()

    async def drain(self, grace_s: float) -> None:
        """Let builds end for a while, publish all results and the departure. What is left is on record."""
        await self.agent.stop(min(STOP_GRACE_S, grace_s / 2))
        await self.announcer.flush(min(FLUSH_S, grace_s / 2))
        await self.reporter.leave()

    async def close(self) -> None:
        """Stop where it stands."""
        await self.agent.stop(0)
        self.result_sender.stop()
        await self.driver.close()
        self.fleet.close()


class CrashPlan:
    """Planned deaths of the whole service."""

    def __init__(self, config: ComputeConfig, fleet: Fleet, die: Callable[[], None] | None) -> None:
        self._faults = config.faults
        self._seed = config.seed
        self._fleet = fleet
        self._die = die
        self._strike = asyncio.Event()

    def accepted(self, command: Spawn) -> None:
        """A build was accepted: is it the one that kills?"""
        records, faults = self._fleet.records, self._faults
        # Only in the first life: a death is planned once, not again and again until nothing is left to plan.
        if (faults.die_after is not None and records.starts == 1 and records.accepted == faults.die_after) or (
            faults.die_rate
            and (host := self._fleet.host(command.host_uuid)) is not None
            and plan_attempt(faults, self._seed, host.plan.name, command.spec.instance_uuid, command.attempt).dies
        ):
            self._kill()

    def _kill(self) -> None:
        log.warning("compute.planned_death")
        self._strike.set()
        if self._die is not None:
            self._die()

    async def wait(self) -> None:
        """A side task that ends the service when its time has come."""
        await self._strike.wait()
        raise ServiceDied("a planned fault of this service")


def make_driver(config: ComputeConfig, fleet: Fleet, clock: Clock, *, cell: str, service: str) -> Driver:
    """The driver that the configuration names."""
    if config.driver == "ironic":
        ring = Ring(ring_name(config.ironic), service)
        return BareMetal(config.ironic, cell=cell, service=service, clock=clock, records=fleet.records, ring=ring)
    return Hypervisors(fleet, config.faults, seed=config.seed, clock=clock, nested=config.nested)
