"""The positions of one term in memory, and the work that they still need. No method here waits."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import structlog
from msgspec.structs import replace

from bus.clock import Clock
from bus.transport import Delivery
from ironic_sync import metrics
from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain import position as step
from ironic_sync.domain.effect import Effect
from ironic_sync.domain.node import Node, Unreadable
from ironic_sync.domain.position import Position
from ironic_sync.domain.rules import ABSENT
from ironic_sync.node_line import NodeLine
from ironic_sync.notification_traces import NotificationTraces

log = structlog.get_logger(__name__)

UNREADABLE = "node.unreadable"
FARTHEST = 2**62 - 2**52  # no clock comes near it, and no contract lets versions pass 2**62


class SyncState:
    """The positions of all nodes. The listener and the reader change positions, and the writer takes the changed ones.
    unsaved: nodes that moved since they were last taken to be saved.
    """

    def __init__(
        self,
        positions: Mapping[str, Position],
        published: Mapping[str, int],
        *,
        clock: Clock,
        config: IronicSyncConfig,
        traces: NotificationTraces | None = None,
    ) -> None:
        self.traces = NotificationTraces(None) if traces is None else traces
        self.positions = dict(positions)
        self.published = dict(published)
        self.unsaved: NodeLine[Position] = NodeLine()
        self.deliveries: list[Delivery] = []  # to acknowledge once what they changed is saved; prefetch bounds it
        self.notified_at: dict[str, tuple[float, str]] = {}  # {node: (arrival, cause)} until an update is confirmed
        self.moved = asyncio.Event()
        self.planned = asyncio.Event()
        self._clock = clock
        self._config = config
        self._seq = 0
        self._in_flight: set[int] = set()  # numbers of reads that were sent and not answered
        self._due: list[tuple[float, str]] = []
        self._ready: NodeLine[Position] = NodeLine()  # whose time has come
        self._republish: set[str] = set()
        self._gone: set[str] = set()
        self._logged_full = False
        for uuid, position in self.positions.items():
            self._count(position)
            if position.version > self.published.get(uuid, 0):
                self.to_save(position)

    def next_seq(self) -> int:
        """The number of what happens now (a read being sent)."""
        self._seq += 1
        return self._seq

    @contextmanager
    def read_in_flight(self) -> Iterator[int]:
        """A read, or the pages of a list: its number. Until it ends no position is dropped that it may not overrule."""
        seq = self.next_seq()
        self._in_flight.add(seq)
        try:
            yield seq
        finally:
            self._in_flight.discard(seq)

    def _is_disputed(self, position: Position) -> bool:
        """Whether an answer may come yet that is older than what is known of the node."""
        newest = max(position.notified_seq, position.read_seq)
        return any(seq < newest for seq in self._in_flight)

    def take(self, delivery: Delivery) -> None:
        """What a delivery has brought is applied: it is to be acknowledged."""
        self.deliveries.append(delivery)
        self.moved.set()

    def apply_notification(self, effect: Effect, cause: str, what: str = "") -> None:
        """Apply a notification: a node is to be read, and perhaps something to be reported to placement first. what:
        its event, for its trace.
        """
        assert effect.read is not None
        before = self._of(effect.read)
        if before is None:
            return
        if effect.announced:
            self._move(before, step.on_announcement(before, now=self._clock.time(), config=self._config))
            return
        self.notified_at[before.uuid] = (self._clock.monotonic(), cause)
        self.traces.begin(before.uuid, what, cause)
        after = step.on_notification(
            before, taken=effect.reserve_all, deleted=effect.deleted, seq=self.next_seq(), now=self._clock.time()
        )
        self._move(before, after)

    def settle(self, uuid: str) -> None:
        """The changes of a node that Ironic announced have been read, and placement has them."""
        self.notified_at.pop(uuid, None)
        self.traces.end(uuid)

    def requeue_unacknowledged(self) -> None:
        """Return unacknowledged messages to the queue, for the next writer."""
        deliveries, self.deliveries = self.deliveries, []
        for delivery in deliveries:
            delivery.nack(requeue=True)

    def schedule_read(self, uuid: str) -> None:
        """Read the node now."""
        before = self._of(uuid)
        if before is not None:
            self._move(before, step.with_read_due(before, now=self._clock.time()))

    def apply_read(self, node: Node | Unreadable, *, seq: int) -> None:
        """The node was read by a request sent at `seq`."""
        if node.uuid is None:
            log.error("ironic.unreadable", reason=node.reason if isinstance(node, Unreadable) else "")
            metrics.REJECTED.labels("node.unreadable").inc()
            return
        before = self._of(node.uuid)
        if before is None:
            return
        now = self._clock.time()
        if isinstance(node, Unreadable):
            log.error("ironic.unreadable", node=node.uuid, reason=node.reason)
            after = step.apply_unreadable(before, UNREADABLE, seq=seq, now=now, config=self._config)
        else:
            after = self._mark_republished(
                step.apply_read(before, node, seq=seq, now=now, config=self._config), before, now
            )
        self._move(before, after)

    def apply_removed(self, uuid: str, *, seq: int) -> None:
        """Apply Ironic's answer that the node does not exist."""
        before = self._of(uuid)
        if before is None:
            return
        after = step.apply_removed(before, seq=seq, now=self._clock.time(), config=self._config)
        self._move(before, after)
        if after.report is None:
            self._republish.discard(uuid)
        if after.version == 0 and after.due_at is None and not self._is_disputed(after):
            del self.positions[uuid]  # never reported: a made-up uuid leaves nothing behind

    def apply_failure(self, uuid: str) -> None:
        """The node could not be read."""
        before = self._of(uuid)
        if before is not None:
            self._move(before, step.on_read_failure(before, now=self._clock.time(), config=self._config))

    def republish_all(self, *, gone_since: float) -> None:
        """Report every node to placement again, each when it is next read; now what is held for a fault, as no read may
        show it.
        """
        # Nodes that have gone since are not read any more: their removal is reported now, because inventory in use when
        # it was removed stays in placement, without capacity, until a later report finds it unused.
        now = self._clock.time()
        for uuid, position in list(self.positions.items()):
            if position.problem == ABSENT:
                self._republish.add(uuid)  # an operator may have deleted it: a report would make it anew
            elif position.problem and position.report is not None and not step.has_free_inventory(position):
                self._move(position, step.with_new_version(position, now=now))
            elif position.report is not None or position.due_at is not None:
                self._republish.add(uuid)
            elif position.version and (position.read_at or 0.0) >= gone_since:
                self._move(position, step.with_new_version(position, now=now))

    def outdated(self, uuid: str, version: int) -> None:
        """Placement has this version of a node: positions were lost, and an earlier clock was ahead."""
        before = self.positions.get(uuid)
        if before is None or not 0 < before.version < version < FARTHEST:
            return  # a late copy lost, not the newest report
        log.warning("ironic.stale", node=uuid, version=before.version, known=version)
        above = replace(before, version=version)
        if above.report is None:
            self._move(above, step.with_new_version(above, now=self._clock.time()))
            return
        self.positions[uuid] = above  # reported again, above it, with the next read: an offer needs a fresh one
        self._republish.add(uuid)
        self.schedule_read(uuid)

    def known(self) -> list[str]:
        """Nodes that have been reported to placement."""
        return [uuid for uuid, position in self.positions.items() if position.report is not None]

    def missing_nodes(self, first: int) -> list[str]:
        """Reported nodes of which a list has nothing that began at that number. One that is known to be absent is read
        again when that has been so for long.
        """
        return [
            uuid
            for uuid in self.known()
            if (one := self.positions[uuid]).read_seq < first and not (one.read_seq and one.problem == ABSENT)
        ]

    def problems(self) -> dict[str, str]:
        """{node: code} of nodes that cannot be placed on as they are, by node."""
        return {uuid: self.positions[uuid].problem for uuid in sorted(self.positions) if self.positions[uuid].problem}

    def next_due(self) -> float | None:
        """When the next node is to be read; None: not planned."""
        for ready in self._ready.first(1).values():
            return ready.due_at
        while self._due:
            due_at, uuid = self._due[0]
            if self._is_planned(uuid, due_at):
                return due_at
            heapq.heappop(self._due)  # it was read, or planned again, since
        return None

    def pop_due(self, now: float) -> str | None:
        """A node whose time has come, one that is on offer before others. It is not planned any more until a step plans
        it.
        """
        while self._due and self._due[0][0] <= now:
            due_at, uuid = heapq.heappop(self._due)
            if self._is_planned(uuid, due_at):
                self._ready.put(uuid, self.positions[uuid], urgent=step.has_free_inventory(self.positions[uuid]))
        for uuid in self._ready.first(1):
            self._ready.pop(uuid)
            self.positions[uuid] = replace(self.positions[uuid], due_at=None)
            return uuid
        return None

    def _is_planned(self, uuid: str, due_at: float) -> bool:
        position = self.positions.get(uuid)
        return position is not None and position.due_at == due_at

    def purge(self, reported_before: float) -> None:
        """Drop removed nodes last reported to placement before this time."""
        limit = int(reported_before * 1_000_000)
        for uuid, position in list(self.positions.items()):
            is_published = position.version == self.published.get(uuid, 0)
            is_over = position.report is None and position.due_at is None and is_published
            if is_over and position.version < limit and not self._is_disputed(position):
                del self.positions[uuid]
                self.published.pop(uuid, None)
                self._gone.discard(uuid)

    def _of(self, uuid: str) -> Position | None:
        if (position := self.positions.get(uuid)) is not None:
            return position
        known, most = len(self.positions), self._config.max_nodes
        is_full = known - len(self._gone) >= most or known >= 2 * most
        if is_full and not self._logged_full:
            log.error("ironic.too_many_nodes", node=uuid, max_nodes=most)
        self._logged_full = is_full  # once, and not for each node of each list
        return None if is_full else Position(uuid=uuid)

    def _count(self, position: Position) -> None:
        if step.is_absent(position):
            self._gone.add(position.uuid)
        else:
            self._gone.discard(position.uuid)

    def _mark_republished(self, after: Position, before: Position, now: float) -> Position:
        # Overtaken by a notification, it is read again at once: an offer is reported again after a fresh read, too.
        if after.uuid not in self._republish or after.read_at != now or after.notified_seq > after.read_seq:
            return after
        self._republish.discard(after.uuid)
        return after if after.version > before.version else step.with_new_version(after, now=now)

    def _move(self, before: Position, after: Position) -> None:
        """Adopt a step, to be saved (and reported) where that changes."""
        self.positions[after.uuid] = after
        self._count(after)
        if after.due_at != before.due_at:
            self._ready.pop(after.uuid)
        if after.due_at is not None and (after.due_at != before.due_at or after.read_seq != before.read_seq):
            heapq.heappush(self._due, (after.due_at, after.uuid))
            self.planned.set()
        self._log_problem(before, after)
        if after.read_seq > after.notified_seq and after.version <= self.published.get(after.uuid, 0):
            self.settle(after.uuid)  # read as requested, and placement knows it all
        if _kept(after) == _kept(before):
            return
        self.to_save(after)

    def to_save(self, position: Position) -> None:
        """Have a position saved as it is now."""
        self.unsaved.put(position.uuid, position, urgent=not step.has_free_inventory(position))
        self.moved.set()

    def _log_problem(self, before: Position, after: Position) -> None:
        if after.problem == before.problem:
            return
        if after.problem:
            log.error("ironic.node_problem", node=after.uuid, code=after.problem, state=after.state)


def _kept(position: Position) -> tuple[object, ...]:
    """What of a position is saved as soon as it changes."""
    return position.version, position.problem, position.state, position.absent_since
