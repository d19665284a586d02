"""The OpenAPI document of `/api/v1`, derived from the messages' own structs and the handlers' docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.routing import Route

from berth.asyncapi import add_field_notes
from berth.client.login import LoginOffer
from berth.client.repair_types import (
    BreakersAfterReset,
    BreakersReset,
    BreakerView,
    DeadLetterCount,
    DeadLettersPurged,
    DeadLettersReplayed,
    DeadLetterView,
    LossesAccepted,
    QuarantineDecided,
    QuarantineDecision,
    QuarantinePage,
    Recovery,
    ReplayBody,
    WithoutService,
)
from berth.client.status import SystemStatus
from berth.client.types import (
    Accepted,
    ActionResponse,
    AdminStateRequest,
    Builds,
    CallerView,
    CellView,
    ChangeBody,
    DrainBody,
    DrainCommandBody,
    FleetPoint,
    GroupView,
    HostClaims,
    HostDetail,
    MetricsBody,
    MetricsPublished,
    NodeMaintenance,
    NodeRecord,
    NodesView,
    ObjectList,
    ProblemBody,
    QuotaUse,
    RemovalBody,
    TargetBody,
    TokenBody,
    TokenCreated,
    TokenRevoked,
    TokenView,
    Why,
    Zone,
)
from berth.web.problems import PROBLEM_JSON
from bus.contracts.actions import ActionRecord, ActionRequest
from bus.contracts.base import Label, Reason, Uuid, Version, Word
from bus.contracts.build import BuildRecord, BuildRequest, BuildState, HostRecord
from bus.contracts.drains import DrainPlan, DrainProgress, DrainTarget
from bus.contracts.host_metrics import HostMetricsRecord
from bus.contracts.objects import (
    Aggregate,
    CellDecision,
    Flavor,
    GroupDefinition,
    ObjectKind,
    ObjectLogEntry,
    ObjectsChanged,
    ProjectQuota,
    SchedulingRules,
    StoredObject,
)
from bus.contracts.operations import HostAdminState, HostDeleted, ServiceDeleted, ServiceRecord
from bus.contracts.workers import WorkerRecord
from bus.distribution import version

_REF = "#/components/schemas/{name}"


class _Operation(Struct, frozen=True):
    """The parts that a handler's signature does not contain: its parameters, body, answer and statuses of errors."""

    answer: Any
    status: int = 200
    body: Any = None
    query: dict[str, Any] = {}
    errors: tuple[int, ...] = ()
    stream: bool = False


# The kinds of the parameters in paths.
_IN_PATH: dict[str, Any] = {
    "uuid": Uuid,
    "host": Label,
    "node": Label,
    "service": Word,
    "name": Label,
    "token": Word,
    "project": Word,
    "bus": Word,
    "queue": Label,
    "dead_letter": Label,
    "cell": Word,
}
_WRITES = (400, 403, 413, 415, 422, 429)
_READS = (400, 403)


def _operations() -> dict[str, _Operation]:
    return _of_callers() | _of_instances() | _of_hosts() | _of_objects() | _of_dead_letters() | _of_quarantine()


def _of_callers() -> dict[str, _Operation]:
    return {
        "show_login": _Operation(LoginOffer),
        "show_caller": _Operation(CallerView),
        "create_token": _Operation(TokenCreated, 201, TokenBody, errors=(409, *_WRITES)),
        "list_tokens": _Operation(tuple[TokenView, ...], errors=_READS),
        "revoke_token": _Operation(TokenRevoked, errors=(404, *_READS)),
    }


def _of_instances() -> dict[str, _Operation]:

    builds = {"project": Word, "state": BuildState, "cell": Word, "host": Label, "flavor": Label, "code": Label}
    builds |= {"gang": Uuid, "name": Label, "after": float, "before": float, "before_instance": Uuid, "limit": int}
    actions = {"instance": Uuid, "project": Word, "under_way": bool, "limit": int}
    return {
        "create_build": _Operation(Accepted, 202, BuildRequest, errors=(409, *_WRITES)),
        "list_builds": _Operation(Builds, query=builds, errors=_READS),
        "show_build": _Operation(BuildRecord, errors=(400, 404)),
        "explain_build": _Operation(Why, query={"request": Uuid}, errors=(400, 404)),
        "delete_build": _Operation(Accepted, 202, errors=(404, 409, *_WRITES)),
        "follow_build": _Operation(str, query={"until": Literal["end", "deleted"]}, errors=(400, 404), stream=True),
        "follow_all": _Operation(str, errors=(400,), stream=True),
        "create_action": _Operation(ActionResponse, 202, ActionRequest, errors=(404, 409, *_WRITES)),
        "list_actions": _Operation(tuple[ActionRecord, ...], query=actions, errors=_READS),
        "show_action": _Operation(ActionRecord, errors=(400, 404)),
    }


def _of_hosts() -> dict[str, _Operation]:

    listed = {"cell": Word, "up": bool, "limit": int}
    plan = {"kind": Literal["live-migrate", "migrate"], "cell": Word}
    of_target = {**plan, "name": Label, "target": DrainTarget}
    return {
        "list_hosts": _Operation(tuple[HostRecord, ...], query=listed, errors=_READS),
        "show_host": _Operation(HostDetail, errors=(404, 409, *_READS)),
        "show_metrics": _Operation(tuple[HostMetricsRecord, ...], errors=(404, *_READS)),
        "publish_metrics": _Operation(MetricsPublished, 202, body=MetricsBody, errors=(404, 409, *_WRITES)),
        "list_claims": _Operation(HostClaims, query={"after": Uuid}, errors=(404, 409, *_READS)),
        "decide_about_host": _Operation(HostAdminState, body=AdminStateRequest, errors=(409, *_WRITES)),
        "delete_host": _Operation(HostDeleted, body=RemovalBody, errors=(409, *_WRITES)),
        "list_history": _Operation(tuple[FleetPoint, ...], query={"hours": int}, errors=_READS),
        "list_services": _Operation(tuple[ServiceRecord, ...], query=listed, errors=_READS),
        "delete_service": _Operation(ServiceDeleted, body=RemovalBody, errors=(409, *_WRITES)),
        "list_workers": _Operation(tuple[WorkerRecord, ...], query={"role": Word, "limit": int}, errors=_READS),
        "show_status": _Operation(SystemStatus, errors=(403,)),
        "list_cells": _Operation(tuple[CellView, ...], errors=_READS),
        "plan_drain": _Operation(DrainPlan, query=plan, errors=(422, *_READS)),
        "start_drain": _Operation(DrainProgress, 202, DrainBody, errors=(409, *_WRITES)),
        "plan_target": _Operation(DrainPlan, query=of_target, errors=(422, *_READS)),
        "drain_target": _Operation(DrainProgress, 202, TargetBody, errors=(409, *_WRITES)),
        "list_drains": _Operation(tuple[DrainProgress, ...], query={"limit": int}, errors=_READS),
        "show_drain": _Operation(DrainProgress, errors=(404, *_READS)),
        "stop_drain": _Operation(DrainProgress, query={"reason": Reason}, errors=(404, 409, *_WRITES)),
        "pause_drain": _Operation(DrainProgress, body=DrainCommandBody, errors=(404, 409, *_WRITES)),
        "resume_drain": _Operation(DrainProgress, body=DrainCommandBody, errors=(404, 409, *_WRITES)),
        "show_nodes": _Operation(NodesView, errors=_READS),
        "set_node_maintenance": _Operation(NodeRecord, body=NodeMaintenance, errors=(404, 409, *_WRITES)),
        "end_node_maintenance": _Operation(NodeRecord, errors=(404, 409, *_READS)),
    }


def _of_objects() -> dict[str, _Operation]:
    from berth.change_log import SECTIONS  # noqa: PLC0415

    change = {"reason": Reason, "if_version": Version, "force": bool, "dry_run": bool}
    log = {"kind": ObjectKind, "name": Label, "before": Version, "before_object": str, "limit": int}
    found = {
        "show_quota": _Operation(QuotaUse, errors=_READS),
        "list_zones": _Operation(tuple[Zone, ...], errors=_READS),
        "list_objects": _Operation(ObjectList, query={"kind": ObjectKind, "name": Label}, errors=_READS),
        "change_objects": _Operation(ObjectsChanged, body=ChangeBody, errors=(404, 409, *_WRITES)),
        "list_changes": _Operation(tuple[ObjectLogEntry, ...], query=log, errors=_READS),
    }
    bodies = {
        ObjectKind.FLAVOR: Flavor,
        ObjectKind.AGGREGATE: Aggregate,
        ObjectKind.QUOTA: ProjectQuota,
        ObjectKind.GROUP: GroupDefinition,
        ObjectKind.SCHEDULING: SchedulingRules,
        ObjectKind.CELL: CellDecision,
    }
    for kind, section in SECTIONS.items():
        listed = tuple[QuotaUse, ...] if kind is ObjectKind.QUOTA else ObjectList
        if kind is not ObjectKind.CELL:  # listed with what is in it
            found[f"list_{section}"] = _Operation(listed, errors=_READS)
        shown = GroupView if kind is ObjectKind.GROUP else StoredObject
        found[f"show_{section}"] = _Operation(shown, errors=(404, *_READS))
        found[f"set_{section}"] = _Operation(
            ObjectsChanged, body=bodies[kind], query=change, errors=(404, 409, *_WRITES)
        )
        found[f"patch_{section}"] = _Operation(
            ObjectsChanged, body=dict[str, Any], query=change, errors=(404, 409, *_WRITES)
        )
        found[f"delete_{section}"] = _Operation(ObjectsChanged, query=change, errors=(404, 409, 422, *_READS))
    return found


def _of_dead_letters() -> dict[str, _Operation]:

    return {
        "count_dead_letters": _Operation(tuple[DeadLetterCount, ...], errors=_READS),
        "list_dead_letters": _Operation(tuple[DeadLetterView, ...], query={"limit": int}, errors=(404, *_READS)),
        "show_dead_letter": _Operation(DeadLetterView, errors=(404, *_READS)),
        "replay_dead_letters": _Operation(DeadLettersReplayed, body=ReplayBody, errors=(404, *_WRITES)),
        "purge_dead_letters": _Operation(DeadLettersPurged, query={"until": Label}, errors=(404, *_READS)),
    }


def _of_quarantine() -> dict[str, _Operation]:
    listed = {"cell": Word, "service": Word, "instance": Uuid, "decided": bool, "foreign": bool}
    listed |= {"after": str, "limit": int}
    return {
        "list_quarantine": _Operation(QuarantinePage, query=listed, errors=(404, *_READS)),
        "decide_quarantine": _Operation(QuarantineDecided, body=QuarantineDecision, errors=(404, *_WRITES)),
        "list_breakers": _Operation(tuple[BreakerView, ...], query={"cell": Word, "open": bool}, errors=(404, *_READS)),
        "show_breaker": _Operation(BreakerView, errors=(404, *_READS)),
        "reset_breakers": _Operation(BreakersAfterReset, body=BreakersReset, errors=(404, *_WRITES)),
        "list_recoveries": _Operation(tuple[Recovery, ...], errors=_READS),
        "go_on_without": _Operation(Recovery, body=WithoutService, errors=(404, 409, *_WRITES)),
        "accept_losses": _Operation(Recovery, body=LossesAccepted, errors=(404, 409, *_WRITES)),
    }


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The document: OpenAPI 3.1."""
    operations = _operations()
    kinds = [one for op in operations.values() for one in (op.answer, op.body) if one is not None]
    schemas, components = msgspec.json.schema_components([*kinds, ProblemBody], ref_template=_REF)
    of_kind = dict(zip(map(repr, [*kinds, ProblemBody]), schemas, strict=True))
    add_field_notes(components)
    _as_body(components["BuildRequest"], "instance_uuid", "project_id")
    _as_body(components["ActionRequest"], "request_id", "instance_uuid", "project_id")
    _as_body(components["Aggregate"], "name")
    paths: dict[str, Any] = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            path = paths.setdefault(route.path_format, {})
            path[method.lower()] = _operation(route, operations[route.name], of_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "berth", "version": version()},
        "servers": [{"url": "/api/v1"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _as_body(schema: dict[str, Any], *known: str) -> None:
    """The message as a body: its tag is the bus's affair, and what is known or made up may be left out."""
    schema["properties"].pop("type", None)
    schema["required"] = [one for one in schema["required"] if one not in ("type", *known)]


def _operation(route: Route, operation: _Operation, of_kind: dict[str, Any]) -> dict[str, Any]:
    kind = "text/event-stream" if operation.stream else "application/json"
    errors = (401, *operation.errors, 503, 504)
    problem = {"description": "problem", "content": {PROBLEM_JSON: {"schema": of_kind[repr(ProblemBody)]}}}
    described: dict[str, Any] = {
        "operationId": route.name,
        "summary": (inspect.getdoc(route.endpoint) or "").splitlines()[0],
        "responses": {
            str(operation.status): {
                "description": "the answer",
                "content": {kind: {"schema": of_kind[repr(operation.answer)]}},
            },
            **{str(status): problem for status in sorted(set(errors))},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _inlined(_IN_PATH[name])}
        for name in route.param_convertors
    ]
    parameters += [
        {"name": name, "in": "query", "schema": _inlined(kind_of)} for name, kind_of in operation.query.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": of_kind[repr(operation.body)]}},
        }
    return described


def _inlined(kind: Any) -> dict[str, Any]:
    schema = msgspec.json.schema(kind)
    if "$ref" in schema:
        schema = schema["$defs"][schema["$ref"].rpartition("/")[2]]
    return schema
