"""A compute service: manages hosts through a driver. Simulated hypervisors, bare metal, a reference for agents."""
