"""The shadow: a stock nova-scheduler decides and answers; berth decides beside it without a claim, by the one placer,
and the difference is reported. Nothing waits for berth's decision, and its failures are counted and logged.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, Final, Protocol

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.clock import Clock
from bus.contracts.base import MAX_REASON
from bus.contracts.nova_calls import MAX_NAMED, CallCompared, ComparedAnswer
from bus.contracts.placement import (
    Claim,
    ClaimAll,
    ClaimAllResult,
    ClaimOutcome,
    ClaimResult,
    LocatePage,
    LocateRequest,
)
from bus.contracts.placement_queries import ConsumerRecord, ProjectUsagePage
from bus.faults import Fault
from nova_scheduler.decide.decision_log import CallRecorder
from nova_scheduler.metrics import SHADOW, SHADOW_S
from nova_scheduler.request.request_spec import NotDecided
from nova_scheduler.stock.forwarder import Fallback
from nova_scheduler.wire.envelope import Call, CallOutcome, RemoteFault, parse_outcome
from placement_worker.replica.replica import Replica
from scheduler_worker.placement_client import ClaimPort

log = structlog.get_logger("nova")

SHADOWED: Final = "shadow"  # the reason for which each call is forwarded
DECIDE_S = 10.0  # that a decision may take
MAX_IN_FLIGHT = 64  # decisions whose call has no answer yet; the calls beyond are answered all the same
MAX_UUID, MAX_HOST = 255, 600  # letters that are told of what another scheduler or a client names
# A generation that no provider comes to, nor the feed: what is granted here counts until it is forgotten.
NEVER = 2**62

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


class GrantedClaims:
    """A ClaimPort that grants each claim and sends none; what instances hold is of the stock scheduler's claims, and
    tells nothing of what berth would have done. Where other instances are is read from placement.
    """

    def __init__(self, claims: ClaimPort) -> None:
        self._claims = claims

    async def submit(self, claims: Sequence[Claim]) -> list[ClaimResult | Fault]:
        """Grant the first option of each."""
        return [_granted(one) for one in claims]

    async def submit_gangs(self, gangs: Sequence[ClaimAll]) -> list[ClaimAllResult | Fault]:
        """The same of each gang's."""
        return [ClaimAllResult(results=tuple(map(_granted, one.claims))) for one in gangs]

    async def locate(self, requests: Sequence[LocateRequest]) -> list[LocatePage | Fault]:
        """As ClaimPort has it."""
        return await self._claims.locate(requests)

    async def allocations(self, consumers: Sequence[str]) -> list[ConsumerRecord | Fault | None]:
        """Nothing."""
        return [None] * len(consumers)

    async def usage(self, projects: Sequence[str]) -> ProjectUsagePage | Fault:
        """As ClaimPort has it."""
        return await self._claims.usage(projects)


def _granted(claim: Claim) -> ClaimResult:
    generations = dict.fromkeys(claim.options[0].allocations, NEVER)
    return ClaimResult(outcome=ClaimOutcome.CLAIMED, option=0, generations=generations, sequence=NEVER)


class UpstreamDecides:
    """The dispatcher of a server that is a shadow: casts are berth's too, each call is the stock scheduler's."""

    def __init__(self, destinations: ShadowedDestinations) -> None:
        self._destinations = destinations

    async def call(self, call: Call) -> object:
        """Of a cast as Destinations has it. Raises NotDecided of each call."""
        if call.is_answered:
            raise NotDecided(SHADOWED)
        return await self._destinations.call(call)


class ShadowingForwarder:
    """The fallback of such a server: berth decides beside each call."""

    # A call goes to the stock scheduler as those of the fallback do. berth's decision begins when it has left, so that
    # it sees placement as it is before the stock scheduler claims; its choices count as taken until that has answered.

    def __init__(
        self,
        destinations: ShadowedDestinations,
        fallback: Fallback,
        replica: Replica,
        clock: Clock,
        recorder: CallRecorder | None = None,  # takes differences
    ) -> None:
        self._destinations = destinations
        self._recorder = recorder or CallRecorder()
        self._fallback = fallback
        self._replica = replica
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        """Connect."""
        await self._fallback.open()

    async def close(self) -> None:
        """Close; decisions under way are dropped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fallback.close()

    async def forward(self, call: Call) -> None:
        """As the fallback has it."""
        await self._fallback.forward(call)

    def abandon(self) -> None:
        """As the fallback has it."""
        self._fallback.abandon()

    async def call(self, call: Call, reason: str, acknowledge_first: Callable[[], Awaitable[None]]) -> bytes:
        """The stock scheduler's answer; berth's decision is made beside it. Raises ForwardFailed."""
        answer: asyncio.Future[tuple[bytes, float]] = asyncio.get_running_loop().create_future()
        begun_s = self._clock.monotonic()

        async def left() -> None:
            await acknowledge_first()
            self._start(call, answer)

        try:
            body = await self._fallback.call(call, reason, left)
        except BaseException:
            answer.cancel()
            raise
        answer.set_result((body, self._clock.monotonic() - begun_s))
        return body

    @property
    def in_flight(self) -> int:
        """Decisions under way, or whose call has no answer yet."""
        return len(self._tasks)

    def counts(self) -> Mapping[str, int]:
        """{difference: calls} since the start."""
        return self._counts

    # --- beside it

    def _start(self, call: Call, answer: asyncio.Future[tuple[bytes, float]]) -> None:
        if len(self._tasks) >= MAX_IN_FLIGHT:
            self._count(Difference.SKIPPED)
            return
        task = asyncio.create_task(self._decide_alongside(call, answer), name="nova shadow")
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, call))

    def _ended(self, call: Call, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        for uuid in _instances(call):
            self._replica.drop_assumed(uuid)

    async def _decide_alongside(self, call: Call, answer: asyncio.Future[tuple[bytes, float]]) -> None:
        begun_s = self._clock.monotonic()
        try:
            async with asyncio.timeout(DECIDE_S):
                own = await self._decided(call)
            own = replace(own, took_s=self._clock.monotonic() - begun_s)
            body, took_s = await answer
            stock = replace(answer_of(parse_outcome(body)), took_s=took_s)
            async with asyncio.timeout(DECIDE_S):
                rule = await self._destinations.broken_rule(call, stock.hosts) if own.is_decided else ""
        except Exception as error:  # of a decision that nobody waits for
            self._count(Difference.FAILED)
            code = getattr(error, "code", "") or type(error).__name__
            log.warning("nova.shadow_failed", code=code, reason=str(error), request_id=call.request_id)
            return
        self._report(call, own, stock, rule)

    def _report(self, call: Call, own: SchedulerAnswer, stock: SchedulerAnswer, rule: str) -> None:
        self._count(difference := difference_of(own, stock, rule))
        SHADOW_S.labels("berth").observe(own.took_s)
        SHADOW_S.labels("stock").observe(stock.took_s)
        if difference is not Difference.SAME:
            self._recorder.record_difference(
                call.request_id,
                CallCompared(
                    difference=difference.value,
                    instances=tuple(one[:MAX_UUID] for one in _instances(call)[:MAX_NAMED]),
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


def _instances(call: Call) -> list[str]:
    uuids = call.arguments.get("instance_uuids")
    return [one for one in uuids if isinstance(one, str)] if isinstance(uuids, list) else []
