"""The log of changes as sentences: who changed what, from what to what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from berth.web.pages.objects import SECTIONS
from bus.contracts.objects import ObjectKind, ObjectLogEntry

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
}


class FieldChange(Struct, frozen=True):
    """One field before and after, for a person; "": it is not there."""

    field: str
    before: str
    after: str


class LogSentence(Struct, frozen=True, kw_only=True):
    """One entry of the log. verb, noun, name: the sentence behind the actor. kind, object_name: of the record.

    changes: the fields that differ, as far as they are shown; more: how many others do.
    """

    revision: int
    at: float
    actor: str
    verb: str
    noun: str
    name: str
    address: str
    kind: str
    object_name: str
    changes: tuple[FieldChange, ...]
    more: int
    reason: str
    forced: bool


def sentence_of(entry: ObjectLogEntry) -> LogSentence:
    """An entry of the log for a person."""
    before, after = entry.before or {}, entry.after or {}
    body = after or before
    differing = _differences(before, after)
    verb = "deleted" if entry.after is None else "created" if entry.before is None else "changed"
    name, noun, address = entry.name, NOUNS.get(entry.kind, entry.kind.value), ""
    match entry.kind:
        case ObjectKind.HOST:
            verb = (
                "withdrew the decision about" if entry.after is None else HOST_VERBS.get(str(body.get("state")), verb)
            )
            name, address = str(body.get("host", name)), f"/fleet/{entry.name}"
            differing = [one for one in differing if one.field not in ("host", "state", "reason", "drain")]
        case ObjectKind.FENCE:
            name, address = str(body.get("host", name)), f"/fleet/{entry.name}"
            verb = {"deleted": "ended", "created": "began"}.get(verb, verb)
            if int(after.get("acknowledged", 0)) > int(before.get("acknowledged", 0)) and entry.before is not None:
                verb = "acknowledged"
            differing = [one for one in differing if one.field not in ("host", "cell")]
        case ObjectKind.DRAIN:
            name, address = f"{body.get('target', '')} {body.get('name', '')}".strip(), f"/drains/{entry.name}"
            verb = {"created": "started"}.get(verb, verb)
            if verb == "started":
                differing = [one for one in differing if one.field in ("kind", "at_once", "per_minute")]
        case ObjectKind.SCHEDULING:
            noun, name, address = "the", "scheduling rules", "/objects/rules"
        case ObjectKind.REPAIR:
            verb = "repaired"
    if entry.kind in SECTIONS and entry.kind is not ObjectKind.SCHEDULING:
        address = f"/objects/{SECTIONS[entry.kind]}"
    return LogSentence(
        revision=entry.revision,
        at=entry.at,
        actor=entry.actor,
        verb=verb,
        noun=noun,
        name=name,
        address=address,
        kind=entry.kind.value,
        object_name=entry.name,
        changes=tuple(differing[:NAMED]),
        more=max(0, len(differing) - NAMED),
        reason=entry.reason or str(body.get("reason", "") if entry.kind in _REASONED else ""),
        forced=entry.forced,
    )


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
