"""Alembic scripts of the schema `placement`."""
