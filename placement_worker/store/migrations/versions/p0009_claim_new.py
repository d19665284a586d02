"""New claims that fit, in one round trip.

Revision ID: p0009
"""

from __future__ import annotations

from alembic import op

from placement_worker.store.migrations.versions.p0004_rest_writes import BY_KEY

revision = "p0009"
down_revision = "p0008"
branch_labels = None
depends_on = None

# The locks of `lock_claims` in the same order: consumers, providers by id, the feed's counter. Each statement sees what
# the last holder of the locks before it has committed, so nothing is looked at that may still move. What does not hold
# raises, and undoes all: why it does not hold, and what to do instead, is decided in Python, with locks.
#
# wanted: every provider once, with the shape that it must have (NULL: any) and how many of the claims take from it.
# places: the providers' places in `wanted`. used_*: what is taken of each inventory together; held_*: by each consumer.
# Returns the last change's number and the providers' new generations, as wanted.
CLAIM_NEW = """
CREATE FUNCTION claim_new(consumers uuid[], projects text[], users text[], types text[], attempts integer[],
    wanted uuid[], shapes bigint[], times integer[],
    used_places integer[], used_classes integer[], used_names text[], used_more bigint[],
    held_by uuid[], held_places integer[], held_classes integer[], amounts bigint[]) RETURNS bigint[] AS $$
DECLARE
    written bigint;
    numbers bigint[];
    generations bigint[];
    changes json;
BEGIN
    INSERT INTO consumers (uuid, project_id, user_id, consumer_type, generation, attempt)
    SELECT n.uuid, n.project_id, n.user_id, n.consumer_type, 1, n.attempt
    FROM unnest(claim_new.consumers, projects, users, types, attempts)
        AS n (uuid, project_id, user_id, consumer_type, attempt)
    ON CONFLICT (uuid) DO NOTHING;
    GET DIAGNOSTICS written = ROW_COUNT;
    IF written <> cardinality(claim_new.consumers) THEN
        RAISE EXCEPTION 'claim_new: not new';
    END IF;
    IF cardinality(wanted) > 1 THEN
        PERFORM p.id FROM providers p WHERE p.uuid = ANY(wanted) ORDER BY p.id FOR NO KEY UPDATE;
    END IF;
    WITH moved AS (
        UPDATE providers p SET generation = p.generation + n.times, updated_at = now()
        FROM unnest(wanted, shapes, claim_new.times) WITH ORDINALITY AS n (uuid, shape, times, place)
        WHERE p.uuid = n.uuid AND (n.shape IS NULL OR p.shape = n.shape)
        RETURNING n.place, p.id, p.generation
    )
    SELECT array_agg(m.id ORDER BY m.place), array_agg(m.generation ORDER BY m.place) INTO numbers, generations
    FROM moved m;
    IF numbers IS NULL OR cardinality(numbers) <> cardinality(wanted) THEN
        RAISE EXCEPTION 'claim_new: gone, or of another shape';
    END IF;
    WITH used AS (
        UPDATE inventories i SET used = i.used + n.more
        FROM unnest(used_places, claim_new.used_classes, used_names, used_more) AS n (place, class_id, name, more)
        WHERE i.provider_id = numbers[n.place] AND i.class_id = n.class_id AND i.used + n.more <= i.capacity
        RETURNING n.place, n.name, i.used
    ), told AS (
        SELECT u.place, json_object_agg(u.name, u.used) AS used, count(*) AS rows FROM used u GROUP BY u.place
    )
    SELECT sum(t.rows), json_agg(json_build_object('sequence', 0, 'provider', wanted[t.place],
        'generation', generations[t.place], 'used', t.used) ORDER BY t.place)
    INTO written, changes FROM told t;
    IF written IS DISTINCT FROM cardinality(used_places) THEN
        RAISE EXCEPTION 'claim_new: full, or no such inventory';
    END IF;
    INSERT INTO allocations (consumer, provider_id, class_id, amount)
    SELECT n.consumer, i.provider_id, i.class_id, n.amount
    FROM unnest(held_by, held_places, claim_new.held_classes, amounts) AS n (consumer, place, class_id, amount)
    JOIN inventories i ON i.provider_id = numbers[n.place] AND i.class_id = n.class_id
    WHERE n.amount >= i.min_unit AND n.amount <= i.max_unit AND n.amount % i.step_size = 0;
    GET DIAGNOSTICS written = ROW_COUNT;
    IF written <> cardinality(held_by) THEN
        RAISE EXCEPTION 'claim_new: not in these units';
    END IF;
    RETURN append_changes(ARRAY[1], ARRAY[cardinality(wanted)], ARRAY[convert_to(changes::text, 'UTF8')])
        || generations;
END
$$
"""


def upgrade() -> None:
    """Make the function."""
    op.execute(CLAIM_NEW + BY_KEY)


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP FUNCTION claim_new")
