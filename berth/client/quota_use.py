"""The quotas of projects and their usage: schedulers have the quotas, the book has the usage."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from bus.bus import Bus
from bus.contracts.book import ProjectUsagePage, ProjectUsageQuery
from bus.contracts.objects import DEFAULT_QUOTA, StoredObject

# Pages of projects that one answer gathers.
MAX_PAGES = 50


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
    for _ in range(MAX_PAGES):
        query = ProjectUsageQuery(projects=tuple(projects), after=after)
        page = await bus.request(query, ProjectUsagePage, timeout_s=timeout_s)
        found |= page.usage
        if not page.more:
            break
        after = max(page.usage)
    return found


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
