"""The HTTP API below `/api/v1/dead-letters`: list what each bus has given up, send it back, delete it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec
import structlog
from starlette.requests import Request

from berth.client.types import DeadLetterCount, DeadLettersPurged, DeadLettersReplayed, DeadLetterView, ReplayBody
from berth.config.settings import Settings
from berth.config.site import bus_transports
from berth.dead_letters import send_back
from berth.web.api import Handlers, converted, number_of, object_of, parsed, route
from berth.web.problems import Problem
from berth.web.sign_in_sessions import WebRole
from bus.consuming import dead_letters as bus_dead_letters
from bus.consuming.dead_letters import Counts, DeadLetter
from bus.contracts.base import Label
from bus.service.environment import CellAddressInvalid, Environment
from bus.transport import QueueMissing, Transport

log = structlog.get_logger("web")

MAX_SHOWN = 10_000
OPEN_TIMEOUT_S = 10.0


class DeadLetterActions:
    """Dead letters of all buses. One look at a time: letters that one look holds are hidden from another."""

    def __init__(self, env: Environment, settings: Settings) -> None:
        self._env = env
        self._settings = settings
        self._looking = asyncio.Lock()

    async def counts(self) -> list[DeadLetterCount]:
        """How many there are, by bus and queue."""
        found: list[DeadLetterCount] = []
        for bus, make in (await self._buses()).items():
            try:
                async with self._opened(bus, make) as transport:
                    try:
                        counted = await bus_dead_letters.count(transport)
                    except QueueMissing:  # no worker has been on that bus yet
                        counted = Counts({}, 0)
            except CellAddressInvalid as fault:
                log.info("web.letters_unread", bus=bus, reason=fault.reason)
                continue
            found += [DeadLetterCount(bus, queue, dead) for queue, dead in counted.by_queue.items()]
        return found

    async def of_queue(self, bus: str, queue: str, limit: int) -> list[DeadLetterView]:
        """The oldest letters of a queue."""
        async with self._open(bus) as transport:
            return [
                _view(bus, dead_letter) for dead_letter in await bus_dead_letters.list_dead(transport, queue, limit)
            ]

    async def one(self, bus: str, queue: str, ident: str) -> DeadLetterView:
        """One letter with its body. Raises Problem 404."""
        async with self._open(bus) as transport:
            found = [one for one in await bus_dead_letters.list_dead(transport, queue, MAX_SHOWN) if one.id == ident]
        if not found:
            raise Problem(404, "dead_letter.unknown", f"{queue[:255]} has no dead letter {ident[:255]}")
        return _view(bus, found[0], body=found[0].body.decode(errors="replace"))

    async def replay(self, bus: str, queue: str, requested: ReplayBody) -> DeadLettersReplayed:
        """Send dead letters back to their queue."""
        async with self._open(bus) as transport:
            now = self._env.clock.time()
            back = await send_back(transport, queue, requested.ids, self._settings, now=now, old=requested.old)
        return DeadLettersReplayed(tuple(back.sent), tuple(back.too_old), back.blocked, str(back.fault or ""))

    async def purge(self, bus: str, queue: str, until: str | None = None) -> DeadLettersPurged:
        """Throw the dead letters of a queue away. until: those up to this one, none if it is there no more."""
        async with self._open(bus) as transport:
            ids = None
            if until is not None:
                there = [one.id for one in await bus_dead_letters.list_dead(transport, queue, MAX_SHOWN)]
                ids = there[: there.index(until) + 1] if until in there else []
            return DeadLettersPurged(await bus_dead_letters.purge(transport, queue, ids))

    @asynccontextmanager
    async def _open(self, bus: str) -> AsyncIterator[Transport]:
        buses = await self._buses()
        if bus not in buses:
            raise Problem(404, "bus.unknown", f"there is no bus {bus[:64]!r}; there are {', '.join(buses)}")
        async with self._opened(bus, buses[bus]) as transport:
            yield transport

    async def _buses(self) -> Mapping[str, Callable[[], Transport]]:
        async with self._one_at_a_time():
            return await bus_transports(self._env)

    @asynccontextmanager
    async def _opened(self, bus: str, make: Callable[[], Transport]) -> AsyncIterator[Transport]:
        async with self._one_at_a_time():
            transport = make()
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    await transport.open()
            except TimeoutError:
                raise Problem(503, "bus.unavailable", f"bus {bus} is out of reach") from None
            try:
                yield transport
            except QueueMissing as fault:
                raise Problem(404, "queue.unknown", f"bus {bus} has no such queue: {fault}") from None
            finally:
                await transport.close()

    @asynccontextmanager
    async def _one_at_a_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._looking.acquire()
        except TimeoutError:
            raise Problem(503, "bus.unavailable", "others wait for an answer about dead letters: try again") from None
        try:
            yield
        finally:
            self._looking.release()


class WebDeadLetters(Handlers):
    """The handlers. Each takes a request of a caller that is known."""

    def __init__(self, actions: DeadLetterActions) -> None:
        self._actions = actions

    @route("GET", "/dead-letters", role=WebRole.READER)
    async def count_dead_letters(self, request: Request) -> object:
        """How many dead letters there are, by bus and queue. Not for role project."""
        return await self._actions.counts()

    @route("GET", "/dead-letters/{bus}/{queue}", "limit", role=WebRole.READER)
    async def list_dead_letters(self, request: Request) -> object:
        """The oldest dead letters of a queue, without their bodies: ?limit=. Not for role project."""
        limit = number_of(request, "limit", 100, most=MAX_SHOWN)
        return await self._actions.of_queue(*_place(request), limit)

    @route("GET", "/dead-letters/{bus}/{queue}/letters/{dead_letter}", role=WebRole.OPERATOR)
    async def show_dead_letter(self, request: Request) -> object:
        """One dead letter with its body. For operators."""
        return await self._actions.one(*_place(request), request.path_params["dead_letter"])

    @route("POST", "/dead-letters/{bus}/{queue}/replay", role=WebRole.OPERATOR)
    async def replay_dead_letters(self, request: Request) -> object:
        """Send dead letters back to their queue. For operators."""
        body = converted(await object_of(request), ReplayBody)
        return await self._actions.replay(*_place(request), body)

    @route("DELETE", "/dead-letters/{bus}/{queue}", "until", role=WebRole.OPERATOR)
    async def purge_dead_letters(self, request: Request) -> object:
        """Throw the dead letters of a queue away, for good: ?until= the last of them. For operators."""
        until = parsed(lambda: msgspec.convert(request.query_params.get("until"), Label | None))
        return await self._actions.purge(*_place(request), until)


def _place(request: Request) -> tuple[str, str]:
    bus, queue = request.path_params["bus"], request.path_params["queue"]
    return bus, parsed(lambda: msgspec.convert(queue, Label))


def _view(bus: str, dead_letter: DeadLetter, *, body: str = "") -> DeadLetterView:
    return DeadLetterView(
        bus=bus,
        queue=dead_letter.queue,
        id=dead_letter.id,
        code=dead_letter.code,
        reason=dead_letter.reason,
        type=dead_letter.type,
        routing_key=dead_letter.routing_key,
        cause=dead_letter.cause,
        died_at=dead_letter.died_at,
        sent_at=dead_letter.sent_at,
        body=body,
        truncated_from_bytes=dead_letter.truncated_from,
        blocks_replay=dead_letter.blocks_replay,
    )
