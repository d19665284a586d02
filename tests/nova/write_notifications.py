"""Nova's own notification payloads of RequestSpecs: run by a Python that has Nova, prints JSON.

PYTHON_OF_NOVA tests/nova/write_notifications.py
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["OS_NOVA_DISABLE_EVENTLET_PATCHING"] = "1"

from nova import conf, objects, rpc
from nova.notifications.objects import request_spec as payloads

UUID = "5e9a4b5c-0d9e-4b5f-8f8e-6d1f6c2b7ace"
FLAVOR: dict[str, Any] = {
    "flavorid": "1", "name": "m", "vcpus": 1, "memory_mb": 1, "root_gb": 1, "ephemeral_gb": 0, "swap": 0,
    "disabled": False, "is_public": True,
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "project_id": "p", "user_id": "u", "num_instances": 1, "image": None, "numa_topology": None, "pci_requests": None,
    "retry": None, "ignore_hosts": None, "force_hosts": None, "force_nodes": None, "availability_zone": None,
    "instance_group": None, "requested_destination": None, "scheduler_hints": {}, "instance_uuid": UUID,
}  # fmt: skip


class Enabled:
    """Nova's notifier, as far as payloads ask it."""

    def is_enabled(self) -> bool:
        return True


def specs() -> list[dict[str, Any]]:
    cell = objects.InstanceNUMACell(
        id=0, cpuset={0, 1}, pcpuset=set(), memory=512, cpu_policy="dedicated",
        cpu_topology=objects.VirtCPUTopology(sockets=1, cores=2, threads=1),
    )  # fmt: skip
    properties = objects.ImageMetaProps(hw_architecture="x86_64", traits_required=["A"], hw_cpu_sockets=2)
    request = objects.InstancePCIRequest(count=1, spec=[{"vendor_id": "1"}], alias_name="gpu", request_id=UUID)
    tried = objects.ComputeNodeList(objects=[objects.ComputeNode(host="h", hypervisor_hostname="n")])
    group = {"uuid": UUID, "name": "g", "members": ["x"], "user_id": "u", "project_id": "p"}
    return [
        {},
        {"image": objects.ImageMeta(id=UUID, name="i", min_ram=1, properties=properties)},
        {"instance_group": objects.InstanceGroup(policy="affinity", _rules={}, **group)},
        {"instance_group": objects.InstanceGroup(policy="anti-affinity", _rules={"max_server_per_host": "2"}, **group)},
        {"requested_destination": objects.Destination(host="h", node=None, aggregates=["a,b"])},
        {"requested_destination": objects.Destination(cell=objects.CellMapping(uuid=UUID, name="c", disabled=False))},
        {"retry": objects.SchedulerRetries(num_attempts=2, hosts=tried)},
        {"pci_requests": objects.InstancePCIRequests(requests=[request])},
        {"numa_topology": objects.InstanceNUMATopology(cells=[cell])},
        {"force_hosts": ["h"], "force_nodes": ["n"], "ignore_hosts": ["x"], "scheduler_hints": {"a": ["b"]}},
    ]


def main() -> None:
    conf.CONF([], project="nova", version="test", default_config_files=[])
    objects.register_all()
    conf.CONF.set_override("notification_format", "versioned", group="notifications")
    rpc.NOTIFIER = Enabled()
    written = []
    for fields in specs():
        flavor = objects.Flavor(extra_specs={"a": "b"}, **FLAVOR)
        names = objects.SecurityGroupList(objects=[])
        spec = objects.RequestSpec(flavor=flavor, security_groups=names, **(PLAIN | fields))
        primitive = spec.obj_to_primitive()  # before the payload changes it
        written.append([primitive, payloads.RequestSpecPayload(spec).obj_to_primitive()])
    json.dump(written, sys.stdout)


if __name__ == "__main__":
    main()
