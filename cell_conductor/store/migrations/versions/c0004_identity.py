"""The identity of this cell's database: every machine that it orders is marked with it.

Revision ID: c0004
"""

from __future__ import annotations

from alembic import op

revision = "c0004"
down_revision = "c0003"
branch_labels = None
depends_on = None

# One row. It is made with the schema, so an empty or another database never takes this one's machines for its own.
IDENTITY = """
CREATE TABLE identity (
    deployment uuid NOT NULL DEFAULT gen_random_uuid(),
    one boolean PRIMARY KEY DEFAULT true CHECK (one)
)
"""


def upgrade() -> None:
    """Create it."""
    op.execute(IDENTITY)
    op.execute("INSERT INTO identity DEFAULT VALUES")


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP TABLE identity")
