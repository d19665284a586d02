"""Checks from outside: the invariants, and where placement, the records and the hosts disagree."""
