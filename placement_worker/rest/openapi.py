"""The OpenAPI document of the served routes, derived from the route table and from the schemas of bodies."""

from __future__ import annotations

import re
from typing import Any

from placement_worker.rest.faults import STATUS
from placement_worker.rest.http import NEWEST, RANGE, SERVICE, ErrorsBody
from placement_worker.rest.routes import ROUTES, Route
from placement_worker.rest.schemas import Schema, schema_of

# The parameters of a granular request, which may have the suffix of a group.
_GROUPED = ("resources", "required", "member_of", "in_tree")

_ANSWERS = {
    "GET": (200, 204, 400, 404, 406),
    "POST": (200, 201, 204, 400, 404, 409, 413, 415),
    "PUT": (200, 201, 204, 400, 404, 409, 413, 415),
    "DELETE": (204, 400, 404, 409),
}
_EVERYWHERE = (401, 403, 405, 406, 408, 500, 503)


def document() -> dict[str, Any]:
    """Return the document for the newest microversion."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        if route.until == NEWEST:
            paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Placement",
            "version": RANGE[1],
            "description": "OpenStack Placement's API as berth serves it, at its newest microversion.",
        },
        "paths": paths,
        "security": [{"token": []}],
        "components": {
            "securitySchemes": {"token": {"type": "apiKey", "in": "header", "name": "X-Auth-Token"}},
            "schemas": {"Error": schema_of(ErrorsBody)},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    words = (route.handler.__doc__ or "").strip().splitlines()
    operation: dict[str, Any] = {
        "operationId": f"{route.handler.__module__.rpartition('.')[2]}.{route.handler.__name__}",
        "summary": words[0] if words else "",
        "parameters": [*_path_parameters(route.path), *_query_parameters(route.query), _version(route)],
        "responses": _responses(route),
    }
    if route.takes is not None:
        content = {"application/json": {"schema": route.takes.schema}}
        operation["requestBody"] = {"required": True, "content": content}
    if route.rule is None:
        operation["security"] = []
    return operation


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _query_parameters(schema: Schema) -> list[dict[str, Any]]:
    required = schema.get("required", ())
    named = dict(schema.get("properties", {}))
    if "patternProperties" in schema:
        named |= {name: {"type": "string", "description": "also with a group's suffix"} for name in _GROUPED}
    return [{"name": name, "in": "query", "required": name in required, "schema": kind} for name, kind in named.items()]


def _version(route: Route) -> dict[str, Any]:
    return {
        "name": "OpenStack-API-Version",
        "in": "header",
        "required": False,
        "description": f"since 1.{route.since}",
        "schema": {"type": "string", "default": f"{SERVICE} {RANGE[1]}"},
    }


def _responses(route: Route) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    statuses = sorted({*_ANSWERS[route.method], *_EVERYWHERE})
    return {
        str(status): {"description": STATUS[status][0], "content": error}
        if status in STATUS
        else {"description": "Done"}
        for status in statuses
    }
