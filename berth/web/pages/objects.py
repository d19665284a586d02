"""The HTTP API of what operators define at run time: flavors, aggregates, quotas, groups, rules, and their log.

The bodies are the structs of the messages; a change is one `objects.change.v1`, so it is checked, logged and announced
like one of `berth flavor set`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.routing import Route

from berth.bus_client.object_edits import find_object, project_usage, quota_uses
from berth.change_log import SECTIONS
from berth.client.types import ChangeBody, GroupView, ObjectList, QuotaUse, Zone
from berth.object_changes import ObjectEdit, Send, change_object, merged
from berth.web.api import (
    ASK_TIMEOUT_S,
    MAX_PAGE,
    Handlers,
    caller_of,
    checked,
    converted,
    may_change,
    need,
    number_of,
    object_of,
    parsed,
    route,
    truth_of,
)
from berth.web.problems import Problem
from berth.web.sign_in_sessions import WebCaller, WebRole
from bus.bus import Bus
from bus.contracts.base import Label, Version, Word
from bus.contracts.objects import (
    MAX_CHANGES,
    ZONE_KEY,
    GroupDefinition,
    ObjectChange,
    ObjectKind,
    ObjectLogPage,
    ObjectLogQuery,
    ObjectsChange,
    ObjectsChanged,
    ObjectsPage,
    ObjectsQuery,
    StoredObject,
    group_named,
)
from bus.contracts.placement_queries import MAX_PROJECTS, GroupMembersPage, GroupMembersQuery

# What a project sees of, each its own.
_OF_PROJECTS = (ObjectKind.FLAVOR, ObjectKind.GROUP)
CHANGE_PARAMETERS = ("reason", "if_version", "force", "dry_run")
MAX_GROUPS = 100  # that a project makes by itself
# Pages of objects that one answer gathers; a scheduler keeps no more of one kind (`MAX_OF_KIND`).
MAX_PAGES = 50


class ObjectApi:
    """Objects as schedulers and placement have them, for the API and the pages."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def stored(self, kind: ObjectKind | None = None, name: str | None = None) -> tuple[int, list[StoredObject]]:
        """(revision, objects in order of kind and name): all, of one kind, or one."""
        found: list[StoredObject] = []
        after: tuple[str, str] | None = None
        for _ in range(MAX_PAGES):
            query = ObjectsQuery(kind=kind, name=name, after=after)
            page = await self._bus.request(query, ObjectsPage, timeout_s=ASK_TIMEOUT_S)
            found += page.objects
            if not page.more:
                break
            after = (page.objects[-1].kind.value, page.objects[-1].name)
        return page.revision, found

    async def change(self, change: ObjectsChange) -> ObjectsChanged:
        """Ask for a change. Raises RequestRefused with what stands in the way."""
        return await self._bus.request(change, ObjectsChanged, timeout_s=ASK_TIMEOUT_S)

    async def edit(self, wanted: ObjectEdit, send: Send, if_version: int | None) -> ObjectsChanged:
        """Edit an object on record. Raises RequestRefused, and what the edit raises."""
        find = partial(find_object, self._bus, timeout_s=ASK_TIMEOUT_S)
        return await change_object(find, wanted, send, if_version=if_version)

    async def group(self, stored: StoredObject) -> GroupView:
        """A server group on record, with its members."""
        group = group_named(stored.name, msgspec.convert(stored.body, GroupDefinition))
        query = GroupMembersQuery(project_id=stored.name.partition("/")[0], server_group=group.uuid)
        page = await self._bus.request(query, GroupMembersPage, timeout_s=ASK_TIMEOUT_S)
        return GroupView(
            name=stored.name,
            group=group,
            members=page.members,
            more=page.more,
            version=stored.version,
            changed_at=stored.changed_at,
            changed_by=stored.changed_by,
        )

    async def check_room(self, caller: WebCaller, names: Collection[str]) -> None:
        """Raises Problem 409 for a project that would have more server groups than it may make."""
        if caller.project is None:
            return
        _, found = await self.stored(ObjectKind.GROUP)
        own = {one.name for one in found if _is_shown(one, caller)}
        if len(own.union(names)) > max(len(own), MAX_GROUPS):
            raise Problem(409, "group.too_many", f"a project has at most {MAX_GROUPS} server groups")

    async def log(self, query: ObjectLogQuery) -> ObjectLogPage:
        """A page of the log of changes, newest first."""
        return await self._bus.request(query, ObjectLogPage, timeout_s=ASK_TIMEOUT_S)

    async def quotas(self, projects: Sequence[str] = ()) -> list[QuotaUse]:
        """Quotas beside what is held: of these projects, or of all that have a quota or hold something."""
        _, stored = await self.stored(ObjectKind.QUOTA)
        if len(projects) > MAX_PROJECTS:
            raise Problem(400, "request.invalid", f"at most {MAX_PROJECTS} projects")
        return quota_uses(stored, await project_usage(self._bus, projects, timeout_s=ASK_TIMEOUT_S), projects)


class WebObjects(Handlers):
    """The handlers. Each takes a request of a caller that is known."""

    def __init__(self, objects: ObjectApi) -> None:
        self._objects = objects

    def routes(self) -> list[Route]:
        """The routes below API_ROOT."""
        routes = super().routes()
        for kind, section in SECTIONS.items():
            of_kind = _OfKind(self._objects, kind)
            where = f"/{section}/" + ("{project}" if kind is ObjectKind.QUOTA else "{name:path}")
            if kind not in (ObjectKind.QUOTA, ObjectKind.CELL):  # shown beside what is used, or what is there
                routes += [
                    Route(f"/{section}", of_kind.list_all, methods=["GET"], name=f"list_{section}"),
                    Route(where, of_kind.show, methods=["GET"], name=f"show_{section}"),
                ]
            routes += [
                Route(where, of_kind.put, methods=["PUT"], name=f"set_{section}"),
                Route(where, of_kind.patch, methods=["PATCH"], name=f"patch_{section}"),
                Route(where, of_kind.delete, methods=["DELETE"], name=f"delete_{section}"),
            ]
        return routes

    @route("GET", "/quotas")
    async def list_quotas(self, request: Request) -> object:
        """Quotas with what is used beside the limits. Role project sees its own."""
        caller = caller_of(request)
        return await self._objects.quotas([caller.project] if caller.sees and caller.project else ())

    @route("GET", "/quotas/{project}")
    async def show_quota(self, request: Request) -> object:
        """The quota of one project, and its usage."""
        project, caller = parsed(lambda: msgspec.convert(request.path_params["project"], Word)), caller_of(request)
        if caller.sees not in (None, project):
            raise Problem(403, "project.forbidden", f"this token sees project {caller.sees}")
        return (await self._objects.quotas([project]))[0]

    @route("GET", "/zones")
    async def list_zones(self, request: Request) -> object:
        """Availability zones by name; role project sees no aggregates."""
        _, aggregates = await self._objects.stored(ObjectKind.AGGREGATE)
        zones = zones_of(aggregates)
        return [Zone(one.name, ()) for one in zones] if caller_of(request).sees else zones

    @route("GET", "/objects", "kind", "name")
    async def list_objects(self, request: Request) -> object:
        """Objects, in order of kind and name: ?kind=&name=. Role project sees its flavors and its server groups."""
        query, caller = request.query_params, caller_of(request)
        fields = (query.get("kind"), query.get("name"))
        kind, name = parsed(lambda: msgspec.convert(fields, tuple[ObjectKind | None, Label | None]))
        if kind not in _OF_PROJECTS:
            need(caller, WebRole.READER)
        revision, found = await self._objects.stored(kind, name)
        return ObjectList(revision, tuple(_as_seen(one, caller) for one in found if _is_shown(one, caller)))

    @route("POST", "/objects")
    async def change_objects(self, request: Request) -> object:
        """Change many objects, all or none. For operators; role project changes its server groups."""
        caller = caller_of(request)
        may_change(caller)
        body = converted(await object_of(request), ChangeBody)
        if len(body.changes) > MAX_CHANGES:
            raise Problem(400, "request.invalid", f"at most {MAX_CHANGES} changes")
        if body.prune or not all(_is_own_group(one.kind, one.name, caller) for one in body.changes):
            need(caller, WebRole.OPERATOR)
        await self._objects.check_room(caller, {one.name for one in body.changes if one.body is not None})
        fields = {**msgspec.to_builtins(body), "actor": caller.name}
        return await self._objects.change(parsed(lambda: msgspec.convert(fields, ObjectsChange)))

    @route("GET", "/objects/log", "kind", "name", "before", "before_object", "limit", role=WebRole.READER)
    async def list_changes(self, request: Request) -> object:
        """The log of changes, newest first: ?kind=&name=&before=&before_object=&limit=. Not for role project.

        before, before_object: the revision and KIND/NAME of a page's last entry, for the page after it.
        """
        query = request.query_params
        fields: dict[str, Any] = {"kind": query.get("kind"), "name": query.get("name")}
        if "before" in query:
            fields["before"] = parsed(lambda: msgspec.convert(query["before"], Version, strict=False))
        if "before_object" in query:
            kind, _, name = query["before_object"].partition("/")
            fields["before_object"] = (kind, name)
        fields["limit"] = number_of(request, "limit", 100, most=MAX_PAGE)
        page = await self._objects.log(parsed(lambda: msgspec.convert(fields, ObjectLogQuery)))
        return page.entries


class _OfKind:
    """The handlers of the objects of one kind."""

    def __init__(self, objects: ObjectApi, kind: ObjectKind) -> None:
        self._objects = objects
        self._kind = kind

    @checked()
    async def list_all(self, request: Request) -> object:
        """Objects of this kind by name."""
        self._check_role(caller_of(request))
        revision, found = await self._objects.stored(self._kind)
        caller = caller_of(request)
        shown = tuple(_as_seen(one, caller) for one in found if _is_shown(one, caller))
        return ObjectList(revision, shown)

    @checked()
    async def show(self, request: Request) -> object:
        """One object of this kind."""
        self._check_role(caller_of(request))
        name = self._name(request)
        _, found = await self._objects.stored(self._kind, name)
        shown = [one for one in found if _is_shown(one, caller_of(request))]
        if not shown:
            raise Problem(404, "object.unknown", f"there is no {self._kind.value} {name!r}")
        if self._kind is ObjectKind.GROUP:
            return await self._objects.group(shown[0])
        return _as_seen(shown[0], caller_of(request))

    @checked(*CHANGE_PARAMETERS)
    async def put(self, request: Request) -> object:
        """Make an object, or replace the whole of it. For operators; role project changes its server groups."""
        caller = self._changer(request)
        body = await object_of(request)
        await self._objects.check_room(caller, {self._name(request)})
        if self._kind is ObjectKind.AGGREGATE:
            body.setdefault("name", self._name(request))
        return await self._objects.change(self._changes(request, caller, body))

    @checked(*CHANGE_PARAMETERS)
    async def patch(self, request: Request) -> object:
        """Change the named fields of an object (JSON merge patch: null removes one). For those who may PUT it."""
        caller = self._changer(request)
        patch, name = await object_of(request), self._name(request)
        given = request.query_params.get("if_version")
        if_version = None if given is None else parsed(lambda: msgspec.convert(given, Version, strict=False))

        def edit(known: StoredObject | None) -> dict[str, Any]:
            if known is None:
                raise Problem(404, "object.unknown", f"there is no {self._kind.value} {name!r}: PUT makes one")
            return merged(known.body, patch)

        async def send(change: ObjectChange) -> ObjectsChanged:
            requested = self._changes(request, caller, change.body, change.if_version)
            return await self._objects.change(requested)

        return await self._objects.edit(ObjectEdit(self._kind, name, edit), send, if_version)

    @checked(*CHANGE_PARAMETERS)
    async def delete(self, request: Request) -> object:
        """Delete an object. For those who may PUT it."""
        return await self._objects.change(self._changes(request, self._changer(request), None))

    def _changer(self, request: Request) -> WebCaller:
        """The caller. Raises Problem 403 for one that may not change this object."""
        caller = caller_of(request)
        if not _is_own_group(self._kind, self._name(request), caller):
            need(caller, WebRole.OPERATOR)
        may_change(caller)
        return caller

    def _changes(
        self, request: Request, caller: WebCaller, body: dict[str, Any] | None, if_version: int | None = None
    ) -> ObjectsChange:
        """The change that a request is for. if_version: instead of that which the request names."""
        query = request.query_params
        fields: dict[str, Any] = {"kind": self._kind, "name": self._name(request), "body": body}
        if if_version is not None:
            fields["if_version"] = if_version
        elif "if_version" in query:
            fields["if_version"] = parsed(lambda: msgspec.convert(query["if_version"], Version, strict=False))
        requested = {
            "changes": [fields],
            "actor": caller.name,
            "reason": query.get("reason", ""),
            "force": truth_of(request, "force") or False,
            "dry_run": truth_of(request, "dry_run") or False,
        }
        return parsed(lambda: msgspec.convert(requested, ObjectsChange))

    def _name(self, request: Request) -> str:
        key = "project" if self._kind is ObjectKind.QUOTA else "name"
        return parsed(lambda: msgspec.convert(request.path_params[key], Label))

    def _check_role(self, caller: WebCaller) -> None:
        """Flavors are for every project, and server groups for theirs; how hosts are chosen is not."""
        if self._kind not in _OF_PROJECTS:
            need(caller, WebRole.READER)


def _is_shown(one: StoredObject, caller: WebCaller) -> bool:
    if one.kind is ObjectKind.GROUP:
        return caller.sees is None or one.name.startswith(f"{caller.sees}/")
    projects = one.body.get("projects") or ()
    return caller.sees is None or not projects or caller.sees in projects


def _is_own_group(kind: ObjectKind, name: str, caller: WebCaller) -> bool:
    return kind is ObjectKind.GROUP and caller.project is not None and name.startswith(f"{caller.project}/")


def _as_seen(one: StoredObject, caller: WebCaller) -> StoredObject:
    """A flavor without the other projects that may request it, of which a project knows nothing."""
    if caller.sees is None or not one.body.get("projects"):
        return one
    return replace(one, body={**one.body, "projects": [caller.sees]})


def zones_of(aggregates: Sequence[StoredObject]) -> list[Zone]:
    """The availability zones that aggregates make, by name."""
    zones: dict[str, list[str]] = {}
    for one in aggregates:
        if zone := one.body.get("metadata", {}).get(ZONE_KEY):
            zones.setdefault(str(zone), []).append(one.name)
    return [Zone(name, tuple(names)) for name, names in sorted(zones.items())]
