"""The store of placement: the ports, and their adapters for PostgreSQL and for memory."""
