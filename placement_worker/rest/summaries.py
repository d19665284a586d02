"""Renders the provider summaries of allocation candidates as text, directly from columns.

The text of a provider is cached until its row changes, for the versions that clients use: few of the thousand summaries
in an answer have changed since the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec
import numpy as np

from placement_worker.domain.names import is_custom
from placement_worker.replica.book import Book
from placement_worker.replica.candidates import CandidateSet
from placement_worker.replica.columns import CAPACITY, Amounts, ClassColumns, Rows
from placement_worker.replica.trees import NO_ROW

SINCE_TRAITS = 17
SINCE_ALL_CLASSES = 27
SINCE_NESTED = 29

# The number of rows of a book whose texts are cached, some 300 bytes each.
ROWS_KEPT = 1 << 18


def summaries(book: Book, found: CandidateSet, classes: Collection[str], version: int) -> bytes:
    """Return the summaries of every provider of the candidates. classes: the requested classes; below 1.27 only these
    are listed.
    """
    if not len(found):
        return b""
    if version < SINCE_NESTED:
        rows = np.unique(_giving(found))
        return b",".join(_texts(book, rows, None if version >= SINCE_ALL_CLASSES else classes, version)[1])
    rows = found.touched()
    if book.top > ROWS_KEPT:
        return b",".join(_texts(book, rows, None, version)[1])
    kept = book.texts.get("summaries")
    if not isinstance(kept, _Kept):
        kept = book.texts["summaries"] = _Kept()
    return kept.of(book, rows)


class _Kept:
    """The texts by row, with the stamp that the row had when the text was rendered."""

    def __init__(self) -> None:
        self._texts: list[bytes] = []
        self._stamps: Amounts = np.zeros(0, dtype=np.int64)

    def of(self, book: Book, rows: Rows) -> bytes:
        """Return the texts of these rows, in the order of the rows."""
        if len(self._texts) < book.size:
            self._texts += [b""] * (book.size - len(self._texts))
            stamps, self._stamps = self._stamps, np.zeros(book.size, dtype=np.int64)
            self._stamps[: len(stamps)] = stamps
        texts = self._texts
        stale = rows[self._stamps[rows] != book.stamp[rows]]
        if len(stale):
            order, fresh = _texts(book, stale, None, SINCE_NESTED)
            for row, text in zip(order.tolist(), fresh, strict=True):
                texts[row] = text
            self._stamps[stale] = book.stamp[stale]
        return b",".join([texts[row] for row in rows.tolist()])


def _texts(book: Book, rows: Rows, only: Collection[str] | None, version: int) -> tuple[Rows, list[bytes]]:
    """Return (the rows in another order, their texts). Providers with the same classes and traits share a template."""
    kinds = np.stack([book.classes[rows], book.traits[rows]], axis=1)
    distinct, which = np.unique(kinds, axis=0, return_inverse=True)
    by_number = {column.number: column for name in book.resource_classes() if (column := book.column(name))}
    order: list[Rows] = []
    parts: list[bytes] = []
    for number, (classes, traits) in enumerate(distinct.tolist()):
        columns = [by_number[each] for each in book.class_sets.values[classes]]
        shown = [column for column in columns if only is None or column.name in only]
        for alike, present in _by_inventory(rows[which == number], shown):
            order.append(alike)
            parts += _alike(book, alike, present, book.trait_sets.values[traits], version)
    return np.concatenate(order), parts


def _giving(found: CandidateSet) -> Rows:
    slots = [number for number, slot in enumerate(found.slots) if slot.resources]
    rows: Rows = found.rows[:, slots]
    return rows


def _by_inventory(rows: Rows, classes: Sequence[ClassColumns]) -> Iterator[tuple[Rows, list[ClassColumns]]]:
    """Group the rows by the classes that they have inventory of. A class that is used without inventory, or was
    removed, is not listed.
    """
    has = np.array([column.kind[rows] > 0 for column in classes], dtype=np.bool_).reshape(len(classes), len(rows))
    if has.all():
        yield rows, list(classes)
        return
    distinct, which = np.unique(has.T, axis=0, return_inverse=True)
    for number, present in enumerate(distinct.tolist()):
        yield rows[which == number], [column for column, there in zip(classes, present, strict=True) if there]


def _alike(book: Book, rows: Rows, classes: Sequence[ClassColumns], traits: Sequence[str], version: int) -> list[bytes]:
    """Render the summaries of providers that have inventory of the same classes, and the same traits."""
    names, figures = _figures(rows, classes)
    resources = ",".join(f'"{name}":{{"capacity":%s,"used":%s}}' for name in names)
    template = f'"%s":{{"resources":{{{resources}}}'
    columns: list[list[object]] = [[book.uuid_of(row) for row in rows.tolist()], *figures]
    if version >= SINCE_TRAITS:
        listed = sorted(traits, key=lambda trait: (is_custom(trait), trait))  # Placement lists standard traits first
        template += f',"traits":{msgspec.json.encode(listed).decode()}'
    if version >= SINCE_NESTED:
        template += ',"parent_provider_uuid":%s,"root_provider_uuid":"%s"'
        columns.append(
            ["null" if up == NO_ROW else f'"{book.uuid_of(up)}"' for up in book.parent[rows].tolist()],
        )
        columns.append([book.uuid_of(row) for row in book.root[rows].tolist()])
    template += "}"
    return [(template % values).encode() for values in zip(*columns, strict=True)]


def _figures(rows: Rows, classes: Sequence[ClassColumns]) -> tuple[list[str], list[list[object]]]:
    """Return (the classes, and for each class a column of capacities and a column of usage)."""
    figures: list[list[object]] = []
    for column in classes:
        figures.append(column.kinds.columns()[CAPACITY][column.kind[rows]].tolist())
        figures.append(column.used[rows].tolist())
    return [column.name for column in classes], figures
