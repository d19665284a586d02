"""Chaos runs: the deck of faults, servers and workers that come back, the counts. A drill runs one."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from berth.audit.invariants import (
    ActionFact,
    Facts,
    InstanceFact,
    InvariantResult,
    InventoryFact,
    RunningFact,
    check_invariants,
)
from berth.config.ports import ServerFailed
from bus.clock import SystemClock
from lab.chaos.deployment import Deployment
from lab.chaos.faults import SERVER_STARTS, Death, FaultInjector, Injected
from lab.chaos.plan import (
    BROKER,
    DECK,
    MAX_BROKEN,
    MAX_PAUSED,
    FaultKind,
    FaultSchedule,
    FaultSpec,
    PlannedFault,
)
from lab.chaos.report import ChaosReport, Stall, breaches, doubled_actions, lost_actions

# --- the deck of faults: one seed, one order; nothing is done twice to the same target; never too much at once


NAMES = {
    "scheduler": ["scheduler1", "scheduler2"],
    "placement": ["placement1"],
    "conductor": ["conductor-cell1-1"],
    "compute": ["compute-cell1-c1"],
    "broker": ["broker"],
    "database": ["database"],
}


def test_enough_is_enough() -> None:
    deck = FaultSchedule(DECK, random.Random(1))
    assert deck.deal(NAMES, broken=MAX_BROKEN) is None
    paused = [deck.deal(NAMES, paused=MAX_PAUSED) for _ in range(100)]
    assert all(fault is not None and fault.kind is not FaultKind.PAUSE for fault in paused)


# --- a server of a chaos run that does not come back: started again on its data, and the run ends when it never does


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


# --- the counts of lost, doubled, leaked, overcommitted; and how stalls and recoveries are measured


A, B, HOST = "a" * 8, "b" * 8, "h" * 8
SOUND = Facts(
    inventories=[InventoryFact(HOST, "VCPU", 4, 0, 1.0, 4, 4)],
    allocations={A: {HOST: {"VCPU": 4}}},
    roots={HOST: HOST},
    requests={A: "active"},
    cells={A: "cell1"},
    instances=[InstanceFact(A, "cell1", "active", HOST, 1)],
    running=[RunningFact(A, 1, HOST)],
    feed=(1, 3, 3),
    accepted=[A],
)
NOTHING = {"lost": 0, "doubled": 0, "leaked": 0, "overcommitted": 0}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, {}),
        ({"accepted": [A, B]}, {"lost": 1}),
        ({"running": [RunningFact(A, 1, HOST), RunningFact(A, 1, HOST)]}, {"doubled": 1}),
        ({"allocations": {A: {HOST: {"VCPU": 4}}, B: {HOST: {"VCPU": 1}}}}, {"leaked": 1}),
        ({"inventories": [InventoryFact(HOST, "VCPU", 4, 0, 1.0, 4, 5)]}, {"overcommitted": 1}),
    ],
)
def test_what_is_counted_is_a_breach_of_an_invariant(changes: dict[str, object], found: dict[str, int]) -> None:
    assert breaches(check_invariants(msgspec.structs.replace(SOUND, **changes))) == NOTHING | found


def fault(began_at: float, over_at: float | None, kind: FaultKind = FaultKind.KILL) -> Injected:
    what = PlannedFault(kind=kind, role="broker", target="broker", lasts_s=0.0)
    return Injected(fault=what, began_at=began_at, over_at=over_at)


def test_a_move_is_lost_without_a_record_or_an_end_and_doubled_with_two_different_ends() -> None:
    actions = [
        ActionFact("m1", A, "migrate", "done", terminal=True),
        ActionFact("m2", A, "resize", "claiming", terminal=False),
    ]
    facts = msgspec.structs.replace(SOUND, actions=actions)
    assert lost_actions(facts, ["m1", "m2", "m3"]) == ("m2", "m3")
    assert lost_actions(facts, ["m1"]) == ()
    assert doubled_actions({"m1": {("done", "")}, "m2": {("done", ""), ("failed", "x")}}) == ("m2",)


# --- the results of a chaos run that count as a bug, and that a person can read the report


REPORT_SOUND = ChaosReport(
    seed=1, seconds=10.0, requests=100, wanted=100, stopped="", deletes=10, active=90, failed=0, refused=0,
    deleted=10, failures_by_code={}, failure_reasons={}, events=400, events_repeated=1, lost=0, doubled=0, leaked=0,
    overcommitted=0,
    faults={"kill_broker": 1}, faults_total=1, connections_cut=0, died=(), ends_per_s=11.0,
    longest_stall=Stall(3.2, ("kill_broker",)), recovery_s=1.5, recovery_by_kind={"kill_broker": (2.5, 2.5)},
    at_rest=True, dead_letters={}, verdicts=(), examples={},
)  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"lost": 1},
        {"doubled": 1},
        {"leaked": 1},
        {"overcommitted": 1},
        {"at_rest": False},
        {"wanted": 101},
        {"actions_wanted": 1},
        {"faults_total": 0},
        {"verdicts": (InvariantResult(name="x", message="", holds=False, checked=1),)},
    ],
)
def test_a_run_is_not_sound_when_anything_is(wrong: dict[str, object]) -> None:
    assert not msgspec.structs.replace(REPORT_SOUND, **wrong).sound


@pytest.mark.parametrize(
    ("status", "words", "bug"),
    [
        (1, '{"code":"KeyError","event":"process.died"}', True),
        (1, '{"code":"bus.unavailable","event":"process.died"}', False),
        (70, '{"code":"state.illegal","event":"process.invariant_broken"}', True),
        (137, "", False),
    ],
)
def test_a_death_is_a_bug_unless_an_outage_explains_it(status: int, words: str, bug: bool) -> None:
    report = msgspec.structs.replace(REPORT_SOUND, died=(Death("scheduler1", status, words, 1.0),))
    assert (bool(report.bugs), report.sound) == (bug, not bug)
