"""The files of `deploy/` for an operator of Prometheus and Grafana, on a real Prometheus that
scrapes a running berth.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from berth.trial.servers import SystemPlan
from berth.trial.worker_processes import NO_TLS, WorkerProcesses
from compute_sim.config import ComputeConfig
from compute_sim.domain.faults import Faults
from tests.system.worker_processes import rig

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "berth.rules.yml"
PATIENCE_S = 60.0
POLL_S = 0.2

# Nothing of these is there while all is well, or without bare metal.
QUIET = re.compile(r"berth_(bus_(stalls|invariants_broken)|ironic|conductor_(quarantined|breaker_trips))")


def dashboard_queries() -> Iterator[str]:
    """Every query of the dashboard, with Grafana's own variable filled in."""
    for panel in json.loads((DEPLOY / "grafana" / "berth.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "30s")


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool")
    assert found, "scripts/test installs the package prometheus"
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE_S)


def test_the_rules_are_well_formed_and_do_what_they_promise() -> None:
    checked = promtool("check", "rules", str(RULES))
    assert checked.returncode == 0, checked.stderr
    tested = promtool("test", "rules", str(RULES.with_suffix(".test.yml")))
    assert tested.returncode == 0, tested.stdout + tested.stderr
    alerts = set(re.findall(r"- alert: (\w+)", RULES.read_text()))
    fired = set(re.findall(r"- alertname: (\w+)", RULES.with_suffix(".test.yml").read_text()))
    assert alerts == fired, "each alert has a case in which it fires"


@asynccontextmanager
async def prometheus(directory: Path, processes: WorkerProcesses) -> AsyncIterator[httpx.AsyncClient]:
    """A private Prometheus that scrapes these workers every second and evaluates berth's rules."""
    targets = [f"127.0.0.1:{worker.port}" for worker in processes.workers.values()]
    config = directory / "prometheus.yml"
    config.write_text(
        json.dumps(  # JSON is YAML
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(RULES)],
                "scrape_configs": [{"job_name": "berth", "static_configs": [{"targets": targets}]}],
            }
        )
    )
    found = shutil.which("prometheus")
    assert found, "scripts/test installs the package prometheus"
    process = await asyncio.create_subprocess_exec(
        found,
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            address = await listening(process.stderr)
        reading = asyncio.create_task(process.stderr.read())  # a full pipe would stop it
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=PATIENCE_S, verify=NO_TLS) as client:
            async with asyncio.timeout(PATIENCE_S):
                # It listens a moment before it answers queries.
                while (await client.get("/-/ready")).status_code != httpx.codes.OK:  # noqa: ASYNC110  (as below)
                    await asyncio.sleep(POLL_S)
            yield client
        reading.cancel()
    finally:
        process.terminate()
        await process.wait()


async def listening(log: asyncio.StreamReader) -> str:
    """The address that Prometheus reports to listen on, once it does."""
    output = []
    async for line in log:
        output.append(line.decode())
        if found := re.search(r'msg="Listening on" address=(\S+)', output[-1]):
            return found[1]
    raise AssertionError("".join(output))


async def ask(client: httpx.AsyncClient, query: str) -> list[dict[str, object]]:
    answer = await client.get("/api/v1/query", params={"query": query})
    assert answer.status_code == 200, (query, answer.text)
    result: list[dict[str, object]] = answer.json()["data"]["result"]
    return result


async def until_it_has(client: httpx.AsyncClient, query: str) -> list[dict[str, object]]:
    async with asyncio.timeout(PATIENCE_S):
        while not (found := await ask(client, query)):  # noqa: ASYNC110  (another process has nothing to await)
            await asyncio.sleep(POLL_S)
    return found


@pytest.mark.system
@pytest.mark.rabbitmq
@pytest.mark.postgres
async def test_every_query_of_the_dashboard_finds_its_metrics_on_a_running_system(tmp_path: Path) -> None:
    faults = Faults(fail_rate=0.3)
    plan = SystemPlan(cells=("cell1", "cell2"), compute=ComputeConfig(hosts=5, faults=faults), durable=False)
    async with rig(plan) as whole, prometheus(tmp_path, whole.processes) as client:
        workers = len(whole.processes.workers)
        await until_it_has(client, f'count(up{{job="berth"}} == 1) == {workers}')
        report = await whole.load(100, mix={"m1.tiny": 1.0})
        assert report.active > 0
        # A counter that appears with its first value has no rate before it moves again.
        await until_it_has(client, f"max(berth_fleet_used) >= {report.active}")
        await whole.load(20, mix={"m1.tiny": 1.0})

        for query in dashboard_queries():
            if QUIET.search(query):
                await ask(client, query)  # well-formed, and nothing to find
            else:
                assert await until_it_has(client, query), query

        def value(found: list[dict[str, object]]) -> float:
            ((_, number),) = [one["value"] for one in found]  # type: ignore[misc]
            return float(number)

        assert value(await until_it_has(client, 'sum(berth:fleet_hosts:max{state="up"})')) == 10
        ended = 'sum(max_over_time(berth_scheduler_builds_total{state="active"}[10m]))'
        assert value(await until_it_has(client, f"{ended} >= {report.active}")) >= report.active
        alerts = (await client.get("/api/v1/rules", params={"type": "alert"})).json()["data"]["groups"]
        assert {rule["health"] for group in alerts for rule in group["rules"]} == {"ok"}
