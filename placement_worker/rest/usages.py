"""The routes /usages and /resource_providers/{uuid}/usages."""

from __future__ import annotations

from typing import Any

from placement_worker.rest import schemas
from placement_worker.rest.api import Api
from placement_worker.rest.http import HttpRequest, Response, json_response
from placement_worker.rest.query import Checked
from placement_worker.store.port import UsageRow

SINCE_CONSUMER_TYPES = 38
ALL, UNKNOWN = "all", "unknown"

_USAGES_9, _USAGES_38 = Checked(schemas.USAGES_9), Checked(schemas.USAGES_38)


async def of_provider(api: Api, request: HttpRequest) -> Response:
    """GET the usage of one provider by class."""
    generation, used = await api.of_provider(request.parts[1], api.store.reads.usages, words="{0}: {0}")
    data = {"resource_provider_generation": generation, "usages": used}
    return json_response(data).set_modified(request, api.clock.time())


async def of_project(api: Api, request: HttpRequest) -> Response:
    """GET the usage of a project by class, optionally of one user and of one consumer type."""
    query = request.query
    typed = request.version >= SINCE_CONSUMER_TYPES
    (_USAGES_38 if typed else _USAGES_9).check(query)
    requested = query.get("consumer_type") if typed else None
    kind = "" if requested == UNKNOWN else None if requested == ALL else requested
    rows = await api.store.reads.totals(query.get("project_id") or "", query.get("user_id") or None, kind)
    data: dict[str, Any]
    if not typed:
        data = _summed(rows)
    elif requested == ALL:
        counts = {row.consumer_type: row.count for row in rows}
        data = {ALL: {**_summed(rows), "consumer_count": sum(counts.values())}} if rows else {}
    else:
        data = {}
        for row in rows:
            group = data.setdefault(row.consumer_type or UNKNOWN, {})
            group[row.resource_class] = row.amount
            group["consumer_count"] = row.count
    return json_response({"usages": data}).set_modified(request, api.clock.time())


def _summed(rows: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    row: UsageRow
    for row in rows:
        found[row.resource_class] = found.get(row.resource_class, 0) + row.amount
    return found
