"""All workers in one process on a virtual clock, from a seed: the same seed gives the same run, event for event."""
