"""The source's side of the check before a live migration: made before the machine is touched, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bus.clock import SystemClock
from bus.contracts.cell import InstanceSpec
from bus.contracts.moves import ChangeKind, ChangeMachine, MachineChanged
from compute_sim.changes import Changes
from compute_sim.config import ComputeConfig
from compute_sim.domain.faults import Faults, SourceVerdict, plan_source_check
from compute_sim.driver import ChangeOrder, ChangeResult, HandOverRefused
from compute_sim.drivers.hypervisor import Hypervisors
from compute_sim.fleet import Fleet, Guest
from compute_sim.jobs import Jobs

VM = "c0000000-0000-4000-8000-000000000000"
ELSEWHERE = "b0000000-0000-4000-8000-00000000000{}"


class Checked(Hypervisors):
    """Its order of calls, and a refusal where a test wants one."""

    def __init__(self, fleet: Fleet, faults: Faults) -> None:
        super().__init__(fleet, faults, seed=1, clock=SystemClock())
        self.calls: list[str] = []
        self.refusal: HandOverRefused | None = None

    async def check_source(self, change: ChangeOrder) -> None:
        self.calls.append("check_source")
        if self.refusal is not None:
            raise self.refusal
        await super().check_source(change)

    async def change(self, change: ChangeOrder) -> ChangeResult:
        self.calls.append(change.kind.value)
        return await super().change(change)


class Rig:
    """One host with one machine, and the answers about its changes."""

    def __init__(self, faults: Faults = Faults()) -> None:  # noqa: B008  (frozen)
        self.fleet = Fleet.planned(ComputeConfig(hosts=1), "c1", "s1")
        (host,) = self.fleet.hosts
        self.host = host.plan.uuid
        self.fleet.put(self.host, Guest(VM, 1, {self.host: {"VCPU": 1}}))
        self.driver = Checked(self.fleet, faults)
        self.answers: list[MachineChanged] = []
        begun = asyncio.Event()
        begun.set()
        self.jobs = Jobs()
        self.changes = Changes(
            service="s1",
            driver=self.driver,
            records=self.fleet.records,
            jobs=self.jobs,
            send=self.answers.append,
            clock=SystemClock(),
            begun=begun,
        )
        self._order = 0

    async def apply(self, kind: ChangeKind, to_host: str = ELSEWHERE.format(1)) -> MachineChanged:
        self._order += 1
        command = ChangeMachine(
            change=kind,
            spec=InstanceSpec(instance_uuid=VM, project_id="p"),
            attempt=1,
            order=self._order,
            host_uuid=self.host,
            service="s1",
            allocations={self.host: {"VCPU": 1}},
            to_host=to_host,
        )
        count = len(self.answers)
        self.changes.take(command, is_host=True)
        await reached(lambda: len(self.answers) > count)
        return self.answers[-1]


async def reached(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not there():  # noqa: ASYNC110  (an answer has no event)
            await asyncio.sleep(0)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_refusal_comes_before_the_machine_is_touched(elsewhere: bool) -> None:
    rig = Rig()
    rig.driver.refusal = HandOverRefused("live.pinned", "a device", elsewhere=elsewhere)
    answer = await rig.apply(ChangeKind.HAND_OVER_LIVE)
    assert rig.driver.calls == ["check_source"]
    assert (answer.done, answer.refused, answer.elsewhere, answer.runs) == (False, True, elsewhere, True)
    assert (answer.code, answer.reason) == ("live.pinned", "a device")
    guest = rig.fleet.guest(rig.host, VM)
    assert guest is not None and guest.runs


async def test_a_source_that_passes_is_migrated_and_other_changes_are_not_checked() -> None:
    rig = Rig()
    answer = await rig.apply(ChangeKind.HAND_OVER_LIVE)
    assert (answer.done, answer.refused, answer.elsewhere) == (True, False, False)
    await rig.apply(ChangeKind.START)
    await rig.apply(ChangeKind.HAND_OVER)
    assert rig.driver.calls == ["check_source", "hand-over-live", "start", "hand-over"]


async def test_a_machine_that_was_handed_over_is_not_refused_when_the_command_comes_twice() -> None:
    rig = Rig(Faults(source_refuse_rate=1.0))
    assert (await rig.apply(ChangeKind.HAND_OVER_LIVE)).refused
    rig.fleet.put(rig.host, Guest(VM, 1, {rig.host: {"VCPU": 1}}, runs=False))
    assert (await rig.apply(ChangeKind.HAND_OVER_LIVE)).done


def test_some_sources_refuse_every_destination_and_some_only_one() -> None:
    found = {
        plan_source_check(
            Faults(source_refuse_rate=0.3, source_refuse_host_rate=0.3), 1, "h", f"vm{vm}", ELSEWHERE.format(to)
        )
        for vm in range(20)
        for to in range(5)
    }
    assert found == set(SourceVerdict)
    assert plan_source_check(Faults(change_fail_rate=1.0), 1, "h", VM, "x") is SourceVerdict.PASSES


def test_a_refusal_of_every_destination_does_not_depend_on_it() -> None:
    faults = Faults(source_refuse_rate=0.5)
    for vm in range(20):
        verdicts = {plan_source_check(faults, 1, "h", f"vm{vm}", ELSEWHERE.format(to)) for to in range(5)}
        assert len(verdicts) == 1
