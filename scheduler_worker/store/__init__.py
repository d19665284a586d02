"""The scheduler's store: the port, and its adapters for PostgreSQL and for memory."""
