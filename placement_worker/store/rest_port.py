"""The port to the book for the REST API. Its adapters are `store.rest_postgres` and `store.rest_memory`."""

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
    """The kind of a name. The value is the name of its table."""

    CLASS = "resource_classes"
    TRAIT = "traits"


class NameInUse(Exception):
    """A class or trait cannot be removed while a provider has it."""


class Unstorable(Exception):
    """The book cannot store a value, such as a text with a NUL."""


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
    """The conditions of a list of providers. A condition that is None or empty does not apply. Every uuid is in
    canonical form.

    required: the provider has at least one trait of each group; member_of: it is in at least one aggregate of each
    group. resources: each amount is free and satisfies the inventory's unit constraints.
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
    """The book for the REST API. A group of writes is one transaction, and each read is of one moment. Every method
    raises Transient and Unstorable.
    """

    # --- writes

    async def write_trees(self, writes: Sequence[TreeWrite]) -> list[TreeOutcome]:
        """Apply a group of writes of providers, in order, each with its own outcome."""

    async def write_allocations(self, items: Sequence[AllocationWrite]) -> list[AllocationOutcome]:
        """Apply a group of writes of allocations, in order, each with its own outcome."""

    async def reshape(self, item: Reshape) -> WriteRefusal | None:
        """Apply one reshape. Returns the refusal, None when it was applied."""

    # --- names

    async def unknown_classes(self, named: Iterable[str]) -> list[str]:
        """Return those of these names that are not resource classes of the book, in order."""

    async def unknown_traits(self, named: Iterable[str]) -> list[str]:
        """Return those of these names that are not traits of the book, in order."""

    async def refresh_names(self) -> None:
        """Read the names again: another process may have created, renamed or removed a class."""

    async def name(self, kind: NameKind, name: str) -> NameRow | None:
        """Return a class or trait by name, None when it does not exist."""

    async def create_name(self, kind: NameKind, name: str) -> bool:
        """Create a class or trait. Returns False when it exists."""

    async def delete_name(self, kind: NameKind, name: str) -> bool:
        """Remove a class or trait. Returns False when it does not exist. Raises NameInUse."""

    async def rename_class(self, old: str, new: str) -> bool | None:
        """Give a class another name. Returns False when the class does not exist, None when the name is taken."""

    async def resource_classes(self) -> list[NameRow]:
        """All classes, standard ones first."""

    async def trait_names(self, names: list[str] | None, prefix: str | None, associated: bool | None) -> list[NameRow]:
        """Return the traits with one of these names and with this prefix. associated: only those that a provider has
        (True) or none has (False). None: the condition does not apply.
        """

    # --- reads

    async def providers(self, listing: Listing) -> Sequence[Sequence[Any]]:
        """Return the providers that meet the conditions, oldest first. Each is a sequence of the fields of ProviderRow.
        There may be very many.
        """

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
