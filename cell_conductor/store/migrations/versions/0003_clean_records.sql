-- A client's text may hold U+0000 in a record of before this was refused: every statement that reads such a record as
-- JSON fails, also for the records beside it. An escaped backslash is kept as it is: what follows it is no escape.
UPDATE instances SET record = regexp_replace(record::text, '(\\\\)|\\u0000', '\1', 'g')::json
WHERE strpos(record::text, '\u0000') > 0;
