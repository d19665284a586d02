"""At which compute services an instance has a machine by its record."""

from __future__ import annotations

from collections.abc import Container

from .instance import Instance, State

OVER = frozenset({State.TOMBSTONE, State.FAILED, State.DELETED, State.OFFLOADED, State.DEPARTED})
# By its record there is no machine on the host of its current attempt yet, or any more.
NOT_HERE = OVER | {State.CLAIMING, State.VACATING}


def is_at(instance: Instance, service: str, fenced: Container[str]) -> bool:
    """Whether it is on this service's hosts, or moves from one. Not on fenced ones: a machine there is a loss."""
    places = [] if instance.state in NOT_HERE else list(instance.selections[instance.position :][:1])
    if instance.state not in OVER and instance.move is not None and instance.move.source is not None:
        places.append(instance.move.source)
    return any(one.service == service and one.host_uuid not in fenced for one in places)
