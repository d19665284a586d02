"""Where the book is kept: the port and its PostgreSQL adapter."""
