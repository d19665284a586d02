"""The record of machines that no record of an instance explains, of the breakers, of fences, and of the leases of
compute services.
"""

# Machines are recorded with each report that has them, and deleted when their host is seen without them. An operator's
# decision on a quarantined machine (`destroy`, `protect` or `adopt`, by whom and when) stands beside it.
# One conductor of a cell is the leader: it records the state of services, and publishes it. It holds one row for a few
# seconds at a time, by the database's clock. Each change of leader has a higher term, also after a backup was restored
# or commits were lost: the service states of a former leader that has not noticed yet are ignored, and its writes are
# refused.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.cell import UNKNOWN_ATTEMPT
from bus.contracts.operations import FenceState
from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.fences import AbandonedMachines, Fence
from cell_conductor.domain.leases import Lease, next_leader
from cell_conductor.domain.report import UNREADABLE, UnknownMachine, UnknownMachineKind, rescan_of

from .keyed import KeyedRows, KeyedStore, KeyedTable, Lock, in_transaction

DESTROY = "destroy"
PROTECT = "protect"
ADOPT = "adopt"

MachineKey = tuple[str, str]  # (host uuid, instance uuid)


class DecidedMachine(Struct, frozen=True):
    """The machines of an instance that a decision is about."""

    uuid: str
    host_uuid: str | None = None  # only the machine on this host (None: on any)
    attempt: int | None = None  # only while it has this attempt (None: any)


class UnknownMachineRecord(Struct, frozen=True, kw_only=True):
    """One machine on record."""

    machine: UnknownMachine
    service: str
    first_seen: float
    last_seen: float
    decision: str = ""  # an operator's decision ("": there is none)
    decided_by: str = ""
    decided_at: float = 0.0
    incarnation: int = 0  # incarnation of the database at the decision
    is_new: bool = False  # whether this call recorded it

    @property
    def location(self) -> MachineKey:
        """Where it is."""
        return self.machine.host_uuid, self.machine.uuid

    @property
    def rescan(self) -> str:
        """Of the rescan that shows whether it is there still."""
        return rescan_of("unknown_machine", *self.location, self.last_seen)


AT = ("host_uuid", "instance_uuid")
# Of one that cannot be read the operator may have said that it is kept.
UNKNOWN_MACHINES: KeyedTable[MachineKey, UnknownMachineRecord] = KeyedTable(
    "unknown_machines",
    AT,
    UnknownMachineRecord,
    attrgetter("location"),
    lambda place: UnknownMachineRecord(
        machine=UnknownMachine(place[1], UNKNOWN_ATTEMPT, place[0], UnknownMachineKind.QUARANTINED, UNREADABLE),
        service="",
        first_seen=0.0,
        last_seen=0.0,
        decision=PROTECT,
    ),
)
BREAKERS: KeyedTable[str, Breaker] = KeyedTable(
    "breakers", ("service",), Breaker, attrgetter("service"), lambda service: Breaker(service=service, tripped_at=0.0)
)
# Of hosts that an operator has fenced. Who abandons a machine there holds the fence and counts it; it is ended when a
# later scan shows none of those, and stays on record for a while: the message of an older decision would fence a host
# in use.
# One that cannot be read proves nothing: the host is to be fenced again, and may have a machine to destroy.
FENCES: KeyedTable[str, Fence] = KeyedTable(
    "fences",
    ("host_uuid",),
    Fence,
    attrgetter("host_uuid"),
    lambda host: Fence(
        host_uuid=host, host="", version=0, state=FenceState.UNFENCED, abandoned={"": AbandonedMachines(1, 0.0)}
    ),
)
# A service whose lease cannot be read may be up, and falls silent as any.
LEASES: KeyedTable[str, Lease] = KeyedTable(
    "leases", ("service",), Lease, attrgetter("service"), lambda service: Lease(service=service, epoch=0)
)
KEYED: tuple[KeyedTable[Any, Any], ...] = (UNKNOWN_MACHINES, BREAKERS, FENCES, LEASES)


def with_report(
    before: UnknownMachineRecord | None, machine: UnknownMachine, service: str, now: float, incarnation: int
) -> UnknownMachineRecord:
    """The record of a machine that is listed. A decision holds for one attempt only, and until the database is
    restored.
    """
    # Another attempt may have come since a restore, which is lost. But that a machine is kept holds: no attempt and no
    # tag shows that it is gone.
    if before is None:
        return UnknownMachineRecord(machine=machine, service=service, first_seen=now, last_seen=now)
    is_same = (before.machine.attempt, before.machine.kind, before.incarnation) == (
        machine.attempt,
        machine.kind,
        incarnation,
    )
    decision = before.decision if is_same or before.decision == PROTECT else ""
    return replace(before, machine=machine, service=service, last_seen=now, decision=decision)


class Safety(KeyedStore):
    """Machines that no record explains, and breakers."""

    @in_transaction
    async def record(
        self, rows: KeyedRows, service: str, machines: Sequence[UnknownMachine], now: float
    ) -> list[UnknownMachineRecord]:
        """Put these on record, or record that they are still there. Raises Unrecognised."""
        await rows.expect_same_database()
        incarnation = await rows.incarnation()
        listed = {(one.host_uuid, one.uuid): one for one in machines}
        known = await rows.find(UNKNOWN_MACHINES, listed, Lock.UPDATE)
        made = [with_report(known.get(place), machine, service, now, incarnation) for place, machine in listed.items()]
        await rows.put(UNKNOWN_MACHINES, made, over=known)
        return [replace(one, is_new=one.location not in known) for one in made]

    @in_transaction
    async def records(self, rows: KeyedRows) -> list[UnknownMachineRecord]:
        """All on record, by host and instance."""
        return await rows.read(UNKNOWN_MACHINES)

    @in_transaction
    async def delete(self, rows: KeyedRows, records: Sequence[UnknownMachineRecord]) -> list[MachineKey]:
        """Delete these, which are not there any more; returns those that were on record just so: no operator has
        decided about them meanwhile, and no report has listed them.
        """
        known = await rows.find(UNKNOWN_MACHINES, [one.location for one in records], Lock.UPDATE)
        deleted = sorted(one.location for one in records if known.get(one.location) == one)
        await rows.delete(UNKNOWN_MACHINES, deleted)
        return deleted

    @in_transaction
    async def decide(
        self, rows: KeyedRows, machines: Sequence[DecidedMachine], decision: str, by: str, now: float
    ) -> list[MachineKey]:
        """Record an operator's decision on those of these machines that are in quarantine; returns which they are."""
        named = defaultdict(list)
        for one in machines:
            named[one.uuid].append(one)

        def is_meant(record: UnknownMachineRecord) -> bool:
            machine = record.machine
            return machine.kind is UnknownMachineKind.QUARANTINED and any(
                one.host_uuid in (None, machine.host_uuid) and one.attempt in (None, machine.attempt)
                for one in named.get(machine.uuid, ())
            )

        incarnation, places = (
            await rows.incarnation(),
            [one.location for one in await rows.read(UNKNOWN_MACHINES) if is_meant(one)],
        )
        known = await rows.find(UNKNOWN_MACHINES, places, Lock.UPDATE)
        decided = [
            replace(one, decision=decision, decided_by=by, decided_at=now, incarnation=incarnation)
            for one in known.values()
            if is_meant(one)
        ]
        await rows.put(UNKNOWN_MACHINES, decided, over=known)
        return [one.location for one in decided]

    @in_transaction
    async def breaker(self, rows: KeyedRows, service: str) -> Breaker | None:
        """The record of this service's breaker."""
        return (await rows.find(BREAKERS, [service])).get(service)

    @in_transaction
    async def breakers(self, rows: KeyedRows) -> list[Breaker]:
        """All of them, by service."""
        return await rows.read(BREAKERS)

    @in_transaction
    async def trip(self, rows: KeyedRows, breaker: Breaker, *, over: Breaker | None = None) -> None:
        """Put a breaker on record. over: only in the place of this one, as it was read; None: of any."""
        known = await rows.find(BREAKERS, [breaker.service], Lock.UPDATE)
        if over is None or known.get(breaker.service) == over:
            await rows.put(BREAKERS, [breaker], over=known)

    @in_transaction
    async def reset(
        self, rows: KeyedRows, service: str, by: str, now: float, *, tripped_at: float | None = None
    ) -> bool:
        """Record that an operator resets it; False when it is not open. tripped_at: the one that the operator has seen,
        and no later one, which names other machines; None: any.
        """
        known = await rows.find(BREAKERS, [service], Lock.UPDATE)
        seen = [one for one in known.values() if one.is_open and tripped_at in (None, one.tripped_at)]
        await rows.put(BREAKERS, [replace(one, reset_at=now, reset_by=by) for one in seen], over=known)
        return bool(seen)


class FenceStore(KeyedStore):
    """The fences on record. The effects of a fence are recorded by `rely_on`, which holds it."""

    @in_transaction
    async def fences(self, rows: KeyedRows) -> list[Fence]:
        """All that are in force, by host."""
        return [one for one in await rows.read(FENCES) if one.state is not FenceState.UNFENCED]

    @in_transaction
    async def put(self, rows: KeyedRows, fence: Fence) -> Fence:
        """Record a decision, unless one at least as new is on record; returns the decision that stands then."""
        # One to end what is no fence has ended no step here: it is ended. What was found to run there stays with a
        # fence, as long as the service that found it is on record: one that is gone for good never reports anything
        # else.
        known = await rows.find(FENCES, [fence.host_uuid], Lock.UPDATE)
        before = known.get(fence.host_uuid)
        if before is not None and before.version >= fence.version:
            return before
        is_fence = before is not None and before.state is not FenceState.UNFENCED
        if fence.unfencing and not is_fence:
            fence = replace(fence, state=FenceState.UNFENCED)
        kept = fence
        if before is not None and is_fence:
            leases = await rows.find(LEASES, before.running) if before.running else {}
            known_runs = {service: runs for service, runs in before.running.items() if service in leases}
            kept = replace(fence, running=known_runs, since=before.since)
        if before is not None and fence.state is not FenceState.UNFENCED:
            kept = replace(kept, abandoned=before.abandoned)
        await rows.put(FENCES, [kept], over=known)
        return fence

    @in_transaction
    async def record_running(
        self, rows: KeyedRows, scanned: Fence, service: str, attempts: dict[str, int], passed: Collection[str]
    ) -> None:
        """Record what a scan from after this decision, if it is the newest, shows to run (`Fence.with_running`)."""
        known = await rows.find(FENCES, [scanned.host_uuid], Lock.UPDATE)
        fences = [one for one in known.values() if one.state is not FenceState.UNFENCED]
        noted = [one.with_running(service, attempts, passed) for one in fences if one.version == scanned.version]
        await rows.put(FENCES, [one for one in noted if one not in fences], over=known)

    @in_transaction
    async def record_empty(self, rows: KeyedRows, host_uuid: str, shown: Mapping[str, AbandonedMachines]) -> None:
        """A scan from after these were abandoned, by service, shows that the host has none of them."""
        known = await rows.find(FENCES, [host_uuid], Lock.UPDATE)
        for one in known.values():
            left = {service: given for service, given in one.abandoned.items() if shown.get(service) != given}
            if left != one.abandoned:
                await rows.put(FENCES, [replace(one, abandoned=left)], over=known)

    @in_transaction
    async def unfence(self, rows: KeyedRows, host_uuid: str, version: int, now: float) -> bool:
        """End a fence that is to be ended by this decision, once its host has shown that it has nothing of what was
        abandoned there, and no evacuation from it has commanded a destination. False: it stays.
        """
        known = await rows.find(FENCES, [host_uuid], Lock.UPDATE)  # before the evacuations are read: see `rely_on`
        meant = [one for one in known.values() if one.unfencing and one.version == version and not one.abandoned]
        if not meant or await rows.is_needed(host_uuid):
            return False
        await rows.put(FENCES, [replace(one, state=FenceState.UNFENCED, at=now) for one in meant], over=known)
        return True

    @in_transaction
    async def purge_ended(self, rows: KeyedRows, before: float, limit: int) -> int:
        """Delete fences that were ended before this time, up to a bound; returns how many."""
        # A message of an older decision is not under way for so long; a scheduler that still publishes one was
        # restored, and means it. One that cannot be read stays until its host is decided on again.

        def is_over(fence: Fence) -> bool:
            return fence.state is FenceState.UNFENCED and fence.at < before and not fence.abandoned

        hosts = [one.host_uuid for one in await rows.read(FENCES) if is_over(one)][:limit]
        known = await rows.find(FENCES, hosts, Lock.UPDATE)
        removed = [host for host, one in known.items() if is_over(one)]
        await rows.delete(FENCES, removed)
        return len(removed)

    @in_transaction
    async def touching(self, rows: KeyedRows, host_uuid: str, after: str, limit: int) -> list[str]:
        """The instances that have, or may have, a machine on this host: in order of uuids, above `after`."""
        return await rows.touching(host_uuid, after, limit)


async def rely_on(
    rows: KeyedRows, hosts: Sequence[str], abandoned: Mapping[str, Sequence[str]], at: float, proofs: Sequence[str]
) -> bool:
    """As `Transaction.rely_on`."""
    known = await rows.find(FENCES, hosts, Lock.UPDATE if abandoned else Lock.SHARE)
    fences = {host: one for host, one in known.items() if one.state is not FenceState.UNFENCED}
    if any(host not in fences or (fences[host].unfencing and host in proofs) for host in hosts):
        return False
    if abandoned:
        counted = [fences[host].with_abandoned(services, at) for host, services in abandoned.items()]
        await rows.put(FENCES, counted, over=known)
    return True


class LeaseStore(KeyedStore):
    """The leases on record, and their leader."""

    async def hold_leadership(self, process: str, for_s: float, term: int | None) -> int | None:
        """Become or remain the leader for this long from now on (`next_leader`); returns the term, or None: another
        conductor is the leader, or was first.
        """
        before, now = await self.keyed.leader()
        after = next_leader(before, process, term, now, for_s)
        return after.term if after is not None and await self.keyed.write_leader(before, after) else None

    @in_transaction
    async def leases(self, rows: KeyedRows) -> list[Lease]:
        """All on record, by service. Raises Unrecognised."""
        await rows.expect_same_database()
        return await rows.read(LEASES)

    async def record(self, term: int, leases: Iterable[Lease], removed: Collection[str] = ()) -> bool:
        """Record these, and delete those of services that are gone. False: there is a newer term, or the database was
        restored, and nothing was written.
        """
        return await self.keyed.record(
            term, {one.service: one for one in sorted(leases, key=LEASES.key)}, sorted(removed)
        )

    @in_transaction
    async def delete(self, rows: KeyedRows, service: str) -> bool:
        """Delete the lease of a service, whatever its state. False: there is none."""
        known = await rows.find(LEASES, [service], Lock.UPDATE)
        await rows.delete(LEASES, known)
        return bool(known)
