"""The records of a cell: the port, and its adapters for PostgreSQL and for memory."""
