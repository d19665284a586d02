"""Alembic migrations of the schema `scheduler`, and the tables that they lead to."""

from scheduler_worker.store.tables import METADATA as METADATA
