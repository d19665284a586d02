"""Who is in which server group, and on which host.

Revision ID: p0008
"""

from __future__ import annotations

from alembic import op

revision = "p0008"
down_revision = "p0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.execute(
        """
        CREATE TABLE group_members (
            project_id text NOT NULL,
            group_uuid uuid NOT NULL,
            consumer uuid NOT NULL,
            host uuid NOT NULL,
            PRIMARY KEY (project_id, group_uuid, consumer)
        )
        """
    )


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP TABLE group_members")
