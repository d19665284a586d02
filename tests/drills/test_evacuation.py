"""A host is killed and fenced, by a person or by `Fencer`: its instances are active elsewhere, once; it returns. One of
two compute services is killed for good under load: the other builds on, and `berth check` reports it.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import pytest

from berth.bus_client import BuildClient
from berth.config.settings import ComputeSettings, FencingSettings
from berth.fencing.fencer import Fencer
from berth.fencing.plugin import load
from berth.up.servers import SystemPlan, variables
from bus.clock import SystemClock, new_uuid
from bus.contracts.actions import ActionKind, ActionPage, ActionQuery, ActionState
from bus.contracts.build import BuildRequest, HostRecord
from bus.contracts.operations import AdminState, EvacuationPolicy, SetAdminState
from compute_agent.drivers.ironic.config import IronicConfig
from compute_sim.config import HostSize, SimulatedConfig
from compute_sim.faults import Faults
from compute_sim.ironic_stand_in import Behaviour, IronicStandIn, Silent
from tests.kit.forks import run_berth
from tests.kit.waiting import until
from tests.system.worker_processes import Rig, rig

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]


HOSTS, INSTANCES = 4, 40
PATIENCE_S = 240.0
CELL = "cell1"
SERVICE = "cell1-alone"  # the compute service that has the one host
WORKER = f"compute-{SERVICE}"
# All hosts but one at one service; two schedulers, so that either may evacuate.
PLAN = SystemPlan(
    cells=(CELL,),
    schedulers=2,
    placements=1,
    compute=ComputeSettings(
        simulated=SimulatedConfig(
            hosts=HOSTS - 1, sizes=(HostSize(vcpus=64, memory_mb=262_144, disk_gb=4_000),), gpu_share=0.0
        )
    ),
    durable=False,
)
# An invariant that a service which is known to be dead breaks; it holds again when it is back.
OF_THE_DEAD = "services_there"


async def test_the_instances_of_a_dead_host_are_active_elsewhere_once_it_is_fenced() -> None:
    async with rig(PLAN) as whole:

        async def fence(host: HostRecord) -> None:
            await decide(whole.client, host, AdminState.FENCED)

        await drill(whole, fence)


async def test_a_silent_host_is_switched_off_and_fenced_without_a_person() -> None:
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=Behaviour(power_s=0.1))
    settings = FencingSettings(
        plugin="ironic", after_s=5.0, ironic=IronicConfig(url=await stand_in.start(), poll_interval_s=0.05)
    )
    plugin = load(settings, clock=SystemClock())
    node = stand_in.pool.add(power_state="power on")
    try:
        async with rig(PLAN) as whole:
            fencer = Fencer(whole.client, plugin, settings, clock=SystemClock())

            async def fence(host: HostRecord) -> None:
                node["properties"] = {"berth_host": f"{host.cell}/{host.uuid}"}
                running = asyncio.create_task(fencer.run())
                try:
                    fenced = await until(lambda: in_state(whole.client, host, AdminState.FENCED), PATIENCE_S)
                finally:
                    running.cancel()
                assert fenced.admin.by == "fencer" and "power off" in fenced.admin.reason
                assert node["power_state"] == "power off"

            await drill(whole, fence)
    finally:
        await plugin.close()
        await stand_in.stop()


async def drill(whole: Rig, fence: Callable[[HostRecord], Awaitable[None]]) -> None:
    """Kill one host's service, have it fenced, wait for its instances elsewhere, and take the host back."""
    client, processes = whole.client, whole.processes
    processes.start(
        WORKER, "compute", "--cell", CELL, "--service", SERVICE, settings={"BERTH_COMPUTE__SIMULATED__HOSTS": "1"}
    )
    await processes.ready([WORKER])
    (host,) = await until(lambda: hosts_of_the_service(client), PATIENCE_S)
    await boot(whole)
    mine = {one.instance_uuid for one in client.watches.values() if one.last is not None and one.last.host == host.name}
    assert mine

    await asyncio.to_thread(processes.kill, WORKER)
    await fence(host)

    async def evacuated() -> bool:
        page = await client.bus.request(ActionQuery(limit=1000), ActionPage, timeout_s=PATIENCE_S)
        actions = [action for action in page.actions if action.kind is ActionKind.EVACUATE]
        assert not [action for action in actions if action.terminal and action.state is not ActionState.DONE]
        return mine <= {action.instance_uuid for action in actions if action.terminal}

    await until(evacuated, PATIENCE_S)
    assert [one for one in await whole.verdicts() if not one.holds and one.name != OF_THE_DEAD] == []

    await asyncio.to_thread(processes.restart, WORKER)
    await processes.ready([WORKER])
    await decide(client, host, AdminState.ENABLED)
    await until(lambda: in_state(client, host, AdminState.ENABLED), PATIENCE_S)  # its cell has lifted the fence

    async def heard() -> bool:  # its service's lease is given again with the next heartbeat that the cell reads
        return all(one.holds for one in await whole.verdicts() if one.name == OF_THE_DEAD)

    await until(heard, PATIENCE_S)
    await whole.assert_invariants()


async def boot(whole: Rig) -> None:
    requests = [
        BuildRequest(
            instance_uuid=new_uuid(whole.rng),
            flavor="m1.tiny",
            project_id="p",
            on_host_failure=EvacuationPolicy.RESTART,
        )
        for _ in range(INSTANCES)
    ]
    watches = await whole.client.boot(requests, retry_for_s=PATIENCE_S)
    assert await whole.client.wait(PATIENCE_S) and {watch.state for watch in watches} == {"active"}


async def decide(client: BuildClient, host: HostRecord, state: AdminState) -> None:
    """As an operator who knows that the host is off."""
    decision = SetAdminState(host=host.uuid, state=state, reason="drill", by="bench", force=True)
    await client.set_admin_state(decision, timeout_s=PATIENCE_S)


async def hosts_of_the_service(client: BuildClient) -> Sequence[HostRecord]:
    page = await client.hosts(limit=100, timeout_s=PATIENCE_S, up=True)
    return [host for host in page.hosts if host.service == SERVICE and host.resources]


async def in_state(client: BuildClient, host: HostRecord, state: AdminState) -> HostRecord | None:
    """The host, where that is what was decided about it; enabled, it must be usable."""
    page = await client.hosts(limit=100, timeout_s=PATIENCE_S)
    (found,) = (one for one in page.hosts if one.uuid == host.uuid)
    if state is AdminState.ENABLED:
        is_fenced = found.admin is not None and found.admin.state is AdminState.FENCED
        return found if found.up and found.enabled and not is_fenced else None
    return found if found.admin is not None and found.admin.state is state else None


# --- one of two compute services is killed for good under load: the other builds on


BOOTS = 300
DEAD = "compute-cell1-c2"


async def check(whole: Rig) -> tuple[int, dict[str, dict[str, object]]]:
    """`berth check -o json` as an operator starts it: its exit status, and what it reports of each invariant."""
    arguments = ("check", "-o", "json", "--wait", "60")
    environment = {**os.environ, **variables(whole.site.settings)}
    done = await asyncio.to_thread(run_berth, *arguments, env=environment, timeout_s=PATIENCE_S)
    report = msgspec.json.decode(done.stdout)
    assert report["at_rest"], "what is under way at a service that is away is not waited for"
    return done.returncode, {one["name"]: one for one in report["invariants"]}


async def test_builds_of_a_service_that_is_killed_go_on_elsewhere_and_none_is_lost_or_doubled() -> None:
    compute = ComputeSettings(simulated=SimulatedConfig(hosts=20, faults=Faults(delay_max_s=3.0)))
    plan = SystemPlan(cells=("cell1",), computes_per_cell=2, compute=compute, durable=False)
    async with rig(plan) as whole:
        before = await whole.load(100, timeout_s=PATIENCE_S)
        assert before.active == 100

        async def kill_it() -> None:
            await whole.client.until(lambda: whole.client.unfinished > BOOTS / 2, PATIENCE_S)
            await asyncio.to_thread(whole.processes.kill, DEAD)

        killing = asyncio.create_task(kill_it())
        load = await whole.load(BOOTS, timeout_s=PATIENCE_S)
        await killing
        assert (load.active, load.unfinished) == (BOOTS, 0), load
        assert load.alternates_used > 0, "it was killed with builds under way"

        status, report = await check(whole)
        assert status == 1
        assert [name for name, one in report.items() if not one["holds"]] == ["services_there"]
        (silent,) = report["services_there"]["examples"]  # type: ignore[misc]
        assert silent.startswith("cell1: cell1-c2: silent since "), silent
        (missing,) = report["built_once"]["not_judged"]  # type: ignore[misc]
        assert missing.startswith("what cell1-c2 of cell1 runs, "), missing

        after = await whole.load(50, timeout_s=PATIENCE_S)
        assert (after.active, after.alternates_used) == (50, 0), (
            f"schedulers know it, and choose nothing there: {after}"
        )

        await asyncio.to_thread(whole.processes.restart, DEAD)
        await whole.processes.ready([DEAD])
        async with asyncio.timeout(PATIENCE_S):
            while (await check(whole))[0] != 0:  # what it had built of builds that went elsewhere is being destroyed
                pass
