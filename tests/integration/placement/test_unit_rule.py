"""The rule of units on PostgreSQL."""

from __future__ import annotations

import asyncpg
import pytest
from sqlalchemy import ARRAY, BigInteger, Integer, bindparam, column, func, select

from bus.persistence.tables import fetch
from placement_worker.domain.units import is_in_units
from tests.kit.unit_rules import amounts_and_units

pytestmark = pytest.mark.postgres

NAMES = ("amount", "min_unit", "max_unit", "step_size")


async def test_postgresql_answers_as_python_does(postgres_url: str) -> None:
    rows = amounts_and_units(2_000, seed=2)
    kinds = (BigInteger, Integer, Integer, Integer)
    arrays = [bindparam(name, type_=ARRAY(kind)) for name, kind in zip(NAMES, kinds, strict=True)]
    columns = [column(name, kind) for name, kind in zip(NAMES, kinds, strict=True)]
    table = func.unnest(*arrays).table_valued(*columns, with_ordinality="place", name="i").render_derived()
    statement = select(is_in_units(*(table.c[name] for name in NAMES))).order_by(table.c.place)
    connection = await asyncpg.connect(postgres_url)
    try:
        found = await fetch(connection, statement, **dict(zip(NAMES, map(list, zip(*rows, strict=True)), strict=True)))
    finally:
        await connection.close()
    assert [row[0] for row in found] == [is_in_units(*row) for row in rows]
