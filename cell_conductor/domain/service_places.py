"""At which compute services an instance has a machine by its record."""

from __future__ import annotations

from collections.abc import Container

from .desires import AT_REST, Wish, desire_of
from .instance import Instance


def is_at(instance: Instance, service: str, fenced: Container[str]) -> bool:
    """Whether it is on this service's hosts, or moves from one. Not on fenced ones: a machine there is a loss."""
    places = [] if desire_of(instance).here is Wish.NONE else list(instance.selections[instance.position :][:1])
    if instance.phase not in AT_REST and instance.move is not None and instance.move.source is not None:
        places.append(instance.move.source)
    return any(one.service == service and one.host_uuid not in fenced for one in places)
