"""Nova's side of `tests.nova.oracles.numa`: run by a Python that has Nova, speaking JSON lines on stdin and stdout.

nova_numa.py cases   answers each case by nova.virt.hardware; at the end the branches of it that they reached, for
                     which the module `coverage` is needed (a folder that has it may be named by COVERAGE_IN)
nova_numa.py tests   runs Nova's own unit tests of nova.virt.hardware and of the filter, and asks for each decision
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

# ruff: noqa: I001
from nova_side import HEARD, answer_cases, loaded, run_tests, say
from nova import conf, exception, objects
from nova.objects import numa
from nova.scheduler.filters import numa_topology_filter
from nova.virt import hardware
from oslo_serialization import jsonutils

objects.register_all()
CONF = conf.CONF

TESTS = ("nova.tests.unit.virt.test_hardware", "nova.tests.unit.scheduler.filters.test_numa_topology_filters")
# The functions that decide.
DECIDING = (
    "numa_fit_instance_to_host", "_numa_fit_instance_cell", "_pack_instance_onto_cores",
    "_numa_cell_supports_pagesize_request", "_numa_cells_support_network_metadata", "numa_usage_from_instance_numa",
    "_numa_pagesize_usage_from_cell", "_get_smallest_pagesize",
)  # fmt: skip
OF_CELLS = ("pin_cpus", "unpin_cpus", "pin_cpus_with_siblings", "unpin_cpus_with_siblings", "can_fit_pagesize")
MODULES = {hardware.__file__: DECIDING, numa.__file__: tuple(f"NUMACell.{name}" for name in OF_CELLS)}


# --- cases


class Devices:
    """What the fit sees of a host's PCI devices: so many beside a node, and the nodes of which one must be chosen."""

    def __init__(self, pci: dict[str, Any]) -> None:
        self.pools = [{"numa_node": node, "count": count} for node, count in pci["pools"]]
        self._near = pci["near"]

    def support_requests(self, requests: Any, mapping: Any, cells: list[Any]) -> bool:
        return any(cell.id in self._near for cell in cells)


def outcome(function: Any, *given: Any, **named: Any) -> Any:
    """What it returns, or the name of what it raises."""
    try:
        return function(*given, **named)
    except (exception.NovaException, ValueError, IndexError) as error:
        return type(error).__name__


def instance_of(primitive: Any) -> Any:
    return objects.InstanceNUMATopology.obj_from_primitive(primitive)


def host_of(case: dict[str, Any]) -> Any:
    return objects.NUMATopology.obj_from_db_obj(case["host"]) if case["host"] else None


def usage(case: dict[str, Any], instance: Any, *, free: bool) -> Any:
    after = outcome(hardware.numa_usage_from_instance_numa, host_of(case), instance, free)
    return after if isinstance(after, str | None) else after._to_json()


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """The fitted topology, and the host with it; then the host with an instance whose pins are drawn, and without."""
    CONF.set_override("packing_host_numa_cells_allocation_strategy", case["pack"], "compute")
    pci, limits = case["pci"], case["limits"]
    found = outcome(
        hardware.numa_fit_instance_to_host,
        host_of(case),
        instance_of(case["instance"]),
        None,
        limits=objects.NUMATopologyLimits.obj_from_primitive(limits) if limits else None,
        pci_requests=["some"] if pci and pci["requested"] else [],
        pci_stats=Devices(pci) if pci else None,
    )
    is_fitted = found is not None and not isinstance(found, str)
    return {
        "fit": found.obj_to_primitive() if is_fitted else found,
        "usage": usage(case, found, free=False) if is_fitted else None,
        "claimed": usage(case, instance_of(case["placed"]), free=False),
        "freed": usage(case, instance_of(case["placed"]), free=True),
    }


def decides(name: str, names: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{one}.") for one in names)


# --- Nova's own tests


def ask(line: dict[str, Any], **calls: Any) -> Any:
    """The answer of the other side, which may call back first."""
    say(line)
    while "call" in (heard := json.loads(HEARD.readline())):
        say({"result": calls[heard["call"]](heard["given"])})
    if heard.get("refused"):
        raise exception.CPUPinningInvalid(requested=[], available=[])
    return heard["answer"]


def primitive(value: Any) -> Any:
    return None if value is None else jsonutils.to_primitive(value.obj_to_primitive())


def cells_as(kind: Any, primitives: list[Any]) -> list[Any]:
    return [kind.obj_from_primitive(one) for one in primitives]


def numa_fit_instance_to_host(  # noqa: PLR0917 (Nova's arguments)
    host_topology: Any,
    instance_topology: Any,
    provider_mapping: Any,
    limits: Any = None,
    pci_requests: Any = None,
    pci_stats: Any = None,
) -> Any:
    def fits(cells: list[Any]) -> bool:
        chosen = cells_as(objects.InstanceNUMACell, cells)
        return bool(pci_stats.support_requests(pci_requests, provider_mapping, chosen))

    def networks(chosen: list[int]) -> bool:
        cells = [next(cell for cell in host_topology.cells if cell.id == one) for one in chosen]
        near = hardware._numa_cells_support_network_metadata
        return bool(near(host_topology, cells, limits.network_metadata))

    if not (host_topology and instance_topology):
        return None
    found = ask(
        {
            "do": "fit",
            "host": primitive(host_topology),
            "instance": primitive(instance_topology),
            "limits": primitive(limits),
            "pack": CONF.compute.packing_host_numa_cells_allocation_strategy,
            "pools": [(pool["numa_node"], pool["count"]) for pool in pci_stats.pools] if pci_stats else None,
            "requested": bool(pci_requests),
        },
        fits=fits,
        networks=networks,
    )
    return found and instance_of(found)


def fitted_cell(found: Any) -> Any:
    """The cell, or None where a reason is found. One of them Nova logs."""
    if found == "numa.hyperthreads":
        hardware.LOG.warning("Host supports hyperthreads, but instance requested no hyperthreads.")
    return None if isinstance(found, str) else objects.InstanceNUMACell.obj_from_primitive(found)


def _numa_fit_instance_cell(host_cell: Any, instance_cell: Any, limits: Any = None, cpuset_reserved: int = 0) -> Any:
    asked = {"host": primitive(host_cell), "cell": primitive(instance_cell), "reserve": cpuset_reserved}
    return fitted_cell(ask({"do": "fit_cell", **asked, "limits": primitive(limits)}))


def _pack_instance_onto_cores(host_cell: Any, instance_cell: Any, num_cpu_reserved: int = 0) -> Any:
    asked = {"host": primitive(host_cell), "cell": primitive(instance_cell), "reserve": num_cpu_reserved}
    return fitted_cell(ask({"do": "pins", **asked}))


def _numa_cell_supports_pagesize_request(host_cell: Any, inst_cell: Any) -> Any:
    size = ask({"do": "page_size", "host": primitive(host_cell), "cell": primitive(inst_cell)})
    if (
        size is None
        and inst_cell.pagesize > 0
        and inst_cell.pagesize not in [one.size_kb for one in host_cell.mempages]
    ):
        raise exception.MemoryPageSizeNotSupported(pagesize=inst_cell.pagesize)
    return size


def _numa_cells_support_network_metadata(host_topology: Any, chosen_host_cells: Any, network_metadata: Any) -> Any:
    if not network_metadata:
        return True
    chosen = [primitive(one) for one in chosen_host_cells]
    return ask(
        {"do": "networks", "host": primitive(host_topology), "chosen": chosen, "networks": primitive(network_metadata)}
    )


def numa_usage_from_instance_numa(host_topology: Any, instance_topology: Any, free: bool = False) -> Any:
    if not host_topology or not instance_topology:
        return host_topology
    asked = {"host": primitive(host_topology), "instance": primitive(instance_topology), "free": free}
    return objects.NUMATopology.obj_from_primitive(ask({"do": "usage", **asked}))


def _numa_pagesize_usage_from_cell(host_cell: Any, instance_cell: Any, sign: int) -> Any:
    host, cell = host_cell.obj_clone(), instance_cell.obj_clone()
    host.cpu_usage = host.memory_usage = 0
    cell.id = host.id
    topology = objects.InstanceNUMATopology(cells=[cell])
    after = numa_usage_from_instance_numa(objects.NUMATopology(cells=[host]), topology, free=sign < 0)
    return after.cells[0].mempages


def host_passes(self: Any, host_state: Any, spec_obj: Any) -> bool:
    """The filter's decision. A test may look whether its own stand-in for the fit is asked."""
    del self
    candidates = host_state.allocation_candidates
    asked = iter(candidates)
    networks = spec_obj.network_metadata if "network_metadata" in spec_obj else None
    limits = objects.NUMATopologyLimits(
        cpu_allocation_ratio=host_state.cpu_allocation_ratio or 1.0,
        ram_allocation_ratio=host_state.ram_allocation_ratio or 1.0,
    )
    if networks:
        limits.network_metadata = networks

    def fit(_: Any) -> Any:
        found = hardware.numa_fit_instance_to_host(
            host_state.numa_topology,
            spec_obj.numa_topology.obj_clone(),
            limits=limits,
            pci_requests=None,
            pci_stats=None,
            provider_mapping=next(asked)["mappings"],
        )
        return primitive(found) if isinstance(found, objects.InstanceNUMATopology) else bool(found)

    image = spec_obj.image.properties
    found = ask(
        {
            "do": "filter",
            "host": primitive(host_state.numa_topology),
            "limits": primitive(limits),
            "instance": primitive(spec_obj.numa_topology),
            "networks": primitive(networks),
            "specs": spec_obj.flavor.extra_specs,
            "image": {name: image.get(name) for name in ("hw_cpu_policy", "hw_cpu_thread_policy")},
            "candidates": [one["mappings"] for one in candidates],
        },
        fit=fit,
    )
    host_state.allocation_candidates = [candidates[number] for number in found["candidates"]]
    if found["limits"]:
        host_state.limits["numa_topology"] = objects.NUMATopologyLimits.obj_from_primitive(found["limits"])
    return bool(found["passes"])


REPLACED = (
    numa_fit_instance_to_host, _numa_fit_instance_cell, _pack_instance_onto_cores, _numa_cell_supports_pagesize_request,
    _numa_cells_support_network_metadata, numa_usage_from_instance_numa, _numa_pagesize_usage_from_cell,
)  # fmt: skip


def tests() -> None:
    suite = loaded(TESTS)
    for function in REPLACED:
        assert hasattr(hardware, function.__name__), function
        setattr(hardware, function.__name__, function)
    numa_topology_filter.NUMATopologyFilter.host_passes = host_passes
    # Nothing that decides is left to reach.
    del hardware._get_smallest_pagesize
    run_tests(suite, ask)


if __name__ == "__main__":
    if sys.argv[1] == "cases":
        answer_cases(answer, MODULES, decides)
    else:
        tests()
