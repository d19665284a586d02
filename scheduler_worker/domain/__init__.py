"""What the scheduler decides, as plain functions and frozen values: no I/O, no clock, no randomness."""
