"""In front of a real Nova: the RPC server of topic `scheduler`, and what it needs to decide as nova-scheduler does."""
