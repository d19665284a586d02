"""A change of one object relative to its record: what is not named stays as it is.

Read, edit, write unless the object is changed meanwhile, and then once more from the new record: of two operators who
set different fields at once both win. The commands and the HTTP API change objects so; a file for `berth apply`, a
PUT and the page's form are whole objects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec import Struct

from bus.contracts.objects import ObjectChange, ObjectKind, ObjectsChanged, StoredObject
from bus.faults import Fault

CONFLICT = "object.conflict"
# Each lost try is the change of another operator; so many within one command come from a program in a loop.
MAX_TRIES = 8

Body = dict[str, Any]
Find = Callable[[ObjectKind, str], Awaitable[StoredObject | None]]
Send = Callable[[ObjectChange], Awaitable[ObjectsChanged]]


class ObjectEdit(Struct, frozen=True):
    """An object to change. edit: the body as it is to be, of the object on record (None: there is none); it may be
    called more than once.
    """

    kind: ObjectKind
    name: str
    edit: Callable[[StoredObject | None], Body]


async def change_object(find: Find, wanted: ObjectEdit, send: Send, *, if_version: int | None = None) -> ObjectsChanged:
    """Edit an object on record. Raises Fault, with `object.conflict` where it is changed again and again, and what
    `edit` raises. if_version: only this version is edited.
    """
    tries = 1 if if_version is not None else MAX_TRIES
    while True:
        known = await find(wanted.kind, wanted.name)
        version = 0 if known is None else known.version
        change = ObjectChange(
            kind=wanted.kind,
            name=wanted.name,
            body=wanted.edit(known),
            if_version=version if if_version is None else if_version,
        )
        tries -= 1
        try:
            return await send(change)
        except Fault as refused:
            if refused.code != CONFLICT or not tries:
                raise


def merged(before: Mapping[str, Any], patch: Mapping[str, Any]) -> Body:
    """A body with a JSON merge patch (RFC 7396): a null removes its field, an object is merged, all else replaces."""
    after = dict(before)
    for key, value in patch.items():
        if value is None:
            after.pop(key, None)
        elif isinstance(value, Mapping):
            known = after.get(key)
            after[key] = merged(known if isinstance(known, Mapping) else {}, value)
        else:
            after[key] = value
    return after
