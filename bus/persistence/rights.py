"""The rights of a PostgreSQL role in a schema, checked at a start; and the role that owns what is made there."""

from __future__ import annotations

import asyncpg

from bus.faults import DatabaseRightsMissing
from bus.persistence.revision import REVISION_TABLES

MAX_NAMED = 5

MAY_USE = "SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = $1"
# $2: tables that only a migration writes. Sequences of identity columns need no right of their own.
REFUSED = """
SELECT c.relname || ' (' || n.needed || ')'
FROM pg_class c, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) n (needed)
WHERE c.relnamespace = to_regnamespace(quote_ident($1)) AND c.relkind IN ('r', 'p')
    AND (n.needed = 'SELECT' OR c.relname <> ALL ($2)) AND NOT has_table_privilege(c.oid, n.needed)
UNION ALL
SELECT c.relname || ' (USAGE)' FROM pg_class c
WHERE c.relnamespace = to_regnamespace(quote_ident($1))
    AND CASE WHEN c.relkind = 'S' THEN NOT has_sequence_privilege(c.oid, 'USAGE') END
    AND NOT EXISTS (SELECT FROM pg_depend WHERE classid = 'pg_class'::regclass AND objid = c.oid AND deptype = 'i')
UNION ALL
SELECT proname || '() (EXECUTE)' FROM pg_proc
WHERE pronamespace = to_regnamespace(quote_ident($1)) AND NOT has_function_privilege(oid, 'EXECUTE')
ORDER BY 1
"""
# From PostgreSQL 16 on a member may become another role by a right of its own.
OTHER_OWNER = """
SELECT quote_ident(rolname) FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner
WHERE nspname = $1 AND rolname <> current_user AND pg_has_role(
    n.nspowner, CASE WHEN current_setting('server_version_num')::int < 160000 THEN 'MEMBER' ELSE 'SET' END)
"""


async def check_usage(connection: asyncpg.Connection, schema: str) -> None:
    """Raise DatabaseRightsMissing where the schema is there and closed to this role, to which its tables then seem not
    to exist.
    """
    if await connection.fetchval(MAY_USE, schema) is False:
        raise DatabaseRightsMissing(f"permission denied for schema {schema}")


async def check_rights(connection: asyncpg.Connection, schema: str) -> None:
    """Raise DatabaseRightsMissing unless this role may read and write each table of its worker's schema."""
    await check_usage(connection, schema)
    refused = [row[0] for row in await connection.fetch(REFUSED, schema, list(REVISION_TABLES))]
    if refused:
        named = ", ".join(refused[:MAX_NAMED])
        raise DatabaseRightsMissing(f"permission denied in schema {schema}, {len(refused)} rights: {named}")


async def act_as_owner(connection: asyncpg.Connection, schema: str) -> None:
    """Give what this transaction makes in the schema to the schema's owner, if this role may act as that one."""
    if (owner := await connection.fetchval(OTHER_OWNER, schema)) is not None:
        await connection.execute(f"SET LOCAL ROLE {owner}")
