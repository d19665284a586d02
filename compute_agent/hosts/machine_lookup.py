"""The machines that hosts of one service list of certain instances, for a move that is to go back to one of them."""

from __future__ import annotations

from bus.contracts.cell import AttemptOnHost, LookUpMachines, MachineLookupResult
from compute_agent.driver import Driver, Machine
from compute_agent.hosts.scan import MachineScanner
from compute_agent.records.attempt import AttemptPhase, has_machine
from compute_agent.records.records import Records


class MachineLookup:
    """One service's. It reads; nothing is changed."""

    def __init__(self, *, service: str, driver: Driver, records: Records, scanner: MachineScanner) -> None:
        self._service = service
        self._driver = driver
        self._records = records
        self._scanner = scanner

    async def look_up(self, query: LookUpMachines) -> MachineLookupResult:
        """The complete machines that these hosts list, and that no command has ended: a record alone proves none.
        Raises DriverUnavailable.
        """
        wanted, database_id = frozenset(query.instance_uuids), query.database_id
        listed = await self._driver.list(sorted(self._scanner.hosts.intersection(query.on_hosts)))
        found = [
            AttemptOnHost(
                instance_uuid=one.instance_uuid,
                host_uuid=one.host_uuid,
                service=self._service,
                attempt=one.attempt or 0,
            )
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
