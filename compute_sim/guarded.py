"""A driver may be an operator's code: a bug in it costs the call that met it, and never the service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

import structlog

from compute_sim.driver import BuildFault, ChangeFault, DriverFault, DriverUnavailable, HandOverRefused, NotOurs

log = structlog.get_logger()

AnyDriver = TypeVar("AnyDriver")

# What each call may raise beside DriverUnavailable.
NAMED: dict[str, tuple[type[Exception], ...]] = {
    "spawn": (BuildFault, NotOurs),
    "check": (BuildFault, NotOurs),
    "destroy": (NotOurs,),
    "change": (ChangeFault, HandOverRefused, NotOurs),
    "check_source": (ChangeFault, HandOverRefused, NotOurs),
}


def guarded(driver: AnyDriver) -> AnyDriver:
    """The driver, of which each call that raises what the port does not name raises DriverFault instead.

    Whoever calls it answers that as it answers a driver that is unavailable. An exception that leaves a job would end
    the service, and each later start too where the call is repeated from the record.
    """
    return cast(AnyDriver, _Guarded(driver))


class _Guarded:
    def __init__(self, driver: object) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        return _guarded_call(name, found) if iscoroutinefunction(found) else found


def _guarded_call(name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    named: tuple[type[Exception], ...] = (DriverUnavailable, *NAMED.get(name, ()))

    @wraps(call)
    async def called(*arguments: Any, **options: Any) -> Any:
        try:
            return await call(*arguments, **options)
        except named:
            raise
        except Exception as fault:  # the driver may be an operator's code
            log.exception(DriverFault.code, call=name)
            raise DriverFault(f"{type(fault).__name__}: {fault}") from fault

    return called
