"""What each project holds, by class, kept by every transaction that changes it.

Revision ID: p0014
"""

from __future__ import annotations

from alembic import op

from placement_worker.store.migrations.versions.p0004_rest_writes import BY_KEY
from placement_worker.store.migrations.versions.p0005_claims import WRITE_CLAIMS
from placement_worker.store.migrations.versions.p0009_claim_new import CLAIM_NEW

revision = "p0014"
down_revision = "p0013"
branch_labels = None
depends_on = None

# class_id -1: how many of the project's consumers hold something. Its rows are updated all the time, in place where
# their page has room.
TABLE = """
CREATE TABLE project_usage (
    project_id text NOT NULL,
    class_id integer NOT NULL,
    amount bigint NOT NULL,
    PRIMARY KEY (project_id, class_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000)
"""
EMPTY = "CREATE INDEX project_usage_empty ON project_usage (project_id, class_id) WHERE amount = 0"
FILL = """
INSERT INTO project_usage (project_id, class_id, amount)
SELECT c.project_id, a.class_id, sum(a.amount)::bigint FROM consumers c JOIN allocations a ON a.consumer = c.uuid
WHERE c.released_at IS NULL GROUP BY c.project_id, a.class_id
UNION ALL
SELECT c.project_id, -1, count(*) FROM consumers c
WHERE c.released_at IS NULL AND EXISTS (SELECT FROM allocations a WHERE a.consumer = c.uuid) GROUP BY c.project_id
"""

# Locks the rows in one order, after consumers and providers, and before the feed's counter: once in a transaction.
ADD_PROJECT_USAGE = """
CREATE FUNCTION add_project_usage(projects text[], classes integer[], more bigint[]) RETURNS void AS $$
BEGIN
    IF cardinality(projects) > 0 THEN
        INSERT INTO project_usage AS u (project_id, class_id, amount)
        SELECT n.project_id, n.class_id, n.more FROM unnest(projects, classes, add_project_usage.more)
            AS n (project_id, class_id, more) ORDER BY n.project_id, n.class_id
        ON CONFLICT (project_id, class_id) DO UPDATE SET amount = u.amount + excluded.amount;
    END IF;
END
$$
"""

# The locks of projects whose claims have limits, in one order. Then what they hold, as the last holders left it. An
# import and a repair hold the table of consumers: they wait for who has read this, and are waited for.
LOCK_PROJECTS = """
CREATE FUNCTION lock_projects(projects text[]) RETURNS SETOF project_usage AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(locked.key) FROM (
        SELECT DISTINCT hashtextextended('project ' || name, 0) AS key FROM unnest(projects) AS name ORDER BY key
    ) AS locked;
    LOCK TABLE consumers IN ROW SHARE MODE;
    RETURN QUERY SELECT * FROM project_usage u WHERE u.project_id = ANY(projects) AND u.amount <> 0;
END
$$
"""

# From the lock on no other claim with limits adds to what the projects hold.
WITHIN_LIMITS = """
BEGIN
    IF cardinality(limited) > 0 THEN
        PERFORM lock_projects(limited);
        IF EXISTS (
            SELECT FROM unnest(usage_projects, usage_classes, usage_more, usage_most)
                AS n (project_id, class_id, more, most)
            LEFT JOIN project_usage u ON u.project_id = n.project_id AND u.class_id = n.class_id
            WHERE n.most IS NOT NULL AND coalesce(u.amount, 0) + n.more > n.most
        ) THEN
            RAISE EXCEPTION 'claim_new: over a limit';
        END IF;
    END IF;
"""

BEFORE = (WRITE_CLAIMS, CLAIM_NEW)


def _replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


AFTER = (
    _replaced(
        WRITE_CLAIMS,
        (
            "bodies bytea[]) RETURNS",
            "bodies bytea[],\n    usage_projects text[], usage_classes integer[], usage_more bigint[]) RETURNS",
        ),
        (
            "    IF cardinality(bodies) > 0 THEN\n",
            "    PERFORM add_project_usage(usage_projects, usage_classes, usage_more);\n"
            "    IF cardinality(bodies) > 0 THEN\n",
        ),
    ),
    _replaced(
        CLAIM_NEW,
        (
            "held_classes integer[], amounts bigint[]) RETURNS",
            "held_classes integer[], amounts bigint[],\n    limited text[], usage_projects text[], "
            "usage_classes integer[], usage_more bigint[], usage_most bigint[]) RETURNS",
        ),
        ("\nBEGIN\n", WITHIN_LIMITS),
        (
            "    RETURN append_changes(",
            "    PERFORM add_project_usage(usage_projects, usage_classes, usage_more);\n    RETURN append_changes(",
        ),
    ),
)


def upgrade() -> None:
    """Count what projects hold, and have the functions that write claims keep the counts."""
    op.execute("LOCK TABLE consumers IN EXCLUSIVE MODE")  # no claim is under way that does not count
    op.execute(TABLE)
    op.execute(EMPTY)
    op.execute(FILL)
    op.execute(ADD_PROJECT_USAGE + BY_KEY)
    op.execute(LOCK_PROJECTS + BY_KEY)
    _instead(AFTER)


def downgrade() -> None:
    """As it was."""
    _instead(BEFORE)
    op.execute("DROP FUNCTION lock_projects")
    op.execute("DROP FUNCTION add_project_usage")
    op.execute("DROP TABLE project_usage")


def _instead(functions: tuple[str, str]) -> None:
    op.execute("DROP FUNCTION write_claims")
    op.execute("DROP FUNCTION claim_new")
    for function in functions:
        op.execute(function + BY_KEY)
