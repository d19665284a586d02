"""The machines on the hosts of a service: the driver's answer, compared with the record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice

import structlog

from bus.contracts.cell import UNKNOWN_ATTEMPT, Running
from bus.yielding import YieldingParts
from compute_agent.driver import Driver, DriverHost, Machine
from compute_agent.records.attempt import LIVE, AttemptPhase, HostAttempt, is_leaving, lost
from compute_agent.records.records import Records

log = structlog.get_logger()

HOSTS_AT_ONCE = 1_000  # compared with the record in one turn of the event loop, in about a millisecond


class MachineScanner:
    """One service's. hosts: the uuids of the hosts that builds are accepted for. on_listed: called with the machines of
    the hosts, each time they are read.
    """

    def __init__(
        self,
        driver: Driver,
        records: Records,
        on_listed: Callable[[Mapping[str, Sequence[Machine]]], None] = lambda _: None,
    ) -> None:
        self.hosts: frozenset[str] = frozenset()
        self._driver = driver
        self._records = records
        self._on_listed = on_listed
        self._names: dict[str, str] = {}
        self._scanned_hosts: dict[str, None] = {}  # in the order in which they were first read
        self._unrecorded: dict[str, list[Machine]] = {}  # by host: machines with a tag that the record does not have

    async def load_hosts(self) -> Sequence[DriverHost]:
        """Read from the driver which hosts there are; from now on builds are accepted for these, and only these."""
        hosts, names = await self._driver.hosts(), dict[str, str]()
        async for part in YieldingParts(hosts, HOSTS_AT_ONCE):
            names |= {host.uuid: host.name for host in part}
        self.hosts, self._names = frozenset(names), names
        for host in [one for one in self._scanned_hosts if one not in self.hosts]:
            del self._scanned_hosts[host]
        return hosts

    def name_of(self, host: str) -> str:
        """The name of a host; its uuid where that is all that is known."""
        return self._names.get(host) or host

    def list_scanned_hosts(self, after: int, most: int) -> tuple[str, ...]:
        """A page of the hosts whose machines have been read: what is unrecorded there is known. In the order in which
        they were first read; one may be missing where hosts have been taken out between two pages.
        """
        return tuple(islice(self._scanned_hosts, after, after + most))

    def list_unrecorded(self, instances: Collection[str]) -> list[Machine]:
        """Machines of these instances that carry a tag, as their hosts last listed them, that the record does not have
        and that no command has ended. The record may be older than the machine, or have taken it for lost.
        """
        return [
            one
            for machines in self._unrecorded.values()
            for one in machines
            if one.instance_uuid in instances and self._differs_from_record(one)
        ]

    def _differs_from_record(self, machine: Machine) -> bool:
        known = self._records.get((machine.host_uuid, machine.instance_uuid))
        if machine.database_id is None or known is None:
            return machine.database_id is not None
        is_known = known.phase in LIVE and known.attempt >= (machine.attempt or UNKNOWN_ATTEMPT)
        is_own = known.database_id in (None, machine.database_id)
        return not (is_known and is_own) and not is_ended(machine, known)

    def on_scanned(self, listed: Mapping[str, Sequence[Machine]]) -> None:
        """Remember of what these hosts carry the part that is not on record."""
        self._scanned_hosts.update(dict.fromkeys(listed))
        for host, machines in listed.items():
            if unrecorded := [one for one in machines if self._differs_from_record(one)]:
                self._unrecorded[host] = unrecorded
            else:
                self._unrecorded.pop(host, None)

    async def running(self, hosts: Sequence[str] | None = None) -> dict[str, list[Running]]:
        """The machines of each host that was seen; machines on record that their hosts do not carry
        are noted as lost.
        """
        before = self._records.running()
        listed = await self._driver.list(hosts)
        self._on_listed(listed)
        result: dict[str, list[Running]] = {}
        async for part in YieldingParts(listed.items(), HOSTS_AT_ONCE):
            self.on_scanned(dict(part))
            for host, machines in part:
                reserved = {one.instance_uuid for one in self._records.reserved(host)}
                keyed = [((host, one.instance_uuid), one) for one in machines]
                result[host] = [
                    _running(one, before.pop(key, None) or self._records.get(key), reserved=key[1] in reserved)
                    for key, one in keyed
                ]
        if hosts is None:
            for key, entry in before.items():
                # Its host was seen without it, and the record has not changed since before that: really lost.
                if key[0] in listed and self._records.get(key) is entry:
                    log.warning("machine.lost", instance=key[1], cause=key[1], host=key[0])
                    self._records.put(key, lost(entry))
        return result


def is_of_attempt(entry: HostAttempt, machine: Machine) -> bool:
    """Whether the machine's tag names this very attempt."""
    return (machine.attempt, machine.database_id) == (entry.attempt, entry.database_id)


def is_ended(machine: Machine, known: HostAttempt | None) -> bool:
    """Whether a command on record has ended the attempt that the machine's tag names."""
    if machine.attempt is None or known is None:
        return False
    return machine.attempt <= known.max_ended_attempt and known.database_id in (None, machine.database_id)


def _running(machine: Machine, known: HostAttempt | None, *, reserved: bool) -> Running:
    """A machine as it is reported: by its tag; the attempt of one without a tag is its record's."""
    attempt = machine.attempt if machine.attempt is not None else (known.attempt if known else UNKNOWN_ATTEMPT)
    # Until its driver has ended the build, the result has not arrived yet, nor has the driver's warning.
    is_building = known is not None and known.phase is AttemptPhase.BUILDING and is_of_attempt(known, machine)
    return Running(
        instance_uuid=machine.instance_uuid,
        attempt=attempt,
        database_id=machine.database_id,
        built=machine.built and not is_building,
        # One that is left as it is: all that a command could do about it is done.
        destroying=is_leaving(known, attempt) or (machine.tag_only and is_ended(machine, known)),
        stopped=not machine.runs,
        reserved=reserved,
    )
