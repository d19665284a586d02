-- The schema `scheduler`: build requests and the instance-to-cell map.
--
-- A database at the newest migration is exactly this (tests/integration/test_schemas.py). Names are unqualified: the
-- connection's search_path is the schema.

-- request: the message as it came, and digest: a digest of it. A repeat is distinguished from a clash, and a decision can be run
-- again. timeline: JSON lines, only ever appended to, so that one statement appends without reading.
-- claim_in_doubt: what the instance holds may be an earlier request's, and is kept.
-- attempt: that holds the claim, as the cell has announced it last (0: none was claimed).
-- created_at, updated_at: seconds since the epoch. gang: the request that several were made by, gang_min: how many of them
-- start together at least.
-- fillfactor: a row is written three to five times in its first seconds; room on the page keeps these writes cheap.
-- Nothing that changes is indexed, for the same reason.
CREATE TABLE build_requests (
    instance_uuid uuid PRIMARY KEY,
    project_id text NOT NULL,
    flavor text NOT NULL,
    name text NOT NULL,
    request text NOT NULL,
    digest bytea NOT NULL,
    state text NOT NULL,
    sequence bigint NOT NULL,
    attempt integer NOT NULL DEFAULT 0,
    terminal boolean NOT NULL,
    delete_requested boolean NOT NULL DEFAULT false,
    claim_in_doubt boolean NOT NULL DEFAULT false,
    cell text,
    host text,
    code text NOT NULL DEFAULT '',
    reason text NOT NULL DEFAULT '',
    funnel text NOT NULL DEFAULT '[]',
    history text NOT NULL DEFAULT '[]',
    timeline text NOT NULL DEFAULT '',
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    gang uuid,
    gang_min integer
) WITH (fillfactor = 50);
CREATE INDEX build_requests_newest ON build_requests (created_at DESC);
CREATE INDEX build_requests_of_project ON build_requests (project_id, created_at DESC);
CREATE INDEX build_requests_of_gang ON build_requests (gang) WHERE gang IS NOT NULL;

-- mapped_at: seconds since the epoch.
CREATE TABLE instance_cells (
    instance_uuid uuid PRIMARY KEY,
    cell text NOT NULL,
    host_uuid uuid NOT NULL,
    mapped_at double precision NOT NULL
);

-- Requests about instances after their builds: one row each. digest: of the whole message. sequence: of the newest
-- event of the request. cell: where it was dispatched to. command: JSON, what that cell is to do now, of a request that leads
-- into another cell ('': of every other one). A row is written under the lock of its instance's row above.
CREATE TABLE moves (
    request_id uuid PRIMARY KEY,
    instance_uuid uuid NOT NULL,
    project_id text NOT NULL,
    kind text NOT NULL,
    digest bytea NOT NULL,
    state text NOT NULL,
    sequence bigint NOT NULL,
    terminal boolean NOT NULL,
    cell text,
    host text,
    code text NOT NULL,
    reason text NOT NULL,
    funnel text NOT NULL,
    history text NOT NULL,
    created_at double precision NOT NULL,
    command text NOT NULL DEFAULT '',
    updated_at double precision NOT NULL
);
CREATE INDEX moves_of_instance ON moves (instance_uuid, created_at DESC);
CREATE INDEX moves_newest ON moves (created_at DESC);
CREATE INDEX moves_under_way ON moves (request_id) WHERE NOT terminal;

-- What an instance has become since its build; without a row it is as it was built. flavor, image: '' = as built.
-- image_properties: JSON, {image: {name: value}} of images that rebuilds named. under_way: the request without a terminal event. sequence: of the newest event that changed the row.
-- handed: JSON, the departure by which a cell has kept its stopped machine, or '' (scheduler_worker.domain.transfers).
CREATE TABLE instances (
    instance_uuid uuid PRIMARY KEY,
    condition text NOT NULL,
    flavor text NOT NULL,
    image text NOT NULL,
    image_properties text NOT NULL,
    under_way uuid,
    sequence bigint NOT NULL,
    handed text NOT NULL DEFAULT ''
);

-- What operators define at run time, decisions about hosts included (bus.contracts.objects). body: JSON; version: the
-- revision that it was last changed in; changed_at, at: seconds since the epoch. The one row of objects_revision is the
-- lock of every change.
CREATE TABLE objects_revision (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    revision bigint NOT NULL
);
INSERT INTO objects_revision (revision) VALUES (0);
CREATE TABLE objects (
    kind text NOT NULL,
    name text NOT NULL,
    body text NOT NULL,
    version bigint NOT NULL,
    changed_at double precision NOT NULL,
    changed_by text NOT NULL,
    PRIMARY KEY (kind, name)
);
CREATE TABLE object_log (
    revision bigint NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    before text,
    after text,
    at double precision NOT NULL,
    who text NOT NULL,
    why text NOT NULL DEFAULT '',
    forced boolean NOT NULL DEFAULT false,
    PRIMARY KEY (revision, kind, name)
);

-- The instances of drains (objects of kind drain): one row each, written under the lock of the drain's object. position: in
-- the order of the plan. request_id: the newest request to move it. due_at, begun_at: seconds since the epoch.
CREATE TABLE drain_moves (
    drain uuid NOT NULL,
    instance_uuid uuid NOT NULL,
    position integer NOT NULL,
    project_id text NOT NULL,
    source_uuid uuid NOT NULL,
    source text NOT NULL,
    kind text NOT NULL,
    state text NOT NULL,
    host text,
    tries integer NOT NULL,
    failures integer NOT NULL,
    request_id uuid,
    code text NOT NULL,
    reason text NOT NULL,
    due_at double precision NOT NULL,
    begun_at double precision NOT NULL,
    PRIMARY KEY (drain, instance_uuid)
);
CREATE INDEX drain_moves_in_order ON drain_moves (drain, state, position);

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

-- The identity of this database, made with the schema: whose the buses are that its workers enter. A backup takes it along.
CREATE TABLE identity (
    deployment uuid NOT NULL DEFAULT gen_random_uuid(),
    one boolean PRIMARY KEY DEFAULT true CHECK (one)
);
INSERT INTO identity DEFAULT VALUES;
