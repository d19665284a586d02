"""Attempts to build an instance on a host: commands decided, run by the driver, and answered."""
