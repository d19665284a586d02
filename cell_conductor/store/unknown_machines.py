"""The unknown machines of a cell on record, and operators' decisions on them."""

# Machines are recorded with each report that has them, and deleted when their host is seen without them. An operator's
# decision on a quarantined machine (`destroy`, `protect` or `adopt`, by whom and when) stands beside it.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from bus.contracts.operations import FenceState
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.unknown_machine import UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed import KeyedRows, KeyedStore, Lock, in_transaction
from cell_conductor.store.keyed_tables import (
    BREAKERS,
    FENCES,
    UNKNOWN_MACHINES,
    DecidedMachine,
    MachineKey,
    UnknownMachineRecord,
    with_report,
)


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

        def is_referenced(record: UnknownMachineRecord) -> bool:
            machine = record.machine
            return machine.kind is UnknownMachineKind.QUARANTINED and any(
                one.host_uuid in (None, machine.host_uuid) and one.attempt in (None, machine.attempt)
                for one in named.get(machine.uuid, ())
            )

        incarnation, places = (
            await rows.incarnation(),
            [one.location for one in await rows.read(UNKNOWN_MACHINES) if is_referenced(one)],
        )
        known = await rows.find(UNKNOWN_MACHINES, places, Lock.UPDATE)
        decided = [
            replace(one, decision=decision, decided_by=by, decided_at=now, incarnation=incarnation)
            for one in known.values()
            if is_referenced(one)
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


async def rely_on(
    rows: KeyedRows, hosts: Sequence[str], stale: Mapping[str, Sequence[str]], at: float, proofs: Sequence[str]
) -> bool:
    """As `Transaction.rely_on`."""
    known = await rows.find(FENCES, hosts, Lock.UPDATE if stale else Lock.SHARE)
    fences = {host: one for host, one in known.items() if one.state is not FenceState.UNFENCED}
    if any(host not in fences or (fences[host].unfencing and host in proofs) for host in hosts):
        return False
    if stale:
        counted = [fences[host].with_stale(services, at) for host, services in stale.items()]
        await rows.put(FENCES, counted, over=known)
    return True
