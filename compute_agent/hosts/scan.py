"""The machines on the hosts of a service: the driver's answer, compared with the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import structlog

from bus.contracts.cell import UNKNOWN_ATTEMPT, Running
from bus.yielding import YieldingParts
from compute_agent.driver import Driver, DriverHost, Machine
from compute_agent.records.attempt import HostAttempt, is_leaving, is_lost, listed_again, lost, may_be_built
from compute_agent.records.records import Key, Records

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

    async def load_hosts(self) -> Sequence[DriverHost]:
        """Read from the driver which hosts there are; from now on builds are accepted for these, and only these."""
        hosts, names = await self._driver.hosts(), dict[str, str]()
        async for part in YieldingParts(hosts, HOSTS_AT_ONCE):
            names |= {host.uuid: host.name for host in part}
        self.hosts, self._names = frozenset(names), names
        return hosts

    def name_of(self, host: str) -> str:
        """The name of a host; its uuid where that is all that is known."""
        return self._names.get(host) or host

    async def running(self, hosts: Sequence[str] | None = None) -> dict[str, list[Running]]:
        """The machines of each host that was seen; machines on record that their hosts do not carry
        are noted as lost, until they are listed again.
        """
        before = self._records.running()
        listed = await self._driver.list(hosts)
        self._on_listed(listed)
        result: dict[str, list[Running]] = {}
        async for part in YieldingParts(listed.items(), HOSTS_AT_ONCE):
            for host, machines in part:
                reserved = {one.instance_uuid for one in self._records.reserved(host)}
                keyed = [((host, one.instance_uuid), one) for one in machines]
                result[host] = [
                    _running(one, before.pop(key, None) or self._unlost(key, one), reserved=key[1] in reserved)
                    for key, one in keyed
                ]
        if hosts is None:
            for key, entry in before.items():
                # Its host was seen without it, and the record has not changed since before that: really lost.
                if key[0] in listed and self._records.get(key) is entry:
                    log.warning("machine.lost", instance=key[1], cause=key[1], host=key[0])
                    self._records.put(key, lost(entry))
        return result

    def _unlost(self, key: Key, machine: Machine) -> HostAttempt | None:
        """What is on record of a machine that is listed: it is not lost."""
        known = self._records.get(key)
        is_complete = machine.built and not machine.tag_only
        if known is not None and is_lost(known) and is_complete and is_of_attempt(known, machine):
            known = listed_again(known)
            self._records.put(key, known)
        return known


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
    # Until its driver has ended the build, the result has not arrived yet, nor has the driver's warning. What comes up
    # after the build has failed is awaited by nobody.
    is_awaited = known is None or not is_of_attempt(known, machine) or may_be_built(known)
    return Running(
        instance_uuid=machine.instance_uuid,
        attempt=attempt,
        database_id=machine.database_id,
        built=machine.built and is_awaited,
        # One that is left as it is: all that a command could do about it is done.
        destroying=is_leaving(known, attempt) or (machine.tag_only and is_ended(machine, known)),
        stopped=not machine.runs,
        reserved=reserved,
    )
