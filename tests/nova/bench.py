"""`select_destinations` at 100 and at 1,000 hosts: a front, then a stock nova-scheduler, on one cloud.

Run as tests are, by `scripts/nova bench`. The hosts are rows of Nova's databases and providers of Placement; no
nova-compute runs. Each call claims for one server, and the next one waits for it.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import time
import uuid
from pathlib import Path

import outside
from checks.cloud import Cloud
from forks import Fork
from nova import context, objects
from nova.scheduler import rpcapi

TICKS_S = os.sysconf("SC_CLK_TCK")
CALLS = {"front": 100, "stock": 20}
WARM_UP = 3
TRAITS = ("COMPUTE_NODE", "COMPUTE_TRUSTED_CERTS", "HW_CPU_X86_AVX2", "OWNER_NOVA")


class Select(Cloud):
    """Figures are appended to `bench.jsonl` in the directory of the run."""

    hosts = ()

    def setUp(self) -> None:
        os.environ["OS_TEST_TIMEOUT"] = "0"  # 1,000 hosts take minutes to make
        self.flags(service_down_time=86_400)
        super().setUp()
        self.servers = outside.world().servers

    def test_100_hosts(self) -> None:
        self.measure(100)

    def test_1000_hosts(self) -> None:
        self.measure(1000)

    def measure(self, hosts: int) -> None:
        """The front first."""
        cell = objects.CellMapping.get_by_uuid(context.get_admin_context(), self.cell_mappings["cell1"].uuid)
        for number in range(hosts):
            self.host_at(cell, number)
        front = self.servers.start_front(states_max_age_s=5.0)
        self.time("front", hosts, front)
        front.end()
        stock = self.servers.start_stock()
        self.time("stock", hosts, stock)

    def host_at(self, cell: objects.CellMapping, number: int) -> None:
        """A compute node that Nova and Placement know."""
        name, made = f"bench{number:04}", str(uuid.uuid4())
        admin = context.get_admin_context()
        with context.target_cell(admin, cell) as targeted:
            service = objects.Service(
                targeted, host=name, binary="nova-compute", topic="compute", disabled=False, forced_down=False
            )
            service.create()
            service.last_seen_up = datetime.datetime.now(datetime.UTC)
            service.report_count = 1
            service.save()
            objects.ComputeNode(
                targeted, uuid=made, host=name, hypervisor_hostname=name, hypervisor_type="fake", hypervisor_version=1,
                vcpus=64, memory_mb=262_144, local_gb=2000, vcpus_used=0, memory_mb_used=512, local_gb_used=0,
                free_disk_gb=2000, free_ram_mb=261_632, disk_available_least=2000, running_vms=0, current_workload=0,
                cpu_info="{}", cpu_allocation_ratio=4.0, ram_allocation_ratio=1.0, disk_allocation_ratio=1.0,
                supported_hv_specs=[objects.HVSpec.from_list(["x86_64", "fake", "hvm"])], mapped=1,
            ).create()  # fmt: skip
        objects.HostMapping(admin, host=name, cell_mapping=cell).create()
        self.placement.post("/resource_providers", {"name": name, "uuid": made}, version="1.20")
        shape = {"VCPU": (64, 4.0), "MEMORY_MB": (262_144, 1.0), "DISK_GB": (2000, 1.0)}
        inventories = {key: {"total": total, "allocation_ratio": ratio} for key, (total, ratio) in shape.items()}
        body = {"resource_provider_generation": 0, "inventories": inventories}
        self.placement.put(f"/resource_providers/{made}/inventories", body, version="1.26")
        traits = {"resource_provider_generation": 1, "traits": list(TRAITS)}
        self.placement.put(f"/resource_providers/{made}/traits", traits, version="1.6")

    def time(self, who: str, hosts: int, process: Fork) -> None:
        """Latency and CPU of the calls of one scheduler."""
        api, admin = rpcapi.SchedulerAPI(), context.get_admin_context()
        for _ in range(WARM_UP):
            self.call(api, admin)
        before = cpu_s(process), cpu_s(self.servers.placement_process)
        took = []
        for _ in range(CALLS[who]):
            began = time.monotonic()
            self.call(api, admin)
            took.append(1000 * (time.monotonic() - began))
        after = cpu_s(process), cpu_s(self.servers.placement_process)
        cpu_ms, placement_ms = (1000 * (end - start) / len(took) for start, end in zip(before, after, strict=True))
        figures = {
            "who": who, "hosts": hosts, "calls": len(took), "median_ms": round(statistics.median(took), 1),
            "most_ms": round(max(took), 1), "cpu_ms_a_call": round(cpu_ms, 1),
            "placement_cpu_ms_a_call": round(placement_ms, 1), "load": round(os.getloadavg()[0], 1),
        }  # fmt: skip
        with (self.servers.folder.parent / "bench.jsonl").open("a") as file:
            file.write(json.dumps(figures) + "\n")

    def call(self, api: rpcapi.SchedulerAPI, admin: context.RequestContext) -> None:
        """One server."""
        flavor = objects.Flavor(
            id=1, flavorid="1", name="bench", vcpus=1, memory_mb=512, root_gb=1, ephemeral_gb=0, swap=0, extra_specs={},
            disabled=False, is_public=True, rxtx_factor=1.0, vcpu_weight=0, description=None, projects=[],
        )  # fmt: skip
        spec = objects.RequestSpec.from_components(
            admin, str(uuid.uuid4()), objects.ImageMeta(properties=objects.ImageMetaProps()), flavor,
            None, None, {}, None, None, project_id="bench", user_id="bench",
        )  # fmt: skip
        (chosen,) = api.select_destinations(
            admin, spec, [spec.instance_uuid], return_objects=True, return_alternates=True
        )
        self.assertTrue(chosen[0].service_host.startswith("bench"))


def cpu_s(process: Fork) -> float:
    """CPU seconds of a process until now."""
    fields = Path(f"/proc/{process.number}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_S
