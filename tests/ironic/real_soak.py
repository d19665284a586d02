"""Deploys and deletes on a real Ironic with a failure of each kind; at the end nodes, book and records agree.

IRONIC_CYCLES: how many builds (13 rounds of one; `scripts/nightly ironic test --cycles 500` is the long form).
IRONIC_KINDS: only these kinds of failure, separated by commas.
IRONIC_MINUTES: no round begins after so many; what was done until then is judged, and printed.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from bus.clock import new_uuid
from bus.contracts.build import BuildRequest
from tests.kit.bmc import DRIVER, POWER_CONFIG, Bmc
from tests.kit.real_metal import RNG, WAIT_S, RealMetal, drive, real_metal, until

ALL_KINDS = (
    "failed deploy",
    "failed clean",
    "taken by another user",
    "power failure",
    "API killed",
    "conductor restarted",
    "maintenance",
    "undeployed by its operator",
    "compute service killed",
    "cell conductor killed",
    "ironic-sync killed",
    "scheduler killed",
    "placement killed",
)
WORKERS = {
    "compute service killed": "cell1-metal",
    "cell conductor killed": "conductor-cell1",
    "ironic-sync killed": "ironic-sync",
    "scheduler killed": "scheduler1",
    "placement killed": "placement1",
}
KINDS = tuple(kind for kind in os.environ.get("IRONIC_KINDS", "").split(",") if kind) or ALL_KINDS
CYCLES = int(os.environ.get("IRONIC_CYCLES", str(len(KINDS))))
MINUTES = float(os.environ.get("IRONIC_MINUTES", "inf"))
AT_ONCE = max(1, min(40, CYCLES // len(KINDS)))  # every kind has a round at least
NODES = 4 + AT_ONCE
FIELDS = "uuid,provision_state,instance_uuid,instance_info,maintenance,power_state"
# One Ironic on SQLite answers some thirty requests a second. Steps that only look leave them to steps that change
# something.
LOOK_S = 1.0
CALM: dict[str, Any] = {"poll_interval_s": 0.5, "watch_interval_s": 2.0}
OUTAGE_S = (0.0, 5.0)
ENDS = {"active", "failed"}


class Soak:
    """The nodes, what has gone wrong with them, and what is counted."""

    def __init__(self, metal: RealMetal, bmc: Bmc) -> None:
        self.metal = metal
        self.bmc = bmc
        self.rng = random.Random(f"soak {CYCLES}")
        self.direct: list[str] = []
        self.fake: list[str] = []
        self.ends: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.theirs: dict[str, str] = {}  # another user's instances, by node

    @property
    def nodes(self) -> list[str]:
        return [*self.direct, *self.fake]

    async def enroll(self) -> None:
        """A third with Ironic's own way of deploying: it costs ten times as many requests as the fake one."""
        third = max(2, NODES // 3)
        self.direct = await self.metal.nodes.enroll(third, direct=True, driver=DRIVER)
        self.fake = await self.metal.nodes.enroll(NODES - third, driver=DRIVER)

    async def one_round(self, kind: str, count: int) -> None:
        """Some builds at once, and something that goes wrong meanwhile; then all that became active is deleted."""
        await self.metal.offered(*self.nodes)
        if kind in {"failed deploy", "failed clean"}:
            broken = self.metal.lab.agents.failing if kind == "failed deploy" else self.metal.lab.agents.unclean
            broken.update(dict.fromkeys(self.direct, f"soak: {kind}"))
        requests = [self.request() for _ in range(count)]
        watches = await self.metal.client.boot(requests, retry_for_s=WAIT_S)
        await self.fault(kind)
        assert await self.metal.client.wait(3 * WAIT_S), [watch.state for watch in watches]
        for watch in watches:
            assert watch.terminals == 1 and watch.state in ENDS, watch
            self.ends[watch.state] += 1
            record = await self.metal.record(watch.instance_uuid)
            self.codes.update(attempt.code for attempt in record.history if attempt.code)
        if kind == "undeployed by its operator":
            await self.undeploy([watch.instance_uuid for watch in watches if watch.state == "active"])
        self.restore_power()
        await self.metal.delete(*(watch.instance_uuid for watch in watches if watch.state == "active"))
        await self.repair(kind)

    def request(self) -> BuildRequest:
        """With an image, or (on a direct node: not accepted) without."""
        image = self.metal.image if self.rng.random() < 0.8 else None
        return self.metal.request(image_source=image, config_drive=drive() if self.rng.random() < 0.5 else None)

    async def fault(self, kind: str) -> None:
        """The actions of an operator, another user or a power cut while nodes are deployed."""
        self.faults[kind] += 1
        node, ironic = self.rng.choice(self.nodes), self.metal.lab.ironic
        match kind:
            case "taken by another user":
                await self.take(self.rng.sample(self.fake, len(self.fake)))
            case "power failure":
                for one in self.rng.sample(self.nodes, max(1, NODES // 4)):
                    self.bmc.set_readings(one, broken=True)
            case "API killed":
                await asyncio.to_thread(ironic.kill)
                await asyncio.sleep(self.rng.uniform(*OUTAGE_S))  # an outage lasts for a time
                await asyncio.to_thread(ironic.restart)
            case "conductor restarted":
                await asyncio.to_thread(ironic.shut_down)
                await asyncio.to_thread(ironic.restart)
            case "maintenance":
                await self.metal.nodes.maintenance(node, on=True)
                await asyncio.sleep(self.rng.uniform(0.2, 1.0))  # as long as it takes, while the builds go on
                await self.metal.nodes.maintenance(node, on=False)
            case _ if kind in WORKERS:
                await asyncio.sleep(self.rng.uniform(0.0, 1.0))  # at any moment of the builds
                await self.metal.system.replace_worker(WORKERS[kind])
            case _:
                return

    async def take(self, nodes: list[str]) -> None:
        """Another user of this Ironic deploys the first of these that it gets."""
        client = self.metal.nodes.client
        for node in nodes:
            theirs = new_uuid(RNG)
            wanted = [{"op": "add", "path": "/instance_uuid", "value": theirs}]
            with_lock = await client.patch(f"/v1/nodes/{node}", json=wanted)
            if with_lock.is_success and with_lock.json()["provision_state"] == "available":
                await self.metal.nodes.provision(node, "active")
                self.theirs[node] = theirs
                return
            assert with_lock.status_code in {httpx.codes.CONFLICT, httpx.codes.OK, 503, 500}, with_lock.text

    async def undeploy(self, instances: list[str]) -> None:
        """The operator undeploys, by Ironic, what berth has deployed."""
        for found in await self.metal.nodes.list_all(FIELDS):
            if found["instance_uuid"] in instances[:2] and found["provision_state"] == "active":
                await self.metal.nodes.provision(found["uuid"], "deleted")

    async def repair(self, kind: str) -> None:
        """The operator repairs what is broken; the other user's machine is as it was, and goes."""
        agents = self.metal.lab.agents
        agents.failing.clear()
        if kind == "failed clean":
            await until(self.some_failed_clean, LOOK_S)
        agents.unclean.clear()
        for node, theirs in self.theirs.items():
            found = await self.metal.nodes.until(node, "active")
            assert (found["instance_uuid"], found["instance_info"]) == (theirs, {}), "another user's was changed"
            await self.metal.nodes.provision(node, "deleted")
        self.theirs.clear()
        await until(self.at_rest, LOOK_S)

    def restore_power(self) -> None:
        """Before anything is deleted: no machine is undeployed without power."""
        for node in self.nodes:
            self.bmc.set_readings(node)

    async def some_failed_clean(self) -> bool:
        states = [node["provision_state"] for node in await self.metal.nodes.list_all(FIELDS)]
        return "clean failed" in states or not {"cleaning", "clean wait", "deleting", "active"} & set(states)

    async def at_rest(self) -> bool:
        """Every node is available and without an instance. The operator repairs what Ironic gave up."""
        states = await self.metal.nodes.list_all(FIELDS)
        for node in states:
            if node["provision_state"] == "clean failed":
                await self.metal.nodes.repair(node["uuid"])
            elif node["provision_state"] == "manageable":
                await self.metal.nodes.provision(node["uuid"], "provide")
        return all(
            (node["provision_state"], node["instance_uuid"], node["maintenance"]) == ("available", None, False)
            and node["power_state"] is not None  # Ironic drops it while a power supply fails
            for node in states
        )


@pytest.mark.timeout(900 + 60 * CYCLES)  # the default for a test, five minutes, ends one of twenty
async def test_whatever_fails_nodes_book_and_records_agree_at_the_end(tmp_path: Path) -> None:
    bmc, began = Bmc(tmp_path), time.monotonic()
    lab: dict[str, Any] = {"delays": {"deploy_delay": 1}, "more": POWER_CONFIG, "plugins": bmc.directory, "beat_s": 1.0}
    async with real_metal(compute=CALM, **lab) as metal:
        soak = Soak(metal, bmc)
        await soak.enroll()
        kinds: list[str] = []
        for begun in range(0, CYCLES, AT_ONCE):
            if time.monotonic() - began > 60 * MINUTES:
                break
            kinds = kinds or soak.rng.sample(KINDS, len(KINDS))
            await soak.one_round(kind := kinds.pop(), min(AT_ONCE, CYCLES - begun))
            sys.stdout.write(f"{time.monotonic() - began:.0f} s: {soak.ends.total()} builds ({kind})\n")
        sys.stdout.write(f"{time.monotonic() - began:.0f} s; {soak.ends}; {soak.faults}; {soak.codes}\n")
        assert soak.ends["active"] >= soak.ends.total() // 3, soak.ends
        assert not set(KINDS) - set(soak.faults) or len(KINDS) > soak.ends.total() // AT_ONCE, soak.faults
        assert all(node["instance_info"] == {} for node in await metal.nodes.list_all(FIELDS))
        await metal.offered(*soak.nodes)
        await metal.all_agree()
