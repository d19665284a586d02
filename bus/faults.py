"""Faults, by what happens next. Expected outcomes are values; these are for unexpected failures."""

from __future__ import annotations


class Fault(Exception):
    """Base. `code` is stable and dotted."""

    code = "fault"

    def __init__(self, reason: str = "", *, code: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        if code is not None:
            self.code = code


class Transient(Fault):
    """Something we depend on is unavailable. The consumer waits and calls the handler again; no retry is used up."""

    code = "fault.transient"


class DatabaseUnavailable(Transient):
    """The database cannot be reached, or went away in the middle: the transaction may or may not have committed."""

    code = "database.unavailable"


class RequestTimeout(Transient):
    """No reply came in time. The request may have been carried out."""

    code = "request.timeout"


class RequestUnconfirmed(RequestTimeout):
    """No reply came in time, and the broker has not confirmed the request either: its disk may be full."""


class Forbidden(Fault):
    """Our own credentials or settings are turned down. Neither waiting nor another message helps: the process stops."""

    code = "fault.forbidden"


class DatabaseForbidden(Forbidden):
    """These credentials or this database name are wrong. Waiting does not help."""

    code = "database.forbidden"


class DatabaseUnprepared(DatabaseForbidden):
    """The schema has not the tables that our migrations make: no worker was there yet, or they were dropped."""

    code = "database.unprepared"


class DatabaseReplaced(DatabaseForbidden):
    """The schema was made anew under this process: its cached state is another database's."""

    code = "database.replaced"


class RequestRefused(Fault):
    """The other side answered with a Refusal; `code` is its code."""

    code = "request.refused"


class BrokenInvariant(Fault):
    """An invariant is broken. The process stops, non-zero, rather than make it worse."""

    code = "invariant.broken"


def first_fault(error: BaseException) -> BaseException:
    """The fault worth reporting: out of a group, a broken invariant before all else, otherwise the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    broken = error.subgroup(BrokenInvariant)
    return first_fault((broken or error).exceptions[0])
