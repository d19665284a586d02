"""Which silent hosts are switched off without a person."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from berth.fencing.fencer import CELL_SILENT, TOO_MANY, FencingPlan, plan
from berth.settings import FencingSettings
from bus.contracts.build import HostRecord
from bus.contracts.operations import AdminState, HostAdminState, ServiceRecord

SETTINGS = FencingSettings(after_s=60.0, max_hosts=2)
OTHERS = ServiceRecord(name="others", cell="c1", up=True, hosts=9)


def host(number: int = 1, **more: Any) -> HostRecord:
    fields: dict[str, Any] = {"cell": "c1", "service": f"s{number}", "resources": {"VCPU": (4.0, 16.0)}, **more}
    return HostRecord(uuid=f"00000000-0000-4000-8000-00000000000{number}", name=f"h{number}", **fields)


def service(number: int = 1, **more: Any) -> ServiceRecord:
    fields: dict[str, Any] = {"cell": "c1", "up": False, "code": "service.silent", "hosts": 1, **more}
    return ServiceRecord(name=f"s{number}", **fields)


def planned(after_s: float, hosts: list[HostRecord], *services: ServiceRecord) -> FencingPlan:
    """The plan at the second of two looks that see the same."""
    first = plan(hosts, services, {}, SETTINGS, 1000.0)
    assert (first.due, first.held) == ((), {})
    return plan(hosts, services, first.suspects, SETTINGS, 1000.0 + after_s)


def test_a_host_is_due_when_it_was_silent_at_each_look_for_long_enough() -> None:
    assert planned(59.9, [host()], service(), OTHERS).due == ()
    assert planned(60.0, [host()], service(), OTHERS).due == (host(),)


def test_suspicion_begins_anew_when_the_service_reported_between() -> None:
    suspected = plan([host()], [service(), OTHERS], {}, SETTINGS, 0.0)
    reported = plan([], [service(up=True, code=""), OTHERS], suspected.suspects, SETTINGS, 30.0)
    assert reported.suspects == {}
    assert plan([host()], [service(), OTHERS], reported.suspects, SETTINGS, 61.0).due == ()


ADMIN = HostAdminState(host_uuid=host().uuid, host="h1", state=AdminState.MAINTENANCE)


@pytest.mark.parametrize(
    ("one", "its_service"),
    [
        (host(), service(code="service.stopped")),  # on purpose
        (host(), service(up=True, code="")),
        (host(), service(hosts=2)),  # the service died, and its hosts may run
        (host(), replace(service(), cell="c2")),
        (host(up=True), service()),
        (host(resources={"VCPU": (0.0, 16.0)}), service()),  # nothing is there to be evacuated
        (host(resources={}), service()),
        (host(admin=ADMIN), service()),
        (host(admin=replace(ADMIN, state=AdminState.FENCED)), service()),
    ],
)
def test_what_is_never_switched_off(one: HostRecord, its_service: ServiceRecord) -> None:
    found = planned(600.0, [one], its_service, OTHERS)
    assert (found.due, found.suspects) == ((), {})


def test_a_host_that_only_takes_no_builds_is_switched_off_like_others() -> None:
    disabled = host(admin=replace(ADMIN, state=AdminState.DISABLED))
    assert planned(60.0, [disabled], service(), OTHERS).due == (disabled,)


def test_with_more_suspects_than_allowed_none_is_switched_off() -> None:
    three = [host(1), host(2), host(3)]
    found = planned(600.0, three, service(1), service(2), service(3), OTHERS)
    assert found.due == () and found.held == {"h1": TOO_MANY, "h2": TOO_MANY, "h3": TOO_MANY}
    fewer = plan(three[:2], [service(1), service(2), OTHERS], found.suspects, SETTINGS, 1601.0)
    assert fewer.due == (host(1), host(2))


def test_a_suspect_counts_before_its_time() -> None:
    """The network fails for one host after the other."""
    suspects = {host(1).uuid: 0.0}
    found = plan([host(1), host(2), host(3)], [service(1), service(2), service(3), OTHERS], suspects, SETTINGS, 60.0)
    assert found.due == () and found.held == {"h1": TOO_MANY}


def test_where_no_service_of_the_cell_is_up_the_cell_is_what_is_silent() -> None:
    found = planned(600.0, [host()], service(), replace(OTHERS, cell="c2"))
    assert found.due == () and found.held == {"h1": CELL_SILENT}
