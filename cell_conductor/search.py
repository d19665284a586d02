"""Queries the cell's compute services about the instances of doubted builds, before a machine is built for them.

A build is doubted when it may have been begun before, by a record that the database has lost: see
docs/concepts/destruction.md. So is a delete of an instance that a database which was set back or replaced has no
record of. Each service that is up is queried, with one deadline for all of them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.cell import MAX_FOUND_AT_ONCE, MAX_LOOKED_AT, FindMachines, FoundMachine, MachinesFound
from bus.faults import Fault

from . import metrics
from .config import ConductorConfig
from .domain.adopt_rules import why_not_adoptable, why_not_its_machine
from .domain.breaker import Listings
from .domain.events import (
    Awaited,
    InstanceEvent,
    InstanceSearched,
    MachineQuery,
    SourceAnswered,
    SourceQuery,
    is_begun_by,
)
from .domain.instance import Instance
from .domain.leases import Lease
from .domain.way_back import answer_about
from .store.port import InstanceStore
from .store.safety import KEEP, UnexplainedRecord

log = structlog.get_logger(__name__)

LOGGED_SERVICES = 10


class Searched(Struct, frozen=True):
    """machines: by instance. missing: services that were asked and have not answered; "": it is not known yet which are
    up. hosts: that were looked at, of a thorough search. unexplained: the machines that no record explains.
    incarnation: of the database when they were asked.
    """

    machines: Mapping[str, Sequence[FoundMachine]] = {}
    missing: tuple[str, ...] = ()
    hosts: AbstractSet[str] = frozenset()
    unexplained: Sequence[UnexplainedRecord] = ()
    incarnation: int = 0

    def of(self, uuid: str, *, to_delete: bool = False, in_part: bool = False) -> tuple[FoundMachine, ...] | None:
        """The machines of this instance; None: a service has not answered that may have another one, and one of several
        shows nothing of a later one. in_part: those that were found all the same. to_delete: but those that an operator
        keeps, which no delete is about.
        """
        kept = {one.place for one in self.unexplained if to_delete and one.verdict == KEEP}
        found = tuple(one for one in self.machines.get(uuid, ()) if (one.host_uuid, uuid) not in kept)
        return found if in_part or not self.missing else None

    def is_unexplained(self, uuid: str) -> bool:
        """Whether a host has a machine of this instance that no record explains, that no service has by our mark, and
        that no operator keeps.
        """
        own = {(one.host_uuid, uuid) for one in self.machines.get(uuid, ())}
        return any(one.machine.uuid == uuid and one.place not in own for one in self.unexplained if one.verdict != KEEP)

    @property
    def silent(self) -> str:
        """The services that have not answered, or some of them."""
        return named(self.missing) or "which are up is not known yet"


class _Found:
    """The services' answers so far about these instances. missing: {service without an answer: why}."""

    def __init__(self, uuids: frozenset[str], down: AbstractSet[str]) -> None:
        self.missing = dict.fromkeys(sorted(down), "it is down")
        self.hosts: set[str] = set()
        self._uuids = uuids
        self._machines: dict[str, dict[tuple[str, str, int], FoundMachine]] = defaultdict(dict)

    def take(self, questions: Sequence[FindMachines], answers: Sequence[MachinesFound | Fault]) -> list[FindMachines]:
        """Take an answer to each; returns the queries for the next pages. A machine that is gone from a later page
        counts still.
        """
        following: list[FindMachines] = []
        for question, answer in zip(questions, answers, strict=True):
            if isinstance(answer, Fault):
                self.missing[question.service] = answer.code
                continue
            self.hosts.update(answer.hosts)
            for one in answer.machines:
                if one.instance_uuid in self._uuids:
                    self._machines[one.instance_uuid][one.service, one.host_uuid, one.attempt] = one
            if answer.more:
                after = question.hosts_after + len(answer.hosts)
                if question.hosts_after < after < MAX_LOOKED_AT:
                    following.append(replace(question, hosts_after=after))
                else:
                    self.missing[question.service] = f"of more than {MAX_LOOKED_AT} hosts"
        return following

    def machines(self) -> dict[str, list[FoundMachine]]:
        """The machines, by instance."""
        return {uuid: list(found.values()) for uuid, found in self._machines.items()}


class MachineSearch:
    """One conductor's. up: the services that are up (None: it has not listened for long enough to know)."""

    def __init__(
        self,
        store: InstanceStore,
        bus: Bus,
        *,
        clock: Clock,
        config: ConductorConfig,
        up: Callable[[], Collection[str] | None],
        down: Callable[[], Mapping[str, Lease]],
        forgotten: Callable[[], Collection[str]],
        listings: Listings,
        fenced: Callable[[], Collection[str]],
    ) -> None:
        """`down()`: the leases of services that are not up. listings: what the services have reported. `forgotten()`:
        services that are gone for good, as an operator has stated. `fenced()`: hosts.
        """
        self._down = down
        self._fenced = fenced
        self._listings = listings
        self._forgotten = forgotten
        self._store = store
        self._bus = bus
        self._clock = clock
        self._config = config
        self._up = up

    async def before(self, requests: Sequence[InstanceEvent]) -> dict[str, Searched]:
        """The search for the instance of each of these requests, before they are taken."""
        outdated = {one.uuid for one in requests if is_begun_by(one.event)}
        lost = {one.uuid for one in requests if not is_begun_by(one.event)}
        incarnation, asked = self._store.set_back.incarnation, await self._asked()
        searched, complete = await asyncio.gather(
            self.find(lost, asked if self._is_awaiting(0.0) else self._up_now()), self.find(outdated, asked)
        )
        found = dict.fromkeys(lost, searched) | dict.fromkeys(outdated, complete)
        return {uuid: replace(one, incarnation=incarnation) for uuid, one in found.items()}

    async def _asked(self) -> set[str] | None:
        """The services that a search asks, all of which have to answer before anything is begun, released or given by
        it: those that are up, and those that are down and may have machines all the same. None: it is not known yet
        which are up.
        """
        up = self._up_now()
        return None if up is None else up | (self._down().keys() - await self._gone())

    async def _gone(self) -> set[str]:
        """The services that are not awaited: an operator has stated that they are gone, or that all of their hosts are
        off.
        """
        down, fenced, gone = self._down(), set(self._fenced()), set(self._forgotten())
        if down.keys() <= gone:
            return gone
        leases = await self._store.leases.leases()  # of a database whose set-back is known
        return gone | {one.service for one in leases if one.is_off(down.get(one.service), fenced, self._store.set_back)}

    def _up_now(self) -> set[str] | None:
        """The services that a search asks beyond a doubt's limit (`_is_awaiting`)."""
        return None if (up := self._up()) is None else set(up)

    def _is_awaiting(self, since: float) -> bool:
        """Whether services that are down have to answer about a build whose record is in doubt since then."""
        return self._store.set_back.doubted_for_s(since, self._clock.time()) < self._config.doubt_limit_s

    async def find(self, uuids: Collection[str], asked: AbstractSet[str] | None, *, thorough: bool = False) -> Searched:
        """Query these services about these instances. None: it is not known yet which are up.

        One that is down is not queried: it has not answered. The batch of the request would wait for it.

        thorough: about machines of other deployments as well, with the hosts that were looked at. These come in pages,
        each with the deadline anew.
        """
        if not uuids:
            return Searched()
        if asked is None:
            return Searched(missing=("",))
        wanted = sorted(uuids)
        found = _Found(frozenset(uuids), asked - set(self._up() or ()))
        questions = [
            FindMachines(
                service=service,
                deployment=self._store.deployment,
                instance_uuids=tuple(wanted[start : start + MAX_FOUND_AT_ONCE]),
                thorough=thorough,
            )
            for service in sorted(asked - found.missing.keys())
            for start in range(0, len(wanted), MAX_FOUND_AT_ONCE)
        ]
        while questions:
            causes = [question.instance_uuids[0] for question in questions]
            timeout_s = self._config.answer_timeout_s
            answers = await self._bus.request_all(questions, MachinesFound, timeout_s=timeout_s, causes=causes)
            questions = found.take(questions, answers)
        machines, missing = found.machines(), found.missing
        metrics.SEARCHED.labels("found").inc(len(machines))
        metrics.SEARCHED.labels("unanswered" if missing else "nothing").inc(len(wanted) - len(machines))
        if missing or machines:
            _log_searched(wanted, machines, missing)
        return Searched(machines, tuple(missing), found.hosts, await self._on_record(uuids))

    async def unexplained(self, uuids: Collection[str]) -> set[str]:
        """Those of these instances of which a host has a machine that no record explains and that no operator keeps."""
        return {one.machine.uuid for one in await self._on_record(uuids) if one.verdict != KEEP}

    async def _on_record(self, uuids: Collection[str]) -> list[UnexplainedRecord]:
        if not uuids:
            return []
        async with self._store.transaction() as transaction:
            return await transaction.unexplained(uuids)

    async def see_sources(self, sources: Mapping[str, SourceQuery]) -> dict[str, SourceAnswered]:
        """Query the services that have the hosts of these machines, by the record or by their reports, whether the
        hosts list them now; by instance.
        """
        incarnation, queried = self._store.set_back.incarnation, defaultdict[str, dict[str, SourceQuery]](dict)
        for uuid, source in sorted(sources.items()):
            for service in sorted({source.service, *self._listings.listers(source.host_uuid)}):
                queried[service][uuid] = source
        questions = [
            FindMachines(
                service=service,
                deployment=self._store.deployment,
                instance_uuids=piece,
                on_hosts=tuple(dict.fromkeys(about[uuid].host_uuid for uuid in piece)),
            )
            for service, about in sorted(queried.items())
            for piece in batched(about, MAX_FOUND_AT_ONCE)
        ]
        causes = [question.instance_uuids[0] for question in questions]
        timeout_s = self._config.answer_timeout_s
        answers = await self._bus.request_all(questions, MachinesFound, timeout_s=timeout_s, causes=causes)
        found: dict[str, list[tuple[str, MachinesFound | Fault]]] = defaultdict(list)
        for question, answer in zip(questions, answers, strict=True):
            for uuid in question.instance_uuids:
                found[uuid].append((question.service, answer))
        at = self._clock.time()
        seen = {uuid: answer_about(uuid, source, found[uuid], at, incarnation) for uuid, source in sources.items()}
        for uuid, one in seen.items():
            if one.code:
                log.warning("move.source_not_seen", instance=uuid, code=one.code, reason=one.reason, cause=uuid)
        return seen

    async def find_doubted(self, queries: Mapping[str, MachineQuery]) -> dict[str, InstanceSearched]:
        """What all services have of instances in doubt, of those about which all have answered that have to. Beyond the
        doubt's limit these are the services that the query names, of a move about its own hosts alone.

        One that has not looked at each of its hosts that is not fenced has not answered, and nor has one that the
        record names and that is neither asked nor gone.
        """
        incarnation, asked = self._store.set_back.incarnation, await self._asked()
        if not queries or asked is None:
            return {}
        known = asked | await self._gone()
        searched = await self.find(queries, asked, thorough=True)
        # Of one that has not listed all its hosts it is not known which it is to look at: it began just now, as this
        # conductor may have, after a restore for example.
        unseen = {*searched.missing, *self._listings.unlisted(asked)}
        looked_at = searched.hosts | set(self._fenced())
        unseen.update(name for name in asked if self._listings.hosts_of([name]) - looked_at)
        at, found = self._clock.time(), dict[str, InstanceSearched]()
        for uuid, query in queries.items():
            missing = unseen | {one for one, host in query.places if one not in known and host not in looked_at}
            if query.awaited is Awaited.NONE:  # no fence answers for a machine that may be complete
                gone = self._forgotten()
                missing.update(one for one, host in query.places if one not in gone and host not in searched.hosts)
            of_places = {one for one, host in query.places if one in searched.missing or host not in looked_at}
            if not missing & self._awaited(query, missing, of_places):
                found[uuid] = InstanceSearched(
                    at=at,
                    query=query,
                    incarnation=incarnation,
                    machines=searched.of(uuid, in_part=True) or (),
                    hosts=searched.hosts,
                    silent=frozenset(missing),
                )
        return found

    def _awaited(self, query: MachineQuery, missing: set[str], of_places: set[str]) -> AbstractSet[str]:
        """Those that have to answer, of the services that have not, and those of the record's places that were not
        looked at.
        """
        if self._is_awaiting(query.since):
            return missing
        up = self._up_now() or set()
        return {Awaited.NONE: set(), Awaited.OF_PLACES: of_places, Awaited.UP: up, Awaited.ALL: missing}[query.awaited]

    async def find_decided(
        self, decided: Mapping[str, UnexplainedRecord], known: Mapping[str, Instance]
    ) -> dict[str, FoundMachine]:
        """The machines in quarantine of which operators have decided that they are their instances', by instance.

        Every service has to answer, and the host on record has to have been looked at, unless it is fenced or its
        service forgotten: its machine may run there.
        """
        taken = {uuid: known[uuid] for uuid in decided if not why_not_adoptable(known.get(uuid))}
        gone, fenced = set(self._forgotten()), set(self._fenced())
        to_look = {one.host_uuid for one in taken.values() if one.here.service not in gone} - fenced
        searched = await self.find(taken, await self._asked(), thorough=True)
        found: dict[str, FoundMachine] = {}
        for uuid, record in decided.items():
            why = why_not_adoptable(known.get(uuid))
            if not why and searched.missing:
                why = f"not all compute services have answered: {searched.silent}"
            elif not why and taken[uuid].host_uuid in to_look - searched.hosts:
                why = f"no compute service has looked at host {taken[uuid].here.host}, where its record has it"
            elif not why:
                why = why_not_its_machine(taken[uuid], record.machine, searched.machines.get(uuid, ()))
            if not why:
                found[uuid] = searched.machines[uuid][0]
            log.warning(
                "quarantine.not_adopted" if why else "quarantine.adopted",
                instance=uuid,
                host=record.machine.host_uuid,
                by=record.decided_by,
                reason=why,
                cause=uuid,
            )
        return found


def named(services: Sequence[str]) -> str:
    """A bounded number of these, as text; "": it is not known yet which are up."""
    return ", ".join(filter(None, services[:LOGGED_SERVICES]))


def batched(uuids: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    """These, so many at a time."""
    left = iter(uuids)
    while piece := tuple(islice(left, size)):
        yield piece


def _log_searched(
    wanted: Sequence[str], machines: Mapping[str, Sequence[FoundMachine]], missing: Mapping[str, str]
) -> None:
    log.warning(
        "build.searched",
        instances=len(wanted),
        found={uuid: [one.host for one in found] for uuid, found in list(machines.items())[:LOGGED_SERVICES]},
        unanswered=dict(list(missing.items())[:LOGGED_SERVICES]),
        cause=wanted[0],
    )
