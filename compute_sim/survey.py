"""The machines on the hosts of a service: the driver's answer, compared with the record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice

import structlog

from bus.contracts.cell import UNKNOWN_ATTEMPT, Running
from bus.turns import InParts
from compute_sim.domain.attempts import LIVE, Entry, Phase, is_leaving, lost
from compute_sim.driver import Driver, DriverHost, Machine
from compute_sim.records import Records

log = structlog.get_logger()

HOSTS_AT_ONCE = 1_000  # compared with the record in one turn of the event loop, in about a millisecond


class Survey:
    """One service's. hosts: the uuids of the hosts that builds are accepted for.

    on_listed: called with the machines of the hosts, each time they are read.
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
        self._listed: dict[str, None] = {}  # in the order in which they were first read
        self._beside: dict[str, list[Machine]] = {}  # by host: machines with a mark that the record does not have

    async def load_hosts(self) -> Sequence[DriverHost]:
        """Read from the driver which hosts there are; from now on builds are accepted for these, and only these."""
        hosts, names = await self._driver.hosts(), dict[str, str]()
        async for part in InParts(hosts, HOSTS_AT_ONCE):
            names |= {host.uuid: host.name for host in part}
        self.hosts, self._names = frozenset(names), names
        for host in [one for one in self._listed if one not in self.hosts]:
            del self._listed[host]
        return hosts

    def name_of(self, host: str) -> str:
        """The name of a host; its uuid where that is all that is known."""
        return self._names.get(host) or host

    def listed(self, after: int, most: int) -> tuple[str, ...]:
        """A page of the hosts whose machines have been read: what is unrecorded there is known. In the order in which
        they were first read; one may be missing where hosts have been taken out between two pages.
        """
        return tuple(islice(self._listed, after, after + most))

    def beside_record(self, instances: Collection[str]) -> list[Machine]:
        """Machines of these instances that carry a mark, as their hosts last listed them, that the record does not have
        and that no order has ended. The record may be older than the machine, or have taken it for lost.
        """
        return [
            one
            for machines in self._beside.values()
            for one in machines
            if one.instance_uuid in instances and self._is_beside(one)
        ]

    def _is_beside(self, machine: Machine) -> bool:
        known = self._records.get((machine.host_uuid, machine.instance_uuid))
        if machine.deployment is None or known is None:
            return machine.deployment is not None
        is_known = known.phase in LIVE and known.attempt >= (machine.attempt or UNKNOWN_ATTEMPT)
        is_own = known.deployment in (None, machine.deployment)
        return not (is_known and is_own) and not is_fenced(machine, known)

    def note_listed(self, listed: Mapping[str, Sequence[Machine]]) -> None:
        """Remember of what these hosts carry the part that is not on record."""
        self._listed.update(dict.fromkeys(listed))
        for host, machines in listed.items():
            if beside := [one for one in machines if self._is_beside(one)]:
                self._beside[host] = beside
            else:
                self._beside.pop(host, None)

    async def running(self, hosts: Sequence[str] | None = None) -> dict[str, list[Running]]:
        """The machines of each host that was seen; machines on record that their hosts do not carry
        are noted as lost.
        """
        before = self._records.running()
        listed = await self._driver.list(hosts)
        self._on_listed(listed)
        result: dict[str, list[Running]] = {}
        async for part in InParts(listed.items(), HOSTS_AT_ONCE):
            self.note_listed(dict(part))
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


def made_by(entry: Entry, machine: Machine) -> bool:
    """Whether the machine's mark names this very attempt."""
    return (machine.attempt, machine.deployment) == (entry.attempt, entry.deployment)


def is_fenced(machine: Machine, known: Entry | None) -> bool:
    """Whether an order on record has ended the attempt that the machine's mark names."""
    if machine.attempt is None or known is None:
        return False
    return machine.attempt <= known.fence and known.deployment in (None, machine.deployment)


def _running(machine: Machine, known: Entry | None, *, reserved: bool) -> Running:
    """A machine as it is reported: by its mark; the attempt of one without a mark is its record's."""
    attempt = machine.attempt if machine.attempt is not None else (known.attempt if known else UNKNOWN_ATTEMPT)
    # Until its driver has ended the build, the result has not arrived yet, nor has the driver's remark.
    is_building = known is not None and known.phase is Phase.BUILDING and made_by(known, machine)
    return Running(
        instance_uuid=machine.instance_uuid,
        attempt=attempt,
        deployment=machine.deployment,
        built=machine.built and not is_building,
        # One that is left as it is: all that an order could do about it is done.
        destroying=is_leaving(known, attempt) or (machine.left and is_fenced(machine, known)),
        stopped=not machine.runs,
        reserved=reserved,
    )
