"""Chooses where builds go: reads a replica of placement, decides, claims, dispatches to a cell."""
