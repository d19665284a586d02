"""The store of the book: the ports, and their adapters for PostgreSQL and for memory."""
