"""Wiring of a compute service: one cell's bus, one driver, one memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from bus.consuming.consumer import Consumer
from bus.service.service import WorkerRuntime
from bus.service.worker_heartbeat import add_heartbeat
from compute_agent.config import ComputeConfig
from compute_agent.driver_plugin import DriverParts
from compute_agent.hosts.service_name import QUEUE, reporter_name
from compute_agent.records.records import Records
from compute_agent.wiring import ComputeServiceParts

if TYPE_CHECKING:
    from bus.service.environment import Environment

log = structlog.get_logger()

BATCH = 256  # commands decided at once; deciding one takes tens of microseconds
PREFETCH = 1024
RING_QUEUE = "compute.ring.{service}"


def build(
    env: Environment,
    config: ComputeConfig,
    cell: str,
    service: str,
    *,
    records: Records | None = None,
    driver: DriverParts | None = None,
    driver_state: object | None = None,
    die: Callable[[], None] | None = None,
) -> WorkerRuntime:
    """One compute service of one cell, over that cell's bus alone. records, driver_state: of the service that this one
    follows. driver: instead of the one that the configuration names. die: how a planned death happens.
    Raises SettingsError.
    """
    # By default `die` ends the service with a fault; a process of its own may rather kill itself.
    if records is None and not config.state_dir:  # records that are given are kept by their giver
        reason = "its machines and its records are lost with this process: set compute.state_dir"
        log.warning("compute.in_memory", service=service, cell=cell, reason=reason)
    parts = ComputeServiceParts(
        env, config, cell=cell, service=service, records=records, driver=driver, driver_state=driver_state, die=die
    )
    result = WorkerRuntime(f"compute {service}", clock=env.clock, log=log.bind(service=service, cell=cell))
    result.add_resource(parts.connect, parts.bus.close)
    result.add_resource(parts.open, parts.close)
    result.add_drain(parts.drain)
    _add_tasks(result, env, parts)
    # Before the first report of the hosts, as the one that holds the name is: a conductor that receives it may send
    # builds at once.
    result.add_declaration(lambda: parts.bus.declare("compute.{service}", service=service))
    _add_consumers(result, parts, service)
    result.add_bus_check("bus", lambda: parts.bus.unavailable_reason)
    return result


def _add_tasks(result: WorkerRuntime, env: Environment, parts: ComputeServiceParts) -> None:
    result.add_task("results", parts.results_sender.run)
    add_heartbeat(result, env, parts.bus, "compute")
    result.add_task("name", parts.name.watch)
    result.add_task("heartbeats", parts.reporter.send_heartbeats)
    result.add_task("startup gate", parts.startup_gate.run)
    result.add_task("announcements", parts.reporter.report_hosts)
    result.add_task("inventory", parts.inventory.report)
    result.add_task("host conflicts", parts.host_conflicts.report_refused)
    result.add_task("jobs", parts.jobs.watch)
    result.add_task("destructions", parts.destroys.retry)
    if (measuring := parts.measuring()) is not None:
        result.add_task("measuring", measuring.run)
    if (waiting := parts.waiting()) is not None:
        result.add_task("waiting", waiting.run)
    for name, run in parts.tasks:
        result.add_task(name, run)


def _add_consumers(result: WorkerRuntime, parts: ComputeServiceParts, service: str) -> None:
    bus, handlers = parts.bus, parts.handlers
    # One batch at a time: a Destroy must not overtake the Spawn before it.
    commands = Consumer(
        bus, "compute.{service}", handlers.commands, max_batch=BATCH, concurrency=1, prefetch=PREFETCH, service=service
    )
    result.add_consumer(commands)
    control = Consumer(bus, QUEUE, handlers.control, concurrency=1, service=service, reporter=reporter_name(service))
    result.add_consumer(control)
    if parts.ring is not None:
        members = Consumer(bus, RING_QUEUE, handlers.ring_members, concurrency=1, service=service, ring=parts.ring.name)
        result.add_consumer(members)
