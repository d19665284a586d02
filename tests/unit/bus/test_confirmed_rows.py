"""Rows of the outbox between their confirms and their deletion."""

from __future__ import annotations

import asyncio

import pytest

from bus.persistence.confirmed_rows import DELETE_BATCH, ConfirmedRows


def rows(*ids: int) -> ConfirmedRows:
    made = ConfirmedRows()
    for one in ids:
        made.add(one)
    return made


def waits(confirmed: ConfirmedRows) -> bool:
    """Whether a caller would wait: a coroutine that returns at once ends with its first step."""
    waiting = confirmed.wait()
    try:
        waiting.send(None)
    except StopIteration:
        return False
    waiting.close()
    return True


async def test_a_caller_waits_until_there_are_rows_and_while_a_statement_has_them_all() -> None:
    confirmed = rows()
    assert waits(confirmed)
    waiting = asyncio.create_task(confirmed.wait())
    confirmed.add(1)
    await waiting
    with confirmed.batch() as ids:
        assert ids == [1] and waits(confirmed)
        assert 1 in confirmed and (len(confirmed), confirmed.to_delete) == (1, 0)
        confirmed.add(2)
        assert not waits(confirmed)
    assert 1 not in confirmed and 2 in confirmed and (len(confirmed), confirmed.to_delete) == (1, 1)


@pytest.mark.parametrize("fault", [ValueError, asyncio.CancelledError])
async def test_what_a_failed_statement_had_comes_first_again(fault: type[BaseException]) -> None:
    confirmed = rows(1, 2)
    with pytest.raises(fault), confirmed.batch():
        confirmed.add(3)
        raise fault
    assert not waits(confirmed) and confirmed.to_delete == len(confirmed) == 3
    with confirmed.batch() as ids:
        assert ids == [1, 2, 3]
    assert waits(confirmed) and len(confirmed) == 0


async def test_one_statement_has_so_many_and_no_more() -> None:
    confirmed = rows(*range(DELETE_BATCH - 1))
    assert not confirmed.fill_a_batch
    confirmed.add(DELETE_BATCH)
    confirmed.add(DELETE_BATCH + 1)
    assert confirmed.fill_a_batch
    with confirmed.batch() as ids:
        assert len(ids) == DELETE_BATCH and confirmed.to_delete == 1 and not waits(confirmed)
