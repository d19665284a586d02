"""What the tests' own waiting says when it is in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests import conftest
from tests.kit.waiting import until, wait_until

HERE = {"free": {1, 2}}
BRIEFLY_S = 0.01


async def asked() -> list[int]:
    return []


async def test_what_was_waited_for_and_what_was_there_last_is_said() -> None:
    wanted, books = {3}, [4]
    with pytest.raises(TimeoutError) as compared:
        await until(lambda: HERE["free"] == wanted and not books[0], BRIEFLY_S)
    assert str(compared.value).splitlines() == [
        "not within 0.01 s: HERE['free'] == wanted and (not books[0]), which is False",
        "HERE['free'] is {1, 2}",
        "wanted is {3}",
        "books[0] is 4",
    ]
    with pytest.raises(TimeoutError, match=r"not within 0\.01 s: asked\(\), which is \[\]"):
        await until(lambda: asked(), BRIEFLY_S)  # noqa: PLW0108  (a lambda is what is shown)
    with pytest.raises(TimeoutError, match=r"asked at .*, which is \[\]"):
        await until(asked, BRIEFLY_S)
    with pytest.raises(TimeoutError, match=r"HERE is \{'free': \{1, 2\}\}"):
        wait_until(lambda: not HERE, BRIEFLY_S)


async def test_a_condition_whose_parts_fail_is_still_said() -> None:
    gone: list[int] = []
    with pytest.raises(TimeoutError, match=r"gone\[0\] is not to be had: IndexError"):
        await until(lambda: gone and gone[0] == 1 and not gone[0], BRIEFLY_S)


async def test_a_condition_that_never_answers_and_one_that_gives_up() -> None:
    with pytest.raises(TimeoutError, match="which is None"):
        await until(lambda: asyncio.Event().wait(), BRIEFLY_S)

    async def gives_up() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await until(gives_up)


def test_a_block_without_time_left_says_in_its_report_where_it_waited_and_what_was_there() -> None:
    async def waits(came: list[int]) -> None:
        await asyncio.Event().wait()

    async def times_out() -> None:
        async with asyncio.timeout(BRIEFLY_S):
            await waits([7])

    def reported(test: Callable[[], Coroutine[Any, Any, object]]) -> list[tuple[str, str]]:
        making = conftest.pytest_runtest_makereport(pytest.CallInfo.from_call(lambda: asyncio.run(test()), "call"))
        next(making)
        with pytest.raises(StopIteration) as made:
            making.send(pytest.TestReport("a", ("a", 1, "a"), {}, "failed", None, "call"))
        return made.value.value.sections

    assert reported(asked) == []
    ((_, text),) = reported(times_out)
    for line in ("await waits([7])", "await asyncio.Event().wait()", "came is [7]"):
        assert line in text, text
