"""`deploy/compose.yaml` without an engine: its services' own commands and settings, as processes on real servers.

The parts that an engine adds (the image, a network with names, volumes) are left out: the servers' addresses and the
directory of a volume take the places of theirs.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy.engine import make_url

from berth.trial.worker_processes import WorkerProcesses
from tests.kit.forks import ForkedProcess
from tests.kit.lent import lent_servers

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres]

FILE = Path(__file__).parents[2] / "deploy" / "compose.yaml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
SERVERS = {"rabbitmq", "postgres"}
COUNT = 5
TIMEOUT_S = 120


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
    ours = {name: service for name, service in SERVICES.items() if name not in SERVERS}
    processes = WorkerProcesses(tmp_path, {}, spawn=ForkedProcess)
    try:
        for name, service in ours.items():  # all at once: an engine waits for none of them
            assert service["command"][0] == "run"
            processes.start(name, *service["command"][1:], settings=environment(service, places))
        asyncio.run(processes.ready())
        env = {**os.environ, **environment(ours["scheduler"], places)}
        for command in (["boot", "--flavor", "m1.small", "--count", str(COUNT), "--wait"], ["check"]):
            ran = subprocess.run(
                [sys.executable, "-m", "berth", *command, "--json"],
                env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
            )  # fmt: skip
            assert ran.returncode == 0, ran.stdout + ran.stderr
            if command[0] == "boot":
                assert [one["state"] for one in json.loads(ran.stdout)] == ["active"] * COUNT
        assert list(tmp_path.glob("*.machines")), "the machines are not in the volume"
    finally:
        processes.stop()
