"""The hosts of a service: scans, heartbeats, inventory, quarantine, and which of them take builds."""
