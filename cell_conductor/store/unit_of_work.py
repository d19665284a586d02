"""The conductor's optimistic transaction: messages expected to be new, cached instances, new ones expected absent."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bus.persistence.guarded_statement import Conflict
from bus.persistence.outbox import OutboxMessage
from bus.persistence.unit_of_work import OptimisticUnitOfWork, RowStore, VersionCache, WriteSet
from cell_conductor.domain.fences import Loss
from cell_conductor.domain.instance import Instance
from cell_conductor.domain.table import IllegalStep

from .port import DatabaseChange


class InstanceWrites(WriteSet, kw_only=True):
    """The writes of one transaction: message ids must be new, inserts must be absent."""

    message_ids: Sequence[str] = ()
    inserts: Sequence[Instance] = ()
    updates: Sequence[Instance] = ()

    def is_empty(self) -> bool:
        """Whether there is nothing to write and nothing to compare."""
        return not (self.message_ids or self.inserts or self.versions or self.outbox)


class OptimisticTransaction(OptimisticUnitOfWork[Instance, InstanceWrites]):
    """A Transaction that writes at its end. absent: instances that are expected not to be on record."""

    STALE = (IllegalStep,)

    def __init__(
        self, rows: RowStore[Instance, InstanceWrites], cache: VersionCache[Instance], absent: Collection[str]
    ) -> None:
        super().__init__(rows, cache, InstanceWrites())
        self._absent = frozenset(absent)

    @property
    def durable(self) -> bool:
        """Whether the commit waits for the disk."""
        return self.writes.durable

    @durable.setter
    def durable(self, durable: bool) -> None:
        self.writes.durable = durable

    async def recognise(self) -> DatabaseChange | None:
        """Compared at the end, together with what is inserted."""
        return None

    async def first_time(self, message_ids: Sequence[str]) -> set[str]:
        """Expected to be new; checked at the end."""
        self.writes.message_ids = sorted(set(message_ids))
        return set(self.writes.message_ids)

    async def lock(self, uuids: Sequence[str]) -> dict[str, Instance]:
        """As cached, else as read, unless expected to be absent; compared at the end."""
        return await self._read(uuids, absent=self._absent)

    async def insert(self, instances: Sequence[Instance]) -> None:
        """Kept for the end."""
        self.writes.inserts = list(instances)
        self._after.update((one.uuid, one) for one in instances)

    async def update(self, instances: Sequence[Instance]) -> None:
        """Kept for the end."""
        self.writes.updates = list(instances)
        self._after.update((one.uuid, one) for one in instances)

    async def lose(self, hosts: Sequence[str], losses: Sequence[Loss], proofs: Sequence[str] = ()) -> bool:
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
        await super().commit()
