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
