"""Each worker's real `build`, with what it is given in the simulated world instead of brokers, servers and clocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

import cell_conductor.app
import compute_agent.app
import ironic_sync.app
import placement_worker.app
import scheduler_worker.app
from berth.config.settings import ComputeSettings
from bus.persistence.memory_database import MemorySession
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from cell_conductor.config import ConductorConfig
from cell_conductor.store.memory import MemoryInstances
from compute_agent.driver import ChangeOrder, ChangeResult
from compute_agent.drivers.ironic import plugin as ironic
from compute_agent.drivers.ironic.config import IronicConfig
from compute_agent.drivers.ironic.driver import ring_name
from compute_agent.hosts.hash_ring import Ring
from compute_sim import plugin as simulated
from compute_sim.config import SimulatedConfig
from compute_sim.driver import SimulatedDriver
from compute_sim.fleet import Fleet
from ironic_sync.config import IronicSyncConfig
from ironic_sync.source.rest import IronicRestClient
from ironic_sync.store.memory import MemoryPositions
from lab.simulation.ironic import URL, IronicTransport, WatchedIronicDriver
from lab.simulation.ironic_sync_watch import IronicSyncWatch, WatchedPositions
from lab.simulation.loop import Process
from lab.simulation.network import NetworkFaults, SimTransport
from lab.simulation.plan import SIZES, Plan
from placement_worker.config import PlacementConfig
from placement_worker.replica.replica import Replica
from placement_worker.rest.application import Application
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.store.memory import MemoryBuilds

if TYPE_CHECKING:
    from lab.simulation.world import World

ACTION_QUERY_S = 20.0
BUILD_TIMEOUT_S = 20.0
REPORT_S = 25.0

PLACEMENT = PlacementConfig(head_interval_s=1.0, trim_interval_s=5.0, cell_wait_s=1.0)
CONDUCTOR = ConductorConfig(
    claim_timeout_s=3.0,
    claim_retry_s=5.0,
    answer_timeout_s=4.0,
    destroy_retry_s=10.0,
    report_grace_s=10.0,
    report_interval_s=30.0,
    sweep_interval_s=1.0,
    purge_interval_s=5.0,
    # A host that is reinstalled loses all its machines at once, and only plans with a limit have an operator for that.
    breaker_limit=10_000,
    live_copy_mb_s=0.0,  # simulated machines are copied at once, so more time would only delay the end of a hang
)
IRONIC = IronicSyncConfig(
    url=URL,
    resync_interval_s=20.0,
    republish_interval_s=60.0,
    transient_retry_max_s=10.0,
    failed_retry_max_s=8.0,
    absent_retention_s=20.0,  # notifications get lost, and at rest placement has what Ironic has
    page_size=2,
)
METAL_LIMIT_S = 120.0


def placement(plan: Plan) -> PlacementConfig:
    """Its settings in this run."""
    config = replace(PLACEMENT, feed_retention=plan.feed_retention)
    if plan.keep_s:
        config = replace(config, ended_attempt_retention_s=plan.keep_s, reporter_retention_s=plan.keep_s)
    return replace(config, claim_batch=plan.batch, inventory_batch=plan.batch) if plan.batch else config


def conductor(plan: Plan) -> ConductorConfig:
    """Its settings in this run."""
    # One conductor may record a tombstone and another one purge it, and their clocks may differ this much.
    apart_s = 2 * plan.skew_s
    config = replace(CONDUCTOR, deleted_retention_s=plan.keep_s + apart_s) if plan.keep_s else CONDUCTOR
    config = replace(config, breaker_limit=plan.breaker_limit) if plan.breaker_limit else config
    return replace(config, max_batch=plan.batch) if plan.batch else config


def scheduler(plan: Plan) -> SchedulerConfig:
    """Its settings in this run."""
    config = SchedulerConfig(
        host_subset_size=plan.subset,
        build_timeout_s=BUILD_TIMEOUT_S,
        action_query_s=ACTION_QUERY_S,
        default_quota=plan.quota,
        quotas=plan.quotas,
        actions_across_cells=plan.actions_across_cells,
    )
    return replace(config, batch=plan.batch) if plan.batch else config


class CalmedSimulatedDriver(SimulatedDriver):
    """A driver whose changes neither hang nor fail any more when faults have ended: a chain of them has no bound in
    time, because the command is repeated less and less often (seeds 1795406056, 1795406988, 4300346).
    """

    network_faults: NetworkFaults

    async def change(self, change: ChangeOrder) -> ChangeResult:
        """Change a machine."""
        if self.network_faults.is_calm:
            self._faults = replace(self._faults, change_fail_rate=0.0, change_break_rate=0.0, change_hang_rate=0.0)
        return await super().change(change)


class ProcessContext(Struct, frozen=True):
    """The parts that one life of one process gets besides its environment: itself, its connections, its databases."""

    process: Process
    transports: list[SimTransport]
    session: Callable[[str], MemorySession]
    replica: Replica | None
    hosts: HostTable | None


class Wiring:
    """Builds the processes of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.applications: dict[str, Application] = {}  # the REST API of each placement worker's newest life

    def build(self, name: str, env: Environment, context: ProcessContext) -> WorkerRuntime:
        """The service of one life of the process of this name."""
        world, (kind, _, rest) = self._world, name.partition("-")
        cells = list(world.known_cells)
        if kind == "conductor":
            cell = rest.rpartition("-")[0]
            return cell_conductor.app.build(
                env, conductor(world.plan), cell, store=MemoryInstances(context.session(f"cell_{cell}"))
            )
        if kind in ("compute", "twin"):
            fleets = world.fleets if kind == "compute" else world.duplicates
            return self._compute(env, rest, context, fleets[rest])
        if kind == "second":
            cell, fleet = world.cell_of(rest).name, world.seconds[rest]
            return compute_agent.app.build(
                env, self.config(rest), cell, f"{rest}-second", records=fleet.records, driver_state=fleet
            )
        if kind.startswith("scheduler"):
            store = MemoryBuilds(context.session("scheduler"))
            return scheduler_worker.app.build(
                env, scheduler(world.plan), cells, store=store, replica=context.replica, table=context.hosts
            )
        if kind.startswith("ironic"):
            return self._ironic(env, context)
        answer = partial(self.applications.__setitem__, name) if world.plan.has_rest_clients else None
        return placement_worker.app.build(
            env,
            placement(world.plan),
            cells,
            store=PlacementService(MemoryPlacementRows(context.session("placement")), env.clock),
            answer=answer,
        )

    def config(self, service: str) -> ComputeSettings:
        """The settings of a compute service, as they are now."""
        plan = self._world.plan
        if service in [name for _, name in plan.metal_services]:
            share, shares = self.share_of(service)
            nodes = IronicConfig(
                url=URL,
                poll_interval_s=0.5,
                deploy_timeout_s=METAL_LIMIT_S,
                clean_timeout_s=METAL_LIMIT_S,
                share=share,
                shares=shares,
            )
            return ComputeSettings(
                simulated=SimulatedConfig(hosts=0),
                driver="ironic",
                ironic=nodes,
                heartbeat_interval_s=2.0,
                report_interval_s=REPORT_S,
            )
        hosts = dict(self._world.cell_of(service).services)
        number = list(hosts).index(service)
        return ComputeSettings(
            simulated=SimulatedConfig(
                hosts=hosts[service],
                sizes=SIZES[number % len(SIZES) :] + SIZES[: number % len(SIZES)],
                gpu_share=0.5,
                numa_share=plan.numa_share,
                nested=service not in self._world.flat,
                seed=plan.seed,
                faults=plan.computes,
            ),
            heartbeat_interval_s=2.0,
            report_interval_s=REPORT_S,
            max_build_s=3600.0,
        )

    def share_of(self, service: str) -> tuple[int, int]:
        """Which part of the free nodes is its cell's, of how many: its services divide that by their ring."""
        cells = sorted({self._world.cell_of(name).name for name in (*self._world.metal_now, service)})
        return cells.index(self._world.cell_of(service).name), len(cells)

    def _compute(self, env: Environment, service: str, context: ProcessContext, fleet: Fleet) -> WorkerRuntime:
        world, config = self._world, self.config(service)
        cell = world.cell_of(service).name
        if config.driver == "ironic":
            assert world.ironic is not None
            way = IronicTransport(world.ironic, context.process, world.network_faults)
            driver = WatchedIronicDriver(
                config.ironic,
                cell=cell,
                service=service,
                clock=env.clock,
                records=fleet.records,
                transport=way,
                ring=Ring(ring_name(config.ironic), service),
            )
            driver.failed = world.ironic.check_power_failure
            parts = ironic.parts_of(driver)
        else:
            settings = config.simulated
            calmed = CalmedSimulatedDriver(
                fleet, settings.faults, seed=settings.seed, clock=env.clock, nested=settings.nested
            )
            calmed.network_faults = world.network_faults
            parts = simulated.parts_of(calmed, fleet, settings, clock=env.clock)
        return compute_agent.app.build(env, config, cell, service, records=fleet.records, driver=parts)

    def _ironic(self, env: Environment, context: ProcessContext) -> WorkerRuntime:
        world = self._world
        assert world.ironic is not None
        watch = IronicSyncWatch(world.now, world.fail)
        way = IronicTransport(world.ironic, context.process, world.network_faults)
        way.answered, way.missing = watch.answered, watch.missing
        source = IronicRestClient(
            URL,
            microversion=IRONIC.microversion,
            timeout_s=IRONIC.request_timeout_s,
            list_timeout_s=IRONIC.list_timeout_s,
            page_size=IRONIC.page_size,
            connections=IRONIC.reads_in_flight,
            transport=way,
        )
        store = WatchedPositions(MemoryPositions(context.session("ironic_sync")), watch)
        service = ironic_sync.app.build(env, IRONIC, client=source, store=store)
        for transport in context.transports:
            transport.arrived = lambda delivery: watch.notified(delivery.body)
        return service


def clock_error_s(seed: int, name: str, most_s: float) -> float:
    """How far a process's clock is off, the same in each of its lives."""
    return random.Random(f"berth.sim.skew {seed} {name}").uniform(-1, 1) * most_s
