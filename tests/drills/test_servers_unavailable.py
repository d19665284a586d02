"""No broker or database: at start the workers wait and report it; in the middle they resume, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys

import pytest

from berth.audit.gather import gather, rest
from berth.audit.invariants import check_invariants
from berth.load import LoadPlan, LoadReport, run_load
from berth.site import process_name
from berth.trial.servers import hosts_known, start_all, variables
from lab.feed_watch import RecordingClient
from tests.kit.cases import case
from tests.kit.waiting import wait_until
from tests.system.small import PLAN, Small, small_processes

PATIENCE_S = 60.0
BOOTS = 150

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]


def test_workers_wait_for_their_servers_and_outlive_a_restart_of_the_database() -> None:
    with small_processes(start=False) as small:
        small.servers.broker.shut_down()
        small.servers.postgres.shut_down()
        start_all(small.processes, PLAN)
        logs(small, "placement1", "database.waiting")
        logs(small, "scheduler1", "database.waiting", "bus.unavailable")
        logs(small, "conductor-cell1-1", "database.waiting", "bus.unavailable")
        logs(small, "compute-cell1-c1", "bus.unavailable")
        started = small.pids()
        small.servers.postgres.start()
        logs(small, "placement1", "bus.unavailable")
        small.servers.broker.start()
        small.ready()
        assert small.pids() == started, "they waited, and did not die"

        asyncio.run(load_while_the_database_restarts(small))
        assert small.pids() == started

        small.servers.postgres.kill()
        done = berth_list(small)
        small.servers.postgres.start()
        assert (done.returncode, "database.unavailable" in done.stderr) == (3, True), done.stderr


def berth_list(small: Small) -> subprocess.CompletedProcess[str]:
    """It asked "is a scheduler running?", with the status of time that ran out."""
    settings = small.site.settings
    return subprocess.run(
        [sys.executable, "-m", "berth", "list"],
        env={**os.environ, **variables(settings), "BERTH_BUS__URL": settings.bus.url},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


async def load_while_the_database_restarts(small: Small) -> None:
    process = process_name("test")
    site = small.site
    client = RecordingClient(site.bus(process), clock=site.clock, process=process)
    await client.open()
    try:
        await hosts_known(client, PLAN)
        plan = LoadPlan(boots=BOOTS, mix={"m1.tiny": 1.0}, rate_per_s=100.0, timeout_s=PATIENCE_S)
        loading = asyncio.create_task(run_load(client, plan, clock=site.clock, rng=random.Random(5)))
        assert await client.until(lambda: 0 < client.unfinished < len(client.tracks), PATIENCE_S)
        await asyncio.to_thread(small.servers.postgres.kill)
        await asyncio.to_thread(small.servers.postgres.start)
        report: LoadReport = await loading
        assert (report.active, report.unfinished, report.more_than_one_terminal) == (BOOTS, 0, 0), report
        assert await rest(site, timeout_s=PATIENCE_S)
        verdicts = check_invariants(await gather(site, accepted=list(client.tracks), events=client.events))
        assert [verdict for verdict in verdicts if not verdict.holds] == []
    finally:
        await client.close()


def logs(small: Small, name: str, *events: str) -> None:
    """Wait until a worker's log holds one of these events, and the worker lives."""
    worker = small.processes.workers[name]
    with case(name, events):
        wait_until(lambda: any(f'"event":"{event}"' in worker.log.read_text() for event in events))
    assert worker.process.running, worker.process.tail()
