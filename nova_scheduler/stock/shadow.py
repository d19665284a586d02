"""The shadow: a stock nova-scheduler decides and answers; berth decides beside it without a claim, and `comparison`
reports the difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from bus.clock import Clock
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
from nova_scheduler.request.request_spec import NotDecided
from nova_scheduler.stock.comparison import AnswerComparison, SchedulerAnswer, ShadowedDestinations, answer_of
from nova_scheduler.stock.forwarder import Fallback
from nova_scheduler.wire.envelope import Call, parse_outcome

SHADOWED: Final = "shadow"  # the reason for which each call is forwarded
# A generation that no provider comes to, nor the feed: what is granted here counts until it is forgotten.
NEVER: Final = 2**62


class InstancesLocated(Protocol):
    """What is read of placement for claims that are granted here (`ClaimPort`)."""

    async def locate(self, requests: Sequence[LocateRequest]) -> list[LocatePage | Fault]:
        """As ClaimPort has it."""

    async def usage(self, projects: Sequence[str]) -> ProjectUsagePage | Fault:
        """As ClaimPort has it."""


class GrantedClaims:
    """A ClaimPort that grants each claim and sends none; what instances hold is of the stock scheduler's claims, and
    tells nothing of what berth would have done. Where other instances are is read from placement.
    """

    def __init__(self, claims: InstancesLocated) -> None:
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

    def __init__(self, comparison: AnswerComparison, fallback: Fallback, clock: Clock) -> None:
        self._comparison = comparison
        self._fallback = fallback
        self._clock = clock

    async def open(self) -> None:
        """Connect."""
        await self._fallback.open()

    async def close(self) -> None:
        """Close; decisions under way are dropped."""
        await self._comparison.close()
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

        async def stock() -> SchedulerAnswer:
            body, took_s = await answer
            return replace(answer_of(parse_outcome(body)), took_s=took_s)

        async def left() -> None:
            await acknowledge_first()
            self._comparison.start(call, stock)

        try:
            body = await self._fallback.call(call, reason, left)
        except BaseException:
            answer.cancel()
            raise
        answer.set_result((body, self._clock.monotonic() - begun_s))
        return body
