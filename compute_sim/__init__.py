"""A compute service: manages hosts through a driver. Simulated hypervisors, bare metal, and a reference for real agents."""
