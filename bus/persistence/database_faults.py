"""What becomes of the errors of PostgreSQL and asyncpg: the bus's own faults, by the reaction to them."""

from __future__ import annotations

from typing import NoReturn

import asyncpg

from bus.faults import DatabaseForbidden, DatabaseRightsMissing, DatabaseUnavailable, DatabaseUnprepared, Transient
from bus.persistence.address import ServerUntrusted

# SQLSTATE (or its class) -> code of the Transient that it becomes. A longer key wins.
_UNAVAILABLE = "database.unavailable"
READ_ONLY = "25006"
TRANSIENT_STATES = {
    "08": _UNAVAILABLE,  # connection exceptions
    "53": _UNAVAILABLE,  # out of connections, memory or disk
    "57P": _UNAVAILABLE,  # shut down, crashed, starting up, database dropped
    "58": _UNAVAILABLE,  # system errors of the server's machine
    READ_ONLY: _UNAVAILABLE,  # the server is a standby: a failover is in progress
    "25P03": _UNAVAILABLE,  # idle in transaction for too long: the connection is gone
    "40001": "database.serialization",
    "40P01": "database.deadlock",
    "55P03": "database.locked",
    "57014": "database.timeout",
}
# The errors by which a transaction fails, its own and those of its connection.
FAILED_IN_USE = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    ConnectionError,
    TimeoutError,
)
# undefined_table, undefined_column, undefined_function, invalid_schema_name: no message is at fault.
UNPREPARED_STATES = ("42P01", "42703", "42883", "3F000")
FORBIDDEN_STATES = ("28", "3D000")
RIGHTS_STATE = "42501"


def raise_fault(error: Exception, *, closed: bool = False) -> NoReturn:
    """Raise the bus's own error for a database error. An error of berth itself is raised unchanged."""
    state = sqlstate(error)
    code = _transient_code(state)
    if isinstance(error, ServerUntrusted) and not closed:
        raise DatabaseForbidden(str(error), code="database.certificate") from error
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        raise Transient("the schema changed under a prepared statement", code="database.schema_changed") from error
    if code == _UNAVAILABLE or closed or (state is None and _is_connection_error(error)):
        raise DatabaseUnavailable(first_line(error)) from error
    if code:
        raise Transient(first_line(error), code=code) from error
    if state in UNPREPARED_STATES:
        reason = f"{first_line(error)}: its schema was dropped or emptied, or no worker has prepared it yet"
        raise DatabaseUnprepared(reason) from error
    if state == RIGHTS_STATE:
        raise DatabaseRightsMissing(first_line(error)) from error
    if state is not None and state.startswith(FORBIDDEN_STATES):
        raise DatabaseForbidden(first_line(error)) from error
    raise error


def _transient_code(state: str | None) -> str:
    if state is None:
        return ""
    return next((TRANSIENT_STATES[state[:size]] for size in (5, 3, 2) if state[:size] in TRANSIENT_STATES), "")


def sqlstate(error: BaseException) -> str | None:
    """PostgreSQL's code of an error; None: PostgreSQL did not raise it."""
    state = getattr(error, "sqlstate", None)
    return state if isinstance(state, str) else None


def is_unusable(error: Exception) -> bool:
    """Whether no statement can follow on the session: it ended, or its server takes no writes any more."""
    return sqlstate(error) == READ_ONLY or _is_connection_error(error)


def _is_connection_error(error: Exception) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError | TimeoutError | asyncpg.InternalClientError):
            return True
        cause = cause.__cause__
    return False


def first_line(error: Exception) -> str:
    """What an error says first, cut to a bound."""
    return (str(error).splitlines() or [type(error).__name__])[0][:500]
