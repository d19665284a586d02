"""When the schema was made, and which decision lifted a host's last fence: two tables that older conductors ignore."""

from __future__ import annotations

from bus.persistence.migrations import apply_sql

revision = "0002_lifted_fences"
down_revision = "0001_initial"
branch_labels = None
depends_on = None
compatible_from = "0001_initial"


def upgrade() -> None:
    """Create both."""
    apply_sql("cell_conductor.store.migrations.versions", "0002_lifted_fences.sql")
