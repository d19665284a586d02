"""The rules: what an event does to an instance, by theme. `table` selects the one that applies. Pure."""
