"""What a group of claims, or of REST writes of allocations, does in the database, as functions: two round trips."""

from __future__ import annotations

from alembic import op

from placement_worker.store.migrations.versions.p0004_rest_writes import BY_KEY

revision = "p0005"
down_revision = "p0004"
branch_labels = None
depends_on = None

# Locks and reads each named consumer, then each provider that is wanted or that one of them holds (wanted NULL: none).
# A consumer that does not exist is written as it will most likely be, so that a plain claim costs nothing for it
# later; xmax = 0 tells a row that this statement inserted.
# [[consumer that was there before, ...], [what it holds, ...], [provider with its rooms, ...]]
LOCK_CLAIMS = """
CREATE FUNCTION lock_claims(consumers uuid[], projects text[], users text[], types text[], generations bigint[],
    attempts integer[], wanted uuid[]) RETURNS text AS $$
DECLARE
    known json;
    holders uuid[];
    held json;
    held_of bigint[];
    locked bigint[];
    providers json;
BEGIN
    WITH said AS (
        INSERT INTO consumers AS c (uuid, project_id, user_id, consumer_type, generation, attempt)
        SELECT * FROM unnest(lock_claims.consumers, projects, users, types, generations, attempts)
        ON CONFLICT (uuid) DO UPDATE SET uuid = c.uuid
        RETURNING c.uuid, c.generation, c.attempt, c.project_id, c.user_id, c.consumer_type,
            c.released_at IS NOT NULL AS released, c.xmax = 0 AS inserted
    )
    SELECT json_agg(json_build_array(uuid, generation, attempt, project_id, user_id, consumer_type)),
        array_agg(uuid) FILTER (WHERE NOT released)
    INTO known, holders FROM said WHERE NOT inserted;
    IF holders IS NOT NULL THEN
        SELECT json_agg(json_build_array(a.consumer, p.uuid, a.class_id, a.amount)
            ORDER BY a.consumer, p.id, a.class_id), array_agg(p.id)
        INTO held, held_of FROM allocations a JOIN providers p ON p.id = a.provider_id
        WHERE a.consumer = ANY(holders);
    END IF;
    IF wanted IS NOT NULL THEN
        SELECT array_agg(p.id) || held_of INTO locked FROM providers p WHERE p.uuid = ANY(wanted);
        -- By number alone: of a condition with UNION ALL a row that had to be waited for is found false, and left out.
        SELECT array_agg(rows.id) INTO locked FROM (
            SELECT p.id FROM providers p WHERE p.id = ANY(locked) ORDER BY p.id FOR NO KEY UPDATE
        ) AS rows;
        SELECT json_agg(json_build_array(p.id, p.uuid, p.generation, p.shape, root.cell, (
            SELECT json_agg(json_build_array(i.class_id, i.capacity, i.min_unit, i.max_unit, i.step_size, i.used))
            FROM inventories i WHERE i.provider_id = p.id
        )) ORDER BY p.id)
        INTO providers FROM providers p JOIN providers root ON root.id = p.root_id WHERE p.id = ANY(locked);
    END IF;
    RETURN json_build_array(coalesce(known, '[]'), coalesce(held, '[]'), coalesce(providers, '[]'));
END
$$
"""

# Absolute values, each row once: consumers that go and that change, what they no longer hold and what they hold, what
# is used, the providers' generations, the changes. Returns [the last change's number, inventories written]: usage may
# not rise past capacity, whatever the decision said; the caller compares.
WRITE_CLAIMS = """
CREATE FUNCTION write_claims(gone uuid[], changed uuid[], projects text[], users text[], types text[],
    generations bigint[], attempts integer[], releases boolean[], stale uuid[], holders uuid[], held_of bigint[],
    held_classes integer[], amounts bigint[], used_of bigint[], used_classes integer[], used_now bigint[],
    moved bigint[], moved_to bigint[], firsts bigint[], lasts bigint[], bodies bytea[]) RETURNS bigint[] AS $$
DECLARE
    written bigint := 0;
    last bigint := 0;
BEGIN
    IF cardinality(gone) > 0 THEN
        DELETE FROM consumers WHERE uuid = ANY(gone);
    END IF;
    IF cardinality(changed) > 0 THEN
        UPDATE consumers c SET project_id = n.project_id, user_id = n.user_id, consumer_type = n.consumer_type,
            generation = n.generation, attempt = n.attempt, updated_at = now(),
            released_at = CASE WHEN n.released THEN now() END
        FROM unnest(changed, projects, users, types, generations, attempts, releases)
            AS n (uuid, project_id, user_id, consumer_type, generation, attempt, released)
        WHERE c.uuid = n.uuid;
    END IF;
    IF cardinality(stale) > 0 THEN
        DELETE FROM allocations WHERE consumer = ANY(stale);
    END IF;
    IF cardinality(holders) > 0 THEN
        INSERT INTO allocations (consumer, provider_id, class_id, amount)
        SELECT * FROM unnest(holders, held_of, held_classes, amounts);
    END IF;
    IF cardinality(moved) > 0 THEN
        UPDATE providers p SET generation = n.generation, updated_at = now()
        FROM unnest(moved, moved_to) AS n (id, generation) WHERE p.id = n.id;
        UPDATE inventories i SET used = n.used
        FROM unnest(used_of, used_classes, used_now) AS n (provider_id, class_id, used)
        WHERE i.provider_id = n.provider_id AND i.class_id = n.class_id AND (n.used <= i.capacity OR n.used <= i.used);
        GET DIAGNOSTICS written = ROW_COUNT;
    END IF;
    IF cardinality(bodies) > 0 THEN
        last := append_changes(firsts, lasts, bodies);
    END IF;
    RETURN ARRAY[last, written];
END
$$
"""

FUNCTIONS = {"lock_claims": LOCK_CLAIMS, "write_claims": WRITE_CLAIMS}


def upgrade() -> None:
    """Make the functions."""
    for function in FUNCTIONS.values():
        op.execute(function + BY_KEY)


def downgrade() -> None:
    """Drop them."""
    for name in FUNCTIONS:
        op.execute(f"DROP FUNCTION {name}")
