"""Arrays as parameters on a real PostgreSQL: every class that is passed, and no Python call for each element."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from types import FrameType

import asyncpg
import pytest

from bus.contracts.build import BuildState
from bus.persistence.database import Database

pytestmark = pytest.mark.postgres

WORDS = "SELECT $1::text[]"


@pytest.fixture
async def connection(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    database = Database(postgres_url, "arrays")
    try:
        async with database.single() as found:
            yield found
    finally:
        await database.close()


@pytest.mark.parametrize(
    "words",
    [
        ["a", "b"],
        ("a", "b"),
        deque(["a", "b"]),
        dict.fromkeys(["a", "b"]).keys(),
        dict(enumerate(["a", "b"])).values(),
        OrderedDict.fromkeys(["a", "b"]).keys(),
        OrderedDict(enumerate(["a", "b"])).values(),
    ],
    ids=lambda words: type(words).__name__,
)
async def test_arrays_of_each_class_in_their_order(connection: asyncpg.Connection, words: object) -> None:
    assert await connection.fetchval(WORDS, words) == ["a", "b"]


async def test_sets_ranges_empty_ones_nulls_and_two_dimensions(connection: asyncpg.Connection) -> None:
    for words in ({"a", "b"}, frozenset({"a", "b"})):
        assert sorted(await connection.fetchval(WORDS, words)) == ["a", "b"]
    assert await connection.fetchval("SELECT $1::bigint[]", range(3)) == [0, 1, 2]
    assert [await connection.fetchval(WORDS, ()), await connection.fetchval(WORDS, set())] == [[], []]
    assert await connection.fetchval(WORDS, ["a", None, BuildState.ACTIVE]) == ["a", None, "active"]
    assert await connection.fetchval(WORDS, [["a", "b"], ["c", "d"]]) == [["a", "b"], ["c", "d"]]
    assert await connection.fetchval("SELECT $1::bytea[]", [b"a", bytearray(b"b")]) == [b"a", b"b"]


@pytest.mark.parametrize("wrong", ["ab", b"ab", 7, {"a": "b"}, [["a"], ["b", "c"]]], ids=str)
async def test_what_is_no_array_is_refused(connection: asyncpg.Connection, wrong: object) -> None:
    with pytest.raises(asyncpg.DataError):
        await connection.fetchval(WORDS, wrong)


async def test_elements_cost_no_call_of_python(connection: asyncpg.Connection) -> None:
    """Two checks of each element against abstract base classes were a twentieth of the calls of a boot."""
    checked = 0

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal checked
        checked += event == "call" and frame.f_code.co_name == "__instancecheck__"

    words = ["word"] * 1_000
    await connection.fetchval(WORDS, words)  # prepared
    sys.setprofile(count)
    try:
        await connection.fetchval(WORDS, words)
    finally:
        sys.setprofile(None)
    assert checked <= 10
