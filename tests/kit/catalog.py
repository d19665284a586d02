"""The content of a schema of PostgreSQL, as lines of text that can be compared: definitions first, rows counted."""

from __future__ import annotations

from typing import Any

import asyncpg

from bus.persistence.revision import REVISION_TABLES

# Each gives (what, definition) rows. $1 is the schema. Columns are in the table's order; a dropped one leaves no trace.
QUERIES = {
    "relation": """
        SELECT c.relname, concat_ws(' ', c.relkind, c.relpersistence, c.reloptions, c.relrowsecurity,
            obj_description(c.oid, 'pg_class'))
        FROM pg_class c WHERE c.relnamespace = $1::regnamespace AND c.relkind <> 'i'
    """,
    "column": """
        SELECT concat_ws('.', c.relname,
                lpad((row_number() OVER (PARTITION BY c.oid ORDER BY a.attnum))::text, 3, '0'), a.attname),
            concat_ws(' ', format_type(a.atttypid, a.atttypmod),
                'collate ' || nullif(a.attcollation, 0)::regcollation::text,
                CASE WHEN a.attnotnull THEN 'not null' END, 'default ' || pg_get_expr(d.adbin, d.adrelid),
                'identity ' || nullif(a.attidentity::text, ''), 'generated ' || nullif(a.attgenerated::text, ''),
                'storage ' || a.attstorage::text, 'compression ' || nullif(a.attcompression::text, ''),
                'options ' || a.attoptions::text, col_description(c.oid, a.attnum))
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE c.relnamespace = $1::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm')
            AND a.attnum > 0 AND NOT a.attisdropped
    """,
    "constraint": """
        SELECT concat_ws('.', t.conrelid::regclass, t.conname), concat_ws(' ', pg_get_constraintdef(t.oid),
            t.condeferrable, t.condeferred, t.convalidated)
        FROM pg_constraint t WHERE t.connamespace = $1::regnamespace
    """,
    "index": """
        SELECT c.relname, concat_ws(' ', pg_get_indexdef(c.oid), c.reloptions, i.indisvalid)
        FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid WHERE c.relnamespace = $1::regnamespace
    """,
    "sequence": """
        SELECT c.relname, concat_ws(' ', format_type(s.seqtypid, NULL), s.seqstart, s.seqincrement, s.seqmin, s.seqmax,
            s.seqcache, s.seqcycle)
        FROM pg_class c JOIN pg_sequence s ON s.seqrelid = c.oid WHERE c.relnamespace = $1::regnamespace
    """,
    "function": """
        SELECT p.oid::regprocedure::text, CASE WHEN p.prokind IN ('f', 'p') THEN pg_get_functiondef(p.oid) END
        FROM pg_proc p WHERE p.pronamespace = $1::regnamespace
    """,
    "trigger": """
        SELECT concat_ws('.', c.relname, g.tgname), concat_ws(' ', pg_get_triggerdef(g.oid), g.tgenabled)
        FROM pg_trigger g JOIN pg_class c ON c.oid = g.tgrelid
        WHERE c.relnamespace = $1::regnamespace AND NOT g.tgisinternal
    """,
    "type": """
        SELECT y.typname, concat_ws(' ', y.typtype, format_type(y.typbasetype, y.typtypmod),
            (SELECT string_agg(e.enumlabel, ', ' ORDER BY e.enumsortorder) FROM pg_enum e WHERE e.enumtypid = y.oid))
        FROM pg_type y WHERE y.typnamespace = $1::regnamespace AND y.typtype IN ('d', 'e', 'r')
    """,
    "view": "SELECT viewname, definition FROM pg_views WHERE schemaname = $1",
}

ROWS = 'SELECT count(*) FROM "{schema}"."{table}"'


async def described(connection: asyncpg.Connection[Any], schema: str) -> list[str]:
    """Every object of the schema with its definition, and how many rows each table holds, in a stated order.

    The schema's own name is left out, and so are the tables of its revisions.
    """
    lines = []
    for kind, query in QUERIES.items():
        for what, definition in sorted(map(tuple, await connection.fetch(query, schema))):
            lines.append(f"{kind} {what}: {definition}")
    for table in await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = $1 ORDER BY 1", schema):
        name = table["tablename"]
        lines.append(f"rows {name}: {await connection.fetchval(ROWS.format(schema=schema, table=name))}")
    plain = (line.replace(f'"{schema}".', "").replace(f"{schema}.", "") for line in lines)
    return [line for line in plain if not any(table in line.split(":")[0] for table in REVISION_TABLES)]
