"""The NUMA fit beside Nova's: `python -m tests.nova.oracles.numa --nova PYTHON [--cases N] [--seed S] [--json FILE]`.

Random hosts and instances through nova.virt.hardware of that Python's Nova, and through ours: the same yes or no, the
same cells and pins, the same host afterwards. Then Nova's own unit tests of that module and of its filter, with our
decisions in place of theirs. Exit status 1: something differs, or a test fails.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from nova_scheduler.filters.numa import NUMATopologyFilter
from nova_scheduler.fit import host_devices, numa_fit
from nova_scheduler.fit.host_devices import HostDevices
from nova_scheduler.fit.numa import (
    HostCell,
    HostTopology,
    InstanceCell,
    InstanceTopology,
    PciView,
    PinsRefused,
    Unfit,
)
from nova_scheduler.fit.numa_cell import fit_cell, page_size
from nova_scheduler.fit.numa_cores import pins
from nova_scheduler.fit.numa_fit import fit_instance_to_host, networks_are_near
from nova_scheduler.fit.numa_objects import (
    parse_host_topology,
    parse_instance_topology,
    parse_limits,
    parse_network_metadata,
    primitive_of,
)
from nova_scheduler.fit.numa_usage import consume
from nova_scheduler.request.numa import numa_request
from nova_scheduler.request.request_spec import NovaFlavor, NovaImage, NovaRequest
from nova_scheduler.wire.versioned import versioned
from placement_worker.replica.request import Query
from scheduler_worker.selection.request_spec import RequestSpec
from tests.nova.oracles.numa_cases import drawn
from tests.nova.oracles.process import Nova

NOVAS_SIDE = Path(__file__).with_name("nova_numa.py")
LEAST_SHARE = 0.25  # of the cases that fit, and of those that do not


# --- cases


def pci_view(case: Mapping[str, Any]) -> PciView | None:
    pci = case["pci"]
    if pci is None:
        return None
    free: Counter[int | None] = Counter()
    for node, count in pci["pools"]:
        free[node] += count
    near = set(pci["near"])
    fits = (lambda cells: any(cell.id in near for cell in cells)) if pci["requested"] else None
    return PciView(free_by_node=free, fits=fits)


def after(host: HostTopology | None, instance: InstanceTopology, *, free: bool) -> object:
    try:
        return host and consume(host, instance, free=free)
    except PinsRefused as error:
        return error


def ours(case: Mapping[str, Any]) -> dict[str, Any]:
    """The same as `nova_numa.answer`, as ours."""
    host, instance = parse_host_topology(case["host"]), parse_instance_topology(case["instance"])
    placed = parse_instance_topology(case["placed"])
    assert instance is not None and placed is not None
    found = fit_instance_to_host(host, instance, parse_limits(case["limits"]), pci_view(case), pack=case["pack"])
    return {
        "fit": found,
        "usage": after(host, found, free=False) if isinstance(found, InstanceTopology) else None,
        "claimed": after(host, placed, free=False),
        "freed": after(host, placed, free=True),
    }


def same_fit(own: object, nova: Any) -> bool:
    """Nova fails where a host's cell has no cores: then nothing is compared."""
    if nova is None:
        return isinstance(own, Unfit)
    return isinstance(nova, str) or own == parse_instance_topology(nova)


def same_usage(own: object, nova: str | None) -> bool:
    if nova is None:
        return own is None
    if nova == "IndexError":  # Nova fails where a host states no page sizes
        return True
    return isinstance(own, PinsRefused) if not nova.startswith("{") else own == parse_host_topology(nova)


def differences(own: Mapping[str, Any], nova: Mapping[str, Any]) -> list[str]:
    if not same_fit(own["fit"], nova["fit"]):
        return ["fit"]
    compared = ("usage", "claimed", "freed") if isinstance(nova["fit"], dict) else ("claimed", "freed")
    return [name for name in compared if not same_usage(own[name], nova[name])]


def run_cases(python: str, cases: int, seed: int) -> dict[str, Any]:
    rng, nova = random.Random(seed), Nova(python, NOVAS_SIDE, "cases")
    counted: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    differing: list[dict[str, Any]] = []
    for _ in range(cases):
        case = drawn(rng)
        nova.say(case)
        own, theirs = ours(case), nova.hear()
        counted["fits"] += isinstance(theirs["fit"], dict)
        if isinstance(own["fit"], InstanceTopology):
            counted["on several cells"] += len(own["fit"].cells) > 1
            counted["pinned"] += own["fit"].cells[0].cpu_pinning is not None
        raised = (f"{name}: {one}" for name, one in theirs.items() if isinstance(one, str) and one[0] != "{")
        counted.update(raised)
        if isinstance(own["fit"], Unfit):
            reasons[own["fit"].reason] += 1
        if what := differences(own, theirs):
            counted["differing"] += 1
            differing = [*differing, {"what": what, "case": case, "nova": theirs, "own": repr(own)}][:3]
    nova.end()
    found = {"reasons": dict(reasons.most_common()), "examples": differing, "branches": nova.hear()}
    return {"cases": cases, **counted, **found}


# --- Nova's own tests


class Decisions:
    """What Nova's tests ask in place of their functions. Hosts are topologies, or single cells."""

    def __init__(self, call_back: Callable[[str, object], Any]) -> None:
        self._call_back = call_back

    def fit(self, asked: Mapping[str, Any]) -> object:
        host, instance = host_topology(asked["host"]), instance_topology(asked["instance"])
        pci = None
        if asked["pools"] is not None:
            free: Counter[int | None] = Counter()
            for node, count in asked["pools"]:
                free[node] += count
            pci = PciView(free_by_node=free, fits=self._fits if asked["requested"] else None)
        # A test may look whether its own stand-in is asked about networks.
        with patch.object(numa_fit, "networks_are_near", self._networks_are_near):
            found = fit_instance_to_host(host, instance, parse_limits(asked["limits"]), pci, pack=asked["pack"])
        return None if isinstance(found, Unfit) else primitive_of(found)

    def _fits(self, cells: Sequence[InstanceCell]) -> bool:
        return bool(self._call_back("fits", [primitive_of(cell) for cell in cells]))

    def _networks_are_near(self, _host: object, chosen: Sequence[Any], _wanted: object) -> bool:
        return bool(self._call_back("networks", [cell.id for cell in chosen]))

    def filter(self, asked: Mapping[str, Any]) -> object:
        limits = parse_limits(asked["limits"])
        assert limits is not None
        known = HostDevices(
            topology=host_topology(asked["host"]) if asked["host"] else None,
            cpu_allocation_ratio=limits.cpu_allocation_ratio,
            ram_allocation_ratio=limits.ram_allocation_ratio,
        )
        flavor = NovaFlavor(name="", vcpus=1, memory_mb=1, extra_specs=asked["specs"])
        instance, image = asked["instance"], NovaImage(properties=asked["image"])
        networks = asked["networks"]
        request = numa_request(
            NovaRequest(flavor=flavor, image=image, numa_topology=instance, network_metadata=networks)
        )
        everyone = list(range(len(asked["candidates"])))
        if request is None:
            return {"passes": True, "candidates": everyone, "limits": None}
        spec = RequestSpec(query=Query(), flavor="", project_id="", devices=(request,))
        judged = NUMATopologyFilter({"host": known}.get)
        with patch.object(host_devices, "fit_instance_to_host", self._whole_fit):
            suits = [at for at in everyone if judged.rejection_reason("host", spec, asked["candidates"][at]) is None]
        return {"passes": bool(suits), "candidates": suits, "limits": primitive_of(known.limits(request))}

    def _whole_fit(self, *_: object, **__: object) -> InstanceTopology | Unfit:
        found = self._call_back("fit", None)
        if isinstance(found, dict):
            return instance_topology(found)
        return InstanceTopology(cells=()) if found else Unfit("")

    def fit_cell(self, asked: Mapping[str, Any]) -> object:
        found = fit_cell(host_cell(asked), instance_cell(asked), parse_limits(asked["limits"]), asked["reserve"])
        return found.reason or primitive_of(found.cell)

    def pins(self, asked: Mapping[str, Any]) -> object:
        host, cell = host_cell(asked), instance_cell(asked)
        found = pins(host, cell, asked["reserve"])
        if isinstance(found, Unfit):
            return found.reason
        pinned = replace(cell, id=host.id, cpu_pinning=found.pinning or None, cpuset_reserved=found.reserved)
        return primitive_of(pinned)

    def page_size(self, asked: Mapping[str, Any]) -> object:
        return page_size(host_cell(asked), instance_cell(asked))

    def networks(self, asked: Mapping[str, Any]) -> object:
        wanted, host = parse_network_metadata(asked["networks"]), host_topology(asked["host"])
        assert wanted is not None
        return networks_are_near(host, [host_cell({"host": one}) for one in asked["chosen"]], wanted)

    def usage(self, asked: Mapping[str, Any]) -> object:
        host = host_topology(asked["host"])
        return primitive_of(consume(host, instance_topology(asked["instance"]), free=asked["free"]))


def complete(topology: dict[str, Any]) -> dict[str, Any]:
    """A topology of a test, whose cells may leave out what Nova always sets."""
    data = topology["nova_object.data"]
    cells = [
        {**cell, "nova_object.data": {"id": number, "cpuset": [], "pcpuset": [], **cell["nova_object.data"]}}
        for number, cell in enumerate(data["cells"])
    ]
    return {**topology, "nova_object.data": {**data, "cells": cells}}


def instance_topology(value: dict[str, Any]) -> InstanceTopology:
    found = parse_instance_topology(complete(value))
    assert found is not None
    return found


def host_topology(value: dict[str, Any]) -> HostTopology:
    found = parse_host_topology(json.dumps(complete(value)))
    assert found is not None
    return found


def host_cell(asked: Mapping[str, Any]) -> HostCell:
    return host_topology(versioned("NUMATopology", "1.2", {"cells": [asked["host"]]})).cells[0]


def instance_cell(asked: Mapping[str, Any]) -> InstanceCell:
    return instance_topology(versioned("InstanceNUMATopology", "1.3", {"cells": [asked["cell"]]})).cells[0]


def run_tests(python: str) -> dict[str, Any]:
    nova, questions = Nova(python, NOVAS_SIDE, "tests"), 0

    def call_back(name: str, given: object) -> Any:
        nova.say({"call": name, "given": given})
        while "do" in (heard := nova.hear()):
            reply(heard)
        return heard["result"]

    decisions = Decisions(call_back)

    def reply(asked: Mapping[str, Any]) -> None:
        nonlocal questions
        questions += 1
        if asked["do"] == "asked":
            nova.say({"answer": questions})
            return
        try:
            nova.say({"answer": getattr(decisions, asked["do"])(asked)})
        except PinsRefused:
            nova.say({"refused": True})

    while "do" in (heard := nova.hear()):
        reply(heard)
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
    is_good = (
        not cases.get("differing")
        and LEAST_SHARE <= cases["fits"] / cases["cases"] <= 1 - LEAST_SHARE
        and tests["passed"] == tests["tests"]
    )
    if options.json:
        options.json.write_text(json.dumps({"cases": cases, "tests": tests, "passed": is_good}, indent=1))
    say = sys.stdout.write
    plain = {name: value for name, value in cases.items() if name not in {"examples", "branches"}}
    say(f"cases: {plain}\n")
    missed = cases["branches"]["missed"]
    say(f"branches of Nova: {cases['branches']['taken']} taken, not reached: {missed or 'none'}\n")
    say(f"Nova's tests: {tests['passed']} of {tests['tests']}, {len(tests['deciding'])} of them ask for decisions\n")
    for example in cases["examples"]:
        say(json.dumps(example) + "\n")
    for name, text in tests["failed"].items():
        say(f"{name}\n{text}\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
