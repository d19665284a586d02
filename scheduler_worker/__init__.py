"""Chooses where builds go: reads a replica of the resource book, decides, claims, dispatches to a cell."""
