"""Commands that name hosts or services: one request for each name, and those that are refused at the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import typer

from berth.client import BuildClient
from berth.commands.common import (
    EXIT_NO,
    Stop,
    check_cell,
    client,
    decided_by,
    print_json,
    run,
    settings_of,
)
from bus.contracts.base import MAX_REASON
from bus.faults import Fault, RequestRefused

MAX_NAMED = 1000  # hosts or services of one command

T = TypeVar("T")

Refused = Sequence[tuple[str, Fault]]


def check_names(kind: str, names: Sequence[str], reason: str) -> None:
    """Raises BadParameter when there are too many names, or the reason is too long."""
    if len(reason) > MAX_REASON:
        raise typer.BadParameter(f"at most {MAX_REASON} characters", param_hint="--reason")
    if len(names) > MAX_NAMED:
        raise typer.BadParameter(f"at most {MAX_NAMED} {kind}s", param_hint=kind.upper())


def forget_each(
    context: typer.Context,
    kind: str,
    names: Sequence[str],
    reason: str,
    *,
    cell: str | None,
    by: str | None,
    as_json: bool,
    forget: Callable[[BuildClient, str, str], Awaitable[T]],
    show: Callable[[T], None],
) -> None:
    """Carry out `berth hosts forget` or `berth services forget`. forget(client, name, who): the request of one."""
    check_names(kind, names, reason)
    who = decided_by(by)

    async def body() -> int:
        settings = settings_of(context)
        forgotten: list[T] = []
        refused: list[tuple[str, Fault]] = []
        async with client(settings) as berth:
            await check_cell(berth, settings, cell)
            for name in dict.fromkeys(names):
                try:
                    forgotten.append(await forget(berth, name, who))
                except RequestRefused as fault:
                    refused.append((name, fault))
        return finish(kind, forgotten, refused, show, as_json=as_json)

    run(body)


def finish(kind: str, done: Sequence[T], refused: Refused, show: Callable[[T], None], *, as_json: bool) -> int:
    """Print what was done, and return the exit status. Raises Stop when something was refused."""
    if as_json:
        rows = [{kind: name, "code": why.code, "reason": why.reason} for name, why in refused]
        print_json({f"{kind}s": done, "refused": rows})
        return EXIT_NO if refused else 0
    for one in done:
        show(one)
    if refused:
        name, first = refused[0]
        raise Stop(EXIT_NO, first.code, f"{len(refused)} refused; {name}: {first.reason}")
    return 0
