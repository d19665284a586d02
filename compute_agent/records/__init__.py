"""A compute service's records of its attempts, and the journal that keeps them across restarts."""
