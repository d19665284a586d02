"""What the writes of the REST API have in common: which request each comes from, and how a refusal is answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.feed import MAX_CAUSES, Change


class RefusalCode(StrEnum):
    """The reason why a write is refused. Reasons that call for different reactions have different codes."""

    NO_PROVIDER = "no_provider"
    NO_SUCH = "no_such"  # placement does not know the class or trait
    NO_INVENTORY = "no_inventory"
    NO_ALLOCATIONS = "no_allocations"
    GENERATION = "generation"  # the provider's generation has changed since the caller read it
    CONSUMER_GENERATION = "consumer_generation"
    DUPLICATE = "duplicate"
    IN_USE = "in_use"  # a consumer holds allocations of the inventory
    PROVIDER_IN_USE = "provider_in_use"
    IS_PARENT = "is_parent"
    BAD_PARENT = "bad_parent"
    BAD_INVENTORY = "bad_inventory"  # the inventory has no capacity
    DOES_NOT_FIT = "does_not_fit"


class WriteRefusal(Struct, frozen=True):
    """A write that is refused. words: the text of Placement's own API, because clients show this text and some match
    it.

    about: the provider, class or consumer that is refused, where the answer names it in addition to the text.
    """

    code: RefusalCode
    words: str = ""
    about: str = ""


def generation_conflict() -> WriteRefusal:
    """The caller's resource_provider_generation is not the provider's."""
    return WriteRefusal(RefusalCode.GENERATION, "resource provider generation conflict")


def no_provider(uuid: str) -> WriteRefusal:
    """No provider has this uuid."""
    return WriteRefusal(RefusalCode.NO_PROVIDER, f"No resource provider with uuid {uuid} found", uuid)


def no_such_class(name: str) -> WriteRefusal:
    """Placement does not know the class."""
    return WriteRefusal(RefusalCode.NO_SUCH, f"No such resource class {name}.", name)


class Caused(Struct, frozen=True, kw_only=True):
    """A write and its cause: the id of the request that caused it, empty when there is none."""

    cause: str = ""


def caused(changes: Sequence[Change], touched: Iterable[tuple[str, Iterable[str]]]) -> list[Change]:
    """Return the changes with their causes. touched: each write's cause, and the providers that the write named.

    A provider that no write named (a child whose root has moved) gets the causes of all writes.
    """
    by_provider: dict[str, dict[str, None]] = {}
    everything: dict[str, None] = {}
    for cause, providers in touched:
        if cause:
            everything[cause] = None
            for provider in providers:
                by_provider.setdefault(provider, {})[cause] = None
    return [replace(change, causes=_of(by_provider.get(change.provider, everything))) for change in changes]


def _of(causes: Mapping[str, None]) -> tuple[str, ...]:
    return tuple(causes)[:MAX_CAUSES]
