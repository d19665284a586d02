"""NUMA topologies: what is read of Nova's objects, what fits a host with which pins, and what a host has left. Nova's
own answers to random cases are compared with ours in `tests/nova/oracles`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from nova_scheduler.filters import numa as filters_numa
from nova_scheduler.filters.numa import IN_FLIGHT, UNKNOWN, NUMATopologyFilter
from nova_scheduler.filters.pci import PciPassthroughFilter
from nova_scheduler.fit import host_devices, numa, numa_fit
from nova_scheduler.fit.host_devices import INCONSISTENT, DeviceRequest, HostDevices, Mappings, NumaRequest, fitted
from nova_scheduler.fit.numa import (
    HostCell,
    HostTopology,
    InstanceCell,
    InstanceTopology,
    MemoryPages,
    NetworkMetadata,
    NumaLimits,
    PciView,
    PinsRefused,
    Unfit,
)
from nova_scheduler.fit.numa_fit import fit_instance_to_host
from nova_scheduler.fit.numa_objects import (
    MAX_BYTES,
    TopologyUnreadable,
    parse_host_topology,
    parse_instance_topology,
    parse_limits,
    parse_network_metadata,
    primitive_of,
)
from nova_scheduler.fit.numa_usage import consume
from nova_scheduler.fit.pci import PciPool, PciRequest
from nova_scheduler.request.numa import numa_request
from nova_scheduler.request.request_spec import NotDecided, NovaFlavor, NovaImage, NovaRequest
from nova_scheduler.wire.versioned import versioned
from scheduler_worker.selection import ranking
from scheduler_worker.selection.explain import PHRASES
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import applies_to
from scheduler_worker.selection.request_spec import RequestSpec
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts

SMALL_KB, HUGE_KB = 4, 2_048
NONE = frozenset[int]()


def node(number: int = 0, shared: range = range(0), dedicated: range = range(4), /, **changed: Any) -> HostCell:
    """A cell of 4,096 MB whose cores have two threads: 0 and 1, 2 and 3, and so on."""
    own = sorted({*shared, *dedicated})
    cores = tuple(frozenset(own[at : at + 2]) for at in range(0, len(own), 2))
    given = {"cpuset": frozenset(shared), "pcpuset": frozenset(dedicated), "memory": 4_096, "siblings": cores}
    return HostCell(**{"id": number, **given, **changed})


def host(*cells: HostCell) -> HostTopology:
    return HostTopology(cells=cells)


TWO = host(node(0), node(1, range(0), range(4, 8)))
SHARED = host(node(0, range(4), range(0)))
SINGLE = tuple(frozenset({cpu}) for cpu in range(4))


def part(cpus: int = 2, number: int = 0, /, policy: str | None = "dedicated", **changed: Any) -> InstanceCell:
    """A cell of an instance with 512 MB."""
    own, none = frozenset(range(cpus)), frozenset[int]()
    sets = {"cpuset": none, "pcpuset": own} if policy == "dedicated" else {"cpuset": own, "pcpuset": none}
    return InstanceCell(**{"id": number, "memory": 512, "cpu_policy": policy, **sets, **changed})


def vm(*cells: InstanceCell, emulator: Any = None) -> InstanceTopology:
    return InstanceTopology(cells=cells, emulator_threads_policy=emulator)


def pages(size_kb: int, total: int, used: int = 0, reserved: int = 0) -> MemoryPages:
    return MemoryPages(size_kb=size_kb, total=total, used=used, reserved=reserved)


def limits(cpus: float = 1.0, memory: float = 1.0, networks: NetworkMetadata | None = None) -> NumaLimits:
    return NumaLimits(cpu_allocation_ratio=cpus, ram_allocation_ratio=memory, network_metadata=networks)


def near(*physnets: str, tunneled: bool = False) -> NetworkMetadata:
    return NetworkMetadata(physnets=frozenset(physnets), tunneled=tunneled)


MIXED = part(3, policy="mixed", cpuset=frozenset({0}), pcpuset=frozenset({1, 2}))
PAGED = host(node(mempages=(pages(SMALL_KB, 1_048_576), pages(HUGE_KB, 512, used=100))))
NETWORKED = host(node(0, network_metadata=near("a")), node(1, range(0), range(4, 8), network_metadata=near("b")))
TUNNELED = host(node(0), node(1, range(0), range(4, 8), network_metadata=near(tunneled=True)))
LEGACY = host(node(0, range(4), range(4)))

Outcome = str | list[tuple[int, Mapping[int, int] | None]]


def outcome(found: InstanceTopology | Unfit) -> Outcome:
    """The reason, or each cell's host cell and pins."""
    return found.reason if isinstance(found, Unfit) else [(cell.id, cell.cpu_pinning) for cell in found.cells]


FITS: Mapping[str, tuple[HostTopology | None, InstanceTopology, NumaLimits | None, Outcome]] = {
    "no topology": (None, vm(part()), None, numa.NO_TOPOLOGY),
    "no cells": (host(), vm(part()), None, numa.NO_TOPOLOGY),
    "too few cells": (SHARED, vm(part(), part(2, 1)), None, numa.TOO_FEW_CELLS),
    # dedicated CPUs
    "threads of one core": (host(node()), vm(part(2)), None, [(0, {0: 0, 1: 1})]),
    "all": (host(node()), vm(part(4)), None, [(0, {0: 0, 1: 1, 2: 2, 3: 3})]),
    "more than there are": (host(node()), vm(part(5)), None, numa.PCPUS),
    "more than are free": (host(node(pinned_cpus=frozenset({0}))), vm(part(4)), None, numa.PCPUS),
    "those that are free": (host(node(pinned_cpus=frozenset({0}))), vm(part(3)), None, [(0, {0: 1, 1: 2, 2: 3})]),
    "a free core": (host(node(pinned_cpus=frozenset({0}))), vm(part(2)), None, [(0, {0: 2, 1: 3})]),
    "none for shared": (host(node()), vm(part(2, policy=None)), None, numa.VCPUS),
    "two cells": (TWO, vm(part(2), part(2, 1)), None, [(0, {0: 0, 1: 1}), (1, {0: 4, 1: 5})]),
    "the freer cell": (
        host(node(0, pinned_cpus=frozenset({0})), node(1, range(0), range(4, 8))), vm(part(1)), None, [(1, {0: 4})]
    ),
    "mixed": (host(node(0, range(4, 6))), vm(MIXED), None, [(0, {1: 0, 2: 1})]),
    "mixed, none shared": (host(node(0)), vm(MIXED), None, numa.VCPUS),
    "mixed, shared ones used": (host(node(0, range(4, 6), cpu_usage=2)), vm(MIXED), limits(), numa.CPU_RATIO),
    "cores not told": (host(node(siblings=())), vm(part()), None, numa.THREADS),
    # thread policies
    "require": (host(node()), vm(part(2, cpu_thread_policy="require")), None, [(0, {0: 0, 1: 1})]),
    "require without threads": (
        host(node(siblings=SINGLE)), vm(part(1, cpu_thread_policy="require")), None, numa.THREADS
    ),
    "require, one thread a core left": (
        host(node(pinned_cpus=frozenset({0, 2}))), vm(part(2, cpu_thread_policy="require")), None, numa.THREADS
    ),
    "prefer, one thread a core left": (
        host(node(pinned_cpus=frozenset({0, 2}))), vm(part(2, cpu_thread_policy="prefer")), None, [(0, {0: 1, 1: 3})]
    ),
    "isolate without threads": (
        host(node(siblings=SINGLE)), vm(part(2, cpu_thread_policy="isolate")), None, [(0, {0: 0, 1: 1})]
    ),
    "isolate with threads": (host(node()), vm(part(1, cpu_thread_policy="isolate")), None, numa.HYPERTHREADS),
    "isolate, CPUs for both uses": (LEGACY, vm(part(2, cpu_thread_policy="isolate")), None, [(0, {0: 0, 1: 2})]),
    "isolate, too few cores": (LEGACY, vm(part(3, cpu_thread_policy="isolate")), None, numa.THREADS),
    # memory
    "pinned memory used": (host(node(memory_usage=4_000)), vm(part()), None, numa.MEMORY),
    "shared memory overcommitted": (
        host(node(0, range(4), range(0), memory_usage=4_000)), vm(part(2, policy="shared")), None, [(0, None)]
    ),
    "shared memory against itself": (SHARED, vm(part(2, policy="shared", memory=5_000)), None, numa.MEMORY),
    "smallest pages": (PAGED, vm(part(memory=4_096)), None, [(0, {0: 0, 1: 1})]),
    "smallest pages, too few": (PAGED, vm(part(memory=4_097)), None, numa.MEMORY),
    # ratios
    "shared": (SHARED, vm(part(4, policy="shared")), limits(), [(0, None)]),
    "CPU ratio": (host(node(0, range(4), range(0), cpu_usage=3)), vm(part(2, policy=None)), limits(), numa.CPU_RATIO),
    "RAM ratio": (
        host(node(0, range(4), range(0), memory_usage=4_000)), vm(part(2, policy=None)), limits(4.0), numa.RAM_RATIO
    ),
    # networks
    "near": (NETWORKED, vm(part()), limits(networks=near("b")), [(1, {0: 4, 1: 5})]),
    "near to none": (NETWORKED, vm(part()), limits(networks=near("c")), [(0, {0: 0, 1: 1})]),
    "near to two": (NETWORKED, vm(part()), limits(networks=near("a", "b")), numa.NETWORKS),
    "tunneled": (TUNNELED, vm(part()), limits(networks=near(tunneled=True)), [(1, {0: 4, 1: 5})]),
    "tunneled, near to none": (TWO, vm(part()), limits(networks=near(tunneled=True)), [(0, {0: 0, 1: 1})]),
}  # fmt: skip


@pytest.mark.parametrize("case", FITS.values(), ids=FITS)
def test_an_instance_fits_a_host(
    case: tuple[HostTopology | None, InstanceTopology, NumaLimits | None, Outcome],
) -> None:
    on, instance, within, expected = case
    assert outcome(fit_instance_to_host(on, instance, within)) == expected


@pytest.mark.parametrize(
    ("wanted", "memory", "size"),
    [
        (numa.SMALL, 512, SMALL_KB),
        (numa.LARGE, 512, HUGE_KB),
        (numa.ANY, 512, HUGE_KB),
        (numa.ANY, 1_024, SMALL_KB),  # 412 huge pages are free
        (numa.ANY, 511, SMALL_KB),  # no whole huge pages
        (HUGE_KB, 824, HUGE_KB),
        (HUGE_KB, 826, None),
        (numa.LARGE, 826, None),
        (16, 512, None),
        (0, 512, 0),
    ],
)
def test_a_cell_gets_pages(wanted: int, memory: int, size: int | None) -> None:
    found = fit_instance_to_host(PAGED, vm(part(pagesize=wanted, memory=memory)))
    got = found.cells[0].pagesize if isinstance(found, InstanceTopology) else found.reason
    assert got == (numa.PAGES if size is None else size)


@pytest.mark.parametrize(
    ("cpus", "threads", "reserved"),
    [
        (1, None, {1}),
        (2, None, {2}),
        (3, None, {3}),
        (1, "isolate", {2}),  # of another core
        (2, "isolate", None),
        (4, None, None),
    ],
)
def test_the_emulator_gets_a_cpu_beside_the_first_cell(cpus: int, threads: Any, reserved: set[int] | None) -> None:
    second = part(1, 1, memory=1)
    instance = vm(part(cpus, cpu_thread_policy=threads), second, emulator="isolate")
    found = fit_instance_to_host(host(*LEGACY.cells, node(1, range(4, 6), range(4, 6), memory=1)), instance)
    if isinstance(found, Unfit):
        assert (reserved, found.reason) == (None, numa.PCPUS if threads is None else numa.THREADS)
    else:
        assert [cell.cpuset_reserved for cell in found.cells] == [reserved, None]
        assert found.emulator_threads_policy == "isolate"


def test_cells_with_devices_come_first_for_instances_that_want_some_and_last_for_others() -> None:
    second = PciView(free_by_node={1: 2, None: 5})
    found = [
        outcome(fit_instance_to_host(TWO, vm(part()), None, view))
        for view in (None, second, replace(second, fits=lambda _: True), PciView(free_by_node={0: 1}))
    ]
    assert found == [[(0, {0: 0, 1: 1})], [(0, {0: 0, 1: 1})], [(1, {0: 4, 1: 5})], [(1, {0: 4, 1: 5})]]


def test_devices_are_asked_about_once_for_the_same_cells() -> None:
    asked: list[list[int]] = []

    def fits(cells: Any) -> bool:
        asked.append([cell.id for cell in cells])
        return False

    found = fit_instance_to_host(TWO, vm(part(), part(2, 1)), None, PciView(fits=fits))
    assert (outcome(found), asked) == (numa.PCI, [[0, 1]])


def test_a_packed_host_takes_the_fuller_cell() -> None:
    fuller = host(node(0), node(1, range(0), range(4, 8), pinned_cpus=frozenset({4})))
    assert outcome(fit_instance_to_host(fuller, vm(part()), pack=True)) == [(1, {0: 6, 1: 7})]


def test_what_a_try_leaves_in_a_cell_stays_as_in_nova() -> None:
    """The first cell's huge pages are chosen by a host cell on which then its CPUs do not fit."""
    small = node(1, range(0), range(4, 8), mempages=(pages(SMALL_KB, 1_048_576),))
    first = node(0, mempages=(pages(HUGE_KB, 2_048),), pinned_cpus=frozenset(range(4)), memory=9_000)
    assert outcome(fit_instance_to_host(host(first, small), vm(part(pagesize=numa.ANY)))) == [(1, {0: 4, 1: 5})]
    assert isinstance(fit_instance_to_host(host(first, small), vm(part(pagesize=numa.ANY)), pack=True), Unfit)


def test_arrangements_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa_fit, "MAX_ARRANGEMENTS", 1)
    wanted = limits(networks=near("b"))
    assert outcome(fit_instance_to_host(NETWORKED, vm(part()), wanted)) == numa.TOO_MANY_ARRANGEMENTS


def eight(**of_last: Any) -> HostTopology:
    last = node(7, range(0), range(28, 32), **of_last)
    return host(*(node(number, range(0), range(4 * number, 4 * number + 4)) for number in range(7)), last)


SIZES = (2, 2, 2, 2, 2, 2, 2, 4)


@pytest.mark.parametrize(
    ("on", "cpus", "pci", "expected"),
    [
        # one after the other, these may take 40,320 arrangements
        (eight(), (1,) * 8, PciView(fits=lambda _: False), numa.PCI),
        (eight(), (5, *SIZES[1:]), None, numa.PCPUS),
        (eight(pinned_cpus=frozenset({28})), (4, *SIZES[1:-1], 3), None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (eight(pinned_cpus=frozenset({28, 29})), (*SIZES[:-1], 4), None, [0, 1, 2, 3, 4, 5, 7, 6]),
    ],
    ids=("devices elsewhere", "a cell too large", "in order", "the last two swapped"),
)
def test_arrangements_that_must_fail_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, on: HostTopology, cpus: Sequence[int], pci: PciView | None, expected: object
) -> None:
    monkeypatch.setattr(numa_fit, "MAX_ARRANGEMENTS", 20)
    found = fit_instance_to_host(on, vm(*(part(count, number) for number, count in enumerate(cpus))), None, pci)
    if isinstance(found, Unfit):
        assert found.reason == expected
    else:
        assert [cell.id for cell in found.cells] == expected


# --- What is left


def test_a_fitted_instance_is_consumed_and_given_back() -> None:
    on = host(node(0, range(4, 6), mempages=(pages(SMALL_KB, 1_048_576), pages(HUGE_KB, 512))))
    found = fit_instance_to_host(on, vm(replace(MIXED, pagesize=HUGE_KB), emulator="isolate"))
    assert isinstance(found, InstanceTopology)
    after = consume(on, found).cells[0]
    assert (after.pinned_cpus, after.cpu_usage, after.memory_usage) == ({0, 1, 2}, 1, 512)
    assert [one.used for one in after.mempages] == [0, 256]
    assert consume(host(after), found, free=True) == on


def test_without_a_page_size_the_smallest_pages_are_used() -> None:
    found = [consume(PAGED, vm(part(2, policy=None, memory=one))).cells[0].mempages for one in (1, 512)]
    assert [[one.used for one in each] for each in found] == [[256, 100], [131_072, 100]]


def test_an_instance_that_isolates_threads_takes_whole_cores() -> None:
    placed = vm(part(1, cpu_thread_policy="isolate", cpu_pinning={0: 2}))
    assert consume(LEGACY, placed).cells[0].pinned_cpus == {2, 3}
    other = vm(part(1, 9, cpu_pinning={0: 2}))
    assert consume(LEGACY, other) == LEGACY


@pytest.mark.parametrize(
    ("pinned", "pins", "free"),
    [(NONE, {0: 9}, False), (frozenset({1}), {0: 1}, False), (NONE, {0: 1}, True), (NONE, {0: 9}, True)],
    ids=("no such CPU", "used", "not used", "no such CPU given back"),
)
def test_pins_are_of_free_cpus(pinned: frozenset[int], pins: dict[int, int], free: bool) -> None:
    with pytest.raises(PinsRefused):
        consume(host(node(pinned_cpus=pinned)), vm(part(1, cpu_pinning=pins)), free=free)


# --- The filter


@pytest.fixture
def hosts() -> Hosts:
    return Hosts([PLENTY] * 4)


def known(topology: HostTopology | None, **changed: Any) -> HostDevices:
    return HostDevices(topology=topology, cpu_allocation_ratio=1.0, ram_allocation_ratio=1.0, **changed)


def asking(hosts: Hosts, *more: object, **fields: Any) -> RequestSpec:
    return replace(hosts.spec(), devices=(NumaRequest(**fields), *more))


def test_hosts_pass_by_their_numa_nodes() -> None:
    hosts = Hosts([PLENTY] * 7)
    told = known(TWO), known(SHARED), known(None), known(TWO, is_overdrawn=True), known(TWO, knows_pools=False)
    facts = dict(zip(hosts.uuids, (*told, known(None, knows_topology=False)), strict=False))
    judged, asked = NUMATopologyFilter(facts.get), asking(hosts, topology=vm(part()))
    result = judged.filter(hosts.view(), asked)
    assert result.passed.tolist() == [True, False, False, False, True, False, False]
    assert result.rejected == {numa.PCPUS: 1, numa.NO_TOPOLOGY: 1, IN_FLIGHT: 1, UNKNOWN: 2}
    with_device = replace(asked, devices=(*asked.devices, PciRequest(count=0)))
    assert judged.filter(hosts.view(), with_device).rejected[UNKNOWN] == 3


def test_of_all_hosts_a_bounded_number_of_arrangements_is_looked_at(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image may name as many NUMA nodes as the hosts have, and the fit holds everything else up."""
    monkeypatch.setattr(filters_numa, "MAX_ARRANGEMENTS", 3)
    full = host(*(node(at, pinned_cpus=frozenset(range(4))) for at in range(2)))
    judged = NUMATopologyFilter(dict.fromkeys(hosts.uuids, known(full)).get)
    asked = asking(hosts, topology=vm(part(), part(2, 1)))
    found = judged.filter(hosts.view(), asked).rejected
    assert found == {numa.PCPUS: 1, numa.TOO_MANY_ARRANGEMENTS: 3}
    assert judged.rejection_reason(hosts.uuids[-1], asked) == numa.PCPUS, "one host that is drawn is looked at"


class OnlyThis:
    """Lets the options of one host pass."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid

    def suiting(self, host: HostsView, spec: RequestSpec, options: Sequence[Mappings]) -> list[int]:
        return list(range(len(options))) if host.replica.uuids_of(host.rows) == [self._uuid] else []


def test_what_was_not_judged_is_not_thrown_away(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pick of the same ranking goes on after those that it has judged."""
    monkeypatch.setattr(ranking, "MAX_UNSUITED", 2)
    judges = cast(Any, [OnlyThis(hosts.uuids[-1])])
    ranked = ranking.Ranking(hosts.view(), hosts.spec(), (), (), shuffle=False, rng=Random(1), judges=judges)
    picked = [ranked.pick((), subset=1, alternates=0) for _ in range(2)]
    assert picked[0] is None and picked[1] is not None
    assert picked[1].selected.uuid == hosts.uuids[-1]


def test_it_applies_to_what_asks_of_numa_nodes(hosts: Hosts) -> None:
    judged = NUMATopologyFilter({}.get)
    specs = [
        hosts.spec(),
        asking(hosts),
        asking(hosts, topology=vm()),
        asking(hosts, topology=vm(part())),
        asking(hosts, needs_threads=True),
    ]
    assert [applies_to(judged, spec) for spec in specs] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("topology", "wanted", "reason"),
    [
        (TWO, None, None),
        (TWO, vm(), None),
        (host(node(siblings=SINGLE)), None, numa.THREADS),
        (host(node(siblings=SINGLE)), vm(part()), numa.THREADS),
        (None, None, None),
        (None, vm(part()), numa.NO_TOPOLOGY),
    ],
)
def test_threads_of_a_core_need_a_host_that_has_some(
    hosts: Hosts, topology: HostTopology | None, wanted: InstanceTopology | None, reason: str | None
) -> None:
    judged = NUMATopologyFilter({"host": known(topology)}.get)
    assert judged.rejection_reason("host", asking(hosts, topology=wanted, needs_threads=True)) == reason


def test_candidates_do_by_the_numa_node_of_their_devices(hosts: Hosts) -> None:
    kind = {"vendor_id": "8086", "product_id": "1515"}
    pools = [PciPool.of(1, **kind, numa_node=at, tags={"rp_uuid": f"rp{at}"}) for at in (0, 1, 2)]
    device = PciRequest(spec=(kind,), alias_name="nic", request_id="r", numa_policy="required")
    spec = asking(hosts, device, topology=vm(part()))
    candidates = [{"r-0": [f"rp{at}"]} for at in (0, 1, 2)]
    judged = NUMATopologyFilter(dict.fromkeys(hosts.uuids, known(TWO, pools=pools)).get)
    assert judged.suiting(hosts.view().subset(np.array([0])), spec, candidates) == [0, 1]
    found = [fitted(known(TWO, pools=pools), DeviceRequest.of(spec.devices), one) for one in candidates]
    assert [outcome(one) if one else None for one in found] == [[(0, {0: 0, 1: 1})], [(1, {0: 4, 1: 5})], numa.PCI]


def test_a_fit_with_pins_of_another_cell_is_refused(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    astray = vm(part(1, 0, cpu_pinning={0: 7}))
    monkeypatch.setattr(host_devices, "fit_instance_to_host", lambda *_, **__: astray)
    judged = NUMATopologyFilter({"host": known(TWO)}.get)
    assert judged.rejection_reason("host", asking(hosts, topology=vm(part(1)))) == INCONSISTENT


def test_a_topology_is_no_request_for_devices(hosts: Hosts) -> None:
    judged = PciPassthroughFilter({}.get)
    specs = (asking(hosts, topology=vm(part())), asking(hosts, PciRequest(), topology=vm(part())))
    assert [applies_to(judged, spec) for spec in specs] == [False, True]


def test_limits_are_those_of_the_host_and_the_request() -> None:
    found = known(TWO).limits(NumaRequest(networks=near("a")))
    assert found == limits(1.0, 1.0, near("a"))


def test_each_reason_is_said_in_words() -> None:
    reasons = {value for name, value in vars(numa).items() if name.isupper() and str(value).startswith("numa.")}
    assert {UNKNOWN, IN_FLIGHT, INCONSISTENT, *reasons} <= PHRASES.keys()


SHARES = NovaFlavor(name="m", vcpus=1, memory_mb=1)


@pytest.mark.parametrize(
    ("specs", "image", "needs"),
    [
        ({"hw:cpu_policy": "dedicated", "hw:cpu_thread_policy": "require"}, {}, True),
        ({"hw:cpu_policy": "dedicated"}, {"hw_cpu_thread_policy": "require"}, True),
        ({}, {"hw_cpu_policy": "dedicated", "hw_cpu_thread_policy": "require"}, True),
        ({"hw:cpu_policy": "mixed", "hw:cpu_thread_policy": "require"}, {}, False),
        ({"hw:cpu_policy": "dedicated", "hw:cpu_thread_policy": "prefer"}, {}, False),
    ],
)
def test_threads_are_required_by_the_flavor_or_the_image(
    specs: dict[str, str], image: dict[str, Any], needs: bool
) -> None:
    request = NovaRequest(flavor=replace(SHARES, extra_specs=specs), image=NovaImage(properties=image))
    found = numa_request(request)
    assert (found is not None and found.needs_threads) == needs


def test_what_is_asked_is_read_of_the_request() -> None:
    instance, networks = primitive_of(vm(part())), primitive_of(near("a"))
    found = numa_request(NovaRequest(flavor=SHARES, numa_topology=instance, network_metadata=networks))
    assert found == NumaRequest(topology=vm(part()), networks=near("a"))
    assert numa_request(NovaRequest(flavor=SHARES, network_metadata=networks)) is None
    with pytest.raises(NotDecided):
        numa_request(NovaRequest(flavor=SHARES, numa_topology={}))


# --- Nova's objects


WHOLE = host(
    node(
        0, range(4, 6), mempages=(pages(SMALL_KB, 9, 1, 2),), pinned_cpus=frozenset({1}), cpu_usage=1, memory_usage=7,
        socket=1, network_metadata=near("a", tunneled=True),
    ),
    node(1),
)  # fmt: skip
PLACED = vm(part(2, pagesize=HUGE_KB, cpu_pinning={0: 3}, cpuset_reserved=frozenset({2})), emulator="share")


def test_what_is_written_is_read_as_the_same() -> None:
    assert parse_host_topology(json.dumps(primitive_of(WHOLE))) == WHOLE
    assert parse_instance_topology(json.loads(json.dumps(primitive_of(PLACED)))) == PLACED
    for one in (limits(), limits(1.5, 2.0, near("a"))):
        assert parse_limits(json.loads(json.dumps(primitive_of(one)))) == one
    assert parse_network_metadata(primitive_of(near("a"))) == near("a")


def test_what_is_not_there_is_none() -> None:
    found = (parse_host_topology(""), parse_host_topology(None), parse_limits(None))
    assert (*found, parse_instance_topology(None), parse_network_metadata(None)) == (None,) * 5


@pytest.mark.parametrize(
    ("listed", "pinned", "first"),
    [([3, 11], [], 3), ([11, 3], [], 11), ([30, 9, 24, 14, 8, 25], [24, 14, 8, 30], 25)],
)
def test_pins_come_in_the_order_of_novas_sets(listed: list[int], pinned: list[int], first: int) -> None:
    """CPUs whose order in a set depends on how it was made."""
    plain = primitive_of(host(node()))
    core = [cpu for cpu in listed if cpu not in pinned]
    changes = {"siblings": [core], "pcpuset": listed, "pinned_cpus": pinned}
    plain["nova_object.data"]["cells"][0]["nova_object.data"].update(changes)
    found = outcome(fit_instance_to_host(parse_host_topology(json.dumps(plain)), vm(part(2))))
    assert found == [(0, {0: first, 1: sum(core) - first})]


def changed_host(**fields: Any) -> str:
    """A host with one cell, some of whose fields are these."""
    plain = primitive_of(host(node()))
    plain["nova_object.data"]["cells"][0]["nova_object.data"].update(fields)
    return json.dumps(plain)


UNREADABLE_HOSTS = {
    "not JSON": "{",
    "no object": "[]",
    "another class": json.dumps(versioned("PciDevicePoolList", "1.1", {})),
    "another version": json.dumps(versioned("NUMATopology", "2.0", {"cells": []})),
    "before versioned objects": json.dumps({"cells": [{"id": 0, "cpus": "0-3", "mem": {"total": 1}}]}),
    "no cells": json.dumps(versioned("NUMATopology", "1.2", {})),
    "cells that are none": json.dumps(versioned("NUMATopology", "1.2", {"cells": [1]})),
    "too many cells": json.dumps(primitive_of(host(*(node(at) for at in range(numa.MAX_CELLS + 1))))),
    "two of an id": json.dumps(primitive_of(host(node(), node()))),
    "a CPU below 0": changed_host(pcpuset=[-1]),
    "a CPU too high": changed_host(pcpuset=[numa.MAX_CPUS]),
    "a CPU as text": changed_host(pcpuset=["1"]),
    "no set": changed_host(pcpuset=1),
    "no pcpuset": changed_host(pcpuset=None),
    "memory below 0": changed_host(memory=-1),
    "memory too large": changed_host(memory=2**31),
    "pages of nothing": changed_host(
        mempages=[versioned("NUMAPagesTopology", "1.1", {"size_kb": 0, "total": 1, "used": 0})]
    ),
    "many page sizes": changed_host(mempages=[primitive_of(pages(4, 1))] * (numa.MAX_PAGE_SIZES + 1)),
    "networks as a list": changed_host(network_metadata=[primitive_of(near("a"))]),
    "too long": " " * (MAX_BYTES + 1),
    "deep": "[" * 100_000,
    "half a surrogate pair": '"\\ud800"',
}


@pytest.mark.parametrize("stored", UNREADABLE_HOSTS.values(), ids=UNREADABLE_HOSTS)
def test_a_row_that_cannot_be_read_is_refused(stored: str) -> None:
    with pytest.raises(TopologyUnreadable):
        parse_host_topology(stored)


UNREADABLE_INSTANCES: Mapping[str, Mapping[str, Any]] = {
    "an unknown policy": {"cpu_policy": "none"},
    "an unknown thread policy": {"cpu_thread_policy": "share"},
    "a page size below -3": {"pagesize": -4},
    "a pin that is no number": {"cpu_pinning_raw": {"a": 1}},
    "a pin too high": {"cpu_pinning_raw": {"0": numa.MAX_CPUS}},
    "no memory": {"memory": None},
    "no CPUs": {"pcpuset": []},
}


@pytest.mark.parametrize("fields", UNREADABLE_INSTANCES.values(), ids=UNREADABLE_INSTANCES)
def test_a_request_that_cannot_be_read_is_refused(fields: Mapping[str, Any]) -> None:
    plain = primitive_of(vm(part()))
    plain["nova_object.data"]["cells"][0]["nova_object.data"].update(fields)
    with pytest.raises(TopologyUnreadable):
        parse_instance_topology(plain)


@pytest.mark.parametrize("value", [1, "text", [], {}, primitive_of(WHOLE)])
def test_other_objects_are_refused(value: object) -> None:
    for parse in (parse_instance_topology, parse_limits, parse_network_metadata):
        with pytest.raises(TopologyUnreadable):
            parse(value)
