"""What must hold of moves at every moment: one machine runs, what runs is claimed, every claim has its owner.

Judged from what machines really do and what the book really holds, for every instance that a record has had as active.
An older attempt of its build may still come alive late, as always; it is not looked at here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from berth.sim.watch import Breach
from bus.contracts.moves import MoveEvent, MoveState
from cell_conductor.domain.instance import Instance, Power, State
from cell_conductor.store.memory import MemoryInstanceTable
from compute_sim.fleet import Fleet, Guest
from placement_worker.domain.moves import MIGRATION_TYPE
from placement_worker.store.memory import MemoryBookTable

# In these the source of a move is given up: the destination is on record as active.
GIVES_UP_SOURCE = frozenset({State.CONFIRMING, State.SETTLING})
GIVES_UP_HERE = frozenset({State.OFFLOADING, State.UNDOING})


class MoveWatch:
    """Looks after every commit of the book and of a cell, at every machine that comes to be, and at what is said."""

    def __init__(
        self,
        book: MemoryBookTable,
        cells: Mapping[str, MemoryInstanceTable],
        fleets: Mapping[str, Fleet],
        duplicates: Mapping[str, Fleet],
    ) -> None:
        """`duplicates`: machines of second services of a name: of two hosts of one uuid either may be meant."""
        self._book = book
        self._cells = cells
        self._fleets = fleets
        self._duplicates = duplicates
        self._first: dict[str, int] = {}  # the attempt under which each was first active
        self._seen: dict[str, Instance] = {}
        self.given_up: set[tuple[str, str, int]] = set()  # (host, instance, attempt) that a move or a shelving gave up
        self.moved: dict[str, None] = {}  # instances of which a move was ever recorded
        self.migrations: dict[str, str] = {}  # {request: its instance}
        self.fenced: set[str] = set()  # hosts that were switched off once: what was not evacuated is off there
        self.sent: dict[str, str] = {}  # {request: its instance} that a cell was told of
        self.ends: dict[str, tuple[MoveState, str]] = {}
        self.brought_back: set[tuple[str, str, int]] = set()  # (host, instance, attempt) on a set-back host
        self.excused: Mapping[str, None] = {}  # of whom a restored database knows an old truth

    # --- cells

    def instances(self, instances: Mapping[str, Instance]) -> None:
        """After a commit of a conductor."""
        for uuid, instance in instances.items():
            if self._seen.get(uuid) is instance:
                continue
            self._seen[uuid] = instance
            if instance.state is State.ACTIVE:
                self._first.setdefault(uuid, instance.attempt)
            move = instance.move
            if move is None:
                continue
            self.moved[uuid] = None
            self.migrations[move.request_id] = uuid
            if instance.state in GIVES_UP_SOURCE and move.source is not None and not instance.is_in_place:
                self.given_up.add((move.source.host_uuid, uuid, move.source_attempt))
            if instance.state in GIVES_UP_HERE and not instance.is_in_place and instance.host_uuid:
                self.given_up.add((instance.host_uuid, uuid, instance.attempt))

    def said(self, event: MoveEvent) -> None:
        """A conductor speaks. Raises Breach."""
        if not event.terminal:
            return
        end = (event.state, event.code)
        if self.ends.setdefault(event.request_id, end) != end and event.instance_uuid not in self.excused:
            raise Breach("one_terminal_event", f"{event.request_id}: {self.ends[event.request_id]}, then {end}")

    # --- machines

    def put(self, host: str, guest: Guest) -> None:
        """A machine comes to be, or is changed. Raises Breach."""
        if not guest.complete or not guest.runs or not self._counts(host, guest) or self._has_a_double(host):
            return
        uuid = guest.instance_uuid
        for other, one in self._running(uuid):
            if other != host:
                raise Breach("never_two_running", f"{uuid} runs on {other} as {one.attempt}, starts on {host}")
        if uuid in self.moved and host not in self._claimed(uuid):
            raise Breach("never_running_unclaimed", f"{uuid} attempt {guest.attempt} starts on {host}, unclaimed")

    def _running(self, uuid: str) -> Iterator[tuple[str, Guest]]:
        for service, fleet in self._fleets.items():
            for host in fleet.hosts if service not in self._duplicates else ():
                guest = (host.guests or {}).get(uuid)
                if guest is not None and guest.complete and guest.runs and self._counts(host.plan.uuid, guest):
                    yield host.plan.uuid, guest

    def _counts(self, host: str, guest: Guest) -> bool:
        uuid = guest.instance_uuid
        first = self._first.get(uuid)
        if first is None or guest.attempt < first or uuid in self.excused:
            return False
        return (host, uuid, guest.attempt) not in self.brought_back

    def _has_a_double(self, host: str) -> bool:
        """Whether a second service of a name has, or had, a host of this uuid too."""
        return any(self._fleets[service].host(host) is not None for service in self._duplicates)

    # --- the book

    def _claimed(self, uuid: str) -> set[str]:
        """The root providers that the instance, or its migration, holds something of."""
        named = [uuid, *(request for request, instance in self.migrations.items() if instance == uuid)]
        found: set[str] = set()
        for consumer in named:
            kept = self._book.consumers.get(consumer)
            for provider in kept.consumer.holding if kept is not None else ():
                if provider in self._book.providers:
                    found.add(self._book.providers[provider].root)
        return found

    def book(self) -> None:
        """After a commit of the book: what runs of those that have moved is claimed. Raises Breach."""
        for uuid in self.moved:
            running = list(self._running(uuid))
            if running and uuid not in self.excused:
                claimed = self._claimed(uuid)
                for host, guest in running:
                    if host not in claimed:
                        raise Breach("never_running_unclaimed", f"{uuid} attempt {guest.attempt} runs on {host}")

    # --- at rest

    def unsettled(self, lost: set[str]) -> Iterator[str]:
        """Every migration's claim has its move, every request its end, and machines are as their records have them."""
        yield from self._machines(lost)
        under_way = {
            instance.move.request_id
            for table in self._cells.values()
            for instance in table.instances.values()
            if instance.move is not None
        }
        for uuid, kept in self._book.consumers.items():
            is_migration = kept.consumer.consumer_type == MIGRATION_TYPE and kept.consumer.holding
            if is_migration and uuid not in under_way and self.migrations.get(uuid) not in lost:
                yield f"claims_have_owners: the migration {uuid} holds {dict(kept.consumer.holding)}"
        for request, instance in self.sent.items():
            if request not in self.ends and instance not in lost:
                yield f"one_terminal_event: the request {request} for {instance} has had no end"

    def _machines(self, lost: set[str]) -> Iterator[str]:
        for table in self._cells.values():
            for uuid, instance in table.instances.items():
                if instance.state is not State.ACTIVE or uuid not in self.moved or uuid in lost:
                    continue
                fleet, host = self._fleets.get(instance.here.service), instance.here.host_uuid
                guest = fleet.guest(host, uuid) if fleet is not None else None
                if guest is None or host in self.fenced or self._has_a_double(host):
                    continue
                if (host, uuid, guest.attempt) in self.brought_back:
                    continue
                if guest.allocations != instance.here.allocations:
                    yield f"machine_has_its_size: {uuid} is {guest.allocations}, its record {instance.here.allocations}"
                if guest.runs is not (instance.power is Power.RUNNING):
                    yield f"runs_as_recorded: {uuid} is {instance.power.value}, and runs: {guest.runs}"
