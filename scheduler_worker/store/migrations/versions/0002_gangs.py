"""Which gang a build was requested in, and how many of it start together at least."""

from __future__ import annotations

from alembic import op

revision = "0002_gangs"
down_revision = "0001_initial"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Two columns, empty for what is on record, and an index of those that have them."""
    op.execute("ALTER TABLE build_requests ADD COLUMN gang uuid, ADD COLUMN gang_min integer")
    op.execute("CREATE INDEX build_requests_of_gang ON build_requests (gang) WHERE gang IS NOT NULL")
