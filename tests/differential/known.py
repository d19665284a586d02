"""Where berth answers differently on purpose. Every row is explained in docs/placement.md."""

from __future__ import annotations

import json
from typing import Any

import httpx
from calls import Call
from compare import data_of, without_order, wording

NUL = "\\u0000"
EMPTY = {("allocation_requests", 0), ("resource_providers", 0)}


def reason(call: Call, body: Any, real: httpx.Response, ours: httpx.Response) -> str | None:
    """Why this difference is meant, or None."""
    if real.status_code >= 500 and ours.status_code < 500:
        return "the real one fails with 500"
    if ours.status_code == 400 and (NUL in json.dumps(body) or "%00" in call.path):
        return "text with a NUL"
    nothing = real.status_code == 200 and EMPTY & {*_lists(data_of(real))}
    if nothing and ours.status_code == 400 and "No such " in wording(ours):
        return "a name that does not exist, where the real one has found nothing before it looks"
    if call.path.startswith("/allocation_candidates?") and real.status_code == ours.status_code == 200:
        return "negative capacity" if _clamped(data_of(real)) == without_order(data_of(ours)) else None
    return None


def _lists(data: Any) -> list[tuple[str, int]]:
    return [(key, len(value)) for key, value in data.items()] if isinstance(data, dict) else []


def _clamped(data: Any) -> Any:
    for summary in data["provider_summaries"].values():
        for stock in summary["resources"].values():
            stock["capacity"] = max(0, stock["capacity"])
    return without_order(data)
