"""Removes U+0000 from the records of instances: PostgreSQL refuses to read it as JSON."""

from __future__ import annotations

from bus.persistence.migrations import apply_sql

revision = "0003_clean_records"
down_revision = "0002_lifted_fences"
branch_labels = None
depends_on = None
compatible_from = "0001_initial"


def upgrade() -> None:
    """Change the rows that have it, and no others."""
    apply_sql("cell_conductor.store.migrations.versions", "0003_clean_records.sql")
