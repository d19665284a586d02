"""Waiting for a condition that has no event of its own: `until` in a coroutine, `wait_until` in a thread; and what a
block that `asyncio.timeout` ended waited for.
"""

from __future__ import annotations

import ast
import asyncio
import linecache
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from inspect import getclosurevars, isawaitable, isfunction
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0  # guards against hanging; a busy machine fails nothing
PAUSE_S = 0.005
MOST_PAUSE_S = 0.05  # between looks that are awaited: each costs its server, and other tests, a request
MAX_SHOWN = 500  # characters of a value
ROOT = Path(__file__).parents[2]


async def until(
    there: Callable[[], Awaitable[Any] | Any], patience_s: float = PATIENCE_S, most_pause_s: float = MOST_PAUSE_S
) -> Any:
    """Wait until this returns something true, awaited where it can be; returns that. Raises TimeoutError."""
    pause_s, found, patience = PAUSE_S, None, asyncio.timeout(patience_s)
    try:
        async with patience:
            while True:
                seen = there()
                if isawaitable(seen):
                    seen = await seen
                    pause_s = min(2 * pause_s, most_pause_s)
                found = seen
                if found:
                    return found
                await asyncio.sleep(pause_s)
    except TimeoutError as over:
        if not patience.expired():
            raise
        raise TimeoutError(_unmet(there, found, patience_s)) from over


def wait_until(there: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Wait until this returns something true; returns that. Raises TimeoutError."""
    ends = time.monotonic() + patience_s
    while not (found := there()):
        if time.monotonic() > ends:
            raise TimeoutError(_unmet(there, found, patience_s))
        time.sleep(10 * PAUSE_S)
    return found


def cut_off(error: BaseException | None) -> str:
    """Each line of the tests at which a block of `asyncio.timeout` waited to its end, and the variables there.

    "": of any other error.
    """
    cancelled = error.__context__ if isinstance(error, TimeoutError) and not str(error) else None
    lines = []
    for frame, number in traceback.walk_tb(cancelled.__traceback__ if cancelled else None):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "tests"):
            lines.append(f"{path.relative_to(ROOT)}:{number}: {linecache.getline(str(path), number).strip()}")
            lines += [f"    {name} is {_shown(value)}" for name, value in frame.f_locals.items()]
    return "\n".join(lines)


def _unmet(there: Callable[[], Any], found: Any, patience_s: float) -> str:
    """What was waited for, and what was there last."""
    body = _body_of(there)
    what = repr(there) if body is None else ast.unparse(body)
    lines = [f"not within {patience_s:g} s: {what}, which is {_shown(found)}"]
    if body is not None:
        variables = getclosurevars(there)
        names = {**there.__globals__, **variables.nonlocals}
        lines += [f"{ast.unparse(part)} is {_value(part, names)}" for part in _parts(body)]
    return "\n".join(lines)


def _body_of(there: Any) -> ast.expr | None:
    """The expression of a lambda, or None of another callable, or one of several in a line."""
    if not isfunction(there):
        return None
    text = "".join(linecache.getlines(there.__code__.co_filename))
    lambdas = [
        node.body
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Lambda) and node.lineno == there.__code__.co_firstlineno
    ]
    return lambdas[0] if len(lambdas) == 1 else None


def _parts(condition: ast.expr) -> Iterator[ast.expr]:
    """What a condition compares, negates or joins."""
    match condition:
        case ast.BoolOp(values=values):
            for value in values:
                yield from _parts(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Compare(left=left, comparators=others):
            yield from (side for side in (left, *others) if not isinstance(side, ast.Constant))


def _value(part: ast.expr, names: dict[str, Any]) -> str:
    try:
        value = eval(compile(ast.Expression(part), "<condition>", "eval"), names)
    except Exception as fault:  # whatever the condition's own parts may raise
        return f"not to be had: {fault!r}"
    if asyncio.iscoroutine(value):
        value.close()
        return "awaited"
    return _shown(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
