"""Alembic migrations of the schema `placement`, and the tables that they lead to."""

from placement_worker.store.tables import METADATA as METADATA
