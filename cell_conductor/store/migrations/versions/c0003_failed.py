"""Finds the instances that failed long ago, so that they can be forgotten.

Revision ID: c0003
"""

from __future__ import annotations

from alembic import op

revision = "c0003"
down_revision = "c0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Index them; few builds fail."""
    op.execute("CREATE INDEX instances_failed ON instances (since) WHERE state = 'failed'")


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP INDEX instances_failed")
