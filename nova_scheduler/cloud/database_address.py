"""The address of a database of Nova's, as SQLAlchemy has it, and what its driver says of a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import URL
from sqlalchemy.exc import ArgumentError, InvalidRequestError, NoSuchModuleError

from nova_scheduler.cloud.rest import NovaUnavailable

MAX_SAID = 200  # characters of what a driver says of a fault

Engine = TypeVar("Engine")


class UnusableAddress(ValueError):
    """No database can be opened by it."""


def engine_of(url: str, make: Callable[[str], Engine]) -> Engine:
    """What makes an engine of an address. Raises UnusableAddress."""
    try:
        return make(url)
    except (ArgumentError, InvalidRequestError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise UnusableAddress(str(error)) from error
    except ValueError as error:  # it names what is no number, of which a part of the password may be
        raise UnusableAddress("its port, or an option in it, is no number") from error


def fault_of(error: Exception, url: URL, limit_s: float) -> str:
    """The first line of the driver's own text, without the password, which some drivers repeat."""
    if isinstance(error, TimeoutError):
        return f"no answer within {limit_s:g} s"
    if isinstance(error, NovaUnavailable):
        return error.reason
    said = str(getattr(error, "orig", None) or "").partition("\n")[0]
    return (said.replace(str(url.password), "***") if url.password else said)[:MAX_SAID]
