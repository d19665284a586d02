"""The machines that the hosts of one service have of certain instances, for a conductor whose record may have lost
some.
"""

from __future__ import annotations

from bus.contracts.cell import MAX_LOOKED_AT_ONCE, LookedUpMachine, LookUpMachines, MachineLookupResult
from compute_agent.driver import Driver, Machine
from compute_agent.hosts.scan import MachineScanner
from compute_agent.records.attempt import AttemptPhase, HostAttempt, has_machine
from compute_agent.records.records import Key, Records


class MachineLookup:
    """One service's. It reads; nothing is changed."""

    def __init__(self, *, service: str, driver: Driver, records: Records, scanner: MachineScanner) -> None:
        self._service = service
        self._driver = driver
        self._records = records
        self._scanner = scanner

    async def look_up(self, query: LookUpMachines) -> MachineLookupResult:
        """Every machine of these instances with this database's tag that no command has ended. Raises
        DriverUnavailable.
        """
        # Also those that are still being built, and those that the record does not have but that their hosts listed
        # when these were last looked at, as the reports name them. A thorough query is answered with those of other
        # databases as well, and one that names hosts with the machines that these list now.
        if query.on_hosts:
            return await self._on_hosts(query)
        wanted, database_id, thorough = frozenset(query.instance_uuids), query.database_id, query.thorough
        recorded = {
            key: entry
            for key, entry in self._records.live(wanted).items()
            if has_machine(entry, (entry.database_id or database_id) if thorough else database_id)
        }
        listed_only = {
            (one.host_uuid, one.instance_uuid): one
            for one in self._scanner.list_unrecorded(wanted)
            if (thorough or one.database_id == database_id) and not one.tag_only
        }
        recorded = {key: entry for key, entry in recorded.items() if key not in listed_only}
        places = sorted({host for host, _ in recorded})
        listed = await self._driver.list(places) if places else {}
        seen = {(one.host_uuid, one.instance_uuid): one for machines in listed.values() for one in machines}
        found = [self._recorded(key, entry, seen.get(key), database_id) for key, entry in recorded.items()]
        found += [self._listed(one, database_id) for one in listed_only.values()]
        hosts, more = self._looked_at(query.hosts_after) if thorough else ((), False)
        return MachineLookupResult(machines=tuple(found), hosts=hosts, more=more)

    async def _on_hosts(self, query: LookUpMachines) -> MachineLookupResult:
        """The complete machines that these hosts list, and that no command has ended: a record alone proves none."""
        wanted, database_id = frozenset(query.instance_uuids), query.database_id
        listed = await self._driver.list(sorted(self._scanner.hosts.intersection(query.on_hosts)))
        found = [
            self._listed(one, database_id)
            for machines in listed.values()
            for one in machines
            if one.instance_uuid in wanted
            and one.database_id == database_id
            and one.built
            and self._is_kept(one, database_id)
        ]
        hosts = tuple(host for host in query.on_hosts if host in listed)
        return MachineLookupResult(machines=tuple(found), hosts=hosts)

    def _is_kept(self, machine: Machine, database_id: str) -> bool:
        entry = self._records.get((machine.host_uuid, machine.instance_uuid))
        if entry is None:
            return not machine.tag_only
        return (
            entry.attempt == machine.attempt and entry.phase is AttemptPhase.RUNNING and has_machine(entry, database_id)
        )

    def _looked_at(self, after: int) -> tuple[tuple[str, ...], bool]:
        """A page of the hosts that have been looked at, and whether there are others."""
        found = self._scanner.list_scanned_hosts(after, MAX_LOOKED_AT_ONCE + 1)
        return found[:MAX_LOOKED_AT_ONCE], len(found) > MAX_LOOKED_AT_ONCE

    def _recorded(self, key: Key, entry: HostAttempt, machine: Machine | None, database_id: str) -> LookedUpMachine:
        return LookedUpMachine(
            instance_uuid=key[1],
            host_uuid=key[0],
            host=self._scanner.name_of(key[0]),
            service=self._service,
            attempt=entry.attempt,
            built=entry.phase is AttemptPhase.RUNNING,
            project_id=entry.project or None,
            allocations=_taken(machine),
            foreign=entry.database_id not in (None, database_id),
        )

    def _listed(self, machine: Machine, database_id: str) -> LookedUpMachine:
        return LookedUpMachine(
            instance_uuid=machine.instance_uuid,
            host_uuid=machine.host_uuid,
            host=self._scanner.name_of(machine.host_uuid),
            service=self._service,
            attempt=machine.attempt or 0,
            built=machine.built,
            allocations=_taken(machine),
            foreign=machine.database_id != database_id,
        )


def _taken(machine: Machine | None) -> dict[str, dict[str, int]] | None:
    if machine is None or machine.allocations is None:
        return None
    return {provider: dict(amounts) for provider, amounts in machine.allocations.items()}
