"""The compute services of a cell that makes things up, and whose reports and digests come late or twice."""

from __future__ import annotations

import pytest

from bus.contracts.cell import HostStates, ServiceDown, ServiceStates
from scheduler_worker.hosts import service_directory
from scheduler_worker.hosts.service_directory import ServiceDirectory


def report(service: str, sequence: int = 1) -> HostStates:
    return HostStates(service=service, cell="c1", epoch=1, sequence=sequence)


def test_services_that_a_cell_makes_up_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_directory, "MAX_SERVICES", 3)
    directory = ServiceDirectory()
    assert [directory.apply_report(report(f"s{n}"), 0.0) for n in range(5)] == [0, 1, 2, None, None]
    assert directory.apply_report(report("s0", 2), 1.0) == 0
    assert len(directory.states) == 3


def digest(number: int, *down: str, term: int = 1, page: int = 1, pages: int = 1) -> ServiceStates:
    named = tuple(ServiceDown(service=name, epoch=1, code="service.silent") for name in down)
    return ServiceStates(cell="c1", term=term, number=number, page=page, pages=pages, down=named)


def test_the_newest_whole_digest_of_a_cell_names_which_services_are_down() -> None:
    directory = ServiceDirectory()
    for name in "ab":
        directory.apply_report(report(name), 0.0)

    def applied(of: ServiceStates, now_s: float) -> list[bool] | None:
        """What is down then; None: the digest counts for nothing."""
        return None if directory.apply_states(of, now_s) is None else directory.down().tolist()

    assert applied(digest(5, "a"), 1.0) == [True, False, True]
    assert applied(digest(5, "b"), 1.0) is None and applied(digest(4), 1.0) is None, "older, or the same again"
    assert applied(digest(6, "a", pages=2), 2.0) == [True, False, True]
    assert applied(digest(6, "b", page=2, pages=2), 2.0) == [True, True, True]
    assert applied(digest(7, pages=3), 3.0) == [True, True, True]
    assert applied(digest(7, page=3, pages=3), 3.0) is None, "page 2 was lost"
    assert directory.down().tolist() == [True, True, True]
    assert applied(digest(1, term=2), 4.0) == [False, False, True]
    assert applied(digest(99, "a"), 5.0) is None, "of a keeper that was replaced"
