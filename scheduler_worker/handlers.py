"""Build, delete and move requests: a batch in, an outcome for each message out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog
from msgspec import structs

from bus.clock import Clock
from bus.consuming.given_up import EXPIRED, GIVEN_UP_BY_BROKER, given_up_of
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import BuildAccepted, BuildRequest, DeleteRequest
from bus.contracts.moves import MoveRequest
from bus.faults import BrokenInvariant, Forbidden, Transient
from bus.port import BusError
from bus.turns import InParts
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.deletes import PendingDelete, pending_delete
from scheduler_worker.domain.moves import pending_move
from scheduler_worker.domain.pending import FlavorAccess, PendingBuild, members_of, pending_build
from scheduler_worker.domain.recorded_moves import PendingMove
from scheduler_worker.engine import BUILDS_AT_ONCE, SchedulingEngine
from scheduler_worker.moves import MoveEngine
from scheduler_worker.retention import max_request_age_s

log = structlog.get_logger(__name__)

# The most machines in one call of the engine: a larger batch is divided, and never within one request.
MAX_MACHINES_PER_PASS = 512
# Larger than any position in a batch. The second and later members of requests for several machines have positions from
# here on.
FIRST_MEMBER_POSITION = 1_000_000


class RequestHandler:
    """Handles queue `scheduler.requests`, and the messages whose retries there are exhausted."""

    def __init__(
        self,
        engine: SchedulingEngine,
        moves: MoveEngine,
        flavors: FlavorAccess,
        *,
        clock: Clock,
        config: SchedulerConfig,
        keep_up: Callable[[], Awaitable[None]],
    ) -> None:
        """keep_up: waits while the events of earlier batches are not published."""
        self._engine = engine
        self._moves = moves
        self._flavors = flavors
        self._clock = clock
        self._max_age_s = max_request_age_s(config)
        self._keep_up = keep_up

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Process a batch; one outcome for each message, in order. Raises Transient when placement does not answer."""
        await self._keep_up()
        now = self._clock.time()
        deletes = [
            pending_delete(received, position)
            for position, received in enumerate(batch)
            if isinstance(received.message, DeleteRequest)
        ]
        moves = self._pending_moves(batch, now)
        outcomes = await self._process(await self._builds(batch, now), deletes)
        outcomes |= await self._moves.process(moves)
        return [outcomes[position] for position in range(len(batch))]

    async def _process(
        self, requests: Sequence[PendingBuild], deletes: Sequence[PendingDelete] = ()
    ) -> dict[int, Outcome]:
        """The outcomes of build requests and deletes by position, each request's members together."""
        outcomes: dict[int, Outcome] = {}
        for number, some in enumerate(_in_parts(requests) or [()]):
            builds: list[PendingBuild] = []
            members: list[list[PendingBuild]] = []
            for request in some:
                members.append(members_of(request, start=FIRST_MEMBER_POSITION + len(builds)))
                builds += members[-1]
            these = () if number else deletes
            if builds or these:
                found = await self._engine.process(builds, these)
                outcomes |= {
                    position: outcome for position, outcome in found.items() if position < FIRST_MEMBER_POSITION
                }
                outcomes |= {one[0].position: _outcome_of(one, found) for one in members}
        return outcomes

    async def given_up(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Queue `scheduler.given_up`: a request whose retries are exhausted ends with one terminal event.

        Its dead letter is no proof of its publisher (`bus.key_trust`), so it leads to nothing but that end. The
        requester of one that expired at the broker has stopped waiting for the answer, and knows that it may be carried
        out: it has no event. A build goes on if it was begun: what is on record was published by its project. So does a
        move. And so does an expired build without a record that may have claimed: its record is lost, and where that
        claim is it is built, or runs already.
        """
        why = [given_up_of(received) or GIVEN_UP_BY_BROKER for received in batch]
        expired = [one.code == EXPIRED for one in why]
        left = {position for position, one in enumerate(batch) if expired[position] and one.meta.reply_to is not None}
        builds = await self._builds(batch, self._clock.time())
        unfinished = [one for one in builds if expired[one.position]]
        known = await self._engine.on_record([one.instance_uuid for one in unfinished])
        lost = await self._engine.may_have_claimed([one for one in unfinished if one.instance_uuid not in known])
        begun = {
            one.position
            for one in unfinished
            if one.instance_uuid in lost or (one.position in left and one.instance_uuid in known)
        }
        going_on = [structs.replace(one, given_up=None) for one in builds if one.position in begun]
        ended = [structs.replace(one, given_up=why[one.position]) for one in builds if one.position not in begun | left]
        deletes = [
            (received.message, why[position])
            for position, received in enumerate(batch)
            if isinstance(received.message, DeleteRequest) and position not in left
        ]
        await self._engine.end_deletes(deletes)
        outcomes = await self._process(ended)
        outcomes |= await self._go_on(going_on)
        moves = [
            structs.replace(pending, given_up=why[pending.position], is_late=pending.position in left)
            for pending in self._pending_moves(batch, self._clock.time())
        ]
        outcomes |= await self._moves.process(moves)
        return [outcomes.get(position, Done()) for position in range(len(batch))]

    async def _go_on(self, builds: Sequence[PendingBuild]) -> dict[int, Outcome]:
        """The outcomes of begun builds by position. One whose handling crashes ends: it has no further dead letter."""
        outcomes: dict[int, Outcome] = {}
        for one in builds:
            try:
                outcomes |= await self._process([one])
            except (Transient, Forbidden, BusError):
                raise
            except Exception as error:  # any other: it would stay on record without an end
                log.exception("scheduler.given_up_crashed", cause=one.instance_uuid)
                outcomes |= await self._process([structs.replace(one, given_up=GIVEN_UP_BY_BROKER)])
                if isinstance(error, BrokenInvariant):
                    raise
        return outcomes

    async def _builds(self, batch: Sequence[Received], now: float) -> list[PendingBuild]:
        return [
            pending_build(received, position, now=now, flavors=self._flavors, max_age_s=self._max_age_s)
            async for part in InParts(enumerate(batch), BUILDS_AT_ONCE)
            for position, received in part
            if isinstance(received.message, BuildRequest)
        ]

    def _pending_moves(self, batch: Sequence[Received], now: float) -> list[PendingMove]:
        return [
            pending_move(received, position, now=now, max_age_s=self._max_age_s)
            for position, received in enumerate(batch)
            if isinstance(received.message, MoveRequest)
        ]


def _in_parts(requests: Sequence[PendingBuild]) -> list[list[PendingBuild]]:
    """The requests in lists of at most MAX_MACHINES_PER_PASS machines."""
    parts: list[list[PendingBuild]] = []
    machines = MAX_MACHINES_PER_PASS
    for pending in requests:
        machines += pending.request.members
        if machines > MAX_MACHINES_PER_PASS:
            parts.append([])
            machines = pending.request.members
        parts[-1].append(pending)
    return parts


def _outcome_of(members: Sequence[PendingBuild], outcomes: Mapping[int, Outcome]) -> Outcome:
    """The outcome of a request with these members: a retry if one of them is retried, otherwise that of the first."""
    first = outcomes[members[0].position]
    if len(members) == 1:
        return first
    for pending in members:
        outcome = outcomes[pending.position]
        if not isinstance(outcome, Done):
            return outcome
    if isinstance(first, Done) and isinstance(first.reply, BuildAccepted):
        reply = BuildAccepted(
            instance_uuid=first.reply.instance_uuid, members=tuple(one.instance_uuid for one in members)
        )
        return Done(reply=reply)
    return first
