"""The numbered change feed of placement, and its snapshots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Generation, Message, Uuid, Version
from bus.contracts.placement import ProviderState

# Causes that one change names; of a larger group of writes the first ones.
MAX_CAUSES = 16


class Change(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One committed change of one provider, numbered without holes in commit order. Exactly one of `state`, `used` and
    `removed` is set.
    """

    sequence: int = 0  # given by its place in its row (`FeedRow`)
    provider: Uuid
    generation: Generation
    state: ProviderState | None = None  # the whole provider: it was created, or its spec generation changed
    used: dict[str, int] | None = None  # only usage changed: {class: new absolute amount} of the classes touched
    removed: bool = False
    # ids of the REST requests that it comes from, where known: the caller's own (a global request id), else ours.
    # Several of changes written together; none of changes that came by the bus.
    causes: Annotated[tuple[Annotated[str, Bound(max_length=64)], ...], Bound(max_length=MAX_CAUSES)] = ()


# Names one incarnation of placement. It changes after a restore, an import and the promotion of a stand-by: numbers and
# generations of two incarnations do not compare, and a replica of one takes a snapshot of the other. Empty: unknown.
FeedIncarnation = Annotated[str, Bound(max_length=64)]


class FeedRow(Struct, frozen=True, kw_only=True):
    """Changes that were committed together, numbered by their places from `first` to `last`.

    A sender passes on the bytes that were committed, as a msgspec.Raw in `changes`; a receiver has them decoded.
    """

    first: Version
    last: Version
    changes: Annotated[tuple[Change, ...], Bound(min_length=1)]

    def __post_init__(self) -> None:
        """Number the changes. Raises ValueError when there are more or fewer than numbers."""
        changes: Any = self.changes
        if not isinstance(changes, msgspec.Raw):
            number(changes, self.first, self.last)


_decode_changes = msgspec.json.Decoder(tuple[Change, ...]).decode


def number(changes: tuple[Change, ...], first: int, last: int) -> tuple[Change, ...]:
    """Give the changes these numbers, and return them. Raises ValueError when there are more or fewer than numbers."""
    if len(changes) != last - first + 1:
        raise ValueError(f"{len(changes)} changes from {first} to {last}")
    for sequence, change in enumerate(changes, first):
        msgspec.structs.force_setattr(change, "sequence", sequence)
    return changes


def changes_in(rows: Iterable[FeedRow]) -> tuple[Change, ...]:
    """The changes of rows, in order, with their numbers."""
    found: list[Change] = []
    for row in rows:
        changes: Any = row.changes
        is_raw = isinstance(changes, msgspec.Raw)
        found += number(_decode_changes(changes), row.first, row.last) if is_raw else changes
    return tuple(found)


def feed_rows(changes: Iterable[Change]) -> tuple[FeedRow, ...]:
    """Numbered changes as rows, one for each consecutive run."""
    runs: list[list[Change]] = []
    for change in changes:
        if not runs or runs[-1][-1].sequence + 1 != change.sequence:
            runs.append([])
        runs[-1].append(change)
    return tuple(FeedRow(first=run[0].sequence, last=run[-1].sequence, changes=tuple(run)) for run in runs)


class FeedChanges(Message, frozen=True, kw_only=True, tag="placement.event.changes.v1"):
    """Changes in sequence order, consecutive from the first one's number. May repeat, never skip."""

    rows: Annotated[tuple[FeedRow, ...], Bound(min_length=1)]
    incarnation: FeedIncarnation = ""

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes, in order."""
        return changes_in(self.rows)


class FeedHead(Message, frozen=True, kw_only=True, tag="placement.event.head.v1"):
    """Published at intervals: the newest committed number and its incarnation; it reveals a silent gap or restore."""

    sequence: int
    incarnation: FeedIncarnation = ""


class ChangesRequest(Message, frozen=True, kw_only=True, tag="placement.changes.v1"):
    """Ask for changes after a number (a gap was seen) of an incarnation."""

    after: Version
    limit: Annotated[int, Bound(ge=1, le=10_000)] = 1000
    incarnation: FeedIncarnation = ""


class ChangesPage(Message, frozen=True, kw_only=True, tag="placement.changes.page.v1"):
    """Reply. `too_old`: the feed no longer reaches back that far, or is of another incarnation; take a snapshot."""

    rows: tuple[FeedRow, ...] = ()
    head: int = 0
    too_old: bool = False
    incarnation: FeedIncarnation = ""

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes, in order."""
        return changes_in(self.rows)


class SnapshotRequest(Message, frozen=True, kw_only=True, tag="placement.snapshot.v1"):
    """Ask for all of placement, a page at a time, by provider uuid."""

    after: Uuid | None = None
    limit: Annotated[int, Bound(ge=1, le=5000)] = 1000


class SnapshotPage(Message, frozen=True, kw_only=True, tag="placement.snapshot.page.v1"):
    """Reply. `sequence`: the feed number this page is true at. Pages may be true at different numbers:
    apply changes after the *first* page's number on top (states are absolute; older generations lose).
    `more`: ask again after the last provider's uuid. Pages of two incarnations do not make one snapshot.
    """

    sequence: int
    providers: tuple[ProviderState, ...] = ()
    more: bool = False
    incarnation: FeedIncarnation = ""
