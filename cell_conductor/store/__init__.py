"""Where instances are kept: a port, and PostgreSQL."""
