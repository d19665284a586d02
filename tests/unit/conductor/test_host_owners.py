"""A conductor answers reports of hosts that are another service's: it notifies the owner, or releases the hosts."""

from __future__ import annotations

from typing import Any

import pytest

from bus.contracts.cell import ComputeHosts, HostReport, HostsContested, HostsReleased
from bus.contracts.placement import InventoryReleased
from cell_conductor.domain.leases import Lease, LeaseState, LeaseTable
from cell_conductor.domain.listings import Listings
from cell_conductor.guard import HostOwners
from tests.unit.conductor.scenario import host
from tests.unit.conductor.world import Quiet, listing


class Known:
    """The services that are gone, at the keeper or elsewhere."""

    def __init__(self, *gone: str, is_keeper: bool = True) -> None:
        self.gone = gone
        self.is_keeper = is_keeper

    def is_gone(self, service: str) -> bool:
        """Whether it was named."""
        return service in self.gone


REFUSED = ComputeHosts(
    service="s2",
    cell="c1",
    epoch=1,
    sequence=1,
    hosts=(
        HostReport(uuid=host(1), name="h1", owner="s1", running=()),
        HostReport(uuid=host(2), name="h2", owner="s1", running=()),
        HostReport(uuid=host(3), name="h3", running=()),
    ),
)


async def answered(leases: Any, *listed: ComputeHosts) -> tuple[list[object], ComputeHosts]:
    bus, listings = Quiet(), Listings()
    for report in listed:
        listings.note(report)
    left = await HostOwners(bus, listings, leases).answer(REFUSED)  # type: ignore[arg-type]
    return bus.published, left


async def test_what_a_refused_service_reports_of_the_host_counts_for_nothing() -> None:
    """Its report would have shown that the owner's machines are lost, as soon as the owner was silent."""
    _, left = await answered(Known(), listing("s1", 1, 2))
    assert [one.running for one in left.hosts] == [None, None, ()]


async def test_the_owner_keeps_what_it_lists_and_the_other_one_gets_what_it_has_given_up() -> None:
    published, _ = await answered(Known(), listing("s1", 1, 3))
    assert published == [
        InventoryReleased(source="compute-s1", roots=(host(2),)),
        HostsReleased(service="s2", cell="c1", owner="s1", hosts=(host(2),)),
        HostsContested(service="s1", cell="c1", other="s2", hosts=(host(1),)),
    ]


async def test_all_hosts_of_a_service_that_is_gone_are_released() -> None:
    published, _ = await answered(Known("s1"), listing("s1", 1, 2))
    assert published == [
        InventoryReleased(source="compute-s1", roots=(host(1), host(2))),
        HostsReleased(service="s2", cell="c1", owner="s1", hosts=(host(1), host(2))),
    ]


async def test_nothing_is_released_by_a_conductor_that_is_not_the_keeper_or_has_no_list() -> None:
    published, left = await answered(Known("s1", is_keeper=False))
    assert not published and left.hosts[0].running is None
    published, _ = await answered(Known())
    assert [type(one) for one in published] == [HostsContested], "its list has not come yet"


@pytest.mark.parametrize(
    ("state", "since", "listened_s", "is_gone"),
    [
        (LeaseState.UP, 0.0, 0.0, False),
        (LeaseState.SILENT, 950.0, 30.0, False),
        (LeaseState.SILENT, 400.0, 30.0, True),
        (LeaseState.STOPPED, 999.0, 20.0, False),
        (LeaseState.STOPPED, 999.0, 80.0, True),
    ],
)
def test_a_service_is_gone_when_it_is_silent_for_long_or_has_left(
    state: LeaseState, since: float, listened_s: float, is_gone: bool
) -> None:
    table = LeaseTable(5)
    table.adopt([Lease(service="s1", epoch=1, interval_s=10.0, state=state, since=since)])
    assert not table.is_gone("s1", 1000.0, 600.0) and not table.is_gone("purged", 1000.0, 600.0), "not known yet"
    for second in range(20 + int(listened_s)):
        table.advance_clock(float(second))
    assert table.is_gone("s1", 1000.0, 600.0) is is_gone
    assert table.is_gone("purged", 1000.0, 600.0)
