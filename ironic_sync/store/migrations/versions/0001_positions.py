"""Sync positions, and who is the one writer of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "ironic_sync_0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create both tables."""
    op.create_table(
        "positions",
        sa.Column("node", postgresql.UUID(), primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("published", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("report", sa.LargeBinary),
        sa.Column("digest", sa.Text, nullable=False, server_default=""),
        sa.Column("problem", sa.Text, nullable=False, server_default=""),
        sa.Column("state", sa.Text),
        sa.Column("updated_at", sa.Text),
        sa.Column("read_at", sa.Float),
        sa.Column("due_at", sa.Float),
    )
    op.create_index("positions_problem", "positions", ["node"], postgresql_where=sa.text("problem <> ''"))
    leadership = op.create_table(
        "leadership",
        sa.Column("one", sa.Boolean, sa.CheckConstraint("one"), primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    )
    op.bulk_insert(leadership, [{"one": True, "epoch": 0}])


def downgrade() -> None:
    """Drop both tables."""
    op.drop_table("leadership")
    op.drop_table("positions")
