"""The scheduler's requests to placement: a port, and its adapter over the bus.

Every method answers for each message, in order. A missing answer is a fault; it never means "no".
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

from bus.bus import Bus
from bus.contracts.base import Message
from bus.contracts.placement import (
    MAX_NAMED,
    Claim,
    ClaimAll,
    ClaimAllResult,
    ClaimResult,
    LocatePage,
    LocateRequest,
    Release,
    ReleaseResult,
    Revert,
    RevertResult,
)
from bus.contracts.placement_queries import (
    AllocationsPage,
    AllocationsQuery,
    ConsumerRecord,
    ProjectUsagePage,
    ProjectUsageQuery,
)
from bus.faults import Fault, RequestRefused, Transient
from bus.transport import BusError

Reply = TypeVar("Reply", bound=Message)
PlacementMessage: TypeAlias = Claim | Release | Revert
Answer: TypeAlias = ClaimResult | ReleaseResult | RevertResult
ANSWERS: Mapping[type[PlacementMessage], type[Answer]] = {
    Claim: ClaimResult,
    Release: ReleaseResult,
    Revert: RevertResult,
}


class ClaimPort(Protocol):
    """Claims of instances, and reads of placement. Adapters: `BusClaims`; for tests, `tests.kit.claims`."""

    async def submit(self, claims: Sequence[Claim]) -> list[ClaimResult | Fault]:
        """Claim for many consumers at once, each claim by itself. A repeated claim has the same result."""

    async def submit_gangs(self, gangs: Sequence[ClaimAll]) -> list[ClaimAllResult | Fault]:
        """Claim for all members of each gang or for none of them. A repeated claim has the same result."""

    async def locate(self, requests: Sequence[LocateRequest]) -> list[LocatePage | Fault]:
        """Return the hosts of server group members and of named instances, as of now."""

    async def allocations(self, consumers: Sequence[str]) -> list[ConsumerRecord | Fault | None]:
        """Return what each of these holds, and by which owner, as of now. None: it holds nothing."""

    async def usage(self, projects: Sequence[str]) -> ProjectUsagePage | Fault:
        """Return what these projects hold, as of now: at most MAX_PROJECTS."""


class BusClaims:
    """Requests to placement over the API bus."""

    def __init__(self, bus: Bus, *, timeout_s: float) -> None:
        self._bus = bus
        self._timeout_s = timeout_s  # how long an answer is waited for

    async def submit(self, claims: Sequence[Claim]) -> list[ClaimResult | Fault]:
        """All in one round trip."""
        return await self._request(claims, ClaimResult, [claim.consumer for claim in claims])

    async def submit_gangs(self, gangs: Sequence[ClaimAll]) -> list[ClaimAllResult | Fault]:
        """All in one round trip."""
        return await self._request(gangs, ClaimAllResult, [gang.claims[0].consumer for gang in gangs])

    async def locate(self, requests: Sequence[LocateRequest]) -> list[LocatePage | Fault]:
        """All in one round trip."""
        return await self._request(requests, LocatePage, [request.excluding or "" for request in requests])

    async def allocations(self, consumers: Sequence[str]) -> list[ConsumerRecord | Fault | None]:
        """All in one round trip."""
        parts = [tuple(consumers[start : start + MAX_NAMED]) for start in range(0, len(consumers), MAX_NAMED)]
        pages = await self._request(
            [AllocationsQuery(consumers=one) for one in parts], AllocationsPage, [""] * len(parts)
        )
        answers: list[ConsumerRecord | Fault | None] = []
        for part, page in zip(parts, pages, strict=True):
            found = {one.consumer: one for one in page.consumers} if isinstance(page, AllocationsPage) else {}
            answers += [found.get(uuid) if isinstance(page, AllocationsPage) else page for uuid in part]
        return answers

    async def usage(self, projects: Sequence[str]) -> ProjectUsagePage | Fault:
        """One round trip."""
        (page,) = await self._request([ProjectUsageQuery(projects=tuple(projects))], ProjectUsagePage, [""])
        return page

    async def ask(self, questions: Sequence[PlacementMessage]) -> list[Answer | Fault]:
        """Questions of cells whose instances leave for another one, all at once."""
        answers = await asyncio.gather(*(self._request([one], ANSWERS[type(one)], [one.consumer]) for one in questions))
        return [answer for (answer,) in answers]

    async def _request(
        self, messages: Sequence[Message], reply: type[Reply], causes: Sequence[str]
    ) -> list[Reply | Fault]:
        try:
            return await self._bus.request_all(messages, reply, timeout_s=self._timeout_s, causes=causes)
        except (BusError, Transient) as error:
            # No placement is running, or the bus is unavailable: the messages may or may not have been delivered.
            return [PlacementUnavailable(str(error)) for _ in messages]


T = TypeVar("T")


class PlacementUnavailable(Transient):
    """Placement does not answer."""

    code = "placement.unavailable"


def unavailable_from_fault(fault: Fault) -> PlacementUnavailable:
    """The fault of an unanswered message, as a result."""
    if isinstance(fault, PlacementUnavailable):
        return fault
    return PlacementUnavailable(f"{fault.code} {fault.reason}".strip())


def answer_or_raise(answer: T | Fault) -> T:
    """The answer to a query. Raises PlacementUnavailable, or RequestRefused: placement has refused it for good."""
    if isinstance(answer, RequestRefused):
        raise answer
    if isinstance(answer, Fault):
        raise unavailable_from_fault(answer) from answer
    return answer
