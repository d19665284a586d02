"""Runs a command that calls the HTTP API: its faults become a message and an exit status."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from berth.cli.session.contexts import ContextFault, found_context
from berth.client import ApiAddressInvalid, ApiProblem, Client
from berth.text import printable_lines
from bus.faults import Fault, RequestTimeout, Transient

B = TypeVar("B", bound=Callable[..., Any])

# The statuses, as of every command.
NO, USAGE, UNAVAILABLE, TIME = 1, 2, 3, 4
# Of refusals, by HTTP's own; others are a no.
_STATUSES = {400: USAGE, 401: USAGE, 403: USAGE, 408: TIME, 429: UNAVAILABLE, 503: UNAVAILABLE, 504: TIME}


def calls_api(body: B) -> B:
    """Make a command of a function that calls the API."""

    @functools.wraps(body)
    def called(*args: Any, **named: Any) -> None:
        try:
            body(*args, **named)
        except Fault as fault:
            message = Text.assemble(("berth: ", "red"), printable_lines(fault.reason), (f" ({fault.code})", "dim"))
            Console(stderr=True, highlight=False).print(message, soft_wrap=True)
            raise SystemExit(status_of(fault)) from None

    return called  # type: ignore[return-value]


def status_of(fault: Fault) -> int:
    """The exit status of a fault."""
    match fault:
        case ApiProblem():
            return _STATUSES.get(fault.status, NO)
        case ContextFault() | ApiAddressInvalid():
            return USAGE
        case RequestTimeout():
            return TIME
        case Transient():
            return UNAVAILABLE
    return NO


@contextmanager
def api(config: Path | None = None) -> Iterator[Client]:
    """The client of the context that this command uses. config: the settings file that the command line names."""
    with found_context(os.environ, config).context.client() as client:
        yield client
