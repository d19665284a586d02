"""Builds of bare metal while Ironic, its conductor or Keystone is away or busy, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from bus.contracts.cell import ComputeOutcome, Running
from bus.contracts.deploy import NetworkRequest
from bus.openstack.login import KeystoneLogin
from compute_agent.driver import Build, DriverUnavailable, Reschedule
from compute_agent.drivers.ironic.deployment import LOCK_TRIES
from tests.integration.compute_agent.harness import Cell, Driver, Metal, Skipping, Way, build, fault, refusing
from tests.kit.waiting import until


async def spawned(metal: Metal, **how: Any) -> str:
    """The warning of a build on the first node."""
    return await (await metal.driver(**how)).spawn(build(metal.first))


# --- away


async def test_a_build_waits_for_an_ironic_that_restarts_and_its_result_names_the_outage(
    cell: Cell, metal: Metal
) -> None:
    """Its attempt failed at once, and its alternates', which are nodes of the same Ironic, with it."""
    way = Way()
    driver = metal.made(way=way)
    await metal.serve(cell, driver=driver)
    instance = cell.instance()
    await metal.stand_in.stop()
    seen = way.unanswered
    await cell.spawn(metal.first, instance)
    await until(lambda: way.unanswered >= seen + 5)
    assert not cell.results(instance)
    (waits,) = driver.waiting()
    assert (waits.instance_uuid, waits.attempt) == (instance, 1) and "ConnectError" in waits.reason
    await metal.stand_in.start()
    result = await cell.outcome(instance, 1)
    assert driver.waiting() == [] and len(cell.results(instance)) == 1
    assert result.outcome is ComputeOutcome.ACTIVE, result
    assert result.reason.startswith("waited ") and "ConnectError" in result.reason, result


class Late(Driver):
    """A driver that returns from its builds only when it is let."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.let = asyncio.Event()

    async def spawn(self, wanted: Build) -> str:
        await super().spawn(wanted)
        await self.let.wait()
        return "waited for the test"


async def test_a_report_does_not_end_a_build_before_its_driver_has(cell: Cell, metal: Metal) -> None:
    """A report that named the machine as complete overtook the result, and the driver's warning was lost."""
    driver = metal.made(Late)
    await metal.serve(cell, driver=driver)
    node, instance = metal.first, cell.instance()
    await cell.spawn(node, instance)

    async def reported() -> bool:
        """As the next page that shows the machine on a deployed node has it."""
        first = len(cell.announced())
        await cell.ask()

        def shown() -> list[Running]:
            hosts = [host for page in cell.announced()[first:] for host in page.hosts if host.uuid == node]
            return [machine for host in hosts for machine in host.running or ()]

        return (await until(shown))[0].built

    await metal.in_state("active")
    assert await reported() is False
    driver.let.set()
    assert (await cell.outcome(instance, 1)).reason == "waited for the test"
    assert await reported() is True


async def test_an_ironic_that_stays_down_ends_the_attempt_after_a_time_with_its_fault(metal: Metal) -> None:
    way = Way()
    await metal.stand_in.stop()
    with pytest.raises(DriverUnavailable, match=r"ConnectError; waited .* s for Ironic"):
        await spawned(metal, way=way, clock=Skipping(1_000.0), outage_timeout_s=1_000.0)
    assert way.unanswered > 2
    await metal.stand_in.start()


async def test_a_second_port_is_waited_for_as_long_as_the_first(metal: Metal) -> None:
    """The second fault was added to the time of the first, which had ended: the build was given up at once."""
    ports = {f"00000000-0000-4000-8000-00000000000{number}": number for number in (1, 2)}
    clock, faults = Skipping(0.0), {1: 2, 2: 2}

    def plan(request: httpx.Request) -> httpx.Response | None:
        if request.method != "POST" or not request.url.path.endswith("/vifs"):
            return None
        port = ports[json.loads(request.content)["id"]]
        if not faults[port]:
            return None
        faults[port] -= 1
        clock.skip(60.0)
        return httpx.Response(500, json={"error_message": {"faultstring": "no such port"}})

    owned = dict.fromkeys(ports, "acme")
    driver = await metal.driver(way=Way(plan), clock=clock, outage_timeout_s=100.0, network="static", ports=owned)
    networks = tuple(NetworkRequest(port=port) for port in ports)
    await driver.spawn(build(metal.first, networks=networks))
    assert metal.pool.vifs[metal.first] == list(ports)


@pytest.mark.parametrize("method", ["GET", "PATCH", "PUT"])
async def test_a_conductor_of_ironic_that_restarts_is_waited_for(metal: Metal, method: str) -> None:
    """The API goes on meanwhile: its nodes name no conductor, and it answers 400 to every change."""
    looks = 0

    def plan(request: httpx.Request) -> httpx.Response | None:
        nonlocal looks
        if request.method == method and not looks:
            metal.node["conductor"] = None
        if metal.node.get("conductor", "c1") is None:
            looks += 1
            if looks > 6:
                metal.node["conductor"] = "c1"
            elif request.method != "GET":
                return httpx.Response(400, json={"error_message": {"faultstring": "No valid host was found."}})
        return None

    warning = await spawned(metal, way=Way(plan))
    assert metal.node["provision_state"] == "active" and "no conductor" in warning


async def test_what_ironic_refuses_while_its_conductor_is_there_is_the_nodes_fault(metal: Metal) -> None:
    metal.node["conductor"] = "c1"
    assert await fault(spawned(metal, way=refusing("PATCH", 99, 400))) == (Reschedule, "node.refused")


async def test_a_keystone_that_is_down_is_waited_for_like_ironic(metal: Metal) -> None:
    login = KeystoneLogin(auth_url="http://127.0.0.1:1", username="berth", password="right")
    with pytest.raises(DriverUnavailable, match=r"Keystone at .*; waited"):
        await spawned(metal, keystone=login, outage_timeout_s=0.1)


async def test_a_look_that_ironic_did_not_answer_is_repeated_soon_however_long_it_took(metal: Metal) -> None:
    """It paused for twenty times as long as the look had taken: after a hang of 10 s, for 200 s."""
    clock, hung = Skipping(1.0), 3

    def plan(_: httpx.Request) -> None:
        nonlocal hung
        if hung:
            hung -= 1
            clock.skip(10.0)
            raise httpx.ReadTimeout("hung")

    driver = await metal.driver(clock=clock, way=Way(plan), watch_interval_s=2.0)
    found: list[list[float]] = []
    driver.on_change(lambda _: found.append(list(clock.slept)))
    async with metal.watching(driver):
        await until(lambda: found)
    assert found[0] == [1.0, 1.0, 1.0]


# --- busy


async def test_an_ironic_that_loses_an_answer_costs_no_attempt(metal: Metal) -> None:
    lost = 1

    def lose(request: httpx.Request) -> None:
        nonlocal lost
        if request.method == "PATCH" and lost:
            lost -= 1
            raise httpx.ReadTimeout("lost")

    await spawned(metal, way=Way(after=lose))
    assert metal.node["provision_state"] == "active" and not lost


@pytest.mark.parametrize(("method", "status"), [("GET", 503), ("PATCH", 409), ("PUT", 503), ("PUT", 409)])
async def test_a_busy_ironic_is_polled_less_and_less_often(metal: Metal, method: str, status: int) -> None:
    """It was asked every half a second by each of five hundred builds, and a build's first refusal ended it."""
    clock = Skipping()
    await spawned(metal, clock=clock, way=refusing(method, 8, status), poll_interval_s=0.5, max_poll_interval_s=10.0)
    assert metal.node["provision_state"] == "active"
    first = clock.slept.index(next(one for one in clock.slept if one != 0.5))
    for number, pause in enumerate(clock.slept[first : first + 8], start=1):
        longest = min(10.0, 0.5 * 2**number)
        assert longest / 2 <= pause <= longest, clock.slept
    assert set(clock.slept[first + 8 :]) == {0.5}, "as soon as it answers, it is asked as before"


async def test_an_ironic_that_names_a_time_is_not_polled_before(metal: Metal) -> None:
    clock = Skipping()
    await spawned(metal, clock=clock, way=refusing("PUT", 1, 503, **{"Retry-After": "7"}), max_poll_interval_s=10.0)
    assert max(clock.slept) == 7.0


async def test_a_build_that_ironic_has_no_time_for_ends_before_it_has_taken_a_node(metal: Metal) -> None:
    with pytest.raises(DriverUnavailable, match="503"):
        await spawned(metal, way=refusing("GET", 1_000_000, 503), lock_timeout_s=0.05)
    assert not metal.requested


@pytest.mark.parametrize(("conflicts", "ends"), [(LOCK_TRIES - 1, False), (LOCK_TRIES + 1, True)])
async def test_a_node_counts_as_locked_after_so_many_refusals_however_long_each_takes(
    metal: Metal, conflicts: int, ends: bool
) -> None:
    """Two of 500 builds at once had failed: under load two short locks, 30 s apart, counted as one that lasted."""
    spawning = spawned(metal, clock=Skipping(10_000), way=refusing("PATCH", conflicts, 409), deploy_timeout_s=80_000)
    if ends:
        assert await fault(spawning) == (Reschedule, "node.locked")
    else:
        await spawning


async def test_requests_under_way_are_bounded(metal: Metal) -> None:
    way = Way()
    driver = await metal.driver(way=way, requests_in_flight=4)
    await asyncio.gather(*(driver.hosts() for _ in range(30)))
    assert way.most == 4
