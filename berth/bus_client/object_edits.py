"""A change of one object relative to its record: what is not named stays as it is.

Read, edit, write unless the object is changed meanwhile, and then once more from the new record: of two operators who
set different fields at once both win. The commands and the HTTP API change objects so; a file for `berth apply`, a
PUT and the page's form are whole objects.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from bus.bus import Bus
from bus.contracts.objects import (
    DEFAULT_QUOTA,
    ObjectChange,
    ObjectKind,
    ObjectsChanged,
    ObjectsPage,
    ObjectsQuery,
    StoredObject,
)
from bus.contracts.placement_queries import ProjectUsagePage, ProjectUsageQuery
from bus.faults import RequestRefused

CONFLICT = "object.conflict"
# Each lost try is the change of another operator; so many within one command come from a program in a loop.
MAX_TRIES = 8

Body = dict[str, Any]
Send = Callable[[ObjectChange], Awaitable[ObjectsChanged]]


class ObjectEdit(Struct, frozen=True):
    """An object to change. edit: the body as it is to be, of the object on record (None: there is none); it may be
    called more than once.
    """

    kind: ObjectKind
    name: str
    edit: Callable[[StoredObject | None], Body]


async def find_object(bus: Bus, kind: ObjectKind, name: str, *, timeout_s: float) -> StoredObject | None:
    """An object on record. None: there is none."""
    page = await bus.request(ObjectsQuery(kind=kind, name=name, limit=1), ObjectsPage, timeout_s=timeout_s)
    return next(iter(page.objects), None)


async def stored_objects(
    bus: Bus, kind: ObjectKind | None = None, name: str | None = None, *, timeout_s: float
) -> AsyncIterator[StoredObject]:
    """The objects on record, in order of kind and name. Raises RequestTimeout."""
    after: tuple[str, str] | None = None
    while True:
        page = await bus.request(ObjectsQuery(kind=kind, name=name, after=after), ObjectsPage, timeout_s=timeout_s)
        for stored in page.objects:
            yield stored
        if not page.more:
            return
        after = (page.objects[-1].kind.value, page.objects[-1].name)


async def change_object(
    bus: Bus, wanted: ObjectEdit, send: Send, *, timeout_s: float, if_version: int | None = None
) -> ObjectsChanged:
    """Edit an object on record. Raises RequestRefused, with `object.conflict` where it is changed again and again, and
    what `edit` raises. if_version: only this version is edited.
    """
    tries = 1 if if_version is not None else MAX_TRIES
    while True:
        known = await find_object(bus, wanted.kind, wanted.name, timeout_s=timeout_s)
        version = 0 if known is None else known.version
        change = ObjectChange(
            kind=wanted.kind,
            name=wanted.name,
            body=wanted.edit(known),
            if_version=version if if_version is None else if_version,
        )
        tries -= 1
        try:
            return await send(change)
        except RequestRefused as refused:
            if refused.code != CONFLICT or not tries:
                raise


def merged(before: Mapping[str, Any], patch: Mapping[str, Any]) -> Body:
    """A body with a JSON merge patch (RFC 7396): a null removes its field, an object is merged, all else replaces."""
    after = dict(before)
    for key, value in patch.items():
        if value is None:
            after.pop(key, None)
        elif isinstance(value, Mapping):
            known = after.get(key)
            after[key] = merged(known if isinstance(known, Mapping) else {}, value)
        else:
            after[key] = value
    return after


class QuotaUse(Struct, frozen=True, kw_only=True):
    """The quota and usage of a project: {class: amount}, INSTANCES: how many instances.

    quota: the name of the quota that applies; "": none does. version: its revision (0: none).
    """

    project: str
    quota: str
    limits: dict[str, int]
    used: dict[str, int]
    version: int = 0


async def project_usage(bus: Bus, projects: Sequence[str], *, timeout_s: float) -> dict[str, dict[str, int]]:
    """The usage of these projects, or of all that hold something: {project: {class: amount}}."""
    found: dict[str, dict[str, int]] = {}
    after: str | None = None
    while True:  # a page of which there are more names a later project each time
        query = ProjectUsageQuery(projects=tuple(projects), after=after)
        page = await bus.request(query, ProjectUsagePage, timeout_s=timeout_s)
        found |= page.usage
        if not page.more:
            return found
        after = max(page.usage)


def quota_uses(
    stored: Sequence[StoredObject], used: dict[str, dict[str, int]], projects: Sequence[str] = ()
) -> list[QuotaUse]:
    """Quotas beside what is held: of these projects, or of all that have a quota or hold something."""
    limits = {one.name: one for one in stored}
    wanted = projects or sorted(limits.keys() - {DEFAULT_QUOTA} | used.keys())
    rows = [_quota_use(project, limits, used.get(project, {})) for project in wanted]
    if not projects and DEFAULT_QUOTA in limits and DEFAULT_QUOTA not in used:
        rows.insert(0, _quota_use(DEFAULT_QUOTA, limits, {}))
    return rows


def _quota_use(project: str, limits: dict[str, StoredObject], used: dict[str, int]) -> QuotaUse:
    quota = limits.get(project) or limits.get(DEFAULT_QUOTA)
    return QuotaUse(
        project=project,
        quota="" if quota is None else quota.name,
        limits={} if quota is None else dict(quota.body.get("limits", {})),
        used=used,
        version=0 if quota is None else quota.version,
    )
