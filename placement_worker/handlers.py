"""The handlers of placement's queues. A handler takes a batch of messages and returns one outcome for each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import Any, TypeVar

import structlog

from bus.clock import Clock, LogInterval
from bus.consuming.outcome import Done, Outcome, Received, Refuse, RetryWhenAvailable
from bus.contracts import placement as messages
from bus.contracts import placement_queries as queries
from bus.contracts.base import Message, Refusal
from bus.contracts.feed import ChangesRequest, SnapshotRequest
from placement_worker import metrics
from placement_worker.domain.claim_ledger import ClaimReply
from placement_worker.domain.claims import ClaimItem
from placement_worker.domain.refusal import RefusalCode
from placement_worker.domain.reports import CONSUMERS_BUSY, NAME_TAKEN, ReportRefusal
from placement_worker.domain.trees import ChangeMembership, DeleteTree
from placement_worker.domain.values import ABOVE_CELLS, Provider, suggestion
from placement_worker.service import PlacementService

T = TypeVar("T")

# 10 ms each. 256 claims of ten hosts have 2,560, and 128 hosts of 50 traits 7,000: they are one part. A message that
# has more is a part of its own.
MAX_CLAIMED = 4_096
MAX_REPORTED = 8_192


def parts(items: Sequence[T], entries: Callable[[T], int], most: int) -> list[list[T]]:
    """The items in order, in lists of at most so many entries."""
    found: list[list[T]] = []
    left = 0
    for item in items:
        count = entries(item)
        if not found or count > left:
            found.append([])
            left = most
        left -= count
        found[-1].append(item)
    return found


def entries_of_claim(item: ClaimItem) -> int:
    """The providers that a claim, a gang or a swap names."""
    if isinstance(item, messages.Claim):
        return 1 + sum(len(option.allocations) for option in item.options)
    if isinstance(item, messages.ClaimAll):
        return sum(map(entries_of_claim, item.claims))
    if isinstance(item, messages.Restate):
        return 1 + len(item.allocations or ()) + len(item.migrations)
    return 1 + sum(len(each.allocations) for each in item.consumers) if isinstance(item, messages.Swap) else 1


def entries_of_report(update: messages.InventoryUpdate) -> int:
    """The providers of a report, with their classes, traits, aggregates and consumers."""
    return 1 + sum(
        1 + len(one.inventories) + len(one.traits) + len(one.aggregates or ()) + len(one.known_consumers)
        for one in update.providers
    )


log = structlog.get_logger("placement")

UNEXPECTED = "message.unexpected"
HOST_IN_USE = "host.in_use"


class PlacementHandlers:
    """The handlers of placement's queues. All messages of a batch are from one queue, and so from one bus.

    committed: a function that is called after every transaction of inventory or aggregates, to publish its changes at
    once. claimed: the same after a transaction of claims, whose changes need not leave before the reply. publish: a
    function that publishes messages on a bus, without the outbox.
    """

    def __init__(
        self,
        store: PlacementService,
        *,
        clock: Clock,
        committed: Callable[[], None],
        claimed: Callable[[], None],
        publish: Callable[[str, Sequence[Message]], Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._committed = committed
        self._claimed = claimed
        self._publish = publish
        self._unknown_log = LogInterval(clock)  # of traits, which each report of a reporter names again
        self._reads: dict[type[Message], Callable[[Any], Awaitable[Message]]] = {
            ChangesRequest: lambda one: store.changes(one.after, one.limit, one.incarnation),
            SnapshotRequest: lambda one: store.snapshot(one.after, one.limit),
            queries.AllocationsQuery: self._allocations,
            queries.CellConsumersQuery: store.reads.consumers_in_cell,
            queries.HostTreeQuery: store.reads.tree,
            queries.ServiceHostsQuery: store.reads.hosts_of_service,
            queries.GroupMembersQuery: store.reads.members,
            queries.ProjectUsageQuery: store.reads.usage,
        }
        self._changes: dict[type[Message], Callable[[Any, Received], Awaitable[Outcome]]] = {
            messages.InventoryReleased: self._release,
            messages.AggregateMembers: self._set_members,
            messages.ProviderTreeDelete: self._delete_tree,
        }

    async def requests(self, batch: Sequence[Received]) -> list[Outcome]:
        """Handle placement.requests and placement.releases: all claims, releases, reverts and swaps of the batch are
        one group in one transaction, or several where they name very many providers.
        """
        items = [(r.message, r.meta.mark) for r in batch if isinstance(r.message, ClaimItem)]
        applied: list[ClaimReply | Refusal] = []
        for part in parts(items, lambda item: entries_of_claim(item[0]), MAX_CLAIMED):
            started, bus = self._clock.monotonic(), batch[0].bus
            marks = () if bus == ABOVE_CELLS else [mark for _, mark in part]
            applied += await self._store.apply([item for item, _ in part], bus=bus, marks=marks)
            self._claimed()
            _measure("claims", len(part), self._clock.monotonic() - started)
        replies = iter(applied)
        return [
            self._answer(received, next(replies))
            if isinstance(received.message, ClaimItem)
            else _unexpected(received.message)
            for received in batch
        ]

    async def inventory(self, batch: Sequence[Received]) -> list[Outcome]:
        """Handle placement.inventory in the order of its messages: updates that follow each other together, and each
        other message in a transaction of its own.
        """
        outcomes: list[Outcome] = []
        for kind, reports in groupby(batch, lambda received: type(received.message)):
            if kind is messages.InventoryUpdate:
                outcomes += await self._report(list(reports))
            else:
                change = self._changes.get(kind)
                outcomes += [
                    _unexpected(one.message) if change is None else await change(one.message, one) for one in reports
                ]
        return outcomes

    async def _report(self, reports: Sequence[Received]) -> list[Outcome]:
        """Apply the updates of a batch, and tell their reporters what they do not know."""
        updates = [one.message for one in reports if isinstance(one.message, messages.InventoryUpdate)]
        results = await self._reported(updates, reports[0].bus)
        replies: list[Message] = []
        outcomes = [
            self._answer_report(received, update, result, replies)
            for received, update, result in zip(reports, updates, results, strict=True)
        ]
        if replies and self._publish is not None:
            await self._publish(reports[0].bus, replies)
        return outcomes

    def _answer_report(
        self,
        received: Received,
        update: messages.InventoryUpdate,
        result: messages.InventoryResult | ReportRefusal,
        replies: list[Message],
    ) -> Outcome:
        """The outcome of a report. replies: what its reporter is told of it is added to these."""
        of_root = {"reporter": update.reporter, "root_uuid": update.root_uuid}
        about = {
            "bus": received.bus,
            "cause": received.meta.cause,
            "reporter": update.reporter,
            "root": update.root_uuid,
        }
        if isinstance(result, ReportRefusal):
            metrics.REPORTS.labels(result.code).inc()
            log.warning("inventory.refused", code=result.code, reason=result.reason, **about)
            if result.code == CONSUMERS_BUSY:
                return RetryWhenAvailable(result.code, result.reason)
            if result.code != NAME_TAKEN or not update.reporter.startswith(messages.COMPUTE_REPORTER):
                return Refuse(result.code, result.reason)
            # No dead letter: the service repeats it until the name is free.
            replies.append(messages.InventoryConflict(code=result.code, reason=result.reason, **of_root))
            return Done(Refusal(code=result.code, reason=result.reason))
        metrics.REPORTS.labels(result.outcome).inc()
        if result.orphaned:
            log.warning("inventory.orphaned", orphaned=result.orphaned, version=update.version, **about)
        if (unknown := result.unknown_traits) and (reports := self._unknown_log.count()):
            similar = suggestion(unknown[0], self._store.names.trait_ids)
            log.warning("trait.unknown", traits=unknown, reason=similar, reports=reports, **about)
        if result.version:
            replies.append(messages.InventoryStale(version=result.version, **of_root))
        if result.owner is not None:
            log.error(result.outcome, code=result.outcome, owner=result.owner, **about)
            replies.append(messages.InventoryConflict(owner=result.owner, **of_root))
        return Done(result)

    async def _reported(
        self, updates: Sequence[messages.InventoryUpdate], bus: str
    ) -> list[messages.InventoryResult | ReportRefusal]:
        results: list[messages.InventoryResult | ReportRefusal] = []
        for part in parts(updates, entries_of_report, MAX_REPORTED):
            started = self._clock.monotonic()
            results += await self._store.apply_reports(part, bus=bus)
            self._committed()
            _measure("inventory", len(part), self._clock.monotonic() - started)
        return results

    async def _release(self, released: messages.InventoryReleased, received: Received) -> Outcome:
        bus, mark = received.bus, received.meta.mark
        refused = await self._store.release_roots(released.reporter, released.roots, bus=bus, mark=mark)
        return Done() if refused is None else Refuse(refused.code, refused.reason)

    async def _set_members(self, requested: messages.AggregateMembers, received: Received) -> Outcome:
        """Change the members of an aggregate. The message is accepted on the API bus alone, because a cell must not
        change aggregates.
        """
        if received.bus != ABOVE_CELLS:
            return _unexpected(requested)
        wanted = [(uuid, True) for uuid in requested.joins] + [(uuid, False) for uuid in requested.leaves]
        writes = [
            ChangeMembership(uuid, requested.aggregate, member, cause=received.meta.cause) for uuid, member in wanted
        ]
        outcomes = await self._store.write_trees(writes)
        self._committed()
        unknown = [uuid for (uuid, _), one in zip(wanted, outcomes, strict=True) if not isinstance(one, Provider)]
        return Done(messages.AggregateMembersSet(unknown=tuple(unknown)))

    async def _delete_tree(self, requested: messages.ProviderTreeDelete, received: Received) -> Outcome:
        """Delete the tree of a host. Accepted on the API bus alone: the schedulers know who still reports the host."""
        if received.bus != ABOVE_CELLS:
            return _unexpected(requested)
        (outcome,) = await self._store.write_trees([DeleteTree(requested.root_uuid, cause=received.meta.cause)])
        self._committed()
        if isinstance(outcome, Provider):
            log.warning("inventory.deleted", cause=received.meta.cause, root=requested.root_uuid, name=outcome.name)
        elif outcome.code is RefusalCode.PROVIDER_IN_USE:
            return Refuse(HOST_IN_USE, outcome.words)
        return Done(messages.ProviderTreeDeleted(removed=isinstance(outcome, Provider)))

    async def reads(self, batch: Sequence[Received]) -> list[Outcome]:
        """Handle placement.reads: pages of the feed and of placement, the hosts of consumers, and queries of
        operators.
        """
        outcomes: list[Outcome] = []
        located = iter(
            await self._store.reads.locate([r.message for r in batch if isinstance(r.message, messages.LocateRequest)])
        )
        for received in batch:
            requested = received.message
            if isinstance(requested, messages.LocateRequest):
                outcomes.append(Done(next(located)))
            elif (read := self._reads.get(type(requested))) is not None:
                outcomes.append(Done(await read(requested)))
            else:
                outcomes.append(_unexpected(requested))
        return outcomes

    async def _allocations(self, requested: queries.AllocationsQuery) -> queries.AllocationsPage:
        return queries.AllocationsPage(consumers=tuple(await self._store.reads.allocations(requested.consumers)))

    def _answer(self, received: Received, reply: ClaimReply | Refusal) -> Outcome:
        requested = received.message
        if isinstance(reply, Refusal):
            return Refuse(reply.code, reply.reason)
        if isinstance(reply, messages.ClaimResult) and isinstance(requested, messages.Claim):
            _count_claim(received, requested, reply)
        elif isinstance(reply, messages.ClaimAllResult) and isinstance(requested, messages.ClaimAll):
            for claim, result in zip(requested.claims, reply.results, strict=True):
                _count_claim(received, claim, result)
        elif isinstance(reply, messages.ReleaseResult):
            metrics.RELEASES.labels(reply.outcome).inc()
        elif isinstance(reply, messages.RevertResult):
            metrics.REVERTS.labels(reply.outcome).inc()
        elif isinstance(reply, messages.RestateResult):
            metrics.RESTATES.labels(reply.outcome).inc()
        elif isinstance(reply, messages.SwapResult):
            metrics.SWAPS.labels(reply.outcome).inc()
        return Done(reply)


def _count_claim(received: Received, claim: messages.Claim, result: messages.ClaimResult) -> None:
    """Count one claim, and log it when it was refused. Claims of a gang that are only `incomplete` are not logged."""
    metrics.CLAIMS.labels(result.outcome).inc()
    if result.outcome not in (messages.ClaimOutcome.CLAIMED, messages.ClaimOutcome.INCOMPLETE):
        log.info(
            "claim.refused",
            cause=received.meta.cause,
            instance=claim.consumer,
            attempt=claim.attempt,
            outcome=result.outcome,
            outcomes=result.outcomes,
            bus=received.bus,
            reason=result.reason,
        )


def _measure(kind: str, items: int, seconds: float) -> None:
    metrics.GROUP_ITEMS.labels(kind).observe(items)
    metrics.GROUP_SECONDS.labels(kind).observe(seconds)


def _unexpected(message: Message) -> Outcome:
    """Refuse a message that the catalogue does not route to this queue."""
    return Refuse(UNEXPECTED, type(message).__name__)
