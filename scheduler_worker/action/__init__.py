"""action."""
