"""Alembic's environment for every package of migrations; run by `bus.persistence.migrations.upgrade`."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from bus.persistence.revision import APPLIED

_connection = context.config.attributes["connection"]
assert isinstance(_connection, Connection)

# The connection's search_path is the schema, so migrations name their tables plainly.
context.configure(
    connection=_connection,
    version_table=APPLIED,
    version_table_schema=context.config.attributes["schema"],
    transactional_ddl=True,
)
context.run_migrations()
