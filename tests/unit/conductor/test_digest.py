"""A keeper's messages must be readable for its listeners."""

from __future__ import annotations

from typing import Any

import msgspec

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.catalogue import EVENTS, QUEUES
from bus.contracts.cell import Heartbeat, ServicesDigest
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.lease_keeper import MAX_PAGES, PER_PAGE, LeaseKeeper, pages_of


def test_a_digest_that_names_services_is_read_by_every_receiver() -> None:
    """Its codes were not of the declared form, and each scheduler dropped it."""
    down = {
        name: Lease(service=name, epoch=1, state=state, since=2.0, reason="why")
        for name, state in (("a", LeaseState.SILENT), ("b", LeaseState.STOPPED))
    }
    (page,) = pages_of(down)
    digest = ServicesDigest(cell="c1", term=1, number=1, down=page, up=3, at=4.0)
    parsed = msgspec.json.decode(msgspec.json.encode(digest), type=ServicesDigest)
    assert parsed == digest and [one.code for one in parsed.down] == ["service.silent", "service.stopped"]


def test_a_digest_has_one_page_at_least_and_pages_of_bounded_length() -> None:
    assert pages_of({}) == [()]
    many = {f"s{n:06}": Lease(service=f"s{n:06}", epoch=1, state=LeaseState.STOPPED) for n in range(PER_PAGE + 1)}
    assert [len(page) for page in pages_of(many)] == [PER_PAGE, 1]
    more = {f"s{n:06}": next(iter(many.values())) for n in range(PER_PAGE * MAX_PAGES + 1)}
    assert len(pages_of(more)) == MAX_PAGES


async def test_a_conductor_that_is_not_the_keeper_learns_from_the_digest_who_was_down_before_it_started() -> None:
    """Seed 10005: restarted beside a keeper it did not know the dead service, and took alternates there."""
    nothing: Any = None
    keeper = LeaseKeeper(
        nothing, nothing, clock=SystemClock(), config=ConductorConfig(), cell="c1", process="conductor"
    )

    async def receive(message: ServicesDigest | Heartbeat) -> None:
        await keeper.handle([Received(message, Meta(id="m"), "c1", "conductor.leases")])

    (page,) = pages_of(
        {
            "a": Lease(service="a", epoch=5, state=LeaseState.SILENT, since=2.0, reason="why"),
            "b": Lease(service="b", epoch=5, state=LeaseState.STOPPED, since=2.0, reason="why"),
        }
    )
    await receive(ServicesDigest(cell="c2", term=1, number=1, down=page))
    assert keeper.down() == {}, "another cell's"
    await receive(ServicesDigest(cell="c1", term=1, number=1, down=page))
    assert {name: lease.state for name, lease in keeper.down().items()} == {
        "a": LeaseState.SILENT,
        "b": LeaseState.STOPPED,
    }
    await receive(Heartbeat(service="a", cell="c1", epoch=5, sequence=9))
    assert list(keeper.down()) == ["b"], "its heartbeat shows that it is up"
    await receive(ServicesDigest(cell="c1", term=1, number=2, down=page))
    assert list(keeper.down()) == ["b"], "what arrives here counts for more"


def test_item_27_no_queue_of_a_scheduler_gets_the_heartbeats_of_compute_services() -> None:
    """A million compute services would be a million messages a second to each scheduler."""
    readers = {row.consumer for row in QUEUES for _, key in row.bindings if key.startswith("compute.heartbeat")}
    assert readers == {"cell_conductor", "compute_sim"}, "and a compute service gets those of its own name"
    wide = {row.name for row in QUEUES for exchange, key in row.bindings if exchange == EVENTS and key == "#"}
    assert not [row.name for row in QUEUES if row.name in wide and row.consumer == "scheduler_worker"]
