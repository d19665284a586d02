"""Reading nodes: after a notification, in a transient state, and all of them at intervals."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial

import structlog

from bus.clock import Clock, event_or_time
from bus.faults import Fault
from bus.retrying import Backoff, RetryPolicy
from ironic_sync import metrics
from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain.node import Unreadable
from ironic_sync.source.port import IronicClient
from ironic_sync.sync_state import SyncState

log = structlog.get_logger(__name__)

JITTER = 0.1  # of the time between two reads of all, so that several systems do not ask in step
# Single reads that begin in a second, however many nodes a storm has named: a read is some milliseconds of work, and
# what the storm takes out of placement needs none. What still waits at the next read of all is in its pages, too.
READS_A_SECOND = 100
ROUNDING_S = 1e-3  # a clock that was asked to sleep until then may wake a rounding error before it
MAX_ALLOCATIONS = 1000  # looked at side by side; past it the next read of all nodes finds the changes


class Reader:
    """Reads nodes when they are due by the sync_state, at most one read a node and a bounded number in all."""

    # Notifications about a node while it is being read cause one more read, however many they were.

    def __init__(
        self, client: IronicClient, sync_state: SyncState, *, clock: Clock, rng: random.Random, config: IronicSyncConfig
    ) -> None:
        self._client = client
        self._sync_state = sync_state
        self._clock = clock
        self._rng = rng
        self._config = config
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()
        self._allocations: dict[str, asyncio.Task[None]] = {}
        self._all = asyncio.Event()
        self._reading_all = False
        self._paced_until = float("-inf")  # by the reads that have begun
        self.last_all_at: float | None = None
        self.reachable = True

    @property
    def idle(self) -> bool:
        """Whether nothing is being read and nothing is due now."""
        due_at = self._sync_state.next_due()
        is_due = due_at is not None and due_at <= self._clock.time()
        return not (is_due or self._reading or self._allocations or self._reading_all or self._all.is_set())

    def read_all(self) -> None:
        """Read all nodes now (once more, when they are being read)."""
        self._all.set()

    async def run(self) -> None:
        """Read the nodes that are due, until cancelled."""
        try:
            while True:
                self._sync_state.planned.clear()
                self._start_due()
                await event_or_time(self._sync_state.planned, self._clock, self._wait_s())
        finally:
            await _cancel(self._reading, self._allocations)

    async def run_all(self) -> None:
        """Read all nodes when requested, and at intervals, until cancelled."""
        backoff = Backoff(_policy(self._config.failed_retry_s, self._config.failed_retry_max_s), self._clock)
        republish_at = self._clock.monotonic()
        while True:
            wait_s = self._config.resync_interval_s * (1 + JITTER * self._rng.uniform(-1, 1))
            await event_or_time(self._all, self._clock, wait_s)
            self._reading_all = True
            self._all.clear()
            if self._clock.monotonic() >= republish_at:
                self._sync_state.republish_all(gone_since=self._clock.time() - self._config.removed_retention_s)
                republish_at = self._clock.monotonic() + self._config.republish_interval_s
            complete = await self._read_all()
            if not complete:
                self._all.set()
            self._reading_all = False
            if complete or await self._wait_for_answer():
                backoff.reset()
            else:
                await backoff.wait()  # Ironic answers, and not to this

    async def _wait_for_answer(self) -> bool:
        """Ask Ironic something small until it answers; False when it did at once."""
        # A read of all nodes is not repeated every second, and after an outage none of them is to wait for its turn.
        was_unavailable = False
        while True:
            try:
                await self._client.ping()
                return was_unavailable
            except Fault:
                was_unavailable = True
            await self._clock.sleep(self._config.probe_interval_s)

    def follow_allocation(self, uuid: str) -> None:
        """Look at an allocation of Ironic's until it is made, then read the node it took."""
        if uuid in self._allocations:
            return
        if len(self._allocations) >= MAX_ALLOCATIONS:
            self.read_all()
            return
        task = asyncio.get_running_loop().create_task(self._follow_allocation(uuid))
        self._allocations[uuid] = task
        task.add_done_callback(lambda _: self._allocations.pop(uuid, None))

    def _start_due(self) -> None:
        while len(self._reading) < self._config.reads_in_flight and not self._held_back_s():
            uuid = self._sync_state.pop_due(self._clock.time())
            if uuid is None:
                return
            if uuid in self._reading:
                self._again.add(uuid)
                continue
            # After a pause a second's reads begin at once.
            self._paced_until = max(self._paced_until, self._clock.monotonic() - 1.0) + 1.0 / READS_A_SECOND
            task = asyncio.get_running_loop().create_task(self._read(uuid))
            self._reading[uuid] = task
            task.add_done_callback(partial(self._ended, uuid))

    def _wait_s(self) -> float | None:
        """Seconds until the next single read may begin; None: when one ends, or a node is planned."""
        if len(self._reading) >= self._config.reads_in_flight:
            return None
        due_at = self._sync_state.next_due()
        return None if due_at is None else max(due_at - self._clock.time(), self._held_back_s())

    def _held_back_s(self) -> float:
        remaining_s = self._paced_until - self._clock.monotonic()
        return remaining_s if remaining_s > ROUNDING_S else 0.0

    def _ended(self, uuid: str, _: object) -> None:
        del self._reading[uuid]
        if uuid in self._again:
            self._again.discard(uuid)
            self._sync_state.schedule_read(uuid)
        self._sync_state.planned.set()

    async def _read(self, uuid: str) -> None:
        with self._sync_state.read_in_flight() as seq:
            try:
                with self._sync_state.traces.reading(uuid):
                    node = await self._client.get_node(uuid)
            except Fault as fault:
                if self.reachable:
                    self.read_all()  # fails, too, if Ironic is away; then its first answer is waited for
                self.reachable = False
                metrics.READS.labels(fault.code).inc()
                log.warning("ironic.read_failed", node=uuid, code=fault.code, reason=fault.reason)
                self._sync_state.apply_failure(uuid)
                return
            self.reachable = True
            if node is None:
                metrics.READS.labels("gone").inc()
                self._sync_state.apply_removed(uuid, seq=seq)
                return
            metrics.READS.labels("unreadable" if isinstance(node, Unreadable) else "read").inc()
            self._sync_state.apply_read(node, seq=seq)

    async def _read_all(self) -> bool:
        """True when every page was read. Nodes that no page had are read one by one: only a 404 removes them."""
        sync_state, started_at = self._sync_state, self._clock.monotonic()
        with sync_state.read_in_flight() as first:
            seq = first
            try:
                async for page in self._client.list_nodes():
                    for node in page:
                        sync_state.apply_read(node, seq=seq)
                    seq = sync_state.next_seq()
                    await asyncio.sleep(0)  # a page is some milliseconds of work; notifications go in between
            except Fault as fault:
                self.reachable = False
                metrics.RESYNCS.labels(fault.code).inc()
                log.warning("ironic.resync_failed", code=fault.code, reason=fault.reason)
                return False
            self.reachable = True
            for uuid in sync_state.missing_nodes(first):
                sync_state.schedule_read(uuid)
        self.last_all_at = self._clock.time()
        self._report_all(self._clock.monotonic() - started_at)
        return True

    def _report_all(self, took_s: float) -> None:
        nodes, problems = len(self._sync_state.known()), self._sync_state.problems()
        metrics.RESYNCS.labels("read").inc()
        metrics.RESYNC_S.observe(took_s)
        metrics.NODES.set(nodes)
        metrics.PROBLEMS.clear()
        for code, many in Counter(problems.values()).items():
            metrics.PROBLEMS.labels(code).set(many)
        log.info("ironic.resync", nodes=nodes, took_s=round(took_s, 3), problems=len(problems))
        if problems:
            log.warning("ironic.problems", nodes=dict(list(problems.items())[:100]), of=len(problems))

    async def _follow_allocation(self, uuid: str) -> None:
        """Ironic announces nothing when an allocation leaves `allocating` and takes a node."""
        backoff = Backoff(_policy(self._config.allocation_retry_s, self._config.failed_retry_max_s), self._clock)
        for _ in range(self._config.allocation_tries):
            await backoff.wait()
            try:
                allocation = await self._client.get_allocation(uuid)
            except Fault as fault:
                log.warning("ironic.allocation_unread", allocation=uuid, code=fault.code)
                continue
            if allocation is None:
                break
            if allocation.node_uuid is not None:
                self._sync_state.schedule_read(allocation.node_uuid)
                return
            if allocation.state not in ("allocating", None):
                return
        self.read_all()  # gone, or never made, as far as is known: whatever it took is found this way


async def _cancel(*groups: dict[str, asyncio.Task[None]]) -> None:
    tasks = [task for group in groups for task in group.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _policy(first_s: float, longest_s: float) -> RetryPolicy:
    return RetryPolicy(first_s=first_s, longest_s=longest_s, least=1.0)
