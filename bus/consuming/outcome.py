"""Outcomes: a handler's return value for each message. The consumer alone acts on them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

from bus.contracts.base import Message, Meta


class Done(Struct, frozen=True):
    """Handled, or known to be handled already. `reply` goes to the requester, if there is one.

    after: a flush (`bus.persistence.group_flush`); it is acknowledged after this, or delivered again if this fails.
    """

    reply: Message | None = None
    after: asyncio.Future[None] | None = None


class Retry(Struct, frozen=True):
    """Not now: deliver it again after the queue's next delay; after the last delay it is a dead letter."""

    code: str
    reason: str = ""


class Refuse(Struct, frozen=True):
    """Never: a Refusal to the requester, or, if there is none, a dead letter with this code and reason."""

    code: str
    reason: str = ""


Outcome = Done | Retry | Refuse


class Received(Struct, frozen=True):
    """One message as a handler gets it: parsed, bounded, with what travelled beside it.

    exhausted: it was delivered so often without an end that the broker is about to give it up. A handler that must
    inform its client of every end publishes it now, and does nothing else for it: its effects may have ended its
    process before. given_up: why another queue gave it up, the code of its dead letter; empty: this is none.
    """

    message: Message
    meta: Meta
    bus: str
    queue: str
    redelivered: bool = False
    exhausted: bool = False
    given_up: str = ""


# A handler gets all that has gathered (at least one) and answers for each, in the same order.
Handler = Callable[[Sequence[Received]], Awaitable[Sequence[Outcome]]]
