"""How a command reaches the HTTP API: which address and token it uses, and many calls at a time."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from itertools import chain, repeat
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import typer

from berth.cli.common import MAX_LIMIT, Exit, Stop, explain, is_uuid, one_of, parse_uuid, print_stop
from berth.cli.session.contexts import found_context
from berth.client import ApiAnswerInvalid, ApiProblem, ApiTimeout, ApiUnavailable, AsyncClient, Client
from berth.client.types import Builds
from bus.contracts.build import BuildRecord, BuildState
from bus.faults import Fault, Transient

B = TypeVar("B", bound=Callable[..., Any])
T = TypeVar("T")
R = TypeVar("R")

# Calls of one command that are under way at a time.
AT_ONCE = 16
MAX_PAGES = 1_000  # that are read for one name
LEAST_S = 1.0  # that a call has for its answer
# Between two looks at what a command waits for, and before a call is repeated: the first pauses; then the last.
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)
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

    retry_for_s: as long as a server that has answered takes no more, or answers no more, each is tried again: for calls
    that may be repeated. Where nothing answers, those behind are not tried.
    """
    now = asyncio.get_running_loop().time
    until = now() + retry_for_s
    found: list[R | Fault] = [Fault("not tried, because of the one before", code="command.not_commanded")] * len(items)
    left = iter(enumerate(items))
    silent = has_answered = False

    async def one(item: T) -> R | Fault:
        nonlocal silent, has_answered
        for pause_s in chain(PAUSES_S, repeat(PAUSES_S[-1])):
            try:
                async with asyncio.timeout_at(until + LEAST_S) if retry_for_s else nullcontext():
                    done = await work(item)
                has_answered = True
                return done
            except TimeoutError:
                return ApiTimeout(f"no answer within {retry_for_s:g} s: it may be carried out")
            except Fault as fault:
                is_away = isinstance(fault, ApiUnavailable)
                has_answered = has_answered or not is_away
                if not (may_pass(fault) and has_answered) or now() + pause_s > until:
                    silent = silent or is_away
                    return fault
            await asyncio.sleep(pause_s)
        raise AssertionError

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
    now = asyncio.get_running_loop().time
    until = now() + timeout_s
    found: list[R] = []
    for one in waiting:
        for pause_s in chain(PAUSES_S, repeat(PAUSES_S[-1])):
            try:
                seen = await look(one)
            except Fault as fault:
                if not may_pass(fault) or now() >= until:
                    raise
            else:
                if is_over(seen) or now() >= until:
                    break
            await asyncio.sleep(min(pause_s, max(0.0, until - now())))
        found.append(seen)
    return found, all(map(is_over, found))


def may_pass(fault: Fault) -> bool:
    """Whether the same call may succeed later: nothing answers, or a server takes no more."""
    return fault.status in UNANSWERED if isinstance(fault, ApiProblem) else isinstance(fault, Transient)


async def instance_of(berth: AsyncClient, text: str, project: str | None) -> BuildRecord:
    """The instance that a text stands for, as `one_of`; of several of one name the one that is not deleted, if there is
    one. Raises Stop, Fault.
    """
    if is_uuid(text):
        return await instance_by_uuid(berth, parse_uuid(text), project)
    found: dict[str, BuildRecord] = {}
    place: dict[str, Any] | None = None
    for _ in range(MAX_PAGES):
        page = await berth.list_builds(project=project, name=text, limit=MAX_LIMIT, **(place or {}))
        found |= {one.instance_uuid: one for one in page.builds}
        place = place_of(page)
        if place is None or any(one.state is not BuildState.DELETED for one in found.values()):
            break
    kept = {uuid: one for uuid, one in found.items() if one.state is not BuildState.DELETED} or found
    return found[one_of("instance", "instance.unknown", text, {uuid: one.name for uuid, one in kept.items()})]


async def instance_by_uuid(berth: AsyncClient, uuid: str, project: str | None = None) -> BuildRecord:
    """Raises Stop where there is none (of this project)."""
    try:
        found = await berth.show_build(uuid)
    except ApiProblem as problem:
        if problem.code != "build.unknown":
            raise
    else:
        if project in (None, found.project_id):
            return found
    raise Stop(Exit.NO, "instance.unknown", f"there is no instance {uuid}")


def place_of(page: Builds) -> dict[str, Any] | None:
    """The parameters that list what follows a page; None: nothing does. Raises ApiAnswerInvalid."""
    if page.next is None:
        return None
    try:
        given = {name: values[-1] for name, values in parse_qs(urlsplit(page.next).query).items()}
        return {"before": float(given["before"]), "before_instance": given.get("before_instance")}
    except (KeyError, ValueError):
        raise ApiAnswerInvalid("the address of the next page names no place") from None


def other_site(what: str) -> Stop:
    """What ends a command that acts by the settings, where the API of its context does not have the same. what: the
    object that differs.
    """
    reason = f"{what} is not the same by the settings and by the address in force (`berth context show`)"
    return Stop(Exit.USAGE, "context.other_site", f"{reason}: nothing is done")


async def check_cell(berth: AsyncClient, name: str | None) -> None:
    """Check that there is a cell of this name (None: none is named). Raises Stop, Fault. A project is not told."""
    if name is None:
        return
    try:
        known = sorted(one.name for one in await berth.list_cells())
    except ApiProblem as problem:
        if problem.code == "role.forbidden":
            return
        raise
    if name not in known:
        raise Stop(Exit.USAGE, "cell.unknown", f"there is no cell {name!r}; there are {', '.join(known)}")
