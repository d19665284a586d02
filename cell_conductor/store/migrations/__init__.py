"""Alembic migrations of the schema `cell_<name>`."""
