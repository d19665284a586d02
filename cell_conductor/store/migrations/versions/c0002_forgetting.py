"""Finds the instances that were deleted long ago, so that they can be forgotten.

Revision ID: c0002
"""

from __future__ import annotations

from alembic import op

revision = "c0002"
down_revision = "c0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Index what is over; it is passed through once an instance, at its end."""
    op.execute("CREATE INDEX instances_over ON instances (since) WHERE state IN ('deleted', 'tombstone')")


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP INDEX instances_over")
