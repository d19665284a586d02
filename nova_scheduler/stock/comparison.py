"""How a stock scheduler's answer differs from berth's, which decides beside it without a claim, by the one placer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from enum import StrEnum
from functools import partial
from typing import Any, Final, Protocol

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.clock import Clock
from bus.contracts.base import MAX_REASON
from bus.contracts.nova_calls import MAX_NAMED, CallCompared, ComparedAnswer
from nova_scheduler.decide.decision_log import CallRecorder
from nova_scheduler.metrics import SHADOW, SHADOW_S
from nova_scheduler.request.request_spec import NotDecided
from nova_scheduler.wire.envelope import Call, CallOutcome, RemoteFault
from placement_worker.replica.replica import Replica

log = structlog.get_logger("nova")

DECIDE_S: Final = 10.0  # that a decision may take
MAX_IN_FLIGHT: Final = 256  # decisions whose call has no answer yet; the calls beyond are answered all the same
MAX_UUID, MAX_HOST = 255, 600  # letters that are told of what another scheduler or a client names

Hosts = tuple[tuple[str, str], ...]  # of each instance the host, and its node


class Difference(StrEnum):
    """What the stock scheduler's answer is beside berth's."""

    SAME = "same"
    OTHER_HOST = "other host"
    RULE_BROKEN = "rule broken"
    WOULD_FIT = "would fit"
    WOULD_FAIL = "would fail"
    UNDECIDED = "undecided"
    STOCK_FAILED = "stock failed"
    FAILED = "failed"
    SKIPPED = "skipped"


class SchedulerAnswer(Struct, frozen=True, kw_only=True):
    """One scheduler's answer to a call: the host of each instance, or why there are none."""

    took_s: float = 0.0  # seconds
    hosts: Hosts = ()
    reason: str = ""
    is_decided: bool = True  # False: it is no answer: berth would forward the call, or the stock scheduler failed


class ShadowedDestinations(Protocol):
    """What decides (`select_destinations.Destinations`), with a placer that claims by `GrantedClaims`."""

    async def call(self, call: Call) -> object:
        """As CallDispatcher has it."""

    async def broken_rule(self, call: Call, hosts: Hosts) -> str:
        """What rejects one of these hosts of the call's instances, in their order; "": nothing does."""


class AnswerComparison:
    """Has berth decide beside each call, and reports how the stock scheduler's answer differs. Nothing waits for it;
    its failures are counted and logged.
    """

    def __init__(
        self,
        destinations: ShadowedDestinations,
        replica: Replica,
        clock: Clock,
        recorder: CallRecorder | None = None,  # takes differences
    ) -> None:
        self._destinations = destinations
        self._recorder = recorder or CallRecorder()
        self._replica = replica
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._compared, self._own_s, self._stock_s = 0, 0.0, 0.0

    async def close(self) -> None:
        """Drop decisions under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def in_flight(self) -> int:
        """Decisions under way, or whose call has no answer yet."""
        return len(self._tasks)

    def counts(self) -> Mapping[str, int]:
        """{difference: calls} since the start."""
        return self._counts

    def mean_s(self) -> tuple[float, float]:
        """Seconds of a decision on average: berth's, the stock scheduler's."""
        calls = self._compared or 1
        return self._own_s / calls, self._stock_s / calls

    def start(
        self,
        call: Call,
        stock: Callable[[], Awaitable[SchedulerAnswer]],
        within: AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        """Decide a call, and compare. stock: waits for the other answer. within: entered before berth decides, and left
        when the call is over.
        """
        if len(self._tasks) >= MAX_IN_FLIGHT:
            self._count(Difference.SKIPPED)
            return
        compared = self._compare(call, stock, within or nullcontext())
        task = asyncio.create_task(compared, name="nova shadow")
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, call))

    def _ended(self, call: Call, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        for uuid in instances_of(call):
            self._replica.drop_assumed(uuid)

    async def _compare(
        self, call: Call, stock: Callable[[], Awaitable[SchedulerAnswer]], within: AbstractAsyncContextManager[None]
    ) -> None:
        try:
            async with within:
                begun_s = self._clock.monotonic()
                async with asyncio.timeout(DECIDE_S):
                    own = await self._decided(call)
                own = replace(own, took_s=self._clock.monotonic() - begun_s)
                other = await stock()
                async with asyncio.timeout(DECIDE_S):
                    rule = await self._destinations.broken_rule(call, other.hosts) if own.is_decided else ""
        except Exception as error:  # of a decision that nobody waits for
            self._count(Difference.FAILED)
            code = getattr(error, "code", "") or type(error).__name__
            log.warning("nova.shadow_failed", code=code, reason=str(error), request_id=call.request_id)
            return
        self._report(call, own, other, rule)

    def _report(self, call: Call, own: SchedulerAnswer, stock: SchedulerAnswer, rule: str) -> None:
        self._count(difference := difference_of(own, stock, rule))
        self._compared += 1
        self._own_s += own.took_s
        self._stock_s += stock.took_s
        SHADOW_S.labels("berth").observe(own.took_s)
        SHADOW_S.labels("stock").observe(stock.took_s)
        if difference is not Difference.SAME:
            self._recorder.record_difference(
                call.request_id,
                CallCompared(
                    difference=difference.value,
                    instances=tuple(one[:MAX_UUID] for one in instances_of(call)[:MAX_NAMED]),
                    berth=_compared(own),
                    stock=_compared(stock),
                    rule=rule[:MAX_REASON],
                    project_id=call.project_id,
                ),
            )

    async def _decided(self, call: Call) -> SchedulerAnswer:
        """What berth would answer. Raises any fault of a decision."""
        try:
            return answer_of(CallOutcome(result=await self._destinations.call(call)))
        except RemoteFault as fault:
            return answer_of(CallOutcome(class_name=fault.class_name, message=fault.message))
        except NotDecided as undecided:
            return SchedulerAnswer(reason=undecided.reason, is_decided=False)

    def _count(self, difference: Difference) -> None:
        SHADOW.labels(difference.value).inc()
        self._counts[difference.value] += 1


def answer_of(outcome: CallOutcome) -> SchedulerAnswer:
    """A scheduler's answer: the first host of each instance, or what it has raised."""
    if outcome.class_name:
        return SchedulerAnswer(reason=outcome.message, is_decided=outcome.class_name.startswith("NoValidHost"))
    rows = outcome.result if isinstance(outcome.result, list) else []
    hosts = tuple(one for row in rows if (one := _host_of(row)) is not None)
    return SchedulerAnswer(hosts=hosts, reason="" if hosts else "it names no host", is_decided=bool(hosts))


def _host_of(row: Any) -> tuple[str, str] | None:
    """The host of an instance: of a Selection with its alternates, or of the older form of one host."""
    first = row[0] if isinstance(row, list) and row else row
    data = first.get("nova_object.data", first) if isinstance(first, dict) else None
    if not isinstance(data, dict):
        return None
    host, node = data.get("service_host", data.get("host")), data.get("nodename")
    return (host, node) if isinstance(host, str) and isinstance(node, str) else None


def _compared(decision: SchedulerAnswer) -> ComparedAnswer:
    """For operators."""
    hosts = (host if host == node else f"{host} {node}" for host, node in decision.hosts[:MAX_NAMED])
    return ComparedAnswer(
        hosts=tuple(one[:MAX_HOST] for one in hosts),
        reason=decision.reason[:MAX_REASON],
        took_s=round(decision.took_s, 6),
    )


def difference_of(own: SchedulerAnswer, stock: SchedulerAnswer, rule: str) -> Difference:
    """rule: that the stock scheduler's choice breaks."""
    if not stock.is_decided:
        return Difference.STOCK_FAILED
    if not own.is_decided:
        return Difference.UNDECIDED
    if rule:
        return Difference.RULE_BROKEN
    # Alike instances of one call are interchangeable.
    if sorted(own.hosts) == sorted(stock.hosts):
        return Difference.SAME
    if own.hosts and stock.hosts:
        return Difference.OTHER_HOST
    return Difference.WOULD_FIT if own.hosts else Difference.WOULD_FAIL


def instances_of(call: Call) -> list[str]:
    """The instances that a call names."""
    uuids = call.arguments.get("instance_uuids")
    return [one for one in uuids if isinstance(one, str)] if isinstance(uuids, list) else []
