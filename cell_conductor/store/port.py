"""The conductor's store. Decisions are made by the rules; this only stores them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec import Struct

from bus.contracts.base import DatabaseMark
from bus.contracts.operations import Losses
from bus.faults import Fault
from bus.persistence.group_flush import Flushed, FlushedStore
from bus.persistence.guarded_statement import Conflict
from bus.persistence.outbox import OutboxMessage, Rows
from bus.persistence.unit_of_work import OptimisticUnitOfWork, RowStore, VersionCache, WriteSet
from cell_conductor.state.database_marks import NOTHING, RecordedMarks, Stated
from cell_conductor.state.instance import Instance, InstanceSummary, Phase
from cell_conductor.store.fence_rows import FenceStore, LeaseStore
from cell_conductor.store.keyed import DatabaseIdentity
from cell_conductor.store.keyed_tables import UnknownMachineRecord
from cell_conductor.store.unknown_machines import Safety


class DatabaseChange(Struct, frozen=True):
    """The database was restored from a backup, or promoted, or its disk was restored."""

    database_id: str  # identity of the database, which a backup contains
    incarnation: int  # the incarnation that has begun
    recovers: bool  # something is missing, or may be; else another server took over


class UnreadableRecords(Fault):
    """The records of these instances cannot be read. Nothing is decided about them, not even that they are unknown. The
    store has logged and counted each.
    """

    code = "instance.unreadable"

    def __init__(self, uuids: frozenset[str]) -> None:
        super().__init__(f"the records of {', '.join(sorted(uuids))} cannot be read")
        self.uuids = uuids


class Transaction(Protocol):
    """One transaction. Its parts are used in the order below, and each takes its locks in uuid order: none deadlock."""

    durable: bool
    """False: the commit does not wait for the disk, because `flush` follows before anything relies on it.

    An optimistic transaction alone heeds it.
    """

    @property
    def rows(self) -> Sequence[int]:
        """The outbox rows of the messages that were sent later, once the transaction has ended."""

    async def first_time(self, message_ids: Sequence[str]) -> set[str]:
        """Record handled messages; those not seen before."""

    async def recognise(self, stated: Stated = NOTHING) -> DatabaseChange | None:
        """Compare the database with what others state of it; if it was restored, the cell recovers from now on, under a
        new incarnation. Raises DatabaseReplaced, DatabaseOutdated, Unrecognised and Recovering.
        """
        # The incarnation is above all that are known, and what is stated goes on record with it. DatabaseReplaced: it
        # has another identity. DatabaseOutdated: it is as it was and another conductor goes by a later incarnation.
        # An optimistic transaction compares at its end, and only if it inserts; it raises Conflict there.

    async def lock(self, uuids: Sequence[str]) -> dict[str, Instance]:
        """The instances on record among these, locked until the end. Raises UnreadableRecords."""

    async def unknown_machines(self, uuids: Collection[str]) -> list[UnknownMachineRecord]:
        """The machines of these instances that no record of an instance explains, by host and instance."""
        # An optimistic transaction expects none, compares at its end, and raises Conflict there.

    async def insert(self, instances: Sequence[Instance]) -> None:
        """Record new instances. Raises Conflict when one is on record meanwhile."""

    async def update(self, instances: Sequence[Instance]) -> None:
        """Write the new state of locked instances."""

    async def rely_on(
        self, hosts: Sequence[str], stale: Mapping[str, Sequence[str]], at: float, proofs: Sequence[str] = ()
    ) -> bool:
        """Hold the fences of these hosts until the end, and count what is stale there: by host, its services.
        False: one is not fenced, or a fence of `proofs` is to be ended. Raises Conflict: the transaction is optimistic.
        """
        # A service is named once for each stale machine. `proofs` are among the hosts.

    async def send_later(self, outgoing: Sequence[OutboxMessage]) -> Sequence[int]:
        """Put messages into the outbox; the rows for the relay (none while they are not known: see `rows`)."""


class LockingTransaction(Transaction, Protocol):
    """A transaction that locks as it reads. It finds due instances, which no cache has; recoveries use it."""

    async def begin_recovery(self, stated: Stated = NOTHING) -> int:
        """The cell recovers from now on, under an incarnation above all that are known, which is returned. Raises as
        `recognise`.
        """
        # What the outbox, the quarantine and the breakers have is of before, and goes; but what an operator protects
        # stays. A recovery that has begun on this database goes on as it is, unless a mark is above what that has.

    async def expect_recovering(self) -> None:
        """Hold the recovery until the end. Raises Unrecognised when it is over, or another one has begun."""

    async def accepted_losses(self) -> int:
        """How many losses of this recovery an operator has accepted."""

    async def stop_recovery(self, losses: Losses) -> None:
        """It goes no further until an operator accepts these. After `expect_recovering`."""

    async def accept_losses(self, losses: Losses, incarnation: int) -> bool:
        """An operator accepts what this recovery waits for. False: it does not wait, or for the decision on others."""

    async def end_recovery(self, silent: Collection[str] = (), without: Collection[str] = ()) -> None:
        """The cell is open. After `expect_recovering`. silent: services that have not listed what they have;
        without: that have nothing.
        """

    async def absent_services(self) -> dict[str, bool]:
        """The services that have not listed since, locked until the end; whether an operator has stated that they have
        nothing.
        """

    async def record_listed(self, services: Collection[str]) -> None:
        """These have listed. After `absent_services`."""

    async def state_without(self, service: str) -> bool:
        """An operator states that this service has nothing. False: there are too many such decisions."""

    async def lock_due(self, now: float, limit: int) -> list[Instance]:
        """Instances whose deadline has passed, oldest first, locked, except those that others hold, and those whose
        record cannot be read.
        """


class InstanceStore(Flushed, Protocol):
    """The instances of one cell. Adapters are in `store.postgres` and `store.memory`."""

    @property
    def outbox(self) -> Rows:
        """The rows behind `Transaction.send_later`, for the relay."""

    @property
    def ready(self) -> bool:
        """Whether it is open (for /readyz)."""

    @property
    def safety(self) -> Safety:
        """Machines that are reported and left alone, and the breakers, in the same schema."""

    @property
    def leases(self) -> LeaseStore:
        """The leases of the cell's compute services, in the same schema."""

    @property
    def fences(self) -> FenceStore:
        """The fences of the cell's hosts, in the same schema."""

    @property
    def database_id(self) -> str:
        """The identity of this cell's database: a uuid made once with its schema. Known once it has been open."""

    @property
    def incarnation(self) -> int:
        """When the database came to be older than the world, as far as this process has found out."""

    @property
    def is_recovering(self) -> bool:
        """Whether the cell recovers, as this process has last seen."""

    @property
    def mark(self) -> DatabaseMark:
        """What messages state of the database: of the commits that are on disk, those that this process knows."""

    @property
    def recorded(self) -> RecordedMarks:
        """What the database has on record, for `is_behind`, as far as this process knows."""

    @property
    def is_read(self) -> bool:
        """Whether what is on record is read from the server that the database is on."""

    def read_anew(self) -> None:
        """The database is on another server: what is on record there is to be read, and may be less."""

    async def recorded_marks(self) -> RecordedMarks:
        """What the database has on record. One statement."""

    async def open(self) -> None:
        """Connect and migrate; waits while the database is unavailable."""

    async def close(self) -> None:
        """Disconnect."""

    async def has_due(self, now: float) -> bool:
        """Whether a sweep would find anything: a passed deadline, or a database that was or may be restored."""
        # One round trip without locks, instead of a transaction that nearly always finds nothing.

    def transaction(self) -> AbstractAsyncContextManager[LockingTransaction]:
        """Commits at the end, rolls back on an exception."""

    def optimistic(self, new: Collection[str]) -> AbstractAsyncContextManager[Transaction]:
        """A transaction on cached instances that takes no lock before its end, and raises Conflict there. new:
        instances that are expected not to be on record. For PostgreSQL this is one round trip instead of six.
        """

    async def summaries(self, host_uuids: Sequence[str], instance_uuids: Sequence[str]) -> list[InstanceSummary]:
        """The instances that should be on these hosts or are to go from them (`desired_state.EXPECTED_ON_CURRENT`), and
        these instances in any state; those whose record cannot be read as `unreadable_summary`.
        """

    async def building_at(self, services: Sequence[str]) -> list[tuple[str, str]]:
        """(uuid, service) of the instances that these compute services were commanded to build, or to check."""

    async def at_service(self, service: str, limit: int) -> list[str]:
        """The instances that have a machine at this compute service (`ownership_proof.has_machine_at`), in
        order of uuids.
        """

    async def uuids(self, after: str, last: str, limit: int) -> list[str]:
        """Instances on record, in order of uuids: behind `after`, up to `last` ("": no end)."""

    async def purge(self, phases: frozenset[Phase], before: float, limit: int) -> int:
        """Delete instances that are in one of these phases since before this time, up to a bound; returns how many.
        phases: `desired_state.PURGEABLE` or `desired_state.PURGEABLE_FAILED`, which have indexes.
        """


class InstanceWrites(WriteSet, kw_only=True):
    """The writes of one transaction."""

    message_ids: Sequence[str] = ()  # messages that must be new
    explained: Sequence[str] = ()  # no host may have a machine of these that no record of an instance explains
    inserts: Sequence[Instance] = ()  # instances that must be absent
    updates: Sequence[Instance] = ()

    def is_empty(self) -> bool:
        """Whether there is nothing to write and nothing to compare."""
        return not (self.message_ids or self.inserts or self.versions or self.outbox)


class OptimisticTransaction(OptimisticUnitOfWork[Instance, InstanceWrites]):
    """A Transaction that writes at its end. absent: instances that are expected not to be on record."""

    def __init__(
        self, rows: RowStore[Instance, InstanceWrites], cache: VersionCache[Instance], absent: Collection[str]
    ) -> None:
        super().__init__(rows, cache, InstanceWrites())
        self._absent = frozenset(absent)
        self.durable = True

    async def recognise(self, stated: Stated = NOTHING) -> DatabaseChange | None:
        """Compared at the end, together with what is written."""
        return None

    async def first_time(self, message_ids: Sequence[str]) -> set[str]:
        """Expected to be new; checked at the end."""
        self.writes.message_ids = sorted(set(message_ids))
        return set(self.writes.message_ids)

    async def lock(self, uuids: Sequence[str]) -> dict[str, Instance]:
        """As cached, else as read, unless expected to be absent; compared at the end. Raises UnreadableRecords."""
        return await self._read(uuids, absent=self._absent)

    async def unknown_machines(self, uuids: Collection[str]) -> list[UnknownMachineRecord]:
        """Expected to be none; compared at the end."""
        self.writes.explained = sorted(uuids)
        return []

    async def insert(self, instances: Sequence[Instance]) -> None:
        """Kept for the end."""
        self.writes.inserts = list(instances)
        self._after.update((one.uuid, one) for one in instances)

    async def update(self, instances: Sequence[Instance]) -> None:
        """Kept for the end."""
        self.writes.updates = list(instances)
        self._after.update((one.uuid, one) for one in instances)

    async def rely_on(
        self, hosts: Sequence[str], stale: Mapping[str, Sequence[str]], at: float, proofs: Sequence[str] = ()
    ) -> bool:
        """Not possible without a lock on the fence. Raises Conflict."""
        raise Conflict

    async def send_later(self, outgoing: Sequence[OutboxMessage]) -> Sequence[int]:
        """Keep them for the commit, which sets `rows` to their outbox rows."""
        self.writes.outbox = list(outgoing)
        return ()

    async def commit(self) -> None:
        """Write the whole set. Raises Conflict."""
        if self._absent - self.writes.versions.keys() - {instance.uuid for instance in self.writes.inserts}:
            raise Conflict  # expected to be absent, and no write would prove it
        self.writes.durable = self.durable
        await super().commit()


class SeenStore(FlushedStore):
    """What this process has seen of the database. Base of both adapters."""

    def __init__(self, connections: Flushed) -> None:
        super().__init__(connections)
        self._seen = DatabaseIdentity()

    @property
    def database_id(self) -> str:
        """The identity of the schema."""
        assert self._seen.database_id, "not opened"
        return self._seen.database_id

    @property
    def incarnation(self) -> int:
        """When the database came to be older than the world, as far as this process has found out."""
        return self._seen.incarnation

    @property
    def is_recovering(self) -> bool:
        """Whether the cell recovers, as this process has last seen."""
        return self._seen.is_recovering

    @property
    def mark(self) -> DatabaseMark:
        """What messages state of the database: of the commits that are on disk, those that this process knows."""
        return self._seen.mark

    @property
    def recorded(self) -> RecordedMarks:
        """What the database has on record, as far as this process knows."""
        return self._seen.recorded

    @property
    def is_read(self) -> bool:
        """Whether what is on record is read from the server that the database is on."""
        return self._seen.read is not None

    def read_anew(self) -> None:
        """The database is on another server: what is on record there is to be read, and may be less."""
        self._seen.read = None
