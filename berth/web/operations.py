"""`/api/v1` for hosts, services, workers, cells, bare metal, drains, and requests about instances that are built."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from berth.bus_client import drains as client_drains
from berth.bus_client.baremetal import QUARANTINE, flavor_classes, node_record, unserved
from berth.client.types import (
    ActionResponse,
    AdminStateRequest,
    DrainBody,
    DrainCommandBody,
    DrainKind,
    MetricsBody,
    MetricsPublished,
    NodeMaintenance,
    NodeRecord,
    NodesView,
    RemovalBody,
    TargetBody,
)
from berth.config.settings import Settings
from berth.config.site import ironic_of
from berth.status.reader import StatusReader
from berth.web.api import (
    API_ROOT,
    ASK_TIMEOUT_S,
    MAX_PAGE,
    Handlers,
    WebApi,
    caller_of,
    converted,
    json_response,
    may_change,
    message_of,
    number_of,
    object_of,
    parsed,
    route,
    truth_of,
    uuid_of,
)
from berth.web.pages.fleet import MAX_SERVICES, FleetReader
from berth.web.pages.objects import ObjectApi
from berth.web.problems import Problem, problem_of
from berth.web.sign_in_sessions import WebRole
from berth.why import explained
from bus.bus import Bus
from bus.clock import Clock, new_uuid
from bus.contracts.actions import ActionAccepted, ActionKind, ActionPage, ActionQuery, ActionRequest
from bus.contracts.base import Label, Uuid
from bus.contracts.drains import (
    DrainAction,
    DrainCommand,
    DrainPlan,
    DrainProgress,
    DrainQuery,
    DrainsQuery,
    DrainStart,
    DrainTarget,
)
from bus.contracts.host_metrics import (
    HostMetrics,
    HostMetricsPage,
    HostMetricsQuery,
    HostMetricsRecord,
    HostReading,
)
from bus.contracts.objects import ObjectKind
from bus.contracts.operations import (
    AdminStateSet,
    DeleteHost,
    DeleteService,
    HostDeleted,
    ServiceDeleted,
    ServicesQuery,
    SetAdminState,
)
from bus.contracts.workers import WorkersQuery
from bus.faults import Fault
from bus.service.settings import hide_password
from bus.transport import BusError
from compute_agent.driver import DriverUnavailable
from compute_agent.drivers.ironic.api import IronicApi

MAX_WORKERS = 100_000


class WebOperations(Handlers):
    """The handlers. Each takes a request of a caller that is known."""

    def __init__(self, bus: Bus, fleet: FleetReader, clock: Clock) -> None:
        self._bus = bus
        self._fleet = fleet
        self._clock = clock

    @route("GET", "/hosts/{host}", role=WebRole.READER)
    async def show_host(self, request: Request) -> object:
        """One host by uuid or name, with its tree, inventories and allocations. Not for role project."""
        return await self._fleet.detail(request.path_params["host"], fresh=True)

    @route("GET", "/hosts/{host}/claims", "after", role=WebRole.READER)
    async def list_claims(self, request: Request) -> object:
        """What placement has allocated on a host, by consumer: ?after=. Not for role project."""
        after = parsed(lambda: msgspec.convert(request.query_params.get("after"), Uuid | None))
        return await self._fleet.claims(request.path_params["host"], after)

    @route("GET", "/hosts/{host}/metrics", role=WebRole.READER)
    async def show_metrics(self, request: Request) -> object:
        """The numbers that are known of a host (power, temperature), or of each host of that name. Not for role
        project.
        """
        return await self._metrics(request)

    @route("POST", "/hosts/{host}/metrics", role=WebRole.OPERATOR)
    async def publish_metrics(self, request: Request) -> object:
        """Publish numbers about one host, as of now. For operators."""
        body = converted(await object_of(request), MetricsBody)
        found = await self._metrics(request)
        if len(found) > 1:
            places = ", ".join(one.host_uuid for one in found)
            raise Problem(409, "host.ambiguous", f"{len(found)} hosts are called so: name one of {places}")
        reading = HostReading(host_uuid=found[0].host_uuid, at=self._clock.time(), values=body.values)
        await self._bus.publish(HostMetrics(source=body.source, readings=(reading,)))
        return json_response(MetricsPublished(reading.host_uuid, reading.at), 202)

    async def _metrics(self, request: Request) -> tuple[HostMetricsRecord, ...]:
        query = parsed(lambda: msgspec.convert(request.path_params, HostMetricsQuery))
        page = await self._bus.request(query, HostMetricsPage, timeout_s=ASK_TIMEOUT_S)
        if not page.hosts:
            raise Problem(404, "host.unknown", f"no host {query.host} is known")
        return page.hosts

    @route("PUT", "/hosts/{host}/admin-state", role=WebRole.OPERATOR)
    async def decide_about_host(self, request: Request) -> object:
        """Disable a host, put it under maintenance, fence it, or enable it. For operators."""
        caller = caller_of(request)
        decision = converted(await object_of(request), AdminStateRequest)
        command = parsed(
            lambda: msgspec.convert(
                {"host": request.path_params["host"], "by": caller.name, **msgspec.to_builtins(decision)},
                SetAdminState,
            )
        )
        answer = await self._bus.request(command, AdminStateSet, timeout_s=ASK_TIMEOUT_S)
        return answer.host

    @route("POST", "/hosts/{host}/delete", role=WebRole.OPERATOR)
    async def delete_host(self, request: Request) -> object:
        """Delete a decommissioned host: its providers leave placement, its decision the record. For
        operators.
        """
        return await self._remove(request, DeleteHost, HostDeleted)

    @route("GET", "/services", "cell", "up", "limit", role=WebRole.READER)
    async def list_services(self, request: Request) -> object:
        """Compute services: ?cell=&up=true|false&limit=. Not for role project."""
        requested = {
            "cell": request.query_params.get("cell"),
            "up": truth_of(request, "up"),
            "limit": number_of(request, "limit", 1000, most=MAX_SERVICES),
        }
        query = parsed(lambda: msgspec.convert(requested, ServicesQuery))
        return await self._fleet.services(query)

    @route("POST", "/services/{service}/delete", role=WebRole.OPERATOR)
    async def delete_service(self, request: Request) -> object:
        """Delete a decommissioned compute service: its cell drops its lease. For operators."""
        return await self._remove(request, DeleteService, ServiceDeleted)

    @route("GET", "/workers", "role", "limit", role=WebRole.READER)
    async def list_workers(self, request: Request) -> object:
        """Workers by their heartbeats: ?role=&limit=. Not for role project."""
        limit = number_of(request, "limit", 1000, most=MAX_WORKERS)
        requested = {"role": request.query_params.get("role"), "limit": limit}
        page = await self._fleet.workers(parsed(lambda: msgspec.convert(requested, WorkersQuery)))
        return page.workers

    @route("GET", "/cells", role=WebRole.READER)
    async def list_cells(self, request: Request) -> object:
        """Cells with their services and hosts. Not for role project."""
        return await self._fleet.cells()

    async def _remove(
        self,
        request: Request,
        command: type[DeleteHost | DeleteService],
        answer: type[HostDeleted] | type[ServiceDeleted],
    ) -> object:
        body = converted(await object_of(request), RemovalBody)
        fields = {**request.path_params, "by": caller_of(request).name, **msgspec.to_builtins(body)}
        parsed_command = parsed(lambda: msgspec.convert(fields, command))
        return await self._bus.request(parsed_command, answer, timeout_s=ASK_TIMEOUT_S)


class WebActions(Handlers):
    """The handlers. Each takes a request of a caller that is known."""

    def __init__(self, bus: Bus, api: WebApi, rng: random.Random) -> None:
        self._bus = bus
        self._api = api
        self._rng = rng

    @route("POST", "/builds/{uuid}/actions")
    async def create_action(self, request: Request) -> object:
        """Ask for one thing with one instance. Idempotent by request_id; without one, a new one is made up."""
        caller = caller_of(request)
        uuid = uuid_of(request)
        fields = await object_of(request)
        build = await self._api.build(uuid, caller, to_change=True)
        may_change(caller)
        for name, value in (("instance_uuid", uuid), ("project_id", build.project_id)):
            if fields.setdefault(name, value) != value:
                raise Problem(400, "request.invalid", f"{name} is not that of the instance in the path")
        fields.setdefault("request_id", new_uuid(self._rng))
        action = message_of({**fields, "by": caller.name}, ActionRequest, caller)
        await self._api.send(action, ActionAccepted, action.request_id)
        here = f"{API_ROOT}/actions/{action.request_id}"
        body = ActionResponse(action.request_id, uuid, {"self": here, "instance": f"{API_ROOT}/builds/{uuid}"})
        return json_response(body, 202, {"location": here})

    @route("GET", "/builds/{uuid}/why", "request")
    async def explain_build(self, request: Request) -> object:
        """Why an instance is as it is, by its newest request, or its build; or why a request about it is: ?request=."""
        build = await self._api.build(uuid_of(request), caller_of(request))
        named = request.query_params.get("request")
        of = {"instance_uuid": build.instance_uuid} if named is None else {"request_id": named}
        query = parsed(lambda: msgspec.convert({**of, "project_id": build.project_id, "limit": 1}, ActionQuery))
        found = next(iter((await self.actions(query)).actions), None)
        if named is not None and (found is None or found.instance_uuid != build.instance_uuid):
            raise Problem(404, "action.unknown", f"no request {named} about this instance is on record")
        return explained(build, found, is_named=named is not None)

    @route("GET", "/actions", "instance", "project", "under_way", "limit")
    async def list_actions(self, request: Request) -> object:
        """Requests about instances, newest first: ?instance=&project=&under_way=true|false&limit=."""
        query, caller = request.query_params, caller_of(request)
        project = query.get("project", caller.sees)
        if caller.sees is not None and project != caller.sees:
            raise Problem(403, "project.forbidden", f"this token sees project {caller.sees}")
        requested = {
            "instance_uuid": query.get("instance"),
            "project_id": project,
            "under_way": truth_of(request, "under_way"),
            "limit": number_of(request, "limit", 100, most=MAX_PAGE),
        }
        page = await self.actions(parsed(lambda: msgspec.convert(requested, ActionQuery)))
        return page.actions

    @route("GET", "/actions/{uuid}")
    async def show_action(self, request: Request) -> object:
        """One request about an instance, and how it has ended."""
        uuid, caller = uuid_of(request), caller_of(request)
        page = await self.actions(ActionQuery(request_id=uuid))
        found = next((one for one in page.actions if caller.sees in (None, one.project_id)), None)
        if found is None:
            raise Problem(404, "action.unknown", f"no request {uuid} is on record")
        return found

    async def actions(self, query: ActionQuery) -> ActionPage:
        """Ask a scheduler for requests about instances."""
        return await self._bus.request(query, ActionPage, timeout_s=ASK_TIMEOUT_S)


# Ironic is read at most so often, however many pages show it.
METAL_AGE_S = 5.0


class NodesReader:
    """Reads Ironic as the compute service's settings have it, or as a running `berth up` has one."""

    def __init__(self, settings: Settings, objects: ObjectApi, clock: Clock) -> None:
        self._settings = settings
        self._objects = objects
        self._clock = clock
        self._reading = asyncio.Lock()
        self._found: NodesView | Problem = Problem(503, "ironic.unavailable", "Ironic has not been read yet")
        self._read_at = float("-inf")

    async def view(self) -> NodesView:
        """Ironic's nodes, at most METAL_AGE_S old. Raises Problem 503 or 504; that is kept as long, so that requests
        that came meanwhile do not wait for Ironic one after the other.
        """
        async with self._reading:
            if self._clock.monotonic() - self._read_at > METAL_AGE_S:
                self._found = await self._read_or_fault()
                self._read_at = self._clock.monotonic()
        if isinstance(self._found, Problem):
            kept = self._found
            raise Problem(kept.status, kept.code, kept.detail, headers=kept.headers)
        return self._found

    async def nodes_to_count(self) -> tuple[NodeRecord, ...]:
        """The same nodes. Raises Fault."""
        try:
            return (await self.view()).nodes
        except Problem as problem:
            raise Fault(problem.detail, code=problem.code) from None

    async def _read_or_fault(self) -> NodesView | Problem:
        try:
            return await self._read()
        except (Problem, Fault, BusError) as fault:
            problem = problem_of(fault)
            assert problem is not None, fault
            return problem

    @asynccontextmanager
    async def _ironic(self) -> AsyncIterator[IronicApi]:
        config = ironic_of(self._settings) or self._settings.compute.ironic
        api = IronicApi(config, clock=self._clock)
        api.open()
        try:
            yield api
        except DriverUnavailable as fault:
            raise Problem(503, "ironic.unavailable", f"{hide_password(config.url)}: {fault}") from fault
        finally:
            await api.close()

    async def set_maintenance(self, node: str, reason: str | None) -> NodeRecord:
        """Put a node into maintenance with a reason; None: take it out of that which berth has set. Raises Problem."""
        classes = await self._classes()
        async with self._ironic() as api:
            known = await _raw_node(api, node)
            was = str(known.get("maintenance_reason") or "")
            if reason is None and not (known.get("maintenance") and was.startswith(QUARANTINE)):
                raise Problem(409, "node.not_quarantined", f"node {node} is not in quarantine by berth: {was or '-'}")
            if reason is None:
                refused = await api.set_maintenance(node, on=False)
            else:
                refused = await api.set_maintenance(node, on=True, reason=f"{QUARANTINE}{reason}")
            if refused is not None:
                raise Problem(409, "ironic.refused", str(refused))
            self._read_at = float("-inf")
            return node_record(await _raw_node(api, node), classes)

    async def _classes(self) -> dict[str, tuple[str, ...]]:
        """By the flavors on record: an operator changes them while everything runs."""
        _, stored = await self._objects.stored(ObjectKind.FLAVOR)
        return flavor_classes(stored)

    async def _read(self) -> NodesView:
        config = ironic_of(self._settings) or self._settings.compute.ironic
        classes = await self._classes()
        async with self._ironic() as api:
            raw = await api.raw_nodes()
        nodes = tuple(sorted((node_record(one, classes) for one in raw), key=lambda node: node.uuid))
        states = dict(sorted(Counter(node.state for node in nodes).items()))
        return NodesView(
            url=hide_password(config.url), states=states, nodes=nodes, unserved_flavors=unserved(classes, nodes)
        )


async def _raw_node(api: IronicApi, node: str) -> dict[str, Any]:
    raw = await api.raw_node(node)
    if raw is None:
        raise Problem(404, "node.unknown", f"Ironic has no node {node}")
    return raw


class WebNodes(Handlers):
    """The handler."""

    def __init__(self, metal: NodesReader) -> None:
        self._nodes = metal

    @route("GET", "/metal", role=WebRole.READER)
    async def show_nodes(self, request: Request) -> object:
        """Ironic's nodes by provision state, with what is wrong with each. Not for role project."""
        return await self._nodes.view()

    @route("PUT", "/metal/{node}/maintenance", role=WebRole.OPERATOR)
    async def set_node_maintenance(self, request: Request) -> object:
        """Put a node into maintenance in Ironic, with a reason: no build goes there. For operators."""
        body = converted(await object_of(request), NodeMaintenance)
        return await self._nodes.set_maintenance(_node_of(request), body.reason)

    @route("DELETE", "/metal/{node}/maintenance", role=WebRole.OPERATOR)
    async def end_node_maintenance(self, request: Request) -> object:
        """Take a node out of the maintenance that berth has set; another's is left alone. For operators."""
        return await self._nodes.set_maintenance(_node_of(request), None)


def _node_of(request: Request) -> str:
    return parsed(lambda: msgspec.convert(request.path_params["node"], Label))


class WebStatus(Handlers):
    """The handler."""

    def __init__(self, status: StatusReader) -> None:
        self._status = status

    @route("GET", "/status", role=WebRole.READER)
    async def show_status(self, request: Request) -> object:
        """All that waits for a person, the worst first, each with its age and the next command; a part that cannot be
        read is a row of its own, and the answer is 200. Not for role project.
        """
        del request
        return await self._status.read()


# A plan simulates a placement for each instance of its target: seconds for thousands. A person waits no longer.
PLAN_TIMEOUT_S = 20.0


class Drains:
    """The reads and commands of the pages and the API about drains."""

    def __init__(self, bus: Bus, rng: random.Random) -> None:
        self._bus = bus
        self._rng = rng

    async def plan(self, query: DrainQuery) -> DrainPlan:
        """Where each instance of a target would go now; nothing is begun, and nothing is held."""
        return await client_drains.plan(self._bus, query, timeout_s=PLAN_TIMEOUT_S)

    async def start(self, name: str, target: DrainTarget | None, body: DrainBody, by: str) -> DrainProgress:
        """Begin a drain."""
        command = DrainStart(
            drain=body.id or new_uuid(self._rng),
            name=name,
            target=target,
            cell=body.cell,
            kind=ActionKind(body.kind),
            at_once=body.at_once,
            per_minute=body.per_minute,
            deadline_s=body.deadline_s,
            force=body.force,
            reason=body.reason,
            by=by,
        )
        return await client_drains.start(self._bus, command)

    async def list_all(self, limit: int = 100) -> list[DrainProgress]:
        """The drains there are, the newest first, without their instances."""
        return list(await client_drains.drains(self._bus, DrainsQuery(limit=limit), timeout_s=ASK_TIMEOUT_S))

    async def get(self, ident: str) -> DrainProgress:
        """One of them. Raises Problem 404."""
        query = parsed(lambda: msgspec.convert({"drain": ident}, DrainsQuery))
        found = await client_drains.drains(self._bus, query, timeout_s=ASK_TIMEOUT_S)
        if not found:
            raise Problem(404, "drain.unknown", f"no drain {ident} is on record")
        return found[0]

    async def command(self, ident: str, action: DrainAction, body: DrainCommandBody, by: str) -> DrainProgress:
        """Pause, resume or stop it. Raises Problem 404."""
        await self.get(ident)
        command = DrainCommand(drain=ident, action=action, by=by, reason=body.reason, deadline_s=body.deadline_s)
        return await client_drains.command(self._bus, command)


class WebDrains(Handlers):
    """The handlers. Each takes a request of a caller that is known."""

    def __init__(self, drains: Drains) -> None:
        self._drains = drains

    @route("GET", "/hosts/{host}/drain-plan", "kind", "cell", role=WebRole.READER)
    async def plan_drain(self, request: Request) -> object:
        """Where each instance of a host would go now: ?kind=live-migrate|migrate&cell=. Not for role project."""
        return await self._plan(request, request.path_params["host"], DrainTarget.HOST)

    @route("GET", "/drain-plan", "kind", "cell", "name", "target", role=WebRole.READER)
    async def plan_target(self, request: Request) -> object:
        """The same of ?name=&target=host|service|cell|aggregate. Not for role project."""
        return await self._plan(request, request.query_params.get("name", ""), request.query_params.get("target"))

    @route("POST", "/hosts/{host}/drain", role=WebRole.OPERATOR)
    async def start_drain(self, request: Request) -> object:
        """Disable a host and move every instance away from it, a few at a time. For operators."""
        body = converted(await object_of(request), DrainBody)
        host = parsed(lambda: msgspec.convert(request.path_params["host"], Label))
        return await self._start(request, host, DrainTarget.HOST, body)

    @route("POST", "/drains", role=WebRole.OPERATOR)
    async def drain_target(self, request: Request) -> object:
        """The same of every host of a compute service, a cell or an aggregate. For operators."""
        body = converted(await object_of(request), TargetBody)
        return await self._start(request, body.name, body.target, body)

    @route("GET", "/drains", "limit", role=WebRole.READER)
    async def list_drains(self, request: Request) -> object:
        """The drains there are, newest first: ?limit=. Not for role project."""
        return await self._drains.list_all(number_of(request, "limit", 100, most=MAX_PAGE))

    @route("GET", "/drains/{uuid}", role=WebRole.READER)
    async def show_drain(self, request: Request) -> object:
        """The progress of a drain, and the state of each instance. Not for role project."""
        return await self._drains.get(uuid_of(request))

    @route("DELETE", "/drains/{uuid}", "reason", role=WebRole.OPERATOR)
    async def stop_drain(self, request: Request) -> object:
        """Begin nothing more of a drain; what is under way ends by itself: ?reason=. For operators."""
        body = converted({"reason": request.query_params.get("reason", "")}, DrainCommandBody)
        return await self._drains.command(uuid_of(request), DrainAction.STOP, body, caller_of(request).name)

    @route("POST", "/drains/{uuid}/pause", role=WebRole.OPERATOR)
    async def pause_drain(self, request: Request) -> object:
        """Begin no further move until it is resumed. For operators."""
        return await self._command(request, DrainAction.PAUSE)

    @route("POST", "/drains/{uuid}/resume", role=WebRole.OPERATOR)
    async def resume_drain(self, request: Request) -> object:
        """Go on, also with one that has ended: what has failed is tried again. For operators."""
        return await self._command(request, DrainAction.RESUME)

    async def _plan(self, request: Request, name: str, target: str | None) -> DrainPlan:
        kind = request.query_params.get("kind", "live-migrate")
        parsed(lambda: msgspec.convert(kind, DrainKind))
        requested = {"host": name, "kind": kind, "cell": request.query_params.get("cell"), "target": target}
        return await self._drains.plan(parsed(lambda: msgspec.convert(requested, DrainQuery)))

    async def _start(self, request: Request, name: str, target: DrainTarget | None, body: DrainBody) -> Response:
        begun = await self._drains.start(name, target, body, caller_of(request).name)
        return json_response(begun, 202, {"location": f"{API_ROOT}/drains/{begun.id}"})

    async def _command(self, request: Request, action: DrainAction) -> DrainProgress:
        body = converted(await object_of(request), DrainCommandBody)
        return await self._drains.command(uuid_of(request), action, body, caller_of(request).name)
