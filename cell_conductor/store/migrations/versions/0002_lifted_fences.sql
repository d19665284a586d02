CREATE TABLE made (
    at double precision NOT NULL DEFAULT extract(epoch FROM clock_timestamp()),
    one boolean PRIMARY KEY DEFAULT true CHECK (one)
);
-- A schema that no conductor has opened yet is being made now; of another one it is not known when it was made.
INSERT INTO made SELECT FROM identity WHERE origin = '';

CREATE TABLE lifted_fences (
    host_uuid uuid PRIMARY KEY,
    version bigint NOT NULL
);

-- States of berth between the first revision and this one had both as columns of the first.
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = 'fences'::regclass AND attname = 'lifted') THEN
        INSERT INTO lifted_fences SELECT host_uuid, version FROM fences WHERE lifted;
        DELETE FROM fences WHERE lifted;
        ALTER TABLE fences DROP COLUMN lifted;
    END IF;
    IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = 'identity'::regclass AND attname = 'made_at') THEN
        INSERT INTO made (at) SELECT made_at FROM identity ON CONFLICT (one) DO UPDATE SET at = excluded.at;
        ALTER TABLE identity DROP COLUMN made_at;
    END IF;
END
$$;
