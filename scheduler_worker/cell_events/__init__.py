"""cell_events."""
