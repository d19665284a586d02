"""Alembic migrations of the schema `cell_<name>`, and the tables that they lead to."""

from cell_conductor.store.tables import METADATA as METADATA
