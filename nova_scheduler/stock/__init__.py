"""A stock nova-scheduler beside berth: as fallback, or deciding while berth is compared with it."""
