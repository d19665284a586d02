"""The log of changes as sentences: who changed what, from what to what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from bus.contracts.objects import ObjectKind, ObjectLogEntry

# The path of each kind below the API's root, and below /objects of a page.
SECTIONS = {
    ObjectKind.FLAVOR: "flavors",
    ObjectKind.AGGREGATE: "aggregates",
    ObjectKind.QUOTA: "quotas",
    ObjectKind.GROUP: "groups",
    ObjectKind.SCHEDULING: "rules",
    ObjectKind.CELL: "cells",
}
# Not for a reader: random, or the number of what the sentence says.
HIDDEN = frozenset({"token", "version", "acknowledged"})
# Fields of a new or deleted object, and members of a list, that a sentence names; how many more there are it counts.
NAMED = 6
MAX_VALUE = 120
HOST_VERBS = {"disabled": "disabled", "enabled": "enabled", "fenced": "fenced", "maintenance": "put under maintenance"}
NOUNS = {
    ObjectKind.GROUP: "server group",
    ObjectKind.QUOTA: "the quota of",
    ObjectKind.FENCE: "the fence of host",
    ObjectKind.DRAIN: "the drain of",
    ObjectKind.REPAIR: "consumer",
    ObjectKind.SERVICE: "compute service",
    ObjectKind.SCHEDULING: "the",
}


class FieldChange(Struct, frozen=True):
    """One field before and after, for a person; "": it is not there."""

    field: str
    before: str
    after: str


class DescribedChange(Struct, frozen=True, kw_only=True):
    """One entry of the log: its actor has done `verb` to the `noun` `name`. address: of the page about it; "": none.

    changes: the fields that differ, as far as they are shown; more: how many others do.
    """

    revision: int
    at: float
    actor: str
    verb: str
    noun: str
    name: str
    address: str
    changes: tuple[FieldChange, ...]
    more: int
    reason: str
    forced: bool


def describe_change(entry: ObjectLogEntry) -> DescribedChange:
    """An entry of the log for a person."""
    body = entry.after or entry.before or {}
    differing = _differences(entry.before or {}, entry.after or {})
    verb, name, address, left_out = _words_of(entry, body)
    noun = NOUNS.get(entry.kind, entry.kind.value)
    shown = [one for one in differing if one.field not in left_out]
    return DescribedChange(
        revision=entry.revision,
        at=entry.at,
        actor=entry.actor,
        verb=verb,
        noun=noun,
        name=name,
        address=address,
        changes=tuple(shown[:NAMED]),
        more=max(0, len(shown) - NAMED),
        reason=entry.reason or str(body.get("reason", "") if entry.kind in _REASONED else ""),
        forced=entry.forced,
    )


def line_of(entry: ObjectLogEntry) -> str:
    """An entry as one line, without its actor: `changed flavor m1.tiny: vcpus 1 → 2`."""
    one = describe_change(entry)
    changes = [_arrow(change) for change in one.changes] + ([f"{one.more} more fields"] if one.more else [])
    return f"{one.verb} {one.noun} {one.name}{' by force' if one.forced else ''}{': ' if changes else ''}" + ", ".join(
        changes
    )


def _arrow(change: FieldChange) -> str:
    if change.before:
        return f"{change.field} {change.before} → {change.after or 'none'}"
    return f"{change.field} {change.after}"


def _words_of(entry: ObjectLogEntry, body: Mapping[str, Any]) -> tuple[str, str, str, frozenset[str]]:
    """The verb and the name for an entry, the address of what it is about, and the fields that these say already."""
    verb = "deleted" if entry.after is None else "created" if entry.before is None else "changed"
    match entry.kind:
        case ObjectKind.HOST:
            decided = HOST_VERBS.get(str(body.get("state")), verb)
            verb = "withdrew the decision about" if entry.after is None else decided
            return verb, str(body.get("host", entry.name)), f"/fleet/{entry.name}", _SAID_OF_HOST
        case ObjectKind.FENCE:
            known = int((entry.before or {}).get("acknowledged", 0)) if entry.before is not None else None
            is_acknowledged = known is not None and int((entry.after or {}).get("acknowledged", 0)) > known
            verb = "acknowledged" if is_acknowledged else {"deleted": "ended", "created": "began"}.get(verb, verb)
            return verb, str(body.get("host", entry.name)), f"/fleet/{entry.name}", _SAID_OF_HOST
        case ObjectKind.DRAIN:
            name = f"{body.get('target', '')} {body.get('name', '')}".strip()
            left_out = _SAID_OF_NEW_DRAIN if entry.before is None else frozenset()
            return {"created": "started"}.get(verb, verb), name, f"/drains/{entry.name}", left_out
        case ObjectKind.SCHEDULING:
            return verb, "scheduling rules", "/objects/rules", frozenset()
        case ObjectKind.REPAIR:
            return "repaired", entry.name, "", frozenset()
    section = SECTIONS.get(entry.kind)
    address = "" if section is None else f"/objects/{section}?{urlencode({'name': entry.name})}"
    return verb, entry.name, address, frozenset()


_SAID_OF_HOST = frozenset({"host", "cell", "state", "reason", "drain"})
_SAID_OF_NEW_DRAIN = frozenset({"name", "target", "by", "reason", "state", "started_at", "hosts"})
_REASONED = (ObjectKind.HOST, ObjectKind.DRAIN, ObjectKind.CELL)


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[FieldChange]:
    was, now = _flat(before), _flat(after)
    return [
        FieldChange(field, was.get(field, ""), now.get(field, ""))
        for field in sorted({*was, *now})
        if was.get(field) != now.get(field)
    ]


def _flat(body: Mapping[str, Any]) -> dict[str, str]:
    """{field: its value as text}; a field of a field by both names."""
    found: dict[str, str] = {}
    for name, value in body.items():
        if name in HIDDEN:
            continue
        if isinstance(value, dict):
            found |= {f"{name} {inner}": _text(of) for inner, of in value.items()}
        else:
            found[name] = _text(value)
    return found


def _text(value: object) -> str:
    if isinstance(value, str):
        text = value
    elif isinstance(value, Sequence):
        members = [str(one) for one in value[:NAMED]]
        text = ", ".join(members) + (f" and {len(value) - NAMED:,} more" if len(value) > NAMED else "")
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    else:
        text = msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."
