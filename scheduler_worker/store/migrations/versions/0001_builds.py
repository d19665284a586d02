"""Build requests, the instance-to-cell map, outbox.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from bus.persistence.outbox import handled_table, outbox_table

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "build_requests",
        sa.Column("instance_uuid", sa.Uuid(), primary_key=True),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("flavor", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        # The request as it came and a digest of it: a repeat is told from a clash, and a decision can be run again.
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("terminal", sa.Boolean(), nullable=False),
        sa.Column("delete_requested", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("cell", sa.Text()),
        sa.Column("host", sa.Text()),
        sa.Column("code", sa.Text(), nullable=False, server_default=""),
        sa.Column("reason", sa.Text(), nullable=False, server_default=""),
        sa.Column("funnel", sa.Text(), nullable=False, server_default="[]"),
        sa.Column("history", sa.Text(), nullable=False, server_default="[]"),
        # JSON lines, only ever added to: one statement appends without reading.
        sa.Column("story", sa.Text(), nullable=False, server_default=""),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
    )
    # Every record is written three to five times in its first seconds; room in the page keeps these writes cheap.
    # There is no index on anything that changes, for the same reason.
    op.execute("ALTER TABLE build_requests SET (fillfactor = 50)")
    op.create_index("build_requests_newest", "build_requests", [sa.text("created_at DESC")])
    op.create_index("build_requests_of_project", "build_requests", ["project_id", sa.text("created_at DESC")])
    op.create_table(
        "instance_cells",
        sa.Column("instance_uuid", sa.Uuid(), primary_key=True),
        sa.Column("cell", sa.Text(), nullable=False),
        sa.Column("host_uuid", sa.Uuid(), nullable=False),
        sa.Column("mapped_at", sa.Double(), nullable=False),
    )
    metadata = sa.MetaData()
    outbox_table(metadata)
    handled_table(metadata)
    metadata.create_all(op.get_bind())


def downgrade() -> None:
    """There is no way back from the first version."""
