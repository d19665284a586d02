"""Whether two answers are equal: status, code, headers that clients read, and the data without its order."""

from __future__ import annotations

import json
import math
from typing import Any
from urllib.parse import urlsplit

import httpx
from calls import Call

SINCE_CODES = 23
SINCE_MAPPINGS = 34


def differences(call: Call, real: httpx.Response, ours: httpx.Response) -> list[str]:
    """The differences, a line each."""
    found = []
    if real.status_code != ours.status_code:
        return [f"status {real.status_code} / {ours.status_code}"]
    for name in ("openstack-api-version", "content-type", "allow"):
        one, other = _header(name, real), _header(name, ours)
        if one != other:
            found.append(f"{name} {one!r} / {other!r}")
    # One of these that comes more often than from the real one misleads no client.
    often = ("last-modified", "cache-control", "vary")
    found += [f"{name} is missing" for name in often if name in real.headers and name not in ours.headers]
    places = [urlsplit(answer.headers.get("location", "")).path for answer in (real, ours)]
    if places[0] != places[1]:
        found.append(f"location {places[0]!r} / {places[1]!r}")
    one, other = data_of(real), data_of(ours)
    if real.status_code >= 400:
        keys = ("status", "title", *(("code",) if call.minor >= SINCE_CODES else ()))
        pairs = [(key, _error(one).get(key), _error(other).get(key)) for key in keys]
        found += [f"error's {key}: {here!r} / {there!r}" for key, here, there in pairs if here != there]
    elif without_order(one) != without_order(other):
        found.append(_first_difference(one, other))
    return found


def _header(name: str, answer: httpx.Response) -> str | None:
    value = answer.headers.get(name)
    return ", ".join(sorted(value.split(", "))) if name == "allow" and value else value


def data_of(answer: httpx.Response) -> Any:
    """The JSON of an answer, else its text."""
    try:
        return answer.json()
    except ValueError:
        return answer.text


def wording(answer: httpx.Response) -> str:
    """The text of an error."""
    return " ".join(str(_error(data_of(answer)).get("detail", "")).split())


def _error(data: Any) -> dict[str, Any]:
    try:
        error: dict[str, Any] = data["errors"][0]
    except (KeyError, TypeError, IndexError):
        return {}
    return error


def without_order(data: Any) -> Any:
    """A list is what is in it, however it is sorted; 1.0 is 1."""
    if isinstance(data, dict):
        return {key: without_order(value) for key, value in data.items()}
    if isinstance(data, list):
        return sorted(json.dumps(without_order(item), sort_keys=True) for item in data)
    if isinstance(data, float) and math.isfinite(data) and data == int(data):
        return int(data)
    return data


def not_negative(answer: Any) -> Any:
    """Candidates without the negative capacities that the real one shows where berth shows 0 (see known.py)."""
    for summary in answer["provider_summaries"].values():
        for inventory in summary["resources"].values():
            inventory["capacity"] = max(0, inventory["capacity"])
    return answer


def part_of(part: Any, whole: Any, limit: int) -> list[str]:
    """The error of a limited answer about candidates, given the whole one: as many as there are, of those."""
    offered = without_order(whole["allocation_requests"])
    taken = without_order(part["allocation_requests"])
    found = []
    if len(taken) != min(limit, len(offered)):
        found.append(f"{len(taken)} candidates of {len(offered)} with limit {limit}")
    if len(set(taken)) != len(taken):
        found.append("a candidate twice")
    strange = set(taken) - set(offered)
    if strange:
        found.append(f"not a candidate: {sorted(strange)[0]}")
    shown = without_order(not_negative(whole)["provider_summaries"])
    for uuid, summary in without_order(part["provider_summaries"]).items():
        if shown.get(uuid) != summary:
            found.append(f"summary of {uuid}: {json.dumps(shown.get(uuid))} / {json.dumps(summary)}")
            break
    return found


def _first_difference(one: Any, other: Any, path: str = "answer") -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if key not in one or key not in other:
                return f"{path}.{key}: {key in one} / {key in other}"
            if without_order(one[key]) != without_order(other[key]):
                return _first_difference(one[key], other[key], f"{path}.{key}")
    if isinstance(one, list) and isinstance(other, list):
        here, there = without_order(one), without_order(other)
        only = [item for item in here if item not in there][:2], [item for item in there if item not in here][:2]
        return f"{path}: {len(here)} / {len(there)}; only real {only[0]}; only berth {only[1]}"
    return f"{path}: {json.dumps(one)[:300]} / {json.dumps(other)[:300]}"
