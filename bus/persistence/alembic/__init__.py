"""The environment that every package of migrations runs in (bus.persistence.migrations)."""
