"""The journal on a disk that loses power, or that may not be written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from compute_sim.journal import Journal, JournalUnusable


@pytest.mark.xfail(strict=True, reason="Found A13")
def test_the_journal_of_real_machines_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fences and `gone` of `driver = "ironic"` are in this file; a power cut takes the last of them."""

    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    journal = Journal(tmp_path / "j", int)
    journal.open()
    journal.append([1])
    journal.rewrite([1])
    journal.close()
    assert synced


@pytest.mark.xfail(strict=True, reason="Found A13")
def test_a_journal_that_cannot_be_rewritten_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that has become read-only: a raw OSError leaves `rewrite`, which promises JournalUnusable."""

    journal = Journal(tmp_path / "j", int)
    journal.open()
    real = os.open

    def refuse(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(".new"):
            raise OSError(30, "Read-only file system")
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    try:
        with pytest.raises(JournalUnusable):
            journal.rewrite([1])
    finally:
        journal.close()
