"""Alembic migrations of the schema `ironic_sync`, and the tables that they lead to."""

from ironic_sync.store.tables import METADATA as METADATA
