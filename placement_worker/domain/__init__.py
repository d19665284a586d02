"""What placement decides: plain functions and values, no I/O."""
