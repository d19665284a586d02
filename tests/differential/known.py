"""Where berth answers differently on purpose. Every row is explained in docs/reference/placement-api.md."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
from calls import Call
from compare import data_of, not_negative, part_of, without_order, wording

NUL = "\\u0000"
LINE_END = '\\n"'
ADDS_UP_TWICE = "the real one adds up the amounts of two groups more than once"
KINDS = ("resources", "required", "member_of", "in_tree")
SHARES = "MISC_SHARES_VIA_AGGREGATE"
CANONICAL_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
UUID_OF_ANY_SPELLING = re.compile(r"([0-9a-fA-F]-?){32}")
EMPTY = {("allocation_requests", 0), ("resource_providers", 0)}


def reason(call: Call, body: Any, real: httpx.Response, ours: httpx.Response) -> str | None:
    """Why this difference is meant, or None."""
    if real.status_code >= 500 and ours.status_code < 500:
        return "the real one fails with 500"
    if ours.status_code == 400 and (NUL in json.dumps(body) or "%00" in call.path):
        return "text with a NUL"
    if ours.status_code == 400 and (LINE_END in json.dumps(body) or "%0a" in call.path.lower()):
        return "a name with a line end after it"
    if any(name != name.lower() for name in _consumers_of(call, body)):
        return "an upper-case consumer uuid: another consumer to the real one"
    nothing = real.status_code == 200 and EMPTY & {*_lists(data_of(real))}
    if nothing and ours.status_code == 400 and "No such " in wording(ours):
        return "a name that does not exist, where the real one has found nothing before it looks"
    if real.status_code == ours.status_code == 200 and _spells_aggregates_otherwise(call):
        return "an aggregate's uuid in another spelling: another aggregate to the real one"
    if call.path.startswith("/allocation_candidates?") and real.status_code == ours.status_code == 200:
        if not data_of(real)["allocation_requests"] and _requires_nothing(call):
            return "a group without resources, required traits and aggregates: the real one finds nothing at all"
        if _loses_anchors(call, data_of(real), data_of(ours)):
            return "the real one keeps one tree of several that share all that the un-numbered group requires"
        if without_order(not_negative(data_of(real))) == without_order(data_of(ours)):
            return "negative capacity"
        if _ignores_trees(call, data_of(real), data_of(ours)):
            return "the real one does not look at in_tree of a group without resources"
    return None


def _consumers_of(call: Call, body: Any) -> list[str]:
    """The consumers that a body names by key, as it spells them."""
    named = body.get("allocations") if isinstance(body, dict) and call.path == "/reshaper" else body
    return list(named) if isinstance(named, dict) and call.path in ("/allocations", "/reshaper") else []


def _spells_aggregates_otherwise(call: Call) -> bool:
    """Whether a query names an aggregate by a uuid, in other letters than the canonical ones."""
    named = [value for name, value in parse_qsl(urlsplit(call.path).query) if name.startswith("member_of")]
    uuids = [one for value in named for one in value.removeprefix("!").removeprefix("in:").split(",")]
    return any(UUID_OF_ANY_SPELLING.fullmatch(one) and not CANONICAL_UUID.fullmatch(one) for one in uuids)


def _requires_nothing(call: Call) -> bool:
    """Whether some group has no resources and no trait or aggregate that its provider must have."""
    groups: dict[str, bool] = {}
    for name, value in parse_qsl(urlsplit(call.path).query):
        kind, suffix = next(((k, name.removeprefix(k)) for k in KINDS if name.startswith(k)), ("", ""))
        if suffix:
            groups[suffix] = groups.get(suffix, False) or _requires(kind, value)
    return not all(groups.values())


def _requires(kind: str, value: str) -> bool:
    """Whether this names resources, or a trait or aggregate that must be there."""
    names = value.split(",") if kind == "required" else [value]
    return kind != "in_tree" and not all(name.startswith("!") for name in names)


def _ignores_trees(call: Call, real: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether berth lacks only candidates whose group without resources is outside of that group's in_tree.

    real: without the call's limit. A tree that gives nothing has no summaries, and its root is not known.
    """
    query = dict(parse_qsl(urlsplit(call.path).query))
    trees = {name.removeprefix("in_tree"): uuid for name, uuid in query.items() if name.startswith("in_tree")}
    trees = {suffix: uuid for suffix, uuid in trees.items() if f"resources{suffix}" not in query}
    if not trees:
        return False
    roots = {uuid: summary["root_provider_uuid"] for uuid, summary in real["provider_summaries"].items()}
    kept = [
        one
        for one in real["allocation_requests"]
        if all(
            roots.get(uuid, uuid) == roots.get(tree, tree)
            for suffix, tree in trees.items()
            for uuid in one["mappings"][suffix]
        )
    ]
    limit = int(query.get("limit", len(kept)))
    return not part_of(ours, {**real, "allocation_requests": kept}, limit)


def _loses_anchors(call: Call, real: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether all that the real one lacks takes its un-numbered group from providers that share.

    It takes two answers to that group for one when only the trees differ for which they were found. real: without the
    call's limit.
    """
    plain, numbered, _ = _query_of(call)
    if not plain or not numbered:
        return False
    known = without_order(real["allocation_requests"])
    extra = [one for one in ours["allocation_requests"] if json.dumps(without_order(one), sort_keys=True) not in known]
    missing = len(known) - (len(ours["allocation_requests"]) - len(extra))
    summaries = ours["provider_summaries"]
    return (
        bool(extra)
        and (missing == 0 or "limit=" in call.path)
        and all(
            SHARES in summaries[uuid].get("traits", [SHARES])
            for one in extra
            for uuid in one.get("mappings", {}).get("", [])
        )
    )


def adds_up_twice(call: Call) -> bool:
    """Whether the real one may spoil one candidate's amounts while it makes another.

    It does when the un-numbered group and a numbered one ask for the same class, unless group_policy is none.
    """
    plain, numbered, policy = _query_of(call)
    return bool(plain & set().union(*numbered)) and policy != "none" and call.method == "GET"


def same_question(call: Call) -> Call | None:
    """A question that means the same: with one numbered group a policy has no effect. None where there is none."""
    _, numbered, policy = _query_of(call)
    if len(numbered) != 1 or policy not in {"", "isolate"}:
        return None
    path, _, query = call.path.partition("?")
    kept = [pair for pair in query.split("&") if not pair.startswith("group_policy=")]
    return Call(call.method, f"{path}?{'&'.join([*kept, 'group_policy=none'])}", call.version, headers=call.headers)


def _query_of(call: Call) -> tuple[set[str], list[set[str]], str]:
    """(classes of the un-numbered group, classes of each numbered one, the policy)."""
    parts = urlsplit(call.path)
    plain: set[str] = set()
    numbered: list[set[str]] = []
    policy = ""
    for name, value in parse_qsl(parts.query if parts.path == "/allocation_candidates" else ""):
        classes = {part.partition(":")[0] for part in value.split(",")}
        if name == "resources":
            plain = classes
        elif name.startswith("resources"):
            numbered.append(classes)
        elif name == "group_policy":
            policy = value
    return plain, numbered, policy


def _lists(data: Any) -> list[tuple[str, int]]:
    return [(key, len(value)) for key, value in data.items()] if isinstance(data, dict) else []
