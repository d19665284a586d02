-- The schema of cell_conductor at revision 0001_initial, for readers: derived from cell_conductor/store/tables.py.

CREATE TABLE instances (
    uuid UUID NOT NULL,
    state TEXT NOT NULL,
    host_uuid UUID,
    attempt INTEGER NOT NULL,
    highest_attempt INTEGER DEFAULT 0 NOT NULL,
    source_host_uuid UUID,
    source_attempt INTEGER DEFAULT 0 NOT NULL,
    since DOUBLE PRECISION NOT NULL,
    deadline DOUBLE PRECISION,
    record JSON NOT NULL,
    PRIMARY KEY (uuid)
)
 WITH (fillfactor = 80);

CREATE INDEX instances_deadline ON instances (deadline) WHERE deadline IS NOT NULL;

CREATE INDEX instances_failed ON instances (since) WHERE state IN ('failed', 'transferred/absent');

CREATE INDEX instances_host ON instances (host_uuid) WHERE state NOT IN ('tombstone', 'failed', 'deleted', 'offloaded', 'transferred', 'transferred/absent');

CREATE INDEX instances_over ON instances (since) WHERE state IN ('tombstone', 'deleted');

CREATE INDEX instances_source ON instances (source_host_uuid) WHERE source_host_uuid IS NOT NULL;

CREATE TABLE identity (
    database_id UUID DEFAULT gen_random_uuid() NOT NULL,
    one BOOLEAN DEFAULT true NOT NULL CHECK (one),
    origin TEXT DEFAULT '' NOT NULL,
    database_incarnation INTEGER DEFAULT 1 NOT NULL,
    state TEXT DEFAULT 'open' NOT NULL,
    losses JSON DEFAULT '{}' NOT NULL,
    ended_incarnations JSON DEFAULT '{}' NOT NULL,
    absent JSON DEFAULT '{}' NOT NULL,
    PRIMARY KEY (one)
);

CREATE TABLE sent (
    slot INTEGER NOT NULL,
    sequence BIGINT DEFAULT 0 NOT NULL,
    PRIMARY KEY (slot)
)
 WITH (fillfactor = 10);

CREATE TABLE unknown_machines (
    host_uuid UUID NOT NULL,
    instance_uuid UUID NOT NULL,
    record JSON NOT NULL,
    decision TEXT GENERATED ALWAYS AS (record ->> 'decision') STORED,
    PRIMARY KEY (host_uuid, instance_uuid)
);

CREATE INDEX unknown_machines_instance ON unknown_machines (instance_uuid);

CREATE TABLE breakers (
    service TEXT NOT NULL,
    record JSON NOT NULL,
    PRIMARY KEY (service)
);

CREATE TABLE fences (
    host_uuid UUID NOT NULL,
    record JSON NOT NULL,
    PRIMARY KEY (host_uuid)
);

CREATE TABLE leases (
    service TEXT NOT NULL,
    record JSON NOT NULL,
    PRIMARY KEY (service)
);

CREATE TABLE leader (
    process TEXT DEFAULT '' NOT NULL,
    term BIGINT DEFAULT 0 NOT NULL,
    until DOUBLE PRECISION DEFAULT 0 NOT NULL,
    one BOOLEAN DEFAULT true NOT NULL CHECK (one),
    PRIMARY KEY (one)
);

CREATE TABLE outbox (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    taken_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    bus TEXT NOT NULL,
    body BYTEA NOT NULL,
    PRIMARY KEY (id)
)
 WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);

CREATE INDEX outbox_of_bus ON outbox (bus, taken_at);

ALTER TABLE outbox ALTER COLUMN body SET STORAGE EXTERNAL;

CREATE TABLE handled (
    handler TEXT NOT NULL,
    message_id TEXT NOT NULL,
    at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (handler, message_id)
);

CREATE INDEX handled_at ON handled (at);

INSERT INTO identity DEFAULT VALUES RETURNING identity.one;

INSERT INTO leader DEFAULT VALUES RETURNING leader.one;

INSERT INTO sent (slot) VALUES (0), (1), (2), (3), (4), (5), (6), (7);
