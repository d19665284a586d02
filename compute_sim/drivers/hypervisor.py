"""Simulated hypervisors: machines that exist only in a Fleet, and fail as planned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from bus.clock import Clock
from bus.contracts.host_metrics import POWER_WATTS, TEMPERATURE_CELSIUS, HostReading
from bus.contracts.moves import MACHINE_ABSENT, ChangeKind
from bus.turns import InParts
from compute_sim.domain.faults import Faults, PlannedEnding, SourceVerdict, plan_attempt, plan_change, plan_source_check
from compute_sim.domain.hosts import ATTRIBUTES, tree
from compute_sim.driver import (
    Build,
    BuildAbort,
    ChangeFault,
    ChangeOrder,
    ChangeResult,
    DriverHost,
    HandOverRefused,
    Machine,
    NotOurs,
    Reschedule,
    Tree,
)
from compute_sim.fleet import Fleet, Guest, Host

IDLE_WATTS, LOAD_WATTS = 110.0, 290.0
IDLE_CELSIUS, LOAD_CELSIUS = 24.0, 46.0
HOSTS_AT_ONCE = 1_000  # looked at in one turn of the event loop, in about a millisecond


class Hypervisors:
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
            async for part in InParts(self._fleet.hosts, HOSTS_AT_ONCE)
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
        guest = Guest(
            build.spec.instance_uuid, build.attempt, build.allocations, complete, build.deployment, runs, image
        )
        if guest.complete or plan.leftover:
            self._fleet.put(build.host_uuid, guest)
        if plan.ending is PlannedEnding.FAILS:
            raise Reschedule("sim.spawn_failed", "planned: this host cannot build it")
        if plan.ending is PlannedEnding.ABORTS:
            raise BuildAbort("sim.spawn_aborted", "planned: no host can build it")

    async def destroy(self, host_uuid: str, instance_uuid: str, attempt: int, deployment: str | None) -> None:
        """Destroy the machine, unless a newer attempt made it. Raises NotOurs: it has another deployment's mark."""
        if self._faults.destroy_delay_s:
            await self._clock.sleep(self._faults.destroy_delay_s)
        guest = self._fleet.guest(host_uuid, instance_uuid)
        if guest is not None and guest.deployment != deployment:
            raise NotOurs(f"its mark names {guest.deployment or 'no deployment'}, and the command {deployment}")
        if guest is not None and guest.attempt <= attempt:
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
        guest = self._guest(change)
        host = self._fleet.host(change.host_uuid)
        assert host is not None
        if not guest.runs:
            return  # it was handed over before, and this command has come twice
        verdict = plan_source_check(self._faults, self._seed, host.plan.name, guest.instance_uuid, change.to_host or "")
        if verdict is not SourceVerdict.PASSES:
            elsewhere = verdict is SourceVerdict.REFUSED_HERE
            raise HandOverRefused("sim.source_refused", "planned: the source refuses", elsewhere=elsewhere)

    async def change(self, change: ChangeOrder) -> ChangeResult:
        """Change a machine as the plan of this change has it. Raises ChangeFault, where planned, or NotOurs."""
        guest = self._guest(change)
        host = self._fleet.host(change.host_uuid)
        assert host is not None
        plan = plan_change(self._faults, self._seed, host.plan.name, guest.instance_uuid, change.order)
        delay_s = plan.delay_s
        if change.kind is ChangeKind.HAND_OVER_LIVE and self._faults.copy_mb_s:
            memory_mb = sum(amounts.get("MEMORY_MB", 0) for amounts in guest.allocations.values())
            delay_s += memory_mb / self._faults.copy_mb_s
        await self._wait(delay_s, hangs=plan.hangs)
        guest = self._guest(change)
        if plan.fails:
            raise ChangeFault("sim.change_failed", "planned: nothing has happened", runs=guest.runs)
        changed = _changed(guest, change)
        if changed != guest:
            self._fleet.put(change.host_uuid, changed)
        if plan.breaks:
            raise ChangeFault("sim.change_broken", "planned: it was done, and failed at its end", runs=changed.runs)
        image = f"snapshot-{guest.instance_uuid}-{change.order}" if change.kind is ChangeKind.SNAPSHOT else ""
        return ChangeResult(changed.runs, image)

    def _guest(self, change: ChangeOrder) -> Guest:
        guest = self._fleet.guest(change.host_uuid, change.spec.instance_uuid)
        if guest is None or not guest.complete:
            raise ChangeFault(MACHINE_ABSENT, "no such machine is here", runs=False)
        if guest.deployment != change.deployment:
            raise NotOurs(f"its mark names {guest.deployment or 'no deployment'}, and the command {change.deployment}")
        if guest.attempt != change.attempt:
            raise ChangeFault("machine.other", "another attempt's machine is here", runs=False)
        return guest

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
                    guest.instance_uuid,
                    guest.attempt,
                    guest.deployment,
                    runs=guest.runs,
                    allocations=guest.allocations or None,
                )
                for guest in (host.guests or {}).values()
                if guest.complete
            ]
            async for part in InParts(self._these(hosts), HOSTS_AT_ONCE)
            for host in part
        }

    async def measure(self, now: float) -> Sequence[HostReading]:
        """A simulated host is warm and draws power by how many of its processors are in use."""
        return [_measured(host, now) async for part in InParts(self._fleet.hosts, HOSTS_AT_ONCE) for host in part]

    def on_change(self, callback: Callable[[Sequence[str]], None]) -> None:
        """Hosts of the fleet were enabled, disabled or resized."""
        self._unsubscribe.append(self._fleet.on_change(callback))

    def _check_free(self, build: Build) -> None:
        """A uuid that another deployment's machine here has already: building would write over that machine."""
        guest = self._fleet.guest(build.host_uuid, build.spec.instance_uuid)
        if guest is not None and guest.deployment != build.deployment:
            raise Reschedule("host.taken", "a machine of another deployment has this uuid here")

    def _these(self, hosts: Sequence[str] | None) -> Iterable[Host]:
        if hosts is None:
            return self._fleet.hosts
        return [host for host in map(self._fleet.host, hosts) if host is not None]


def _measured(host: Host, now: float) -> HostReading:
    guests = (guest for guest in (host.guests or {}).values() if guest.runs)
    used = sum(amounts.get("VCPU", 0) for guest in guests for amounts in guest.allocations.values())
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


def _changed(guest: Guest, change: ChangeOrder) -> Guest:
    """The machine after a change that worked."""
    match change.kind:
        case ChangeKind.START | ChangeKind.RESCUE | ChangeKind.UNRESCUE:
            return replace(guest, runs=True)
        case ChangeKind.STOP | ChangeKind.HAND_OVER | ChangeKind.HAND_OVER_LIVE | ChangeKind.SNAPSHOT:
            return replace(guest, runs=False)
        case ChangeKind.RESIZE:
            return replace(guest, allocations=change.allocations)
        case ChangeKind.REBUILD:
            return replace(guest, image=change.spec.image)
        case ChangeKind.CHECK:
            return guest
