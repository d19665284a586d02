"""Alembic scripts of schema `ironic_sync`."""
