"""Nova's own queries for the RequestSpecs of its own unit tests: run by a Python that has Nova, writes JSON.

    PYTHON_OF_NOVA tests/nova/capture_queries.py FILE [SPECS]

1. The unit tests of the scheduler's utils, pre-filters and manager run with hooks that record each RequestSpec which
   they hand over, with the settings in force, before anything has changed it. Those tests set the fields that they
   look at; the others are completed as the conductor sets them for a plain request. SPECS has those that functional
   tests asked with, a line each (`outside.note`).
2. Each spec goes through Nova's pre-filters and ResourceRequest again, in several worlds (settings, aggregates in
   Nova's own database code on SQLite, compute nodes, versions), as `SchedulerManager.select_destinations` does it. The
   query string is recorded, or what was raised, and whether Placement's handler refuses it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import sys
import unittest
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import microversion_parse
import nova.conf
import webob
from front_settings import PREFILTERS, of_queries
from nova import context as nova_context
from nova import exception, objects
from nova import test as nova_test
from nova.network import neutron
from nova.scheduler import manager, request_filter, utils
from oslo_serialization import jsonutils
from oslo_versionedobjects import exception as versioned
from placement import lib as placement_lib
from placement import microversion
from placement import util as placement_util
from placement.handlers import allocation_candidate

CONF = nova.conf.CONF
MODULES = ("test_utils", "test_request_filter", "test_manager")
NODES = {1: "5e9a4b5c-0d9e-4b5f-8f8e-6d1f6c2b7a01", 2: "5e9a4b5c-0d9e-4b5f-8f8e-6d1f6c2b7a02"}
CELL = "5e9a4b5c-0d9e-4b5f-8f8e-6d1f6c2b7ace"
OF_PLACEMENT = microversion_parse.Version(1, 36)  # as Nova's report client asks
OF_PLACEMENT.min_version, OF_PLACEMENT.max_version = (1, 0), (1, 39)  # of the server


class AskedNeutron(Exception):
    """Nova would ask Neutron here."""


class Recorder:
    """The RequestSpecs that were handed over, each once with its settings."""

    def __init__(self) -> None:
        self.specs: dict[str, tuple[Any, dict[str, Any]]] = {}
        self.calls = 0
        self.unserialisable = 0
        self._depth = 0  # of recorded functions that call one another: what the outermost is given counts

    def take(self, spec: object) -> None:
        self.calls += 1
        if not isinstance(spec, objects.RequestSpec):
            self.unserialisable += 1
            return
        try:
            whole = objects.RequestSpec.obj_from_primitive(json.loads(jsonutils.dumps(spec.obj_to_primitive())))
            complete(whole)
            primitive = json.loads(jsonutils.dumps(whole.obj_to_primitive()))
        except Exception:  # a stand-in of a test for one of its objects, or a field that Nova itself cannot read back
            self.unserialisable += 1
            return
        self.add(primitive, of_queries(CONF))

    def add(self, primitive: dict[str, Any], settings: dict[str, Any]) -> None:
        primitive.pop("nova_object.changes", None)
        self.specs.setdefault(json.dumps([primitive, settings], sort_keys=True), (primitive, settings))

    def hooked(self, function: Callable[..., Any], position: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                found = [one for one in (*args, *kwargs.values()) if isinstance(one, objects.RequestSpec)]
                self.take(found[0] if found else args[position] if len(args) > position else None)
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return wrapper


def complete(spec: Any) -> None:
    """Set what is not set."""
    set_missing(
        spec,
        flavor=objects.Flavor(extra_specs={}),
        image=objects.ImageMeta(properties=objects.ImageMetaProps()),
        is_bfv=False,
        scheduler_hints={},
        **dict.fromkeys(("project_id", "user_id"), "nobody"),
        **dict.fromkeys(("availability_zone", "numa_topology", "pci_requests", "ignore_hosts", "force_hosts")),
        **dict.fromkeys(("force_nodes", "requested_destination", "retry", "limits", "instance_group")),
    )
    flavor = {"name": "plain", "vcpus": 1, "memory_mb": 512, "root_gb": 10, "ephemeral_gb": 0, "swap": 0}
    set_missing(spec.flavor, **flavor, extra_specs={})
    if spec.image is not None:
        set_missing(spec.image, properties=objects.ImageMetaProps(), disk_format="qcow2")


def set_missing(one: Any, **values: Any) -> None:
    for name, value in values.items():
        if name not in one:
            setattr(one, name, value)


def record(recorder: Recorder) -> unittest.TestResult:
    from_spec = utils.ResourceRequest.from_request_spec.__func__
    utils.ResourceRequest.from_request_spec = classmethod(recorder.hooked(from_spec, 1))
    utils.resources_from_request_spec = recorder.hooked(utils.resources_from_request_spec, 1)
    request_filter.process_reqspec = recorder.hooked(request_filter.process_reqspec, 1)
    filters = list(request_filter.ALL_REQUEST_FILTERS)
    request_filter.ALL_REQUEST_FILTERS[:] = [recorder.hooked(one, 1) for one in filters]
    for one in request_filter.ALL_REQUEST_FILTERS:
        setattr(request_filter, one.__name__, one)
    select = manager.SchedulerManager.select_destinations
    manager.SchedulerManager.select_destinations = recorder.hooked(select, 2)
    loader = unittest.TestLoader()
    suite = loader.loadTestsFromNames([f"nova.tests.unit.scheduler.{name}" for name in MODULES])
    result = unittest.TextTestRunner(stream=sys.stderr, verbosity=0).run(suite)
    utils.ResourceRequest.from_request_spec = classmethod(from_spec)
    utils.resources_from_request_spec = utils.resources_from_request_spec.__wrapped__
    request_filter.process_reqspec = request_filter.process_reqspec.__wrapped__
    request_filter.ALL_REQUEST_FILTERS[:] = filters
    for one in filters:
        setattr(request_filter, one.__name__, one)
    manager.SchedulerManager.select_destinations = select
    return result


class Nodes:
    """The host manager's part: the compute nodes of a world."""

    def __init__(self, nodes: list[dict[str, str]]) -> None:
        self.nodes = nodes

    def get_compute_nodes_by_host_or_node(self, _context: Any, host: Any, node: Any, cell: Any = None) -> list[Any]:
        return [
            objects.ComputeNode(host=one["host"], hypervisor_hostname=one["node"], uuid=one["uuid"])
            for one in self.nodes
            if host in (None, "", one["host"]) and node in (None, "", one["node"])
            if cell is None or cell.uuid == one["cell"]
        ]


def aggregates_of(project: str | None, zone: str | None) -> list[dict[str, Any]]:
    """Of a project and a zone, of others, and those kept for traits."""
    uuid = "a99de9a1-0d9e-4b5f-8f8e-6d1f6c2b7a{:02}".format
    project, zone = project or "nobody", zone or "nowhere"
    metadata = [
        {"filter_tenant_id": project, "availability_zone": zone},
        {"filter_tenant_id_2": project, "filter_tenant_id": "another"},
        {"filter_tenant_id": f"{project},another"},
        {"owner": project},
        {"availability_zone": f"not-{zone}"},
        {"availability_zone": zone, "trait:HW_CPU_X86_AVX": "required"},
        {"trait:CUSTOM_LICENSED_WINDOWS": "required", "trait:HW_CPU_X86_AVX": "required"},
        {"trait:HW_CPU_X86_SGX": "required"},
        {"trait:HW_CPU_X86_MMX": "forbidden"},
        {},
    ]
    return [{"uuid": uuid(at), "name": f"aggregate {at}", "metadata": one} for at, one in enumerate(metadata)]


def worlds(primitive: dict[str, Any], captured: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Settings, aggregates, nodes and whether the trait of the owner is required."""
    data = primitive["nova_object.data"]
    all_on = captured | {name: True for name, value in captured.items() if value is False}
    routed = "query_placement_for_routed_network_aggregates"
    aggregates = aggregates_of(data.get("project_id"), data.get("availability_zone"))
    asked = (data.get("requested_destination") or {}).get("nova_object.data", {})
    host = asked.get("host") or next(iter(data.get("force_hosts") or ()), None)
    node = asked.get("node") or next(iter(data.get("force_nodes") or ()), None)
    cell = ((asked.get("cell") or {}).get("nova_object.data") or {}).get("uuid", CELL)
    known = [
        {"uuid": NODES[at], "host": host or "host", "node": (node if at == 1 else None) or f"node {at}", "cell": cell}
        for at in NODES
    ]
    for settings, some, has_owner in (
        (captured, [], False),
        (captured, aggregates, True),
        (captured | {"image_metadata_prefilter": True}, aggregates, False),
        (all_on | {routed: False}, aggregates, True),
        (all_on | {routed: False, "placement_aggregate_required_for_tenants": False}, [], False),
        (all_on, aggregates, True),
    ):
        yield {"settings": settings, "aggregates": some, "nodes": known[:1], "requires_owner": has_owner}
    if host or node:
        for nodes in ([], known, [known[0] | {"cell": NODES[1]}]):
            yield {"settings": captured, "aggregates": [], "nodes": nodes, "requires_owner": True}


class Replay(nova_test.TestCase):
    """Nova's own pipeline on one database."""

    def runTest(self) -> None:  # noqa: N802 - unittest's name
        """Nothing: `query` is called."""

    def set_aggregates(self, aggregates: list[dict[str, Any]]) -> None:
        context = nova_context.get_admin_context()
        for one in objects.AggregateList.get_all(context):
            one.destroy()
        for one in aggregates:
            made = objects.Aggregate(context, uuid=one["uuid"], name=one["name"])
            made.create()
            if one["metadata"]:
                made.update_metadata(one["metadata"])

    def set_settings(self, settings: dict[str, Any]) -> None:
        for name, group in PREFILTERS.items():
            CONF.set_override(name, settings[name], group=group)

    def query(self, primitive: dict[str, Any], world: dict[str, Any], pinning: bool) -> dict[str, Any]:
        context = nova_context.get_admin_context()
        spec = objects.RequestSpec.obj_from_primitive(copy.deepcopy(primitive))
        since = getattr(request_filter, "MIN_COMPUTE_VERSION_OWNER_TRAIT", 1)  # releases before 34 have none
        version = since - (not world["requires_owner"])
        tagged = {
            one.requester_id
            for one in (spec.pci_requests.requests if "pci_requests" in spec and spec.pci_requests else ())
            if "spec" in one and any(each.get("remote_managed") == "True" for each in one.spec)
        }
        patches = (
            mock.patch.object(objects.service, "get_minimum_version_all_cells", return_value=version),
            mock.patch.object(neutron.API, "is_remote_managed_port", lambda _self, _context, port: port in tagged),
            mock.patch.object(neutron.API, "show_port", side_effect=AskedNeutron),
            mock.patch.object(utils, "get_aggregates_for_routed_network", side_effect=AskedNeutron),
            mock.patch.object(utils, "get_aggregates_for_routed_subnet", side_effect=AskedNeutron),
        )
        for one in patches:
            one.start()
        try:
            request_filter.process_reqspec(context, spec)
            resources = utils.resources_from_request_spec(context, spec, Nodes(world["nodes"]), pinning)
            text = resources.to_querystring()
            return {"querystring": text, "pinned": resources.cpu_pinning_requested, "refused": refused(text)}
        except (exception.RequestFilterFailed, exception.NoValidHost) as error:
            return {"no_valid_host": str(error)}
        except Exception as error:
            return {"raised": type(error).__name__}
        finally:
            for one in patches:
                one.stop()


def refused(querystring: str) -> str | None:
    """Why Placement's handler answers 400 before it looks for candidates."""
    request = webob.Request.blank(f"/allocation_candidates?{querystring}")
    request.environ[microversion.MICROVERSION_ENVIRON] = OF_PLACEMENT
    try:
        placement_util.validate_query_params(request, allocation_candidate._get_schema(OF_PLACEMENT))
        wide = placement_lib.RequestWideParams.from_request(request)
        groups = placement_lib.RequestGroup.dict_from_request(request, wide)
    except webob.exc.HTTPBadRequest as error:
        return str(error)
    if not wide.group_policy and sum(one.use_same_provider for one in groups.values()) > 1:
        return "group_policy"
    return None


def is_readable(primitive: dict[str, Any]) -> bool:
    """Whether this release reads a spec that a newer one has written."""
    try:
        objects.RequestSpec.obj_from_primitive(copy.deepcopy(primitive))
    except versioned.IncompatibleObjectVersion:
        return False
    return True


def main(path: str, *specs: str) -> None:
    recorder = Recorder()
    result = record(recorder)
    for one in specs:
        for line in Path(one).read_text().splitlines():
            asked = json.loads(line)
            if is_readable(asked["spec"]):
                recorder.add(asked["spec"], asked["settings"])
    replay = Replay()
    replay.setUp()
    asked = [(spec, world) for spec, settings in recorder.specs.values() for world in worlds(spec, settings)]
    asked.sort(key=lambda one: json.dumps(one[1]["aggregates"]))  # each set of aggregates is made once
    cases = []
    try:
        for aggregates, some in itertools.groupby(asked, key=lambda one: one[1]["aggregates"]):
            replay.set_aggregates(aggregates)
            for spec, world in some:
                replay.set_settings(world["settings"])
                for pinning in (True, False):
                    expected = replay.query(spec, world, pinning)
                    cases.append({"spec": spec, "world": world, "pinning": pinning, "expected": expected})
                    if not expected.get("pinned"):
                        break
    finally:
        replay.doCleanups()
    captured = {
        "release": int(metadata.version("nova").partition(".")[0]),
        "tests": result.testsRun,
        "failed": [str(test) for test, _ in (*result.errors, *result.failures)],
        "calls": recorder.calls,
        "unserialisable": recorder.unserialisable,
        "specs": len(recorder.specs),
        "cases": cases,
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(captured, file)
    sys.stderr.write(json.dumps({name: one for name, one in captured.items() if name != "cases"}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
