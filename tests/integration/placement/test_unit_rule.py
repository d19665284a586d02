"""The rule of units on PostgreSQL."""

from __future__ import annotations

import asyncpg
import pytest

from placement_worker.domain.units import in_units_sql, is_in_units
from tests.kit.unit_rules import amounts_and_units

pytestmark = pytest.mark.postgres


async def test_postgresql_answers_as_python_does(postgres_url: str) -> None:
    rows = amounts_and_units(2_000, seed=2)
    connection = await asyncpg.connect(postgres_url)
    try:
        found = await connection.fetch(
            f"SELECT {in_units_sql('i.amount')} FROM unnest($1::bigint[], $2::int[], $3::int[], $4::int[]) "
            "WITH ORDINALITY AS i (amount, min_unit, max_unit, step_size, place) ORDER BY place",
            *map(list, zip(*rows, strict=True)),
        )
    finally:
        await connection.close()
    assert [row[0] for row in found] == [is_in_units(*row) for row in rows]
