"""A group of inventory updates while a store applies it: which updates are stale, which are new, and each one's
result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import encode
from bus.contracts.placement import COMPUTE_REPORTER, OTHER_SERVICE, InventoryResult, InventoryUpdate, ProviderReport
from placement_worker.domain.reports import Applied, ReportRefusal, problem_of, refuse_foreign, without_unknown
from placement_worker.domain.trees import TreesToLock
from placement_worker.domain.values import ABOVE_CELLS, Provider, is_class, is_custom, is_foreign

Key = tuple[str, str]  # (root, reporter)


class LastReport(Struct, frozen=True):
    """The last report of one reporter about one root. complete: placement holds exactly this report. providers: the
    providers that the reporter is responsible for.
    """

    version: int
    digest: bytes
    complete: bool
    providers: Sequence[str]


DIGEST_BYTES = 16
MAX_UNKNOWN = 16  # traits that a result names
NO_REPORT = LastReport(-1, b"", False, ())
LastReports = Mapping[Key, LastReport]


def digest_of(providers: Sequence[ProviderReport]) -> bytes:
    """A digest of a report's content, without its version."""
    return hashlib.blake2b(encode(providers), digest_size=DIGEST_BYTES).digest()


# The digest of the last report of a reporter that has removed its root.
WITHDRAWN = digest_of(())
# This value replaces the digest of a reporter's last report when the cell's conductor has released the root. The next
# report of that reporter makes the root its own again.
RELEASED = b"released"
FREE = (RELEASED, WITHDRAWN)


def names_of_reports(updates: Sequence[InventoryUpdate]) -> tuple[set[str], set[str]]:
    """The (classes, CUSTOM_ traits) that the valid updates name, which are created ahead of their transaction."""
    classes: set[str] = set()
    traits: set[str] = set()
    for update in updates:
        if problem_of(update) is None:
            for report in update.providers:
                classes.update(filter(is_class, report.inventories))
                traits.update(filter(is_custom, report.traits))
    return classes, traits


def trees_of_reports(updates: Sequence[InventoryUpdate]) -> TreesToLock:
    """Every tree that contains a root, a provider or a name of the updates."""
    reports = [report for update in updates for report in update.providers]
    uuids = {report.uuid for report in reports}
    whole = uuids | {update.root_uuid for update in updates}
    return TreesToLock(names={report.name for report in reports}, whole=whole, creating=sorted(uuids))


def split_by_root(updates: Sequence[InventoryUpdate]) -> list[list[InventoryUpdate]]:
    """The updates in order, in groups that name each root once: a later report of a root is decided by what the earlier
    one has left in placement.
    """
    groups: list[list[InventoryUpdate]] = []
    roots: set[str] = set()
    for update in updates:
        if not groups or update.root_uuid in roots:
            groups.append([])
            roots.clear()
        roots.add(update.root_uuid)
        groups[-1].append(update)
    return groups


class ReportGroup:
    """One group of updates, each of another root: the updates, the earlier reports of their reporters, and the result
    of each update.

    bus: the bus on which all of them arrived. cells: the cell of every root that was ever reported.
    """

    def __init__(
        self, updates: Sequence[InventoryUpdate], reporters: LastReports, *, cells: Mapping[str, str | None], bus: str
    ) -> None:
        self.updates = list(updates)
        self.bus = bus
        self._cells = cells
        self.keys: list[Key] = [(u.root_uuid, u.reporter) for u in updates]
        self.results: dict[int, InventoryResult | ReportRefusal] = {}
        self._written: dict[Key, LastReport] = {}
        self.repeated_versions: dict[Key, int] = {}  # the versions of complete reports of the same content
        self._changed: dict[str, set[Key]] = {}  # by root: the reports that have changed its tree
        self._digests = [digest_of(update.providers) for update in updates]
        self._last_reports = reporters
        self._unknown: dict[int, tuple[str, ...]] = {}  # by update: the traits that were left out
        self._taken_over: dict[int, str] = {}  # by update: the reporter whose root it takes over
        self._of_root: dict[str, list[Key]] = {}
        for key in reporters:
            self._of_root.setdefault(key[0], []).append(key)

    def refuse_invalid(self, known_traits: Collection[str]) -> None:
        """Refuse updates that are invalid in themselves, whatever placement holds, and a report about a root of another
        cell, before its version can make the reports of the root's own cell stale. Traits that placement does not know
        are left out: what else the report says of the host must not be lost with them.

        The other providers of a report, and roots that no reporter ever reported, are checked when the report is
        planned.
        """
        for number, update in enumerate(self.updates):
            wrong = None
            if not self._is_complete(number):
                self.updates[number], self._unknown[number] = without_unknown(update, known_traits)
                if self._unknown[number]:
                    self._digests[number] = digest_of(self.updates[number].providers)
                wrong = problem_of(update)
            if wrong is None and is_foreign(self._cells.get(update.root_uuid), self.bus):
                wrong = refuse_foreign(update.root_uuid)
            if wrong is not None:
                self.results[number] = wrong

    def refuse_owned(self) -> None:
        """Refuse a compute service's report of a root that belongs to another service, before the report's version is
        recorded.

        Otherwise two hosts with one uuid would overwrite each other's inventory. A report that names the owner
        (`former_reporter`) takes the root over once the cell's conductor has released it; one that its owner has taken
        out any may have.
        """
        for number, update in enumerate(self.updates):
            if number in self.results or not update.reporter.startswith(COMPUTE_REPORTER):
                continue
            root, reporter = self.keys[number]
            owners = self._owners(root)
            if reporter in owners or not owners:
                continue
            digest = self._last_reports[root, owners[0]].digest
            if digest == WITHDRAWN or (digest == RELEASED and update.former_reporter in owners):
                self._taken_over[number] = owners[0]
            else:
                self.results[number] = InventoryResult(outcome=OTHER_SERVICE, owner=owners[0])

    def _owners(self, root: str) -> list[str]:
        """The compute services (as reporters) that have reported the root as their own: one, or none."""
        named = [key for key in sorted(self._of_root.get(root, ())) if key[1].startswith(COMPUTE_REPORTER)]
        return [key[1] for key in named if root in self._last_reports[key].providers]

    def refuse_stale(self) -> None:
        """Set the result of the reports that are not newer than the last recorded one of their reporter and root."""
        for number, update in enumerate(self.updates):
            last = self.last_report(number)
            if number in self.results or update.version > last.version:
                continue
            if (update.version, self._digests[number]) == (last.version, last.digest):
                self.results[number] = InventoryResult(outcome="unchanged")
            else:
                self.results[number] = InventoryResult(outcome="stale", version=last.version)

    def updates_to_plan(self) -> list[int]:
        """Return the indices of the updates to plan. A report of the same content as the last one only updates the
        version of its reporter.
        """
        fresh: list[int] = []
        for number in range(len(self.updates)):
            if number in self.results:
                continue
            if self._is_bound(number) and self._is_complete(number):
                self.results[number] = InventoryResult(outcome="unchanged")
                self.repeated_versions[self.keys[number]] = self.updates[number].version
            else:
                fresh.append(number)
        return fresh

    def _is_complete(self, number: int) -> bool:
        """Whether placement holds exactly this report: its reporter has reported the same before."""
        known = self.last_report(number)
        return known.complete and known.digest == self._digests[number]

    def _is_bound(self, number: int) -> bool:
        """Whether the root's cell is complete, so that a report of the same content changes nothing."""
        cell, named = self._cells.get(self.keys[number][0]), self.updates[number].cell
        return named in (None, cell) if self.bus == ABOVE_CELLS else cell is not None

    def record_results(self, fresh: Sequence[int], results: Sequence[Applied | ReportRefusal]) -> None:
        """Record the results of the planned updates."""
        for number, result in zip(fresh, results, strict=True):
            if isinstance(result, ReportRefusal):
                self.results[number] = result
                continue
            outcome = "applied" if result.changed else "unchanged"
            self.results[number] = InventoryResult(outcome=outcome, orphaned=result.orphaned)
            # From now on this reporter is responsible for the providers that it reports, and for its former ones that
            # are orphaned. No other one is, but a compute service whose root was not released.
            answers_for = [*result.reported, *(uuid for uuid in result.orphaned if "/" not in uuid)]
            given = {*answers_for, *self.earlier(number)}
            row = LastReport(
                self.updates[number].version, self._digests[number], not result.orphaned, tuple(answers_for)
            )
            self._written[self.keys[number]] = row
            for key in self._other_reporters(number):
                row = self._last_reports[key]
                left = tuple(uuid for uuid in row.providers if uuid not in given)
                is_free = row.digest in FREE or not key[1].startswith(COMPUTE_REPORTER)
                if is_free and len(left) < len(row.providers):
                    self._written[key] = replace(row, complete=False, providers=left)  # what was given up stays so
            for root in (self.keys[number][0], *result.left) if result.changed else ():
                self._changed.setdefault(root, set()).add(self.keys[number])

    def written(self) -> dict[Key, LastReport]:
        """The reporters to write. A report no longer proves what placement holds when another one of the group has
        changed the tree.
        """
        return {
            key: replace(row, complete=False) if self._changed.get(key[0], set()) - {key} else row
            for key, row in self._written.items()
        }

    def last_report(self, number: int) -> LastReport:
        """The earlier report of an update's reporter."""
        return self._last_reports.get(self.keys[number], NO_REPORT)

    def earlier(self, number: int) -> Sequence[str]:
        """The providers that an update takes out if it does not report them: those that its reporter reported before,
        and those of the reporter whose root it takes over, but none that a further reporter reports by now. With the
        root it takes out the whole tree, also a root that no reporter answers for.
        """
        root, taken = self.keys[number][0], self._taken_over.get(number)
        rows = {key: self._last_reports[key] for key in self._other_reporters(number)}
        others = {uuid for row in rows.values() if row.digest not in FREE for uuid in row.providers}
        own = [*self.last_report(number).providers, *(() if taken is None else rows[root, taken].providers)]
        own += () if self.updates[number].providers else (root,)
        return tuple(uuid for uuid in dict.fromkeys(own) if uuid not in others)

    def _other_reporters(self, number: int) -> list[Key]:
        """The other reporters of an update's root."""
        own = self.keys[number]
        return [key for key in self._of_root.get(own[0], ()) if key != own]

    def answers(self, sequence: int) -> list[InventoryResult | ReportRefusal]:
        """Every result, in order; a result that changed placement carries the transaction's feed number."""
        return [self._numbered(number, sequence) for number in range(len(self.updates))]

    def _numbered(self, number: int, sequence: int) -> InventoryResult | ReportRefusal:
        result, unknown = self.results[number], self._unknown.get(number, ())[:MAX_UNKNOWN]
        if isinstance(result, ReportRefusal):
            return result
        return replace(result, sequence=sequence * (result.outcome == "applied"), unknown_traits=unknown)


def is_retired(tree: Iterable[Provider], *, long_ago: bool) -> bool:
    """Whether all inventory of a tree that was taken out is orphaned and unused, so that the tree can be removed.

    One without inventory, to which a client may be about to add some, and one with what others gave it, only when it
    was taken out long ago.
    """
    providers = list(tree)
    inventories = [inventory for provider in providers for inventory in provider.inventories.values()]
    unused = not any(any(provider.used.values()) for provider in providers)
    waits = not inventories or any(provider.is_changed_by_clients for provider in providers)
    return bool(providers) and unused and all(one.orphaned for one in inventories) and (long_ago or not waits)
