"""PCI pools of a host: what is read of Nova's row, and which requests they can take. Nova's own answers to random
requests are compared with ours in `tests/nova/oracles`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.contracts.host_metrics import HostMetrics, HostReading
from nova_scheduler.filters.pci import ENOUGH, IN_FLIGHT, PCI_DEVICES, UNKNOWN, PciPassthroughFilter, PCIWeigher
from nova_scheduler.fit import pci
from nova_scheduler.fit.host_devices import HostDevices
from nova_scheduler.fit.numa import InstanceCell
from nova_scheduler.fit.pci import (
    Consumed,
    PciPool,
    PciRefusal,
    PciRequest,
    affinity_of,
    consume,
    ordered,
    release,
    view_of,
)
from nova_scheduler.fit.pci_pools import MAX_BYTES, MAX_POOLS, PciPoolsUnreadable, parse_pools
from scheduler_worker.selection.explain import PHRASES
from scheduler_worker.selection.plugin import applies_to
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts

A, B, C = (f"{letter * 8}-0000-4000-8000-000000000000" for letter in "abc")
ID = "11111111-0000-4000-8000-000000000000"


def versioned(name: str, version: str = "1.1", /, **data: Any) -> dict[str, Any]:
    return {
        "nova_object.name": name,
        "nova_object.namespace": "nova",
        "nova_object.version": version,
        "nova_object.data": data,
    }


def row(*pools: Mapping[str, Any]) -> str:
    return json.dumps(versioned("PciDevicePoolList", objects=[versioned("PciDevicePool", **pool) for pool in pools]))


def fields(**changed: Any) -> dict[str, Any]:
    return {"vendor_id": "8086", "product_id": "1515", "numa_node": 0, "count": 2, "tags": {}, **changed}


def pool(count: int = 1, numa_node: int | None = 0, dev_type: str = "type-VF", **tags: str | None) -> PciPool:
    """A kind of device, as every one here, unless the tags say otherwise."""
    return PciPool.of(count, "8086", "1515", numa_node, {"dev_type": dev_type, **tags})


def ask(count: int = 1, *more: Mapping[str, str | None], **changed: Any) -> PciRequest:
    """By a flavor's alias; `spec` names a part of what is wanted."""
    spec = ({"vendor_id": "8086", **changed.pop("spec", {})}, *map(dict, more))
    return PciRequest(**{"count": count, "spec": spec, "alias_name": "nic", "request_id": ID, **changed})


def counts(pools: Sequence[PciPool]) -> list[int]:
    return [one.count for one in pools]


# --- The column `pci_stats`.


def test_a_row_is_read_in_novas_order() -> None:
    tagged = fields(
        tags={"dev_type": "type-VF", "physical_network": "PhysNet1", "rp_uuid": A, "remote_managed": "True"}
    )
    first, second = parse_pools(row(tagged, fields(count=3, numa_node=None)))
    assert (first.count, first.numa_node, first.provider, first.dev_type) == (3, None, None, None)
    assert (second.count, second.numa_node, second.provider, second.dev_type) == (2, 0, A, "type-VF")
    assert second.is_remote_managed
    assert not first.is_remote_managed
    assert second.properties["physical_network"] == "physnet1"


@pytest.mark.parametrize("stored", [None, "", "[]", "null", row()])
def test_a_host_without_devices_has_no_pools(stored: str | None) -> None:
    assert parse_pools(stored) == ()


UNREADABLE = {
    "no JSON": "{",
    "no object": "[1]",
    "an object of another class": json.dumps(versioned("PciDevicePool", **fields())),
    "another major version": json.dumps(versioned("PciDevicePoolList", "2.0", objects=[])),
    "no list": json.dumps(versioned("PciDevicePoolList", objects={})),
    "a pool that is none": json.dumps(versioned("PciDevicePoolList", objects=[fields()])),
    "fewer than no devices": row(fields(count=-1)),
    "more devices than there are": row(fields(count=2**31)),
    "a number of devices that is a text": row(fields(count="2")),
    "a part of a NUMA cell": row(fields(numa_node=0.5)),
    "a tag that is a number": row(fields(tags={"x": 1})),
    "a tag in place of a field": row(fields(tags={"vendor_id": "10de"})),
    "too many tags": row(fields(tags={str(number): "" for number in range(pci.MAX_TAGS + 1)})),
    "too many pools": row(*[fields()] * (MAX_POOLS + 1)),
    "too long": " " * (MAX_BYTES + 1),
    "too deep": "[" * 100_000,
    "half a surrogate pair": b'{"\xed\xa0\x80": 1}',
}


@pytest.mark.parametrize("stored", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_row_that_is_none_of_novas_is_refused(stored: str | bytes) -> None:
    with pytest.raises(PciPoolsUnreadable) as caught:
        parse_pools(stored)
    assert caught.value.code == "nova.pci_pools_unreadable"


@given(st.text() | st.binary() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_a_hostile_row_is_refused_or_has_no_pools(stored: str | bytes) -> None:
    with contextlib.suppress(PciPoolsUnreadable):
        assert parse_pools(stored) == ()


# --- Which pools do: (pools, requests, allocation candidate, NUMA cells of the instance) -> what is left, or why not.

SOCKETS: Mapping[int, int | None] = {0: 0, 1: 0, 2: 1}
VF, PF = {"dev_type": "type-VF"}, {"dev_type": "type-PF"}
CASES: dict[str, tuple[Sequence[PciPool], Sequence[PciRequest], Mapping[str, Sequence[str]], Sequence[int], Any]] = {
    "nothing is asked": ([pool()], [], {}, [], [1]),
    "no devices": ([], [ask()], {}, [], pci.NO_MATCH),
    "nothing is named": ([pool()], [ask(spec={"vendor_id": "8086"}), PciRequest()], {}, [], pci.NO_MATCH),
    "one of two": ([pool(2)], [ask()], {}, [], [1]),
    "an empty pool is gone": ([pool(1), pool(2, numa_node=1)], [ask(2)], {}, [], [1]),
    "several pools together": ([pool(1), pool(2, numa_node=1)], [ask(3)], {}, [], []),
    "none of an empty pool": ([pool(0), pool(1)], [ask(1)], {}, [], []),
    "none are asked of a pool with some": ([pool(1)], [ask(0)], {}, [], [1]),
    "too few": ([pool(1), pool(1)], [ask(3)], {}, [], pci.NO_MATCH),
    "two requests in turn": ([pool(3)], [ask(2), ask(1)], {}, [], []),
    "two requests for the same device": ([pool(2)], [ask(2), ask(1)], {}, [], pci.NO_MATCH),
    # by spec
    "another vendor": ([pool()], [ask(spec={"vendor_id": "10de"})], {}, [], pci.NO_MATCH),
    "in any case": ([pool(physical_network="Net1")], [ask(spec={"physical_network": "nET1"})], {}, [], []),
    "a tag that the pool has not": ([pool()], [ask(spec={"physical_network": "n"})], {}, [], pci.NO_MATCH),
    "a tag that is null is none": ([pool()], [ask(spec={"physical_network": None})], {}, [], []),
    "either spec": ([pool()], [ask(1, {"product_id": "1515"}, spec={"product_id": "1"})], {}, [], []),
    "what placement has compared": ([pool()], [ask(spec={"traits": "GOLD", "resource_class": "GPU"})], {}, [], []),
    "a cell is no text": ([pool()], [ask(spec={"numa_node": "0"})], {}, [], pci.NO_MATCH),
    # by kind
    "a physical function is not had unnamed": ([pool(dev_type="type-PF")], [ask()], {}, [], pci.ONLY_PARENTS),
    "a physical function by name": ([pool(dev_type="type-PF")], [ask(spec=PF)], {}, [], []),
    "a spec of two names it": ([pool(dev_type="type-PF")], [ask(1, PF)], {}, [], []),
    "vdpa is not had unnamed": ([pool(dev_type="vdpa")], [ask()], {}, [], pci.ONLY_VDPA),
    "vdpa by name": ([pool(dev_type="vdpa")], [ask(spec={"dev_type": "vdpa"})], {}, [], []),
    "remote-managed is not had unnamed": ([pool(remote_managed="True")], [ask()], {}, [], pci.ONLY_REMOTE),
    "remote-managed by name": ([pool(remote_managed="true")], [ask(spec={"remote_managed": "TRUE"})], {}, [], []),
    "live-migratable": ([pool(live_migratable="true")], [ask(spec={"live_migratable": "true"})], {}, [], []),
    "live-migratable by another word": (
        [pool(live_migratable="True")], [ask(spec={"live_migratable": "true"})], {}, [], pci.NO_MATCH,
    ),
    "not live-migratable": (
        [pool(live_migratable="no")], [ask(spec={"live_migratable": "true"})], {}, [], pci.NO_MATCH,
    ),
    # by NUMA cell: 0 and 1 are of one socket
    "legacy takes the cell's own": ([pool(1, 1), pool(1, 0)], [ask()], {}, [0], [1]),
    "legacy takes one of no cell": ([pool(1, 1), pool(1, None)], [ask()], {}, [0], [1]),
    "legacy takes none of another cell": ([pool(1, 1)], [ask(numa_policy="legacy")], {}, [0], pci.NUMA),
    "required takes none of no cell": ([pool(1, None)], [ask(numa_policy="required")], {}, [0], pci.NUMA),
    "required of either cell": ([pool(1, 0), pool(1, 1)], [ask(2, numa_policy="required")], {}, [0, 1], []),
    "preferred takes the nearest first": (
        [pool(1, 2), pool(2, None), pool(1, 0)], [ask(3, numa_policy="preferred")], {}, [0], [1],
    ),
    "preferred takes any": ([pool(1, 2), pool(1, None)], [ask(2, numa_policy="preferred")], {}, [0], []),
    "socket takes a neighbour's": ([pool(1, 1)], [ask(numa_policy="socket")], {}, [0], []),
    "socket takes the cell's own first": ([pool(1, 1), pool(1, 0)], [ask(numa_policy="socket")], {}, [0], [1]),
    "socket takes none of another": ([pool(1, 2)], [ask(numa_policy="socket")], {}, [0], pci.NUMA),
    "socket takes none of no cell": ([pool(1, None)], [ask(numa_policy="socket")], {}, [0], pci.NUMA),
    "no cells, no affinity": ([pool(1, 1)], [ask(numa_policy="required")], {}, [], []),
    # by what placement has allocated
    "of the allocated provider": (
        [pool(1, rp_uuid=A), pool(2, rp_uuid=B)], [ask()], {f"{ID}-0": [B]}, [], [1, 1],
    ),
    "of two providers": (
        [pool(1, rp_uuid=A), pool(2, rp_uuid=B)], [ask(2)], {f"{ID}-0": [B], f"{ID}-1": [A]}, [], [1],
    ),
    "two of one provider": ([pool(2, rp_uuid=A)], [ask(2)], {f"{ID}-0": [A], f"{ID}-1": [A]}, [], []),
    "a provider with too few": (
        [pool(1, rp_uuid=A)], [ask(1)], {f"{ID}-0": [A], f"{ID}-1": [A]}, [], pci.OTHER_PROVIDER,
    ),
    "a provider that is not here": ([pool(1, rp_uuid=A)], [ask()], {f"{ID}-0": [C]}, [], pci.OTHER_PROVIDER),
    "devices that are not in placement": ([pool(1)], [ask()], {f"{ID}-0": [A]}, [], pci.OTHER_PROVIDER),
    "another request's group": ([pool(1)], [ask()], {f"{A}-0": [A], "": [B]}, [], []),
    "a group without a provider": ([pool(1)], [ask()], {f"{ID}-0": []}, [], []),
    "a port's devices are not in placement": ([pool(1)], [ask(alias_name=None)], {f"{ID}-0": [A]}, [], []),
    "two pools of one provider": (
        [pool(1, rp_uuid=A), pool(2, 1, rp_uuid=A)], [ask()], {f"{ID}-0": [A]}, [], pci.SPLIT_PROVIDER,
    ),
    "the request tells": (
        [pool(1, rp_uuid=A), pool(1, rp_uuid=B)], [ask(spec={"rp_uuids": B})], {}, [], [1],
    ),
    "as many as it tells": (
        [pool(1, rp_uuid=A), pool(3, rp_uuid=B)], [ask(3, spec={"rp_uuids": f"{A},{B},{B}"})], {}, [], [1],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("pools", "requests", "mapping", "cells", "expected"), CASES.values(), ids=CASES.keys())
def test_what_is_left_or_why_not(
    pools: Sequence[PciPool],
    requests: Sequence[PciRequest],
    mapping: Mapping[str, Sequence[str]],
    cells: Sequence[int],
    expected: list[int] | str,
) -> None:
    found = consume(pools, requests, mapping, affinity_of(cells, SOCKETS))
    if isinstance(expected, str):
        assert found == PciRefusal(expected)
    else:
        assert isinstance(found, Consumed)
        assert counts(found.pools) == expected
        assert sum(counts(found.taken)) == sum(counts(pools)) - sum(expected)


def test_a_host_that_does_not_tell_a_socket_has_no_affinity_to_sockets() -> None:
    affinity = affinity_of([0], {0: 0, 1: 0, 2: None})
    assert consume([pool(1, 1)], [ask(numa_policy="socket")], None, affinity) == PciRefusal(pci.NUMA)
    assert isinstance(consume([pool(1, 0)], [ask(numa_policy="socket")], None, affinity), Consumed)


POOLS = st.lists(
    st.builds(pool, st.integers(1, 4), st.sampled_from([0, 1, None]), physical_network=st.sampled_from(["a", "b"])),
    max_size=5,
    unique_by=lambda one: (one.numa_node, one.properties["physical_network"]),
).map(ordered)


@given(POOLS, st.lists(st.builds(ask, st.integers(0, 4)), max_size=3))
def test_what_is_taken_can_be_given_back(pools: tuple[PciPool, ...], requests: list[PciRequest]) -> None:
    found = consume(pools, requests)
    if isinstance(found, Consumed):
        after = release(found.pools, found.taken)
        assert sorted(map(repr, after)) == sorted(map(repr, pools))


def cell(number: int) -> InstanceCell:
    return InstanceCell(id=number, cpuset=frozenset(), pcpuset=frozenset(), memory=0)


def test_a_fit_of_numa_cells_sees_devices_by_cell_and_whether_they_are_near() -> None:
    pools = (pool(2, 0), pool(3, 0), pool(4, None))
    view = view_of(pools, [ask(5, numa_policy="required")], None, SOCKETS)
    assert (view.free_by_node[0], view.free_by_node[None], view.free_by_node.get(1, 0)) == (5, 4, 0)
    assert view.fits is not None
    assert [view.fits([cell(number)]) for number in (0, 1)] == [True, False]
    assert view_of(pools, [], None, SOCKETS).fits is None


# --- Hosts: which pass, how they weigh.


def known(*pools: PciPool, **changed: Any) -> HostDevices:
    return HostDevices(pools=pools, cpu_allocation_ratio=1.0, ram_allocation_ratio=1.0, **changed)


@pytest.fixture
def hosts() -> Hosts:
    return Hosts([PLENTY] * 7)


def test_hosts_pass_by_their_devices(hosts: Hosts) -> None:
    told = known(pool(2)), known(pool(1)), known(pool(dev_type="vdpa"), pool(1)), known(), known(knows_pools=False)
    free = dict(zip(hosts.uuids, (*told, known(pool(2), is_overdrawn=True)), strict=False))
    judged = PciPassthroughFilter(free.get)
    spec = replace(hosts.spec(), devices=(ask(1), ask(1)))
    result = judged.filter(hosts.view(), spec)
    assert result.passed.tolist() == [True, *[False] * 6]
    assert result.rejected == {pci.NO_MATCH: 2, pci.ONLY_VDPA: 1, UNKNOWN: 2, IN_FLIGHT: 1}
    assert [applies_to(judged, one) for one in (spec, hosts.spec())] == [True, False]


def test_candidates_of_a_host_do_by_their_providers(hosts: Hosts) -> None:
    first = hosts.uuids[0]
    judged = PciPassthroughFilter({first: known(pool(1, rp_uuid=A), pool(1, 0, "type-PF", rp_uuid=B))}.get)
    spec = replace(hosts.spec(), devices=(ask(),))
    candidates = [{f"{ID}-0": [one]} for one in (A, B, C)]
    alone = (hosts.view().subset(np.array([at])) for at in (0, 1))
    assert [judged.suiting(one, spec, candidates) for one in alone] == [[0], []]


def test_hosts_weigh_by_their_free_devices(hosts: Hosts) -> None:
    readings = tuple(
        HostReading(host_uuid=uuid, at=0.0, values={PCI_DEVICES: free})
        for uuid, free in zip(hosts.uuids, (5, ENOUGH, 0, 5_000), strict=False)
    )
    hosts.selector.metrics.apply(HostMetrics(source="nova", readings=readings), None, now=0.0, now_s=0.0)
    weights = PCIWeigher().weigh(hosts.view(), hosts.spec()).tolist()
    assert weights == [ENOUGH - 5, 1, ENOUGH, 1, *[ENOUGH] * 3]


def test_each_reason_is_said_in_words() -> None:
    reasons = {UNKNOWN, IN_FLIGHT, pci.SPLIT_PROVIDER, *(reason for reason, _ in pci._RULES)}
    assert reasons <= PHRASES.keys()
