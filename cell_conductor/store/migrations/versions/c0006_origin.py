"""What a restore or a promotion leaves behind stands beside the identity, so that either is noticed.

Revision ID: c0006
"""

from __future__ import annotations

from alembic import op

revision = "c0006"
down_revision = "c0005"
branch_labels = None
depends_on = None

# What a database does not take along when it is restored or promoted: its cluster, the cluster's timeline, the database
# and the table themselves. What the role may not read, or the server does not have, is left empty.
CELL_ORIGIN = """
CREATE FUNCTION cell_origin() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    cluster text := '';
    timeline text := '';
BEGIN
    BEGIN
        SELECT system_identifier::text INTO cluster FROM pg_control_system();
    EXCEPTION WHEN insufficient_privilege OR undefined_function OR feature_not_supported THEN
        cluster := '';
    END;
    BEGIN
        timeline := substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8);
    EXCEPTION WHEN insufficient_privilege OR undefined_function OR feature_not_supported THEN
        timeline := '';
    END;
    RETURN concat_ws('/', cluster, timeline, (SELECT oid FROM pg_database WHERE datname = current_database()),
        'instances'::regclass::oid);
END
$$
"""


def upgrade() -> None:
    """Add it. Empty: not looked at yet."""
    op.execute("ALTER TABLE identity ADD COLUMN origin text NOT NULL DEFAULT ''")
    op.execute(CELL_ORIGIN)


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP FUNCTION cell_origin")
    op.execute("ALTER TABLE identity DROP COLUMN origin")
