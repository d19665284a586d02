"""What a keeper tells must be readable for those who hear it."""

from __future__ import annotations

import msgspec

from bus.contracts.cell import ServicesDigest
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.lease_keeper import MAX_PAGES, PER_PAGE, pages_of


def test_a_digest_that_names_services_is_read_by_whoever_hears_it() -> None:
    """Its codes were not of the declared form, and each scheduler dropped it."""
    down = {
        name: Lease(service=name, epoch=1, state=state, since=2.0, reason="why")
        for name, state in (("a", LeaseState.SILENT), ("b", LeaseState.STOPPED))
    }
    (page,) = pages_of(down)
    said = ServicesDigest(cell="c1", term=1, number=1, down=page, up=3, at=4.0)
    heard = msgspec.json.decode(msgspec.json.encode(said), type=ServicesDigest)
    assert heard == said and [one.code for one in heard.down] == ["service.silent", "service.stopped"]


def test_a_digest_has_one_page_at_least_and_pages_of_bounded_length() -> None:
    assert pages_of({}) == [()]
    many = {f"s{n:06}": Lease(service=f"s{n:06}", epoch=1, state=LeaseState.STOPPED) for n in range(PER_PAGE + 1)}
    assert [len(page) for page in pages_of(many)] == [PER_PAGE, 1]
    more = {f"s{n:06}": next(iter(many.values())) for n in range(PER_PAGE * MAX_PAGES + 1)}
    assert len(pages_of(more)) == MAX_PAGES
