"""Where nodes are read: the port and its adapters."""
