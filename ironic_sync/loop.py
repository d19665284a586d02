"""Runs one term after another: it waits to become the only writer, then loads, listens, reads, saves and publishes
until the term ends.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

import structlog
from msgspec import Struct

from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.placement import InventoryStale
from bus.faults import Transient, first_fault
from bus.tracing.tracer import Tracer
from bus.transport import Transport
from ironic_sync import metrics
from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain.position import Position, reporter_name
from ironic_sync.listener import ListeningTerm, NotificationListener
from ironic_sync.measuring import Measurements
from ironic_sync.notification_traces import NotificationTraces
from ironic_sync.reader import Reader
from ironic_sync.source.port import IronicClient
from ironic_sync.store.port import NotLeader, Positions, Term
from ironic_sync.sync_state import SyncState
from ironic_sync.writer import PublishAll, Writer

log = structlog.get_logger(__name__)

DRAIN_POLL_S = 0.01


class SyncLoop:
    """Keeps placement in step with Ironic. Several processes may run on the same positions; one of them works, and the
    others wait.
    """

    def __init__(
        self,
        client: IronicClient,
        positions: Positions,
        transport: Transport,
        publish_all: PublishAll,
        *,
        clock: Clock,
        rng: random.Random,
        config: IronicSyncConfig,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._client = client
        self._positions = positions
        self._publish_all = publish_all
        self._clock = clock
        self._rng = rng
        self._config = config
        self._reporter = reporter_name(config.name)
        self._waiting = False
        self._term: _Term | None = None
        self._listener = NotificationListener(transport, clock=clock, config=config)

    @property
    def is_leader(self) -> bool:
        """Whether this process is the writer now."""
        return self._term is not None

    @property
    def healthy(self) -> bool:
        """Waiting for another writer is fine; a writer must have Ironic's answers, and its notifications if any."""
        # A fresh Ironic that has published nothing yet has no exchange. Until then its nodes are read every `resync_s`.
        term = self._term
        if term is None:
            return self._waiting
        listening = self._listener.bound or self._listener.exchange_missing
        return listening and term.reader.reachable and term.reader.last_all_at is not None

    @property
    def idle(self) -> bool:
        """Whether placement has all that is known of Ironic now (for tests and demonstrations)."""
        term = self._term
        return term is not None and term.reader.idle and term.writer.idle and term.reader.last_all_at is not None

    @property
    def sync_state(self) -> SyncState | None:
        """The positions while this process is the writer."""
        return self._term.sync_state if self._term else None

    def problems(self) -> dict[str, str]:
        """{node: code} of nodes that cannot be placed on as they are; known to the writer only."""
        return self._term.sync_state.problems() if self._term else {}

    def read_all(self) -> None:
        """Read all nodes now."""
        if self._term is not None:
            self._term.reader.read_all()

    async def outdated(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Queue ironic.stale.{process}: rows of placement that are newer than the last report."""
        for received in batch:
            message = received.message
            if isinstance(message, InventoryStale) and message.reporter == self._reporter and self._term is not None:
                self._term.sync_state.outdated(message.root_uuid, message.version)
        return [Done()] * len(batch)

    async def drain(self, grace_s: float) -> None:
        """Take no more notifications; see the taken changes saved and published, if the grace time allows."""
        term, until = self._term, self._clock.monotonic() + grace_s
        if term is None:
            return
        self._listener.stop()
        while not term.writer.idle and self._clock.monotonic() < until:
            await self._clock.sleep(DRAIN_POLL_S)

    async def run(self) -> None:
        """Work, or wait for the lease, until cancelled. Raises CancelledError also for a fault that a stop caused."""
        while True:
            try:
                # In a task of its own: a group of tasks that ends marks the task it is in as cancelled (Python 3.11).
                await asyncio.create_task(self._serve_term())
            except NotLeader as fault:
                if not self._waiting:
                    log.info("ironic.standing_by", reason=fault.reason)
                self._waiting = True
            except Transient as fault:
                self._waiting = False
                log.warning("ironic.term_ended", code=fault.code, reason=fault.reason)
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    # A fault that meets a cancellation takes its place: a group of tasks raises the fault alone.
                    raise asyncio.CancelledError from fault
            await self._clock.sleep(self._config.leader_poll_interval_s)

    async def _serve_term(self) -> None:
        async with self._positions.become_leader() as leadership:
            log.info("ironic.leading")
            self._waiting = False
            await self._run_together(leadership)

    async def _run_together(self, leadership: Term) -> None:
        """All tasks of a term live and die together, the renewal of its lease first; the first fault is its end."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_lease(leadership))
                term = self._term_of(leadership, *await leadership.load())
                for run in (
                    term.writer.save(),
                    term.writer.publish(),
                    term.reader.run(),
                    term.reader.run_all(),
                    self._listener.run(term.listening),
                    term.measurements.run(),
                ):
                    tasks.create_task(run)
                self._term = term
                metrics.LEADER.set(1)
        except (
            ExceptionGroup
        ) as faults:  # not `except*`: an exception that is raised from there is wrapped in a group again
            raise first_fault(faults) from faults
        finally:
            if (ended := self._term) is not None:
                self._term = None
                metrics.LEADER.set(0)
                metrics.PROBLEMS.clear()  # the next writer's, who may be another process
                ended.sync_state.requeue_unacknowledged()
                ended.sync_state.traces.close("ironic.term_ended")

    def _term_of(self, leadership: Term, positions: Mapping[str, Position], published: Mapping[str, int]) -> _Term:
        config, clock, reporter = self._config, self._clock, self._reporter
        sync_state = SyncState(
            positions, published, clock=clock, config=config, traces=NotificationTraces(self._tracer)
        )
        reader = Reader(self._client, sync_state, clock=clock, rng=self._rng, config=config)
        writer = Writer(leadership, sync_state, self._publish_all, clock=clock, cell=config.cell, reporter=reporter)
        measurements = Measurements(self._publish_all, clock=clock, max_nodes=config.max_nodes, reporter=reporter)
        listening = ListeningTerm(sync_state, reader.follow_allocation, reader.read_all, measurements.add)
        return _Term(sync_state, reader, writer, listening, measurements)

    async def _keep_lease(self, leadership: Term) -> None:
        """Renew the lease, and purge nodes that were removed long ago. A database that does not answer ends no term:
        only another writer does, and until there is one nothing else may change the positions.
        """
        purge_at = self._clock.monotonic()
        while True:
            await self._clock.sleep(self._config.leader_poll_interval_s)
            try:
                await leadership.renew()
                if self._term is not None and self._clock.monotonic() >= purge_at:
                    purge_at = self._clock.monotonic() + self._config.republish_interval_s
                    reported_before = self._clock.time() - self._config.removed_retention_s
                    await leadership.purge(reported_before)
                    self._term.sync_state.purge(reported_before)
            except Transient as fault:
                log.warning("ironic.lease_waits", code=fault.code, reason=fault.reason)


class _Term(Struct, frozen=True):
    """The parts of one term."""

    sync_state: SyncState
    reader: Reader
    writer: Writer
    listening: ListeningTerm
    measurements: Measurements
