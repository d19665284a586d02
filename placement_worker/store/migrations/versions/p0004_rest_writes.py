"""What a group of REST writes does in the database, as functions: a round trip each instead of five to ten.

plpgsql, because a lock and what is read under it must be two statements: the second sees what the lock's last holder
committed. Their plans are kept (a session's are made anew for each statement, checks of foreign keys included, which
costs more than most of these statements), and the settings see to it that a plan made on an empty table goes by key.
"""

from __future__ import annotations

from alembic import op

revision = "p0004"
down_revision = "p0003"
branch_labels = None
depends_on = None

BY_KEY = """
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off
"""

# Changes of one transaction, numbered: the counter's row is locked from here to the commit.
APPEND_CHANGES = """
CREATE FUNCTION append_changes(firsts bigint[], lasts bigint[], bodies bytea[]) RETURNS bigint AS $$
DECLARE
    before bigint;
    total bigint := lasts[cardinality(lasts)];
BEGIN
    UPDATE feed_head SET number = number + total RETURNING number - total INTO before;
    INSERT INTO changes (first, last, body)
    SELECT before + n.first, before + n.last, n.body FROM unnest(firsts, lasts, bodies) AS n (first, last, body);
    RETURN before + total;
END
$$
"""

# [[new number, ...], [[provider with all that is its own], ...]]; named by uuid, by name, or (whole: all of its tree).
LOCK_TREES = """
CREATE FUNCTION lock_trees(uuids uuid[], names text[], whole uuid[], creating integer) RETURNS text AS $$
DECLARE
    locked bigint[];
    numbers json;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('berth.placement.trees', 0));
    SELECT array_agg(meant.id) INTO locked FROM (
        SELECT id FROM providers WHERE uuid = ANY(uuids)
        UNION ALL SELECT id FROM providers WHERE name = ANY(names)
        UNION ALL SELECT p.id FROM providers m JOIN providers p ON p.root_id = m.root_id WHERE m.uuid = ANY(whole)
    ) AS meant;
    -- By number alone: of a condition with UNION ALL a row that had to be waited for is found false, and left out.
    SELECT array_agg(found.id) INTO locked FROM (
        SELECT id FROM providers WHERE id = ANY(locked) ORDER BY id FOR NO KEY UPDATE
    ) AS found;
    IF creating > 0 THEN
        SELECT json_agg(nextval(pg_get_serial_sequence('providers', 'id'))) INTO numbers
        FROM generate_series(1, creating);
    END IF;
    RETURN json_build_array(coalesce(numbers, '[]'), (
        SELECT coalesce(json_agg(json_build_array(
            p.id, p.uuid, p.name, p.parent_id, parent.uuid, p.root_id, root.uuid, p.generation, p.shape, p.cell,
            (SELECT json_agg(json_build_array(c.name, i.total, i.reserved, i.min_unit, i.max_unit, i.step_size,
                i.allocation_ratio, i.capacity, i.set_aside, i.used) ORDER BY c.name)
                FROM inventories i JOIN resource_classes c ON c.id = i.class_id WHERE i.provider_id = p.id),
            (SELECT json_agg(t.name ORDER BY t.name)
                FROM provider_traits pt JOIN traits t ON t.id = pt.trait_id WHERE pt.provider_id = p.id),
            (SELECT json_agg(a.aggregate ORDER BY a.aggregate) FROM provider_aggregates a WHERE a.provider_id = p.id)
        ) ORDER BY p.id), '[]')
        FROM providers p JOIN providers root ON root.id = p.root_id
        LEFT JOIN providers parent ON parent.id = p.parent_id
        WHERE p.id = ANY(locked)
    ));
END
$$
"""

# Rows by kind, each kind only where there are any; and the changes that say it. Returns the last change's number.
WRITE_TREES = """
CREATE FUNCTION write_trees(written text, firsts bigint[], lasts bigint[], bodies bytea[]) RETURNS bigint AS $$
DECLARE
    it jsonb := written::jsonb;
BEGIN
    IF it ? 'names_pass' THEN
        SET CONSTRAINTS providers_name_key DEFERRED;
    END IF;
    IF it ? 'created' THEN
        INSERT INTO providers (id, uuid, name, parent_id, root_id, generation, shape, cell)
        SELECT * FROM jsonb_to_recordset(it -> 'created') AS n (id bigint, uuid uuid, name text, parent_id bigint,
            root_id bigint, generation bigint, shape bigint, cell text);
    END IF;
    IF it ? 'kept' THEN
        UPDATE providers p SET name = n.name, parent_id = n.parent_id, root_id = n.root_id, generation = n.generation,
            shape = n.shape, cell = n.cell, updated_at = now()
        FROM jsonb_to_recordset(it -> 'kept') AS n (id bigint, name text, parent_id bigint, root_id bigint,
            generation bigint, shape bigint, cell text)
        WHERE p.id = n.id;
    END IF;
    IF it ? 'gone' THEN
        DELETE FROM providers WHERE id IN (SELECT value::bigint FROM jsonb_array_elements_text(it -> 'gone'));
    END IF;
    IF it ? 'dropped' THEN
        DELETE FROM inventories i
        USING jsonb_to_recordset(it -> 'dropped') AS n (provider_id bigint, class_id integer)
        WHERE i.provider_id = n.provider_id AND i.class_id = n.class_id;
    END IF;
    IF it ? 'stocks' THEN
        INSERT INTO inventories (provider_id, class_id, total, reserved, min_unit, max_unit, step_size,
            allocation_ratio, capacity, set_aside)
        SELECT * FROM jsonb_to_recordset(it -> 'stocks') AS n (provider_id bigint, class_id integer, total integer,
            reserved integer, min_unit integer, max_unit integer, step_size integer, allocation_ratio float8,
            capacity bigint, set_aside boolean)
        ON CONFLICT (provider_id, class_id) DO UPDATE SET total = EXCLUDED.total, reserved = EXCLUDED.reserved,
            min_unit = EXCLUDED.min_unit, max_unit = EXCLUDED.max_unit, step_size = EXCLUDED.step_size,
            allocation_ratio = EXCLUDED.allocation_ratio, capacity = EXCLUDED.capacity,
            set_aside = EXCLUDED.set_aside, updated_at = now();
    END IF;
    IF it ? 'lost' THEN
        DELETE FROM provider_traits t USING jsonb_to_recordset(it -> 'lost') AS n (provider_id bigint, member integer)
        WHERE t.provider_id = n.provider_id AND t.trait_id = n.member;
    END IF;
    IF it ? 'won' THEN
        INSERT INTO provider_traits (provider_id, trait_id)
        SELECT * FROM jsonb_to_recordset(it -> 'won') AS n (provider_id bigint, member integer);
    END IF;
    IF it ? 'left' THEN
        DELETE FROM provider_aggregates a USING jsonb_to_recordset(it -> 'left') AS n (provider_id bigint, member uuid)
        WHERE a.provider_id = n.provider_id AND a.aggregate = n.member;
    END IF;
    IF it ? 'joined' THEN
        INSERT INTO provider_aggregates (provider_id, aggregate)
        SELECT * FROM jsonb_to_recordset(it -> 'joined') AS n (provider_id bigint, member uuid);
    END IF;
    UPDATE sources SET settled = false
    WHERE root IN (SELECT value::uuid FROM jsonb_array_elements_text(it -> 'roots')) AND settled;
    RETURN append_changes(firsts, lasts, bodies);
END
$$
"""

FUNCTIONS = {
    "append_changes(bigint[], bigint[], bytea[])": APPEND_CHANGES,
    "lock_trees(uuid[], text[], uuid[], integer)": LOCK_TREES,
    "write_trees(text, bigint[], bigint[], bytea[])": WRITE_TREES,
}


def upgrade() -> None:
    """Make the functions."""
    for function in FUNCTIONS.values():
        op.execute(function + BY_KEY)


def downgrade() -> None:
    """Drop them."""
    for name in reversed(FUNCTIONS):
        op.execute(f"DROP FUNCTION {name}")
