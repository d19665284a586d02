"""Saves each changed position, then publishes it, then marks it as published. The saved positions are the outbox."""

# A position is whole, so only a node's newest one is worth publishing: while the bus is unavailable nothing piles up
# but one update a node, and a process that starts publishes every position that was saved and not confirmed.

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

from bus.clock import Clock
from bus.contracts.base import Message
from bus.faults import Transient
from bus.retrying import Backoff, RetryPolicy
from bus.transport import BusError
from ironic_sync import metrics
from ironic_sync.domain.position import Position, has_free_inventory, update_of
from ironic_sync.node_line import NodeLine
from ironic_sync.store.port import Term
from ironic_sync.sync_state import SyncState

log = structlog.get_logger(__name__)


class PublishAll(Protocol):
    """Publishes many messages, each with its cause and, where it is known, its trace (`bus.bus.Bus.publish_all`)."""

    async def __call__(self, messages: Sequence[tuple[Message, str]], traceparents: Sequence[str] = ()) -> None:
        """Returns when all are confirmed."""


SAVE_BATCH = 1000  # positions a transaction
PUBLISH_BATCH = 500  # updates under way at once
WRITE = RetryPolicy(first_s=0.1, longest_s=5.0, least=1.0)  # until it is saved and published
NO_CAUSE = "ironic.resync"


class Writer:
    """Saves and publishes the positions that have moved."""

    def __init__(
        self, term: Term, sync_state: SyncState, publish_all: PublishAll, *, clock: Clock, cell: str, reporter: str
    ) -> None:
        self._term = term
        self._sync_state = sync_state
        self._publish_all = publish_all
        self._clock = clock
        self._cell = cell
        self._reporter = reporter
        self._saved: NodeLine[Position] = NodeLine()  # not published
        self._to_publish = asyncio.Event()
        self._busy = 0

    @property
    def idle(self) -> bool:
        """Whether everything that moved is saved and confirmed."""
        return not (self._busy or self._saved or self._sync_state.unsaved or self._sync_state.deliveries)

    async def save(self) -> None:
        """Save what moves, until cancelled; raises NotLeader."""
        backoff = Backoff(WRITE, self._clock)
        while True:
            await self._sync_state.moved.wait()
            self._busy += 1
            try:
                await self._save_once(backoff)
            finally:
                self._busy -= 1

    async def publish(self) -> None:
        """Publish saved positions, until cancelled; raises NotLeader."""
        backoff = Backoff(WRITE, self._clock)
        while True:
            await self._to_publish.wait()
            self._busy += 1
            try:
                await self._publish_once(backoff)
            finally:
                self._busy -= 1

    async def _save_once(self, backoff: Backoff) -> None:
        sync_state = self._sync_state
        sync_state.moved.clear()
        nodes = sync_state.unsaved.first(SAVE_BATCH)
        deliveries, sync_state.deliveries = sync_state.deliveries, []
        for node in nodes:
            sync_state.unsaved.pop(node)
        positions = [sync_state.positions[node] for node in nodes if node in sync_state.positions]
        saved = False
        try:
            await self._term.save(positions)  # of none, too: a later writer may have read before these deliveries came
            saved = True
        except Transient as fault:
            log.warning("ironic.save_waits", code=fault.code, reason=fault.reason, nodes=len(positions))
        finally:
            if not saved:
                for position in positions:
                    sync_state.to_save(sync_state.positions.get(position.uuid, position))
                sync_state.deliveries = deliveries + sync_state.deliveries
        if not saved:
            await backoff.wait()
            sync_state.moved.set()
            return
        backoff.reset()
        self._after_save(positions)
        if sync_state.unsaved:
            sync_state.deliveries = deliveries + sync_state.deliveries  # they may be about nodes of the next batch
            sync_state.moved.set()
            return
        for delivery in deliveries:
            delivery.ack()

    def _after_save(self, positions: Sequence[Position]) -> None:
        for position in positions:
            if position.version > self._sync_state.published.get(position.uuid, 0):
                self._saved.put(position.uuid, position, urgent=not has_free_inventory(position))
                self._to_publish.set()

    async def _publish_once(self, backoff: Backoff) -> None:
        batch = self._saved.first(PUBLISH_BATCH)
        causes = {uuid: self._sync_state.notified_at.get(uuid, (0.0, NO_CAUSE))[1] for uuid in batch}
        try:
            await self._publish_all(
                [(update_of(position, self._cell, self._reporter), causes[uuid]) for uuid, position in batch.items()],
                [self._sync_state.traces.traceparent(uuid) for uuid in batch],
            )
            await self._term.mark_published({uuid: position.version for uuid, position in batch.items()})
        except (BusError, Transient) as fault:
            log.warning("ironic.publish_waits", code=fault.code, reason=str(fault), updates=len(batch))
            await backoff.wait()
            return
        backoff.reset()
        for uuid, position in batch.items():
            self._confirmed(uuid, position, causes[uuid])
        if not self._saved:
            self._to_publish.clear()

    def _confirmed(self, uuid: str, position: Position, cause: str) -> None:
        sync_state = self._sync_state
        sync_state.published[uuid] = position.version
        if self._saved.get(uuid) is position:
            self._saved.pop(uuid)
        kind = _kind(position)
        metrics.UPDATES.labels(kind).inc()
        arrived = sync_state.notified_at.get(uuid)
        if arrived is not None:
            metrics.LATENCY_S.labels(kind).observe(self._clock.monotonic() - arrived[0])
            now = sync_state.positions.get(uuid, position)
            if now.read_seq > now.notified_seq and now.version == position.version:  # the read it requested is in this
                sync_state.settle(uuid)
        log.info("ironic.reported", node=uuid, kind=kind, version=position.version, state=position.state, cause=cause)


def _kind(position: Position) -> str:
    if position.report is None:
        return "removed"
    return "offered" if has_free_inventory(position) else "held"
