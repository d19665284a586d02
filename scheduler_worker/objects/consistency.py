"""Checks of changed objects: names and projects that no message can have, aggregates that share a uuid. Pure.

Objects on record that break one of these rules stay in force: a rule that is new stops no scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from bus.contracts.base import CellName, Label, Word
from bus.contracts.objects import DEFAULT_QUOTA, ChangedObject, ObjectKind

MAX_COUNTED = 1000  # instances in the way of a change
MAX_SHOWN = 64  # characters of a name that is too long


def broken_rule(
    changed: Iterable[ChangedObject], after: Mapping[tuple[ObjectKind, str], Mapping[str, Any]]
) -> str | None:
    """Why a change is refused, naming the objects. after: all bodies, once the change is made. None: it is not."""
    changed = tuple(changed)
    return _invalid_name(changed) or _invalid_project(changed) or _shared_uuid(changed, after)


def _invalid_name(changed: Iterable[ChangedObject]) -> str | None:
    """A new object has a name that no message can have: of the settings, or of a file that is only checked."""
    for one in changed:
        is_cell = one.kind is ObjectKind.CELL
        try:
            if one.before is None:
                msgspec.convert(one.name, CellName if is_cell else Label)
        except msgspec.ValidationError:
            shown, has = one.name[:MAX_SHOWN], "1 to 47 letters, digits, _ and -" if is_cell else "1 to 255 characters"
            return f"{one.kind.value} {shown!r}: a name has {has}, and this has {len(one.name)}"
    return None


def _invalid_project(changed: Iterable[ChangedObject]) -> str | None:
    """A quota or a flavor newly names a project that no request can have."""
    for one in changed:
        for project in sorted(_projects_of(one, one.after) - _projects_of(one, one.before)):
            try:
                msgspec.convert(project, Word)
            except msgspec.ValidationError:
                has = f"project {project!r} is no name: one has 1 to 64 letters, digits, - and _ only"
                return f"{one.kind.value} {one.name!r}: {has}"
    return None


def _projects_of(one: ChangedObject, body: Mapping[str, Any] | None) -> set[str]:
    if body is None:
        return set()
    if one.kind is ObjectKind.QUOTA:
        return {one.name} - {DEFAULT_QUOTA}
    return set(body.get("projects", ())) if one.kind is ObjectKind.FLAVOR else set()


def _shared_uuid(
    changed: Iterable[ChangedObject], after: Mapping[tuple[ObjectKind, str], Mapping[str, Any]]
) -> str | None:
    """Two aggregates would be one provider aggregate, with the members of both."""
    names: dict[str, list[str]] = {}
    for (kind, name), body in sorted(after.items()):
        if kind is ObjectKind.AGGREGATE:
            names.setdefault(body["uuid"].lower(), []).append(name)
    for one in changed:
        if one.kind is not ObjectKind.AGGREGATE or one.after is None:
            continue
        uuid = one.after["uuid"].lower()
        if one.before is not None and one.before["uuid"].lower() == uuid:
            continue
        if others := [name for name in names[uuid] if name != one.name]:
            return f"aggregate {one.name!r} and aggregate {others[0]!r} have one uuid, {uuid}: each has its own"
    return None


def changed_object(kind: ObjectKind, name: str, before: Struct | None, after: Struct | None) -> ChangedObject:
    """The change of an object, by its bodies; None: there is no such object."""
    bodies = msgspec.to_builtins(before), msgspec.to_builtins(after)
    return ChangedObject(kind=kind, name=name, before=bodies[0], after=bodies[1])


def counted(count: int, what: str) -> str:
    """So many of them, in words."""
    number = f"{count} or more" if count == MAX_COUNTED else str(count)
    return f"{number} {what}" if count == 1 else f"{number} {what}s"


def named(changed: Sequence[ChangedObject], limit: int = 10) -> list[str]:
    """The first of them by kind and name, for the log."""
    return [f"{one.kind.value} {one.name}" for one in changed[:limit]]
