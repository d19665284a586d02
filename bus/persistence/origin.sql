-- What a database does not take along when it is restored or promoted: its cluster, the cluster's timeline (a recovery
-- to a point in time and the promotion of a stand-by begin a new one), the database, and a table of the schema. What the
-- role may not read, or the server does not have, is left empty.
CREATE FUNCTION origin_of(relation regclass) RETURNS text LANGUAGE plpgsql AS $$
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
        relation::oid);
END
$$;
