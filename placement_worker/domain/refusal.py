"""Why a write of the REST API is turned down: values that callers tell apart by `why`, with words for a person."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Why(StrEnum):
    """What stands against a write. Each asks for another reaction, so each has its own code."""

    NO_PROVIDER = "no_provider"
    NO_SUCH = "no_such"  # a class or trait that the book does not know
    NO_INVENTORY = "no_inventory"
    NO_ALLOCATIONS = "no_allocations"
    GENERATION = "generation"  # the provider has moved since the caller read it
    CONSUMER_GENERATION = "consumer_generation"
    DUPLICATE = "duplicate"
    IN_USE = "in_use"  # inventory that somebody holds
    PROVIDER_IN_USE = "provider_in_use"
    IS_PARENT = "is_parent"
    BAD_PARENT = "bad_parent"
    BAD_STOCK = "bad_stock"  # an inventory that leaves nothing
    DOES_NOT_FIT = "does_not_fit"


class Refusal(Struct, frozen=True):
    """A write that was turned down. words: Placement's own, because its clients show and sometimes match them.

    about: the provider, class or consumer that the refusal is about, where the answer names it apart from the words.
    """

    why: Why
    words: str = ""
    about: str = ""


def generation_conflict() -> Refusal:
    """The caller's resource_provider_generation is not the provider's."""
    return Refusal(Why.GENERATION, "resource provider generation conflict")


def no_provider(uuid: str) -> Refusal:
    """Nobody has this uuid."""
    return Refusal(Why.NO_PROVIDER, f"No resource provider with uuid {uuid} found", uuid)


def no_such_class(name: str) -> Refusal:
    """The book does not know the class."""
    return Refusal(Why.NO_SUCH, f"No such resource class {name}.", name)
