-- How a statement without a transaction around it rolls itself back: by an error, which the server logs.
CREATE FUNCTION rolled_back() RETURNS int LANGUAGE plpgsql AS $$
BEGIN
    RAISE serialization_failure USING MESSAGE = 'berth: a row has changed meanwhile, the work is repeated with locks';
END
$$;
