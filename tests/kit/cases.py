"""Rows of tables: those that one test works through, as what it needs costs more than they do, and the nightly ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def case(*names: object) -> Iterator[None]:
    """What fails in the block is reported with the row that it is of."""
    try:
        yield
    except BaseException as failure:
        failure.add_note(f"case: {', '.join(map(str, names))}")
        raise


def nightly(*rows: Any) -> list[Any]:
    """More seeds of a test, or rows alike: scripts/test leaves them out, `scripts/nightly more` runs them."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.nightly) for row in rows]
