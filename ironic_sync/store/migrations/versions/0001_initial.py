"""The first schema."""

from __future__ import annotations

from bus.persistence.migrations import apply_sql

revision = "0001_initial"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create everything."""
    apply_sql("ironic_sync.store.migrations.versions", "0001_initial.sql")
