"""The OpenAPI document of `/api/v1`, derived from the messages' own structs and the handlers' docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import msgspec
from msgspec import Struct
from starlette.routing import Route

from berth.web.problems import PROBLEM_JSON, ProblemBody
from bus.contracts.base import Label, Uuid, Word
from bus.contracts.build import BuildRecord, BuildRequest, BuildState, HostRecord
from bus.contracts.moves import MoveRecord, MoveRequest
from bus.contracts.operations import HostAdminState, ServiceRecord

_REF = "#/components/schemas/{name}"


class _Operation(Struct, frozen=True):
    """What a handler's signature does not contain: its parameters, body, answer and statuses of errors."""

    answer: Any
    status: int = 200
    body: Any = None
    query: dict[str, Any] = {}
    errors: tuple[int, ...] = ()
    stream: bool = False


def _operations() -> dict[str, _Operation]:
    from berth.web.api import Accepted, Builds  # noqa: PLC0415  (api mounts this document)
    from berth.web.moves import MoveTaken  # noqa: PLC0415
    from berth.web.operations import AdminStateRequest  # noqa: PLC0415

    change = (403, 409, 422, 429)
    return {
        "create_build": _Operation(Accepted, 202, BuildRequest, errors=(400, 413, 415, *change)),
        "list_builds": _Operation(
            Builds, query={"project": Word, "state": BuildState, "before": float, "limit": int}, errors=(400, 403)
        ),
        "show_build": _Operation(BuildRecord, errors=(400, 404)),
        "delete_build": _Operation(Accepted, 202, errors=(400, 404, *change)),
        "follow_build": _Operation(str, errors=(400, 404), stream=True),
        "follow_all": _Operation(str, stream=True),
        "list_hosts": _Operation(
            tuple[HostRecord, ...], query={"cell": Word, "up": bool, "limit": int}, errors=(400, 403)
        ),
        "create_move": _Operation(MoveTaken, 202, MoveRequest, errors=(400, 404, 413, 415, *change)),
        "list_moves": _Operation(
            tuple[MoveRecord, ...],
            query={"instance": Uuid, "project": Word, "under_way": bool, "limit": int},
            errors=(400, 403),
        ),
        "show_move": _Operation(MoveRecord, errors=(400, 404)),
        "list_services": _Operation(
            tuple[ServiceRecord, ...], query={"cell": Word, "up": bool, "limit": int}, errors=(400, 403)
        ),
        "decide_about_host": _Operation(HostAdminState, body=AdminStateRequest, errors=(400, 413, 415, *change)),
    }


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The document: OpenAPI 3.1."""
    operations = _operations()
    kinds = [one for op in operations.values() for one in (op.answer, op.body) if one is not None]
    schemas, components = msgspec.json.schema_components([*kinds, ProblemBody], ref_template=_REF)
    of_kind = dict(zip(map(repr, [*kinds, ProblemBody]), schemas, strict=True))
    _as_body(components["BuildRequest"], "instance_uuid", "project_id")
    _as_body(components["MoveRequest"], "request_id", "instance_uuid", "project_id")
    paths: dict[str, Any] = {}
    for route in routes:
        name = route.endpoint.__name__
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(route.path, {})[method.lower()] = _operation(route, operations[name], of_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "berth", "version": metadata.version("berth")},
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
        "operationId": route.endpoint.__name__,
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
        {"name": name, "in": "path", "required": True, "schema": _inlined(kind_of)}
        for name, kind_of in (("uuid", Uuid), ("host", Label))
        if f"{{{name}}}" in route.path
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
