"""What a RequestSpec asks of a host's NUMA nodes."""

from __future__ import annotations

from nova_scheduler.fit.host_devices import NumaRequest
from nova_scheduler.fit.numa_objects import TopologyUnreadable, parse_instance_topology, parse_network_metadata
from nova_scheduler.request.request_spec import NotDecided, NovaRequest


def numa_request(request: NovaRequest) -> NumaRequest | None:
    """It, or None where it asks nothing. Raises NotDecided."""
    try:
        topology = parse_instance_topology(request.numa_topology)
        networks = parse_network_metadata(request.network_metadata)
    except TopologyUnreadable as error:
        raise NotDecided("numa_topology", error.reason) from None
    needs_threads = _says(request, "cpu_policy", "dedicated") and _says(request, "cpu_thread_policy", "require")
    if topology is None and not needs_threads:
        return None
    return NumaRequest(topology=topology, networks=networks, needs_threads=needs_threads)


def devices(request: NovaRequest) -> tuple[object, ...]:
    """What a RequestSpec asks of NUMA nodes and PCI devices, as `RequestSpec.devices` has it. Raises NotDecided."""
    numa = numa_request(request)
    return (*(() if numa is None else (numa,)), *request.pci)


def _says(request: NovaRequest, key: str, value: str) -> bool:
    """Whether the flavor or the image says so."""
    return value in (request.flavor.extra_specs.get(f"hw:{key}"), request.image_or_none.text(f"hw_{key}"))
