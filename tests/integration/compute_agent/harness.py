"""A cell with nothing in it but a compute service: what it receives, and what it publishes; and its bare metal."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import Any

import httpx
import uvicorn
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from berth.config.ports import free_port
from berth.config.settings import ComputeSettings
from berth.up.worker_processes import NO_TLS
from bus.bus import Bus
from bus.clock import SystemClock, new_uuid
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Message
from bus.contracts.cell import (
    ComputeOutcome,
    ComputeResult,
    Destroy,
    Heartbeat,
    HostStates,
    InstanceSpec,
    ReportHosts,
    RingMembers,
    Spawn,
)
from bus.contracts.placement import InventoryUpdate
from bus.memory import MemoryBroker, MemoryTransport
from bus.rabbitmq.transport import RabbitTransport
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from bus.transport import Transport
from compute_agent.app import build as build_service
from compute_agent.driver import Build, ChangeOrder, ChangeResult
from compute_agent.driver import Driver as AnyDriver
from compute_agent.driver_plugin import DriverParts
from compute_agent.drivers.ironic import plugin as ironic
from compute_agent.drivers.ironic.config import IronicConfig
from compute_agent.drivers.ironic.driver import IronicDriver
from compute_agent.records.records import Records
from compute_sim import plugin as simulated
from compute_sim.config import SimulatedConfig
from compute_sim.driver import SimulatedDriver
from compute_sim.fleet import Fleet
from compute_sim.ironic_stand_in import Behaviour, IronicStandIn, NodePool, Silent
from tests.kit.waiting import PATIENCE_S, until

# --- A cell with nothing in it but a compute service: what it receives, and what it publishes.


CELL = "c1"
SERVICE = "c1-a"
DATABASE_ID = "dddddddd-0000-4000-8000-000000000001"


class Cell:
    """A bus, ears on it, and compute services that start, stop and die on demand."""

    def __init__(self, transports: Callable[[str], Transport] | None = None) -> None:
        self.clock = SystemClock()
        self.rng = random.Random(7)
        self.broker = MemoryBroker(self.clock)
        self.transports = transports or partial(MemoryTransport, self.broker)
        self.bus = Bus(CELL, self.transports(CELL), process="ears", clock=self.clock, rng=self.rng)
        self.received: list[Message] = []
        self.silenced: set[str] = set()
        self._rings: dict[str, dict[str, int]] = {}
        self._ring_number = 0
        self._consumers: list[Consumer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._lives: list[Life] = []

    async def open(self) -> None:
        await self.bus.open()
        for queue in (
            "conductor.results",
            "conductor.hosts.{process}",
            "conductor.leases.{process}",
            "placement.inventory",
            "scheduler.metrics.{process}",
        ):
            consumer = Consumer(self.bus, queue, self._receive, max_batch=1000, concurrency=1)
            await consumer.start()
            self._tasks.append(asyncio.create_task(consumer.run()))
            self._consumers.append(consumer)

    async def close(self) -> None:
        """Services that still run are stopped first."""
        for life in self._lives:
            if not life.task.done():
                await life.stop()
        for consumer in self._consumers:
            await consumer.drain(1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.bus.close()

    async def _receive(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        self.received.extend(received.message for received in batch)
        await self._send_rings()
        return [Done()] * len(batch)

    async def _send_rings(self) -> None:
        """As the cell's keeper does: who is in which ring, whenever that changes. `away` are dead, by its word."""
        rings: dict[str, dict[str, int]] = {}
        for heartbeat in self.heartbeats():
            if heartbeat.ring is not None:
                ring = rings.setdefault(heartbeat.ring, {})
                ring.pop(heartbeat.service, None)
                if not heartbeat.stopping and heartbeat.service not in self.silenced:
                    ring[heartbeat.service] = heartbeat.epoch
        if rings == self._rings:
            return
        self._rings, self._ring_number = rings, self._ring_number + 1
        for ring, members in rings.items():
            published = RingMembers(ring=ring, term=1, number=self._ring_number, members=tuple(sorted(members)))
            await self.bus.publish(published)

    async def lose(self, *services: str) -> None:
        """The keeper receives no heartbeat of these any more."""
        self.silenced.update(services)
        await self._send_rings()

    # --- what was received

    def results(self, instance: str | None = None) -> list[ComputeResult]:
        return [m for m in self.received if isinstance(m, ComputeResult) and instance in (None, m.instance_uuid)]

    def announced(self) -> list[HostStates]:
        return [m for m in self.received if isinstance(m, HostStates)]

    def heartbeats(self) -> list[Heartbeat]:
        return [m for m in self.received if isinstance(m, Heartbeat)]

    def inventory(self) -> list[InventoryUpdate]:
        return [m for m in self.received if isinstance(m, InventoryUpdate)]

    async def outcome(self, instance: str, attempt: int, count: int = 1) -> ComputeResult:
        """The count-th result of this attempt."""

        def published() -> list[ComputeResult]:
            found = [r for r in self.results(instance) if r.attempt == attempt]
            return found if len(found) >= count else []

        return (await until(published))[count - 1]  # type: ignore[no-any-return]

    async def ended(self, instance: str, attempt: int, outcome: ComputeOutcome) -> ComputeResult:
        """A result of this attempt with this outcome."""
        found = await until(
            lambda: [r for r in self.results(instance) if r.attempt == attempt and r.outcome is outcome]
        )
        return found[0]  # type: ignore[no-any-return]

    async def built(self, host: str, instance: str = "", attempt: int = 1, service: str = SERVICE) -> str:
        """Have an instance built there, a new one by default; returns it when its machine runs."""
        instance = instance or self.instance()
        await self.spawn(host, instance, attempt, service)
        await self.ended(instance, attempt, ComputeOutcome.ACTIVE)
        return instance

    async def destroyed(self, host: str, instance: str, attempt: int = 1, service: str = SERVICE) -> None:
        """Have a machine destroyed, and wait for the result."""
        await self.destroy(host, instance, attempt, service)
        await self.ended(instance, attempt, ComputeOutcome.DESTROYED)

    async def asked(self) -> list[HostStates]:
        """Have all hosts announced; the whole announcements that came since, at least one."""
        first = len(self.announced())
        await self.ask()
        return await until(lambda: [page for page in self.announced()[first:] if page.complete])  # type: ignore[no-any-return]

    # --- what is asked

    def instance(self) -> str:
        return new_uuid(self.rng)

    async def spawn(self, host: str, instance: str, attempt: int = 1, service: str = SERVICE) -> None:
        await self.bus.publish(spawn(host, instance, attempt, service), cause=instance)

    async def destroy(
        self, host: str, instance: str, attempt: int = 1, service: str = SERVICE, database_id: str = DATABASE_ID
    ) -> None:
        command = Destroy(
            instance_uuid=instance, attempt=attempt, host_uuid=host, service=service, database_id=database_id
        )
        await self.bus.publish(command, cause=instance)

    async def ask(self) -> None:
        await self.bus.publish(ReportHosts())

    # --- compute services

    async def compute(
        self, config: ComputeSettings, fleet: Fleet, *, service: str = SERVICE, driver: AnyDriver | None = None
    ) -> Life:
        env = Environment(f"compute-{service}", transports=self.transports, clock=self.clock, rng=self.rng)
        parts: DriverParts | None = None
        if isinstance(driver, IronicDriver):
            parts = ironic.parts_of(driver)
        elif isinstance(driver, SimulatedDriver):
            parts = simulated.parts_of(driver, fleet, config.simulated, clock=self.clock)
        elif driver is not None:
            parts = DriverParts(driver=driver)
        life = Life(build_service(env, config, CELL, service, records=fleet.records, driver=parts, driver_state=fleet))
        self._lives.append(life)
        await life.ready()
        return life


class Life:
    """One life of a service."""

    def __init__(self, service: WorkerRuntime) -> None:
        self.service = service
        self._stop = asyncio.Event()
        self.task = asyncio.create_task(service.run(self._stop))

    async def ready(self) -> None:
        ready = asyncio.create_task(self.service.ready.wait())
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({ready, self.task}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self.task.done():
            await self.task
            raise AssertionError("the service ended before it was ready")

    async def stop(self) -> None:
        """Drain and close."""
        self._stop.set()
        await self.task

    async def kill(self) -> None:
        """End it abruptly: nothing is drained."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def spawn(host: str, instance: str, attempt: int = 1, service: str = SERVICE) -> Spawn:
    return Spawn(
        spec=InstanceSpec(instance_uuid=instance, project_id="p1", flavor="m1.small"),
        attempt=attempt,
        host_uuid=host,
        allocations={host: {"VCPU": 1, "MEMORY_MB": 512}},
        service=service,
        database_id=DATABASE_ID,
    )


def running(pages: Sequence[HostStates]) -> dict[str, list[tuple[str, int]]]:
    """By host: the instances that run there, each with its attempt, as the last of these has it."""
    return {
        host.uuid: [(one.instance_uuid, one.attempt) for one in host.running or ()]
        for page in pages
        for host in page.hosts
    }


def planned(settings: ComputeSettings) -> Fleet:
    """The simulated fleet of SERVICE."""
    records = Records.of_service(settings.state_dir, CELL, SERVICE, synced=False)
    return Fleet.planned(settings.simulated, CELL, SERVICE, records, settings.state_dir)


def cell_on(url: str, prefix: str = "") -> Cell:
    """A cell on a real broker."""
    return Cell(lambda name: RabbitTransport(url, name=name, prefix=prefix))


# --- Bare metal: an Ironic stand-in over real HTTP, drivers and services on it, and ways to it that disturb
# requests.


INSTANCE = "20000000-0000-4000-8000-000000000000"
QUICK = Behaviour(verify_s=0.001, deploy_s=0.01, undeploy_s=0.005, clean_s=0.005)
QUICKLY = {"poll_interval_s": 0.005, "max_poll_interval_s": 0.05, "watch_interval_s": 0.01}
FAILING = replace(QUICK, deploy_fails=1.0)


class Driver(IronicDriver):
    """A driver whose calls end within PATIENCE_S."""

    async def spawn(self, build: Build) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return await super().spawn(build)

    async def destroy(
        self, host_uuid: str, instance_uuid: str = INSTANCE, attempt: int = 1, database_id: str | None = DATABASE_ID
    ) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await super().destroy(host_uuid, instance_uuid, attempt, database_id)

    async def change(self, command: ChangeOrder) -> ChangeResult:
        async with asyncio.timeout(PATIENCE_S):
            return await super().change(command)


class Metal:
    """An Ironic with some nodes, whose drivers are closed with it."""

    def __init__(self, nodes: int = 3) -> None:
        clock, rng = SystemClock(), random.Random(1)
        self.stand_in = IronicStandIn(Silent(), clock=clock, rng=rng, behaviour=QUICK, port=free_port())
        self.pool = self.stand_in.pool
        self.pool.plan(nodes)
        self.nodes = self.pool.nodes
        self.fleets: dict[str, Fleet] = {}
        self._lives: list[Life] = []
        self._opened: list[Driver] = []

    async def open(self) -> None:
        await self.stand_in.start()

    async def close(self) -> None:
        for life in self._lives:
            if not life.task.done():
                await life.stop()
        for driver in self._opened:
            await driver.close()
        await self.stand_in.stop()

    @property
    def first(self) -> str:
        """The first node's uuid."""
        return next(iter(self.nodes))

    @property
    def node(self) -> dict[str, Any]:
        """The first node."""
        return self.nodes[self.first]

    @property
    def requested(self) -> list[tuple[str, str]]:
        """The changes that were requested of Ironic: method and node."""
        return self.stand_in.requested

    def config(self, **more: Any) -> IronicConfig:
        return IronicConfig(**{"url": self.stand_in.url, **QUICKLY, **more})

    def made(self, kind: type[Driver] = Driver, **how: Any) -> Any:
        """A driver for a service to open, as `driver_of` makes it."""
        return driver_of(kind, **{"url": self.stand_in.url, **QUICKLY, **how})

    async def driver(self, **how: Any) -> Driver:
        """An open driver."""
        self._opened.append(self.made(**how))
        await self._opened[-1].open()
        return self._opened[-1]

    @contextlib.asynccontextmanager
    async def watching(self, driver: Driver) -> AsyncIterator[None]:
        """While the driver looks for changes."""
        task = asyncio.create_task(driver.watch())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def deployed(self, wanted: Build, **config: Any) -> Driver:
        """A driver that has built this."""
        driver = await self.driver(**config)
        await driver.spawn(wanted)
        return driver

    async def serve(self, cell: Cell, service: str = SERVICE, driver: IronicDriver | None = None, **more: Any) -> Life:
        """A service of these nodes; the next one of a name has its records."""
        config = ComputeSettings(driver="ironic", ironic=self.config(), **more)
        fleet = self.fleets.setdefault(service, Fleet.planned(SimulatedConfig(hosts=0), CELL, service, Records()))
        self._lives.append(await cell.compute(config, fleet, service=service, driver=driver))
        return self._lives[-1]

    async def in_state(self, state: str, node: str = "") -> None:
        """Wait until the node is in this provision state."""
        await until(lambda: self.nodes[node or self.first]["provision_state"] == state)


def driver_of(
    kind: type[Driver] = Driver,
    *,
    cell: str = CELL,
    service: str = SERVICE,
    clock: SystemClock | None = None,
    way: httpx.AsyncBaseTransport | None = None,
    **config: Any,
) -> Driver:
    """A driver with these settings. way: to Ironic."""
    return kind(IronicConfig(**config), cell=cell, service=service, clock=clock or SystemClock(), transport=way)


def build(node: str, instance: str = INSTANCE, attempt: int = 1, project: str = "acme", **spec: Any) -> Build:
    made = InstanceSpec(instance_uuid=instance, project_id=project, **spec)
    return Build(node, made, attempt, {node: {"CUSTOM_GOLD": 1}}, DATABASE_ID)


def owner_tag(instance: str = INSTANCE, **changed: object) -> dict[str, object]:
    made = {"database_id": DATABASE_ID, "cell": CELL, "service": SERVICE, "instance": instance, "attempt": 1}
    return {"berth": {**made, **changed}}


async def fault(doing: Awaitable[object]) -> tuple[type[Exception], str]:
    """The fault that it ends with, and its code, or its text where it has none."""
    try:
        await doing
    except Exception as raised:
        return type(raised), getattr(raised, "code", str(raised))
    raise AssertionError("it ended without a fault")


# --- ways to Ironic
Plan = Callable[[httpx.Request], httpx.Response | None]


class Way(httpx.AsyncBaseTransport):
    """A way to Ironic.

    plan: called with each request; an answer of its own is taken instead of Ironic's. after: called with each request
    that Ironic has answered. unanswered: how many requests found no server; most: how many were under way at once.
    """

    def __init__(self, plan: Plan = lambda _: None, after: Callable[[httpx.Request], None] = lambda _: None) -> None:
        self._inner = httpx.AsyncHTTPTransport(verify=NO_TLS)
        self._plan, self._after = plan, after
        self.unanswered = self.under_way = self.most = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if (planned := self._plan(request)) is not None:
                return planned
            answer = await self._inner.handle_async_request(request)
            await answer.aread()
            self._after(request)
            return answer
        except httpx.TransportError:
            self.unanswered += 1
            raise
        finally:
            self.under_way -= 1

    async def aclose(self) -> None:
        await self._inner.aclose()


def refusing(method: str, times: int, status: int, **headers: str) -> Way:
    """One on which so many requests of a method are answered with this status. An empty method: all."""
    left = [times]

    def plan(request: httpx.Request) -> httpx.Response | None:
        if method not in ("", request.method) or not left[0]:
            return None
        left[0] -= 1
        return httpx.Response(status, headers=headers)

    return Way(plan)


class Skipping(SystemClock):
    """Each sleep takes so much longer than it should, by its own reckoning, and no time by anyone else's."""

    def __init__(self, factor: float = 0.0) -> None:
        self._factor = factor
        self._skipped = 0.0
        self.slept: list[float] = []

    def skip(self, seconds: float) -> None:
        self._skipped += seconds

    def monotonic(self) -> float:
        return super().monotonic() + self._skipped

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._skipped += seconds * self._factor
        await asyncio.sleep(0)


# --- servers
class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, **how: Any) -> AsyncIterator[str]:
    """The address that it is served at, without a scheme."""
    socket_ = socket.create_server(("127.0.0.1", 0))
    # A client that stood still finds its connection open.
    config = uvicorn.Config(app, log_config=None, lifespan="off", loop="none", timeout_keep_alive=75, **how)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[socket_]))
    try:
        await until(lambda: server.started)
        yield f"127.0.0.1:{socket_.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def guarded(
    passes: Callable[[dict[bytes, bytes]], bool], certificate: Any = None, behaviour: Behaviour = QUICK
) -> AsyncIterator[tuple[NodePool, str]]:
    """An Ironic that answers requests whose headers pass, over TLS where it has a certificate; and its address."""
    ironic = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=behaviour)
    ironic.pool.plan(2)
    inner: ASGIApp = ironic.app()

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        answer = inner if passes(dict(scope["headers"])) else Response(status_code=401)
        await answer(scope, receive, send)

    tls = {} if certificate is None else {"ssl_certfile": certificate.file, "ssl_keyfile": certificate.key}
    async with listening(guard, **tls) as address:
        yield ironic.pool, f"{'https' if tls else 'http'}://{address}"
        await ironic.pool.stop()
