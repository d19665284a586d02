"""The effect of a change of objects: what it writes and deletes, or why it is refused. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.objects import ChangedObject, ObjectKind, ObjectsChange
from scheduler_worker.objects.consistency import broken_rule
from scheduler_worker.objects.effective_config import configuration_bodies
from scheduler_worker.records.object_records import (
    INVALID,
    UNKNOWN,
    ChangePlan,
    Key,
    Objects,
    as_stored,
    body_of,
    is_fence,
)

CONFLICT = "object.conflict"

TOO_MANY = "object.too_many"

# Objects of one kind. Every scheduler keeps all of them.
MAX_OF_KIND = 10_000

# The reasons why a change of objects refuses certain kinds.
DERIVED: Mapping[ObjectKind, str] = {
    ObjectKind.FENCE: "follows from a decision about its host, and is not changed",
    ObjectKind.DRAIN: "has commands of its own (drain.command.v1), and is not changed",
    ObjectKind.REPAIR: "is an entry of the log, and no object",
    ObjectKind.SERVICE: "is an entry of the log, and no object",
}


def plan(requested: ObjectsChange, present: Objects, *, restates_fences: bool = False) -> ChangePlan | Refusal:
    """The effect of a change on the present objects. A refusal names the first object that cannot be changed so.

    restates_fences: a fence is a new decision also where one with the same reason is on record: the host is off now.
    """
    after: dict[Key, dict[str, Any] | None] = {}
    for change in requested.changes:
        key = (change.kind, change.name)
        known = present.get(key)
        where = f"{change.kind.value} {change.name!r}"
        if change.kind in DERIVED:
            return Refusal(code=INVALID, reason=f"{where} {DERIVED[change.kind]}")
        if key in after:
            return Refusal(code=INVALID, reason=f"{where} is named twice")
        if change.if_version is not None and change.if_version != (version := 0 if known is None else known.version):
            return Refusal(code=CONFLICT, reason=f"{where} has version {version}, not {change.if_version}")
        if change.body is None:
            if known is None:
                return Refusal(code=UNKNOWN, reason=f"there is no {where}")
            after[key] = None
            continue
        try:
            after[key] = as_stored(body_of(change.kind, change.name, change.body))
        except ValueError as error:
            return Refusal(code=INVALID, reason=str(error)[:MAX_REASON])
        if "drain" in change.body:
            return Refusal(code=INVALID, reason=f"{where}: a drain alone writes drain")
    for key in present:
        if key[0] in requested.prune and key[0] not in DERIVED and key not in after:
            after[key] = None
    changed = tuple(
        ChangedObject(kind=kind, name=name, before=before, after=body)
        for (kind, name), body in sorted(after.items())
        if (before := present[kind, name].body if (kind, name) in present else None) != body
        or (restates_fences and kind is ObjectKind.HOST and is_fence(body))
    )
    if (refusal := _too_many(changed, present)) is not None:
        return refusal
    why = broken_rule(changed, configuration_bodies(present, changed))
    return ChangePlan(changed) if why is None else Refusal(code=INVALID, reason=why[:MAX_REASON])


def _too_many(changed: Sequence[ChangedObject], present: Objects) -> Refusal | None:
    for kind in ObjectKind:
        count = sum(key[0] is kind for key in present) + sum(
            (one.before is None) - (one.after is None) for one in changed if one.kind is kind
        )
        if count > MAX_OF_KIND:
            return Refusal(
                code=TOO_MANY, reason=f"there may be {MAX_OF_KIND} objects of kind {kind.value}, not {count}"
            )
    return None
