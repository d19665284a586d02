"""The committed rows of placement in memory, which outlive the placement workers that use them (`memory_rows.py`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import os_traits
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import DatabaseMark
from bus.contracts.feed import Change, FeedHead
from bus.contracts.placement import MAX_CONFLICTING_CONSUMERS, ConflictingConsumer
from bus.persistence.memory_database import MemoryDatabase
from placement_worker.domain.report_group import WITHDRAWN, Key, LastReport, LastReports
from placement_worker.domain.server_groups import hosts_of, usage_changes
from placement_worker.domain.values import STANDARD_CLASSES, ConsumerState, GroupKey, Provider
from placement_worker.store.port import Leaving, NameKind

Amount = TypeVar("Amount")

TREES = ("trees",)  # the lock of the writers of trees


def provider_key(uuid: str) -> tuple[str, str]:
    """The key of the lock of a provider's row."""
    return ("provider", uuid)


class ConsumerRow(Struct):
    """A consumer's row. released_at: set when the row only states ended attempts. Times are seconds since the epoch."""

    consumer: ConsumerState
    released_at: float | None
    updated_at: float
    created_at: float

    def is_over(self, before: float) -> bool:
        """Whether it holds nothing and was released before this time (seconds since the epoch)."""
        return self.released_at is not None and self.released_at < before


class MemoryPlacementTable(MemoryDatabase):
    """The committed rows, which outlive the placement workers. providers: oldest first, which is the order of their
    locks.
    """

    ROWS = (*MemoryDatabase.ROWS, "position", "taken_until")  # other rows are flushed by their commit

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self.providers: dict[str, Provider] = {}
        self.consumers: dict[str, ConsumerRow] = {}
        self.project_usage: dict[str, dict[str, int]] = {}  # by class; each amount stands for a row
        self.members: dict[GroupKey, dict[str, None]] = {}
        self.reporters: dict[Key, LastReport] = {}
        self.reported_at: dict[Key, float] = {}  # the time of each reporter's last report
        self.classes: dict[str, int] = {name: number for number, name in enumerate(sorted(STANDARD_CLASSES))}
        self.traits: dict[str, int] = {name: number for number, name in enumerate(sorted(os_traits.get_traits()))}
        now = self.clock.time()
        self.made = {(NameKind.CLASS, name): now for name in self.classes}  # the time at which each name was created
        self.made.update({(NameKind.TRAIT, name): now for name in self.traits})
        self.written: dict[str, float] = {}  # the time of each provider's last write
        self.changes: list[Change] = []  # the changes that are kept, in order
        self.head = 0
        self.place = 1  # not a row: like a cluster and its timeline, it is not restored from a backup
        self.origin = self.place
        self.incarnations = 1  # not a row: no incarnation id is given twice
        self.incarnation = "incarnation-1"
        self.position = 0
        self.taken_until = -math.inf  # the end of the publishing process's lease
        self.marks: dict[str, DatabaseMark] = {}  # of each cell's database, the highest
        self._next_name = len(self.classes) + len(self.traits)
        self._spec_generations = 0

    @property
    def newest(self) -> FeedHead:
        """The newest number and the id of its incarnation."""
        return FeedHead(sequence=self.head, incarnation=self.incarnation)

    def renew_incarnation(self) -> None:
        """Give the incarnation a new id."""
        self.incarnations += 1
        self.incarnation, self.origin = f"incarnation-{self.incarnations}", self.place

    def next_spec_generation(self) -> int:
        """A spec generation that no provider has ever had."""
        self._spec_generations += 1
        return self._spec_generations

    def alive(self, key: GroupKey, unwritten: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
        """The members of a server group that hold allocations, and their hosts. unwritten: members that are not written
        yet.
        """
        return {
            uuid: hosts_of([self.providers[provider] for provider in self.consumers[uuid].consumer.allocations])
            for uuid in dict.fromkeys((*self.members.get(key, {}), *unwritten))
            if uuid in self.consumers and self.consumers[uuid].consumer.allocations
        }

    def add_members(self, joined: Mapping[GroupKey, Collection[str]]) -> None:
        """Insert members of server groups."""
        for key, consumers in joined.items():
            self.members.setdefault(key, {}).update(dict.fromkeys(consumers))

    def usage_of(self, project: str) -> dict[str, int]:
        """The amounts that a project's consumers hold by class, and the number of consumers."""
        return dict(self.project_usage.get(project, {}))

    def keep(self, consumers: Mapping[str, ConsumerState | None]) -> None:
        """Write consumers and the usage of their projects. None: the row is deleted."""
        before = {uuid: self.consumers[uuid].consumer for uuid in consumers if uuid in self.consumers}
        for (project, name), more in usage_changes(before, consumers).items():
            usage = self.project_usage.setdefault(project, {})
            usage[name] = usage.get(name, 0) + more
        now = self.clock.time()
        for uuid, consumer in consumers.items():
            if consumer is None:
                self.consumers.pop(uuid, None)
            else:
                known = self.consumers.get(uuid)
                created_at = now if known is None else known.created_at
                self.consumers[uuid] = ConsumerRow(consumer, None if consumer.allocations else now, now, created_at)

    def cell(self, uuid: str) -> str | None:
        """The cell of a provider, which is the cell of its root."""
        provider = self.providers.get(uuid)
        return self.providers[provider.root].cell if provider is not None else None

    def by_number(self, uuids: Collection[str]) -> list[str]:
        """The existing ones of these providers, in lock order."""
        return [uuid for uuid in self.providers if uuid in uuids]

    def mark_published(self, number: int, lease: float) -> None:
        """Record that changes up to this number are published, and end the lease if it still belongs to this turn."""
        self.position = max(self.position, number)
        if self.taken_until == lease:
            self.taken_until = -math.inf

    def consumers_of(self, leaving: Sequence[Leaving]) -> list[str]:
        """The consumers that hold allocations of the leaving (provider, class) pairs, in lock order."""
        return sorted(
            uuid
            for uuid, kept in self.consumers.items()
            if any(name in kept.consumer.allocations.get(provider, {}) for provider, name in leaving)
        )

    def newest_consumers(
        self, changed: Mapping[str, ConsumerState | None], lacking: Sequence[tuple[str, str]], claimant: str
    ) -> tuple[ConflictingConsumer, ...]:
        """The consumers, without the claimant, that hold allocations of the lacking (provider, class) pairs, last
        changed first.

        changed: the consumers that a transaction is about to write; these are the newest.
        """
        known = {uuid: (row.consumer, -row.updated_at) for uuid, row in self.consumers.items() if uuid not in changed}
        known.update({uuid: (one, -math.inf) for uuid, one in changed.items() if one is not None})
        held = [
            (age, uuid, consumer.project_id)
            for uuid, (consumer, age) in known.items()
            if uuid != claimant and any(name in consumer.allocations.get(provider, {}) for provider, name in lacking)
        ]
        return tuple(
            ConflictingConsumer(consumer=uuid, project_id=project)
            for _, uuid, project in sorted(held)[:MAX_CONFLICTING_CONSUMERS]
        )

    def put_provider(self, provider: Provider) -> None:
        """Write a provider, and the time."""
        self.providers[provider.uuid] = provider
        self.written[provider.uuid] = self.clock.time()

    def put_usage(self, generations: Mapping[str, int], used: Mapping[str, Mapping[str, int]]) -> None:
        """Write the usage of these providers, and their generations."""
        for uuid, generation in generations.items():
            provider = self.providers[uuid]
            amounts = {**provider.used, **used[uuid]}
            kept = {name: amount for name, amount in amounts.items() if amount}
            self.put_provider(replace(provider, generation=generation, used=kept))

    def put_trees(self, before: Mapping[str, Provider], after: Mapping[str, Provider]) -> None:
        """Write the differences between `before` and `after`, but not the usage. The last reports of the reporters of
        the changed trees no longer prove what placement holds.
        """
        gone = [provider for uuid, provider in before.items() if uuid not in after]
        changed = [provider for uuid, provider in after.items() if before.get(uuid) is not provider]
        for provider in gone:
            del self.providers[provider.uuid]
            del self.written[provider.uuid]
        for provider in changed:
            known = self.providers.get(provider.uuid)
            self.put_provider(replace(provider, used={} if known is None else known.used))
        moved = [before[provider.uuid] for provider in changed if provider.uuid in before]
        self._mark_incomplete({provider.root for provider in (*gone, *changed, *moved)})

    def _mark_incomplete(self, roots: Collection[str]) -> None:
        for key, reporter in self.reporters.items():
            if key[0] in roots and reporter.complete:
                self.reporters[key] = replace(reporter, complete=False)

    def put_reporters(self, reporters: LastReports, disowned: Collection[str]) -> None:
        """Write the last reports of reporters. disowned: the roots for which no reporter answers any more."""
        for key, reporter in self.reporters.items():
            if key[0] in disowned:
                self.reporters[key] = replace(reporter, digest=b"", complete=False, providers=())
        for key, reporter in reporters.items():
            self.reporters[key] = reporter
            self.reported_at[key] = self.clock.time()

    def add_names(self, kind: NameKind, names: Iterable[str]) -> None:
        """Add the names that are missing."""
        for name in names:
            if name not in self.names(kind):
                self.names(kind)[name] = self._next_name
                self._next_name += 1
                self.made[kind, name] = self.clock.time()

    def names(self, kind: NameKind) -> dict[str, int]:
        """The classes or the traits, oldest first, and their numbers."""
        return self.classes if kind is NameKind.CLASS else self.traits

    def remove_name(self, kind: NameKind, name: str) -> None:
        """Remove a class or trait. The caller has checked that no provider has it."""
        self.names(kind).pop(name)
        del self.made[kind, name]

    def rename_class(self, old: str, new: str, providers: Mapping[str, Provider]) -> None:
        """Give a class another name. providers: the providers that have it, already renamed. The last reports of the
        reporters of their trees no longer prove what placement holds.
        """
        self.add_names(NameKind.CLASS, (new,))
        self.providers.update(providers)
        self._mark_incomplete({provider.root for provider in providers.values()})
        for row in self.consumers.values():
            held = row.consumer.allocations
            if any(old in resources for resources in held.values()):
                renamed = {uuid: renamed_key(resources, old, new) for uuid, resources in held.items()}
                row.consumer = replace(row.consumer, allocations=renamed)
        self.project_usage = {project: renamed_key(held, old, new) for project, held in self.project_usage.items()}
        self.remove_name(NameKind.CLASS, old)

    def silent(self, before: float) -> list[Key]:
        """The reporters whose last report is older than `before` (seconds since the epoch) and whose root does not
        exist, or that answer for no provider.
        """
        of_no_use = (key for key, last in self.reporters.items() if key[0] not in self.providers or not last.providers)
        return [key for key in of_no_use if self.reported_at[key] < before]

    def is_withdrawn(self, key: Key) -> bool:
        """Whether a reporter's last report removed its root, has not been completed, and it still answers for the root:
        no other reporter has reported it since.
        """
        report = self.reporters[key]
        return not report.complete and report.digest == WITHDRAWN and key[0] in report.providers

    def purge(
        self,
        until: int,
        before: float,
        released: Sequence[str],
        reporters: Sequence[Key],
        members: Sequence[tuple[GroupKey, str]],
    ) -> None:
        """Delete rows that are no longer kept: changes up to `until`, consumers released before `before` (seconds since
        the epoch), reporters, and members whose consumers are not on record.
        """
        for key in reporters:
            self.reporters.pop(key, None)
            self.reported_at.pop(key, None)
        self.changes = [change for change in self.changes if change.sequence > until]
        self.project_usage = {project: usage for project, usage in self.project_usage.items() if any(usage.values())}
        for uuid in released:
            kept = self.consumers.get(uuid)
            if kept is not None and kept.is_over(before):
                del self.consumers[uuid]
        for key, uuid in members:
            if uuid not in self.consumers:
                self.members[key].pop(uuid, None)


def renamed_key(amounts: Mapping[str, Amount], old: str, new: str) -> dict[str, Amount]:
    """Return the amounts by class, with one class under its new name."""
    return {new if name == old else name: amount for name, amount in amounts.items()}
