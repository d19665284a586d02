"""Placement: providers, inventories, claims, and the numbered change feed."""
