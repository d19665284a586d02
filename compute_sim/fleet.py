"""The simulated machines themselves. They outlive the service that manages them."""

# In memory for one process: stop a service, start another over the same Fleet, and it finds what runs. With a state
# directory also across processes, SIGKILL included.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import structlog
from msgspec import Struct

from bus.contracts.base import Resources
from compute_agent.records.journal import Journal
from compute_agent.records.records import Records
from compute_sim.config import HostSize, SimulatedConfig
from compute_sim.host_plan import HostPlan, plan_hosts

REWRITE_AFTER = 100_000  # journal rows beyond four times the number of live ones

log = structlog.get_logger(__name__)


class SimulatedMachine(Struct, frozen=True, array_like=True):
    """One machine on a host."""

    instance_uuid: str
    attempt: int
    allocations: dict[str, Resources]
    complete: bool = True  # False for the remains of a failed build
    database_id: str | None = None  # database identity in its tag
    runs: bool = True  # whether it is not stopped
    image: str = ""  # name of the image that it was built from


class MachineRow(Struct, frozen=True, array_like=True, tag="g"):
    """A machine was created, or was completed."""

    host: str
    machine: SimulatedMachine


class DestroyedRow(Struct, frozen=True, array_like=True, tag="x"):
    """A machine was destroyed."""

    host: str
    instance: str


class HostRow(Struct, frozen=True, array_like=True, tag="h"):
    """A host was enabled, disabled, or rebuilt in another size."""

    host: str
    enabled: bool
    reason: str
    size: HostSize


Row = MachineRow | DestroyedRow | HostRow


class Host:
    """One simulated host, with its plan and its progress."""

    __slots__ = ("disabled_reason", "enabled", "machines", "plan", "size")

    def __init__(self, plan: HostPlan) -> None:
        self.plan = plan
        self.size = plan.size
        self.enabled = True
        self.disabled_reason = ""
        self.machines: dict[str, SimulatedMachine] | None = (
            None  # made when first needed: most of a large fleet is empty
        )

    def row(self) -> HostRow:
        """Return the differences from the plan, for the journal."""
        return HostRow(self.plan.uuid, self.enabled, self.disabled_reason, self.size)


class Fleet:
    """The machines of one service. records: that service's, which are opened before the fleet."""

    def __init__(self, plans: Sequence[HostPlan], records: Records, path: Path | None = None) -> None:
        self._hosts = {plan.uuid: Host(plan) for plan in plans}
        self._journal: Journal[Row] | None = Journal(path, Row, synced=False) if path else None  # type: ignore[arg-type]
        self._listeners: list[Callable[[Sequence[str]], None]] = []
        self._machine_count = 0
        self.records = records

    @classmethod
    def planned(
        cls, config: SimulatedConfig, cell: str, service: str, records: Records, state_dir: str | None = None
    ) -> Fleet:
        """Return the fleet of this configuration, with the same uuids and names each time. Without a directory it is
        in memory.
        """
        path = Path(state_dir) / f"{cell}.{service}.machines" if state_dir else None
        return cls(plan_hosts(config, cell, service), records, path)

    def open(self) -> None:
        """Read the earlier state back. Raises JournalInUse, JournalUnusable."""
        if self._journal is not None:
            for row in self._journal.open():
                self._apply(row)
            if self._journal.damage is not None:
                self._assume_what_is_recorded()
            if self._journal.rows > REWRITE_AFTER + 4 * self._machine_count:
                self._journal.rewrite(self._snapshot())

    def _assume_what_is_recorded(self) -> None:
        """After damage to the journal, assume that machines run which the records have as running."""
        # Their lines may be among the unreadable ones. Otherwise such a machine would be reported as lost, or an older
        # one in its place would be destroyed as a leftover.
        for (host, instance), entry in self.records.running().items():
            found = self.machine(host, instance)
            if host in self._hosts and (found is None or found.attempt < entry.attempt):
                log.error("machine.assumed", host=host, instance=instance, cause=instance, attempt=entry.attempt)
                self.put(host, SimulatedMachine(instance, entry.attempt, {}, database_id=entry.database_id))

    def close(self) -> None:
        """Let go of the file; the machines stay."""
        if self._journal is not None:
            self._journal.close()

    # --- looking

    @property
    def hosts(self) -> Iterable[Host]:
        """All hosts, by name."""
        return self._hosts.values()

    def host(self, uuid: str) -> Host | None:
        """One host."""
        return self._hosts.get(uuid)

    def machine(self, host: str, instance: str) -> SimulatedMachine | None:
        """One machine."""
        found = self._hosts.get(host)
        return None if found is None or found.machines is None else found.machines.get(instance)

    def machines(self) -> Iterator[tuple[str, SimulatedMachine]]:
        """Every (host uuid, machine), half-built ones too: what invariant checks compare with placement."""
        for uuid, host in self._hosts.items():
            for machine in (host.machines or {}).values():
                yield uuid, machine

    # --- what drivers do

    def put(self, host: str, machine: SimulatedMachine) -> None:
        """Add a machine to this host."""
        self._write(MachineRow(host, machine))

    def remove(self, host: str, instance: str) -> None:
        """Remove a machine from this host. Removing a machine that does not exist succeeds."""
        if self.machine(host, instance) is not None:
            self._write(DestroyedRow(host, instance))

    # --- what operators and chaos do

    def disable(self, host: str, reason: str = "disabled by its operator") -> None:
        """Disable the host for new builds."""
        self._change(host, enabled=False, reason=reason)

    def enable(self, host: str) -> None:
        """Enable the host for new builds."""
        self._change(host, enabled=True, reason="")

    def resize(self, host: str, size: HostSize) -> None:
        """Change the size of the host. Running machines stay, even when they no longer fit."""
        self._change(host, size=size)

    def wipe(self, host: str) -> None:
        """Remove all machines of the host without a report, as a reinstallation does."""
        found = self._hosts[host]
        for instance in list(found.machines or ()):
            self._write(DestroyedRow(host, instance))

    def on_change(self, callback: Callable[[Sequence[str]], None]) -> Callable[[], None]:
        """Call back when hosts change; returns what ends that."""
        self._listeners.append(callback)
        return lambda: self._listeners.remove(callback)

    def _change(
        self, uuid: str, *, enabled: bool | None = None, reason: str | None = None, size: HostSize | None = None
    ) -> None:
        host = self._hosts[uuid]
        self._write(
            HostRow(
                uuid,
                host.enabled if enabled is None else enabled,
                host.disabled_reason if reason is None else reason,
                size or host.size,
            )
        )
        for callback in list(self._listeners):
            callback((uuid,))

    # --- the journal

    def _write(self, row: Row) -> None:
        self._apply(row)
        if self._journal is not None:
            self._journal.append((row,))
            if self._journal.rows > REWRITE_AFTER + 4 * self._machine_count:
                self._journal.rewrite(self._snapshot())

    def _apply(self, row: Row) -> None:
        host = self._hosts.get(row.host)
        if host is None:  # the plan has fewer hosts now: the machines there are no longer this service's to report
            return
        match row:
            case MachineRow(_, machine):
                if host.machines is None:
                    host.machines = {}
                self._machine_count += machine.instance_uuid not in host.machines
                host.machines[machine.instance_uuid] = machine
            case DestroyedRow(_, instance):
                if host.machines is not None and host.machines.pop(instance, None) is not None:
                    self._machine_count -= 1
            case HostRow(_, enabled, reason, size):
                host.enabled, host.disabled_reason, host.size = enabled, reason, size

    def _snapshot(self) -> Iterator[Row]:
        for uuid, host in self._hosts.items():
            if not host.enabled or host.size != host.plan.size:
                yield host.row()
            for machine in (host.machines or {}).values():
                yield MachineRow(uuid, machine)
