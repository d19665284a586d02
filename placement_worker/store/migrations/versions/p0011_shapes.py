"""Shapes come from one counter of the book, so that no provider is ever given one that another of its uuid had.

Revision ID: p0011
"""

from __future__ import annotations

from alembic import op

from placement_worker.store.migrations.versions.p0004_rest_writes import BY_KEY, LOCK_TREES

revision = "p0011"
down_revision = "p0010"
branch_labels = None
depends_on = None

BEFORE = "RETURN json_build_array(coalesce(numbers, '[]'), ("
# Under the lock of the writers of trees: who draws later writes later.
AFTER = "RETURN json_build_array(nextval('shapes'), coalesce(numbers, '[]'), ("


def upgrade() -> None:
    """Add the counter, above what providers have, and have the REST API's writes draw from it."""
    op.execute("CREATE SEQUENCE shapes")
    op.execute("SELECT setval('shapes', coalesce(max(shape), 0) + 1, false) FROM providers")
    assert BEFORE in LOCK_TREES
    op.execute(_instead(LOCK_TREES.replace(BEFORE, AFTER)))


def downgrade() -> None:
    """As it was."""
    op.execute(_instead(LOCK_TREES))
    op.execute("DROP SEQUENCE shapes")


def _instead(function: str) -> str:
    return function.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION") + BY_KEY
