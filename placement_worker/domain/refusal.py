"""Why a write of the REST API is refused: a code that callers act on, and a sentence for the client."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Why(StrEnum):
    """Why a write is refused: one code for each reaction of callers."""

    NO_PROVIDER = "no_provider"
    NO_SUCH = "no_such"  # a class or trait that the book does not know
    NO_INVENTORY = "no_inventory"
    NO_ALLOCATIONS = "no_allocations"
    GENERATION = "generation"  # the provider has moved since the caller read it
    CONSUMER_GENERATION = "consumer_generation"
    DUPLICATE = "duplicate"
    IN_USE = "in_use"  # inventory that a consumer holds
    PROVIDER_IN_USE = "provider_in_use"
    IS_PARENT = "is_parent"
    BAD_PARENT = "bad_parent"
    BAD_INVENTORY = "bad_inventory"  # an inventory that leaves nothing
    DOES_NOT_FIT = "does_not_fit"


class WriteRefusal(Struct, frozen=True):
    """A write that is refused. words: Placement's own, because its clients show and sometimes match them.

    about: the provider, class or consumer that the refusal is about, where the answer names it apart from the words.
    """

    why: Why
    words: str = ""
    about: str = ""


def generation_conflict() -> WriteRefusal:
    """The caller's resource_provider_generation is not the provider's."""
    return WriteRefusal(Why.GENERATION, "resource provider generation conflict")


def no_provider(uuid: str) -> WriteRefusal:
    """No provider has this uuid."""
    return WriteRefusal(Why.NO_PROVIDER, f"No resource provider with uuid {uuid} found", uuid)


def no_such_class(name: str) -> WriteRefusal:
    """The book does not know the class."""
    return WriteRefusal(Why.NO_SUCH, f"No such resource class {name}.", name)
