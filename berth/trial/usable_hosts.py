"""Waits until builds can go to every host that `berth up` has started a compute service for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from berth.site import Site, process_name
from bus.bus import Bus
from bus.contracts.operations import ServiceRecord, ServicesPage, ServicesQuery
from bus.faults import Fault
from bus.port import BusError

# The hosts are waited for this long after the workers are ready; a compute service tries again to report its inventory
# within ten seconds at the latest.
WAIT_S = 30.0
ASK_S = 0.2
MIN_ASK_S, MAX_ASK_S = 0.1, 5.0  # the time-out of one query
MAX_SERVICES = 1000  # of one answer
MAX_NAMED = 5  # services in a sentence


async def unusable_hosts(here: Site, started: Mapping[str, Collection[str]], *, wait_s: float = WAIT_S) -> list[str]:
    """Wait until a scheduler knows each of these compute services, and has each of its hosts in the book.

    started: {cell: names of compute services}. Returns what is missing after `wait_s` seconds, a sentence each.
    """
    bus = here.bus(process_name("up"))
    until = here.clock.monotonic() + wait_s
    await bus.open()
    try:
        while True:
            left_s = until - here.clock.monotonic()
            missing = await _missing(bus, started, min(MAX_ASK_S, max(left_s, MIN_ASK_S)))
            if not missing or left_s <= 0:
                return missing
            await here.clock.sleep(ASK_S)
    finally:
        await bus.close()


async def _missing(bus: Bus, started: Mapping[str, Collection[str]], timeout_s: float) -> list[str]:
    missing: list[str] = []
    for cell, names in started.items():
        if not names:
            continue
        query = ServicesQuery(cell=cell, limit=MAX_SERVICES)
        try:
            page = await bus.request(query, ServicesPage, timeout_s=timeout_s)
        except (Fault, BusError) as fault:
            return [f"no scheduler answers: {fault}"]
        known = {one.name: one for one in page.services}
        states = {name: _state(known.get(name)) for name in names}
        missing += [f"{name} {state}" for name, state in sorted(states.items()) if state]
    return missing


def _state(service: ServiceRecord | None) -> str:
    """Why not all hosts of a service can be used; "": they can."""
    if service is None:
        return "has not announced its hosts"
    if not service.up:
        return f"is down ({service.code})"
    if service.in_book < service.hosts:
        return f"has {service.hosts} hosts, of which {service.in_book} are in the resource book"
    return ""


def sentence(missing: Collection[str]) -> str:
    """The message to an operator."""
    named = "; ".join(list(missing)[:MAX_NAMED])
    more = f"; and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
    return f"not every host takes builds yet: {named}{more}"
