"""What the scheduler decides, as plain functions and frozen values: no input or output, no clock, no chance."""
