-- The schema `ironic_sync`: sync positions, and which process is their one writer.
--
-- A database at the newest migration is exactly this (tests/integration/test_schemas.py). Names are unqualified: the
-- connection's search_path is the schema.

-- version: of the last report; published: the last version that placement has taken. report: the message, NULL once the
-- node is gone. updated_at: Ironic's own text. read_at, due_at: seconds since the epoch.
CREATE TABLE positions (
    node uuid PRIMARY KEY,
    version bigint NOT NULL,
    published bigint NOT NULL DEFAULT 0,
    report bytea,
    digest text NOT NULL DEFAULT '',
    problem text NOT NULL DEFAULT '',
    state text,
    updated_at text,
    read_at double precision,
    due_at double precision
);
CREATE INDEX positions_problem ON positions (node) WHERE problem <> '';

-- epoch: raised by each new writer. A writer whose epoch is older writes nothing.
CREATE TABLE leadership (
    one boolean PRIMARY KEY CHECK (one),
    epoch bigint NOT NULL,
    since timestamptz NOT NULL DEFAULT now()
);
INSERT INTO leadership (one, epoch) VALUES (true, 0);

-- The identity of this database, made with the schema: whose the buses are that its workers enter. A backup takes it along.
CREATE TABLE identity (
    deployment uuid NOT NULL DEFAULT gen_random_uuid(),
    one boolean PRIMARY KEY DEFAULT true CHECK (one)
);
INSERT INTO identity DEFAULT VALUES;
