"""Instances, and the outbox and handled-message tables beside them.

Revision ID: c0001
"""

from __future__ import annotations

from alembic import op

from bus.persistence.outbox import HANDLED_DDL, OUTBOX_DDL

revision = "c0001"
down_revision = None
branch_labels = None
depends_on = None

INSTANCES = """
CREATE TABLE instances (
    uuid uuid PRIMARY KEY,
    state text NOT NULL,
    host_uuid uuid,
    attempt integer NOT NULL,
    since double precision NOT NULL,
    deadline double precision,
    record json NOT NULL
) WITH (fillfactor = 80)
"""
# Only what the sweep and the reports ask for is indexed: most rows at rest have no deadline.
DUE = "CREATE INDEX instances_deadline ON instances (deadline) WHERE deadline IS NOT NULL"
AT_HOME = "CREATE INDEX instances_host ON instances (host_uuid) WHERE state IN ('active', 'deleting')"


def upgrade() -> None:
    """Create the cell's tables."""
    for statement in (INSTANCES, DUE, AT_HOME, *OUTBOX_DDL, *HANDLED_DDL):
        op.execute(statement)


def downgrade() -> None:
    """Drop them."""
    for table in ("handled", "outbox", "instances"):
        op.execute(f"DROP TABLE {table}")
