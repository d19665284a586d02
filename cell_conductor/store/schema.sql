-- The schema `cell_<name>`: the instances of one cell.
--
-- A database at the newest migration is exactly this (tests/integration/test_schemas.py). Names are unqualified: the
-- connection's search_path is the schema.

-- record: the instance as domain.Instance, in JSON; the columns beside it are what is searched by.
-- since, deadline: seconds since the epoch. newest: the highest attempt number given out, where that is not `attempt`.
-- source_host_uuid, source_attempt: the other machine of an instance that moves.
CREATE TABLE instances (
    uuid uuid PRIMARY KEY,
    state text NOT NULL,
    host_uuid uuid,
    attempt integer NOT NULL,
    newest integer NOT NULL DEFAULT 0,
    source_host_uuid uuid,
    source_attempt integer NOT NULL DEFAULT 0,
    since double precision NOT NULL,
    deadline double precision,
    record json NOT NULL
) WITH (fillfactor = 80);
-- Only what the sweep and the reports ask for is indexed: most rows at rest have no deadline.
CREATE INDEX instances_deadline ON instances (deadline) WHERE deadline IS NOT NULL;
CREATE INDEX instances_host ON instances (host_uuid)
    WHERE state IN ('active', 'resized', 'deleting', 'undoing', 'offloading');
CREATE INDEX instances_source ON instances (source_host_uuid) WHERE source_host_uuid IS NOT NULL;
-- For the purge of instances that ended long ago.
CREATE INDEX instances_over ON instances (since) WHERE state IN ('deleted', 'tombstone', 'departed');
CREATE INDEX instances_failed ON instances (since) WHERE state = 'failed';

-- The identity of this cell's database, which marks every machine that the cell orders. It is made with the schema: an
-- empty or another database never takes this one's machines for its own. origin: cell_origin() when the database was
-- last looked at ('': never); one that was restored or promoted since has another. set_back_at: when that was last seen,
-- in seconds since the epoch; a build that was requested before may have been handed in before.
CREATE TABLE identity (
    deployment uuid NOT NULL DEFAULT gen_random_uuid(),
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    origin text NOT NULL DEFAULT '',
    set_back_at double precision NOT NULL DEFAULT 0
);
INSERT INTO identity DEFAULT VALUES;

-- When this schema was made, in seconds since the epoch; an instance may have come from another cell before, into a
-- schema that was here earlier. Without a row a version from before this table made it: it is not known when.
CREATE TABLE made (
    at double precision NOT NULL DEFAULT extract(epoch FROM clock_timestamp()),
    one boolean PRIMARY KEY DEFAULT true CHECK (one)
);
INSERT INTO made DEFAULT VALUES;

-- What a database does not take along when it is restored or promoted: its cluster, the cluster's timeline (a recovery
-- to a point in time and the promotion of a stand-by begin a new one), the database and the table themselves. What the
-- role may not read, or the server does not have, is left empty.
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
$$;

-- Machines that no record explains, and what an operator decided about each. Times in seconds since the epoch.
CREATE TABLE unexplained (
    host_uuid uuid NOT NULL,
    instance_uuid uuid NOT NULL,
    attempt integer NOT NULL,
    service text NOT NULL,
    kind text NOT NULL,
    why text NOT NULL,
    first_seen double precision NOT NULL,
    last_seen double precision NOT NULL,
    verdict text NOT NULL DEFAULT '',
    decided_by text NOT NULL DEFAULT '',
    decided_at double precision NOT NULL DEFAULT 0,
    PRIMARY KEY (host_uuid, instance_uuid)
);

-- The breakers of compute services.
CREATE TABLE breakers (
    service text PRIMARY KEY,
    record json NOT NULL
);

-- What is believed of each compute service (cell_conductor.domain.leases). interval_s: how often it sends a heartbeat;
-- since: when its state began, in seconds since the epoch.
CREATE TABLE leases (
    service text PRIMARY KEY,
    epoch bigint NOT NULL,
    interval_s double precision NOT NULL,
    state text NOT NULL,
    since double precision NOT NULL,
    reason text NOT NULL
);

-- The conductor that records and publishes the leases, until when; its term rises with each change of keeper.
CREATE TABLE lease_keeper (
    process text NOT NULL,
    term bigint NOT NULL,
    until timestamptz NOT NULL,
    one boolean PRIMARY KEY DEFAULT true CHECK (one)
);

-- Hosts that an operator has fenced, and the machines that such a host has lost: no attempt up to this one is wanted
-- there, and its allocation is given up. Who records a loss holds the fence's row; it goes when its host has no losses
-- left. version: of the decision. at: seconds since the epoch.
CREATE TABLE fences (
    host_uuid uuid PRIMARY KEY,
    host text NOT NULL,
    version bigint NOT NULL,
    lifting boolean NOT NULL,
    reason text NOT NULL,
    decided_by text NOT NULL,
    at double precision NOT NULL
);
CREATE TABLE fence_losses (
    host_uuid uuid NOT NULL,
    instance_uuid uuid NOT NULL,
    attempt integer NOT NULL,
    service text NOT NULL,
    at double precision NOT NULL,
    PRIMARY KEY (host_uuid, instance_uuid)
);

-- The decision that lifted a host's last fence: the message of an older one may be delivered again, which would fence a
-- host that is used.
CREATE TABLE lifted_fences (
    host_uuid uuid PRIMARY KEY,
    version bigint NOT NULL
);

-- The outbox: messages that commit with the state that caused them (bus.persistence.outbox). The table is a short-lived
-- heap, so it is vacuumed by count and not by share. A row is large and soon gone: compressing it is most of what
-- writing it would cost.
CREATE TABLE outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_at timestamptz NOT NULL DEFAULT now(),
    taken_at timestamptz NOT NULL DEFAULT now(),
    bus text NOT NULL,
    body bytea NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
ALTER TABLE outbox ALTER COLUMN body SET STORAGE EXTERNAL;

-- Messages that a handler has taken, where its own tables do not show it.
CREATE TABLE handled (
    handler text NOT NULL,
    message_id text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (handler, message_id)
);
CREATE INDEX handled_at ON handled (at);
