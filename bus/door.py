"""Sends requests of projects to queue `scheduler.door`, each project in its turn: for the web, which serves several."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from bus.bus import Bus
from bus.contracts.base import Message, encode
from bus.contracts.catalogue import door_destination, operators_rights
from bus.fair_queue import Turns, cost_of
from bus.faults import Fault, RequestTimeout
from bus.retrying import WITHIN_A_REQUEST, Retrying
from bus.transport import BusError, BusForbidden

R = TypeVar("R", bound=Message)


async def request_in_turn(
    bus: Bus, turns: Turns, message: Message, reply: type[R], *, timeout_s: float, cause: str
) -> R:
    """Send a request and wait for the reply; what the door refuses takes its turn anew. A request that uses an
    operator's rights goes by their own queue. Raises as `Bus.request` does.
    """
    if operators_rights(message):
        return await bus.request(message, reply, timeout_s=timeout_s, cause=cause)
    project: str = message.project_id  # type: ignore[attr-defined]
    cost = cost_of(message.weight, len(encode(message)))

    async def in_turn() -> R:
        async with turns.turn(project, cost):
            (answer,) = await bus.request_all(
                [message], reply, timeout_s=timeout_s, causes=[cause], to=door_destination
            )
        if isinstance(answer, Fault):
            raise answer
        return answer

    try:
        async with asyncio.timeout(timeout_s):
            return await Retrying(WITHIN_A_REQUEST, bus.clock, bus.rng).call(
                in_turn, lambda error: isinstance(error, BusError) and not isinstance(error, BusForbidden)
            )
    except TimeoutError:
        raise RequestTimeout(f"no reply within {timeout_s} s") from None
