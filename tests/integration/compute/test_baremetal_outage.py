"""Builds of bare metal while Ironic's API, its conductor or Keystone is away: real HTTP servers that go and return."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from berth.trial.embedded.process import free_port
from berth.trial.ironic_stand_in import Behaviour, IronicStandIn, Silent
from berth.trial.worker_processes import NO_TLS
from bus.clock import SystemClock
from bus.contracts.cell import ComputeOutcome, Running
from bus.openstack.login import KeystoneLogin
from compute_sim.config import ComputeConfig, IronicConfig
from compute_sim.driver import Build, DriverUnavailable, Reschedule
from compute_sim.drivers.ironic.deployment import LOCK_TRIES
from compute_sim.drivers.ironic.driver import BareMetal
from compute_sim.fleet import Fleet
from tests.integration.compute.harness import CELL, PATIENCE_S, Cell
from tests.integration.compute.test_baremetal_deploy import build

QUICK = Behaviour(verify_s=0.001, deploy_s=0.01, undeploy_s=0.005, clean_s=0.005)


class Counting(httpx.AsyncBaseTransport):
    """A way to Ironic that counts the requests that found no server, and answers as planned.

    plan: called with each request; an answer of its own is taken instead of Ironic's.
    """

    def __init__(self, plan: Callable[[httpx.Request], httpx.Response | None] = lambda _: None) -> None:
        self._inner = httpx.AsyncHTTPTransport(verify=NO_TLS)
        self._plan = plan
        self.unanswered = 0
        self.changed = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        planned = self._plan(request)
        if planned is not None:
            return planned
        try:
            return await self._inner.handle_async_request(request)
        except httpx.TransportError:
            self.unanswered += 1
            self.changed.set()
            raise

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def until_unanswered(self, more: int) -> None:
        wanted = self.unanswered + more
        async with asyncio.timeout(PATIENCE_S):
            while self.unanswered < wanted:
                self.changed.clear()
                await self.changed.wait()


class Skipping(SystemClock):
    """Each sleep takes so much longer than it should, by its own reckoning, and no time by anyone else's."""

    def __init__(self, factor: float) -> None:
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


@pytest_asyncio.fixture
async def ironic() -> AsyncIterator[IronicStandIn]:
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=QUICK, port=free_port())
    await stand_in.start()
    stand_in.pool.plan(3)
    yield stand_in
    await stand_in.stop()


def config(ironic: IronicStandIn, **more: Any) -> IronicConfig:
    return IronicConfig(url=ironic.url, poll_interval_s=0.005, max_poll_interval_s=0.05, **more)


async def spawned(settings: IronicConfig, node: str, way: Counting, clock: SystemClock | None = None) -> str:
    driver = BareMetal(settings, cell=CELL, service="c1-a", clock=clock or SystemClock(), transport=way)
    await driver.open()
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await driver.spawn(build(node))
    finally:
        await driver.close()


async def test_a_build_waits_for_an_ironic_that_restarts_and_its_result_names_the_outage(
    cell: Cell, ironic: IronicStandIn
) -> None:
    """Its attempt failed at once, and its alternates', which are nodes of the same Ironic, with it."""
    settings = ComputeConfig(driver="ironic", hosts=0, ironic=config(ironic))
    way = Counting()
    driver = BareMetal(settings.ironic, cell=CELL, service="c1-a", clock=SystemClock(), transport=way)
    life = await cell.compute(settings, Fleet.planned(settings, CELL, "c1-a"), driver=driver)
    node, instance = next(iter(ironic.pool.nodes)), cell.instance()
    await ironic.stop()
    await cell.spawn(node, instance)
    await way.until_unanswered(5)
    assert not cell.results(instance)
    (waits,) = driver.waiting()
    assert (waits.instance_uuid, waits.attempt) == (instance, 1) and "ConnectError" in waits.reason
    await ironic.start()
    result = await cell.outcome(instance, 1)
    assert driver.waiting() == []
    assert result.outcome is ComputeOutcome.ACTIVE, result
    assert result.reason.startswith("waited ") and "ConnectError" in result.reason, result
    assert len(cell.results(instance)) == 1
    await life.stop()


class Late(BareMetal):
    """A driver that returns from its builds only when it is let."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.let = asyncio.Event()

    async def spawn(self, wanted: Build) -> str:
        await super().spawn(wanted)
        await self.let.wait()
        return "waited for the test"


async def test_a_report_does_not_end_a_build_before_its_driver_has(cell: Cell, ironic: IronicStandIn) -> None:
    """A report that named the machine as complete overtook the result, and the driver's remark was lost."""
    settings = ComputeConfig(driver="ironic", hosts=0, ironic=config(ironic))
    driver = Late(settings.ironic, cell=CELL, service="c1-a", clock=SystemClock())
    life = await cell.compute(settings, Fleet.planned(settings, CELL, "c1-a"), driver=driver)
    node, instance = next(iter(ironic.pool.nodes)), cell.instance()
    await cell.spawn(node, instance)

    async def reported() -> bool:
        """As the next page that shows the machine on a deployed node has it."""
        first = len(cell.announced())
        await cell.ask()

        def shown() -> list[Running]:
            hosts = [host for page in cell.announced()[first:] for host in page.hosts if host.uuid == node]
            return [machine for host in hosts for machine in host.running or ()]

        machine: Running = (await cell.until(shown))[0]
        return machine.built

    async with asyncio.timeout(PATIENCE_S):
        while ironic.pool.nodes[node]["provision_state"] != "active":  # noqa: ASYNC110  (what is asked is a server)
            await asyncio.sleep(0.005)
    assert await reported() is False
    driver.let.set()
    assert (await cell.outcome(instance, 1)).reason == "waited for the test"
    assert await reported() is True
    await life.stop()


async def test_an_ironic_that_stays_down_ends_the_attempt_after_a_time_with_its_fault(ironic: IronicStandIn) -> None:
    node, way = next(iter(ironic.pool.nodes)), Counting()
    await ironic.stop()
    with pytest.raises(DriverUnavailable, match=r"ConnectError; waited .* s for Ironic"):
        await spawned(config(ironic, outage_timeout_s=1_000.0), node, way, Skipping(1_000.0))
    assert way.unanswered > 2
    await ironic.start()


async def test_a_build_without_an_outage_has_no_remark(ironic: IronicStandIn) -> None:
    assert await spawned(config(ironic), next(iter(ironic.pool.nodes)), Counting()) == ""


@pytest.mark.parametrize("method", ["GET", "PATCH", "PUT"])
async def test_a_conductor_of_ironic_that_restarts_is_waited_for(ironic: IronicStandIn, method: str) -> None:
    """The API goes on meanwhile: its nodes name no conductor, and it answers 400 to every change."""
    node = next(iter(ironic.pool.nodes))
    looks = 0

    def plan(request: httpx.Request) -> httpx.Response | None:
        nonlocal looks
        kept = ironic.pool.nodes[node]
        if request.method == method and not looks:
            kept["conductor"] = None
        if kept.get("conductor", "c1") is None:
            looks += 1
            if looks > 6:
                kept["conductor"] = "c1"
            elif request.method != "GET":
                return httpx.Response(400, json={"error_message": {"faultstring": "No valid host was found."}})
        return None

    remark = await spawned(config(ironic), node, Counting(plan))
    assert ironic.pool.nodes[node]["provision_state"] == "active" and "no conductor" in remark


async def test_what_ironic_refuses_while_its_conductor_is_there_is_the_nodes_fault(ironic: IronicStandIn) -> None:
    node = next(iter(ironic.pool.nodes))
    ironic.pool.nodes[node]["conductor"] = "c1"
    way = Counting(lambda request: httpx.Response(400) if request.method == "PATCH" else None)
    with pytest.raises(Reschedule) as caught:
        await spawned(config(ironic), node, way)
    assert caught.value.code == "node.refused"


async def test_a_keystone_that_is_down_is_waited_for_like_ironic(ironic: IronicStandIn) -> None:
    login = KeystoneLogin(auth_url="http://127.0.0.1:1", username="berth", password="right")
    with pytest.raises(DriverUnavailable, match=r"Keystone at .*; waited"):
        await spawned(config(ironic, keystone=login, outage_timeout_s=0.1), next(iter(ironic.pool.nodes)), Counting())


@pytest.mark.parametrize(("conflicts", "ends"), [(LOCK_TRIES - 1, False), (LOCK_TRIES + 1, True)])
async def test_a_node_counts_as_locked_after_so_many_refusals_however_long_each_takes(
    ironic: IronicStandIn, conflicts: int, ends: bool
) -> None:
    """Two of 500 builds at once had failed: under load two short locks, 30 s apart, counted as one that lasted."""
    node, left = next(iter(ironic.pool.nodes)), conflicts

    def plan(request: httpx.Request) -> httpx.Response | None:
        nonlocal left
        if request.method != "PATCH" or not left:
            return None
        left -= 1
        return httpx.Response(409)

    try:
        await spawned(config(ironic, deploy_timeout_s=80_000), node, Counting(plan), Skipping(10_000))
    except Reschedule as fault:
        assert ends and fault.code == "node.locked", fault
    else:
        assert not ends


async def test_a_look_that_ironic_did_not_answer_is_repeated_soon_however_long_it_took(ironic: IronicStandIn) -> None:
    """It paused for twenty times as long as the look had taken: after a hang of 10 s, for 200 s."""
    clock, hung = Skipping(1.0), 3

    def plan(_: httpx.Request) -> httpx.Response | None:
        nonlocal hung
        if not hung:
            return None
        hung -= 1
        clock.skip(10.0)
        raise httpx.ReadTimeout("hung")

    settings = config(ironic, watch_interval_s=2.0)
    driver = BareMetal(settings, cell=CELL, service="c1-a", clock=clock, transport=Counting(plan))
    found: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
    driver.on_change(lambda _: None if found.done() else found.set_result(list(clock.slept)))
    await driver.open()
    watching = asyncio.create_task(driver.watch())
    async with asyncio.timeout(PATIENCE_S):
        slept = await found
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await driver.close()
    assert slept == [1.0, 1.0, 1.0]
