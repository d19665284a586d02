"""The fences of a cell on record, and the leases of its compute services with their leader."""

# One conductor of a cell is the leader: it records the state of services, and publishes it. It holds one row for a few
# seconds at a time, by the database's clock. Each change of leader has a higher term, also after a backup was restored
# or commits were lost: the service states of a former leader that has not noticed yet are ignored, and its writes are
# refused.

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from bus.contracts.operations import FenceState
from cell_conductor.state.fence import Fence, StaleCount
from cell_conductor.state.lease import Lease, next_leader
from cell_conductor.store.keyed import KeyedRows, KeyedStore, Lock, in_transaction
from cell_conductor.store.keyed_tables import FENCES, LEASES


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
            kept = replace(kept, stale=before.stale)
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
    async def record_empty(self, rows: KeyedRows, host_uuid: str, shown: Mapping[str, StaleCount]) -> None:
        """A scan from after these became stale, by service, shows that the host has none of them."""
        known = await rows.find(FENCES, [host_uuid], Lock.UPDATE)
        for one in known.values():
            left = {service: given for service, given in one.stale.items() if shown.get(service) != given}
            if left != one.stale:
                await rows.put(FENCES, [replace(one, stale=left)], over=known)

    @in_transaction
    async def unfence(self, rows: KeyedRows, host_uuid: str, version: int, now: float) -> bool:
        """End a fence that is to be ended by this decision, once its host has shown that it has nothing of what was
        stale there, and no evacuation from it has commanded a destination. False: it stays.
        """
        known = await rows.find(FENCES, [host_uuid], Lock.UPDATE)  # before the evacuations are read: see `rely_on`
        to_end = [one for one in known.values() if one.unfencing and one.version == version and not one.stale]
        if not to_end or await rows.is_needed(host_uuid):
            return False
        await rows.put(FENCES, [replace(one, state=FenceState.UNFENCED, at=now) for one in to_end], over=known)
        return True

    @in_transaction
    async def purge_ended(self, rows: KeyedRows, before: float, limit: int) -> int:
        """Delete fences that were ended before this time, up to a bound; returns how many."""
        # A message of an older decision is not under way for so long, and no scheduler repeats one that was restored
        # from a backup since. One that cannot be read stays until its host is decided on again.

        def is_over(fence: Fence) -> bool:
            return fence.state is FenceState.UNFENCED and fence.at < before and not fence.stale

        hosts = [one.host_uuid for one in await rows.read(FENCES) if is_over(one)][:limit]
        known = await rows.find(FENCES, hosts, Lock.UPDATE)
        removed = [host for host, one in known.items() if is_over(one)]
        await rows.delete(FENCES, removed)
        return len(removed)

    @in_transaction
    async def touching(self, rows: KeyedRows, host_uuid: str, after: str, limit: int) -> list[str]:
        """The instances that have, or may have, a machine on this host: in order of uuids, above `after`."""
        return await rows.touching(host_uuid, after, limit)


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
