"""`select_destinations` of requests for NUMA nodes and PCI devices, against the real placer and a real replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.contracts.host_metrics import NUM_INSTANCES
from nova_scheduler.cloud.api_config import NovaApiConfig
from nova_scheduler.cloud.host_facts import HostHardware
from nova_scheduler.config import NovaConfig, PrefilterSettings
from nova_scheduler.fit.numa_objects import primitive_of
from nova_scheduler.request.request_spec import NotDecided
from nova_scheduler.wire.envelope import RemoteFault
from nova_scheduler.wire.versioned import Primitive, versioned
from placement_worker.domain.allocations import Replace
from placement_worker.domain.claim_ledger import ConsumerWrite
from scheduler_worker.selection import ranking
from tests.unit.nova_scheduler.test_in_flight import KIND, numa, pools, topology
from tests.unit.nova_scheduler.world import CELLS, FLAVOR, Cloud, hosts_of

VMS = [f"c00000{n:02d}-0000-4000-8000-000000000000" for n in range(40)]
NOVA = NovaConfig(
    enabled_filters=("ComputeFilter", "NUMATopologyFilter", "PciPassthroughFilter"),
    api=NovaApiConfig(cell_databases={CELLS[0]: "postgresql+asyncpg://h/d"}),
)
PLENTY = {"VCPU": 16, "PCPU": 16, "MEMORY_MB": 65536, "DISK_GB": 1000}
NEAR = {"numa_policy": "required"}


def row(**known: Any) -> HostHardware:
    return HostHardware(host="h", nodename="n", cpu_allocation_ratio=2.0, **known)


async def cloud(*rows: HostHardware, nova: NovaConfig = NOVA, **fields: Any) -> Cloud:
    return await Cloud([PLENTY] * len(rows), nova=nova, rows=rows, **fields).open()


def pinned(cpus: int) -> dict[str, Any]:
    """The parts of a RequestSpec of an instance with so many dedicated CPUs, as Nova makes them of its flavor."""
    wanted = numa(cpus).topology
    assert wanted is not None
    flavor = {**FLAVOR, "vcpus": cpus, "extra_specs": {"hw:cpu_policy": "dedicated"}}
    return {"numa_topology": primitive_of(wanted), "flavor": versioned("Flavor", "1.2", flavor)}


def device(count: int = 1, **changed: Any) -> dict[str, Any]:
    """The same of one with PCI devices by its flavor's alias."""
    fields = {"count": count, "spec": [KIND], "alias_name": "nic", "request_id": VMS[39], "numa_policy": None}
    request = versioned("InstancePCIRequest", "1.4", {**fields, **changed})
    return {"pci_requests": versioned("InstancePCIRequests", "1.1", {"requests": [request]})}


def data_of(selection: Primitive) -> dict[str, Any]:
    data: dict[str, Any] = selection["nova_object.data"]
    return data


async def refused(here: Cloud, *instances: str, **spec: Any) -> tuple[str, Mapping[str, Mapping[str, int]]]:
    """The sentence of a call that finds no host, and its funnel: {step: {reason: hosts}}."""
    with capture_logs() as logs, pytest.raises(RemoteFault) as caught:
        await here.select(*instances, run="refused", **spec)
    assert caught.value.class_name == "NoValidHost"
    (line,) = (one for one in logs if one["event"] == "nova.no_valid_host")
    return caught.value.message, {one["step"]: one["rejected"] for one in line["funnel"]}


async def test_an_instance_with_pinned_cpus_goes_where_they_are_free_and_its_limits_go_along() -> None:
    full, broken = row(numa_topology=topology(4, {0, 1, 2})), row(numa_topology=None)
    here = await cloud(full, row(numa_topology=topology(4)), broken, row(), row(numa_topology=topology(2)))
    (selections,) = await here.select(VMS[0], **pinned(2))
    assert {host for host, *_ in hosts_of([selections])} <= {"h1", "h4"}
    assert set(hosts_of([selections])[0]) == {"h1", "h4"}, "the alternate fits, too"
    for one in selections:
        limits = data_of(data_of(one)["limits"])["numa_topology"]
        assert (limits["nova_object.name"], limits["nova_object.version"]) == ("NUMATopologyLimits", "1.1")
        assert data_of(limits) == {"cpu_allocation_ratio": 2.0, "ram_allocation_ratio": 1.0}
    message, funnel = await refused(here, VMS[1], **pinned(5))
    assert funnel["NUMATopologyFilter"] == {"numa.pcpus": 3, "numa.unknown": 1, "numa.no_topology": 1}
    assert "h1" not in message


async def test_a_request_without_numa_or_pci_has_no_limits_and_no_such_filter() -> None:
    here = await cloud(row(numa_topology=None))
    (((chosen, *_)),) = await here.select(VMS[0])
    assert data_of(data_of(chosen)["limits"])["numa_topology"] is None
    _, funnel = await refused(here, VMS[1], flavor=versioned("Flavor", "1.2", {**FLAVOR, "vcpus": 99}))
    assert not {"NUMATopologyFilter", "PciPassthroughFilter"} & funnel.keys()


async def test_instances_of_one_call_count_for_each_other() -> None:
    """They were chosen by one ranking, so each passed alone."""
    here = await cloud(row(numa_topology=topology(4)), row(numa_topology=topology(4)))
    answer = await here.select(*VMS[:4], **pinned(2))
    assert sorted(hosts[0] for hosts in hosts_of(answer)) == ["h0", "h0", "h1", "h1"]
    _, funnel = await refused(here, VMS[4], **pinned(1))
    assert funnel["NUMATopologyFilter"] == {"numa.pcpus": 2}


async def test_several_that_have_no_room_together_get_none_and_leave_nothing_behind() -> None:
    here = await cloud(row(numa_topology=topology(4)))
    await refused(here, *VMS[:3], **pinned(2))
    assert here.in_flight.count(here.uuids[0]) == 0
    assert await here.select(*VMS[3:5], run="another", **pinned(2))


async def test_calls_one_after_the_other_count_until_rows_do() -> None:
    here = await cloud(row(pci_pools=pools(2)), row(pci_pools=pools(1)))
    answers = [await here.select(one, run=one, **device()) for one in VMS[:3]]
    assert sorted(hosts_of(answer)[0][0] for answer in answers) == ["h0", "h0", "h1"]
    message, funnel = await refused(here, VMS[3], **device())
    assert funnel["PciPassthroughFilter"] == {"pci.no_match": 2}
    assert "PCI" in message


async def test_a_host_where_a_claim_is_lost_gives_its_devices_back() -> None:
    here = await cloud(row(pci_pools=pools(1)), row(pci_pools=pools(1)))
    # The replica does not know of it yet.
    write = ConsumerWrite(VMS[9], {here.uuids[0]: PLENTY}, "p", "u", "INSTANCE", None)
    assert await here.claims.placement.write_allocations([Replace((write,))]) == [None]
    weighed = replace(here.selector.config.settings, shuffle_best_same_weighed_hosts=False)
    here.selector.config.settings = weighed  # the first host is tried first
    answer = await here.select(VMS[0], **device())
    assert hosts_of(answer)[0][0] == "h1"
    assert [here.in_flight.count(uuid) for uuid in here.uuids] == [0, 1]


async def test_devices_of_ports_are_decided_and_those_near_to_the_cpus() -> None:
    near = row(numa_topology=topology(2, nodes=2), pci_pools=pools(1, nodes=2))
    apart = row(numa_topology=topology(2, {0, 1}, nodes=2), pci_pools=pools(1))
    here = await cloud(near, apart)
    asked = {**pinned(2), **device(alias_name=None, requester_id=VMS[38], **NEAR)}
    answer = await here.select(VMS[0], **asked)
    assert hosts_of(answer) == [["h0"]]
    answer = await here.select(VMS[1], run="two", **asked)
    assert hosts_of(answer) == [["h0"]], "the other NUMA node and its device"
    _, funnel = await refused(here, VMS[2], **asked)
    assert funnel["NUMATopologyFilter"] == {"numa.pcpus": 1, "numa.pci": 1}


GROUP = {"resources": {"CUSTOM_NIC": 1}, "requester_id": f"{VMS[39]}-0"}


async def test_of_devices_in_placement_the_provider_that_suits_is_claimed() -> None:
    """Of two with free inventory only the second is beside the NUMA node with free CPUs."""
    nova = replace(NOVA, prefilters=PrefilterSettings(pci_in_placement=True))
    here = Cloud([PLENTY] * 2, nova=nova, rows=[row()] * 2, children=[{"CUSTOM_NIC": 1}] * 2)
    here.rows = [_near(here, at, first) for at, first in ((0, {0, 1}), (1, {0, 1, 2, 3}))]
    here.read()
    await here.open()
    asked = {**pinned(1), **device(**NEAR), "requested_resources": [versioned("RequestGroup", "1.3", GROUP)]}
    (((chosen, *others)),) = await here.select(VMS[0], **asked)
    assert data_of(chosen)["service_host"] == "h0" and not others
    assert here.child(0, 1) in data_of(chosen)["allocation_request"]
    assert here.child(0, 0) not in data_of(chosen)["allocation_request"]
    _, funnel = await refused(here, VMS[1], **asked)
    assert sum(funnel["NUMATopologyFilter"].values()) == 2


def _near(here: Cloud, host: int, used: Sequence[int] | set[int]) -> HostHardware:
    """A host with a device of each child provider beside a NUMA node of its own."""
    told = pools(1, nodes=2)
    for at in range(2):
        told = told.replace(f"rp{at}", here.child(host, at))
    return row(numa_topology=topology(2, used, nodes=2), pci_pools=told)


async def test_without_the_cells_databases_such_requests_are_left_to_the_fallback() -> None:
    here = await Cloud([PLENTY], nova=NovaConfig(enabled_filters=NOVA.enabled_filters)).open()
    for asked, why in ((pinned(1), "numa_topology"), (device(), "pci"), (device(alias_name=None), "pci_ports")):
        with pytest.raises(NotDecided) as caught:
            await here.select(VMS[0], **asked)
        assert caught.value.reason == why


async def test_while_a_cell_is_not_read_such_requests_go_to_a_fallback_and_others_do_not() -> None:
    here = await cloud(row(numa_topology=topology(4)), nova=replace(NOVA, fallback_url="rabbit://u@h/stock"))
    here.outdated = (CELLS[0],)
    with pytest.raises(NotDecided) as caught:
        await here.select(VMS[0], **pinned(1))
    assert caught.value.reason == "host_facts"
    assert await here.select(VMS[1])


async def test_a_topology_that_cannot_be_read_is_left_to_the_fallback() -> None:
    here = await cloud(row(numa_topology=topology(4)))
    with pytest.raises(NotDecided) as caught:
        await here.select(VMS[0], **{**pinned(1), "numa_topology": {"nova_object.name": "x"}})
    assert caught.value.reason == "numa_topology"


async def test_a_forced_host_is_not_judged_and_what_does_not_fit_keeps_others_away() -> None:
    here = await cloud(row(numa_topology=topology(2)), row(numa_topology=topology(2)))
    ((chosen, *_),) = await here.select(VMS[0], force_hosts=["h0"], **pinned(3))
    assert data_of(chosen)["service_host"] == "h0"
    assert data_of(data_of(chosen)["limits"])["numa_topology"] is None, "as where Nova runs no filter"
    _, funnel = await refused(here, VMS[1], **pinned(3))
    assert funnel["NUMATopologyFilter"] == {"numa.in_flight": 1, "numa.pcpus": 1}


async def test_what_is_claimed_by_an_earlier_delivery_is_answered_though_its_row_is_full_of_it() -> None:
    here = await cloud(row(numa_topology=topology(2)))
    first = await here.select(VMS[0], **pinned(2))
    assert hosts_of(await here.select(VMS[0], **pinned(2))) == hosts_of(first), "delivered again"
    assert here.in_flight.count(here.uuids[0]) == 1


async def test_instances_of_one_call_count_for_each_other_s_bounds_of_numbers() -> None:
    nova = replace(NOVA, enabled_filters=("NumInstancesFilter",))
    here = await cloud(row(), row(), nova=nova, settings={"max_instances_per_host": 2})
    for uuid in here.uuids:  # as the poll publishes it
        index = np.array([here.table.index_of(uuid)])
        here.selector.metrics.put_column(
            NUM_INSTANCES, index, np.zeros(1), at=0.0, source="nova", expires_s=float("inf")
        )
    here.in_flight.on_change = lambda uuid, instances, _: here.selector.metrics.increment(
        NUM_INSTANCES, here.table.index_of(uuid) or 0, instances
    )
    answer = await here.select(*VMS[:4])
    assert sorted(hosts[0] for hosts in hosts_of(answer)) == ["h0", "h0", "h1", "h1"]
    _, funnel = await refused(here, VMS[4])
    assert funnel["NumInstancesFilter"] == {"host.num_instances": 2}


async def test_the_hosts_that_are_drawn_in_vain_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has as many options as providers, and each option a fit."""
    monkeypatch.setattr(ranking, "MAX_UNSUITED", 1)
    here = await cloud(*[row(numa_topology=topology(2))] * 3)
    answer = await here.select(*VMS[:2], **pinned(2))
    assert len({hosts[0] for hosts in hosts_of(answer)}) == 2, "of each choice anew"
