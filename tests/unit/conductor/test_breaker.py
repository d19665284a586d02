"""The breaker: how much of one report may be done without an operator's word."""

from __future__ import annotations

from msgspec.structs import replace

from cell_conductor.domain.breaker import Breaker, CountedAs, Finding, RecentFindings, assess
from cell_conductor.domain.events import HostMissing, HostRuns
from cell_conductor.domain.report import Unexplained, UnexplainedKind

HOST = "10000000-0000-4000-8000-000000000001"


def lost(*numbers: int) -> list[Finding]:
    return [Finding(f"i{n}", HostMissing(at=1.0, host_uuid=HOST, service="s1")) for n in numbers]


def over(*numbers: int) -> list[Finding]:
    return [Finding(f"i{n}", HostRuns(at=1.0, attempt=1, host_uuid=HOST, service="s")) for n in numbers]


def unknown(*numbers: int) -> list[Unexplained]:
    return [Unexplained(f"i{n}", 1, HOST, UnexplainedKind.QUARANTINED, "no record") for n in numbers]


def test_a_few_go_on() -> None:
    found = [*lost(1, 2), *over(3)]
    verdict = assess("s", found, unknown(4, 5), None, limit=5, now=7.0)
    assert verdict.go == tuple(found) and verdict.tripped is None and verdict.held == 0


def test_more_than_a_few_trip_it_and_none_of_them_goes_on() -> None:
    verdict = assess("s", [*lost(1, 2), *over(3)], unknown(4, 5, 6), None, limit=5, now=7.0)
    assert verdict.go == () and verdict.held == 3
    tripped = verdict.tripped
    assert tripped is not None and tripped.is_open and tripped.tripped_at == 7.0
    assert (tripped.lost, tripped.over, tripped.quarantined) == (2, 1, 3)
    assert tripped.machines == tuple(f"i{n}@{HOST}" for n in range(1, 7))


def test_while_it_is_open_nothing_goes_on() -> None:
    is_open = Breaker(service="s", tripped_at=1.0, machines=(f"i1@{HOST}",))
    for found in (lost(1), over(9)):
        verdict = assess("s", found, [], is_open, limit=5, now=7.0)
        assert verdict.go == () and verdict.held == 1 and verdict.tripped is None


def test_go_is_for_the_machines_that_tripped_it_and_no_others() -> None:
    keys = tuple(f"i{n}@{HOST}" for n in range(1, 7))
    gone = Breaker(service="s", tripped_at=1.0, machines=keys, reset_at=2.0, reset_by="op")
    found = [*lost(*range(1, 7)), *lost(7, 8, 9)]
    assert assess("s", found, [], gone, limit=3, now=7.0).go == tuple(found)
    more = assess("s", lost(*range(1, 11)), [], gone, limit=3, now=7.0)
    assert more.go == () and more.tripped is not None and more.tripped.lost == 4
    assert assess("s", lost(1), [], replace(gone, reset_at=0.0), limit=3, now=7.0).go == ()


def test_a_second_go_is_for_the_first_ones_machines_too() -> None:
    """Seed 7027: one report named one host and the next two. Each go was for what was new, and forgot the others:
    the breaker tripped with every report, for ever."""
    first = Breaker(service="s", tripped_at=1.0, machines=tuple(f"i{n}@{HOST}" for n in (1, 2, 3)), reset_at=2.0)
    found = lost(1, 2, 3, 4, 5, 6)
    second = assess("s", found, [], first, limit=1, now=7.0).tripped
    assert second is not None and second.lost == 3, "three of them are new"
    gone = replace(second, reset_at=8.0)
    assert assess("s", found, [], gone, limit=1, now=9.0).go == tuple(found)


def test_machines_that_vanish_one_report_after_the_other_trip_it_too() -> None:
    """Seed 1795422696: a service reported each of its hosts as soon as it had changed, three within 0.3 s."""
    recent = RecentFindings(window_s=60.0)
    for number in (1, 2, 3):
        verdict = assess("s", lost(number), [], None, limit=3, now=7.0, recent=recent.of("s", 100.0 + number))
        assert verdict.tripped is None
        recent.add("s", verdict.counted, 100.0 + number)
    verdict = assess("s", lost(4), unknown(5), None, limit=3, now=7.0, recent=recent.of("s", 104.0))
    assert verdict.go == () and verdict.tripped is not None
    assert (verdict.tripped.lost, verdict.tripped.quarantined) == (4, 1)
    assert verdict.tripped.machines == (f"i4@{HOST}", f"i5@{HOST}")
    assert recent.of("other", 104.0) == {}
    assert set(recent.of("s", 161.5)) == {f"i2@{HOST}", f"i3@{HOST}"}
    recent.clear("s")
    assert recent.of("s", 104.0) == {}


def test_a_machine_that_is_reported_again_counts_once_and_one_that_was_passed_not_at_all() -> None:
    gone = Breaker(service="s", tripped_at=1.0, machines=(f"i9@{HOST}",), reset_at=2.0, reset_by="op")
    recent = {f"i1@{HOST}": CountedAs.LOST, f"i9@{HOST}": CountedAs.LOST}
    assert assess("s", lost(1, 9), [], gone, limit=1, now=7.0, recent=recent).go == tuple(lost(1, 9))
    assert assess("s", lost(2), [], gone, limit=1, now=7.0, recent=recent).go == ()


def test_a_report_without_findings_that_count_does_not_trip_it() -> None:
    """The limit was lowered at a restart of the conductor."""
    recent = {f"i{n}@{HOST}": CountedAs.LOST for n in range(3)}
    ordered = [replace(one, ordered=True) for one in lost(7)]
    assert assess("s", ordered, [], None, limit=1, now=7.0, recent=recent).go == tuple(ordered)
