"""The driver of docs/start/first-driver.md, read out of the page: builds are processes that can be seen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec import Struct

import compute_agent.app
from berth.bus_client import BuildClient
from berth.bus_client.actions import ActionClient
from berth.config.settings import CellSettings, ComputeSettings, DatabaseSettings, Settings, UpSettings
from berth.up.in_one_process import LocalSystem, site
from bus.clock import new_uuid
from bus.contracts.actions import ActionKind, ActionRequest
from bus.contracts.build import BuildQuery, BuildRequest
from compute_agent.driver import Driver, NotOwned
from compute_agent.driver_plugin import DriverParts

PAGE = (Path(__file__).parents[2] / "docs" / "start" / "first-driver.md").read_text()
WAIT_S = 60.0
CELL = "cell1"
RNG = random.Random()


class Racks(Struct):
    """A system whose only hosts are the driver's."""

    client: BuildClient
    moves: ActionClient
    driver: Driver

    async def states(self) -> dict[str, bool]:
        """By instance, whether its process runs."""
        listed = await self.driver.list()
        return {machine.instance_uuid: machine.runs for machines in listed.values() for machine in machines}

    async def become(self, expected: dict[str, bool]) -> None:
        """Wait until the states are these: a process that is sent a signal stops a little later."""
        async with asyncio.timeout(WAIT_S):
            while True:
                if await self.states() == expected:
                    return
                await asyncio.sleep(0)

    async def move(self, uuid: str, kind: ActionKind) -> None:
        request = ActionRequest(request_id=new_uuid(RNG), instance_uuid=uuid, project_id="p", kind=kind)
        await self.moves.ask(request)
        assert await self.moves.wait(WAIT_S)


def driver_of(hosts: list[str]) -> Driver:
    found = re.search(r"^ *```python\n(.*?)^ *```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    module: dict[str, Any] = {"__name__": "process_driver"}
    exec(textwrap.dedent(found.group(1)), module)
    driver: Driver = module["ProcessDriver"](hosts)
    return driver


@pytest_asyncio.fixture
async def racks(empty_database: str, tmp_path: Path) -> AsyncIterator[Racks]:
    settings = Settings(
        cells={CELL: CellSettings()},
        database=DatabaseSettings(url=empty_database),
        up=UpSettings(nodes=0, computes_per_cell=0, schedulers=1, rest=False, web=False),
    )
    names = [f"rack-{new_uuid(RNG)}" for _ in range(2)]  # no other test's, and no other run's
    driver = driver_of(names)
    async with site(settings, directory=None) as place:
        system = LocalSystem(place)
        await system.start()
        config = ComputeSettings(state_dir=str(tmp_path))
        built = compute_agent.app.build(
            place.environment("racks"), config, CELL, "racks", driver=DriverParts(driver=driver)
        )
        await system.in_process.start(("racks", built))
        client = BuildClient(place.bus("client"), clock=place.clock, process="client")
        actions = ActionClient(client.bus, clock=place.clock, process="moves")
        await client.open()
        await actions.open()
        try:
            yield Racks(client, actions, driver)
        finally:
            await actions.close()
            await client.close()
            await system.in_process.stop()
            for pid, _ in driver._marked():  # type: ignore[attr-defined]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


async def test_a_build_is_a_process_until_it_is_deleted(racks: Racks) -> None:
    uuids = [new_uuid(RNG) for _ in range(3)]
    await racks.client.boot([BuildRequest(instance_uuid=one, flavor="m1.small", project_id="p") for one in uuids])
    assert await racks.client.wait(WAIT_S)
    assert await racks.states() == dict.fromkeys(uuids, True)
    await racks.move(uuids[0], ActionKind.STOP)
    await racks.become({uuids[0]: False, uuids[1]: True, uuids[2]: True})
    await racks.move(uuids[0], ActionKind.START)
    await racks.become(dict.fromkeys(uuids, True))
    page = await racks.client.query(BuildQuery(instance_uuid=uuids[1]), timeout_s=WAIT_S)
    await racks.client.delete(page.builds)
    assert await racks.client.wait(WAIT_S)
    assert await racks.states() == {uuids[0]: True, uuids[2]: True}


async def test_a_process_of_another_deployment_is_left_alone(racks: Racks) -> None:
    uuid = new_uuid(RNG)
    await racks.client.boot([BuildRequest(instance_uuid=uuid, flavor="m1.small", project_id="p")])
    assert await racks.client.wait(WAIT_S)
    (host,) = [one for one, machines in (await racks.driver.list()).items() if machines]
    with pytest.raises(NotOwned):
        await racks.driver.destroy(host, uuid, 99, "another")
    assert await racks.states() == {uuid: True}
