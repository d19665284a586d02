"""The breaker of a service, and the listings of hosts: a row for each condition that alone makes the difference."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.cell import ComputeHosts, HostReport, Running
from cell_conductor.domain import breaker as breakers
from cell_conductor.domain.breaker import (
    Breaker,
    CountedAs,
    Finding,
    Listings,
    RecentFindings,
    ScanFindings,
    assess,
    misreserved,
    reserved_on,
)
from cell_conductor.domain.instance import Instance
from cell_conductor.domain.report import NO_RECORD, Unexplained, UnexplainedKind
from tests.unit.conductor.scenario import UUID, host
from tests.unit.conductor.test_breaker import HOST, lost, over, unknown
from tests.unit.conductor.world import listing

L, Q, O = CountedAs.LOST, CountedAs.QUARANTINED, CountedAs.OVER  # noqa: E741
RESET = Breaker(service="s", tripped_at=1.0, machines=tuple(f"i{n}@{HOST}" for n in (1, 2)), reset_at=2.0)


def ordered(*numbers: int) -> list[Finding]:
    return [replace(one, ordered=True) for one in lost(*numbers)]


@pytest.mark.parametrize(
    ("findings", "quarantined", "known", "recent", "limit", "counted", "tripped"),
    [
        ([], (), None, {}, 0, {}, None),
        (lost(1), (), None, {}, 1, {1: L}, None),
        (lost(1), (), None, {}, 0, {}, (1, 0, 0, [1])),
        (over(1), (2,), None, {}, 2, {1: O, 2: Q}, None),
        (over(1), (2,), None, {}, 1, {}, (0, 1, 1, [1, 2])),
        (lost(1), (), None, {9: O}, 2, {1: L}, None),
        (lost(1), (), None, {9: O}, 1, {}, (1, 0, 1, [1])),
        (lost(1), (), None, {1: O}, 1, {1: L}, None),
        ([], (), None, {7: L, 8: L}, 1, {}, None),
        (ordered(1, 2), (), None, {}, 1, {}, None),
        ([*ordered(1), *lost(2, 3)], (), None, {}, 1, {}, (2, 0, 0, [2, 3])),
        (lost(1, 2, 3), (), RESET, {}, 1, {3: L}, None),
        (lost(3), (), RESET, {1: L}, 1, {3: L}, None),
        (lost(1, 3, 4), (), RESET, {}, 1, {}, (2, 0, 0, [1, 3, 4])),
        ([], (1, 2), RESET, {}, 1, {}, (0, 2, 0, [1, 2])),
        (lost(1), (), replace(RESET, reset_at=0.0), {}, 9, {}, None),
    ],
)
def test_the_findings_of_a_report_take_effect_all_or_none(
    *,
    findings: list[Finding],
    quarantined: tuple[int, ...],
    known: Breaker | None,
    recent: dict[int, CountedAs],
    limit: int,
    counted: dict[int, CountedAs],
    tripped: tuple[int, int, int, list[int]] | None,
) -> None:
    earlier = {f"i{n}@{HOST}": kind for n, kind in recent.items()}
    verdict = assess("s", findings, unknown(*quarantined), known, limit=limit, now=7.0, recent=earlier)
    assert verdict.counted == {f"i{n}@{HOST}": kind for n, kind in counted.items()}
    is_held = tripped is not None or (known is not None and known.is_open)
    assert (verdict.go, verdict.held) == (((), len(findings)) if is_held else (tuple(findings), 0))
    opened = verdict.tripped
    if tripped is None:
        assert opened is None
    else:
        *counts, machines = tripped
        assert opened is not None and [opened.lost, opened.quarantined, opened.over] == counts
        assert opened.machines == tuple(f"i{n}@{HOST}" for n in machines)


def test_machines_beyond_the_bound_are_counted_and_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakers, "MAX_NAMED", 2)
    opened = assess("s", lost(3, 1, 2), [], None, limit=1, now=7.0).tripped
    assert opened is not None and (opened.lost, opened.machines) == (3, (f"i1@{HOST}", f"i2@{HOST}"))


@pytest.mark.parametrize(("at", "counts"), [(159.9, True), (160.0, False), (160.1, False)])
def test_a_machine_counts_within_the_window(at: float, counts: bool) -> None:
    recent = RecentFindings(window_s=60.0)
    recent.add("s", {"m": L}, 100.0)
    recent.add("t", {}, 100.0)
    assert recent.of("s", at) == ({"m": L} if counts else {})
    assert recent.of("t", 100.0) == {}


def test_a_scan_begins_without_pages() -> None:
    scan = ScanFindings((1, 2, 3))
    assert (scan.key, scan.pages, scan.findings, scan.quarantined) == ((1, 2, 3), 0, [], [])


# --- Which service lists which host.


def listings_of(*reports: ComputeHosts) -> Listings:
    known = Listings()
    for report in reports:
        known.note(report)
    return known


FIRST = listing("s1", 1, sequence=5, first_sequence=5, pages=2, complete=False)
LAST = listing("s1", 3, sequence=7, first_sequence=5, pages=2)
CHANGE = listing("s1", 2, sequence=6, complete=False)


@pytest.mark.parametrize(
    ("reports", "hosts", "whole"),
    [
        ((), (), False),
        ((CHANGE,), (2,), False),
        ((FIRST,), (1,), False),
        ((replace(FIRST, pages=1),), (1,), False),
        ((FIRST, LAST), (1, 3), True),
        ((LAST,), (3,), False),
        ((FIRST, CHANGE, LAST), (1, 2, 3), True),
        ((CHANGE, FIRST, LAST), (1, 3), True),
        ((listing("s1", 4, sequence=2), FIRST), (4, 1), True),
        ((listing("s1", 4, sequence=2), FIRST, LAST), (1, 3), True),
        ((listing("s1", 4, sequence=2), CHANGE), (4, 2), True),
        ((listing("s1", 4, sequence=2), listing("s1", 4, 5, sequence=3)), (4, 5), True),
        ((listing("s1", 4, sequence=2), LAST), (4, 3), True),
        ((listing("s1", 4, sequence=2), replace(CHANGE, epoch=2)), (2,), False),
        ((listing("s1", 4, sequence=2), listing("s1", 5, sequence=2, epoch=2)), (5,), True),
    ],
)
def test_the_hosts_that_a_service_has_by_its_reports(
    reports: tuple[ComputeHosts, ...], hosts: tuple[int, ...], whole: bool
) -> None:
    known = listings_of(*reports)
    assert known.has_heard("s1") is bool(reports) and not known.has_heard("s2")
    assert known.hosts_of(["s1", "s2"]) == {host(n) for n in hosts}
    assert known.may_have("s1", host(9)) is not whole
    assert known.may_have("s2", host(9))
    for n in range(1, 6):
        assert known.listers(host(n)) == (("s1",) if n in hosts else ())
        assert known.may_have("s1", host(n)) is (not whole or n in hosts)


def test_a_host_that_one_service_leaves_out_stays_with_the_other() -> None:
    known = listings_of(listing("s1", 1, 2), listing("s2", 1), listing("s1", 2, sequence=2))
    assert [known.listers(host(n)) for n in (1, 2)] == [("s2",), ("s1",)]


def test_a_host_that_none_lists_any_more_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakers, "MAX_HOSTS", 1)
    known = listings_of(listing("s1", 1), listing("s1", sequence=2), listing("s2", 2, 3), listing("s3", 2))
    assert [known.listers(host(n)) for n in (1, 2, 3)] == [(), ("s2", "s3"), ()]


@pytest.mark.parametrize(
    ("mine", "others", "up", "contested"),
    [
        ((0, 0), (0, 0), "s1 s2", True),
        ((0, 0), (0, 0), "s2", True),
        ((0, 0), (0, 0), "s1", False),
        ((1, 0), (0, 1), "s1 s2", False),
        ((0, 1), (1, 0), "s1 s2", False),
        ((0, 0), (1, 1), "s1 s2", True),
        ((1, 1), (0, 0), "s1 s2", True),
    ],
)
def test_a_host_that_two_services_list(
    mine: tuple[int, int], others: tuple[int, int], up: str, contested: bool
) -> None:
    own = listing("s1", 1, 2, ring_term=mine[0], ring_number=mine[1])
    other = listing("s2", 1, ring_term=others[0], ring_number=others[1])
    assert listings_of(own, other).contested(own, up.split()) == ({host(1): "s2"} if contested else {})
    assert listings_of(own).contested(own, up.split()) == {}


# --- What is kept out of the inventory.


RESERVED = Running(instance_uuid=UUID, attempt=1, reserved=True)


@pytest.mark.parametrize(
    ("running", "kind", "wanted"),
    [
        (None, None, None),
        ((), None, None),
        ((RESERVED,), None, []),
        ((replace(RESERVED, reserved=False),), UnexplainedKind.QUARANTINED, [UUID]),
        ((replace(RESERVED, reserved=False, destroying=True),), UnexplainedKind.FOREIGN, None),
        ((replace(RESERVED, destroying=True),), None, None),
        ((RESERVED,), UnexplainedKind.FOREIGN, None),
    ],
)
def test_the_machines_of_a_host_that_are_to_be_reserved(
    running: tuple[Running, ...] | None, kind: UnexplainedKind | None, wanted: list[str] | None
) -> None:
    reports = (HostReport(uuid=HOST, name="h", running=running),)
    made = ComputeHosts(service="s", cell="c", epoch=1, sequence=1, hosts=reports)
    unexplained = [] if kind is None else [Unexplained(UUID, 1, HOST, kind, NO_RECORD)]
    found = {at: [one.instance_uuid for one in machines] for at, machines in misreserved(made, unexplained).items()}
    assert found == ({} if wanted is None else {HOST: wanted})


def test_a_machine_without_hosts_on_record_takes_what_is_not_known() -> None:
    for records in ({}, {UUID: Instance(uuid=UUID)}):
        (machine,) = reserved_on(HOST, [RESERVED], records).machines
        assert (machine.instance_uuid, machine.attempt, machine.allocations) == (UUID, 1, None)
