"""What was chosen and is not in its host's row yet: it counts from the choice until it is certain to be in the row."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import Clock
from nova_scheduler.cloud import in_flight
from nova_scheduler.cloud.host_facts import CellRead, HostFacts, HostHardware, HostStats, KnownRow
from nova_scheduler.cloud.in_flight import ASKED_AFTER_S, IN_FLIGHT_S, WRITTEN_S, InstancesInFlight
from nova_scheduler.fit.host_devices import NumaRequest
from nova_scheduler.fit.numa import HostCell, HostTopology, InstanceCell, InstanceTopology
from nova_scheduler.fit.numa_objects import primitive_of
from nova_scheduler.fit.pci import PciRequest, free_devices
from nova_scheduler.wire.versioned import versioned
from placement_worker.replica.request import Query
from scheduler_worker.selection.request_spec import RequestSpec
from tests.unit.nova_scheduler.facts_kit import CELL1, CELL2, uuid_of

KIND = {"vendor_id": "8086", "product_id": "1515"}
DEVICE = PciRequest(spec=(KIND,), alias_name="nic", request_id="r")
PLAIN = RequestSpec(query=Query(), flavor="", project_id="")
VM, OTHER = "vm", "other"


def pools(count: int, *, nodes: int = 1) -> str:
    """The column pci_stats of a host with so many devices beside each NUMA node."""
    objects = [
        versioned("PciDevicePool", "1.1", {**KIND, "numa_node": at, "count": count, "tags": {"rp_uuid": f"rp{at}"}})
        for at in range(nodes)
    ]
    return json.dumps(versioned("PciDevicePoolList", "1.1", {"objects": objects}))


def topology(cpus: int, pinned: Collection[int] = (), *, nodes: int = 1) -> str:
    """The column numa_topology of a host with so many CPUs for dedicated use on each node."""
    cells = tuple(
        HostCell(
            id=at,
            cpuset=frozenset(),
            pcpuset=frozenset(own := range(at * cpus, at * cpus + cpus)),
            memory=4_096,
            pinned_cpus=frozenset(pinned) & frozenset(own),
            siblings=tuple(frozenset({cpu}) for cpu in own),
        )
        for at in range(nodes)
    )
    return json.dumps(primitive_of(HostTopology(cells=cells)))


def numa(cpus: int) -> NumaRequest:
    """An instance with so many CPUs of its own."""
    own = frozenset(range(cpus))
    cell = InstanceCell(id=0, cpuset=frozenset(), pcpuset=own, memory=64, cpu_policy="dedicated")
    return NumaRequest(topology=InstanceTopology(cells=(cell,)))


def asking(*devices: object) -> RequestSpec:
    return replace(PLAIN, devices=devices)


class At(Clock):
    """The time is what a test says."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


class Here:
    """Two hosts of a cell, as reads of its database tell of them."""

    def __init__(self, **first: Any) -> None:
        self.clock = At()
        self.facts = HostFacts([CELL1, CELL2], max_age_s=1e9)
        self.held = InstancesInFlight(self.facts, self.clock)
        self.changes: list[tuple[str, int, int]] = []
        self.held.on_change = lambda *change: self.changes.append(change)
        self.host, self.second = uuid_of(1), uuid_of(2)
        self.rows = {at: HostHardware(host=f"h{at}", nodename=f"n{at}") for at in (1, 2)}
        self.read(**first)

    def read(self, *seen: str, on: str = "h1", written: bool = False, **row: Any) -> None:
        """A read 5 s after the one before. seen: the instances that it shows on a host; row: what that tells now."""
        self.clock.now_s += 5
        number = self.facts.begin(CELL1)
        self.take(number, *seen, on=on, written=written, **row)

    def take(self, number: int, *seen: str, on: str = "h1", written: bool = False, **row: Any) -> None:
        self.rows[1] = replace(self.rows[1], **row)
        rows = {at: KnownRow(uuid=uuid_of(at), hardware=one) for at, one in self.rows.items()}
        read = CellRead(present=rows.keys(), changed=rows, written=[1] if written else [])
        taken = self.facts.put(CELL1, number, read, self.clock.now_s)
        self.held.settle(CELL1, taken, lambda instance, host: instance in seen and host.host == on)

    def cpus(self, host: int = 1) -> int | None:
        """How many CPUs are free for dedicated use; None: another instance may use them."""
        found = self.held.devices_of(uuid_of(host))
        assert found is not None and found.topology is not None
        return None if found.is_overdrawn else sum(len(cell.free_pcpus) for cell in found.topology.cells)

    def devices(self) -> int | None:
        found = self.held.devices_of(self.host)
        assert found is not None
        return None if found.is_overdrawn else free_devices(found.pools)


def test_a_choice_takes_cpus_and_devices_at_once_and_one_that_is_not_claimed_gives_them_back() -> None:
    here = Here(numa_topology=topology(4), pci_pools=pools(3))
    assert (here.cpus(), here.devices()) == (4, 3)
    here.held.assume(VM, here.host, asking(numa(2), DEVICE), {})
    assert (here.cpus(), here.devices(), here.held.count(here.host)) == (2, 2, 1)
    here.held.assume(OTHER, here.host, asking(DEVICE), {})
    assert (here.cpus(), here.devices()) == (2, 1)
    here.held.assume(OTHER, here.second, asking(DEVICE), {})
    assert (here.cpus(), here.devices(), here.held.count(here.second)) == (2, 2, 1), "another host instead"
    here.held.drop(VM)
    here.held.drop("unknown")
    assert (here.cpus(), here.devices(), here.held.count(here.host)) == (4, 3, 0)
    assert here.changes == [
        (here.host, 1, -1), (here.host, 1, -1), (here.host, -1, 1), (here.second, 1, 0), (here.host, -1, 1)
    ]  # fmt: skip


def test_a_claim_counts_until_its_instance_was_seen_and_the_row_written_after_that() -> None:
    here = Here(numa_topology=topology(4))
    here.held.assume(VM, here.host, asking(numa(1)), {})
    here.held.claimed(VM, here.host, asking(numa(1)), {})
    here.held.drop(VM)
    free = [here.cpus()]
    for seen, row in (
        ((), {"numa_topology": topology(4, {3})}),  # another instance's
        ((), {"stats": HostStats(num_instances=1)}),
        ((VM,), {"numa_topology": topology(4, {3, 0})}),  # it may be in the row, or a third one is
        ((VM,), {}),
    ):
        here.read(*seen, **row)
        free.append(here.cpus())
    assert free == [3, 2, 2, 1, 1]
    here.read(VM, written=True)
    assert (here.cpus(), here.held.count(here.host)) == (2, 0)


@pytest.mark.parametrize("on", ["h2", "h9"])
def test_a_sight_of_it_elsewhere_does_not_end_it(on: str) -> None:
    here = Here(numa_topology=topology(4))
    here.held.claimed(VM, here.host, asking(numa(1)), {})
    for _ in range(3):
        here.read(VM, on=on, written=True)
    assert here.cpus() == 3


def test_a_read_that_began_before_the_choice_shows_nothing_of_it() -> None:
    """As of an instance that moves on its own host."""
    here = Here(numa_topology=topology(4))
    running = here.facts.begin(CELL1)
    here.held.claimed(VM, here.host, asking(numa(1)), {})
    here.take(running, VM)
    here.read(written=True)
    assert here.cpus() == 3


def test_a_row_that_is_not_written_again_has_it_once_its_nova_compute_had_time_to() -> None:
    here = Here(numa_topology=topology(4))
    here.held.claimed(VM, here.host, asking(numa(1)), {})
    here.read(VM, numa_topology=topology(4, {0}))
    here.clock.now_s += WRITTEN_S - 10
    here.read(VM)
    assert here.cpus() == 2
    here.read(VM)
    assert here.cpus() == 3


def test_what_is_never_seen_ends_with_a_warning() -> None:
    here = Here(numa_topology=topology(4))
    here.held.claimed(VM, here.host, asking(numa(1)), {})
    here.held.claimed(OTHER, here.host, PLAIN, {})
    here.clock.now_s += IN_FLIGHT_S - 10
    with capture_logs() as logs:
        here.read()
        assert (here.cpus(), logs) == (3, [])
        here.read()
    assert (here.cpus(), here.held.count(here.host)) == (4, 0)
    assert [(log["event"], log["hosts"], log["count"]) for log in logs] == [("nova.in_flight_expired", ["n1"], 1)]


def test_instances_without_devices_count_until_the_row_was_written_after_a_read() -> None:
    """Their number may be wrong for a while, so they need no sight."""
    here = Here()
    here.held.claimed("no row", uuid_of(3), PLAIN, {})
    running = here.facts.begin(CELL1)
    here.held.claimed(VM, here.host, PLAIN, {})
    assert (here.held.count(here.host), here.held.count(uuid_of(3)), here.held.watched(CELL1)) == (1, 0, [])
    here.take(running, written=True)
    counts = [here.held.count(here.host)]
    for written in (True, False, True):
        here.read(written=written)
        counts.append(here.held.count(here.host))
    assert counts == [1, 1, 1, 0]


def test_the_number_of_those_without_devices_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "MAX_PLAIN", 2)
    here = Here(pci_pools=pools(3))
    for at in range(4):
        here.held.claimed(f"vm{at}", here.host, PLAIN, {})
    here.held.claimed(VM, here.host, asking(DEVICE), {})
    assert (here.held.count(here.host), here.devices()) == (3, 2)


def test_what_fits_the_row_no_more_keeps_others_away() -> None:
    """Another scheduler's instance has it, or it is in the row already: what is left may be another's."""
    here = Here(numa_topology=topology(4), pci_pools=pools(2))
    here.held.claimed(VM, here.host, asking(numa(3), DEVICE), {})
    assert (here.cpus(), here.devices()) == (1, 1)
    here.read(numa_topology=topology(4, {0, 1}))
    assert (here.cpus(), here.devices()) == (None, None)
    here.read(numa_topology=topology(4), pci_pools=pools(0))
    assert (here.cpus(), here.devices()) == (None, None)
    here.read(pci_pools=pools(2))
    assert (here.cpus(), here.devices()) == (1, 1)


def test_devices_are_taken_beside_the_numa_node_that_is_chosen_and_of_the_provider_that_is_claimed() -> None:
    here = Here(numa_topology=topology(2, {0, 1}, nodes=2), pci_pools=pools(1, nodes=2))
    near = replace(DEVICE, numa_policy="required")
    here.held.claimed(VM, here.host, asking(numa(1), near), {})
    found = here.held.devices_of(here.host)
    assert found is not None and [one.numa_node for one in found.pools] == [0]
    here = Here(pci_pools=pools(1, nodes=2))
    here.held.claimed(VM, here.host, asking(DEVICE), {"r-0": ["rp1"]})
    found = here.held.devices_of(here.host)
    assert found is not None and [one.numa_node for one in found.pools] == [0]


def test_of_rows_that_are_old_missing_or_broken_nothing_is_known() -> None:
    here = Here(numa_topology="{", pci_pools="{")
    with capture_logs() as logs:
        found = here.held.devices_of(here.host)
        here.read(stats=HostStats(num_instances=1))
        assert here.held.devices_of(here.host) == found
    assert found is not None and not found.knows_topology and not found.knows_pools
    assert [log["event"] for log in logs] == ["nova.numa_topology_unreadable", "nova.pci_pools_unreadable"]
    here.read(numa_topology=None, pci_pools=None)
    found = here.held.devices_of(here.host)
    assert found is not None and not found.knows_topology and not found.knows_pools
    assert here.held.devices_of(uuid_of(3)) is None
    here.facts.max_age_s = 1.0
    here.clock.now_s += 2
    assert here.held.devices_of(here.host) is None


# --- What placement says of their claims.


def test_a_claim_that_is_released_counts_no_more() -> None:
    here = Here(numa_topology=topology(4))
    here.held.claimed(VM, here.host, asking(numa(1)), {})
    here.held.claimed(OTHER, here.host, PLAIN, {})
    assert here.held.doubtful(CELL1, here.clock.now_s) == []
    here.clock.now_s += ASKED_AFTER_S
    assert (here.held.doubtful(CELL1, here.clock.now_s), here.held.doubtful(CELL2, here.clock.now_s)) == ([VM], [])
    for answer in ({}, {VM: (here.host,)}, {OTHER: ()}):
        here.held.held(CELL1, answer, here.clock.now_s)
        assert here.cpus() == 3
    here.held.held(CELL1, {VM: ()}, 0.0)
    assert here.cpus() == 3, "it was claimed after the question"
    here.held.held(CELL1, {VM: ()}, here.clock.now_s)
    assert (here.cpus(), here.held.count(here.host)) == (4, 0)


def test_an_instance_that_nova_has_sent_to_an_alternate_counts_there() -> None:
    here = Here(numa_topology=topology(4))
    here.rows[2] = replace(here.rows[2], numa_topology=topology(4))
    here.read()
    here.held.claimed(VM, here.host, asking(numa(3)), {})
    here.read(VM)
    here.clock.now_s += ASKED_AFTER_S
    here.held.held(CELL1, {VM: (here.second, "not a host")}, here.clock.now_s)
    assert (here.cpus(), here.cpus(2)) == (4, 1)
    here.read(VM, on="h1", written=True)
    assert here.cpus(2) == 1


def test_where_another_scheduler_claims_a_choice_counts_in_its_round_alone() -> None:
    here = Here(numa_topology=topology(4))
    here.held = InstancesInFlight(here.facts, here.clock, claims=False)
    here.held.assume(VM, here.host, asking(numa(1)), {})
    assert here.cpus() == 3
    here.held.claimed(VM, here.host, asking(numa(1)), {})
    assert here.cpus() == 4


# --- A nova-compute beside it, in any order: what both count is never too little.


class BesideANovaCompute(RuleBasedStateMachine):
    """The model: a host of 6 CPUs. A nova-compute names itself as the host of an instance, and writes its row later.
    What it will have given away in the end is never more than what counts here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.here = Here(numa_topology=topology(6))
        self.sizes: dict[str, int] = {}  # of the instances that are claimed
        self.on_host: list[str] = []  # in the database
        self.in_row: list[str] = []
        self.row = topology(6)
        self.number = 0

    @initialize()
    def begin(self) -> None:
        self.stats = 0

    @rule(cpus=st.integers(1, 3))
    def claim(self, cpus: int) -> None:
        free = self.here.cpus()
        if free is None or free < cpus:
            return
        self.number += 1
        name = f"vm{self.number}"
        self.sizes[name] = cpus
        self.here.held.assume(name, self.here.host, asking(numa(cpus)), {})
        self.here.held.claimed(name, self.here.host, asking(numa(cpus)), {})

    @rule(of=st.randoms(use_true_random=False))
    def names_itself(self, of: Any) -> None:
        waiting = [one for one in self.sizes if one not in self.on_host]
        if waiting and self.on_host == self.in_row:  # one at a time, as under its lock
            self.on_host.append(of.choice(waiting))

    @rule()
    def writes_its_row(self) -> None:
        self.in_row = list(self.on_host)
        pinned = sum(self.sizes[one] for one in self.in_row)
        self.row = topology(6, set(range(pinned)))

    @rule()
    def writes_other_numbers(self) -> None:
        """As of instances that have come up since; not while it has named itself and not written yet."""
        if self.on_host == self.in_row:
            self.stats += 1

    @rule()
    def read(self) -> None:
        row = {"numa_topology": self.row, "stats": HostStats(num_instances=self.stats)}
        self.here.read(*self.on_host, **row)

    @rule(of=st.randoms(use_true_random=False))
    def deleted(self, of: Any) -> None:
        if self.in_row and self.on_host == self.in_row:
            gone = of.choice(self.in_row)
            self.on_host.remove(gone)
            self.here.held.held(CELL1, {gone: ()}, self.here.clock.now_s + 1_000)
            del self.sizes[gone]
            self.writes_its_row()

    @invariant()
    def is_never_used_twice(self) -> None:
        assert sum(self.sizes.values()) <= 6, self.sizes


BesideANovaCompute.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBesideANovaCompute = BesideANovaCompute.TestCase


def test_a_topology_of_these_tests_is_one_of_nova_s() -> None:
    assert msgspec.json.decode(topology(1))["nova_object.name"] == "NUMATopology"
