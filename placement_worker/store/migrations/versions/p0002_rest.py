"""What the REST API needs beside what was laid for it: usages by project, and any allocation ratio.

Placement takes a ratio of 0 and below (a capacity of 0, or none at all), and so must a book that copies its.
"""

from __future__ import annotations

from alembic import op

revision = "p0002"
down_revision = "p0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the index; drop the check."""
    op.execute("CREATE INDEX consumers_project ON consumers (project_id, user_id) WHERE released_at IS NULL")
    op.execute("ALTER TABLE inventories DROP CONSTRAINT inventories_allocation_ratio_check")


def downgrade() -> None:
    """As it was; refuses while a ratio is not above zero."""
    op.execute("ALTER TABLE inventories ADD CONSTRAINT inventories_allocation_ratio_check CHECK (allocation_ratio > 0)")
    op.execute("DROP INDEX consumers_project")
