"""A bare-metal node as Ironic's REST API describes it, reduced to the fields that a decision needs."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import TraitName, Uuid, matching, reason_of

ShortText = Annotated[str, matching(r"^[^\x00]*\Z", "a text without U+0000, which no database stores", max_length=255)]

MAX_TRAITS = 1024


class Node(Struct, frozen=True, kw_only=True):
    """One node, read. Fields that Ironic adds later are ignored; one of another type than this is refused."""

    uuid: Uuid
    provision_state: ShortText | None = None
    power_state: ShortText | None = None
    maintenance: bool | None = None
    instance_uuid: ShortText | None = None
    resource_class: ShortText | None = None
    traits: Annotated[tuple[TraitName, ...], Bound(max_length=MAX_TRAITS)] = ()
    allocation_uuid: ShortText | None = None
    updated_at: ShortText | None = None
    parent_node: ShortText | None = None


class Allocation(Struct, frozen=True, kw_only=True):
    """One of Ironic's own allocations. It sets a node's instance_uuid without a notification."""

    uuid: Uuid
    state: ShortText | None = None
    node_uuid: Uuid | None = None


class Unreadable(Struct, frozen=True, kw_only=True):
    """A representation of a node that cannot be read."""

    uuid: str | None  # the node's uuid, where it is readable
    reason: str  # the error in the representation


def parse_node(raw: object) -> Node | Unreadable:
    """A node out of decoded JSON. One bad node is a value, so that it never hides its neighbours on a page."""
    try:
        return msgspec.convert(raw, Node)
    except msgspec.ValidationError as error:
        return Unreadable(uuid=_uuid_of(raw), reason=reason_of(error))


def _uuid_of(raw: Any) -> str | None:
    if not isinstance(raw, dict):
        return None
    try:
        return msgspec.convert(raw.get("uuid"), Uuid)
    except msgspec.ValidationError:
        return None
