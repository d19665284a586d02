"""Deployments, names and hostile messages beside each other, and a restart by the book."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from berth.trial.servers import API_VHOST, SystemPlan, start_all, variables
from berth.trial.worker_processes import Worker, WorkerProcesses
from bus.consuming import dead_letters
from bus.contracts.catalogue import COMMANDS
from bus.service.main import EXIT_SETTINGS
from compute_sim.config import ComputeConfig
from tests.contract.rig import until as message_until
from tests.kit import servers
from tests.kit.forks import ForkedProcess, run_berth
from tests.kit.lent import lent_servers
from tests.kit.raw_amqp import raw_publisher
from tests.system.small import PLAN, Small, small_processes
from tests.system.worker_processes import rig

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]


# --- a second deployment as a careless operator starts it: its own database, and the buses of the first


PATIENCE_S = 120.0
ROLES = {
    "scheduler": ("scheduler",),
    "placement": ("placement",),
    "conductor": ("conductor", "--cell", "cell1"),
}


@pytest.fixture(scope="module")
def small() -> Iterator[Small]:
    with small_processes() as made:
        yield made


def berth(small: Small, *arguments: str, database: str = "") -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    other = {"BERTH_DATABASE__URL": database} if database else {}
    return run_berth(*arguments, env={**kept, **variables(small.settings), **other}, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("role", ROLES)
def test_no_worker_of_it_starts_and_each_gives_its_reason(small: Small, role: str) -> None:
    with servers.fresh_database(small.settings.database.url) as other:
        ended = berth(small, "run", *ROLES[role], database=other)
    output = ended.stdout + ended.stderr
    assert ended.returncode == EXIT_SETTINGS, output
    assert "bus.owned_by_another" in output and "belongs to another deployment" in output, output
    assert "berth bus release" in output and "Traceback" not in output


def test_the_first_goes_on(small: Small) -> None:
    small.ready()
    built = berth(small, "boot", "--flavor", "m1.small", "--count", "3", "--wait")
    assert built.returncode == 0, built.stdout + built.stderr
    owner = berth(small, "bus", "owner")
    assert owner.returncode == 0, owner.stderr
    found = [line.split()[:2] for line in owner.stdout.splitlines()[1:]]
    roles = {(bus, role) for bus, role, *_ in found}
    assert roles >= {("api", "placement"), ("api", "scheduler"), ("cell1", "conductor"), ("cell1", "scheduler")}


def test_a_bus_is_taken_over_by_an_operators_word(small: Small) -> None:
    """The last of this module: the first deployment has gone."""
    small.processes.stop()
    assert berth(small, "bus", "release", "api").returncode == EXIT_SETTINGS  # not without --yes
    released = berth(small, "bus", "release", "api", "--yes")
    assert released.returncode == 0, released.stderr
    assert {"placement", "scheduler"} <= set(released.stdout.split())
    again = berth(small, "bus", "release", "api", "--yes")
    assert (again.returncode, "bus.unowned" in again.stderr) == (1, True)
    assert "bus.unknown" in berth(small, "bus", "owner", "--bus", "mars").stderr


# --- two real compute services of one name, as a careless `berth run compute` starts them: the second one must not run


FIRST = "compute-cell1-c1"
NAMES_PATIENCE_S = 60.0


def second(small: Small, name: str, *, wait_s: float) -> Worker:
    settings = {"BERTH_COMPUTE__NAME_WAIT_S": str(wait_s)}
    arguments = small.processes.workers[FIRST].arguments
    return small.processes.start(name, *arguments, settings=settings)


def until(condition: Callable[[], object], worker: Worker) -> None:
    """Another process's state: there is no event to wait for."""
    end = time.monotonic() + NAMES_PATIENCE_S
    while not condition():
        assert time.monotonic() < end, worker.process.tail()
        time.sleep(0.05)


def test_the_second_service_of_a_name_ends_with_a_sentence_and_the_first_goes_on(small: Small) -> None:
    late = second(small, "late", wait_s=1.0)
    until(lambda: not late.process.running, late)
    log = late.log.read_text()
    assert late.process.status == EXIT_SETTINGS, log
    assert "another process runs the compute service 'c1' of cell1" in log.replace("cell1-c1", "c1"), log
    assert "compute.name_taken" in log and "Traceback" not in log
    assert small.processes.workers[FIRST].process.running
    small.ready(FIRST)


def test_a_service_that_is_started_before_the_former_one_is_gone_takes_over(small: Small) -> None:
    """A supervisor starts the next one while the broker still has the connection of the one that died."""
    next_one = second(small, "next", wait_s=NAMES_PATIENCE_S)
    until(lambda: "compute.name_waits" in next_one.log.read_text(), next_one)
    small.processes.kill(FIRST)
    asyncio.run(small.processes.ready(["next"]))


# --- a message that no scheduler could settle, among a hundred good requests, on a real broker


BOOTS = 100
FOREIGN = ({"message_id": b"\xff" * 200}, {"type": b"\xff" * 255}, {"correlation_id": b"\xff" * 200})


async def test_two_schedulers_survive_a_message_whose_id_is_no_text_and_all_good_requests_end_once() -> None:
    """It ended every scheduler that took it: 21 deaths, and half of the good requests were given up unheard."""
    plan = SystemPlan(cells=("cell1",), placements=1, compute=ComputeConfig(hosts=50), durable=False)
    async with rig(plan) as whole:
        pids = {name: worker.process.pid for name, worker in whole.processes.workers.items()}
        async with raw_publisher(whole.servers.urls[API_VHOST]) as raw:
            for name in ("scheduler1", "scheduler2"):
                whole.processes.pause(name)  # so that good and bad wait side by side, and are prefetched together
            load = asyncio.create_task(whole.load(BOOTS))
            await message_until(lambda: len(whole.client.tracks) >= BOOTS // 2)
            for properties in (
                {"message_id": b"\xff" * 200},
                {"type": b"\xff" * 255},
                {"correlation_id": b"\xff" * 200},
            ):
                await raw.publish(COMMANDS, "build.request.17.p", b"{not json", **properties)
            for name in ("scheduler1", "scheduler2"):
                whole.processes.resume(name)
            report = await load
        assert (report.active + report.failed, report.unfinished, report.refused) == (BOOTS, 0, 0)
        ends = [event.instance_uuid for event in whole.client.events if event.terminal]
        assert sorted(ends) == sorted(whole.client.tracks), "exactly one terminal event each"
        bus = whole.site.bus("looks at letters")
        await bus.open()
        letters = await dead_letters.list_dead(bus.transport, "scheduler.requests")
        await bus.close()
        assert {letter.code for letter in letters} == {"message.malformed", "message.unknown_type"}
        assert {name: worker.process.pid for name, worker in whole.processes.workers.items()} == pids
        assert all(worker.process.running for worker in whole.processes.workers.values())
        await whole.assert_invariants()


# --- a compute service as docs/operate/deploy.md and the units start it, without `compute.state_dir`


COMPUTE = "compute-cell1-c1"
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def book_small() -> Iterator[Small]:
    """As by the book: the site has a state_dir, and nothing names one for the machines."""
    with lent_servers(PLAN.cells) as servers, tempfile.TemporaryDirectory(prefix="berth-book-") as name:
        settings = servers.settings(PLAN)
        settings = msgspec.structs.replace(
            settings, compute=ComputeConfig(hosts=4, heartbeat_interval_s=0.5, report_interval_s=1.0)
        )
        env = {**variables(settings), "BERTH_STATE_DIR": f"{name}/state"}
        made = Small(servers, WorkerProcesses(Path(name), env, spawn=ForkedProcess), settings)
        try:
            start_all(made.processes, PLAN)
            made.ready()
            yield made
        finally:
            made.processes.stop()


def book_berth(book_small: Small, *arguments: str) -> Any:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    env = {**kept, **variables(book_small.settings)}
    done = run_berth(*arguments, "--wait", "--json", env=env, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return msgspec.json.decode(done.stdout)


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
def test_a_compute_service_that_is_restarted_has_its_machines(book_small: Small, end: str) -> None:
    (made,) = book_berth(book_small, "boot", "--flavor", "m1.small")
    instance = made["instance_uuid"]
    if end == "SIGKILL":
        book_small.processes.kill(COMPUTE)
    worker = book_small.processes.restart(COMPUTE)  # SIGTERM where it still runs
    book_small.ready(COMPUTE)
    for kind in ("stop", "start"):  # what a machine that is there can do
        assert book_berth(book_small, kind, instance)["state"] == "done"
    assert "compute.in_memory" not in worker.log.read_text()
    assert list((book_small.processes.directory / "state" / "machines").iterdir())
    book_berth(book_small, "delete", instance)


def test_one_that_is_to_keep_nothing_warns(book_small: Small) -> None:
    arguments = ("compute", "--cell", "cell1", "--service", "cell1-fleeting")
    worker = book_small.processes.start("fleeting", *arguments, settings={"BERTH_COMPUTE__STATE_DIR": ""})
    asyncio.run(book_small.processes.ready(["fleeting"]))
    assert "compute.in_memory" in worker.log.read_text()
