"""Nova's side of `tests.nova.oracles.pci`: run by a Python that has Nova, speaking JSON lines on stdin and stdout.

nova_pci.py cases   answers each case by nova.pci.stats; at the end the branches of it that they reached, for
                         which the module `coverage` is needed (a folder that has it may be named by COVERAGE_IN)
nova_pci.py tests   runs Nova's own unit tests of pools and of the weigher, and asks for each decision of nova.pci.stats
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

# ruff: noqa: I001
from nova_side import HEARD, answer_cases, loaded, run_tests, say
from nova import exception, objects
from nova.pci import stats
from nova.pci import utils as pci_utils
from nova.scheduler.filters import pci_passthrough_filter
from nova.scheduler.weights import pci as pci_weigher

objects.register_all()

TESTS = ("nova.tests.unit.pci.test_stats", "nova.tests.unit.scheduler.weights.test_weights_pci")
# The methods that decide whether and of which pools; the others keep the devices of a nova-compute.
DECIDING = (
    "_filter_pools", "_filter_pools_for_spec", "_filter_pools_for_numa_cells", "_filter_pools_for_socket_affinity",
    "_filter_pools_for_unrequested_pfs", "_filter_pools_for_unrequested_vdpa_devices",
    "_filter_pools_for_unrequested_remote_managed_devices", "_filter_pools_based_on_placement_allocation",
    "_filter_pools_for_live_migratable_devices", "support_requests", "apply_requests", "_apply_request",
    "_get_rp_uuids_for_request", "_assert_one_pool_per_rp_uuid", "_decrease_pool_count",
)  # fmt: skip
MODULES = {stats.__file__: DECIDING, pci_utils.__file__: ("pci_device_prop_match",)}


def ask(line: dict[str, Any]) -> Any:
    say(line)
    return json.loads(HEARD.readline())


# --- cases


class HostState:
    """What PciPassthroughFilter and PCIWeigher read of a host."""

    def __init__(self, pci_stats: stats.PciDeviceStats, candidates: list[dict[str, Any]]) -> None:
        self.pci_stats, self.allocation_candidates = pci_stats, candidates
        self.aggregates: list[Any] = []


class Spec:
    def __init__(self, requests: list[Any]) -> None:
        self.pci_requests = objects.InstancePCIRequests(requests=requests)


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """What Nova makes of a host's pools and of instances that come one after the other."""
    cells = [objects.NUMACell(id=one, socket=socket) for one, socket in case["sockets"]]
    pool_list = objects.pci_device_pool.from_pci_stats(case["pools"])
    host = stats.PciDeviceStats(objects.NUMATopology(cells=cells), stats=pool_list)
    weigher = pci_weigher.PCIWeigher()
    steps = []
    for instance in case["instances"]:
        requests = objects.InstancePCIRequests.obj_from_primitive(instance["requests"]).requests
        own_cells = [objects.InstanceNUMACell(id=one) for one in instance["cells"]] or None
        candidates = [{"mappings": one, "number": number} for number, one in enumerate(instance["candidates"])]
        state = HostState(host, candidates)
        passes = pci_passthrough_filter.PciPassthroughFilter().host_passes(state, Spec(requests))
        fits = host.support_requests(requests, instance["mapping"], own_cells)
        step = {
            "fits": fits,
            "passes": passes,
            "candidates": [one["number"] for one in state.allocation_candidates],
            "weight": weigher._weigh_object(state, None),
        }
        if fits:
            host.apply_requests(requests, instance["mapping"], own_cells)
        step["pools"] = [dict(pool) for pool in host.pools]
        steps.append(step)
    return {"steps": steps}


def decides(name: str, names: Sequence[str]) -> bool:
    return name.rpartition(".")[2] in names or any(f"{one}." in name for one in names)


# --- Nova's own tests


def sent_pools(pools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = ("count", "devices")
    return [
        {
            "count": pool.get("count", 0),
            "numa_node": pool.get("numa_node"),
            "tags": {key: None if text is None else str(text) for key, text in pool.items() if key not in kept},
        }
        for pool in pools
    ]


def sent_request(request: Any) -> dict[str, Any]:
    """The fields that are set."""
    fields = ("count", "spec", "alias_name", "request_id", "requester_id", "numa_policy")
    return {name: getattr(request, name) for name in fields if name in request}


def sent(self: Any, pools: list[dict[str, Any]], requests: list[Any], numa_cells: Any) -> dict[str, Any]:
    known = "cells" in self.numa_topology
    host_cells = self.numa_topology.cells if known else []
    return {
        "pools": sent_pools(pools),
        "requests": [sent_request(one) for one in requests],
        "cells": [one.id if "id" in one else -1 for one in numa_cells or ()],
        "sockets": [(one.id if "id" in one else 0, one.socket) for one in host_cells],
    }


class Replaced:
    """PciDeviceStats' decisions, made by the other side."""

    def _filter_pools_for_spec(self, pools: Any, request: Any) -> Any:
        return [pools[row] for row in ask({"do": "matching", **sent(self, pools, [request], None)})]

    def _filter_pools_for_socket_affinity(self, pools: Any, numa_cells: Any) -> Any:
        return [pools[row] for row in ask({"do": "of_sockets", **sent(self, pools, [], numa_cells)})]

    def support_requests(self, requests: Any, provider_mapping: Any, numa_cells: Any = None) -> bool:
        asked = sent(self, self.pools, requests, numa_cells)
        return ask({"do": "consume", **asked, "mapping": provider_mapping}) is not None

    def apply_requests(self, requests: Any, provider_mapping: Any, numa_cells: Any = None) -> None:
        warn(self.pools)
        asked = sent(self, self.pools, requests, numa_cells)
        found = ask({"do": "consume", **asked, "mapping": provider_mapping})
        if found is None:
            raise exception.PciDeviceRequestFailed(requests=requests)
        self.pools = [dict(self.pools[row], count=count) for row, count in found["pools"]]

    def consume_requests(self, pci_requests: Any, numa_cells: Any = None) -> Any:
        devices: list[Any] = []
        for request in pci_requests:
            warn(self.pools)
            found = ask({"do": "consume", **sent(self, self.pools, [request], numa_cells), "mapping": None})
            if found is None:
                while devices:
                    self.add_device(devices.pop())
                raise exception.PciDeviceRequestFailed(requests=pci_requests)
            taken = [(self.pools[row], count) for row, count in found["taken"]]
            for pool, count in taken:
                pool["count"] -= count
                devices += self._allocate_devs(pool, count, request.request_id)
        return devices


def is_one_pool_each(pools: Any) -> bool:
    warn(pools)
    return not ask({"do": "is_split", "pools": sent_pools(pools)})


def warn(pools: Any) -> None:
    """What Nova logs of several pools of one provider."""
    if ITS_OWN is not None:
        ITS_OWN(pools)


def weight(self: Any, host_state: Any, request_spec: Any) -> int:
    del self, request_spec
    return ask({"do": "weight", "pools": sent_pools(host_state.pci_stats.pools if host_state.pci_stats else [])})


# Before 31.1 devices are taken of each of several pools that are of one provider.
ITS_OWN = getattr(stats.PciDeviceStats, "_assert_one_pool_per_rp_uuid", None)


def tests() -> None:
    suite = loaded(TESTS)
    for name, method in vars(Replaced).items():
        if callable(method):
            assert hasattr(stats.PciDeviceStats, name), name
            setattr(stats.PciDeviceStats, name, method)
    if ITS_OWN is not None:
        stats.PciDeviceStats._assert_one_pool_per_rp_uuid = staticmethod(is_one_pool_each)
    pci_weigher.PCIWeigher._weigh_object = weight
    # What no test has left to decide is not reached by any of them.
    for name in {*DECIDING} - {*vars(Replaced), "_assert_one_pool_per_rp_uuid", "_decrease_pool_count"}:
        if hasattr(stats.PciDeviceStats, name):
            delattr(stats.PciDeviceStats, name)
    run_tests(suite, ask)


if __name__ == "__main__":
    if sys.argv[1] == "cases":
        say({"refuses_split": ITS_OWN is not None})
        answer_cases(answer, MODULES, decides)
    else:
        tests()
