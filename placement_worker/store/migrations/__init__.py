"""Alembic migrations of the schema `placement`."""
