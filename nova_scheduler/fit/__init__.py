"""Does an instance fit a host's hardware: its NUMA cells, its PCI devices? Pure; what the host has comes in."""
