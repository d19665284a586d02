"""How soon an operator's change of an object is in effect in every scheduler.

    python -m lab.benchmarks.objects [--rounds 20] [--schedulers 3]

Real servers and a process for each worker. In each round a flavor is made, and a project's quota is set to nothing and
back. Measured: from the answer to the change until the first of a row of builds that are all decided by it. Any
scheduler takes a build, so a row has several for each.
"""

from __future__ import annotations

import random
import sys

from berth.client import BuildClient
from berth.site import Site, process_name
from berth.trial.servers import SystemPlan, real_servers, running_processes
from bus.clock import SystemClock, new_uuid
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.objects import ObjectChange, ObjectKind, ObjectsChange, ObjectsChanged
from compute_sim.config import ComputeConfig, HostSize
from lab.benchmarks.in_effect import TIMEOUT_S, Figures, in_effect_ms, run
from lab.benchmarks.street_moves import spread_of

BUILDS_IN_A_ROW = 8  # of each scheduler
PROJECT = "measured"
SIZE = {"vcpus": 1, "memory_mb": 1, "disk_gb": 0}


class Measured:
    """One running system whose objects are changed."""

    def __init__(self, client: BuildClient, in_a_row: int) -> None:
        self._client = client
        self._in_a_row = in_a_row
        self._rng = random.Random(1)

    async def in_effect_ms(self, change: ObjectChange, flavor: str, code: str) -> float:
        """Milliseconds until builds of this flavor end as they have to. code: of their failure; "": they start."""
        await self._client.bus.request(
            ObjectsChange(who="bench", changes=(change,)), ObjectsChanged, timeout_s=TIMEOUT_S
        )

        async def ends() -> bool:
            return await self._ends(flavor) == code

        return await in_effect_ms(ends, self._in_a_row, f"{change.kind.value} {change.name}")

    async def _ends(self, flavor: str) -> str:
        """The code that a build fails with; "": it is active."""
        uuid = new_uuid(self._rng)
        await self._client.boot([BuildRequest(instance_uuid=uuid, flavor=flavor, project_id=PROJECT)])
        if not await self._client.wait(TIMEOUT_S):
            raise SystemExit(f"a build of {flavor} had no end after {TIMEOUT_S:g} s")
        event = self._client.tracks[uuid].last
        assert event is not None
        return "" if event.state is BuildState.ACTIVE else event.code


async def measure(rounds: int, schedulers: int) -> Figures:
    """Milliseconds until in effect everywhere, by what was changed."""
    size = HostSize(vcpus=4096, memory_mb=2**20, disk_gb=2**10)
    plan = SystemPlan(cells=("cell1",), schedulers=schedulers, compute=ComputeConfig(hosts=4, sizes=(size,)))
    with real_servers(plan.cells, durable=True) as servers:
        async with running_processes(servers, plan) as (_, site):
            return await _rounds(site, rounds, BUILDS_IN_A_ROW * schedulers)


async def _rounds(site: Site, rounds: int, in_a_row: int) -> Figures:
    process = process_name("bench")
    client = BuildClient(site.bus(process), clock=SystemClock(), process=process)
    await client.open()
    try:
        measured = Measured(client, in_a_row)
        took: dict[str, list[float]] = {"flavor": [], "quota": [], "quota lifted": []}
        quota = PROJECT
        for number in range(rounds):
            flavor = f"bench.{number}"
            made = ObjectChange(kind=ObjectKind.FLAVOR, name=flavor, body=SIZE)
            took["flavor"].append(await measured.in_effect_ms(made, flavor, ""))
            nothing = ObjectChange(kind=ObjectKind.QUOTA, name=quota, body={"limits": {"VCPU": 0}})
            took["quota"].append(await measured.in_effect_ms(nothing, flavor, "quota.exceeded"))
            much = ObjectChange(kind=ObjectKind.QUOTA, name=quota, body={"limits": {"VCPU": 2**20}})
            took["quota lifted"].append(await measured.in_effect_ms(much, flavor, ""))
        return {name: spread_of(sorted(times)) for name, times in took.items()}
    finally:
        await client.close()


if __name__ == "__main__":
    sys.exit(run(measure, description=__doc__, rounds=20))
