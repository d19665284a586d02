"""Guards a service against bugs of its driver, which may be an operator's code: a bug costs the call that met it, and
never the service.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import structlog

from compute_agent.driver import BuildFault, ChangeFault, DriverFault, DriverUnavailable, HandOverRefused, NotOwned

log = structlog.get_logger()

AnyDriver = TypeVar("AnyDriver")

# What each call may raise besides DriverUnavailable.
NAMED: dict[str, tuple[type[Exception], ...]] = {
    "spawn": (BuildFault, NotOwned),
    "check": (BuildFault, NotOwned),
    "destroy": (NotOwned,),
    "change": (ChangeFault, HandOverRefused, NotOwned),
    "check_source": (ChangeFault, HandOverRefused, NotOwned),
}
# By name and not by what they are: a driver may decorate a call, which still returns an awaitable.
CALLS = {*NAMED, "open", "close", "hosts", "inventory", "list", "look", "measure"}


def isolate_driver(driver: AnyDriver) -> AnyDriver:
    """The driver, of which each call that raises what the port does not name raises DriverFault instead."""
    # Whoever calls it answers that as it answers a driver that is unavailable. An exception that leaves a job would end
    # the service, and each later start too where the call is repeated from the record.
    return cast(AnyDriver, _Guarded(driver))


class _Guarded:
    def __init__(self, driver: object) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        if name == "waiting":
            return _guarded_look(name, found)
        return _guarded_call(name, found) if name in CALLS else found


def _guarded_look(name: str, look: Callable[[], Any]) -> Callable[[], Any]:
    def looked() -> Any:
        try:
            return look()
        except Exception as fault:  # the driver may be an operator's code
            raise _fault_of(name, fault) from fault

    return looked


def _fault_of(name: str, fault: Exception) -> DriverFault:
    log.error(DriverFault.code, call=name, exc_info=fault)
    return DriverFault(f"{type(fault).__name__}: {fault}")


def _guarded_call(name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    named: tuple[type[Exception], ...] = (DriverUnavailable, *NAMED.get(name, ()))

    async def called(*arguments: Any, **options: Any) -> Any:
        try:
            return await call(*arguments, **options)
        except named:
            raise
        except Exception as fault:  # the driver may be an operator's code
            raise _fault_of(name, fault) from fault

    return called
