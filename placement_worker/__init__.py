"""The resource book: providers, inventories, claims, and the numbered change feed."""
