"""Traits that the REST API gave a provider are told from those that its source reports, and outlast its reports.

Revision ID: p0007
"""

from __future__ import annotations

from alembic import op

from placement_worker.store.migrations.versions.p0004_rest_writes import BY_KEY, WRITE_TREES

revision = "p0007"
down_revision = "p0006"
branch_labels = None
depends_on = None

BEFORE = """
        INSERT INTO provider_traits (provider_id, trait_id)
        SELECT * FROM jsonb_to_recordset(it -> 'won') AS n (provider_id bigint, member integer);
"""
AFTER = """
        INSERT INTO provider_traits (provider_id, trait_id, lasting)
        SELECT n.provider_id, n.member, true
        FROM jsonb_to_recordset(it -> 'won') AS n (provider_id bigint, member integer);
"""


def upgrade() -> None:
    """Add the mark, and have the REST API's writes set it."""
    op.execute("ALTER TABLE provider_traits ADD COLUMN lasting boolean NOT NULL DEFAULT false")
    assert BEFORE in WRITE_TREES
    op.execute(_instead(WRITE_TREES.replace(BEFORE, AFTER)))


def downgrade() -> None:
    """As it was."""
    op.execute(_instead(WRITE_TREES))
    op.execute("ALTER TABLE provider_traits DROP COLUMN lasting")


def _instead(function: str) -> str:
    return function.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION") + BY_KEY
