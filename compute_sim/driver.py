"""Simulated hypervisors: machines that exist only in a Fleet, and fail as planned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from bus.clock import Clock
from bus.contracts.actions import MACHINE_ABSENT, ChangeKind
from bus.contracts.host_metrics import POWER_WATTS, TEMPERATURE_CELSIUS, HostReading
from bus.yielding import YieldingParts
from compute_agent.driver import (
    Build,
    BuildAbort,
    ChangeFault,
    ChangeOrder,
    ChangeResult,
    DriverHost,
    HandOverRefused,
    Machine,
    NotOwned,
    Reschedule,
    Tree,
)
from compute_sim.faults import Faults, PlannedEnding, PlannedSourceAnswer, plan_attempt, plan_change, plan_source_check
from compute_sim.fleet import Fleet, Host, SimulatedMachine
from compute_sim.host_plan import ATTRIBUTES, tree

IDLE_WATTS, LOAD_WATTS = 110.0, 290.0
IDLE_CELSIUS, LOAD_CELSIUS = 24.0, 46.0
HOSTS_AT_ONCE = 1_000  # looked at in one turn of the event loop, in about a millisecond


class SimulatedDriver:
    """The driver of a Fleet."""

    def __init__(self, fleet: Fleet, faults: Faults, *, seed: int, clock: Clock, nested: bool = True) -> None:
        self._fleet = fleet
        self._faults = faults
        self._seed = seed
        self._clock = clock
        self._nested = nested
        self._unsubscribe: list[Callable[[], None]] = []

    async def open(self) -> None:
        """The fleet is opened by its creator."""

    async def close(self) -> None:
        """No more callbacks: another service may take this fleet over."""
        while self._unsubscribe:
            self._unsubscribe.pop()()

    async def hosts(self) -> Sequence[DriverHost]:
        """All hosts, by name."""
        return [
            DriverHost(
                uuid=host.plan.uuid,
                name=host.plan.name,
                enabled=host.enabled,
                disabled_reason=host.disabled_reason,
                attributes=ATTRIBUTES,
            )
            async for part in YieldingParts(self._fleet.hosts, HOSTS_AT_ONCE)
            for host in part
        ]

    async def inventory(self, hosts: Sequence[str] | None = None) -> Sequence[Tree]:
        """The provider trees."""
        return [tree(host.plan, host.size, enabled=host.enabled, nested=self._nested) for host in self._these(hosts)]

    async def spawn(self, build: Build) -> None:
        """Build as the plan of this attempt has it. Raises Reschedule or BuildAbort where it plans a failure."""
        host = self._fleet.host(build.host_uuid)
        if host is None:
            raise Reschedule("host.unknown", "this service has no such host")
        _check(host, build)
        self._check_free(build)
        plan = plan_attempt(self._faults, self._seed, host.plan.name, build.spec.instance_uuid, build.attempt)
        if plan.delay_s:
            await self._clock.sleep(plan.delay_s)
        if plan.ending is PlannedEnding.HANGS:
            await asyncio.get_running_loop().create_future()  # until its destruction cancels it
        self._check_free(build)
        complete = plan.ending is PlannedEnding.WORKS
        runs, image = build.origin is None or build.origin.runs, build.spec.image
        if build.origin is not None and build.origin.image:
            image = build.origin.image
        machine = SimulatedMachine(
            build.spec.instance_uuid, build.attempt, build.allocations, complete, build.database_id, runs, image
        )
        if machine.complete or plan.leftover:
            self._fleet.put(build.host_uuid, machine)
        if plan.ending is PlannedEnding.FAILS:
            raise Reschedule("sim.spawn_failed", "planned: this host cannot build it")
        if plan.ending is PlannedEnding.ABORTS:
            raise BuildAbort("sim.spawn_aborted", "planned: no host can build it")

    async def destroy(self, host_uuid: str, instance_uuid: str, attempt: int, database_id: str | None) -> None:
        """Destroy the machine, unless a newer attempt made it. Raises NotOwned: it has another database's tag."""
        if self._faults.destroy_delay_s:
            await self._clock.sleep(self._faults.destroy_delay_s)
        machine = self._fleet.machine(host_uuid, instance_uuid)
        if machine is not None and machine.database_id != database_id:
            raise NotOwned(f"its tag names {machine.database_id or 'no database'}, and the command {database_id}")
        if machine is not None and machine.attempt <= attempt:
            self._fleet.remove(host_uuid, instance_uuid)

    async def check(self, build: Build) -> None:
        """Check that the host is here, takes builds, and has the allocation. Raises Reschedule."""
        host = self._fleet.host(build.host_uuid)
        if host is None:
            raise Reschedule("host.unknown", "this service has no such host")
        _check(host, build)
        self._check_free(build)
        plan = plan_change(self._faults, self._seed, host.plan.name, build.spec.instance_uuid, build.attempt)
        await self._wait(plan.delay_s, hangs=plan.hangs)
        if plan.fails or plan.breaks:
            raise Reschedule("sim.check_failed", "planned: this host cannot take it")
        if not host.enabled:
            raise Reschedule("host.disabled", host.disabled_reason)

    async def check_source(self, change: ChangeOrder) -> None:
        """Check that the machine is here, and may go to that host. Raises HandOverRefused where planned."""
        machine = self._machine(change)
        host = self._fleet.host(change.host_uuid)
        assert host is not None
        if not machine.runs:
            return  # it was handed over before, and this command has come twice
        answer = plan_source_check(
            self._faults, self._seed, host.plan.name, machine.instance_uuid, change.to_host or ""
        )
        if answer is not PlannedSourceAnswer.PASSES:
            retry_other_host = answer is PlannedSourceAnswer.REFUSED_HERE
            raise HandOverRefused(
                "sim.source_refused", "planned: the source refuses", retry_other_host=retry_other_host
            )

    async def change(self, change: ChangeOrder) -> ChangeResult:
        """Change a machine as the plan of this change has it. Raises ChangeFault, where planned, or NotOwned."""
        machine = self._machine(change)
        host = self._fleet.host(change.host_uuid)
        assert host is not None
        plan = plan_change(self._faults, self._seed, host.plan.name, machine.instance_uuid, change.change_number)
        delay_s = plan.delay_s
        if change.kind is ChangeKind.HAND_OVER_LIVE and self._faults.copy_mb_s:
            memory_mb = sum(amounts.get("MEMORY_MB", 0) for amounts in machine.allocations.values())
            delay_s += memory_mb / self._faults.copy_mb_s
        await self._wait(delay_s, hangs=plan.hangs)
        machine = self._machine(change)
        if plan.fails:
            raise ChangeFault("sim.change_failed", "planned: nothing has happened", runs=machine.runs)
        changed = _changed(machine, change)
        if changed != machine:
            self._fleet.put(change.host_uuid, changed)
        if plan.breaks:
            raise ChangeFault("sim.change_broken", "planned: it was done, and failed at its end", runs=changed.runs)
        image = f"snapshot-{machine.instance_uuid}-{change.change_number}" if change.kind is ChangeKind.SNAPSHOT else ""
        return ChangeResult(changed.runs, image)

    def _machine(self, change: ChangeOrder) -> SimulatedMachine:
        machine = self._fleet.machine(change.host_uuid, change.spec.instance_uuid)
        if machine is None or not machine.complete:
            raise ChangeFault(MACHINE_ABSENT, "no such machine is here", runs=False)
        if machine.database_id != change.database_id:
            raise NotOwned(
                f"its tag names {machine.database_id or 'no database'}, and the command {change.database_id}"
            )
        if machine.attempt != change.attempt:
            raise ChangeFault("machine.other", "another attempt's machine is here", runs=False)
        return machine

    async def _wait(self, seconds: float, *, hangs: bool) -> None:
        if seconds:
            await self._clock.sleep(seconds)
        if hangs:
            await asyncio.get_running_loop().create_future()  # until it is cancelled, or its time is over

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        """The machines that run; a half-built leftover does not run."""
        return {
            host.plan.uuid: [
                Machine(
                    host.plan.uuid,
                    machine.instance_uuid,
                    machine.attempt,
                    machine.database_id,
                    runs=machine.runs,
                    allocations=machine.allocations or None,
                )
                for machine in (host.machines or {}).values()
                if machine.complete
            ]
            async for part in YieldingParts(self._these(hosts), HOSTS_AT_ONCE)
            for host in part
        }

    async def measure(self, now: float) -> Sequence[HostReading]:
        """A simulated host is warm and draws power by how many of its processors are in use."""
        return [_measured(host, now) async for part in YieldingParts(self._fleet.hosts, HOSTS_AT_ONCE) for host in part]

    def on_change(self, callback: Callable[[Sequence[str]], None]) -> None:
        """Hosts of the fleet were enabled, disabled or resized."""
        self._unsubscribe.append(self._fleet.on_change(callback))

    def _check_free(self, build: Build) -> None:
        """A uuid that another database's machine here has already: building would write over that machine."""
        machine = self._fleet.machine(build.host_uuid, build.spec.instance_uuid)
        if machine is not None and machine.database_id != build.database_id:
            raise Reschedule("host.machine_conflict", "a machine of another database has this uuid here")

    def _these(self, hosts: Sequence[str] | None) -> Iterable[Host]:
        if hosts is None:
            return self._fleet.hosts
        return [host for host in map(self._fleet.host, hosts) if host is not None]


def _measured(host: Host, now: float) -> HostReading:
    machines = (machine for machine in (host.machines or {}).values() if machine.runs)
    used = sum(amounts.get("VCPU", 0) for machine in machines for amounts in machine.allocations.values())
    load = min(1.0, used / (host.size.vcpus * host.size.cpu_ratio))
    values = {
        POWER_WATTS: IDLE_WATTS + load * LOAD_WATTS,
        TEMPERATURE_CELSIUS: IDLE_CELSIUS + load * LOAD_CELSIUS,
    }
    return HostReading(host_uuid=host.plan.uuid, at=now, values=values)


def _check(host: Host, build: Build) -> None:
    """A build whose allocation names no provider of this host was sent to the wrong one: building would leak. The tree
    of another host may be as it should be.
    """
    plan, allocations = host.plan, build.allocations
    if plan.uuid not in allocations and not any(child in allocations for child in plan.children):
        raise Reschedule("allocation.elsewhere", "the allocation names no provider of this host")


def _changed(machine: SimulatedMachine, change: ChangeOrder) -> SimulatedMachine:
    """The machine after a change that worked."""
    match change.kind:
        case ChangeKind.START | ChangeKind.REBOOT | ChangeKind.REBOOT_SOFT | ChangeKind.RESCUE | ChangeKind.UNRESCUE:
            return replace(machine, runs=True)
        case ChangeKind.STOP | ChangeKind.HAND_OVER | ChangeKind.HAND_OVER_LIVE | ChangeKind.SNAPSHOT:
            return replace(machine, runs=False)
        case ChangeKind.RESIZE:
            return replace(machine, allocations=change.allocations)
        case ChangeKind.REBUILD:
            return replace(machine, image=change.spec.image)
        case ChangeKind.CHECK:
            return machine
