"""The rights of each role in PostgreSQL, as SQL that may run again: on an empty database, and after a restore."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from berth.config.schemas import CELL_PREFIX, PLACEMENT, SCHEDULER, in_order, quoted
from berth.config.settings import Settings
from berth.permissions import PermissionRole
from ironic_sync.app import role_of, schema_of

# The roles beside the workers'. Each has USAGE of every schema.
OPERATOR, WEB, BACKUP, RESTORE = (f"berth-{name}" for name in ("operator", "web", "backup", "restore"))
READ, WRITE = "SELECT", "SELECT, INSERT, UPDATE, DELETE"


class SchemaRights(Struct, frozen=True):
    """One schema: whose it is, and what the other roles may do with its tables and sequences. {role: rights}"""

    schema: str
    owner: str
    tables: dict[str, str]
    sequences: dict[str, str]


def rights(settings: Settings) -> list[SchemaRights]:
    """Of each schema of the settings. A worker owns its schema, because it makes and migrates it."""
    ironic = settings.ironic_sync.name
    owners = {
        PLACEMENT: f"berth-{PermissionRole.PLACEMENT}",
        SCHEDULER: f"berth-{PermissionRole.SCHEDULER}",
        schema_of(ironic): f"berth-{role_of(ironic)}",
        **{f"{CELL_PREFIX}{cell}": f"berth-{PermissionRole.CONDUCTOR}-{cell}" for cell in settings.cells},
    }
    return [_rights_in(schema, owners[schema]) for schema in in_order(list(owners))]


def _rights_in(schema: str, owner: str) -> SchemaRights:
    """Operators repair placement and decide about machines; the pages decide about machines, and read placement."""
    decides = schema.startswith(CELL_PREFIX) or schema == SCHEDULER
    tables = {OPERATOR: WRITE, WEB: WRITE if decides else READ, BACKUP: READ}
    return SchemaRights(schema, owner, tables, {OPERATOR: "USAGE, SELECT", BACKUP: READ})


def statements(settings: Settings) -> Iterator[str]:
    """Roles without passwords, schemas, owners, grants and default privileges; for a superuser."""
    schemas = rights(settings)
    owners = [one.owner for one in schemas]
    roles = [*owners, OPERATOR, WEB, BACKUP, RESTORE]
    yield "BEGIN;"
    for role in roles:
        yield _ROLE.format(role=_text(role))
    yield _CONNECT.format(roles=_text(_names(roles)), restore=_text(quoted(RESTORE)))
    yield f"GRANT {_names(owners)} TO {quoted(RESTORE)};"
    for one in schemas:
        yield from _of_schema(one)
    yield "COMMIT;"


def _of_schema(one: SchemaRights) -> Iterator[str]:
    schema, owner = quoted(one.schema), quoted(one.owner)
    yield f"CREATE SCHEMA IF NOT EXISTS {schema};"
    yield f"ALTER SCHEMA {schema} OWNER TO {owner};"
    yield _OBJECTS.format(schema=_text(schema), owner=_text(owner))
    yield f"REVOKE ALL ON SCHEMA {schema} FROM PUBLIC;"
    yield f"GRANT ALL ON SCHEMA {schema} TO {owner};"
    yield f"GRANT USAGE ON SCHEMA {schema} TO {_names(list(one.tables))};"
    for kind, granted in (("TABLES", one.tables), ("SEQUENCES", one.sequences)):
        yield f"GRANT ALL ON ALL {kind} IN SCHEMA {schema} TO {owner};"
        for role, allowed in granted.items():
            name = quoted(role)
            yield f"REVOKE ALL ON ALL {kind} IN SCHEMA {schema} FROM {name};"
            yield f"GRANT {allowed} ON ALL {kind} IN SCHEMA {schema} TO {name};"
            default = f"ALTER DEFAULT PRIVILEGES FOR ROLE {owner} IN SCHEMA {schema}"
            yield f"{default} REVOKE ALL ON {kind} FROM {name};"
            yield f"{default} GRANT {allowed} ON {kind} TO {name};"


def _names(roles: list[str]) -> str:
    return ", ".join(quoted(role) for role in roles)


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


_ROLE = """\
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = {role}) THEN
        EXECUTE format('CREATE ROLE %I LOGIN', {role});
    END IF;
END $$;"""
_CONNECT = """\
DO $$ BEGIN
    EXECUTE format('GRANT CONNECT ON DATABASE %I TO %s', current_database(), {roles});
    EXECUTE format('GRANT CREATE ON DATABASE %I TO %s', current_database(), {restore});
END $$;"""
# A sequence that belongs to a column, and the row type of a table, follow their table.
_OBJECTS = """\
DO $$ DECLARE statement text; BEGIN
    FOR statement IN
        SELECT format('ALTER TABLE %s OWNER TO %s', c.oid::regclass, {owner}) FROM pg_class c
        WHERE c.relnamespace = {schema}::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'S')
            AND c.relowner <> {owner}::regrole AND NOT EXISTS (
                SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid
                AND d.deptype IN ('a', 'i') AND d.refclassid = 'pg_class'::regclass)
        UNION ALL
        SELECT format('ALTER ROUTINE %s OWNER TO %s', p.oid::regprocedure, {owner}) FROM pg_proc p
        WHERE p.pronamespace = {schema}::regnamespace AND p.proowner <> {owner}::regrole
    LOOP EXECUTE statement; END LOOP;
END $$;"""
