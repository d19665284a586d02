"""Objects on record, and what projects use, as schedulers and placement have them on the bus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from berth.client.types import QuotaUse
from bus.bus import Bus
from bus.contracts.objects import (
    DEFAULT_QUOTA,
    ObjectKind,
    ObjectsPage,
    ObjectsQuery,
    StoredObject,
)
from bus.contracts.placement_queries import ProjectUsagePage, ProjectUsageQuery


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
