"""PostgreSQL takes the statements that the documents show."""

from __future__ import annotations

import asyncpg
import pytest

from tests.kit.documents import blocks_of_all_pages

pytestmark = pytest.mark.postgres

ROLE = """
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'berth') THEN CREATE ROLE berth; END IF;
END $$
"""


@pytest.mark.parametrize("text", [pytest.param(text, id=where) for where, text in blocks_of_all_pages("sql")])
async def test_a_statement_of_the_documents_is_carried_out(text: str, postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    try:
        undone = connection.transaction()
        await undone.start()
        await connection.execute(ROLE)
        status = await connection.execute(text)
        assert status.split() == text.strip().splitlines()[-1].split()[:2], "the status names the last statement"
        await undone.rollback()
    finally:
        await connection.close()
