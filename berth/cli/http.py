"""How a command reaches the HTTP API: which address and token it uses, and many calls at a time."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer

from berth.cli.common import explain, print_stop
from berth.cli.session.contexts import found_context
from berth.client import ApiProblem, ApiUnavailable, AsyncClient, Client
from bus.faults import Fault, Transient

B = TypeVar("B", bound=Callable[..., Any])
T = TypeVar("T")
R = TypeVar("R")

# Calls of one command that are under way at a time.
AT_ONCE = 16
# Between two looks at what a command waits for, at first and at most.
LOOK_S, MAX_LOOK_S = 0.05, 1.0
# A server that takes no more at present, or that no scheduler answers.
UNANSWERED = (429, 503, 504)


def calls_api(body: B) -> B:
    """Make a command of a function that calls the API and waits: a fault becomes a message and an exit status."""

    @functools.wraps(body)
    def called(*args: Any, **named: Any) -> None:
        try:
            body(*args, **named)
        except Fault as fault:
            stop = explain(fault)
            assert stop is not None
            print_stop(stop)
            raise SystemExit(stop.status) from None

    return called  # type: ignore[return-value]


@contextmanager
def api(config: Path | None = None) -> Iterator[Client]:
    """The client of the context that this command uses. config: the settings file that the command line names."""
    with found_context(os.environ, config).context.client() as client:
        yield client


@asynccontextmanager
async def connected(context: typer.Context) -> AsyncIterator[AsyncClient]:
    """The same of a command that awaits. Raises ContextFault, ApiAddressInvalid."""
    async with found_context(os.environ, context.obj).context.async_client() as client:
        yield client


async def each(items: Sequence[T], work: Callable[[T], Awaitable[R]], *, retry_for_s: float = 0.0) -> list[R | Fault]:
    """The result of each, or its fault, in their order, AT_ONCE at a time.

    retry_for_s: as long as the server takes no more, or does not answer, each is tried again: for calls that may be
    repeated. Where nothing answers any more, those behind are not tried.
    """
    until = time.monotonic() + retry_for_s
    found: list[R | Fault] = [Fault("not tried, because of the one before", code="command.not_commanded")] * len(items)
    left = iter(enumerate(items))
    silent = False

    async def one(item: T) -> R | Fault:
        nonlocal silent
        wait_s = LOOK_S
        while True:
            try:
                return await work(item)
            except Fault as fault:
                if not may_pass(fault) or time.monotonic() + wait_s > until:
                    silent = silent or isinstance(fault, ApiUnavailable)
                    return fault
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_LOOK_S)

    async def some() -> None:
        for at, item in left:
            if silent:
                return
            found[at] = await one(item)

    await asyncio.gather(*(some() for _ in range(min(AT_ONCE, len(items)))))
    return found


async def ended(
    waiting: Sequence[T], look: Callable[[T], Awaitable[R]], is_over: Callable[[R], bool], *, timeout_s: float
) -> tuple[list[R], bool]:
    """Look at each in turn until it is over; how each was at the last look, and whether all are over.

    Raises what `look` raises when the time ran out without an answer.
    """
    until = time.monotonic() + timeout_s
    found: list[R] = []
    for one in waiting:
        wait_s = LOOK_S
        while True:
            try:
                seen = await look(one)
            except Fault as fault:
                if not may_pass(fault) or time.monotonic() >= until:
                    raise
            else:
                if is_over(seen) or time.monotonic() >= until:
                    break
            await asyncio.sleep(min(wait_s, max(0.0, until - time.monotonic())))
            wait_s = min(2 * wait_s, MAX_LOOK_S)
        found.append(seen)
    return found, all(map(is_over, found))


def may_pass(fault: Fault) -> bool:
    """Whether the same call may succeed later: nothing answers, or a server takes no more."""
    return fault.status in UNANSWERED if isinstance(fault, ApiProblem) else isinstance(fault, Transient)
