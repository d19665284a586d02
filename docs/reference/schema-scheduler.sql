-- The schema of scheduler_worker at revision 0001_initial, for readers: derived from scheduler_worker/store/tables.py.

CREATE TABLE build_requests (
    instance_uuid UUID NOT NULL,
    project_id TEXT NOT NULL,
    digest BYTEA NOT NULL,
    state TEXT NOT NULL,
    sequence BIGINT NOT NULL,
    terminal BOOLEAN NOT NULL,
    cell TEXT,
    host TEXT,
    host_uuid UUID,
    code TEXT DEFAULT '' NOT NULL,
    reason TEXT DEFAULT '' NOT NULL,
    funnel TEXT DEFAULT '[]' NOT NULL,
    history TEXT DEFAULT '[]' NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    updated_at DOUBLE PRECISION NOT NULL,
    flavor TEXT NOT NULL,
    name TEXT NOT NULL,
    request TEXT NOT NULL,
    attempt INTEGER DEFAULT 0 NOT NULL,
    claim_owner TEXT NOT NULL,
    timeline TEXT DEFAULT '' NOT NULL,
    gang UUID,
    gang_min_count INTEGER,
    instance TEXT,
    PRIMARY KEY (instance_uuid)
)
 WITH (fillfactor = 50);

CREATE INDEX build_requests_newest ON build_requests (created_at DESC);

CREATE INDEX build_requests_of_gang ON build_requests (gang) WHERE gang IS NOT NULL;

CREATE INDEX build_requests_of_project ON build_requests (project_id, created_at DESC);

CREATE INDEX build_requests_without_host ON build_requests (project_id) WHERE instance::json ->> 'condition' IN ('offloaded', 'moving');

CREATE TABLE instance_actions (
    request_id UUID NOT NULL,
    instance_uuid UUID NOT NULL,
    kind TEXT NOT NULL,
    project_id TEXT NOT NULL,
    digest BYTEA NOT NULL,
    state TEXT NOT NULL,
    sequence BIGINT NOT NULL,
    terminal BOOLEAN NOT NULL,
    cell TEXT,
    host TEXT,
    host_uuid UUID,
    code TEXT DEFAULT '' NOT NULL,
    reason TEXT DEFAULT '' NOT NULL,
    funnel TEXT DEFAULT '[]' NOT NULL,
    history TEXT DEFAULT '[]' NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    updated_at DOUBLE PRECISION NOT NULL,
    transfer TEXT,
    drain UUID,
    PRIMARY KEY (request_id)
);

CREATE INDEX instance_actions_newest ON instance_actions (created_at DESC);

CREATE INDEX instance_actions_of_drain ON instance_actions (drain, terminal, created_at DESC) WHERE drain IS NOT NULL;

CREATE INDEX instance_actions_of_instance ON instance_actions (instance_uuid, created_at DESC);

CREATE INDEX instance_actions_under_way ON instance_actions (request_id) WHERE NOT terminal;

CREATE TABLE objects_revision (
    singleton BOOLEAN DEFAULT true NOT NULL CHECK (singleton),
    revision BIGINT NOT NULL,
    token UUID DEFAULT gen_random_uuid() NOT NULL,
    PRIMARY KEY (singleton)
);

CREATE TABLE objects (
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    body TEXT NOT NULL,
    version BIGINT NOT NULL,
    changed_at DOUBLE PRECISION NOT NULL,
    changed_by TEXT NOT NULL,
    PRIMARY KEY (kind, name)
);

CREATE TABLE object_log (
    revision BIGINT NOT NULL,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    before TEXT,
    after TEXT,
    at DOUBLE PRECISION NOT NULL,
    actor TEXT NOT NULL,
    reason TEXT DEFAULT '' NOT NULL,
    forced BOOLEAN DEFAULT false NOT NULL,
    PRIMARY KEY (revision, kind, name)
);

CREATE TABLE fleet_history (
    minute BIGSERIAL NOT NULL,
    point TEXT NOT NULL,
    PRIMARY KEY (minute)
);

CREATE TABLE cells (
    name TEXT NOT NULL,
    database_incarnation INTEGER NOT NULL,
    sent_sequences BIGINT[] DEFAULT '{}' NOT NULL,
    PRIMARY KEY (name)
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

CREATE TABLE identity (
    database_id UUID DEFAULT gen_random_uuid() NOT NULL,
    one BOOLEAN DEFAULT true NOT NULL CHECK (one),
    PRIMARY KEY (one)
);

INSERT INTO identity DEFAULT VALUES RETURNING identity.one;

INSERT INTO objects_revision (revision) VALUES (0) RETURNING objects_revision.singleton;
