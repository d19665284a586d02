"""Nova's side of `tests.nova.oracles.facts`: run by a Python that has Nova, speaking JSON lines on stdin and stdout.

nova_facts.py cases   answers each case by Nova's own filter or weigher, of hosts as its scheduler reads their rows
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import warnings
from types import SimpleNamespace
from typing import Any

SAID, HEARD = os.fdopen(os.dup(1), "w", buffering=1), os.fdopen(os.dup(0), "r")
os.dup2(2, 1)

# ruff: noqa: E402
from nova import conf, context, objects
from nova.scheduler import host_manager, weights

logging.disable()
warnings.simplefilter("ignore")
objects.register_all()
CONF = conf.CONF
CONTEXT = context.get_admin_context()
# The columns that say nothing here.
REST = {
    **dict.fromkeys(("vcpus", "memory_mb", "local_gb", "vcpus_used", "memory_mb_used", "local_gb_used"), 1),
    **dict.fromkeys(("free_ram_mb", "current_workload", "running_vms", "disk_available_least"), 1),
    **dict.fromkeys(("cpu_allocation_ratio", "ram_allocation_ratio", "disk_allocation_ratio"), 1.0),
    **dict.fromkeys(("host_ip", "service_id", "created_at", "updated_at", "deleted_at", "pci_stats"), None),
    **{"deleted": False, "mapped": 1, "cpu_info": "", "hypervisor_type": "QEMU", "numa_topology": None},
}


def host_state(row: dict[str, Any], aggregates: list[dict[str, str]]) -> host_manager.HostState:
    node = objects.ComputeNode._from_db_object(CONTEXT, objects.ComputeNode(), {**REST, **row})
    state = host_manager.HostState(row["host"], row["hypervisor_hostname"], "cell")
    state.update(compute=node, aggregates=[objects.Aggregate(metadata=one) for one in aggregates])
    return state


def answer(case: dict[str, Any]) -> list[Any]:
    for group, option, text in case["options"]:
        # As oslo.config reads a file.
        found = CONF._groups[group]._opts[option]["opt"]
        CONF.set_override(option, found.type(text), group=group)
    try:
        hosts = [host_state(row, of) for row, of in zip(case["rows"], case["aggregates"], strict=True)]
        kind = getattr(importlib.import_module(case["module"]), case["class"])()
        image = None if case["image"] is None else objects.ImageMeta(id=case["image"])
        spec = SimpleNamespace(image=image)
        if not case["weighs"]:
            return [bool(kind.host_passes(one, spec)) for one in hosts]
        weighed = {
            one.obj.host: one.weight for one in weights.HostWeightHandler().get_weighed_objects([kind], hosts, spec)
        }
        return [weighed[one.host] for one in hosts]
    finally:
        for group, option, _ in case["options"]:
            CONF.clear_override(option, group=group)


def main() -> None:
    assert sys.argv[1:] == ["cases"], sys.argv
    for line in HEARD:
        SAID.write(json.dumps(answer(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
