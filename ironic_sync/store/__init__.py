"""Where sync positions are kept: the port and its adapters."""
