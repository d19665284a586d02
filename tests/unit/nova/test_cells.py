"""Which cell a host is in: by patterns, or by two queries to Nova's API database."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy
from sqlalchemy import make_url
from sqlalchemy.exc import OperationalError

from bus.clock import SystemClock
from bus.service.settings import SettingsError
from scheduler_worker.nova import cells
from scheduler_worker.nova.api_config import NovaApiConfig
from scheduler_worker.nova.cells import ConfiguredCells, DatabaseCells, cells_of
from scheduler_worker.nova.nova_rest import NovaUnavailable
from tests.kit.waiting import until
from tests.unit.nova.facts_kit import CELL1, CELL2

SYNCHRONOUS = SimpleNamespace(is_async=False)


class MovedClock(SystemClock):
    """It is moved by hand."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


async def test_the_first_pattern_that_names_a_host_counts() -> None:
    found = ConfiguredCells({CELL1: ("edge-*", "h1"), CELL2: ("*.example",)})
    hosts = ["edge-1", "h1", "h2", "edge-1.example", "a.example"]
    assert await found.of_hosts(hosts) == {
        "edge-1": CELL1,
        "h1": CELL1,
        "edge-1.example": CELL1,
        "a.example": CELL2,
    }


def database(path: Path) -> str:
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE cell_mappings (id INTEGER, uuid TEXT, name TEXT, disabled BOOLEAN)")
        made.execute("CREATE TABLE host_mappings (id INTEGER, cell_id INTEGER, host TEXT)")
        made.execute("INSERT INTO cell_mappings VALUES (1, ?, 'cell1', 0), (2, ?, 'off', 1)", (CELL1, CELL2))
        made.execute("INSERT INTO host_mappings VALUES (1, 1, 'h1'), (2, 2, 'h2'), (3, 9, 'h3')")
    return f"sqlite:///{path}"


def test_a_map_is_made_before_any_loop_runs() -> None:
    assert isinstance(cells_of(NovaApiConfig(cells_database="sqlite://"), SystemClock()), DatabaseCells)


async def test_two_queries_and_another_read_only_for_a_new_host(tmp_path: Path) -> None:
    clock = MovedClock()
    found = DatabaseCells(database(tmp_path / "nova_api"), clock)
    assert await found.of_hosts(["h1", "h2", "h3"]) == {"h1": CELL1}, "a disabled cell takes no builds"
    with sqlite3.connect(tmp_path / "nova_api") as changed:
        changed.execute("INSERT INTO host_mappings VALUES (4, 1, 'h4')")
    assert await found.of_hosts(["h1"]) == {"h1": CELL1}
    assert await found.of_hosts(["h1", "h4"]) == {"h1": CELL1, "h4": CELL1}, "a new host is read for at once"
    assert await found.of_hosts(["h5"]) == {}
    with sqlite3.connect(tmp_path / "nova_api") as changed:
        changed.execute("INSERT INTO host_mappings VALUES (5, 1, 'h5')")
    assert await found.of_hosts(["h5"]) == {}, "it was not found a moment ago"
    clock.now += cells.AGAIN_S
    assert await found.of_hosts(["h5"]) == {"h5": CELL1}


async def test_a_disabled_cell_has_the_database_read_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hosts are in the list of every request. Enabled again, it is found all the same."""
    clock, reads = MovedClock(), []
    found = DatabaseCells(database(tmp_path / "nova_api"), clock)
    real = found._read
    monkeypatch.setattr(found, "_read", lambda: reads.append(1) or real())
    for _ in range(5):
        assert await found.of_hosts(["h1", "h2"]) == {"h1": CELL1}
        clock.now += cells.AGAIN_S
    assert len(reads) == 1
    with sqlite3.connect(tmp_path / "nova_api") as changed:
        changed.execute("UPDATE cell_mappings SET disabled = 0")
    clock.now += cells.RARELY_S
    assert await found.of_hosts(["h1", "h2"]) == {"h1": CELL1, "h2": CELL2}


async def test_a_cell_that_is_disabled_later_takes_no_more_builds(tmp_path: Path) -> None:
    clock = MovedClock()
    found = DatabaseCells(database(tmp_path / "nova_api"), clock)
    assert await found.of_hosts(["h1"]) == {"h1": CELL1}
    with sqlite3.connect(tmp_path / "nova_api") as changed:
        changed.execute("UPDATE cell_mappings SET disabled = 1")
    clock.now += cells.RARELY_S
    assert await found.of_hosts(["h1"]) == {}


async def test_a_database_that_fails_takes_nothing_away_that_is_known(tmp_path: Path) -> None:
    clock = MovedClock()
    found = DatabaseCells(database(tmp_path / "nova_api"), clock)
    assert await found.of_hosts(["h1"]) == {"h1": CELL1}
    (tmp_path / "nova_api").unlink()
    (tmp_path / "nova_api").mkdir()
    clock.now += cells.RARELY_S
    assert await found.of_hosts(["h1"]) == {"h1": CELL1}


async def test_a_database_that_fails_is_left_alone_for_a_while(tmp_path: Path) -> None:
    clock = MovedClock()
    found = DatabaseCells(database(tmp_path / "nova_api"), clock)
    assert await found.of_hosts(["h1"]) == {"h1": CELL1}
    (tmp_path / "nova_api").rename(tmp_path / "away")
    with pytest.raises(NovaUnavailable):
        await found.of_hosts(["h1", "h4"])
    clock.now += cells.AGAIN_S
    assert await found.of_hosts(["h1", "h4"]) == {"h1": CELL1}, "what is known counts"
    clock.now += cells.RARELY_S
    with pytest.raises(NovaUnavailable):
        await found.of_hosts(["h1", "h4"])


async def test_a_read_goes_on_when_who_waits_for_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for less time than the database may take: cut, no later one would come further."""
    url, reads, hangs = database(tmp_path / "nova_api"), [], threading.Event()
    real = sqlalchemy.create_engine(url)

    def connect() -> sqlalchemy.Connection:
        reads.append(1)
        hangs.wait()
        return real.connect()

    monkeypatch.setattr(
        cells.sqlalchemy, "create_engine", lambda *_, **__: SimpleNamespace(connect=connect, dialect=SYNCHRONOUS)
    )
    found = DatabaseCells(url, MovedClock())
    try:
        for _ in range(3):
            asked = asyncio.create_task(found.of_hosts(["h1"]))
            await until(lambda: reads)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
    finally:
        hangs.set()
    assert await found.of_hosts(["h1"]) == {"h1": CELL1} and len(reads) == 1


async def test_a_database_that_is_away(tmp_path: Path) -> None:
    """Until it was read once each question fails: a front that went on would answer that no host is valid."""
    (tmp_path / "away").mkdir()
    found = DatabaseCells(f"sqlite:///{tmp_path}/there/nova_api", SystemClock())
    for _ in range(2):
        with pytest.raises(NovaUnavailable) as unavailable:
            await found.of_hosts(["h1"])
        assert unavailable.value.code == "nova.cells_unavailable"
    database(tmp_path / "away" / "nova_api")
    (tmp_path / "away").rename(tmp_path / "there")
    assert await found.of_hosts(["h1"]) == {"h1": CELL1}


@pytest.mark.parametrize("url", ["sqlite:////tmp/nova_api?timeout=long", "sqlite:////tmp/a\0b"])
async def test_an_address_that_its_driver_does_not_take(url: str) -> None:
    """Drivers raise what they like, and the process goes on: an operator reads the code in its log."""
    try:
        await DatabaseCells(url, SystemClock()).of_hosts(["h1"])
    except (SettingsError, NovaUnavailable) as fault:
        assert fault.code in {"nova.cells_database", "nova.cells_unavailable"}
    else:
        raise AssertionError


async def test_what_the_driver_says_is_told_without_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise OperationalError("SELECT", {}, Exception("access of 'u' with 's3cret' is denied\nfor good"))

    engine = SimpleNamespace(url=make_url("mysql://u:s3cret@h/nova_api"), connect=refused, dialect=SYNCHRONOUS)
    monkeypatch.setattr(cells.sqlalchemy, "create_engine", lambda *_, **__: engine)
    with pytest.raises(NovaUnavailable) as unavailable:
        await DatabaseCells("", SystemClock()).of_hosts(["h1"])
    assert "denied" in str(unavailable.value) and "s3cret" not in str(unavailable.value)


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (NovaApiConfig(), "nova.cells_unset"),
        (NovaApiConfig(cells_database="nonsense"), "nova.cells_database"),
        (NovaApiConfig(cells_database="mysql+nothing://x"), "nova.cells_database"),
        (NovaApiConfig(cells_database="postgresql+psycopg://u:p@h:port/nova_api"), "nova.cells_database"),
        (NovaApiConfig(cells_database="postgresql+asyncpg://u:p@h/nova_api"), "nova.cells_database"),
    ],
)
async def test_settings_that_name_no_cells(config: NovaApiConfig, code: str) -> None:
    with pytest.raises(SettingsError) as refused:
        cells_of(config, SystemClock())
    assert refused.value.code == code
