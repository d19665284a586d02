"""Rows of a table that one test works through, because what it needs costs more than the rows do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*names: object) -> Iterator[None]:
    """What fails in the block is reported with the row that it is of."""
    try:
        yield
    except BaseException as failure:
        failure.add_note(f"case: {', '.join(map(str, names))}")
        raise
