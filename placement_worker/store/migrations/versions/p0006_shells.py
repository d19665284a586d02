"""What sources left undone is found without reading all of them: it is looked for with every trimming.

Revision ID: p0006
"""

from __future__ import annotations

from alembic import op

revision = "p0006"
down_revision = "p0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Index the few that are not settled."""
    op.execute("CREATE INDEX sources_unsettled ON sources (root) WHERE NOT settled")


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP INDEX sources_unsettled")
