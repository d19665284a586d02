"""Versions of the schema `placement`, oldest first."""
