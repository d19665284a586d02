"""Build requests and the instance-to-cell map in PostgreSQL."""
