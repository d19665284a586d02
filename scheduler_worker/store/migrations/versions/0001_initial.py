"""The first schema: the tables as `scheduler_worker.store.tables` has them.

Until the first release they change in place. With the first migration after it, this one gets statements of its own.
"""

from __future__ import annotations

from alembic import op

from bus.persistence.migrations import apply_sql
from bus.persistence.tables import create_tables
from scheduler_worker.store.tables import METADATA

revision = "0001_initial"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create everything."""
    create_tables(op.get_bind(), METADATA)
    apply_sql("bus.persistence", "guarded_statement.sql")
