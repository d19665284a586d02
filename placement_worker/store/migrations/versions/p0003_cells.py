"""Which cell a root belongs to: the bus that first reported it.

Nobody can say it of the roots that are there already: the next report of each is looked at anew, and binds it.

Revision ID: p0003
"""

from __future__ import annotations

from alembic import op

revision = "p0003"
down_revision = "p0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.execute("ALTER TABLE providers ADD COLUMN cell text")


def downgrade() -> None:
    """Drop it."""
    op.execute("ALTER TABLE providers DROP COLUMN cell")
