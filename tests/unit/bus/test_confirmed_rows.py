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


def test_rows_are_there_until_the_statement_that_deletes_them_has_ended() -> None:
    confirmed = rows(1)
    ids = confirmed.take()
    assert ids == [1] and not confirmed.take()
    with confirmed.ended(ids):
        assert 1 in confirmed and (len(confirmed), confirmed.to_delete) == (1, 0)
        confirmed.add(2)
    assert 1 not in confirmed and 2 in confirmed and (len(confirmed), confirmed.to_delete) == (1, 1)


@pytest.mark.parametrize("fault", [ValueError, asyncio.CancelledError])
def test_what_a_failed_statement_had_comes_first_again(fault: type[BaseException]) -> None:
    confirmed = rows(1, 2)
    with pytest.raises(fault), confirmed.ended(confirmed.take()):
        confirmed.add(3)
        raise fault
    assert confirmed.to_delete == len(confirmed) == 3
    ids = confirmed.take()
    with confirmed.ended(ids):
        assert ids == [1, 2, 3]
    assert len(confirmed) == 0


def test_one_statement_has_so_many_and_no_more() -> None:
    confirmed = rows(*range(DELETE_BATCH - 1))
    assert not confirmed.fill_a_batch
    confirmed.add(DELETE_BATCH)
    confirmed.add(DELETE_BATCH + 1)
    assert confirmed.fill_a_batch
    assert len(confirmed.take()) == DELETE_BATCH and confirmed.to_delete == 1
