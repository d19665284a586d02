"""`berth placement audit --consumers FILE --repair` releases what was claimed since the file was written."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from berth.cli.claims import placement_audit as book
from berth.cli.common import Stop

OLD, NEW = "11111111-2222-4333-8444-555555555555", "22222222-2222-4333-8444-555555555555"


CLAIMED_S = {OLD: 86_400.0, NEW: 1.0}  # ago; NEW by Nova's claim for a server that was booted after the list


class Connection:
    """Placement's rows of both, as the query asks for them."""

    async def fetch(self, statement: str, older_than_s: float) -> list[tuple[Any, ...]]:
        assert statement == book.HELD and "updated_at" in statement
        return [(one, 0, "", 1, "p", "u") for one, age_s in CLAIMED_S.items() if age_s >= older_than_s]


class Database:
    @contextlib.asynccontextmanager
    async def raw(self) -> Any:
        yield Connection()


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Any:
    async def none_doubled(_: Any) -> list[str]:
        return []

    monkeypatch.setattr(book.questions, "duplicates", none_doubled)
    return Database()


def listed(tmp_path: Path, *uuids: str, age_s: float) -> Path:
    """`openstack server list --all-projects`, so long ago."""
    names = tmp_path / "ids"
    names.write_text("".join(f"{one}\n" for one in uuids))
    os.utime(names, (time.time() - age_s,) * 2)
    return names


@pytest.mark.parametrize(
    ("age_s", "grace_s", "orphans"),
    [
        (60.0, 900.0, [OLD]),
        (0.0, 0.0, [OLD, NEW]),  # NEW was there, and is not in it
        (2.0, 0.0, [OLD]),
        (60.0, 90_000.0, []),  # there is a grace as without the file
    ],
)
async def test_what_was_claimed_since_the_list_was_written_is_left_alone(
    tmp_path: Path, database: Any, age_s: float, grace_s: float, orphans: list[str]
) -> None:
    other = "33333333-2222-4333-8444-555555555555"
    found, _ = await book._unnamed(database, listed(tmp_path, other, age_s=age_s), grace_s)
    assert [book._consumer_of(one) for one in found] == orphans


@pytest.mark.parametrize("wrong", ["future", "empty", "missing", "no uuid", "a directory"])
async def test_nothing_is_released_by_a_file_that_proves_nothing(tmp_path: Path, database: Any, wrong: str) -> None:
    path = tmp_path / "ids"
    match wrong:
        case "future":
            listed(tmp_path, OLD, age_s=-3600.0)
        case "empty":
            path.write_text("\n")
        case "no uuid":
            path.write_text("{}\n")
        case "a directory":
            path.mkdir()
    with pytest.raises(Stop) as stop:
        await book._unnamed(database, path)
    assert stop.value.code == "audit.consumers"
