"""Queries of placement by operators and schedulers, such as a host's tree with its holders, and what projects hold."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Amount, Attempt, DatabaseMark, Generation, Message, Uuid, Word
from bus.contracts.placement import MAX_NAMED, ProviderState

# Of one answer. A larger tree or project list is cut off there, and `more` is set.
MAX_TREE = 500
MAX_CONSUMERS = 5_000
MAX_PROJECTS = 1_000


class HostTreeQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="placement.tree.v1"):
    """Ask for the tree that a provider is in: its providers, and the consumers that hold something of it."""

    provider: Uuid
    limit: Annotated[int, Bound(ge=1, le=MAX_CONSUMERS)] = 1000
    after: Uuid | None = None  # the last consumer known; None: from the first


class TreeConsumer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A consumer, and its allocations in a tree: {provider: {class: amount}}. Instances are named by their uuid."""

    consumer: Uuid
    project_id: str
    user_id: str
    consumer_type: str
    attempt: Attempt = 0
    allocations: dict[Uuid, dict[str, int]] = {}


class HostTree(Message, frozen=True, kw_only=True, tag="placement.tree.page.v1"):
    """Reply to a HostTreeQuery, true at one moment: at most MAX_TREE providers by uuid, `limit` consumers by uuid. No
    providers: placement has none of that uuid. The consumers and their allocations are those of the whole tree.
    """

    providers: tuple[ProviderState, ...] = ()
    consumers: tuple[TreeConsumer, ...] = ()
    more: bool = False  # there are further providers or consumers


class GroupMembersQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="placement.group.v1"):
    """Ask who is in a server group of a project."""

    project_id: Word
    server_group: Uuid
    after: Uuid | None = None  # the last member known
    limit: Annotated[int, Bound(ge=1, le=MAX_CONSUMERS)] = 1000


class GroupMembersPage(Message, frozen=True, kw_only=True, tag="placement.group.page.v1"):
    """Reply to a GroupMembersQuery: {member: names of its hosts}, by uuid."""

    members: dict[Uuid, tuple[str, ...]] = {}
    more: bool = False  # there are further ones


class ServiceHostsQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="placement.service.v1"):
    """Ask which hosts placement has as a compute service's: it reported them last, over its cell's bus."""

    service: Word
    cell: Word
    limit: Annotated[int, Bound(ge=1, le=10_000)] = 100


class ServiceHostsPage(Message, frozen=True, kw_only=True, tag="placement.service.page.v1"):
    """Reply to a ServiceHostsQuery: {uuid: name}, in order of the names; at most as many as requested."""

    hosts: dict[str, str] = {}


class CellConsumersQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="placement.cell.v1"):
    """Ask for the consumers that hold something on a host of this cell, or on one that no cell has reported."""

    cell: Word
    after: Uuid | Literal[""] = ""  # the last uuid known ("": from the first)
    limit: Annotated[int, Bound(ge=1, le=MAX_CONSUMERS)] = 1000


class CellConsumersPage(Message, frozen=True, kw_only=True, tag="placement.cell.page.v1"):
    """Reply to a CellConsumersQuery: at most as many as requested, by uuid."""

    consumers: tuple[Uuid, ...] = ()
    last: Uuid | Literal[""] = ""  # all up to this uuid were looked at ("": all there are)
    mark: DatabaseMark = DatabaseMark()  # of the cell's database, as placement has heard it


class ProjectUsageQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="placement.usage.v1"):
    """Ask what projects hold: those named, or without names all that hold something."""

    projects: Annotated[tuple[Word, ...], Bound(max_length=MAX_PROJECTS)] = ()
    after: Word | None = None  # the last one known
    limit: Annotated[int, Bound(ge=1, le=MAX_PROJECTS)] = MAX_PROJECTS


class ProjectUsagePage(Message, frozen=True, kw_only=True, tag="placement.usage.page.v1"):
    """Reply to a ProjectUsageQuery: {project: {class: amount}}, INSTANCES for how many hold something. In order.

    A project that holds nothing is left out.
    """

    usage: dict[str, dict[str, int]] = {}
    more: bool = False  # there are further ones


class AllocationsQuery(Message, frozen=True, kw_only=True, tag="placement.allocations.v1"):
    """Ask what consumers hold, and whose it is. Changes nothing, and ends no attempt."""

    consumers: Annotated[tuple[Uuid, ...], Bound(min_length=1, max_length=MAX_NAMED)]


class ConsumerRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one consumer holds."""

    consumer: Uuid
    project_id: str
    claim_owner: str = ""  # the claim owner that has it ('': unknown)
    attempt: Attempt = 0  # of the build that holds it (0: another client of Placement's API, or a migration, holds it)
    consumer_generation: Generation
    allocations: dict[Uuid, dict[str, Amount]]
    hosts: tuple[Uuid, ...]  # the roots of its providers
    cell: Word | None = None  # of its hosts (None: no cell has reported them)


class AllocationsPage(Message, frozen=True, kw_only=True, tag="placement.allocations.page.v1"):
    """Reply to an AllocationsQuery."""

    consumers: tuple[ConsumerRecord, ...] = ()  # those that hold something, by uuid
