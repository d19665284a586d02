"""A project in a virtual host of its own behind a gateway: its client's code is that of the API bus."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import structs

from berth.project_vhost import host_definitions, virtual_host
from berth.trial.servers import API_VHOST, variables
from bus.contracts.queues import project_bus
from gateway.config import GatewayConfig
from tests.kit.lent import lent_servers
from tests.system.small import PLAN
from tests.system.test_permissions import MINE, PAGE, Guarded, run_example

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]


@contextmanager
def guarded_door() -> Iterator[Guarded]:
    """A system whose project MINE may also come in by a gateway, through a virtual host of the same broker."""
    with lent_servers(PLAN.cells) as servers, tempfile.TemporaryDirectory(prefix="berth-door-") as name:
        guarded = Guarded(servers, Path(name))
        door = GatewayConfig(projects=(MINE,), url=guarded.url("berth-gateway", ""))
        guarded.settings = structs.replace(guarded.settings, gateway=door)
        servers.broker.define(**host_definitions([virtual_host(MINE, guarded.settings)]))
        try:
            guarded.start()
            guarded.processes.start("gateway", "gateway", settings=variables(guarded.settings_of("berth-gateway")))
            asyncio.run(guarded.processes.ready(["gateway"]))
            yield guarded
        finally:
            guarded.processes.stop()


@pytest.fixture(scope="module")
def system() -> Iterator[Guarded]:
    with guarded_door() as guarded:
        yield guarded


@pytest.mark.parametrize("vhost", [API_VHOST, project_bus(MINE)])
def test_the_examples_work_unchanged_on_both_sides(system: Guarded, tmp_path: Path, vhost: str) -> None:
    build, move = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    instance, state, *_ = run_example(build, system, tmp_path, vhost).splitlines()[-1].split()
    assert state == "active"
    assert run_example(move, system, tmp_path, vhost, INSTANCE=instance).splitlines()[-1].split()[0] == "done"
