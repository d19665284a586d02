"""How a call was decided, for operators: a line of the log, which `berth explain` reads, and an event on the API bus,
which the pages show.

A frontend keeps nothing, and any of several answers a call: what it has decided is in its log.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import Bus
from bus.contracts.base import MAX_REASON
from bus.contracts.nova_calls import (
    MAX_HOSTS,
    MAX_LOST,
    MAX_NAMED,
    MAX_PHRASE,
    MAX_REASONS,
    MAX_STEPS,
    CallCompared,
    CallDecision,
    DecisionStep,
    NovaCall,
)
from bus.transport import BusError
from nova_scheduler.request.request_spec import NotDecided
from nova_scheduler.wire.envelope import Call
from scheduler_worker.build.host_search import HostClaimed
from scheduler_worker.selection.explain import FailedClaim, NoValidHost

log = structlog.get_logger("nova")

NOT_DECIDED: Final = "nova.not_decided"
MAX_BYTES: Final = 64 * 1024  # of one event; a larger one leaves without hosts and scores
MAX_WAITING: Final = 200  # events; past it the oldest are dropped, as after a broker's absence
SHARE: Final = 0.25  # of what is kept: more than this a project has only while there is room


class DecisionEvents(Struct, frozen=True):
    """The events of decisions: with hosts, and without."""

    placed: str
    no_host: str


ANSWERED: Final = DecisionEvents("nova.placed", "nova.no_valid_host")
SHADOWED: Final = DecisionEvents("nova.shadow_placed", "nova.shadow_no_valid_host")  # of which Nova learns nothing
EVENTS: Final = frozenset({ANSWERED.placed, ANSWERED.no_host, SHADOWED.placed, SHADOWED.no_host, NOT_DECIDED})


class CallRecorder:
    """Takes how calls were decided, and logs it."""

    def record_decision(self, one: CallDecision) -> None:
        """Take how a call was decided, or why it is left to the fallback."""
        fields = {name: value for name, value in msgspec.to_builtins(one).items() if value}
        log.info(fields.pop("event"), **fields)

    def record_difference(self, request_id: str, one: CallCompared) -> None:
        """Take how the stock scheduler's answer differs from berth's, in the shadow."""
        log.info(
            "nova.shadow_differs",
            difference=one.difference,
            request_id=request_id,
            instances=list(one.instances),
            berth=list(one.berth.hosts) or one.berth.reason,
            stock=list(one.stock.hosts) or one.stock.reason,
            rule=one.rule,
            berth_s=one.berth.took_s,
            stock_s=one.stock.took_s,
        )


class RecentCalls:
    """The newest of what was noted, within both bounds: count and bytes. A project's calls push out no others: what
    there is too much goes from the oldest on, first of a project that has more than its share.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._recent: deque[tuple[NovaCall, str, int]] = deque()  # with their project and their bytes
        self._counts, self._bytes = Counter[str](), Counter[str]()  # of each project

    def add(self, call: NovaCall) -> None:
        """Keep it, in the place of older ones."""
        told, size = call.decision or call.compared, len(msgspec.json.encode(call))
        project = told.project_id if told is not None else ""
        self._recent.append((call, project, size))
        self._count(project, 1, size)
        while len(self._recent) > self._most or self._bytes.total() > self._most_bytes:
            crowded = (at for at, (_, owner, _) in enumerate(self._recent) if self._has_more_than_its_share(owner))
            at = next(crowded, 0)
            _, owner, size = self._recent[at]
            del self._recent[at]
            self._count(owner, -1, -size)

    def newest(self) -> tuple[NovaCall, ...]:
        """The newest first."""
        return tuple(call for call, _, _ in reversed(self._recent))

    def _count(self, project: str, calls: int, size: int) -> None:
        self._counts[project] += calls
        self._bytes[project] += size
        if not self._counts[project]:
            del self._counts[project], self._bytes[project]

    def _has_more_than_its_share(self, project: str) -> bool:
        return self._counts[project] > SHARE * self._most or self._bytes[project] > SHARE * self._most_bytes


class PublishedCalls(CallRecorder):
    """Announces it on the API bus as well, for the pages. No call waits for that, and little gathers while the bus is
    away.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting = self._none()
        self._changed = asyncio.Event()

    def record_decision(self, one: CallDecision) -> None:
        """Log it, and have it announced."""
        super().record_decision(one)
        self._put(self._event(one.request_id, decision=one))

    def record_difference(self, request_id: str, one: CallCompared) -> None:
        """Log it, and have it announced."""
        super().record_difference(request_id, one)
        self._put(self._event(request_id, compared=one))

    async def run(self) -> None:
        """Publish what is told, until it is cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            waiting, self._waiting = self._waiting, self._none()
            gathered = [(one, "") for one in reversed(waiting.newest())]
            with suppress(BusError):  # lost without harm: the log has it
                await self._bus.publish_all(gathered)

    def _none(self) -> RecentCalls:
        return RecentCalls(MAX_WAITING, MAX_WAITING * MAX_BYTES)

    def _event(
        self, request_id: str, *, decision: CallDecision | None = None, compared: CallCompared | None = None
    ) -> NovaCall:
        worker = self._bus.process or "nova-scheduler"
        at = self._bus.clock.time()
        return NovaCall(request_id=request_id, at=at, worker=worker, decision=decision, compared=compared)

    def _put(self, event: NovaCall) -> None:
        if event.decision is not None and len(msgspec.json.encode(event)) > MAX_BYTES:
            funnel = tuple(replace(step, hosts={}) for step in event.decision.funnel)
            event = replace(event, decision=replace(event.decision, funnel=funnel, scores=(), hosts=(), lost=()))
        self._waiting.add(event)
        self._changed.set()


def steps_of(result: NoValidHost, name_of: Callable[[int], str]) -> tuple[DecisionStep, ...]:
    """The funnel with the names of hosts. name_of: of a row of the replica, as it is now.

    Steps and reasons are cut: they name all aggregates of a zone, and the groups of all ports.
    """
    named: dict[str, dict[str, tuple[str, ...]]] = {}
    for one in result.excluded:
        named.setdefault(one.step, {})[one.reason[:MAX_PHRASE]] = tuple(map(name_of, one.rows))
    return tuple(
        DecisionStep(
            step=one.step[:MAX_PHRASE],
            remaining=one.remaining,
            rejected={reason[:MAX_PHRASE]: count for reason, count in islice(one.rejected.items(), MAX_REASONS)},
            hosts=dict(islice(named.get(one.step, {}).items(), MAX_REASONS)),
        )
        for one in result.funnel[:MAX_STEPS]
    )


def lost_of(claims: Iterable[FailedClaim]) -> tuple[str, ...]:
    """The first of the claims that got nothing, in words."""
    return tuple(one.what[:MAX_REASON] for one in islice(claims, MAX_LOST))


def not_decided(call: Call, why: NotDecided) -> CallDecision:
    """Of a call that is left to the fallback."""
    return CallDecision(
        event=NOT_DECIDED,
        request_id=call.request_id,
        project_id=call.project_id,
        reason=why.reason[:MAX_REASON],
        detail=why.detail[:MAX_REASON],
    )


def placed(event: str, call: Call, instances: Sequence[str], results: Sequence[HostClaimed]) -> CallDecision:
    """Of instances that have hosts."""
    named = results[:MAX_NAMED]
    return CallDecision(
        event=event,
        request_id=call.request_id,
        project_id=call.project_id,
        instances=tuple(instances[:MAX_NAMED]),
        count=len(instances),
        hosts=tuple(tuple(one.host for one in result.selections[:MAX_HOSTS]) for result in named),
        scores=tuple(results[0].scores[:MAX_HOSTS]),
        lost=lost_of(loss for result in named for loss in result.lost),
    )
