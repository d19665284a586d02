"""Where the members of a server group are follows from what they hold, and is not written beside it.

Revision ID: p0012
"""

from __future__ import annotations

from alembic import op

from placement_worker.store.migrations.versions.p0004_rest_writes import BY_KEY
from placement_worker.store.migrations.versions.p0005_claims import LOCK_CLAIMS

revision = "p0012"
down_revision = "p0011"
branch_labels = None
depends_on = None

BEFORE = "p.id, p.uuid, p.generation, p.shape, root.cell, ("
AFTER = "p.id, p.uuid, p.generation, p.shape, root.uuid, root.cell, ("
# One of the roots of what each member holds.
FILL = """
UPDATE group_members m SET host = held.host FROM (
    SELECT a.consumer, min(root.uuid::text)::uuid AS host FROM allocations a
    JOIN providers p ON p.id = a.provider_id JOIN providers root ON root.id = p.root_id GROUP BY a.consumer
) held WHERE held.consumer = m.consumer
"""


def upgrade() -> None:
    """Drop the host; claims read each provider's root."""
    op.execute("ALTER TABLE group_members DROP COLUMN host")
    assert BEFORE in LOCK_CLAIMS
    op.execute(_instead(LOCK_CLAIMS.replace(BEFORE, AFTER)))


def downgrade() -> None:
    """As it was; who holds nothing is no member."""
    op.execute(_instead(LOCK_CLAIMS))
    op.execute("ALTER TABLE group_members ADD COLUMN host uuid")
    op.execute(FILL)
    op.execute("DELETE FROM group_members WHERE host IS NULL")
    op.execute("ALTER TABLE group_members ALTER COLUMN host SET NOT NULL")


def _instead(function: str) -> str:
    return function.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION") + BY_KEY
