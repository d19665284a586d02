-- The schema of ironic_sync at revision 0001_initial, for readers: derived from ironic_sync/store/tables.py.

CREATE TABLE positions (
    node UUID NOT NULL,
    version BIGINT NOT NULL,
    published BIGINT DEFAULT 0 NOT NULL,
    report BYTEA,
    digest TEXT DEFAULT '' NOT NULL,
    problem TEXT DEFAULT '' NOT NULL,
    state TEXT,
    updated_at TEXT,
    read_at DOUBLE PRECISION,
    due_at DOUBLE PRECISION,
    absent_since DOUBLE PRECISION,
    PRIMARY KEY (node)
);

CREATE INDEX positions_problem ON positions (node) WHERE problem <> '';

CREATE TABLE leadership (
    one BOOLEAN NOT NULL CHECK (one),
    term BIGINT NOT NULL,
    since TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (one)
);

CREATE TABLE identity (
    database_id UUID DEFAULT gen_random_uuid() NOT NULL,
    one BOOLEAN DEFAULT true NOT NULL CHECK (one),
    PRIMARY KEY (one)
);

INSERT INTO identity DEFAULT VALUES RETURNING identity.one;

INSERT INTO leadership (one, term) VALUES (true, 0);
