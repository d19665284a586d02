"""The port to the book as the REST API uses it. Adapters: `store.rest_postgres`, `store.rest_memory`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Protocol

from msgspec import Struct

from placement_worker.domain.allocations import AllocationOutcome, AllocationWrite
from placement_worker.domain.refusal import WriteRefusal
from placement_worker.domain.reshape import Reshape
from placement_worker.domain.trees import TreeOutcome, TreeWrite


class NameKind(StrEnum):
    """Which names: the value is the schema's table."""

    CLASS = "resource_classes"
    TRAIT = "traits"


class NameInUse(Exception):
    """A class or trait that some provider has cannot go."""


class Unstorable(Exception):
    """A value that the book cannot hold, such as a text with a NUL in it."""


class NameRow(Struct, frozen=True):
    """A class or trait. updated_at: seconds since the epoch."""

    name: str
    updated_at: float


class ProviderRow(Struct, frozen=True):
    """A provider as the API lists it. updated_at: seconds since the epoch."""

    uuid: str
    name: str
    generation: int
    parent: str | None
    root: str
    updated_at: float


class InventoryRecord(Struct, frozen=True):
    """One inventory as the API shows it. updated_at: seconds since the epoch."""

    resource_class: str
    total: int
    reserved: int
    min_unit: int
    max_unit: int
    step_size: int
    allocation_ratio: float
    updated_at: float


class AllocationRow(Struct, frozen=True):
    """One allocation, its provider and its consumer. updated_at: of the consumer, seconds since the epoch."""

    consumer: str
    provider: str
    provider_generation: int
    resource_class: str
    amount: int
    consumer_generation: int
    project_id: str
    user_id: str
    consumer_type: str
    updated_at: float


class UsageRow(Struct, frozen=True):
    """The amounts that consumers of one type hold of one class; count: how many consumers of that
    type hold anything.
    """

    consumer_type: str
    resource_class: str
    amount: int
    count: int


class Listing(Struct, frozen=True):
    """The conditions of a list of providers; None and empty: not by that. Every uuid is canonical.

    required: of each group of traits a provider has one, and of each of `member_of` one aggregate. resources: amounts
    that its inventories have left and give in one piece.
    """

    uuid: str | None = None
    name: str | None = None
    in_tree: str | None = None
    required: tuple[tuple[str, ...], ...] = ()
    forbidden: tuple[str, ...] = ()
    member_of: tuple[tuple[str, ...], ...] = ()
    forbidden_aggregates: tuple[str, ...] = ()
    resources: tuple[tuple[str, int], ...] = ()  # (class, amount)


class RestStore(Protocol):
    """Groups of writes as transactions; reads that are each true at one moment. All raise Transient and Unstorable."""

    # --- writes

    async def write_trees(self, writes: Sequence[TreeWrite]) -> list[TreeOutcome]:
        """A group of writes of providers, in order, each with its own outcome."""

    async def write_allocations(self, items: Sequence[AllocationWrite]) -> list[AllocationOutcome]:
        """A group of writes of allocations, in order, each with its own outcome."""

    async def reshape(self, item: Reshape) -> WriteRefusal | None:
        """One reshape."""

    # --- names

    async def unknown_classes(self, named: Iterable[str]) -> list[str]:
        """The names among these that are no class of the book, in order."""

    async def unknown_traits(self, named: Iterable[str]) -> list[str]:
        """The names among these that are no trait of the book, in order."""

    async def refresh_names(self) -> None:
        """Another process may have made, renamed or removed a class: look again."""

    async def name(self, kind: NameKind, name: str) -> NameRow | None:
        """A class or trait by name."""

    async def create_name(self, kind: NameKind, name: str) -> bool:
        """Make a class or trait; False when it was there."""

    async def delete_name(self, kind: NameKind, name: str) -> bool:
        """Remove a class or trait; False when it was not there. Raises NameInUse."""

    async def rename_class(self, old: str, new: str) -> bool | None:
        """Give a class another name; False when there is none, None when the name is taken."""

    async def resource_classes(self) -> list[NameRow]:
        """All classes, standard ones first."""

    async def trait_names(self, names: list[str] | None, prefix: str | None, associated: bool | None) -> list[NameRow]:
        """All traits with one of these names, with this prefix, that some provider has, or that none has."""

    # --- reads

    async def providers(self, listing: Listing) -> Sequence[Sequence[Any]]:
        """Providers that the listing leaves, oldest first: the fields of a ProviderRow each. There may be very many."""

    async def inventories(self, uuid: str) -> tuple[int, list[InventoryRecord]] | None:
        """(generation, inventories by class) of a provider, None when there is none."""

    async def usages(self, uuid: str) -> tuple[int, dict[str, int]] | None:
        """(generation, {class: used}) of a provider, None when there is none."""

    async def traits(self, uuid: str) -> tuple[int, dict[str, float]] | None:
        """(generation, {trait: when it was made}) of a provider, None when there is none."""

    async def aggregates(self, uuid: str) -> tuple[int, list[str]] | None:
        """(generation, aggregates) of a provider, None when there is none."""

    async def allocations_of_consumer(self, uuid: str) -> list[AllocationRow]:
        """The allocations of a consumer, by provider and class."""

    async def allocations_of_provider(self, uuid: str) -> tuple[int, list[AllocationRow]] | None:
        """(generation, allocations of a provider, by consumer and class), None when it does not exist."""

    async def totals(self, project_id: str, user_id: str | None, consumer_type: str | None) -> Sequence[UsageRow]:
        """The amounts that a project's (and user's, and type's) consumers hold, by type and class.

        "" is the unknown type.
        """
