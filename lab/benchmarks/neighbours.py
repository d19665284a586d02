"""The latency of a quiet project's boots beside noisy projects: alone, beside one noisy connection, and beside eight.

    python -m lab.benchmarks.neighbours [--seconds 20] [--noise malformed] [--json FILE]

Real servers, each worker its own process, and every user with the permissions that `berth permissions` prints. The
quiet project boots one machine after the other, as one AMQP client with confirms; its latency is counted from the time
at which a request was to leave to its event `active`. A noisy connection is another project's: it publishes without
confirms, as fast as the broker takes it; one process has all of them. The last phase has a noisy project in the quiet
one's own lane.

Noise: `malformed` (small bodies that cannot be read), `large` (the same with almost a megabyte), `deletes` (of machines
that do not exist, which are retried), `boots` (of a flavor that does not exist). Memory is resident memory of the
schedulers, before and at its peak.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import aio_pika
import aiormq
import msgspec
from aiormq.exceptions import DeliveryError
from msgspec import Struct
from pamqp.commands import Basic

from berth.permissions import PermissionRole, of_project, of_role
from berth.settings import BusSettings, CellSettings, Settings
from berth.trial.servers import API_VHOST, RealServers, SystemPlan, real_servers, variables
from berth.trial.worker_processes import WorkerProcesses
from bus.contracts.catalogue import lane_of
from compute_sim.config import ComputeConfig
from lab.benchmarks import probe

QUIET = "quiet"
NOISY = 8
PASSWORD = "benchmark"
PLAN = SystemPlan(cells=("cell1",), schedulers=1, placements=1, compute=ComputeConfig(hosts=50))
PAUSE_S = 0.05
WARM_UP_S = 3  # of noise, before the first boot: its queues are full then
FULL_AGAIN_S = 0.05
END_TIMEOUT_S = 120.0
MEMORY_EVERY_S = 0.25
LARGE_BYTES = 900_000
NOISE = ("malformed", "large", "deletes", "boots")
BURST = 50  # messages that a noisy connection writes before it waits for the event loop


class Phase(Struct, frozen=True, kw_only=True):
    """One phase: the quiet project's boots, and what the schedulers held."""

    name: str
    boots: int
    p50_ms: float
    p95_ms: float
    most_ms: float
    refused: int  # publishes that the broker did not take, each of which was repeated
    noise_per_s: float
    memory_mb: float


class Result(Struct, frozen=True, kw_only=True):
    """Everything measured."""

    noise: str
    memory_before_mb: float
    phases: tuple[Phase, ...]


def projects(count: int, *, beside: str = "") -> list[str]:
    """Names of noisy projects: in other lanes than the quiet one, or in the lane of `beside`."""
    wanted: list[str] = []
    number = 0
    while len(wanted) < count:
        name = f"noisy-{number}"
        number += 1
        if (lane_of(name) == lane_of(beside)) if beside else lane_of(name) != lane_of(QUIET):
            wanted.append(name)
    return wanted


class System:
    """The servers, the users and the workers."""

    def __init__(self, servers: RealServers, directory: Path) -> None:
        self._servers = servers
        settings = servers.settings(PLAN)
        compute = msgspec.structs.replace(settings.compute, state_dir=str(directory / "machines"))
        self._settings = msgspec.structs.replace(settings, compute=compute)
        self.processes = WorkerProcesses(directory, {})

    def url(self, user: str, vhost: str = API_VHOST) -> str:
        """The address of a bus as one user has it."""
        return self._servers.broker.url(vhost, user=user, password=PASSWORD)

    def start(self) -> None:
        """Make the users, and start the workers."""
        grants = [grant for role in PermissionRole for grant in of_role(role, self._settings)]
        every = [QUIET, *projects(NOISY), *projects(1, beside=QUIET)]
        grants += [of_project(project, self._settings) for project in every]
        self._servers.broker.define(
            users=[{"name": name, "password": PASSWORD, "tags": ""} for name in sorted({one.user for one in grants})],
            permissions=[
                {"user": one.user, "vhost": one.vhost, "configure": one.configure, "write": one.write, "read": one.read}
                for one in grants
            ],
            topic_permissions=[
                {"user": one.user, "vhost": one.vhost, "exchange": name, "write": topic.write, "read": topic.read}
                for one in grants
                for name, topic in one.topics.items()
            ],
        )
        for name, *arguments in (
            ("placement", "placement"),
            ("conductor-cell1", "conductor", "--cell", "cell1"),
            ("compute-cell1", "compute", "--cell", "cell1", "--service", "cell1-c1"),
            ("scheduler", "scheduler"),
        ):
            self.processes.start(name, *arguments, settings=variables(self._settings_of(f"berth-{name}")))

    def _settings_of(self, user: str) -> Settings:
        cells = {cell: CellSettings(url=self.url(user, cell)) for cell in PLAN.cells}
        return msgspec.structs.replace(self._settings, bus=BusSettings(url=self.url(user)), cells=cells)

    def memory_mb(self) -> float:
        """Resident memory of the scheduler."""
        return probe.memory_mb(self.processes.workers["scheduler"].process.pid)


class QuietClient:
    """The quiet project's program."""

    def __init__(self, channel: aio_pika.abc.AbstractChannel) -> None:
        self._channel = channel
        self._ended: dict[str, asyncio.Future[str]] = {}
        self.refused = 0

    async def listen(self) -> None:
        """Receive the project's events."""
        queue = await self._channel.declare_queue(exclusive=True)
        await queue.bind("berth.events", f"build.event.*.{QUIET}")
        await queue.consume(self._receive, no_ack=True)

    async def boot(self) -> float:
        """Boot a machine and delete it; milliseconds until it was active."""
        body = {"instance_uuid": str(uuid.uuid4()), "project_id": QUIET, "flavor": "m1.small"}
        begun = time.monotonic()
        state = await self._requested("build.request", body)
        took_ms = 1000 * (time.monotonic() - begun)
        if state != "active":
            raise SystemExit(f"a boot of the quiet project is {state}")
        del body["flavor"]
        await self._requested("build.delete", body)
        return took_ms

    async def _requested(self, kind: str, body: dict[str, str]) -> str:
        ended = self._ended[body["instance_uuid"]] = asyncio.get_running_loop().create_future()
        message = aio_pika.Message(json.dumps(body).encode(), content_type="application/json", delivery_mode=2)
        exchange = await self._channel.get_exchange("berth", ensure=False)
        while True:
            try:
                await exchange.publish(message, f"{kind}.{lane_of(QUIET)}.{QUIET}")
                break
            except DeliveryError:
                self.refused += 1
                await asyncio.sleep(FULL_AGAIN_S)
        async with asyncio.timeout(END_TIMEOUT_S):
            state: str = await ended
        return state

    async def _receive(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        event = json.loads(message.body)
        waiting = self._ended.get(event["instance_uuid"])
        if event.get("terminal") and waiting is not None and not waiting.done():
            waiting.set_result(event["state"])


async def make_noise(kind: str, connections: list[tuple[str, str]]) -> None:
    """Publish on the connections, (address, project) each, until it is killed; print the count each second."""
    counts = dict.fromkeys((project for _, project in connections), 0)
    async with asyncio.TaskGroup() as group:
        for url, project in connections:
            group.create_task(publish_noise(kind, url, project, counts))
        while True:
            await asyncio.sleep(1.0)
            print(sum(counts.values()), flush=True)


async def publish_noise(kind: str, url: str, project: str, counts: dict[str, int]) -> None:
    """Publish on one connection, as fast as the broker takes it."""
    connection = await aiormq.connect(url)
    channel = await connection.channel(publisher_confirms=False)
    properties = Basic.Properties(content_type="application/json", delivery_mode=2)
    filling = b'{"instance_uuid":"%s","flavor":1,"hints":"' + b"x" * LARGE_BYTES + b'"}'
    bodies = {
        "malformed": ("build.request", b'{"instance_uuid":"%s","flavor":1}'),
        "large": ("build.request", filling),
        "deletes": ("build.delete", b'{"instance_uuid":"%s","project_id":"' + project.encode() + b'"}'),
        "boots": ("build.request", b'{"instance_uuid":"%s","flavor":"none","project_id":"' + project.encode() + b'"}'),
    }
    head, body = bodies[kind]
    while True:
        for _ in range(1 if kind == "large" else BURST):
            await channel.basic_publish(
                body % str(uuid.uuid4()).encode(),
                exchange="berth",
                routing_key=f"{head}.{lane_of(project)}.{project}",
                properties=properties,
            )
            counts[project] += 1
        await asyncio.sleep(0)


@contextlib.contextmanager
def noise(system: System, names: list[str], kind: str) -> Iterator[subprocess.Popen[str] | None]:
    """The process with the noisy connections; None: there are none."""
    if not names:
        yield None
        return
    connections = json.dumps([(system.url(f"berth-project-{name}"), name) for name in names])
    command = [sys.executable, "-m", "lab.benchmarks.neighbours", "--as-noise", kind, connections]
    made = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield made
    finally:
        made.kill()


async def measure(
    system: System, client: QuietClient, phase: tuple[str, list[str]], kind: str, seconds: float
) -> Phase:
    """One phase: its name, and the projects that make noise."""
    name, noisy = phase
    latencies: list[float] = []
    held: list[float] = []

    async def watch() -> None:
        while True:
            held.append(await asyncio.to_thread(system.memory_mb))
            await asyncio.sleep(MEMORY_EVERY_S)

    watching = asyncio.create_task(watch())
    refused = client.refused
    with noise(system, noisy, kind) as made:
        if made is not None and made.stdout is not None:
            for _ in range(WARM_UP_S):
                await asyncio.to_thread(made.stdout.readline)
        begun = time.monotonic()
        while time.monotonic() - begun < seconds or not latencies:
            latencies.append(await client.boot())
            await asyncio.sleep(PAUSE_S)
        lasted_s = time.monotonic() - begun
    sent = int(made.communicate()[0].split()[-1]) if made is not None else 0
    watching.cancel()
    ranked = sorted(latencies)
    return Phase(
        name=name,
        boots=len(ranked),
        p50_ms=round(ranked[len(ranked) // 2], 1),
        p95_ms=round(ranked[min(len(ranked) - 1, len(ranked) * 95 // 100)], 1),
        most_ms=round(ranked[-1], 1),
        refused=client.refused - refused,
        noise_per_s=round(sent / (lasted_s + WARM_UP_S), 1),
        memory_mb=round(max(held), 1),
    )


async def run(system: System, kind: str, seconds: float) -> Result:
    """All phases."""
    await system.processes.ready()
    connection = await aio_pika.connect(system.url(f"berth-project-{QUIET}"))
    async with connection:
        client = QuietClient(await connection.channel())
        await client.listen()
        for _ in range(5):
            await client.boot()
        before = system.memory_mb()
        others = projects(NOISY)
        phases = {
            "alone": [],
            "beside one": others[:1],
            "beside eight": others,
            "beside one in its lane": projects(1, beside=QUIET),
        }
        measured = [await measure(system, client, phase, kind, seconds) for phase in phases.items()]
    return Result(noise=kind, memory_before_mb=round(before, 1), phases=tuple(measured))


def main() -> None:
    """Print, and write when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each phase lasts")
    parser.add_argument("--noise", choices=NOISE, default=NOISE[0])
    parser.add_argument("--json", type=Path, help="write everything measured here")
    parser.add_argument("--as-noise", nargs=2, metavar=("KIND", "CONNECTIONS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_noise:
        kind, connections = options.as_noise
        return asyncio.run(make_noise(kind, json.loads(connections)))
    with (
        real_servers(PLAN.cells, durable=True) as servers,
        tempfile.TemporaryDirectory(prefix="berth-neighbours-") as directory,
    ):
        system = System(servers, Path(directory))
        try:
            system.start()
            result = asyncio.run(run(system, options.noise, options.seconds))
        finally:
            system.processes.stop()
    print(f"noise: {result.noise}; the scheduler's memory before: {result.memory_before_mb:.0f} MiB")
    for one in result.phases:
        print(
            f"  {one.name:24} {one.boots:4} boots, ms: p50 {one.p50_ms:.0f}, p95 {one.p95_ms:.0f}, most "
            f"{one.most_ms:.0f}; {one.refused} publishes refused; noise {one.noise_per_s:.0f}/s; "
            f"memory {one.memory_mb:.0f} MiB"
        )
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2))


if __name__ == "__main__":
    main()
