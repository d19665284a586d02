"""The common parts of the commands: settings, output, exit statuses, and errors without a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import msgspec
import typer
from rich.text import Text

from berth.cli.extras import ABSENT, absent_extra, extra_message
from berth.cli.output import err
from berth.config.ports import ServerFailed
from berth.text import counted, printable, printable_lines
from berth.up.embedded.process import DirectoryInaccessible, ServerMissing
from bus.bus_ownership import BusOwnedByAnother
from bus.contracts.base import MAX_REASON
from bus.faults import (
    DatabaseUnavailable,
    DatabaseUnprepared,
    Fault,
    Forbidden,
    RequestTimeout,
    RequestUnconfirmed,
    Transient,
)
from bus.service.settings import SettingsError
from bus.transport import BusError, BusForbidden, BusUnavailable, PublishRefused, Unroutable

# The client alone is installed without what a site's programs need (broker, database, workers), and its commands import
# this module, too. Functions for a site's commands import the rest when they are called.
if TYPE_CHECKING:
    from berth.bus_client import BuildClient
    from berth.config.settings import Settings
    from berth.config.site import Site


class Exit(IntEnum):
    """The statuses of commands beside 0 and, where it was interrupted, 130."""

    NO = 1  # the answer is no: a build failed, an invariant is broken
    USAGE = 2  # wrong use, settings or credentials
    UNAVAILABLE = 3  # bus or database out of reach
    TIME = 4  # time ran out


# What has the bus runs as a worker does: on uvloop, with structured logs and a watchdog.
SITE = "bus.bus"
OPEN_TIMEOUT_S = 10.0
QUERY_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
MAX_IN_QUESTION = 10  # of a cell, in a prompt
MAX_LIMIT = 1000  # of most lists


def parse_uuid(text: str) -> str:
    """A UUID as people write it (upper case, without dashes) in the one spelling that the bus knows."""
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a UUID") from None


def is_uuid(text: str) -> bool:
    """Whether it is a whole UUID, as people write it."""
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


LEAST_PREFIX = 4


def one_of(kind: str, unknown: str, text: str, names: Mapping[str, str]) -> str:
    """The id that a text stands for: the id itself, its first letters (at least 4), or a name that one has.

    names: {id: name}. unknown: the code where there is none. Raises Stop, with the candidates where there are several.
    """
    wanted = parse_uuid(text) if is_uuid(text) else text if text in names else text.lower()
    if wanted in names:
        return wanted
    named = [one for one, name in names.items() if name == text]
    begun = [one for one in names if one.startswith(wanted)]
    found = named or begun
    if len(found) == 1 and (named or len(wanted) >= LEAST_PREFIX):
        return found[0]
    if not found:
        raise Stop(Exit.NO, unknown, f"there is no {kind} {text}")
    some = ", ".join(f"{one} ({names[one]})" if names[one] else one for one in found[:MAX_IN_QUESTION])
    more = ", ..." if len(found) > MAX_IN_QUESTION else ""
    raise Stop(Exit.NO, "name.ambiguous", f"{text} may be {some}{more}: name the {kind} by more letters")


def further(found: Sequence[object], limit: int, most: int = MAX_LIMIT) -> dict[str, str] | None:
    """The option that lists more, of a list that ends at a limit of the caller's. most: that the list may have."""
    return {"--limit": str(min(limit * 10, most))} if len(found) >= limit and limit < most else None


Page = Annotated[str | None, typer.Option("--page", help="Go on where a list ended, as it said.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, max=86_400, help="Seconds to wait at most.")]

By = Annotated[str | None, typer.Option("--by", help="Who decides; else the user and host of this command.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not prompt; off a terminal nothing is done without it.")]
Reason = Annotated[str, typer.Option("--reason", help="The reason, for the record.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for the end; exit status 1 when it failed.")]
Instance = Annotated[str, typer.Argument(help="Name or UUID of an instance, or its first letters.", metavar="INSTANCE")]
InProject = Annotated[str | None, typer.Option("--project", help="The project in which the name is looked up.")]

T = TypeVar("T")


class Stop(Exception):
    """Ends the command with a message and a status."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


SHADOW = "Forward each call to the fallback's nova-scheduler, decide it as well, and report how the two differ."


def in_shadow(settings: Settings, shadow: bool) -> Settings:
    """The settings with `nova.shadow`, if the command line has it."""
    if not shadow:
        return settings
    return msgspec.structs.replace(settings, nova=msgspec.structs.replace(settings.nova, shadow=True))


def settings_of(context: typer.Context, *, bus: str | None = None) -> Settings:
    """The settings in force, from --config or where `read_settings` looks; `bus`: another URL. Raises SettingsError."""
    from berth.config.settings import check_urls, read_settings  # noqa: PLC0415

    path: Path | None = context.obj
    settings = read_settings(path)
    if bus is not None:
        settings = msgspec.structs.replace(settings, bus=msgspec.structs.replace(settings.bus, url=bus))
    check_urls(settings)
    return settings


def make_directory(state: Path) -> None:
    """The directory of what lasts. Raises Stop when this user cannot make it or write to it."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        writable = os.access(state, os.W_OK | os.X_OK)
    except OSError as fault:
        raise Stop(Exit.USAGE, "state.unusable", f"cannot make {state}: {fault.strerror or fault}") from fault
    if not writable:
        raise Stop(Exit.USAGE, "state.unusable", f"{state} is not writable; set state_dir")


def decided_by(by: str | None) -> str:
    """The person on record for a decision: the one named, else the user and host of this command."""
    return by or f"{getpass.getuser()}@{socket.gethostname()}"


def ask_first(what: str, *, yes: bool) -> None:
    """Prompt before what cannot be undone. what: an imperative that says how many, and which. Raises Stop."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Stop(Exit.USAGE, "command.unconfirmed", f"{what}: off a terminal this needs --yes; nothing is done")
    if not typer.confirm(printable(f"{what}?"), err=True):
        raise Stop(Exit.NO, "command.declined", "nothing is done")


def by_cell(of_cells: Mapping[str, Collection[str]], what: str) -> str:
    """How many there are, how many of each cell, and the first names: `3 hosts (cell1 2: a, b; cell2 1: c)`."""
    parts = []
    for cell, names in sorted(of_cells.items()):
        some = ", ".join(sorted(names)[:MAX_IN_QUESTION]) + (", ..." if len(names) > MAX_IN_QUESTION else "")
        parts += [f"{cell} {len(names)}: {some}"] if names else []
    shown = f" ({'; '.join(parts)})" if parts else ""
    return f"{counted(sum(map(len, of_cells.values())), what)}{shown}"


def check_reason(reason: str, *, least: int = 0) -> None:
    """Raises BadParameter for a reason that no message may carry."""
    if not least <= len(reason) <= MAX_REASON:
        bounds = f"{least} to {MAX_REASON}" if least else f"at most {MAX_REASON}"
        raise typer.BadParameter(f"{bounds} characters", param_hint="--reason")


def run(body: Callable[[], Coroutine[Any, Any, int | None]]) -> NoReturn:
    """Run a command's coroutine and exit with its status; faults become a message on standard error."""
    try:
        if SITE in sys.modules:
            from berth.cli.site_process import run_in_site  # noqa: PLC0415

            status = run_in_site(body) or 0
        else:
            status = asyncio.run(body()) or 0
    except KeyboardInterrupt:
        status = 130
    except Exception as fault:  # those that have a message for a user; others are re-raised
        found = explain(fault)
        if found is None:
            raise
        print_stop(found)
        status = found.status
    raise SystemExit(status)


def print_stop(stop: Stop) -> None:
    """The message of a Stop on standard error, with its stable code."""
    message = Text.assemble(("berth: ", "red"), printable_lines(str(stop)), (f" ({stop.code})", "dim"))
    err.print(message, soft_wrap=True)


# Of refusals by the HTTP API, by HTTP's own status; others are a no.
_STATUSES: Mapping[int, Exit] = {
    400: Exit.USAGE,
    401: Exit.USAGE,
    403: Exit.USAGE,
    408: Exit.TIME,
    429: Exit.UNAVAILABLE,
    503: Exit.UNAVAILABLE,
    504: Exit.TIME,
}

# Faults in the words of a user, first match first: (fault, exit status, message; `{}` is the fault's own text). A class
# that the client alone cannot import is named.
_MEANINGS: tuple[tuple[type[BaseException] | str, int, str], ...] = (
    (SettingsError, Exit.USAGE, "{}"),
    ("berth.cli.session.contexts.ContextFault", Exit.USAGE, "{}"),
    ("berth.client.faults.ApiAddressInvalid", Exit.USAGE, "{}"),
    ("berth.client.faults.ApiTimeout", Exit.TIME, "{}"),
    (Unroutable, Exit.UNAVAILABLE, "the bus has no queue for this yet: has a scheduler ever been started?"),
    (PublishRefused, Exit.UNAVAILABLE, "the queue is full: publish more slowly"),
    ("bus.rabbitmq.errors.BrokerUntrusted", Exit.USAGE, "the broker is not trusted: {}"),
    (BusOwnedByAnother, Exit.USAGE, "{}"),
    (BusForbidden, Exit.USAGE, "the broker refuses these credentials: {}"),
    (BusUnavailable, Exit.UNAVAILABLE, "the bus is out of reach: {}"),
    (RequestUnconfirmed, Exit.TIME, "{}: is it out of disk, or of memory? see its log"),
    (RequestTimeout, Exit.TIME, "no answer in time: is a scheduler running?"),
    (DatabaseUnprepared, Exit.UNAVAILABLE, "no worker has prepared this database yet: {}"),
    (Forbidden, Exit.USAGE, "{}"),
    ("bus.service.environment.NotConfigured", Exit.USAGE, "{}"),
    ("bus.service.environment.CellAddressInvalid", Exit.USAGE, "{}"),
    (DatabaseUnavailable, Exit.UNAVAILABLE, "the database is out of reach: {}"),
    (Transient, Exit.UNAVAILABLE, "{}"),
    (ServerMissing, Exit.USAGE, "{}"),
    (DirectoryInaccessible, Exit.USAGE, "{}"),
    (ServerFailed, Exit.UNAVAILABLE, "{}"),
    (BusError, Exit.NO, "{}"),
    (Fault, Exit.NO, "{}"),
    (TimeoutError, Exit.TIME, "time ran out"),
)


_WORKER_ENDED = "berth.up.local_workers.WorkerEnded"
_API_PROBLEM = "berth.client.faults.ApiProblem"
_POSTGRES_ERROR = "asyncpg.exceptions._base.PostgresError"

# Stable codes for faults that have none of their own.
_CODES: dict[type[BaseException] | str, str] = {
    ServerMissing: "server.missing",
    DirectoryInaccessible: "directory.inaccessible",
    ServerFailed: "server.failed",
    TimeoutError: "timeout",
}


def _is(fault: BaseException, kind: type[BaseException] | str) -> bool:
    if isinstance(kind, str):
        return any(f"{one.__module__}.{one.__qualname__}" == kind for one in type(fault).__mro__)
    return isinstance(fault, kind)


def explain(fault: BaseException) -> Stop | None:
    """A fault in the words of a user, or None when it is a defect of berth."""
    if isinstance(fault, Stop):
        return fault
    if isinstance(fault, BaseExceptionGroup):
        return explain(fault.exceptions[0])
    if isinstance(fault, Fault) and _is(fault, _API_PROBLEM):
        return Stop(_STATUSES.get(getattr(fault, "status", 0), Exit.NO), fault.code, fault.reason)
    if isinstance(fault, ModuleNotFoundError):
        extra = absent_extra(fault)
        return Stop(Exit.USAGE, ABSENT, extra_message(extra)) if extra else None
    if isinstance(fault, Exception) and _is(fault, _POSTGRES_ERROR):
        from bus.persistence.database_faults import raise_fault  # noqa: PLC0415

        try:
            raise_fault(fault)
        except Exception as raised:  # the fault itself, where it is a defect of berth
            return None if raised is fault else explain(raised)
    if _is(fault, _WORKER_ENDED):
        stop = explain(fault.__cause__) if fault.__cause__ is not None else None
        status = Exit.NO if stop is None else stop.status
        return Stop(status, "up.worker_died" if stop is None else stop.code, f"{fault}; see the log above")
    for kind, status, message in _MEANINGS:
        if _is(fault, kind):
            name = kind if isinstance(kind, str) else kind.__name__
            code = _CODES.get(kind) or str(getattr(fault, "code", name))
            return Stop(status, code, message.replace("{}", str(fault)))
    return None


@contextlib.asynccontextmanager
async def client(settings: Settings) -> AsyncIterator[BuildClient]:
    """A connected client of the API bus. Raises Stop when the bus does not answer within OPEN_TIMEOUT_S."""
    from berth.bus_client import BuildClient  # noqa: PLC0415
    from berth.config.site import Site, process_name  # noqa: PLC0415

    site = Site(settings)
    process = process_name("cli")
    made = BuildClient(site.bus(process), clock=site.clock, process=process)
    await open_in_time(made.open())
    try:
        yield made
    finally:
        # Nothing that is wanted is under way any more. A broker with an alarm reads nothing, its farewell neither.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await made.close()
        await site.close()


async def open_in_time(opening: Coroutine[Any, Any, None]) -> None:
    """Wait for a connection, but not for ever as a worker does. Raises Stop."""
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await opening
    except TimeoutError as fault:
        raise Stop(
            Exit.UNAVAILABLE,
            "bus.unavailable",
            f"no answer from the bus within {OPEN_TIMEOUT_S:g} s: does its broker run, and is bus.url its address?",
        ) from fault


def database_of(settings: Settings) -> Site:
    """A site whose database is known. Raises Stop when it is embedded and no `berth up` runs."""
    from berth.config.site import Site  # noqa: PLC0415

    site = Site(settings)
    if site.database_url is None:
        raise Stop(
            Exit.UNAVAILABLE,
            "database.unavailable",
            "no database: set database.url (BERTH_DATABASE__URL), or start `berth up`",
        )
    return site


async def open_database_in_time(opening: Coroutine[Any, Any, None]) -> None:
    """Open a database for a command. Workers wait for their server without end; a command ends after OPEN_TIMEOUT_S.

    Raises Stop.
    """
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await opening
    except TimeoutError as error:
        raise Stop(
            Exit.UNAVAILABLE,
            "database.unavailable",
            f"no answer from the database within {OPEN_TIMEOUT_S:g} s: does it run, and is database.url its address?",
        ) from error


def host_and_port(listen: str, option: str) -> tuple[str, int]:
    """Where to listen. Raises BadParameter."""
    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise typer.BadParameter(f"{option} takes HOST:PORT, not {listen!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def pairs_of(given: Sequence[str] | None, option: str) -> dict[str, str]:
    """KEY=VALUE, repeated. The first = ends the key."""
    pairs: dict[str, str] = {}
    for one in given or ():
        key, equals, value = one.partition("=")
        if not equals or not key or key in pairs:
            raise typer.BadParameter(f"{one!r}: KEY=VALUE, each key once", param_hint=option)
        pairs[key] = value
    return pairs
