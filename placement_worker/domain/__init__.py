"""Placement's decisions: plain functions and values, no I/O."""
