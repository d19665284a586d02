-- Functions: a round trip each instead of five to ten
--
-- plpgsql, because a lock and what is read under it must be two statements: the second sees what the lock's last holder
-- committed. Their plans are kept (a session's are made anew for each statement, checks of foreign keys included, which
-- costs more than most of these statements), and the settings see to it that a plan made on an empty table goes by key.

-- Number the changes of one transaction: the counter's row is locked from here to the commit. Returns the last number.
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
$$ LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off;

-- Become the only writer of trees, and read the last reports of these roots' reporters.
CREATE FUNCTION lock_reporters(roots uuid[]) RETURNS TABLE (root uuid, reporter text, cell text, version bigint,
    digest bytea, complete boolean, providers uuid[]) AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('berth.placement.trees', 0));
    RETURN QUERY SELECT s.root, s.reporter, p.cell, s.version, s.digest, s.complete, s.providers
        FROM reporters s LEFT JOIN providers p ON p.uuid = s.root WHERE s.root = ANY(roots);
END
$$ LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off;

-- Record newer versions of the last reports of reporters, which are otherwise the same.
CREATE FUNCTION repeat_reports(roots uuid[], names text[], versions bigint[]) RETURNS void AS $$
BEGIN
    UPDATE reporters s SET version = n.version, updated_at = now()
    FROM unnest(roots, names, versions) AS n (root, reporter, version) WHERE s.root = n.root AND s.reporter = n.reporter;
END
$$ LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off;

-- Providers by number, their inventories, traits and aggregates: four lists, as `store.rows` reads them. Their JSON is
-- put together as text; to build it value by value, or a provider at a time, takes two to three times as long.
CREATE FUNCTION read_providers(ids bigint[]) RETURNS text AS $$
BEGIN
    RETURN concat_ws(',', '[[' || coalesce((
        SELECT string_agg(concat_ws(',', '[' || p.id, coalesce(p.parent_id::text, 'null'), p.root_id,
            extract(epoch FROM p.updated_at), '"' || p.uuid || '"', to_json(p.name),
            coalesce('"' || parent.uuid || '"', 'null'), '"' || root.uuid || '"', p.generation, p.spec_generation,
            coalesce(to_json(p.cell)::text, 'null') || ']'), ',' ORDER BY p.id)
        FROM providers p JOIN providers root ON root.id = p.root_id
        LEFT JOIN providers parent ON parent.id = p.parent_id WHERE p.id = ANY(ids)
    ), '') || ']', '[' || coalesce((
        SELECT string_agg(concat_ws(',', '[' || i.provider_id, to_json(c.name), i.used, i.total, i.reserved, i.min_unit,
            i.max_unit, i.step_size, i.allocation_ratio, i.capacity, i.orphaned::text || ']'), ',')
        FROM inventories i JOIN resource_classes c ON c.id = i.class_id WHERE i.provider_id = ANY(ids)
    ), '') || ']', '[' || coalesce((
        SELECT string_agg(concat_ws(',', '[' || t.provider_id, to_json(t.name), t.own_trait::text || ']'), ',') FROM (
            SELECT o.provider_id, t.name, o.own_trait FROM provider_traits o JOIN traits t ON t.id = o.trait_id
            WHERE o.provider_id = ANY(ids) ORDER BY t.name
        ) AS t
    ), '') || ']', '[' || coalesce((
        SELECT string_agg('[' || a.provider_id || ',"' || a.aggregate || '"]', ',' ORDER BY a.aggregate)
        FROM provider_aggregates a WHERE a.provider_id = ANY(ids)
    ), '') || ']]');
END
$$ LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off;

-- Lock and read providers named by uuid, and (whole) those with all of their tree that are named by uuid or by name;
-- draw a spec generation, and a number for each provider of `creating` that does not exist. The spec generation is drawn under the lock of
-- the writers of trees: a later spec generation is written later.
-- Returns [spec_generation, [new number, ...], the providers as `read_providers`].
CREATE FUNCTION lock_trees(uuids uuid[], names text[], whole uuid[], creating uuid[]) RETURNS text AS $$
DECLARE
    locked bigint[];
    numbers json;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('berth.placement.trees', 0));
    SELECT array_agg(meant.id) INTO locked FROM (
        SELECT id FROM providers WHERE uuid = ANY(uuids)
        UNION ALL SELECT p.id FROM (
            SELECT root_id FROM providers WHERE uuid = ANY(whole)
            UNION SELECT root_id FROM providers WHERE name = ANY(names)
        ) AS m JOIN providers p ON p.root_id = m.root_id
    ) AS meant;
    -- By number alone: of a condition with UNION ALL a row that had to be waited for is found false, and left out.
    SELECT array_agg(found.id) INTO locked FROM (
        SELECT id FROM providers WHERE id = ANY(locked) ORDER BY id FOR NO KEY UPDATE
    ) AS found;
    SELECT json_agg(nextval(pg_get_serial_sequence('providers', 'id'))) INTO numbers
    FROM unnest(creating) AS n (uuid) WHERE NOT EXISTS (SELECT FROM providers p WHERE p.uuid = n.uuid);
    RETURN '[' || nextval('spec_generations') || ',' || coalesce(numbers, '[]') || ',' || read_providers(locked) || ']';
END
$$ LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off;

CREATE FUNCTION of_kind(kind text, kinds text[], written text[]) RETURNS json AS $$
    SELECT written[array_position(kinds, kind)]::json
$$ LANGUAGE sql IMMUTABLE;

-- Write rows by kind, each kind only where there are any, and the changes. Returns the last change's number, or 0.
-- written: the rows of each kind as JSON. They are parsed once each, where one document would be parsed for all.
-- names_pass: names may pass from one provider to another in any order; the constraint is checked at the commit.
CREATE FUNCTION write_trees(kinds text[], written text[], firsts bigint[], lasts bigint[], bodies bytea[])
RETURNS bigint AS $$
BEGIN
    IF 'names_pass' = ANY(kinds) THEN
        SET CONSTRAINTS providers_name_key DEFERRED;
    END IF;
    IF 'created' = ANY(kinds) THEN
        INSERT INTO providers (id, uuid, name, parent_id, root_id, generation, spec_generation, cell)
        SELECT * FROM json_to_recordset(of_kind('created', kinds, written))
            AS n (id bigint, uuid uuid, name text, parent_id bigint,
            root_id bigint, generation bigint, spec_generation bigint, cell text);
    END IF;
    IF 'kept' = ANY(kinds) THEN
        UPDATE providers p SET generation = n.generation, spec_generation = n.spec_generation, updated_at = now()
        FROM json_to_recordset(of_kind('kept', kinds, written)) AS n (id bigint, generation bigint, spec_generation bigint)
        WHERE p.id = n.id;
    END IF;
    IF 'moved' = ANY(kinds) THEN
        UPDATE providers p SET name = n.name, parent_id = n.parent_id, root_id = n.root_id, cell = n.cell
        FROM json_to_recordset(of_kind('moved', kinds, written)) AS n (id bigint, name text, parent_id bigint,
            root_id bigint, cell text)
        WHERE p.id = n.id;
    END IF;
    IF 'gone' = ANY(kinds) THEN
        DELETE FROM providers
        WHERE id IN (SELECT value::bigint FROM json_array_elements_text(of_kind('gone', kinds, written)));
    END IF;
    IF 'dropped' = ANY(kinds) THEN
        DELETE FROM inventories i
        USING json_to_recordset(of_kind('dropped', kinds, written)) AS n (provider_id bigint, class_id integer)
        WHERE i.provider_id = n.provider_id AND i.class_id = n.class_id;
    END IF;
    IF 'inventories' = ANY(kinds) THEN
        INSERT INTO inventories (provider_id, class_id, total, reserved, min_unit, max_unit, step_size,
            allocation_ratio, capacity, orphaned)
        SELECT * FROM json_to_recordset(of_kind('inventories', kinds, written))
            AS n (provider_id bigint, class_id integer, total integer,
            reserved integer, min_unit integer, max_unit integer, step_size integer, allocation_ratio float8,
            capacity bigint, orphaned boolean)
        ON CONFLICT (provider_id, class_id) DO UPDATE SET total = EXCLUDED.total, reserved = EXCLUDED.reserved,
            min_unit = EXCLUDED.min_unit, max_unit = EXCLUDED.max_unit, step_size = EXCLUDED.step_size,
            allocation_ratio = EXCLUDED.allocation_ratio, capacity = EXCLUDED.capacity,
            orphaned = EXCLUDED.orphaned;
    END IF;
    IF 'lost' = ANY(kinds) THEN
        DELETE FROM provider_traits t USING json_to_recordset(of_kind('lost', kinds, written))
            AS n (provider_id bigint, member integer)
        WHERE t.provider_id = n.provider_id AND t.trait_id = n.member;
    END IF;
    IF 'won' = ANY(kinds) THEN
        INSERT INTO provider_traits (provider_id, trait_id, own_trait)
        SELECT n.provider_id, n.member, n.own_trait
        FROM json_to_recordset(of_kind('won', kinds, written))
            AS n (provider_id bigint, member integer, own_trait boolean);
    END IF;
    IF 'left' = ANY(kinds) THEN
        DELETE FROM provider_aggregates a USING json_to_recordset(of_kind('left', kinds, written))
            AS n (provider_id bigint, member uuid)
        WHERE a.provider_id = n.provider_id AND a.aggregate = n.member;
    END IF;
    IF 'joined' = ANY(kinds) THEN
        INSERT INTO provider_aggregates (provider_id, aggregate)
        SELECT * FROM json_to_recordset(of_kind('joined', kinds, written)) AS n (provider_id bigint, member uuid);
    END IF;
    IF 'roots' = ANY(kinds) THEN
        UPDATE reporters SET complete = false
        WHERE root IN (SELECT value::uuid FROM json_array_elements_text(of_kind('roots', kinds, written))) AND complete;
    END IF;
    -- A root that was deleted with its tree belongs to no reporter: the compute service that reports it next has it. The
    -- versions stay, so that a late copy of an older report does not bring it back.
    IF 'disowned' = ANY(kinds) THEN
        UPDATE reporters SET digest = '', complete = false, providers = '{}'
        WHERE root IN (SELECT value::uuid FROM json_array_elements_text(of_kind('disowned', kinds, written)));
    END IF;
    IF 'reporters' = ANY(kinds) THEN
        INSERT INTO reporters (root, reporter, version, digest, complete, providers)
        SELECT n.root, n.reporter, n.version, decode(n.digest, 'hex'), n.complete, n.providers
        FROM json_to_recordset(of_kind('reporters', kinds, written))
            AS n (root uuid, reporter text, version bigint, digest text,
            complete boolean, providers uuid[])
        ON CONFLICT (root, reporter) DO UPDATE SET version = EXCLUDED.version, digest = EXCLUDED.digest,
            complete = EXCLUDED.complete, providers = EXCLUDED.providers, updated_at = now();
    END IF;
    RETURN CASE WHEN cardinality(bodies) > 0 THEN append_changes(firsts, lasts, bodies) ELSE 0 END;
END
$$ LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off;

-- Lock and read each named consumer, then each provider that is wanted or that one of them holds (wanted NULL: none).
-- A consumer that does not exist is written as it will most likely be, so that a plain claim costs nothing for it
-- later; xmax = 0 marks a row that this statement inserted.
-- Returns [[consumer that was there before, ...], [what it holds, ...], [provider with its inventories, ...]].
CREATE FUNCTION lock_claims(consumers uuid[], projects text[], users text[], types text[], generations bigint[],
    attempts integer[], owners text[], wanted uuid[], limited text[], alone boolean, cell text) RETURNS text AS $$
DECLARE
    known json;
    holders uuid[];
    held json;
    held_of bigint[];
    locked bigint[];
    sharing integer;
    providers json;
    usage json;
BEGIN
    WITH locked_rows AS (
        INSERT INTO consumers AS c (uuid, project_id, user_id, consumer_type, generation, attempt, claim_owner)
        SELECT * FROM unnest(lock_claims.consumers, projects, users, types, generations, attempts, owners)
        ON CONFLICT (uuid) DO UPDATE SET uuid = c.uuid
        RETURNING c.uuid, c.generation, c.attempt, c.project_id, c.user_id, c.consumer_type, c.claim_owner,
            c.released_at IS NOT NULL AS released, c.xmax = 0 AS inserted
    )
    SELECT json_agg(json_build_array(uuid, generation, attempt, project_id, user_id, consumer_type, claim_owner)),
        array_agg(uuid) FILTER (WHERE NOT released)
    INTO known, holders FROM locked_rows WHERE NOT inserted;
    IF holders IS NOT NULL THEN
        SELECT json_agg(json_build_array(a.consumer, p.uuid, a.class_id, a.amount)
            ORDER BY a.consumer, p.id, a.class_id), array_agg(p.id)
        INTO held, held_of FROM allocations a JOIN providers p ON p.id = a.provider_id
        WHERE a.consumer = ANY(holders);
    END IF;
    IF wanted IS NOT NULL THEN
        SELECT id INTO sharing FROM traits WHERE name = 'MISC_SHARES_VIA_AGGREGATE';
        SELECT array_agg(p.id) || held_of INTO locked FROM providers p WHERE p.uuid = ANY(wanted);
        -- By number alone: of a condition with UNION ALL a row that had to be waited for is found false, and left out.
        SELECT array_agg(rows.id) INTO locked FROM (
            SELECT p.id FROM providers p WHERE p.id = ANY(locked) ORDER BY p.id FOR NO KEY UPDATE
        ) AS rows;
        SELECT json_agg(json_build_array(p.id, p.uuid, p.generation, p.spec_generation, root.uuid, root.cell, (
            SELECT json_agg(json_build_array(i.class_id, i.capacity, i.min_unit, i.max_unit, i.step_size, i.used))
            FROM inventories i WHERE i.provider_id = p.id
        ), EXISTS (
            SELECT FROM provider_traits t WHERE t.provider_id = p.id AND t.trait_id = sharing
        )) ORDER BY p.id)
        INTO providers FROM providers p JOIN providers root ON root.id = p.root_id WHERE p.id = ANY(locked);
    END IF;
    IF cardinality(limited) > 0 THEN
        PERFORM lock_projects(limited, alone);
        SELECT json_agg(json_build_array(u.project_id, u.class_id, u.amount)) INTO usage FROM project_usage u
        WHERE u.project_id = ANY(limited) AND u.amount <> 0;
    END IF;
    RETURN json_build_array(coalesce(known, '[]'), coalesce(held, '[]'), coalesce(providers, '[]'),
        coalesce(usage, '[]'), coalesce((SELECT c.database_incarnation FROM cells c WHERE c.name = cell), 0));
END
$$ LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off;

-- Lock the rows in one order, after consumers and providers and before the feed's counter: once in a transaction.
-- most: the limits, or NULL. What rises past one raises; the row is locked then, so no other transaction moves it.
CREATE FUNCTION add_project_usage(projects text[], classes integer[], more bigint[], most bigint[]) RETURNS void AS $$
DECLARE
    past boolean;
BEGIN
    IF cardinality(projects) > 0 THEN
        WITH written AS (
            INSERT INTO project_usage AS u (project_id, class_id, amount)
            SELECT n.project_id, n.class_id, n.more FROM unnest(projects, classes, add_project_usage.more)
                AS n (project_id, class_id, more) ORDER BY n.project_id, n.class_id
            ON CONFLICT (project_id, class_id) DO UPDATE SET amount = u.amount + excluded.amount
            RETURNING u.project_id, u.class_id, u.amount
        )
        SELECT bool_or(w.amount > n.most) INTO past FROM written w
        JOIN unnest(projects, classes, add_project_usage.more, add_project_usage.most)
            AS n (project_id, class_id, more, most) ON n.project_id = w.project_id AND n.class_id = w.class_id
        WHERE n.more > 0;
        IF past THEN
            RAISE EXCEPTION 'over a limit';
        END IF;
    END IF;
END
$$ LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off;

-- Claims with limits decide by what their project holds as of a moment, and what they add is looked at again when it is
-- written; so they do not wait for each other's decisions. A group that was passed by others meanwhile locks alone.
-- Taken in one order, after consumers and providers.
CREATE FUNCTION lock_projects(projects text[], alone boolean) RETURNS void AS $$
BEGIN
    IF alone THEN
        PERFORM pg_advisory_xact_lock(locked.key) FROM (
            SELECT DISTINCT hashtextextended('project ' || name, 0) AS key FROM unnest(projects) AS name ORDER BY key
        ) AS locked;
    ELSE
        PERFORM pg_advisory_xact_lock_shared(locked.key) FROM (
            SELECT DISTINCT hashtextextended('project ' || name, 0) AS key FROM unnest(projects) AS name ORDER BY key
        ) AS locked;
    END IF;
END
$$ LANGUAGE plpgsql;

-- Write absolute values, each row once: consumers that go and that change, what they no longer hold and what they hold,
-- what is used, the providers' generations, the changes. Returns [the last change's number, inventories written]: usage
-- may not rise past capacity, whatever the decision was, but for what is running there (`above`); the caller compares.
CREATE FUNCTION write_claims(gone uuid[], changed uuid[], projects text[], users text[], types text[],
    generations bigint[], attempts integer[], owners text[], releases boolean[], stale uuid[], holders uuid[], held_of bigint[],
    held_classes integer[], amounts bigint[], used_of bigint[], used_classes integer[], used_now bigint[],
    above boolean[], moved bigint[], moved_to bigint[], firsts bigint[], lasts bigint[], bodies bytea[],
    usage_projects text[], usage_classes integer[], usage_more bigint[], usage_most bigint[]) RETURNS bigint[] AS $$
DECLARE
    written bigint := 0;
    last bigint := 0;
BEGIN
    IF cardinality(gone) > 0 THEN
        DELETE FROM consumers WHERE uuid = ANY(gone);
    END IF;
    IF cardinality(changed) > 0 THEN
        UPDATE consumers c SET project_id = n.project_id, user_id = n.user_id, consumer_type = n.consumer_type,
            generation = n.generation, attempt = n.attempt, claim_owner = n.claim_owner, updated_at = now(),
            released_at = CASE WHEN n.released THEN now() END
        FROM unnest(changed, projects, users, types, generations, attempts, owners, releases)
            AS n (uuid, project_id, user_id, consumer_type, generation, attempt, claim_owner, released)
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
        FROM unnest(used_of, used_classes, used_now, above) AS n (provider_id, class_id, used, above)
        WHERE i.provider_id = n.provider_id AND i.class_id = n.class_id
            AND (n.above OR n.used <= i.capacity OR n.used <= i.used);
        GET DIAGNOSTICS written = ROW_COUNT;
    END IF;
    PERFORM add_project_usage(usage_projects, usage_classes, usage_more, usage_most);
    IF cardinality(bodies) > 0 THEN
        last := append_changes(firsts, lasts, bodies);
    END IF;
    RETURN ARRAY[last, written];
END
$$ LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off;

-- Take a small group of new claims, each as its first option, or change nothing: NULL, or an exception where a row has
-- changed since it was read. What is not plainly there to be taken, `lock_claims` and `write_claims` decide.
-- wanted: providers, each once, with the spec generations that they must have (NULL: any); held_of: places in it. Each allocation
-- is of another inventory. names: of the classes. limited, usage_*: as for `lock_claims` and `add_project_usage`.
-- Returns [the last change's number, the providers' generations in the order of `wanted`].
CREATE FUNCTION take_new_claims(consumers uuid[], projects text[], users text[], types text[], generations bigint[],
    attempts integer[], owners text[], wanted uuid[], spec_generations bigint[], holders uuid[], held_of integer[],
    held_classes integer[], names text[], amounts bigint[], limited text[],
    usage_projects text[], usage_classes integer[], usage_more bigint[], usage_most bigint[]) RETURNS bigint[] AS $$
DECLARE
    written bigint;
    ids bigint[];
    moved_to bigint[];
    body text;
BEGIN
    INSERT INTO consumers (uuid, project_id, user_id, consumer_type, generation, attempt, claim_owner)
    SELECT * FROM unnest(take_new_claims.consumers, projects, users, types, take_new_claims.generations, attempts, owners)
    WHERE (
        SELECT count(*) FROM unnest(held_of, held_classes, take_new_claims.amounts) AS n (place, class_id, amount)
        JOIN providers p ON p.uuid = wanted[n.place] AND (spec_generations[n.place] IS NULL OR p.spec_generation = spec_generations[n.place])
        JOIN inventories i ON i.provider_id = p.id AND i.class_id = n.class_id AND i.used + n.amount <= i.capacity
            AND n.amount <= i.max_unit AND i.min_unit = 1 AND i.step_size = 1
    ) = cardinality(held_of) AND (cardinality(limited) = 0 OR NOT EXISTS (
        SELECT FROM unnest(usage_projects, usage_classes, usage_more, usage_most)
            AS n (project_id, class_id, more, most)
        LEFT JOIN project_usage u ON u.project_id = n.project_id AND u.class_id = n.class_id
        WHERE coalesce(u.amount, 0) + n.more > n.most
    ))
    ON CONFLICT (uuid) DO NOTHING;
    GET DIAGNOSTICS written = ROW_COUNT;
    IF written = 0 THEN
        RETURN NULL;
    ELSIF written <> cardinality(take_new_claims.consumers) THEN
        RAISE EXCEPTION 'not new';
    END IF;
    IF cardinality(wanted) > 1 THEN
        PERFORM p.id FROM providers p WHERE p.uuid = ANY(wanted) ORDER BY p.id FOR NO KEY UPDATE;
    END IF;
    WITH moved AS (
        UPDATE providers p SET generation = p.generation + 1, updated_at = now()
        FROM unnest(wanted, spec_generations) WITH ORDINALITY AS n (uuid, spec_generation, place)
        WHERE p.uuid = n.uuid AND (n.spec_generation IS NULL OR p.spec_generation = n.spec_generation)
        RETURNING n.place, p.id, p.generation
    )
    SELECT array_agg(m.id ORDER BY m.place), array_agg(m.generation ORDER BY m.place) INTO ids, moved_to FROM moved m;
    IF cardinality(ids) IS DISTINCT FROM cardinality(wanted) THEN
        RAISE EXCEPTION 'gone, or of another spec generation';
    END IF;
    WITH used AS (
        UPDATE inventories i SET used = i.used + n.amount
        FROM unnest(held_of, held_classes, names, take_new_claims.amounts) WITH ORDINALITY
            AS n (place, class_id, name, amount, number)
        WHERE i.provider_id = ids[n.place] AND i.class_id = n.class_id AND i.used + n.amount <= i.capacity
            AND n.amount <= i.max_unit AND i.min_unit = 1 AND i.step_size = 1
        RETURNING n.place, n.number, to_json(n.name) || ':' || i.used AS entry
    ), changed AS (
        SELECT place, count(*) AS entries, string_agg(entry, ',' ORDER BY number) AS used FROM used GROUP BY place
    )
    SELECT sum(c.entries), '[' || string_agg('{"provider":"' || wanted[c.place] || '","generation":'
        || moved_to[c.place] || ',"used":{' || c.used || '}}', ',' ORDER BY c.place) || ']'
    INTO written, body FROM changed c;
    IF written IS DISTINCT FROM cardinality(held_of) THEN
        RAISE EXCEPTION 'full, or no such inventory';
    END IF;
    INSERT INTO allocations (consumer, provider_id, class_id, amount)
    SELECT n.consumer, ids[n.place], n.class_id, n.amount
    FROM unnest(holders, held_of, held_classes, take_new_claims.amounts) AS n (consumer, place, class_id, amount);
    IF cardinality(limited) > 0 THEN
        PERFORM lock_projects(limited, false);
    END IF;
    PERFORM add_project_usage(usage_projects, usage_classes, usage_more, usage_most);
    RETURN append_changes(ARRAY[1], ARRAY[cardinality(wanted)], ARRAY[convert_to(body, 'UTF8')]) || moved_to;
END
$$ LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off;
