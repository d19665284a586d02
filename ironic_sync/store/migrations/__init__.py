"""Alembic migrations of the schema `ironic_sync`."""
