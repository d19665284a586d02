"""A compute service as docs/operate/deploy.md and the units start it, without `compute.state_dir`."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from berth.trial.servers import start_all, variables
from berth.trial.worker_processes import WorkerProcesses
from compute_sim.config import ComputeConfig
from tests.kit.forks import ForkedProcess, run_berth
from tests.kit.lent import lent_servers
from tests.system.small import PLAN, Small

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]

COMPUTE = "compute-cell1-c1"
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def small() -> Iterator[Small]:
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


def berth(small: Small, *arguments: str) -> Any:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    env = {**kept, **variables(small.settings)}
    done = run_berth(*arguments, "--wait", "--json", env=env, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return msgspec.json.decode(done.stdout)


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
def test_a_compute_service_that_is_restarted_has_its_machines(small: Small, end: str) -> None:
    (made,) = berth(small, "boot", "--flavor", "m1.small")
    instance = made["instance_uuid"]
    if end == "SIGKILL":
        small.processes.kill(COMPUTE)
    worker = small.processes.restart(COMPUTE)  # SIGTERM where it still runs
    small.ready(COMPUTE)
    for kind in ("stop", "start"):  # what a machine that is there can do
        assert berth(small, kind, instance)["state"] == "done"
    assert "compute.in_memory" not in worker.log.read_text()
    assert list((small.processes.directory / "state" / "machines").iterdir())
    berth(small, "delete", instance)


def test_one_that_is_to_keep_nothing_warns(small: Small) -> None:
    arguments = ("compute", "--cell", "cell1", "--service", "cell1-fleeting")
    worker = small.processes.start("fleeting", *arguments, settings={"BERTH_COMPUTE__STATE_DIR": ""})
    asyncio.run(small.processes.ready(["fleeting"]))
    assert "compute.in_memory" in worker.log.read_text()
