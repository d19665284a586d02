"""A server of a chaos run that does not come back: started again on its data, and the run ends when it never does."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import cast

import pytest

from berth.trial.embedded.process import ServerFailed
from bus.clock import SystemClock
from lab.chaos.deployment import Deployment
from lab.chaos.faults import SERVER_STARTS, FaultInjector
from lab.chaos.plan import BROKER, FaultKind, FaultSchedule, FaultSpec, PlannedFault

KILLED = PlannedFault(kind=FaultKind.KILL, role=BROKER, target=BROKER, lasts_s=0.0)


class SlowServer:
    """A server that is not ready in time so often."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.is_up = True

    def kill(self) -> None:
        self.is_up = False

    def restart(self) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise ServerFailed("the server was not ready after 60 s")
        self.is_up = True


def injector(server: SlowServer) -> FaultInjector:
    servers = SimpleNamespace(broker=server)
    stage = SimpleNamespace(servers=servers, site=SimpleNamespace(clock=SystemClock()))
    return FaultInjector(cast(Deployment, stage), random.Random(1))


async def test_a_server_that_was_not_ready_in_time_is_started_again() -> None:
    server = SlowServer(SERVER_STARTS - 1)
    await injector(server).begin(KILLED)
    assert server.is_up


async def test_a_run_ends_when_a_server_does_not_come_back() -> None:
    """A broker that took more than a minute to start under load lost its directory, and the run went on without it."""
    server = SlowServer(SERVER_STARTS)
    faults = injector(server)
    await asyncio.wait([faults.begin(KILLED)])
    with pytest.raises(ServerFailed):
        await faults.disturb(FaultSchedule((), random.Random(1)), every_s=0.0, most=2)
    with pytest.raises(ServerFailed):
        await faults.settle()


class StartingWorkers:
    """One worker, which is ready when the test lets it be."""

    def __init__(self) -> None:
        self.workers = {"w": SimpleNamespace(process=SimpleNamespace(kill=lambda: None), arguments=("scheduler",))}
        self.is_ready = asyncio.Event()
        self.probed = asyncio.Event()

    def restart(self, name: str) -> None:
        assert name in self.workers

    async def ready(self, names: list[str], *, timeout_s: float) -> None:
        assert names == ["w"] and timeout_s > 0
        self.probed.set()
        await self.is_ready.wait()


async def test_a_worker_counts_as_broken_until_it_is_ready() -> None:
    """At load 20 a start took ten seconds: with a fault every two no scheduler was ever ready."""
    processes = StartingWorkers()
    stage = SimpleNamespace(
        servers=None,
        processes=processes,
        site=SimpleNamespace(clock=SystemClock()),
        workers=lambda role: ["w"] if role == "scheduler" else [],
    )
    faults = FaultInjector(cast(Deployment, stage), random.Random(2))  # its first draw is not HIT_WHILE_STARTING
    cards = (FaultSpec(FaultKind.KILL, "scheduler", 1),)
    killed = faults.begin(PlannedFault(kind=FaultKind.KILL, role="scheduler", target="w", lasts_s=0.0))
    await processes.probed.wait()
    await faults.disturb(FaultSchedule(cards, random.Random(1)), every_s=0.0, most=1)
    assert not killed.done() and len(faults.injected) == 1 and faults._free()["scheduler"] == []
    processes.is_ready.set()
    await killed
    assert faults._free()["scheduler"] == ["w"]
