"""Checks from outside: the invariants, and where the book, the records and the hosts disagree."""
