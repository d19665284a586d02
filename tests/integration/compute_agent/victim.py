"""A process that manages a fleet on disk until it is killed: prints what it accepted and answered."""

from __future__ import annotations

import asyncio
import os
import random
import sys

from berth.config.settings import ComputeSettings
from bus.clock import SystemClock, new_uuid
from bus.contracts.cell import ComputeResult, Destroy, Spawn
from compute_agent.attempts.agent import Agent, Limits
from compute_agent.attempts.destroys import Destroys
from compute_agent.attempts.jobs import Jobs
from compute_agent.attempts.results import Results
from compute_agent.hosts.scan import MachineScanner
from compute_sim.config import SimulatedConfig
from compute_sim.driver import SimulatedDriver
from compute_sim.faults import Faults
from tests.integration.compute_agent.harness import DATABASE_ID, SERVICE, planned, spawn

FAULTS = Faults(delay_max_s=0.02, fail_rate=0.1, hang_rate=0.05, destroy_delay_s=0.005)


def config(state_dir: str) -> ComputeSettings:
    return ComputeSettings(
        simulated=SimulatedConfig(hosts=5, faults=FAULTS), state_dir=state_dir, heartbeat_interval_s=0.5
    )


def shout(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def answered(result: ComputeResult) -> None:
    shout("reported", result.host_uuid, result.instance_uuid, result.attempt, result.outcome)


async def main(state_dir: str) -> None:
    settings, clock, rng = config(state_dir), SystemClock(), random.Random(3)
    fleet = planned(settings)
    fleet.records.open()
    fleet.open()
    limits = Limits(per_host=10, builds=1000, accepted=1000, build_s=60)
    driver = SimulatedDriver(fleet, FAULTS, seed=1, clock=clock)
    jobs, results = Jobs(), Results(SERVICE, answered, clock, fleet.records)
    destroys = Destroys(
        service=SERVICE,
        driver=driver,
        records=fleet.records,
        results=results,
        jobs=jobs,
        clock=clock,
        rng=random.Random(1),
        max_calls=3,
    )
    agent = Agent(
        service=SERVICE,
        driver=driver,
        records=fleet.records,
        scanner=MachineScanner(driver, fleet.records),
        jobs=jobs,
        results=results,
        destroys=destroys,
        send=answered,
        clock=clock,
        limits=limits,
    )
    await agent.resume()
    hosts = [host.plan.uuid for host in fleet.hosts]
    known: list[tuple[str, str]] = []
    while True:
        batch: list[Spawn | Destroy] = []
        for _ in range(8):
            if known and rng.random() < 0.3:
                host, instance = known.pop(rng.randrange(len(known)))
                order = Destroy(
                    instance_uuid=instance, attempt=1, host_uuid=host, service=SERVICE, database_id=DATABASE_ID
                )
                batch.append(order)
            else:
                known.append((rng.choice(hosts), new_uuid(rng)))
                batch.append(spawn(*known[-1]))
        agent.handle(batch)
        for command in batch:
            if isinstance(command, Spawn):
                shout("took", command.host_uuid, command.spec.instance_uuid, "spawn")
            else:
                shout("took", command.host_uuid, command.instance_uuid, "destroy")
        await asyncio.sleep(0.002)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
