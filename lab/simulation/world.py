"""The simulated world of one plan: brokers, databases and machines that outlive the processes, and the processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

import msgspec
import structlog
from msgspec import Struct

from bus.bus import API
from bus.contracts.base import Message, tag_of
from bus.faults import Transient
from bus.memory import MemoryTransport
from bus.persistence.memory_database import MemoryDatabase, MemorySession
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from bus.transport import BusUnavailable, QueueMissing
from cell_conductor.state.desired_state import AT_REST, DELETE_REQUESTED
from cell_conductor.state.instance import Instance, State
from cell_conductor.store.memory import MemoryInstanceTable
from compute_agent.drivers.ironic.node import DEPLOYED
from compute_agent.hosts.service_name import QUEUE as NAME_QUEUE
from compute_agent.records.records import Records
from compute_sim.fleet import Host, SimulatedMachine
from ironic_sync.store.memory import MemoryPositionTable
from lab.simulation.breaker_watch import BreakerWatch
from lab.simulation.databases import SimDatabases
from lab.simulation.drain_watch import DrainWatch
from lab.simulation.event_log import EventLog
from lab.simulation.gang_watch import GangWatch
from lab.simulation.harm_watch import HarmWatch
from lab.simulation.ironic import CLASSES, SimIronic
from lab.simulation.last_machine_watch import LastMachineWatch
from lab.simulation.loop import NO_CONTEXT, Process, SimClock
from lab.simulation.message_watch import MessageWatch
from lab.simulation.move_watch import MoveWatch
from lab.simulation.network import Broker, NetworkFaults, SimTransport
from lab.simulation.peer_watch import PeerWatch
from lab.simulation.plan import Cell, Plan
from lab.simulation.watch import Breach, Listener, MachineWatch, PlacementWatch, SecondFleet, WatchedFleet, is_open
from lab.simulation.wiring import ProcessContext, Wiring, clock_error_s
from placement_worker.replica.replica import Replica
from placement_worker.store.memory_table import MemoryPlacementTable
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.store.memory_units import MemoryBuildTable

log = structlog.get_logger("sim")

# Each redelivery after a crash counts: more crashes than this over one message, and RabbitMQ gives it up (20).
MAX_CRASHES = 5
OVER = AT_REST & (DELETE_REQUESTED | {(State.TOMBSTONE, None)})  # deletes of which a cell alone has a record
RESTART_S = 0.5  # a supervisor starts what died by itself after this


class Incarnation(Struct):
    """One life of one process: from a start to its end."""

    process: Process
    service: WorkerRuntime
    stop: asyncio.Event
    task: asyncio.Task[None]
    transports: list[SimTransport]
    sessions: list[MemorySession]
    clock: SimClock
    replica: Replica | None = None
    hosts: HostTable | None = None
    killed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    def cut(self) -> None:
        """Its connections end, and brokers and databases notice."""
        for transport in self.transports:
            transport.kill()
        for session in self.sessions:
            session.disconnect()


def _all_of(*looks: Callable[[], None]) -> Callable[[], None]:
    def look() -> None:
        for one in looks:
            one()

    return look


def tagged_instance(node: Mapping[str, Any]) -> str | None:
    """The instance that our tag names on a deployed node whose operator has cleared `instance_uuid` alone."""
    if node["instance_uuid"] is not None or node["provision_state"] not in DEPLOYED:
        return None
    mark: Mapping[str, str] = node["instance_info"].get("berth", {})
    return mark.get("instance")


class World:
    """Everything of one run but the load on it."""

    def __init__(self, plan: Plan, event_log: EventLog) -> None:
        self.plan = plan
        self.event_log = event_log
        self.rng = random.Random(f"berth.sim.world {plan.seed}")
        self.network_faults = NetworkFaults(plan.rates, random.Random(f"berth.sim.weather {plan.seed}"))
        self.clock = SimClock()
        self.listener = Listener()
        self.breach: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.brokers = {name: self._broker(name) for name in (API, *(cell.name for cell in plan.cells))}
        self._databases()
        self.fleets: dict[str, WatchedFleet] = {}
        self.lives: dict[str, Incarnation] = {}
        self.counts: dict[str, int] = {}
        self.network_faults.crash = self._crash
        self.connections: dict[tuple[str, str], None] = {}  # (process, bus): who ever connected to what
        self.expected_down: set[str] = set()
        self.hosts_off: set[str] = set()  # services whose hosts an operator keeps off until their fence is acknowledged
        self.crashes: dict[str, int] = {}
        self.over = False
        self.taken: set[tuple[str, bytes]] = set()  # (bus, body) of each message that a broker has taken
        self.outbox_since: dict[str, dict[int, float]] = {}  # by schema, when the judge first saw each row
        self.flat = set(plan.flat)
        self.left: dict[str, str] = {}  # root providers that are gone for good, and how: drained or dead
        self.dead: set[str] = set()  # services that are gone for good, with their hosts
        self.harm = HarmWatch(self.now)
        self.foreign: dict[str, str] = {}  # machines of others that are to be there, and their hosts
        self.strange: dict[bytes, None] = {}  # bodies of other clients' messages
        self.taken_back: dict[str, None] = {}  # builds and consumers of which a restored database knows an old truth
        self.harm.taken_back = self.taken_back
        self.cells_out = set(plan.late_cells)  # that no worker above cells knows
        self.metal_out = set(plan.late_metal)  # services that have no share
        self.seconds: dict[str, SecondFleet] = {}  # of services of other names, by the one whose hosts' uuids they have
        self.duplicates: dict[str, WatchedFleet] = {}  # machines of second services, by the name that they share
        self.probing = False  # whether what is requested now must not lead to them any more
        self.wiring = Wiring(self)
        self._watch()
        self._fleets()
        self.ironic = self._ironic()

    def _databases(self) -> None:
        """Make the schemas of all roles."""
        plan = self.plan
        self.placement = MemoryPlacementTable(self.clock)
        self.builds = MemoryBuildTable(self.clock)
        self.cells = {
            cell.name: MemoryInstanceTable(
                self.clock, database_id=str(uuid5(NAMESPACE_DNS, f"{plan.seed}.{cell.name}"))
            )
            for cell in plan.cells
        }
        tables: dict[str, MemoryDatabase] = {"placement": self.placement, "scheduler": self.builds}
        tables.update({f"cell_{name}": table for name, table in self.cells.items()})
        self.databases = SimDatabases(tables, self.network_faults, self.event_log, self._sessions)
        self.positions = MemoryPositionTable(self.clock)

    def _watch(self) -> None:
        """Make what checks the invariants, and have every commit looked at."""
        plan = self.plan
        self.machines = MachineWatch(self.now)
        self.peer_watch = PeerWatch(plan, self.placement, self.cells, self.now)
        self.gang_watch = GangWatch(self.placement, self.taken_back)
        self.move_watch = MoveWatch(self.placement, self.cells, self.fleets, self.duplicates)
        self.peer_watch.exempt = self.move_watch.exempt = self.taken_back
        self.harm.given_up = self.move_watch.given_up
        self.harm.machines = self._has_machine
        self.move_watch.judges_machines = plan.judges_machines
        self.move_watch.has_untold = self.machines.has_untold
        self.last_machines = LastMachineWatch(self.cells, self.fleets, self.move_watch.was_active)
        self.placement_watch = PlacementWatch(self.placement)
        self.placement_watch.rest_frees = plan.has_rest_clients
        self.breaker_watch = BreakerWatch(plan, self.now)
        drain_watch = DrainWatch(self.placement, self.builds, self.now, self.taken_back)
        looks = _all_of(
            self.placement_watch, self.peer_watch, self.gang_watch, self._others_hold, self.move_watch.placement
        )
        looks = _all_of(looks, drain_watch.placement_committed)
        self.placement.on_commit.append(partial(self._committed, "placement", looks))
        self.builds.on_commit.append(partial(self._committed, "scheduler", drain_watch.builds_committed))
        for name, cell_table in self.cells.items():
            look = _all_of(
                partial(self.machines.instances, name, cell_table.instances),
                self.peer_watch.machines,
                partial(self._moved, cell_table),
                partial(self.harm.record, cell_table.instances),
                partial(self.last_machines.instances, cell_table.instances),
                partial(self.breaker_watch.committed, cell_table, self.taken_back),
            )
            cell_table.on_commit.append(partial(self._committed, f"cell_{name}", look))

    def _moved(self, table: MemoryInstanceTable) -> None:
        if is_open(table):
            self.move_watch.instances(table.instances)

    # --- processes

    def start(self, name: str) -> Incarnation:
        """Start a process, or start it again."""
        count = self.counts[name] = self.counts.get(name, 0) + 1
        process = Process(name)
        transports: list[SimTransport] = []
        sessions: list[MemorySession] = []
        seed = f"{self.plan.seed} {name} {count}"

        def transport(bus: str) -> SimTransport:
            self.connections[name, bus] = None
            transports.append(SimTransport(self.brokers[bus], process, self.network_faults, self.event_log))
            return transports[-1]

        clock = SimClock(clock_error_s(self.plan.seed, name, self.plan.skew_s))
        environment = Environment(
            f"{name}-{count}",
            transports=transport,
            cell_transports=(lambda cell, _: transport(cell)) if self.plan.changes_cells else None,
            cells=self.known_cells,
            clock=clock,
            rng=random.Random(seed),
        )

        def session(schema: str) -> MemorySession:
            pause = partial(self.databases.pause, schema, random.Random(f"{seed} {schema}"), transports)
            sessions.append(self.databases.tables[schema].session(pause))
            return sessions[-1]

        stop = asyncio.Event()
        replica, hosts = (Replica(), HostTable()) if name.startswith("scheduler") else (None, None)
        # In its context, as what it makes keeps that one: else its tasks outlive a kill.
        around = ProcessContext(process, transports, session, replica, hosts)
        service = process.context.run(self.wiring.build, name, environment, around)
        self.event_log.record("start", f"{name} {count}")
        self.harm.down_since.pop(name.removeprefix("compute-"), None)
        task = process.spawn(service.run(stop), name)
        life = Incarnation(process, service, stop, task, transports, sessions, clock, replica, hosts)
        self.lives[name] = life
        task.add_done_callback(partial(self._ended, name, life))
        return life

    def kill(self, name: str) -> None:
        """SIGKILL: none of its code runs any more; brokers and databases notice."""
        life = self.lives.pop(name, None)
        if life is None:
            return
        self.event_log.record("kill", name)
        self.harm.down_since.setdefault(name.removeprefix("compute-"), self.now())
        life.process.dead = True
        life.killed.set()
        life.cut()

    async def stop(self, name: str) -> None:
        """SIGTERM, and wait for its end."""
        life = self.lives.get(name)
        if life is not None:
            self.event_log.record("stop", name)
            life.stop.set()
            # Killed while it stops, none of its code runs any more: its task never ends.
            killed = asyncio.ensure_future(life.killed.wait())
            await asyncio.wait([life.task, killed], return_when=asyncio.FIRST_COMPLETED)
            killed.cancel()
            if self.lives.get(name) is life:
                del self.lives[name]
                self.harm.down_since.setdefault(name.removeprefix("compute-"), self.now())
            life.cut()  # its connections end with it, closed or not (seed 1795407488)

    def _ended(self, name: str, life: Incarnation, task: asyncio.Task[None]) -> None:
        """A process that was not stopped has ended: a defect, unless what it needs to start was away for too long."""
        if life.stop.is_set() and not task.cancelled() and task.exception() is None:
            return
        if self.over or life.process.dead or self.lives.get(name) is not life:
            return
        error = None if task.cancelled() else task.exception()
        if name.partition("-")[2] in self.duplicates and name.startswith(("compute", "twin")):
            # One of two that bear one name has to go, and logs it; its supervisor starts it again.
            self.event_log.record("twin", f"{name}: {type(error).__name__}: {error}")
            self.kill(name)
            asyncio.get_running_loop().call_later(RESTART_S, self._supervise, name)
            return
        if isinstance(error, BusUnavailable | Transient):
            self.kill(name)
            asyncio.get_running_loop().call_later(RESTART_S, self._supervise, name)
            return
        self.fail(Breach("worker_died", f"{name}: {type(error).__name__}: {error}"))

    def _crash(self, name: str) -> bool:
        """Kill a process at the await where it is now, unless it has been killed often enough."""
        crashes = self.crashes[name] = self.crashes.get(name, 0) + 1
        if name not in self.counts or crashes > MAX_CRASHES:
            return False
        loop = asyncio.get_running_loop()
        loop.call_soon(self.kill, name, context=NO_CONTEXT)
        loop.call_later(self.rng.uniform(0.05, 4.0), self._supervise, name, context=NO_CONTEXT)
        return True

    def _supervise(self, name: str) -> None:
        if not self.over and name not in self.lives and name not in self.expected_down:
            self.start(name)

    def fail(self, breach: Breach) -> None:
        """An invariant is broken: the run ends here."""
        self.event_log.record("breach", str(breach))
        if not self.breach.done():
            self.breach.set_exception(breach)
            self.breach.exception()

    # --- wiring

    def now(self) -> float:
        """Virtual seconds."""
        return asyncio.get_running_loop().time()

    def _fleets(self) -> None:
        for cell, service in (*self.plan.services, *self.plan.metal_services):
            self.fleets[service] = self._fleet(cell, service)
        self.machines.runs, self.machines.has_a_double = self._runs, self.move_watch.has_a_double
        self.machines.has_forgotten = lambda: any(table.taken_back for table in self.cells.values())

    def _fleet(self, cell: str, service: str) -> WatchedFleet:
        fleet = WatchedFleet.planned(self.wiring.config(service).simulated, cell, service, Records())
        assert isinstance(fleet, WatchedFleet)
        fleet.watch, fleet.fail, fleet.destroyed = self.machines, self.fail, self._destroyed
        fleet.moves = self.move_watch.put
        fleet.has_name = partial(self._has_name, cell, service)
        return fleet

    def _destroyed(self, host: str, machine: SimulatedMachine) -> None:
        self.harm.destroyed(host, machine)
        if self.plan.judges_machines:
            self.last_machines.destroyed(host, machine, is_deleted=self.harm.is_deleted(machine.instance_uuid))

    def _has_machine(self, host: str, instance: str) -> bool:
        """Whether one machine of this instance is on this host, and the host has not burnt down."""
        if self.move_watch.has_a_double(host) or host in self.left:
            return False
        return any(fleet.machine(host, instance) is not None for fleet in self.fleets.values())

    def _has_name(self, cell: str, service: str, process: Process) -> bool:
        """Whether this process has the name of a service: its private queue. One that only waits for it has not."""
        try:
            queue = self.brokers[cell].queue(NAME_QUEUE.format(service=service))
        except QueueMissing:
            return False
        return isinstance(queue.owner, MemoryTransport) and queue.owner.name == process.name

    def start_duplicate(self, service: str) -> None:
        """From now on two services may bear this name, with the same settings and each with machines of its own."""
        if service in self.duplicates:
            return
        duplicate = self.duplicates[service] = self._fleet(self.cell_of(service).name, service)
        for host in list(duplicate.hosts):
            if self.fleets[service].host(host.plan.uuid) is None:
                duplicate.drop(host.plan.uuid)

    def second_fleet(self, service: str) -> SecondFleet:
        """Hosts of the same uuids as this service's, and other machines: none is ever built there."""
        fleet = SecondFleet.planned(
            self.wiring.config(service).simulated, self.cell_of(service).name, service, Records()
        )
        assert isinstance(fleet, SecondFleet)
        fleet.fail = self.fail
        return fleet

    def take_out(self, service: str, host: str) -> Host:
        """A host is not in the settings of this service any more, under either process of its name."""
        duplicate = self.duplicates.get(service)
        if duplicate is not None and duplicate.host(host) is not None:
            duplicate.drop(host)
        return self.fleets[service].drop(host)

    def _runs(self, host: str, instance: str) -> int | None:
        if self.harm.was_elsewhere(host, instance):
            return None  # seeds 80661, 1795406552: a scan from before may be judged now
        if self.left.get(host) == "dead" and any(host in table.fenced for table in self.cells.values()):
            return None  # seeds 624, 803: it has burnt down, and its cell knows that it is off
        for service, fleet in self.fleets.items():
            if service in self.duplicates:  # which of two hosts of one uuid is looked at cannot be known
                continue
            machine = fleet.machine(host, instance)
            if machine is not None and machine.complete:
                return machine.attempt
        node = self.ironic.pool.nodes.get(host) if self.ironic is not None else None
        is_there = node is not None and instance in (node["instance_uuid"], tagged_instance(node))
        return self.attempt_on(host, instance) if is_there else None

    def attempt_on(self, node: str, instance: str) -> int:
        """The attempt that is on a node, by the services' own records: Ironic knows none."""
        entries = [self.fleets[service].records.get((node, instance)) for _, service in self.plan.metal_services]
        return max((entry.attempt for entry in entries if entry is not None), default=0)

    @property
    def known_cells(self) -> tuple[str, ...]:
        """The cells in the settings of what is above cells, now."""
        return tuple(name for name in self.cells if name not in self.cells_out)

    @property
    def metal_now(self) -> list[str]:
        """The services that share the nodes, now."""
        return [service for _, service in self.plan.metal_services if service not in self.metal_out]

    def cell(self, name: str) -> Cell:
        """A cell by its name."""
        return next(cell for cell in self.plan.cells if cell.name == name)

    def readers_of(self, schema: str) -> list[str]:
        """The processes that use a schema."""
        kind, _, cell = schema.partition("_")
        begins = f"conductor-{cell}-" if kind == "cell" else kind
        return [name for name in self.plan.processes if name.startswith(begins)]

    def set_back(self, schema: str, restore: Callable[[], None]) -> None:
        """A schema's rows become those of an earlier moment; what it knew better is remembered here."""
        tables: dict[str, list[dict[str, Any]]] = {
            f"cell_{name}": [table.instances] for name, table in self.cells.items()
        }
        tables["placement"] = [self.placement.consumers]
        tables["scheduler"] = [self.builds.recorded, self.builds.records]
        now = [dict(rows) for rows in tables.get(schema, [])]
        restore()
        for before, after in zip(now, tables.get(schema, []), strict=True):
            differing = [uuid for uuid in {**before, **after} if before.get(uuid) is not after.get(uuid)]
            self.listener.exempt.update(differing)  # an end is announced again, under a higher number
            if schema == "scheduler":
                self.peer_watch.forget_refusals(differing)
            # What a cell has forgotten its recovery finds out; of the top, it is judged where a plan is made for it.
            if schema.startswith("cell_"):
                self.move_watch.forget(schema.removeprefix("cell_"), before, after)
                # But no recovery knows of a delete of which nobody has anything left: a late build is built after it.
                differing = [uuid for uuid in differing if uuid in before and self._is_forgotten_delete(before[uuid])]
            if not self.plan.judges_forgotten:
                self.taken_back.update(dict.fromkeys(differing))
        self.event_log.record("restored", f"{schema} {len(self.taken_back)}")
        if schema == "placement":
            self.placement_watch.begin_anew()
            self.harm.begin_anew(self.placement.consumers)
            # A root that an operator took out since is in placement again, until an operator takes it out once more.
            self.left = {host: how for host, how in self.left.items() if how != "drained"}
        if isinstance(table := self.databases.tables[schema], MemoryPlacementTable | MemoryInstanceTable):
            table.place += 1

    def _is_forgotten_delete(self, record: Instance) -> bool:
        """Whether its cell alone had its delete: placement has given back what it held."""
        kept = self.placement.consumers.get(record.uuid)
        is_released = kept is None or not kept.consumer.allocations
        return record.phase in OVER or (record.phase == (State.RELEASING, State.DELETED) and is_released)

    def take_over(self, schema: str) -> None:
        """Another server has a schema from now on, and lacks nothing of what its messages have shown."""
        table = self.cells[schema.removeprefix("cell_")]
        table.place += 1
        table.on_commit.append(partial(self._committed, schema, partial(self._stays_open, table)))
        self.event_log.record("restored", f"{schema} by another server")

    def _stays_open(self, table: MemoryInstanceTable) -> None:
        if table.recovers:
            raise Breach("recovery_has_a_reason", f"incarnation {table.incarnation} recovers, and nothing was set back")

    def publish_foreign(self, messages: Sequence[Message]) -> None:
        """Messages of another client that are well formed: nothing strange about them."""
        self.event_log.record("others", " ".join(tag_of(type(message)) for message in messages))

    def _others_hold(self) -> None:
        self.harm.placement(self.placement.consumers, self.placement.providers)

    def _ironic(self) -> SimIronic | None:
        metal = self.plan.metal
        if metal is None:
            return None
        table = self.databases.tables["ironic_sync"] = self.positions
        table.on_commit.append(partial(self._committed, "ironic_sync", lambda: None))
        ironic = SimIronic(
            self.brokers[API],
            self.network_faults,
            self.event_log,
            self.clock,
            seed=self.plan.seed,
            behaviour=metal.behaviour,
        )
        ironic.pool.plan(metal.nodes, CLASSES)
        ironic.pool.occupy(metal.foreign, CLASSES)
        ironic.pool.deployed = self.machines.deployed
        ironic.pool.changed_hands = self.harm.changed_hands
        ironic.watch_requests(self.harm, self.attempt_on, self.fail)
        return ironic

    def _broker(self, name: str) -> Broker:
        broker = Broker(self.clock)
        broker.bus = name
        broker.event_log = self.event_log
        broker.on_message = MessageWatch(self).published
        broker.add_foreign_tenant()
        return broker

    # --- what every process meets

    def _sessions(self) -> Iterable[MemorySession]:
        return (session for life in self.lives.values() for session in life.sessions)

    def _committed(self, schema: str, look: Callable[[], None]) -> None:
        self.event_log.record("commit", schema)
        try:
            look()
        except Breach as breach:
            self.fail(breach)

    def cell_of(self, service: str) -> Cell:
        """The cell of a compute service."""
        return next(cell for cell in self.plan.cells if service in (*dict(cell.services), *cell.metal))

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """The replicas of the schedulers that run."""
        return {name: life.replica for name, life in self.lives.items() if life.replica is not None}
