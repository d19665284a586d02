"""`berth placement audit --consumers FILE --repair` releases what was claimed since the file was written."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from berth.commands import book

OLD, NEW = "11111111-2222-4333-8444-555555555555", "22222222-2222-4333-8444-555555555555"


class Connection:
    """Both hold something; NEW by Nova's claim of a second ago, for a server that was booted after the list."""

    async def fetch(self, statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
        assert statement == book.HELD, "a query that knows ages would filter them here"
        return [(one, 0, "", 1, "p", "u") for one in (OLD, NEW)]


class Database:
    @contextlib.asynccontextmanager
    async def raw(self) -> Any:
        yield Connection()


@pytest.mark.xfail(strict=True, reason="Found A3")
async def test_a_consumer_that_is_younger_than_the_list_is_left_alone(tmp_path: Path, monkeypatch: Any) -> None:
    async def none_doubled(_: Any) -> list[str]:
        return []

    monkeypatch.setattr(book.questions, "doubled", none_doubled)
    names = tmp_path / "ids"
    names.write_text(f"{OLD}\n")  # `openstack server list --all-projects`, a minute ago
    orphans, _ = await book._unnamed(Database(), names)  # type: ignore[arg-type]
    assert [book._consumer_of(one) for one in orphans] == []


@pytest.mark.xfail(strict=True, reason="Found A3")
def test_there_is_a_grace_as_without_the_file() -> None:
    assert "updated_at" in book.HELD
