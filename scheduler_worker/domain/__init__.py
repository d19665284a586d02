"""The scheduler's decisions, as plain functions and frozen values: no I/O, no clock, no randomness."""
