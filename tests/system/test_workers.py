"""Workers as operators start them: twice, by placement, with a cell's credentials, by compose; paused, and hit."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
import yaml
from sqlalchemy.engine import make_url

from berth.config.settings import ComputeSettings
from berth.up.embedded.postgres import Postgres
from berth.up.embedded.rabbitmq import RabbitMQ
from berth.up.servers import API_VHOST, RealServers, SystemPlan, running_processes, start_all, variables
from berth.up.worker_processes import WorkerProcesses
from bus.clock import SystemClock
from bus.consuming import dead_letters
from bus.contracts.queues import COMMANDS
from bus.rabbitmq.transport import RabbitTransport
from compute_sim.config import SimulatedConfig
from compute_sim.ironic_stand_in import AmqpAnnouncer, IronicStandIn
from tests.integration.ironic_sync.test_whole import Site, placement_on
from tests.kit.forks import ForkedProcess, run_berth
from tests.kit.lent import lent_servers
from tests.kit.raw_amqp import raw_publisher
from tests.kit.waiting import until, wait_until
from tests.kit.web_process import WebProcess, served
from tests.system.small import PLAN, Small
from tests.system.worker_processes import rig

# --- Several `berth up` in one state directory, and one that is stopped while its servers start.


pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]
WAIT_S = 150.0


@pytest.fixture
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="berth-up-") as name:
        Path(name).chmod(0o755)  # the database runs as another user where this runs as root
        yield Path(name) / "state"


@contextmanager
def up(state: Path) -> Iterator[subprocess.Popen[str]]:
    variables: Mapping[str, str] = {
        **os.environ,
        "BERTH_STATE_DIR": str(state),
        "BERTH_UP__NODES": "0",
        "BERTH_UP__WEB": "false",
        "BERTH_UP__REST": "false",
    }
    command = [sys.executable, "-m", "berth", "up"]
    with subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as one:
        try:
            yield one
        finally:
            one.terminate()
            one.wait(WAIT_S)


def postmaster(state: Path) -> int | None:
    """The process of the database in this directory; None: none runs."""
    try:
        pid = int((state / "postgres" / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(pid, 0)
    except (OSError, ValueError, IndexError):
        return None
    return pid


def test_of_two_that_start_at_once_one_is_refused_and_the_other_runs(state: Path) -> None:
    with up(state) as first, up(state) as second:
        wait_until(lambda: first.poll() is not None or second.poll() is not None, WAIT_S)
        refused, runs = (first, second) if first.poll() is not None else (second, first)
        assert refused.stderr is not None
        assert (refused.returncode, "(up.running)" in refused.stderr.read()) == (2, True)
        assert runs.poll() is None
    assert postmaster(state) is None


def test_one_that_is_stopped_while_its_database_starts_leaves_none(state: Path) -> None:
    with up(state) as one:
        wait_until(lambda: (state / "postgres").exists() or one.poll() is not None, WAIT_S)
        assert one.poll() is None
        one.send_signal(signal.SIGTERM)
        assert one.wait(WAIT_S) == 130, one.stderr.read() if one.stderr is not None else ""
    assert postmaster(state) is None


# --- `deploy/compose.yaml` without an engine: its services' own commands and settings, as processes on real
# servers. The parts that an engine adds (the image, a network with names, volumes) are left out: the servers'
# addresses and the directory of a volume take the places of theirs.


FILE = Path(__file__).parents[2] / "deploy" / "compose.yaml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
SERVERS = {"rabbitmq", "postgres"}
COUNT = 5


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """{what the file names: what stands for it here}, with the user that each server's image would make."""
    of_broker, of_database = SERVICES["rabbitmq"]["environment"], SERVICES["postgres"]["environment"]
    with lent_servers(()) as servers:
        user, password = of_broker["RABBITMQ_DEFAULT_USER"], of_broker["RABBITMQ_DEFAULT_PASS"]
        servers.broker.add_user(user, password, ["/"])
        credentials = f"{of_database['POSTGRES_USER']}:{of_database['POSTGRES_PASSWORD']}"
        database = f"postgresql://{credentials}@postgres:5432/{of_database['POSTGRES_DB']}"
        here = make_url(servers.database_url).render_as_string(hide_password=False)
        volumes = {path: str(tmp_path) for service in SERVICES.values() for path in mounted(service)}
        yield {database: here, "@rabbitmq:5672/": f"@127.0.0.1:{servers.broker.port}/", **volumes}


def mounted(service: dict[str, Any]) -> list[str]:
    """The directories of a service's volumes, each of which the file declares."""
    declared = yaml.safe_load(FILE.read_text())["volumes"]
    pairs = [volume.split(":") for volume in service.get("volumes", ())]
    assert {name for name, _ in pairs} <= declared.keys()
    return [path for _, path in pairs]


def environment(service: dict[str, Any], places: Mapping[str, str]) -> dict[str, str]:
    """A service's settings, at the servers of this test."""
    text = json.dumps(service["environment"])
    for there, here in places.items():
        text = text.replace(there, here)
    assert not any(f"@{server}:" in text for server in SERVERS), "it names a server's user that the file does not make"
    found: dict[str, str] = json.loads(text)
    return found


def test_the_services_of_the_compose_file_find_each_other_and_build(places: Mapping[str, str], tmp_path: Path) -> None:
    ours = {name: service for name, service in SERVICES.items() if name not in {*SERVERS, "web"}}
    processes = WorkerProcesses(tmp_path, {}, spawn=ForkedProcess)
    try:
        for name, service in ours.items():  # all at once: an engine waits for none of them
            assert service["command"][0] == "run"
            processes.start(name, *service["command"][1:], settings=environment(service, places))
        asyncio.run(processes.ready())
        assert SERVICES["web"]["command"] == ["serve", "web"]
        env = {**os.environ, **environment(SERVICES["web"], places)}
        with served(env, tmp_path) as found:
            for command in (["boot", "--flavor", "m1.small", "--count", str(COUNT), "--wait"], ["check"]):
                ran = run_berth(*command, "-o", "json", env={**env, **found}, timeout_s=TIMEOUT_S)
                assert ran.returncode == 0, ran.stdout + ran.stderr
                if command[0] == "boot":
                    assert [one["state"] for one in json.loads(ran.stdout)["items"]] == ["active"] * COUNT
        assert list(tmp_path.glob("*.machines")), "the machines are not in the volume"
    finally:
        processes.stop()


# --- A compute service as docs/operate/deploy.md and the units start it, without `compute.state_dir`.


COMPUTE = "compute-cell1-c1"
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def small() -> Iterator[Small]:
    """As by placement: the site has a state_dir, and nothing names one for the machines."""
    with lent_servers(PLAN.cells) as servers, tempfile.TemporaryDirectory(prefix="berth-book-") as name:
        settings = servers.settings(PLAN)
        settings = msgspec.structs.replace(
            settings,
            compute=ComputeSettings(
                simulated=SimulatedConfig(hosts=4), heartbeat_interval_s=0.5, report_interval_s=1.0
            ),
        )
        env = {**variables(settings), "BERTH_STATE_DIR": f"{name}/state"}
        web = WebProcess(env, Path(name))
        made = Small(servers, WorkerProcesses(Path(name), env, spawn=ForkedProcess), settings, web)
        try:
            start_all(made.processes, PLAN)
            made.ready()
            yield made
        finally:
            web.stop()
            made.processes.stop()


def berth(small: Small, *arguments: str) -> list[Any]:
    """Run a command that waits, and return what it printed of each instance."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    env = {**kept, **small.variables}
    done = run_berth(*arguments, "--wait", "-o", "json", env=env, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    found = msgspec.json.decode(done.stdout)
    items: list[Any] = found.get("items", [found])
    return items


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
def test_a_compute_service_that_is_restarted_has_its_machines(small: Small, end: str) -> None:
    (made,) = berth(small, "boot", "--flavor", "m1.small")
    instance = made["instance_uuid"]
    if end == "SIGKILL":
        small.processes.kill(COMPUTE)
    worker = small.processes.restart(COMPUTE)  # SIGTERM where it still runs
    small.ready(COMPUTE)
    for kind in ("stop", "start"):  # what a machine that is there can do
        assert [one["state"] for one in berth(small, "instance", kind, instance)] == ["done"]
    assert "compute.in_memory" not in worker.log.read_text()
    assert list((small.processes.directory / "state" / "machines").iterdir())
    berth(small, "delete", instance, "--yes")


def test_one_that_is_to_keep_nothing_warns(small: Small) -> None:
    arguments = ("compute", "--cell", "cell1", "--service", "cell1-fleeting")
    worker = small.processes.start("fleeting", *arguments, settings={"BERTH_COMPUTE__STATE_DIR": ""})
    asyncio.run(small.processes.ready(["fleeting"]))
    assert "compute.in_memory" in worker.log.read_text()


# --- A cell's workers have their cell's credentials and no others: its virtual host, its schema.


CELL = "west"
USER = "only-west"


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


async def test_conductor_and_compute_start_with_their_cells_bus_and_schema_alone(
    own_broker: RabbitMQ, postgres: Postgres, tmp_path: Path
) -> None:
    password = uuid.uuid4().hex
    await asyncio.to_thread(own_broker.add_vhost, CELL)
    await asyncio.to_thread(own_broker.add_user, USER, password, [CELL])
    admin = await asyncpg.connect(postgres.url())
    await admin.execute(f'CREATE ROLE "{USER}" LOGIN; CREATE SCHEMA "cell_{CELL}" AUTHORIZATION "{USER}"')
    await admin.close()
    settings = {
        f"BERTH_CELLS__{CELL.upper()}__URL": own_broker.url(CELL, user=USER, password=password),
        "BERTH_DATABASE__URL": postgres.url().replace("berth@", f"{USER}@"),
        "BERTH_STATE_DIR": str(tmp_path / "state"),
        "BERTH_COMPUTE__SIMULATED__HOSTS": "1",
    }
    processes = WorkerProcesses(tmp_path, settings, spawn=ForkedProcess)
    try:
        processes.start("conductor", "conductor", "--cell", CELL)
        processes.start("compute", "compute", "--cell", CELL)
        await processes.ready()
        assert all(worker.process.running for worker in processes.workers.values())
    finally:
        await asyncio.to_thread(processes.stop)


# --- A message that no scheduler could settle, among a hundred good requests, on a real broker.


BOOTS = 100
FOREIGN = ({"message_id": b"\xff" * 200}, {"type": b"\xff" * 255}, {"correlation_id": b"\xff" * 200})


async def test_two_schedulers_survive_a_message_whose_id_is_no_text_and_all_good_requests_end_once() -> None:
    """It ended every scheduler that took it: 21 deaths, and half of the good requests were given up unheard."""
    plan = SystemPlan(
        cells=("cell1",), placements=1, compute=ComputeSettings(simulated=SimulatedConfig(hosts=50)), durable=False
    )
    async with rig(plan) as whole:
        pids = {name: worker.process.pid for name, worker in whole.processes.workers.items()}
        async with raw_publisher(whole.servers.urls[API_VHOST]) as raw:
            for name in ("scheduler1", "scheduler2"):
                whole.processes.pause(name)  # so that good and bad wait side by side, and are prefetched together
            load = asyncio.create_task(whole.load(BOOTS))
            await until(lambda: len(whole.client.watches) >= BOOTS // 2)
            for properties in FOREIGN:
                await raw.publish(COMMANDS, "build.request.p", b"{not json", **properties)
            for name in ("scheduler1", "scheduler2"):
                whole.processes.resume(name)
            report = await load
        assert (report.active + report.failed, report.unfinished, report.refused) == (BOOTS, 0, 0)
        ends = [event.instance_uuid for event in whole.client.events if event.terminal]
        assert sorted(ends) == sorted(whole.client.watches), "exactly one terminal event each"
        bus = whole.site.bus("looks at letters")
        await bus.open()
        letters = await dead_letters.list_dead(bus.transport, "scheduler.requests")
        await bus.close()
        assert {letter.code for letter in letters} == {"message.malformed", "message.unknown_type"}
        assert {name: worker.process.pid for name, worker in whole.processes.workers.items()} == pids
        assert all(worker.process.running for worker in whole.processes.workers.values())
        await whole.assert_invariants()


# --- The writing ironic-sync process is paused: another one goes on, and the first writes nothing when it is
# resumed.


FIRST, SECOND = "sync1", "sync2"
# Nothing but ironic-sync runs, and the test takes what it reports.
SYNC_PLAN = SystemPlan(
    cells=("cell1",), schedulers=0, placements=0, conductors_per_cell=0, computes_per_cell=0, durable=False
)


@pytest.fixture
def servers() -> Iterator[RealServers]:
    with lent_servers(SYNC_PLAN.cells) as lent:
        yield lent


async def test_a_paused_writer_is_replaced_and_stands_by_when_it_is_resumed(servers: RealServers) -> None:
    """Its connection kept the lock: another process had not become the writer after 45 s."""
    url = servers.urls[API_VHOST]
    site = Site(lambda name: RabbitTransport(url, name=name), AmqpAnnouncer(url), "ironic", servers.database_url)
    ironic = IronicStandIn(site.announcer, clock=SystemClock(), rng=random.Random(1))
    node, other = (str(made["uuid"]) for made in (ironic.pool.add(**FREE), ironic.pool.add(**FREE)))
    settings = {"BERTH_IRONIC_SYNC__URL": await ironic.start()}
    try:
        async with (
            running_processes(servers, SYNC_PLAN, spawn=ForkedProcess) as (processes, _),
            placement_on(site) as placement,
        ):
            for name in (FIRST, SECOND):  # the first one is the writer by the time it is ready
                processes.start(name, "ironic-sync", settings=settings)
                await processes.ready([name])
            await placement.until(lambda: placement.offered() == {node, other})
            processes.pause(FIRST)
            began = time.monotonic()
            await ironic.pool.set_maintenance(ironic.pool.nodes[node], True, "fan", "req-1")
            await placement.until(lambda: placement.offered() == {other})
            sys.stdout.write(f"reported by the second after {time.monotonic() - began:.2f} s\n")
            processes.resume(FIRST)
            await ironic.pool.set_maintenance(ironic.pool.nodes[node], False, None, "req-2")
            await placement.until(lambda: placement.offered() == {node, other})

            async def stands_by() -> bool:
                return not writers(await processes.metrics(FIRST))

            await until(stands_by)
            assert writers(await processes.metrics(SECOND)) == 1.0
    finally:
        await ironic.stop()


FREE = {"provision_state": "available", "power_state": "power off", "resource_class": "baremetal-gold"}


def writers(metrics: str) -> float:
    """1.0: this process is the writer."""
    found = re.search(r"^berth_ironic_leader (\S+)$", metrics, re.MULTILINE)
    assert found is not None, metrics
    return float(found[1])
