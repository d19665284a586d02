"""Builds and deletes: admitted, placed by claims, decided, and commanded to a cell."""
