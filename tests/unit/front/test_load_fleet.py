"""A real cluster's files as settings: hosts and flavors that are just theirs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from berth.commands.as_toml import as_toml
from berth.commands.load import differing
from berth.load import PlanError
from berth.load.fleet import GPU_CLASS, HostKind, flavor_of, read_hosts, settings_like
from berth.load.trace import Shape, TraceRequest, read_requests, read_trace
from berth.settings import read_settings
from compute_sim.domain.hosts import plan_hosts, tree
from scheduler_worker.domain.flavor_parser import parse

HOSTS = (
    "sn,cpu_milli,memory_mib,gpu,model\na,32000,262144,0,\nb,96000,393216,2,G2\nc,32000,262144,0,\nd,8000,4096,1,t4\n"
)
REQUESTS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n"
    "p,3152,5600,1,810,,100,160\n"
    "q,12000,16384,2,1000,T4|G2,120,999\n"
    "r,500,100,0,0,G2,140,150\n"
    "s,3152,5600,1,810,,200,300\n"
)


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_hosts_and_flavors_are_those_of_the_files_after_a_round_trip_through_a_settings_file(tmp_path: Path) -> None:
    hosts = read_hosts(written(tmp_path, "hosts.csv", HOSTS))
    path = written(tmp_path, "requests.csv", REQUESTS)
    made = settings_like(hosts, read_requests(path))
    settings = read_settings(written(tmp_path, "like.toml", as_toml(differing(made))), {})
    assert settings == made

    plans = plan_hosts(settings.compute, "cell1", "cell1-c1")
    kinds = Counter((plan.size.vcpus, plan.size.memory_mb, len(plan.devices)) for plan in plans)
    assert kinds == {(32000, 262144, 0): 2, (96000, 393216, 2): 1, (8000, 4096, 1): 1}
    gpus = [provider for plan in plans for provider in tree(plan, plan.size, enabled=True)[1:]]
    assert [gpu.inventories[GPU_CLASS].total for gpu in gpus] == [1000] * 3
    assert {gpu.traits for gpu in gpus} == {("CUSTOM_GPU_MODEL_G2",), ("CUSTOM_GPU_MODEL_T4",)}

    flavors = settings.scheduler.flavors
    arrivals = read_trace(path, {name: Shape(one.vcpus, one.memory_mb) for name, one in flavors.items()}, speed=10.0)
    assert [one.flavor for one in arrivals] == [
        "trace.3152m-5600M-1x810", "trace.12000m-16384M-2x1000-G2-T4", "trace.500m-100M", "trace.3152m-5600M-1x810",
    ]  # fmt: skip
    assert {one.flavor for one in arrivals} == set(flavors)
    query = parse("q", flavors["trace.12000m-16384M-2x1000-G2-T4"]).query
    assert query.resources == {"VCPU": 12000, "MEMORY_MB": 16384} and query.group_policy == "isolate"
    assert [dict(group.resources) for group in query.groups] == [{GPU_CLASS: 1000}] * 2


def test_without_deletes_the_fleet_fills_up(tmp_path: Path) -> None:
    path = written(tmp_path, "requests.csv", REQUESTS)
    shapes = {"m": Shape(99, 99_999, 9.0)}
    assert [a.lifetime_s for a in read_trace(path, shapes, speed=10.0)] == [6.0, None, 1.0, None]
    assert [a.lifetime_s for a in read_trace(path, shapes, speed=10.0, deletes=False)] == [None] * 4


def test_a_trace_begins_later_with_what_was_there_then(tmp_path: Path) -> None:
    path = written(tmp_path, "requests.csv", REQUESTS)
    shapes = {"m": Shape(99, 99_999, 9.0)}
    found = read_trace(path, shapes, speed=1.0, skip_s=55.0)
    assert [(a.at_s, a.lifetime_s) for a in found] == [(0.0, 5.0), (0.0, None), (45.0, None)], "r had gone at 150"
    with pytest.raises(PlanError, match="nothing arrives"):
        read_trace(path, shapes, speed=1.0, skip_s=100.5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sn,cpu_milli\na,1\n", "lacks the column memory_mib"),
        ("cpu_milli,memory_mib\n", "has no hosts"),
        ("cpu_milli,memory_mib,gpu,model\n1000,100,1,\n", "line 2: not a host: '' is no model"),
        ("cpu_milli,memory_mib,gpu,model\n1000,100,1,a b\n", "line 2: not a host"),
        ("cpu_milli,memory_mib\n1000,100\n1e300,1\n", "line 3: not a host"),
        ("cpu_milli,memory_mib\n0,1\n", "line 2: not a host"),
        ("cpu_milli,memory_mib,gpu,model\n1,1,65,x\n", "line 2: not a host"),
        ("cpu_milli,memory_mib\n" + "".join(f"{n},1\n" for n in range(1, 66)), "65 kinds of hosts"),
    ],
)
def test_what_are_no_hosts_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence) as fault:
        read_hosts(written(tmp_path, "hosts.csv", text))
    assert fault.value.code == "load.hosts"


def test_a_request_for_more_gpus_than_groups_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "r.csv", "cpu_milli,memory_mib,num_gpu,creation_time\n1,1,17,0\n")
    with pytest.raises(PlanError, match="17 GPUs"):
        settings_like(Counter({HostKind(1, 1): 1}), read_requests(path))


def test_one_gpu_model_is_required_and_several_are_any_of_them() -> None:
    assert flavor_of(TraceRequest(1, 1, 1, 300, ("G2",))).extra_specs == {
        "resources1:CUSTOM_GPU_MILLI": "300", "trait1:CUSTOM_GPU_MODEL_G2": "required",
    }  # fmt: skip
    assert flavor_of(TraceRequest(1, 1, 1, 300, ("G2", "T4"))).extra_specs == {
        "resources1:CUSTOM_GPU_MILLI": "300", "trait1:in:CUSTOM_GPU_MODEL_G2,CUSTOM_GPU_MODEL_T4": "required",
    }  # fmt: skip
    assert flavor_of(TraceRequest(7, 9)).extra_specs == {}
