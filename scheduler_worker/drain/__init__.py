"""Hosts that are emptied: drains and evacuations, planned and carried out a move at a time."""
