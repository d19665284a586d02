"""What is known of hosts and workers, kept in memory: reports, metrics, waiting builds, heartbeats. Pure."""
