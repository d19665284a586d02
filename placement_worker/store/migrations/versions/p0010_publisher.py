"""Who publishes the feed says so for a moment, instead of holding the position's row lock while the broker confirms.

Revision ID: p0010
"""

from __future__ import annotations

from alembic import op

revision = "p0010"
down_revision = "p0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the time until which somebody publishes."""
    op.execute("ALTER TABLE feed_position ADD COLUMN taken_until timestamptz NOT NULL DEFAULT '-infinity'")


def downgrade() -> None:
    """As it was."""
    op.execute("ALTER TABLE feed_position DROP COLUMN taken_until")
