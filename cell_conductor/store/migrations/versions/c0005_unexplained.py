"""Machines that no record explains, and the breakers of compute services.

Revision ID: c0005
"""

from __future__ import annotations

from alembic import op

revision = "c0005"
down_revision = "c0004"
branch_labels = None
depends_on = None

UNEXPLAINED = """
CREATE TABLE unexplained (
    host_uuid uuid NOT NULL,
    instance_uuid uuid NOT NULL,
    attempt integer NOT NULL,
    service text NOT NULL,
    kind text NOT NULL,
    why text NOT NULL,
    first_seen double precision NOT NULL,
    last_seen double precision NOT NULL,
    verdict text NOT NULL DEFAULT '',
    decided_by text NOT NULL DEFAULT '',
    decided_at double precision NOT NULL DEFAULT 0,
    PRIMARY KEY (host_uuid, instance_uuid)
)
"""
BREAKERS = "CREATE TABLE breakers (service text PRIMARY KEY, record json NOT NULL)"


def upgrade() -> None:
    """Create them."""
    op.execute(UNEXPLAINED)
    op.execute(BREAKERS)


def downgrade() -> None:
    """Drop them."""
    op.execute("DROP TABLE breakers")
    op.execute("DROP TABLE unexplained")
