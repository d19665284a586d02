"""The effect of a notification: take a node out of placement at once, or only read the node.

The source is lossy, late and sometimes wishful (`TRAPS.md`), so a notification never gives a node back.
"""

from __future__ import annotations

from typing import Final

from msgspec import UNSET, Struct

from ironic_sync.domain.notification import Notification, Status
from ironic_sync.domain.rules import DEAD_POWER, FREE_STATES


class Effect(Struct, frozen=True, kw_only=True):
    """The reaction to one notification.

    read: the node to read again. reserve_all: hold that node back at once, before reading it. deleted: Ironic says that
    it has deleted it. announced: nothing has happened yet, another notification is to follow; read only in case it does
    not.
    allocation: an allocation that will set some node's instance_uuid: look at it until it has.
    """

    read: str | None = None
    reserve_all: bool = False
    deleted: bool = False
    announced: bool = False
    allocation: str | None = None


NO_EFFECT: Final = Effect()

# Published by the process that has just done it: also a `.start` and an `.error` of these carry the true state.
# Notifications of other actions carry the requested state, which may have been refused.
_ALWAYS_TRUE: Final = frozenset({"provision_set", "power_state_corrected"})


def effect_of(notification: Notification, *, seen_updated_at: str | None = None) -> Effect:
    """The meaning of a notification, given the `updated_at` of the node when it was last read."""
    if notification.kind == "allocation":
        return _of_allocation(notification)
    if notification.subject is None:
        return NO_EFFECT
    if notification.status is Status.START and notification.action not in _ALWAYS_TRUE:
        return Effect(read=notification.subject, announced=True)
    taken = notification.kind == "node" and _is_fact(notification) and _reserves_all(notification)
    taken = taken and not _older(notification.updated_at, seen_updated_at)
    return Effect(read=notification.subject, reserve_all=taken, deleted=taken and notification.action == "delete")


def _of_allocation(notification: Notification) -> Effect:
    """An allocation's node is unknown while it is `allocating`; Ironic announces nothing when that ends."""
    if notification.node_uuid is not None:
        return Effect(read=notification.node_uuid)
    if notification.action != "delete" and notification.status is Status.END:
        return Effect(allocation=notification.uuid)
    return NO_EFFECT


def _is_fact(notification: Notification) -> bool:
    return notification.action in _ALWAYS_TRUE or notification.status in (Status.END, Status.SUCCESS)


def _reserves_all(notification: Notification) -> bool:
    if notification.action == "delete":  # its payload is the last state, which may well be `available`
        return True
    return (
        notification.maintenance is True
        or _is_set(notification.instance_uuid)
        or (notification.provision_state is not UNSET and notification.provision_state not in FREE_STATES)
        or (notification.power_state is not UNSET and notification.power_state in DEAD_POWER)
    )


def _is_set(value: object) -> bool:
    return value is not UNSET and value is not None


def _older(updated_at: str | None, seen: str | None) -> bool:
    """Whether a notification shows the node as it was before its last read state.

    Notifications carry whole seconds, so only a whole second apart counts; doubt takes away and reads.
    """
    if updated_at is None or seen is None:
        return False
    return _second(updated_at) < _second(seen)


def _second(timestamp: str) -> str:
    """`2026-11-20T07:44:06Z` and `2026-11-20T07:44:06.274778+00:00` are the same second; ISO text sorts by time."""
    return timestamp[:19]
