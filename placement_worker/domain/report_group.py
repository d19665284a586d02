"""A group of inventory updates on its way, for any store: which updates are stale, which are new, how each one ends."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from bus.contracts.base import encode
from bus.contracts.placement import COMPUTE_SOURCE, OTHER_SERVICE, InventoryResult, InventoryUpdate, ProviderReport
from placement_worker.domain.reports import Applied, ReportRefusal, flaw, foreign
from placement_worker.domain.values import ABOVE_CELLS, is_foreign

Key = tuple[str, str]  # (root, source)
SourceRow = tuple[str, str, int, bytes, bool, str]


class ReportSource(Struct, frozen=True):
    """The last report of one source about one root. settled: the book holds exactly that. providers: its own."""

    version: int
    digest: bytes
    settled: bool
    providers: Sequence[str]


NO_SOURCE = ReportSource(-1, b"", False, ())


def digest_of(providers: Sequence[ProviderReport]) -> bytes:
    """A digest of a report's content, without its version."""
    return hashlib.blake2b(encode(providers), digest_size=16).digest()


# The last report of a source that has taken its root out.
TAKEN_OUT = digest_of(())
# A source whose root the cell's conductor has released, in place of the digest of its last report: the next report of
# its own makes the root its own again.
RELEASED = b"released"
FREE = (RELEASED, TAKEN_OUT)


class ReportGroup:
    """One group of updates: what came, the earlier reports of their sources, and the result of each.

    bus: where all of them came from. cells: of every root that was ever reported, the cell it belongs to.
    written: rows of sources to write; changed: (root, source) whose trees have changed.
    """

    def __init__(
        self,
        updates: Sequence[InventoryUpdate],
        sources: Mapping[Key, ReportSource],
        *,
        cells: Mapping[str, str | None],
        bus: str,
    ) -> None:
        self.updates = updates
        self.bus = bus
        self._cells = cells
        self.keys: list[Key] = [(u.root_uuid, u.source) for u in updates]
        self.results: dict[int, InventoryResult | ReportRefusal] = {}
        self.written: list[SourceRow] = []
        self.changed: list[Key] = []
        self._digests = [digest_of(update.providers) for update in updates]
        self._sources = sources
        self._taken_over: dict[int, str] = {}  # by update: the source whose root it takes over

    def refuse_flawed(self, known_traits: Collection[str]) -> None:
        """Refuse updates that are wrong whatever the book holds."""
        for number, update in enumerate(self.updates):
            wrong = flaw(update, known_traits)
            if wrong is not None:
                self.results[number] = wrong

    def refuse_foreign(self) -> None:
        """Refuse what another cell's bus reports of a root, before its version can outdate the reports of the root's
        own cell.

        Providers that a report names beside its root, and roots that no source ever reported, are checked when it is
        planned.
        """
        for number, update in enumerate(self.updates):
            if number not in self.results and is_foreign(self._cells.get(update.root_uuid), self.bus):
                self.results[number] = foreign(update.root_uuid)

    def refuse_owned(self) -> None:
        """Refuse a compute service's report of a root that is another service's, before its version counts.

        Two hosts of one uuid would otherwise have the inventory that was reported last. The report that names its owner
        takes it over once the cell's conductor has released it, unless the owner reports the root in this very group.
        """
        owners = _owners(self._sources)
        present = {key for number, key in enumerate(self.keys) if number not in self.results}
        for number, update in enumerate(self.updates):
            if number in self.results or not update.source.startswith(COMPUTE_SOURCE):
                continue
            root, source = self.keys[number]
            has = owners.setdefault(root, [])
            if source in has:
                continue
            if not has:
                has.append(source)
            elif update.takes_over in has and self._is_free(root, update.takes_over, present):
                self._taken_over[number] = update.takes_over
                owners[root] = [source]
            else:
                self.results[number] = InventoryResult(outcome=OTHER_SERVICE, owner=has[0])

    def _is_free(self, root: str, owner: str, present: Collection[Key]) -> bool:
        return (root, owner) not in present and self._sources[root, owner].digest in FREE

    def sort_out_stale(self) -> None:
        """Of each source and root only the newest report is left without a result, if it is newer than the last one."""
        newest: dict[Key, int] = {}
        for number, update in enumerate(self.updates):
            if number in self.results:
                continue
            known, rival = self.source(number), newest.get(self.keys[number])
            last, digest = known.version, known.digest
            if rival is not None:
                last, digest = self.updates[rival].version, self._digests[rival]
            if update.version <= last:
                again = update.version == last and self._digests[number] == digest
                self.results[number] = (
                    InventoryResult(outcome="unchanged") if again else InventoryResult(outcome="stale", version=last)
                )
                continue
            if rival is not None:
                self.results[rival] = InventoryResult(outcome="stale")
            newest[self.keys[number]] = number

    def fresh(self) -> list[int]:
        """The updates to plan; a repeated report only moves its source's version."""
        fresh: list[int] = []
        for number in range(len(self.updates)):
            if number in self.results:
                continue
            known = self.source(number)
            if self._is_bound(number) and known.settled and known.digest == self._digests[number]:
                self.results[number] = InventoryResult(outcome="unchanged")
                self._write(number, True, known.providers)
            else:
                fresh.append(number)
        return fresh

    def _is_bound(self, number: int) -> bool:
        """Whether the root's cell is settled, so that a report of the same content changes nothing."""
        cell = self._cells.get(self.keys[number][0])
        if self.bus == ABOVE_CELLS:
            return self.updates[number].cell is None or cell not in (None, ABOVE_CELLS)
        return cell is not None

    def settle(self, fresh: Sequence[int], results: Sequence[Applied | ReportRefusal]) -> None:
        """How the planned ones ended."""
        for number, result in zip(fresh, results, strict=True):
            if isinstance(result, ReportRefusal):
                self.results[number] = result
                continue
            outcome = "applied" if result.changed else "unchanged"
            self.results[number] = InventoryResult(outcome=outcome, stranded=result.stranded)
            # From now on this source is responsible for the providers that it reports, and for those that it left
            # stranded.
            answers_for = [*result.reported, *(uuid for uuid in result.stranded if "/" not in uuid)]
            self._write(number, not result.stranded, answers_for)
            if number in self._taken_over:
                root, owner = self.keys[number][0], self._taken_over[number]
                self.written.append((root, owner, self._sources[root, owner].version, b"", False, ""))
            if result.changed:
                self.changed.append(self.keys[number])

    def source(self, number: int) -> ReportSource:
        """The earlier report of an update's source."""
        return self._sources.get(self.keys[number], NO_SOURCE)

    def earlier(self, number: int) -> Sequence[str]:
        """The providers that an update's source reported before, and those of the source whose root it takes over."""
        own = self.source(number).providers
        if number not in self._taken_over:
            return own
        taken = self._sources[self.keys[number][0], self._taken_over[number]].providers
        return tuple(dict.fromkeys((*own, *taken)))

    def answers(self, sequence: int) -> list[InventoryResult | ReportRefusal]:
        """Every result, in order; those that changed something carry the transaction's feed number."""
        return [_numbered(self.results[number], sequence) for number in range(len(self.updates))]

    def _write(self, number: int, settled: bool, providers: Iterable[str]) -> None:
        root, source = self.keys[number]
        version = self.updates[number].version
        self.written.append((root, source, version, self._digests[number], settled, ",".join(providers)))


def _numbered(result: InventoryResult | ReportRefusal, sequence: int) -> InventoryResult | ReportRefusal:
    if isinstance(result, InventoryResult) and result.outcome == "applied":
        return InventoryResult(outcome="applied", sequence=sequence, stranded=result.stranded)
    return result


def _owners(sources: Mapping[Key, ReportSource]) -> dict[str, list[str]]:
    """{root: the compute services' sources that have reported it as their own}.

    One of each root, unless a berth that did not refuse the second one wrote them.
    """
    owners: dict[str, list[str]] = {}
    for (root, source), last in sorted(sources.items()):
        if source.startswith(COMPUTE_SOURCE) and root in last.providers:
            owners.setdefault(root, []).append(source)
    return owners
