"""Exceptions for unexpected failures, divided by the reaction to them. Expected outcomes are values and no
exceptions.
"""

from __future__ import annotations


class Fault(Exception):
    """The base of faults. code: stable and dotted."""

    code = "fault"

    def __init__(self, reason: str = "", *, code: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        if code is not None:
            self.code = code


class Transient(Fault):
    """A server that the process depends on is unavailable. The consumer waits and calls the handler again; no retry is
    used up.
    """

    code = "fault.transient"


class DatabaseUnavailable(Transient):
    """The database cannot be reached, or the connection was lost: the transaction may or may not have committed."""

    code = "database.unavailable"


class RequestTimeout(Transient):
    """No reply came in time. The request may have been carried out."""

    code = "request.timeout"


class RequestUnconfirmed(RequestTimeout):
    """No reply came in time, and the broker has not confirmed the request either: its disk may be full."""


class Forbidden(Fault):
    """A server refuses this process's credentials or settings. Neither a wait nor another message helps, so the process
    stops.
    """

    code = "fault.forbidden"


class DatabaseForbidden(Forbidden):
    """The credentials or the name of the database are wrong. A wait does not help."""

    code = "database.forbidden"


class DatabaseRightsMissing(DatabaseForbidden):
    """The role lacks rights in the schema, which a person grants while the process runs."""


class DatabaseUnprepared(DatabaseForbidden):
    """The schema lacks tables of berth's migrations: no worker has started yet, or the tables were dropped."""

    code = "database.unprepared"


class DatabaseReplaced(DatabaseForbidden):
    """The schema was created anew while this process ran, so the cached state belongs to another database."""

    code = "database.replaced"


class RequestRefused(Fault):
    """The other side answered with a Refusal; `code` is its code."""

    code = "request.refused"


class BrokenInvariant(Fault):
    """An invariant is broken. The process stops with a non-zero status, so that it does no further harm."""

    code = "invariant.broken"


def first_fault(error: BaseException) -> BaseException:
    """Return the fault to report: of a group, a broken invariant if there is one, otherwise the first fault."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    broken = error.subgroup(BrokenInvariant)
    return first_fault((broken or error).exceptions[0])
