"""PCI pools beside Nova's: `python -m tests.nova.oracles.pci --nova PYTHON [--cases N] [--seed S] [--json FILE]`.

Random hosts and instances through `nova.pci.stats`, PciPassthroughFilter and PCIWeigher of that Python's Nova, and
through ours: the same yes or no, the same pools afterwards. Then Nova's own unit tests of pools, with our decisions in
place of theirs. Exit status 1: something differs, a branch of Nova's is not reached, a test fails.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import numpy as np

from nova_scheduler.filters.pci import PciPassthroughFilter, weights_of
from nova_scheduler.fit.host_devices import HostDevices
from nova_scheduler.fit.pci import (
    NUMA_POLICIES,
    Consumed,
    PciPool,
    PciRequest,
    _Ask,
    affinity_of,
    consume,
    free_devices,
    is_split,
    matching,
)
from nova_scheduler.fit.pci_pools import parse_pools
from nova_scheduler.request.request_spec import parse_request_spec
from placement_worker.replica.request import Query
from scheduler_worker.selection.request_spec import RequestSpec
from tests.nova.oracles.process import Nova

NOVAS_SIDE = Path(__file__).with_name("nova_pci.py")
LEAST_SHARE = 0.25  # of the cases that fit, and of those that do not
ROW: Final = "x-row"
# Branches of Nova's that no row of its database and no request reaches, by function.
UNREACHABLE: Mapping[str, int] = {
    "PciDeviceStats._apply_request": 1,  # the pools that were found are too few for the request
    "pci_device_prop_match._matching_devices": 5,  # a value is a list: the objects have texts alone
}

KINDS = (("8086", "1515"), ("8086", "1528"), ("15b3", "101e"), ("15B3", "101E"))
TYPES = ("type-PCI", "type-PF", "type-VF", "type-VF", "vdpa")
PROVIDERS = tuple(str(UUID(int=number)) for number in range(1, 6))
BESIDE: Mapping[str, Sequence[str | None]] = {  # tags, and what they may be
    "physical_network": ("physnet1", "Physnet1", "physnet2", None),
    "remote_managed": ("true", "false", "False", "True", "yes"),
    "live_migratable": ("true", "true", "false", "True"),
    "one_time_use": ("true", "false"),
    "parent_ifname": ("ens1", "ens2"),
    "resource_class": ("GPU",),
    "traits": ("GOLD",),
}


def versioned(name: str, version: str, /, **data: Any) -> dict[str, Any]:
    return {
        "nova_object.name": name,
        "nova_object.namespace": "nova",
        "nova_object.version": version,
        "nova_object.data": data,
    }


# --- cases


def drawn_tags(rng: random.Random, share: float) -> dict[str, str | None]:
    return {name: rng.choice(values) for name, values in BESIDE.items() if rng.random() < share}


def drawn_pool(rng: random.Random) -> dict[str, Any]:
    vendor, product = rng.choice(KINDS)
    tags = {"dev_type": rng.choice(TYPES), **drawn_tags(rng, 0.15)}
    if rng.random() < 0.5:
        tags["rp_uuid"] = rng.choice(PROVIDERS)
    numa_node = rng.choice((0, 1, 2, None))
    count = rng.choice((0, 1, 1, 2, 3, 5))
    return {"vendor_id": vendor, "product_id": product, "numa_node": numa_node, "count": count, "tags": tags}


def drawn_pools(rng: random.Random, share_split: float) -> list[dict[str, Any]]:
    """Those of one provider are mostly one pool, as nova-compute makes them."""
    pools = [drawn_pool(rng) for _ in range(rng.randint(1, 8) if rng.random() < 0.97 else 0)]
    if rng.random() >= share_split:
        seen = set[str]()
        for pool in pools:
            provider = pool["tags"].get("rp_uuid")
            if provider in seen:
                del pool["tags"]["rp_uuid"]
            elif provider is not None:
                seen.add(provider)
    return pools


def drawn_spec(rng: random.Random, pools: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """What some pool is, a part of it, mostly; with a name of its own for some tags."""
    free = [one for one in pools if one["count"]]
    pool = rng.choice(free) if free and rng.random() < 0.97 else drawn_pool(rng)
    whole = {"vendor_id": pool["vendor_id"], "product_id": pool["product_id"], **pool["tags"]}
    whole.pop("rp_uuid", None)
    spec = {name: text for name, text in whole.items() if rng.random() < 0.6}
    if rng.random() < 0.1:
        spec |= drawn_tags(rng, 0.15)
    if rng.random() < 0.3:
        spec = {name: text.upper() if text and name != "live_migratable" else text for name, text in spec.items()}
    if rng.random() < 0.6:
        spec["dev_type"] = rng.choice(TYPES) if rng.random() < 0.05 else pool["tags"]["dev_type"]
    return spec or {"vendor_id": "8086"}


def drawn_request(rng: random.Random, pools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = drawn_spec(rng, pools)
    others = [drawn_spec(rng, pools) for _ in range(rng.choice((0, 0, 0, 1)))]
    spec = [first, *others]
    if rng.random() < 0.1:
        said = rng.choice(("true", "false"))
        spec = [{**one, "live_migratable": said} for one in spec]
    if rng.random() < 0.1:
        spec[0]["rp_uuids"] = ",".join(rng.choices(PROVIDERS, k=rng.randint(1, 2)))
    if rng.random() < 0.02:
        spec[0]["rp_uuids"] = ""
    of_port = rng.random() < 0.35
    request: dict[str, Any] = {
        "count": rng.choice((1, 1, 1, 1, 2, 2, 3)) if rng.random() < 0.95 else rng.choice((0, 4)),
        "spec": spec,
        "alias_name": None if of_port else rng.choice(("gpu", "nic")),
        "request_id": str(UUID(int=rng.getrandbits(128))),
    }
    if of_port:
        request["requester_id"] = str(UUID(int=rng.getrandbits(128)))
    if rng.random() < 0.8:
        request["numa_policy"] = rng.choice((*NUMA_POLICIES, "socket", None))
    return request


def drawn_mapping(
    rng: random.Random, requests: Sequence[Mapping[str, Any]], pools: Sequence[Mapping[str, Any]]
) -> dict[str, list[str]]:
    """What an allocation candidate gives the groups of the requests: mostly providers that have the devices."""
    mapping = {"": [PROVIDERS[0]]} if rng.random() < 0.1 else {}
    for request in requests:
        kind = {name: request["spec"][0].get(name) for name in ("vendor_id", "dev_type")}
        of_kind = [
            pool["tags"]["rp_uuid"]
            for pool in pools
            if "rp_uuid" in pool["tags"]
            and kind["vendor_id"] in (None, pool["vendor_id"])
            and kind["dev_type"] in (None, pool["tags"]["dev_type"])
        ]
        for number in range(request["count"]):
            choice = of_kind if of_kind and rng.random() < 0.95 else PROVIDERS
            mapping[f"{request['request_id']}-{number}"] = [rng.choice(choice)]
    return mapping


def drawn_instance(rng: random.Random, pools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    requests = [drawn_request(rng, pools) for _ in range(rng.choice((1, 1, 1, 2)) if rng.random() < 0.98 else 0)]
    candidates = [
        drawn_mapping(rng, requests, pools) if rng.random() < 0.7 else {} for _ in range(rng.choice((0, 1, 1, 1, 2)))
    ]
    near = rng.random() < 0.5
    return {
        "requests": versioned(
            "InstancePCIRequests",
            "1.1",
            requests=[versioned("InstancePCIRequest", "1.4", **one) for one in requests],
        ),
        "cells": rng.sample((0, 1, 2, 3, 9), rng.choice((1, 1, 2))) if near else [],
        "candidates": candidates,
        "mapping": rng.choice((None, {}, drawn_mapping(rng, requests, pools), drawn_mapping(rng, requests, pools))),
    }


def drawn(rng: random.Random, share_split: float) -> dict[str, Any]:
    """A host (its pools as Nova's database has them, its NUMA cells with their sockets) and instances in turn."""
    pools = drawn_pools(rng, share_split)
    objects = [versioned("PciDevicePool", "1.1", **pool) for pool in pools]
    a_socket = (0, 0, 0, 1, 1) if rng.random() < 0.9 else (0, None)
    return {
        "pools": json.dumps(versioned("PciDevicePoolList", "1.1", objects=objects))
        if pools
        else rng.choice(("", "[]")),
        "sockets": [(cell, rng.choice(a_socket)) for cell in range(rng.randint(0, 4))],
        "instances": [drawn_instance(rng, pools) for _ in range(rng.choice((1, 1, 2)))],
    }


def weight_of(pools: Sequence[PciPool]) -> float:
    return float(weights_of(np.array([free_devices(pools)], dtype=np.float64))[0])


def requests_of(primitive: object) -> tuple[PciRequest, ...]:
    flavor = versioned("Flavor", "1.2", name="m1", vcpus=1, memory_mb=1)
    return parse_request_spec(versioned("RequestSpec", "1.15", flavor=flavor, pci_requests=primitive)).pci


def ours(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same as `nova_pci.answer`."""
    pools, steps = parse_pools(case["pools"]), []
    for instance in case["instances"]:
        requests = requests_of(instance["requests"])
        affinity = affinity_of(instance["cells"], dict(case["sockets"]))
        found = consume(pools, requests, instance["mapping"], affinity)
        spec = RequestSpec(query=Query(), flavor="", project_id="", devices=requests)
        known = HostDevices(pools=pools, cpu_allocation_ratio=1.0, ram_allocation_ratio=1.0)
        judged = PciPassthroughFilter({"host": known}.get)
        suits = [
            number
            for number, one in enumerate(instance["candidates"])
            if judged.rejection_reason("host", spec, one) is None
        ]
        step: dict[str, Any] = {
            "fits": isinstance(found, Consumed),
            "passes": bool(suits) or not requests,
            "candidates": suits,
            "weight": weight_of(pools),
            "reason": "" if isinstance(found, Consumed) else found.reason,
        }
        pools = found.pools if isinstance(found, Consumed) else pools
        steps.append({**step, "pools": pools})
    return steps


def as_ours(pool: Mapping[str, Any]) -> PciPool:
    tags = {name: text for name, text in pool.items() if name not in {"vendor_id", "product_id", "numa_node", "count"}}
    return PciPool.of(pool["count"], pool["vendor_id"], pool["product_id"], pool.get("numa_node"), tags)


def differences(case: Mapping[str, Any], theirs: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for own, nova in zip(ours(case), theirs, strict=True):
        found += [name for name in ("fits", "passes", "candidates", "weight") if own[name] != nova[name]]
        if own["pools"] != tuple(as_ours(pool) for pool in nova["pools"]):
            found.append("pools")
    return found


def run_cases(python: str, cases: int, seed: int) -> dict[str, Any]:
    """cases: instances that are judged."""
    rng, nova = random.Random(seed), Nova(python, NOVAS_SIDE, "cases")
    judged: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    differing: list[dict[str, Any]] = []
    # A release that takes devices twice of a provider with several pools is not asked about such.
    share_split = 0.1 if nova.hear()["refuses_split"] else 0.0
    while judged["cases"] < cases:
        case = drawn(rng, share_split)
        nova.say(case)
        theirs = nova.hear()["steps"]
        judged["cases"] += len(theirs)
        judged["fits"] += sum(step["fits"] for step in theirs)
        judged["passes"] += sum(step["passes"] for step in theirs)
        reasons.update(step["reason"] for step in ours(case) if step["reason"])
        if what := differences(case, theirs):
            judged["differing"] += 1
            differing = [*differing, {"what": what, "case": case, "nova": theirs}][:3]
    nova.end()
    heard = nova.hear()
    of_function = Counter(one.partition(":")[0] for one in heard["missed"])
    missed = [one for one in heard["missed"] if of_function[name := one.partition(":")[0]] > UNREACHABLE.get(name, 0)]
    branches = {"taken": heard["taken"], "missed": missed, "unreachable": len(heard["missed"]) - len(missed)}
    return {**judged, "reasons": dict(reasons.most_common()), "examples": differing, "branches": branches}


# --- Nova's own tests


def consumed(asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """The pools' rows, each with the devices that are left of it, and with those taken."""
    pools = [pool_of(one, row) for row, one in enumerate(asked["pools"])]
    requests = [request_of(one) for one in asked["requests"]]
    found = consume(pools, requests, asked["mapping"], affinity_of(asked["cells"], dict(asked["sockets"])))
    if not isinstance(found, Consumed):
        return None
    left, taken = ([(int(str(pool.properties[ROW])), pool.count) for pool in one] for one in (found.pools, found.taken))
    return {"pools": left, "taken": taken}


def pool_of(one: Mapping[str, Any], row: int) -> PciPool:
    tags = one["tags"]
    tags = {**tags, ROW: str(row)}
    return PciPool.of(one["count"], tags.get("vendor_id", ""), tags.get("product_id", ""), one["numa_node"], tags)


def request_of(one: Mapping[str, Any]) -> PciRequest:
    spec = tuple(one.get("spec", ()))
    return PciRequest(**{**one, "spec": spec})


def decided(asked: Mapping[str, Any]) -> object:
    pools = [pool_of(one, row) for row, one in enumerate(asked["pools"])]
    if asked["do"] == "consume":
        return consumed(asked)
    if asked["do"] == "weight":
        return weight_of(pools)
    if asked["do"] == "is_split":
        return is_split(pools)
    if asked["do"] == "of_sockets":
        affinity = affinity_of(asked["cells"], dict(asked["sockets"]))
        assert affinity is not None
        return [row for row, pool in enumerate(pools) if pool.numa_node in affinity.of_sockets]
    request = request_of(asked["requests"][0])
    return matching(dict(enumerate(pools)), list(range(len(pools))), _Ask(request, Counter(), None))


def run_tests(python: str) -> dict[str, Any]:
    nova, questions = Nova(python, NOVAS_SIDE, "tests"), 0
    while "do" in (heard := nova.hear()):
        questions += 1
        nova.say(questions if heard["do"] == "asked" else decided(heard))
    nova.end()
    return heard  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nova", required=True)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = run_cases(options.nova, options.cases, options.seed)
    tests = run_tests(options.nova)
    share = cases["fits"] / cases["cases"]
    is_good = (
        not cases.get("differing")
        and LEAST_SHARE <= share <= 1 - LEAST_SHARE
        and not cases["branches"]["missed"]
        and tests["passed"] == tests["tests"]
    )
    if options.json:
        options.json.write_text(json.dumps({"cases": cases, "tests": tests, "passed": is_good}, indent=1))
    say = sys.stdout.write
    say(f"{cases['cases']} cases: {share:.0%} fit, {cases.get('differing', 0)} differ; {cases['reasons']}\n")
    missed = cases["branches"]["missed"]
    say(
        f"branches of Nova: {cases['branches']['taken']} taken, "
        f"{cases['branches']['unreachable']} not reachable, missed: {missed or 'none'}\n"
    )
    say(f"Nova's tests: {tests['passed']} of {tests['tests']}, {len(tests['deciding'])} of them ask for decisions\n")
    for example in cases["examples"]:
        say(json.dumps(example) + "\n")
    for name, text in tests["failed"].items():
        say(f"{name}\n{text}\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
