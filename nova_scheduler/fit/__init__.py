"""Whether an instance's NUMA topology fits a host's, and with which pins: pure, for Nova's hosts and a driver's own."""
