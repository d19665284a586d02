"""Commands about hosts, services, workers and cells, drains and bare metal; what is up, and the settings."""
