"""Tests on a loop whose time moves only to the next timer: however slow the machine is, nothing happens too late."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from lab.simulation.loop import run


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorate a test without sockets and threads. Its fixtures are made outside of the loop."""

    @wraps(test)
    def run_it(*arguments: Any, **named: Any) -> None:
        unseen: list[str] = []
        run(lambda: test(*arguments, **named), on_unseen=unseen.append)
        assert not unseen

    return run_it
