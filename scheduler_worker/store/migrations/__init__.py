"""Alembic migrations of the schema `scheduler`."""
