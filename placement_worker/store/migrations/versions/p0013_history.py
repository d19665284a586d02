"""The feed has a history id beside its head: numbers of two histories do not compare.

Revision ID: p0013
"""

from __future__ import annotations

from alembic import op

revision = "p0013"
down_revision = "p0012"
branch_labels = None
depends_on = None

# What a database does not take along when it is restored or promoted: its cluster, the cluster's timeline (a recovery
# to a point in time and the promotion of a stand-by begin a new one), the database and the table themselves. What the
# role may not read, or the server does not have, is left empty.
FEED_ORIGIN = """
CREATE FUNCTION feed_origin() RETURNS text LANGUAGE plpgsql AS $$
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
        'feed_head'::regclass::oid);
END
$$
"""


def upgrade() -> None:
    """Add the id, and what it was given for."""
    op.execute("ALTER TABLE feed_head ADD COLUMN history uuid NOT NULL DEFAULT gen_random_uuid()")
    op.execute("ALTER TABLE feed_head ADD COLUMN origin text NOT NULL DEFAULT ''")
    op.execute(FEED_ORIGIN)


def downgrade() -> None:
    """Drop them."""
    op.execute("DROP FUNCTION feed_origin")
    op.execute("ALTER TABLE feed_head DROP COLUMN origin")
    op.execute("ALTER TABLE feed_head DROP COLUMN history")
