"""The routes /traits and /resource_classes."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from placement_worker.domain.values import MAX_NAME, STANDARD_CLASSES, is_custom
from placement_worker.rest import bodies, schemas
from placement_worker.rest.api import Api
from placement_worker.rest.candidates_query import Checked
from placement_worker.rest.faults import HttpFault
from placement_worker.rest.http import HttpRequest, Response, json_response
from placement_worker.store.port import NameInUse, NameKind, NameRow

_NAME = re.compile(schemas.NAME)
_CUSTOM = re.compile(schemas.CUSTOM_NAME)
_LIST_TRAITS = Checked(schemas.LIST_TRAITS)


async def _row(api: Api, kind: NameKind, name: str) -> NameRow:
    may_exist = _NAME.fullmatch(name) is not None and len(name) <= MAX_NAME
    rows = await api.store.reads.names(kind, [name]) if may_exist else []
    if not rows:
        raise _absent(kind, name)
    return rows[0]


def _absent(kind: NameKind, name: str) -> HttpFault:
    return HttpFault(404, f"No such {'resource class' if kind is NameKind.CLASS else 'trait(s):'} {name}.")


async def _ensured(api: Api, kind: NameKind, name: str) -> tuple[Response, list[NameRow]]:
    """Create a class or trait if it does not exist. Returns the answer, and the row that existed, if one did."""
    rows = await api.store.reads.names(kind, [name])
    created = not rows and await api.store.create_name(kind, name)
    return Response(201 if created else 204, path=f"/{kind}/{name}"), rows


async def _deleted(api: Api, kind: NameKind, name: str, standard: str, in_use: str) -> Response:
    """Remove a custom class or trait. standard, in_use: what a caller is told of one that stays."""
    await _row(api, kind, name)
    if not is_custom(name):
        raise HttpFault(400, standard)
    try:
        await api.store.delete_name(kind, name)
    except NameInUse:
        raise HttpFault(409, in_use) from None
    return Response(204)


# --- traits


async def put_trait(api: Api, request: HttpRequest) -> Response:
    """PUT a custom trait. The status is 201 when it is new, and 204 when it exists."""
    name = request.parts[1]
    if not _CUSTOM.fullmatch(name) or len(name) > MAX_NAME:
        raise HttpFault(
            400,
            "The trait is invalid. A valid trait must be no longer than 255 characters, start with the prefix "
            '"CUSTOM_" and use following characters: "A"-"Z", "0"-"9" and "_"',
        )
    answer, rows = await _ensured(api, NameKind.TRAIT, name)
    return answer.set_modified(request, _newest(api, rows))


async def show_trait(api: Api, request: HttpRequest) -> Response:
    """GET one trait. The status is 204 when it exists."""
    name = request.parts[1]
    row = await _row(api, NameKind.TRAIT, name)
    return Response(204).set_modified(request, row.updated_at)


async def delete_trait(api: Api, request: HttpRequest) -> Response:
    """DELETE a custom trait that no provider has."""
    name = request.parts[1]
    in_use = f"The trait {name} is in use by a resource provider."
    return await _deleted(api, NameKind.TRAIT, name, f"Cannot delete standard trait {name}.", in_use)


async def list_traits(api: Api, request: HttpRequest) -> Response:
    """GET traits, filtered by `name=in:A,B` or `name=startswith:C`, and by whether a provider has them."""
    query = request.query
    _LIST_TRAITS.check(query)
    names: list[str] | None = None
    prefix = ""
    if (requested := query.get("name")) is not None:
        op, colon, value = requested.partition(":")
        if not colon:
            raise HttpFault(
                400,
                "Badly formatted name parameter. Expected name query string parameter in form: "
                f'?name=[in|startswith]:[name1,name2|prefix]. Got: "{requested}"',
            )
        names = value.split(",") if op == "in" else None
        prefix = value if op == "startswith" else ""
    associated: bool | None = None
    if (associated_text := query.get("associated")) is not None:
        if associated_text.lower() not in {"true", "false"}:
            raise HttpFault(400, 'The query parameter "associated" only accepts "true" or "false"')
        associated = associated_text.lower() == "true"
    rows = await api.store.reads.names(NameKind.TRAIT, names, prefix, associated)
    return json_response({"traits": [row.name for row in rows]}).set_modified(request, _newest(api, rows))


def _newest(api: Api, rows: list[NameRow]) -> float:
    return max((row.updated_at for row in rows), default=api.clock.time())


# --- resource classes


def _shown(name: str) -> dict[str, Any]:
    return {"name": name, "links": [{"rel": "self", "href": f"/resource_classes/{name}"}]}


async def list_classes(api: Api, request: HttpRequest) -> Response:
    """GET all resource classes, standard ones first."""
    rows = await api.store.reads.names(NameKind.CLASS)
    rows.sort(key=lambda row: row.name not in STANDARD_CLASSES)
    data = {"resource_classes": [_shown(row.name) for row in rows]}
    return json_response(data).set_modified(request, _newest(api, rows))


async def create_class(api: Api, request: HttpRequest) -> Response:
    """POST a custom resource class."""
    name = (await api.parse(bodies.RESOURCE_CLASS, request.body)).name
    if not await api.store.create_name(NameKind.CLASS, name):
        raise HttpFault(409, f"Conflicting resource class already exists: {name}")
    return Response(201, path=f"/resource_classes/{name}")


async def show_class(api: Api, request: HttpRequest) -> Response:
    """GET one resource class."""
    row = await _row(api, NameKind.CLASS, request.parts[1])
    return json_response(_shown(row.name)).set_modified(request, row.updated_at)


async def rename_class(api: Api, request: HttpRequest) -> Response:
    """PUT below 1.7, which renames a custom class."""
    old = request.parts[1]
    new = (await api.parse(bodies.RESOURCE_CLASS, request.body)).name
    await _row(api, NameKind.CLASS, old)
    if old in STANDARD_CLASSES:
        raise HttpFault(400, f"Cannot update standard resource class {old}")
    renamed = await api.store.rename_class(old, new)
    if renamed is None:
        raise HttpFault(409, f"Resource class already exists: {new}")
    if not renamed:
        raise _absent(NameKind.CLASS, old)
    api.committed()
    return json_response(_shown(new))


async def ensure_class(api: Api, request: HttpRequest) -> Response:
    """PUT from 1.7 on. The status is 201 when the class is new, and 204 when it exists."""
    name = request.parts[1]
    bodies.RESOURCE_CLASS.parse(msgspec.json.encode({"name": name.encode("utf-8", "replace").decode()}))
    return (await _ensured(api, NameKind.CLASS, name))[0]


async def delete_class(api: Api, request: HttpRequest) -> Response:
    """DELETE a custom class that no provider has an inventory of."""
    name, wrong = request.parts[1], "Error in delete resource class: Cannot delete"
    in_use = f"{wrong} resource class {name}. Class is in use in inventory."
    return await _deleted(api, NameKind.CLASS, name, f"{wrong} standard resource class {name}.", in_use)
