"""Alembic scripts of schema `scheduler`."""
